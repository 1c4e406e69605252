"""The sweep: many real models, tiny and with random weights, each by graphs and eagerly."""
