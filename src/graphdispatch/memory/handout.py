"""How answers are handed out: as the callable made them, behind handles, or in tensors that the caller gave."""

from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_leaves

from ..call.spec import is_tensor
from ..config import CUDAGraphOptions
from ..errors import ConfigError
from .outputs import OutputRule, OutputView

if TYPE_CHECKING:
    from .buffers import OutputBuffers

__all__ = ["Handout"]


class Handout:
    """What becomes of answers, by the options and ``out``: a tensor or a nest of them into which all outputs go.

    Raises ``ConfigError`` for an ``out`` that cannot take outputs, or with options that contradict it. Thread-safe.
    """

    def __init__(self, options: CUDAGraphOptions, out: Any = None) -> None:
        if out is not None and options.outputs != "clone":
            raise ConfigError(f"out must come with outputs='clone', got outputs={options.outputs!r}")
        self.out = None
        """The caller's tensors, if any; checked."""
        if out is not None:
            self.out = _given().CallerBuffers(out, 0).given
        self._options = options
        self._returns_handles = options.returns_handles

    def make_buffers(self, capacity: int) -> "OutputBuffers | None":
        """The places for copies of a group's outputs, of at most ``capacity`` rows, if they go to such."""
        if self.out is not None:
            buffers: OutputBuffers = _given().CallerBuffers(self.out, capacity)
            return buffers
        if not self._options.ring_length:
            return None
        from .buffers import OutputRing  # here, as below

        return OutputRing(self._options.ring_length, capacity)

    def give(self, answer: Any) -> Any:
        """What an eager step returned, as a hit would hand it out. A ``ConfigError`` of an ``out`` that it does not
        fit has the answer, which is not lost."""
        if self.out is not None:
            try:
                return _given().copy_into(self.out, answer)
            except ConfigError as error:
                error.answer = answer
                raise
        return OutputView(answer, None) if self._returns_handles else answer

    def check_room(self, rule: OutputRule | None, rows: int, largest: int) -> None:
        """Raise ``ConfigError`` if ``out`` has no room for a batch above the largest size, before the callable runs.

        Before a capture has shown which dimensions follow the batch (``rule``), it is taken to be the first one of each
        tensor that has room for the largest size there.
        """
        if self.out is None or rows <= largest:
            return
        tensors = [leaf for leaf in tree_leaves(self.out) if is_tensor(leaf)]
        guessed = [((0, 1),) if tensor.dim() and tensor.shape[0] >= largest else () for tensor in tensors]
        for tensor, dims in zip(tensors, rule.follows if rule is not None else guessed, strict=True):
            if any(tensor.shape[dim] < rows * factor for dim, factor in dims):
                raise ConfigError(
                    f"out has no room for {rows} rows in a tensor of shape {tuple(tensor.shape)}; give a larger one, "
                    "or smaller batches"
                )


def _given() -> Any:
    """What ``out=`` needs; loaded when it is given, since few callers do."""
    from . import given

    return given
