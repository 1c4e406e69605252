"""*How* a step runs: graph modes, what a dispatcher does with a call, and the states of an entry."""

from enum import Enum, IntEnum


class CUDAGraphMode(IntEnum):
    """How batches are served: without a graph, by graphs between breaks, by one graph, or by kind of batch.

    ``NONE``, ``PIECEWISE`` and ``FULL`` are *runtime* modes: each batch runs in one of them. ``FULL_DECODE_ONLY`` and
    ``FULL_AND_PIECEWISE`` are *configured* modes. The names and their meanings are vLLM's
    (``vllm/config/compilation.py``).

    Attributes:
        NONE: No graph; the batch runs eagerly.
        PIECEWISE: Graphs between the parts that ``eager_break`` marks.
        FULL: One graph of the whole step.
        FULL_DECODE_ONLY: ``FULL`` for uniform decode batches, ``NONE`` for all others.
        FULL_AND_PIECEWISE: ``FULL`` for uniform decode batches, ``PIECEWISE`` for all others.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = 3
    FULL_AND_PIECEWISE = 4

    def has_graphs(self) -> bool:
        """Whether graphs serve any batch in this mode."""
        return self is not CUDAGraphMode.NONE

    def decode_mode(self) -> "CUDAGraphMode":
        """The runtime mode of a uniform decode batch."""
        return CUDAGraphMode.FULL if self >= CUDAGraphMode.FULL else self

    def mixed_mode(self) -> "CUDAGraphMode":
        """The runtime mode of any other batch."""
        if self is CUDAGraphMode.FULL_DECODE_ONLY:
            return CUDAGraphMode.NONE
        if self is CUDAGraphMode.FULL_AND_PIECEWISE:
            return CUDAGraphMode.PIECEWISE
        return self

    def separate_routine(self) -> bool:
        """Whether different graphs serve uniform decode batches and mixed batches."""
        return self.decode_mode() is not self.mixed_mode()

    def has_full_cudagraphs(self) -> bool:
        """Whether any batch is served by one graph of the whole step."""
        return CUDAGraphMode.FULL in (self.decode_mode(), self.mixed_mode())

    def has_piecewise_cudagraphs(self) -> bool:
        """Whether any batch is served by graphs between eager breaks."""
        return CUDAGraphMode.PIECEWISE in (self.decode_mode(), self.mixed_mode())


class DispatchMode(Enum):
    """What a dispatcher did with one call.

    Attributes:
        EAGER: It ran the eager runner.
        CUDAGRAPH: A full graph served it.
        PIECEWISE: Graphs between eager breaks served it.
        HYBRID: No call's mode; while it is enabled, the policy chooses between kinds of graphs at each call.
    """

    EAGER = "eager"
    CUDAGRAPH = "cudagraph"
    PIECEWISE = "piecewise"
    HYBRID = "hybrid"

    # Members are compared by identity. Enum's own hash would cost a Python call at every look-up.
    __hash__ = object.__hash__


class EntryState(Enum):
    """The state of an entry.

    Attributes:
        CAPTURED: Captured, and its first replay agreed with eager.
        VERIFIED: A second, different batch agreed too, or its capturer trusts it: a hit only copies, replays and
            slices.
        FAILED: A comparison or a replay failed; it may be compared again.
        EVICTED: Released; never replayed again.
    """

    CAPTURED = "captured"
    VERIFIED = "verified"
    FAILED = "failed"
    EVICTED = "evicted"
