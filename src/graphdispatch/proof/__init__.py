"""What one run of a callable proves of all batches."""
