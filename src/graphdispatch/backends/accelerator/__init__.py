"""The backend of every accelerator that torch has graphs for: ``torch.accelerator.Graph``, streams and events.

Importing it does not touch a device.
"""

from .backend import AcceleratorBackend, backend_of

__all__ = ["AcceleratorBackend", "backend_of"]
