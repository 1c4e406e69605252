"""Ranks that share a callable's collectives: what keeps them in step while graphs are captured and compared.

Note [ranks in step]
    A call that a graph serves, or that runs eagerly, is one run of the callable. One that captures or compares is
    several, each with the callable's collectives. How many there are follows from what a rank finds: a graph of its
    own that is gone, state that no graph can hold, a batch to compare. A rank that finds something else alone would
    leave the others in a collective, or its next one would meet theirs, with wrong values. So they agree, by a
    function that the engine gives:

    before a call        one rank runs eagerly: all do. One has no graph: all capture. One has to compare: all compare.
    before a further run all make the same one, or none does
    behind the last run  a graph that one refuses is refused by all

    Once captures and comparisons are frozen, a call is one run on each rank whatever it finds. Then nobody agrees on
    anything, and calls are hits.

    Two things are out of reach. An error in the midst of a run on one rank leaves the others in that run, as it does
    without graphs: until their group's timeout, or until the process of the rank ends. The eager run shows nearly all
    that no graph can hold, and goes on to its end; but code that queries whether somebody captures, or is compiled, may
    do such a thing in a recording that runs. And ranks must make the same calls in the same order, under the same modes
    of torch.
"""

from collections.abc import Callable, Sequence
from operator import index
from zlib import crc32

from ..errors import CaptureError, ConfigError, shown
from ..reasons import Reason

Least = Callable[[Sequence[int]], Sequence[int]]
"""Gets integers, as many on each rank, and returns for each place the least one of all ranks. It is collective."""

_OF_A_GRAPH = (Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.EXACT)
_ORDER = (*(reason for reason in Reason if not (reason.is_graph or reason in _OF_A_GRAPH)), *_OF_A_GRAPH)
"""What a rank may find, each for all: the first that a rank finds is what all do. ``EXACT`` stands for every replay."""
_PLACES = {reason: place for place, reason in enumerate(_ORDER)} | dict.fromkeys(
    (reason for reason in Reason if reason.is_graph), len(_ORDER) - 1
)
UNEQUAL = "the ranks do not run the call equally often for this graph, and its collectives would wait for ever"


class Ranks:
    """The other ranks, as one of them sees them: see Note [ranks in step]. Only one thread may use it.

    Args:
        least: What the engine gives.
    """

    def __init__(self, least: Least) -> None:
        self._least = least
        self._has_parted = False
        """Whether ranks have parted in the capture or comparison under way: no rank makes a further run of it."""

    def choose(self, own: Reason) -> Reason:
        """What all ranks do with a call.

        Args:
            own: What this one would do.

        Returns:
            ``own``, if all would do that; a reason to run eagerly, that of another rank unless this one has its own;
            or what another rank has to do: ``CAPTURED_NOW`` or ``VERIFIED_NOW``.
        """
        self._has_parted = False
        least, _ = self._range_of(_PLACES[own])
        return own if _PLACES[own] < len(_ORDER) - len(_OF_A_GRAPH) or least == _PLACES[own] else _ORDER[least]

    def begin_run(self, stage: str) -> None:
        """Begin a further run of a capture or comparison.

        Args:
            stage: Which run it is, in words.

        Raises:
            CaptureError: Another rank makes no such run, with its reason.
        """
        least, most = self._range_of(len(_ORDER) + crc32(stage.encode()))
        if least != most:
            self._has_parted = True
            reason, text = _refusal(least)
            raise CaptureError(text, reason)

    def end(self, own: Reason, *, is_good: bool) -> tuple[Reason, str] | None:
        """End a capture or comparison.

        Args:
            own: What came of it.
            is_good: Whether there is a graph.

        Returns:
            Why there is none though this rank has one, in a word and in detail; None if that is not so.
        """
        if self._has_parted:
            self._has_parted = False
            return None
        least, most = self._range_of(_PLACES[own])
        return _refusal(least) if is_good and least != most else None

    def _range_of(self, number: int) -> tuple[int, int]:
        """The least and the largest of the numbers of all ranks."""
        answer = self._least((number, -number))
        try:
            least, most = map(index, answer)
        except (TypeError, ValueError):
            raise ConfigError(
                f"agree must return as many integers as it gets, the least of each of all ranks, got {shown(answer)}"
            ) from None
        return least, -most


def _refusal(least: int) -> tuple[Reason, str]:
    """Why there is no graph, by the least of what ranks found."""
    reason = _ORDER[least] if least < len(_ORDER) else Reason.CAPTURED_NOW
    if reason in _OF_A_GRAPH:
        return Reason.CAPTURE_FAILED, UNEQUAL
    return reason, f"another rank refused it: {reason.text}"
