"""The one server behind every front end: lookups, hits, captures, failures, counters."""
