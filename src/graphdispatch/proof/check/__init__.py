"""The steps of a capture and of a comparison, and what may be served by what they have shown."""
