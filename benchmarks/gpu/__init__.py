"""What graphs are worth on a GPU: every figure beside its peers, from one run. See ``python -m benchmarks.gpu -h``."""
