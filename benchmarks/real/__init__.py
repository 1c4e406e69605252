"""Programs of other libraries as people write them, tiny and with random weights: what graphs are worth to each."""
