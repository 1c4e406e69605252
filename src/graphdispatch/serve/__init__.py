"""The one server behind every door: lookups, hits, captures, failures, counters."""
