"""What a capture on CUDA does more than one on another accelerator.

Note [cuBLAS workspaces]
    cuBLAS calls use a scratch buffer that torch keeps for each handle and stream. A graph holds its raw address.
    Without care, the first capture allocates that buffer in *its* pool, and all later captures on the stream use the
    same buffer. When any graph of that stream is released, torch drops the buffer (pytorch#193402), and the other
    graphs write to memory that may be gone or belong to someone else. We therefore clear the buffers twice. We clear
    them before each capture, so that the capture allocates its own buffer inside its pool. We clear them after it, so
    that the buffer is free in the pool, like any intermediate, and nobody else can take it. From then on torch has no
    buffer of the capture stream to drop, so releasing a graph harms no other graph. Graphs of one pool may share those
    bytes, for the same reason as intermediates: only one of them runs at a time. The price is one buffer in each pool.
    One case remains: torch can only clear the buffers of *all* streams. If somebody else captured a graph after
    warming up on the same stream, its buffer lies outside its pool, and that graph may lose it. The same happens when
    ``torch.compile`` records graphs.
"""

import torch

from ..accelerator.graph import AcceleratorCapture

__all__ = ["CUDACapture"]


class CUDACapture(AcceleratorCapture):
    """A capture on CUDA."""

    def prepare(self) -> None:
        """Forget the workspaces, and make room."""
        torch._C._cuda_clearCublasWorkspaces()  # Note [cuBLAS workspaces]
        _make_room(self._pool.device)

    def clean_up(self) -> None:
        """Forget the workspaces of the capture."""
        torch._C._cuda_clearCublasWorkspaces()  # Note [cuBLAS workspaces]


def _make_room(device: torch.device) -> None:
    """Return cached memory to the driver if most of the memory that this process may still use is cached.

    The allocator cannot do that by itself during a capture; it would report that no memory is left.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    if reserved - torch.cuda.memory_allocated(device) > min(free, allowed - reserved):
        torch.cuda.empty_cache()
