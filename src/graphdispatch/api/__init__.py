"""The public doors: each translates its caller's terms, and guarantees nothing of its own."""
