"""Entry points for other libraries and for ``torch.compile``."""

from .compile import PiecewiseBackend, piecewise_backend

__all__ = ["PiecewiseBackend", "piecewise_backend"]
