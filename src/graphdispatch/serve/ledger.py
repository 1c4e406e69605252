"""``Ledger``: what the graphs of a callable have cost, and what their replays gained; so, when a further one pays."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from time import perf_counter
from typing import Any

from ..capture.request import CaptureResult
from ..memory.entry import CUDAGraphEntry
from ..reasons import Reason
from ..stats import CUDAGraphStats

__all__ = ["Ledger"]

_FIRST_GRAPHS = 8  # that are captured whatever they cost
_LATEST = 16  # graphs whose gains tell what the next one may gain
_LEAST_GAIN_S = 1e-6


class Ledger:
    """What captures and comparisons of a callable's graphs took while calls waited, and what replays gained: seconds.

    The first 8 graphs are captured whatever they cost. After that a size is captured if all graphs together have paid,
    or if its own calls without a graph would have gained as much as a graph costs: who rents until the rent is the
    price pays twice the least at most (Karlin, Manasse, Rudolph and Sleator 1988). What graphs gained beyond the price
    of 8 is not counted, so that no service whose calls begin to change wastes what it gained in a day. Where no gain
    was measured, nothing has to pay. Called with the server's lock held.
    """

    def __init__(self, entries: Callable[[], Iterable[CUDAGraphEntry]], *, has_to_pay: bool) -> None:
        """``entries`` gives the graphs that there are."""
        self._clock = perf_counter
        self._entries = entries
        self._has_to_pay = has_to_pay
        self._captures = 0
        self._spent_s = self._gone_s = 0.0
        self._gains_ms: deque[float] = deque(maxlen=_LATEST)

    def pay(self, run: Callable[..., CaptureResult], *args: Any, is_capture: bool) -> CaptureResult:
        """``run(*args)``, which captures or compares a graph because of a call; and note what that took and showed."""
        if self._captures:
            self._gone_s -= max(self._surplus_s - _FIRST_GRAPHS * self._price_s, 0.0)
        started = self._clock()
        try:
            result = run(*args)
        finally:
            self._spent_s += self._clock() - started
            self._captures += is_capture
        gain = result.entry.gain if result.entry is not None else None
        gain_ms = 0.0 if result.reason is Reason.NO_GAIN else gain.ms if gain is not None else None
        is_told = bool(gain_ms) and gain_ms in self._gains_ms  # by an earlier comparison of the same graph
        if gain_ms is not None and not is_told:
            self._gains_ms.append(gain_ms)
        return result

    def retire(self, entry: CUDAGraphEntry, stats: CUDAGraphStats) -> None:
        """Note what a graph has gained, which goes; nothing if it counts for another callable's ``stats``."""
        if entry.stats is stats:
            self._gone_s += self._gained_s(entry)

    def clear(self) -> None:
        """Forget what graphs cost and gained."""
        self._captures = 0
        self._spent_s = self._gone_s = 0.0
        self._gains_ms.clear()

    def misses_that_pay(self) -> int:
        """At how many calls without a graph a size is captured now; 0 if that does not matter."""
        if not self._has_to_pay or self._captures < _FIRST_GRAPHS or not self._gains_ms:
            return 0
        return 0 if self._surplus_s >= 0 else math.ceil(self._price_s / self._usual_s)

    @property
    def detail(self) -> str:
        """Why a size waits until it pays, with the price of a graph beside what it gains."""
        price, usual = self._price_s, self._usual_s
        return (
            f"{Reason.PAYS_LATER.text}; a replay gains {usual * 1e3:.3g} ms, and a graph takes {price * 1e3:.3g} ms, "
            f"which {math.ceil(price / usual)} calls would have gained"
        )

    @property
    def _price_s(self) -> float:
        return self._spent_s / self._captures

    @property
    def _usual_s(self) -> float:
        return max(median(self._gains_ms) / 1e3, _LEAST_GAIN_S)

    @property
    def _surplus_s(self) -> float:
        return self._gone_s + sum(map(self._gained_s, self._entries())) - self._spent_s

    def _gained_s(self, entry: CUDAGraphEntry) -> float:
        gain_ms = entry.gain.ms if entry.gain is not None else None
        if gain_ms is None:
            gain_ms = median(self._gains_ms) if self._gains_ms else 0.0
        return entry.replay_count * max(gain_ms, 0.0) / 1e3
