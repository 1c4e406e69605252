"""What a call looks like: its form, the user's rules for its arguments, padding, and its signature."""
