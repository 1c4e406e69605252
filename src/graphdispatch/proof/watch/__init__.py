"""One run of the callable, watched: what it reads, writes and dispatches, and what code of Python it runs."""
