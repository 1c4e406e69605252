"""Entry points for other libraries."""
