"""What a call looks like: its spelling, the user's rules for its arguments, padding, and its signature."""
