"""Capturing a callable: the watched eager run, the recording, piecewise graphs, and the comparison with eager."""
