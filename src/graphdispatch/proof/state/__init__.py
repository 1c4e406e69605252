"""The state that a callable reaches besides its arguments, and whether it changed."""
