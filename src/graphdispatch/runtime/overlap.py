"""Which tensors share memory, by their addresses: two storages may lie over one piece of it, as those of memory which
NumPy made."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch


def addresses_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a strided tensor's first element, and behind its last one; the same twice if it has none."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum(stride * (extent - 1) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))
    return begin, begin + (last + 1) * tensor.itemsize


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a strided tensor may share one place in memory."""
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def share_memory(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether two of these strided tensors may share memory: elements of one lie between those of another."""
    ranges = sorted((begin, end) for begin, end in map(addresses_of, tensors) if begin < end)
    return any(later < end for (_, end), (later, _) in pairwise(ranges))


class Spans:
    """Address ranges of memory that a graph uses and does not own: of all storages of some tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self.spans = tuple(sorted({(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages}))
        self.low = min((begin for begin, _ in self.spans), default=0)
        self.high = max((end for _, end in self.spans), default=0)

    def overlaps(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor takes a part of one of the ranges."""
        first, last = addresses_of(tensor)
        return first < self.high and self.low < last and any(first < end and begin < last for begin, end in self.spans)
