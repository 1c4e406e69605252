"""What graphs keep: entries, static inputs, outputs; the cache, its budgets, who is admitted and who is evicted."""
