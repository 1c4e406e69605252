"""What serves calls: signatures, decisions, static inputs, replay, outputs, entries, the cache and the server."""
