"""``AutoPlan``: keeps the capture sizes of a live callable fitted to its traffic, working only in its pauses."""

import atexit
import weakref
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from os import PathLike
from pathlib import Path
from typing import NamedTuple, Protocol

from ..copying import MadeAnew
from ..errors import ConfigError
from ..forking import make_lock
from ..memory.backoff import Backoff, Quarantine
from ..reasons import Reason
from ..stats import CUDAGraphStats
from .cost import CostModel
from .online import GraphFigures, LiveTraffic, graphs_of, measured_cost, replan
from .pauses import Pauses
from .plan import Plan
from .profile import Profile

__all__ = ["AutoPlan", "IdleAction", "IdleReport"]

_PLANS_PER_HALF_LIFE = 4
_BACKOFF_FACTOR = 2


class IdleAction(StrEnum):
    """What a call of ``AutoPlan.idle`` did."""

    NOTHING = "nothing"
    """There was nothing to do (too few steps since the latest plan), or no time for it now (see ``Pauses``)."""
    KEPT = "kept"
    """Planned, and stayed with the sizes in use."""
    PLANNED = "planned"
    """Found sizes that pay for their captures."""
    CAPTURED = "captured"
    """Captured one of them."""
    ABANDONED = "abandoned"
    """Gave up the new sizes: a capture failed, or somebody else changed the sizes in use. These stay as they are."""


class IdleReport(NamedTuple):
    """What a call of ``AutoPlan.idle`` did, and why; ``swapped`` says that the new sizes are in use from then on."""

    action: IdleAction
    detail: str
    size: int | None = None
    swapped: bool = False

    def __str__(self) -> str:
        return f"{self.action}: {self.detail}" + ("; the new sizes are in use" if self.swapped else "")


class _Resizable(Protocol):
    """What is asked of the callable, such as a ``Graphed``."""

    @property
    def stats(self) -> CUDAGraphStats: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def mixed_sizes(self) -> tuple[int, ...]: ...
    @property
    def entries(self) -> Sequence[GraphFigures]: ...
    def keep_examples(self) -> None: ...
    def capture_size(self, size: int) -> bool: ...
    def use_sizes(self, sizes: tuple[int, ...]) -> None: ...


class AutoPlan(MadeAnew):
    """Re-plans the sizes of ``step``, a ``Graphed``, by what it really serves: call ``idle()`` in pauses.

    It reads the traffic from the counters that a hit keeps anyway, so that serving takes no longer. A step weighs half
    as much after every ``half_life_steps``. Four times in a half-life it plans the sizes anew: at most ``max_graphs``
    (default: as many as ``step`` has), up to the largest size in use. A size is worth a capture if it is expected to
    save that time within ``horizon_steps`` steps (default: five half-lives). A size whose capture failed is not planned
    for a half-life, and twice as long after each further failure.

    It captures the new sizes in one pause after another while the old ones serve. Then all of them come into use at
    once, and the graphs of other sizes are released. Until then the callable holds both, and its limits should leave
    room for that. If they do not, all new sizes come into use with the first, and the others run eagerly until they are
    captured.

    ``cost`` says what steps take by size. The default is that of ``profile``, else ``CostModel.default()``, which fits
    a large model on a large GPU; give measured costs for any other. What captures take is measured on the graphs of
    ``step``. ``profile``, from an earlier process, is the traffic to begin with. ``save_at_exit`` is a file: the
    profile is saved there when the process ends, if steps were served. That keeps nothing alive. With ``pauses``,
    ``idle`` plans and captures only when those say that there is time; without, whenever it is called.

    Make it before serving: it has ``step`` keep an example of each signature, and captures sizes by these.
    Thread-safe: ``idle`` may run on a thread of its own, and delays calls only while it captures and changes the sizes.
    Raises ``ConfigError`` for arguments that cannot be.
    """

    def __init__(
        self,
        step: _Resizable,
        cost: CostModel | None = None,
        *,
        max_graphs: int | None = None,
        half_life_steps: float = 4000,
        horizon_steps: float | None = None,
        profile: Profile | None = None,
        save_at_exit: str | Path | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        if not hasattr(step, "keep_examples"):
            raise ConfigError(f"step must be a callable with sizes, such as graphed() makes, got {step!r}")
        for name, given, kind in (("cost", cost, CostModel), ("profile", profile, Profile)):
            if given is not None and not isinstance(given, kind):
                raise ConfigError(
                    f"{name} must be a {kind.__name__} or None, got {given!r}; {kind.__name__}.load() reads one"
                )
        if save_at_exit is not None and not isinstance(save_at_exit, str | PathLike):
            raise ConfigError(f"save_at_exit must be the path of a file or None, got {save_at_exit!r}")
        self.step = step
        """The callable."""
        self.max_graphs = len(step.sizes) if max_graphs is None else max_graphs
        """The most sizes of a plan."""
        if not step.sizes:
            raise ConfigError("step must have capture sizes to plan, got none; choose a mode with graphs")
        if step.mixed_sizes not in ((), step.sizes):
            raise ConfigError(
                f"step must pad all calls to one set of sizes, got {len(step.mixed_sizes)} of their own for mixed "
                "batches, which the counters do not tell apart; give graphed() one set"
            )
        if isinstance(self.max_graphs, bool) or not isinstance(self.max_graphs, int) or self.max_graphs < 1:
            raise ConfigError(f"max_graphs must be an integer >= 1, got {max_graphs!r}")
        self._traffic = LiveTraffic(half_life_steps, profile.traffic if profile is not None else None)
        self.horizon_steps = 5 * half_life_steps if horizon_steps is None else horizon_steps
        """The number of steps within which a capture must save its time."""
        if isinstance(self.horizon_steps, bool) or not 0 < self.horizon_steps < float("inf"):
            raise ConfigError(f"horizon_steps must be a finite number above 0, got {horizon_steps!r}")
        self._base = cost or (profile.cost if profile is not None else CostModel.default())
        self._lock = make_lock()
        self._planned_at = 0
        self._steps = 0
        self._before: tuple[int, ...] = ()
        self._after: tuple[int, ...] = ()
        self._todo: list[int] = []
        self._pauses = pauses
        self._failed = Quarantine[int](Backoff(half_life_steps, _BACKOFF_FACTOR))
        step.keep_examples()
        if save_at_exit is not None:
            save = partial(_save, weakref.ref(self), save_at_exit)
            atexit.register(save)
            weakref.finalize(self, atexit.unregister, save).atexit = False

    def idle(self) -> IdleReport:
        """Do one re-plan or one capture, if there is one to do, and say what was done.

        If there is nothing to do, it takes about a microsecond. Raises what ``step.capture_size`` raises.
        """
        with self._lock:
            if self._pauses is not None and not self._pauses.captures_allowed():
                return IdleReport(IdleAction.NOTHING, "this is no pause, or captures have used up their share of time")
            if self._todo:
                return self._capture()
            calls = self.step.stats.calls
            if 0 <= calls - self._planned_at < self._traffic.half_life_steps / _PLANS_PER_HALF_LIFE:
                return IdleReport(IdleAction.NOTHING, "too few steps since the latest plan")
            self._planned_at = calls
            return self._replan()

    @property
    def plan(self) -> Plan:
        """The sizes in use, as a plan."""
        return Plan.from_sizes(self.step.sizes, mode=graphs_of(self._base)[0])

    @property
    def cost(self) -> CostModel:
        """The costs that decide: those given, and in their place what the graphs of ``step`` really took."""
        return measured_cost(self._base, self.step.entries)

    def profile(self) -> Profile:
        """The traffic, sizes and costs so far. Raises ``ConfigError`` before the first step was counted."""
        with self._lock:
            self._update()
            if not self._traffic.weights:
                raise ConfigError("a profile must hold traffic, got none; serve some steps first")
            return Profile.of(self.step.sizes, self._traffic.weights, self.cost)

    def save_profile(self, path: str | Path) -> None:
        """Write the profile to ``path`` as JSON, replacing a file there in one step."""
        self.profile().save(path)

    def __repr__(self) -> str:
        doing = f", {len(self._todo)} captures before other sizes are in use" if self._todo else ""
        return f"<AutoPlan {len(self.step.sizes)} of {self.max_graphs} sizes, {self._steps} steps seen{doing}>"

    def _update(self) -> None:
        self._steps += self._traffic.update(self.step.stats.rows)

    def _replan(self) -> IdleReport:
        self._update()
        self._before = self.step.sizes
        verdict = replan(
            self._traffic.weights,
            self._before,
            {graph.size for graph in self.step.entries},
            self.cost,
            max_graphs=self.max_graphs,
            horizon_steps=self.horizon_steps,
            without=[size for size in range(1, self._before[-1] + 1) if self._failed.blocked(size, self._steps)],
        )
        if verdict.sizes is None:
            return IdleReport(IdleAction.KEPT, verdict.reason)
        self._after, self._todo = verdict.sizes, list(verdict.captures)
        return IdleReport(IdleAction.PLANNED, verdict.reason, swapped=not self._todo and self._swap())

    def _capture(self) -> IdleReport:
        (size, *rest), self._todo = self._todo, []
        if self.step.sizes not in (self._before, self._after):
            return IdleReport(IdleAction.ABANDONED, "the sizes in use were changed")
        held = len(self.step.entries)
        # A capture that raises has failed too.
        self._failed.fail(size, self._steps, Reason.CAPTURE_FAILED, "")
        is_captured = (
            self._pauses.capture(self.step.capture_size, size) if self._pauses else self.step.capture_size(size)
        )
        if not is_captured:
            return IdleReport(IdleAction.ABANDONED, f"{size} rows could not be captured now", size)
        self._failed.forgive(size)
        self._todo = rest
        is_full = len(self.step.entries) <= held
        swapped = (is_full or not rest) and self.step.sizes != self._after and self._swap()
        return IdleReport(IdleAction.CAPTURED, f"{size} rows, {len(rest)} to go", size, swapped)

    def _swap(self) -> bool:
        self.step.use_sizes(self._after)
        return True


def _save(ref: "weakref.ref[AutoPlan]", path: str | Path) -> None:
    plan = ref()
    if plan is not None and plan.step.stats.rows:
        plan.save_profile(path)
