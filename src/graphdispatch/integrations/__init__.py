"""Where other libraries' entry points meet this one's."""

from .compile import PiecewiseBackend, piecewise_backend

__all__ = ["PiecewiseBackend", "piecewise_backend"]
