"""The public front ends: each translates its caller's terms, and guarantees nothing of its own."""
