"""Which graph serves a batch, and why: pure decisions over plain data. Needs no torch."""
