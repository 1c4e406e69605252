"""The entry: one captured graph with everything that belongs to it. There is one class for all front ends."""

import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from ..backends.base import Backend, Graph, Pool, Stopwatch
from ..backends.tracing import default_device, dispatch_modes, is_transformed, untraced
from ..copying import NotCopied
from ..descriptors import BatchDescriptor, size_text
from ..errors import GuardError, ReplayError, error_of_signal
from ..modes import CUDAGraphMode, EntryState
from ..reasons import Reason
from ..sizes import lengths_of, pack
from ..stats import CUDAGraphStats, Gain
from .attributes import wants_gradient
from .flatten import FlatCall
from .outputs import OutputRule, Outputs
from .overlap import Spans
from .protocols import Guard, Licence, PerCall
from .replay import ReplayPlan, ReplayStage, next_use
from .rules import graph_name
from .signature import ForeignSignature, Signature
from .static_inputs import StaticInputs
from .windows import WINDOWS

_MOST_PLANS = 8192
_TRUSTED = Licence()
_BY_FRONT_END = "serve the batch through the wrapper, manager or dispatcher that has the graph"


@dataclass(eq=False, slots=True, weakref_slot=True, kw_only=True)
class CUDAGraphEntry(NotCopied):
    """One captured graph: what it serves, its buffers, outputs, pool, state and statistics.

    ``capture_time`` is when it was captured, ``capture_time_ms`` how long that took. ``output`` is None once the graph
    is released. ``input_addresses`` are the input pointers. ``key`` is the front end's name for the graph; for a
    manager, (batch size, sequence length). ``replay`` raises ``ReplayError`` for a batch whose padding no comparison
    has tested, since an entry has no eager path.

    Front ends make entries; ``replay`` and ``release`` are thread-safe, and wait for the pool's lock.

    Attributes:
        descriptor: What the graph serves.
        mode: The runtime mode: ``FULL`` or ``PIECEWISE``.
        size: The rows of the graph, padding included.
        graph: The backend's graph.
        pool: The memory of the graph, which other graphs may share.
        backend: The backend that captured it.
        inputs: The static inputs that it reads.
        outputs: What it writes, and how that is returned.
        state: Whether it was compared with eager, failed or was released.
        replay_count: The number of replays.
        last_used: When it was last used, on a clock that counts uses in the process.
    """

    descriptor: BatchDescriptor
    mode: CUDAGraphMode
    size: int
    key: Hashable
    """The front end's name for it: a batch descriptor, a size, a dispatch key, or batch size and sequence length."""
    graph: Graph
    pool: Pool
    backend: Backend
    inputs: StaticInputs
    outputs: Outputs
    mutated: tuple[int, ...] = ()
    """Inputs (by index) that the graph writes to; they are copied back to the caller's tensors."""
    written: Spans | None = None
    """Where the graph writes memory of others; an argument that overlaps it cannot be served by a copy."""
    held: tuple[torch.Tensor, ...] = ()
    """Memory that the graph reads and that is neither its own nor an input; held so that it stays alive."""
    workspaces: "Workspaces | None" = None
    """The part of it whose address is compared on each hit, since no guard of the callable's own state covers it."""
    guard: Guard | None = None
    """What of the callable must be as it was at the capture; None if nobody guards it."""
    licence: Licence = _TRUSTED
    """Which batches it may serve."""
    state: EntryState = EntryState.CAPTURED
    """Whether it was compared on two batches or is trusted, failed, or was released."""
    replay_count: int = 0
    """The number of replays."""
    knows_effects: bool = True
    """Whether the graph's effects are noted here; not so if somebody else captured it, or a plain capturer."""
    verify_at: float = math.inf
    """The number of replays from which on the next batch is compared with eager."""
    verify_every: int | None = None
    """After how many replays a comparison is due again; None: never."""
    capture_time: float = field(default_factory=time.time)
    """When it was captured, in seconds since the epoch, as ``time.time()``."""
    capture_time_ms: float = 0.0
    """How long the capture took, in milliseconds."""
    last_used: int = field(default_factory=next_use)
    gain: Gain | None = None
    """The times of a replay and of an eager run; None if the call could not be run again to time it."""
    uses_rng: bool = False
    """Whether it draws from the device's default random generator."""
    default_device: Any = field(default_factory=default_device)
    """The default device at the capture, if one was set."""
    writes_outside: bool = field(init=False)
    """Whether it writes to arguments or to memory of others, so that a call's arguments must be compared with them."""
    signature: Signature
    """What a call must look like."""
    call: FlatCall | None = None
    """How the captured callable is called."""
    example: Sequence[Any] = ()
    """The values of the captured call, with None in the place of each tensor that is copied."""
    stats: CUDAGraphStats | None = None
    """Where direct replays of the entry count; its front end counts its own calls."""
    _plans: dict[int, ReplayPlan] = field(default_factory=dict)
    _stopwatch: Stopwatch = field(default_factory=partial(Stopwatch, 1))
    times: int = 0
    """Of so many calls the time is known."""
    _total_ms: float = 0.0
    _least_ms: float = math.inf

    def __post_init__(self) -> None:
        self.writes_outside = bool(self.mutated) or self.written is not None
        self.inputs.readers.add(self)
        if self.written is not None:
            WINDOWS.pools[id(self.pool)] = self.pool

    def fits_modes(self) -> bool:
        """Whether the modes of torch around the running call are such that a replay is what eager would do."""
        return default_device() == self.default_device and not (dispatch_modes() or is_transformed())

    @property
    def trains(self) -> bool:
        """Of an entry that is current: whether a call may have to be differentiated by what the graph reads."""
        return self.guard is not None and self.guard.trainable

    def is_current(self) -> bool:
        """Whether the weights, modules, captured variables and workspaces that the graph reads are what and where they
        were at the capture. Needs no lock."""
        return (self.guard is None or self.guard.holds()) and (self.workspaces is None or self.workspaces.holds())

    def per_call(self, rows: int) -> PerCall | None:
        """What a hit of so many rows has to look at in each call, if there is something.

        Args:
            rows: The number of real rows.
        """
        look, workspaces = self.licence.per_call(self, rows), self.workspaces
        if workspaces is None:
            return look
        holds = workspaces.holds
        return lambda values: holds() and (look is None or look(values))

    def passed(self) -> None:
        """Note that the graph agreed with eager on another batch than that of its capture, or is trusted."""
        self.state = EntryState.VERIFIED

    def trust(self) -> None:
        """Serve all batches without any comparison."""
        self.licence = _TRUSTED
        self.passed()

    def failed(self) -> None:
        """Note that it did not agree with eager, or that a replay failed: it serves nothing until it is compared."""
        self.state = EntryState.FAILED

    def schedule_check(self, *, rests: bool = False) -> None:
        """Have a batch compared with eager after as many further replays as the licence says, or none while it
        ``rests``.

        Args:
            rests: Whether no comparison is allowed now.
        """
        self.verify_at = math.inf if rests else self.replay_count + self.licence.compare_after(self)

    @property
    def is_due_again(self) -> bool:
        """Whether the licence wants the next batch compared, after so many replays."""
        return self.replay_count >= self.verify_at

    def note_gain(self, gain: Gain) -> None:
        """Keep what a replay and an eager run took at the capture.

        Args:
            gain: Both times.
        """
        self.gain = gain

    def publish(self, stats: CUDAGraphStats, verify_every: int | None) -> None:
        """Complete the entry, before anybody can see it. From here on its own methods alone change it.

        Args:
            stats: Where direct replays count.
            verify_every: After how many replays a comparison is due; None: never.
        """
        self.stats, self.verify_every = stats, verify_every
        self.schedule_check()

    def use(self) -> None:
        """Count as used now, so that other graphs give way first."""
        self.last_used = next_use()

    def guard_by(self, guard: Guard) -> None:
        """Take another guard of the same state. The caller clears the hits, which keep the former one.

        Args:
            guard: The guard.
        """
        self.guard = guard

    def increment_replay(self) -> None:
        """Count one replay."""
        self.replay_count += 1
        self.last_used = next_use()

    def plan(self, rows: int) -> ReplayPlan:
        """The prepared replay for a number of rows; made once.

        Args:
            rows: The number of real rows.
        """
        plan = self._plans.get(rows)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[rows] = ReplayPlan(self, rows)
        return plan

    def replay_call(
        self, values: Sequence[Any], rows: int, stats: CUDAGraphStats | None = None, *, is_timed: bool = False
    ) -> Any:
        """Copy in, replay, and return the outputs of a call whose arguments were compared. Thread-safe.

        Raises as ``ReplayPlan.run`` does.

        Args:
            values: The flat values of the call.
            rows: The number of real rows.
            stats: Where the hit counts. None: nowhere.
            is_timed: Whether its device time is added to ``avg_replay_time_ms`` once that is known.
        """
        plan = self.plan(rows)
        if WINDOWS.open:
            WINDOWS.wait_for(self)
        if not is_timed:
            return plan.run(values, stats)
        with self.pool.lock:
            marks = self._stopwatch.start(self.backend)
            result = plan.run(values, stats)
            if marks is not None:
                self._stopwatch.stop(marks, self._note_time)
            return result

    def time_replay(self, values: Sequence[Any], rows: int) -> None:
        """Replay for the time alone, for no call: it does not count. Raises as ``replay_call`` does.

        Args:
            values: The flat values of a call.
            rows: The number of real rows.
        """
        with self.pool.lock:
            self.replay_call(values, rows, is_timed=True)
            self.replay_count -= 1
            self.backend.current_stream().synchronize()
            self._stopwatch.collect()

    def fail(self, error: BaseException, before: Any, stage: ReplayStage) -> None:
        """Raise ``ReplayError`` for a replay that stopped half-way.

        After one without effects the caller can run the step eagerly, and the generator is where it was. Returns for an
        error that is the caller's own, which only the graph itself raises, not the copies before and after it; and for
        what a handler of a signal raised.

        Args:
            error: What stopped it.
            before: The state of the random generator before the replay, or None.
            stage: How far it came.
        """
        if self.mutated:
            self.inputs.mark_dirty()
        self.backend.raise_if_lost(error)
        if not isinstance(error, Exception) or error_of_signal(error) is not None:
            return
        failure = error if isinstance(error, ReplayError) else None
        if failure is None:
            is_plain = self.written is None and self.mode is CUDAGraphMode.FULL
            if stage == "run" and not is_plain and not self.backend.is_out_of_memory(error):
                return  # a break's, or one that eager would raise at the same operator, after the same writes
            failure = ReplayError(f"the replay failed: {type(error).__name__}: {error}")
        self.failed()
        if self.knows_effects:
            failure.had_effects |= (self.written is not None or self.graph.runs_code) and stage != "load"
        if before is not None and not failure.had_effects:
            self.backend.set_rng_state(before)
        if failure is not error:
            raise failure from error

    def copy_back(self, values: Sequence[Any], rows: int) -> None:
        """Copy the arguments that the graph wrote back to the caller's tensors. Hold the pool's lock.

        Args:
            values: The flat values of the call.
            rows: The number of real rows.
        """
        for index in self.mutated:
            values[self.inputs.specs[index].position].copy_(self.inputs.real(index, rows, self.size))
        self.inputs.mark_dirty()

    @untraced
    def replay(self, inputs: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Check the inputs, copy them in, and replay the graph.

        Nothing is compared with eager here, so a batch that would have to be compared first is refused. Counts as a hit
        of the front end that captured the graph. Thread-safe.

        Args:
            inputs: The inputs by name, of at most ``size`` rows. None: the static buffers hold them already.

        Returns:
            The outputs of the real rows, owned as the front end's options say.

        Raises:
            GuardError: An input does not fit or needs a gradient. Nothing was copied.
            ReplayError: The graph was released, weights or captured variables have moved, or the batch is not proven:
                its padding is one that no comparison tested, or ``verify_every`` wants it compared.
        """
        self._refuse_unserved()
        if inputs is None:
            return self.plan(self.size).run(None, self.stats)
        values, rows = self.check(inputs)
        batch = f"{rows} rows in a graph of {self.size}"
        if (padding := self.licence.against_padding(rows)) is not None:
            reason, text = padding
            raise ReplayError(f"{batch}: {text or reason.text}")
        if self.licence.wants_look(rows):
            raise ReplayError(f"{batch}: {Reason.PADDING_UNPROVEN.text}; or {_BY_FRONT_END}, which compares it")
        return self.replay_call(values, rows, self.stats, is_timed=True)

    def _refuse_unserved(self) -> None:
        """Raise ``ReplayError`` if no batch may be replayed now, whatever it holds."""
        if self.backend.is_watched():
            raise ReplayError(Reason.INSIDE_CAPTURE.text)
        if not self.fits_modes():
            raise ReplayError(Reason.MODE_ACTIVE.text)
        if forward_ad._current_level >= 0:
            raise ReplayError(f"forward-mode differentiation is under way: {Reason.NEEDS_GRADIENTS.text}")
        if not self.is_current():
            raise ReplayError(f"weights or captured variables of the graph for {self.key} moved; capture it again")
        if torch.is_grad_enabled() and self.trains:
            raise ReplayError(f"what the graph reads trains, so {Reason.NEEDS_GRADIENTS.text}; use torch.no_grad()")
        if self.is_due_again:
            raise ReplayError(
                f"the graph for {self.key} must be compared with eager now (verify_every); {_BY_FRONT_END}"
            )

    def check(self, inputs: Mapping[str, Any]) -> tuple[Sequence[Any], int]:
        """The flat values of a call and its number of rows, for ``replay_call``.

        Args:
            inputs: The inputs by name. Every copied tensor must be given; static tensors and constants may be, and must
                be those of the capture.

        Returns:
            The values, and the number of rows.

        Raises:
            GuardError: An input does not fit.
        """
        names = [spec.name for spec in self.inputs.specs]
        places = {leaf.path: place for place, leaf in enumerate(self.call.leaves if self.call is not None else ())}
        if not isinstance(inputs, Mapping) or not set(names) <= inputs.keys() <= places.keys():
            given = list(inputs) if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
            raise GuardError(f"inputs must be named {names}, got {given}")
        if torch.is_grad_enabled() and any(map(wants_gradient, inputs.values())):
            raise GuardError("an input requires a gradient, which no graph gives; use torch.no_grad() or detach() it")
        values = list(self.example)
        for name, value in inputs.items():
            values[places[name]] = value
        rows = self.signature.match_in_any_mode(values)
        if rows < 0:
            raise GuardError(self.signature.misfit(values))
        rows = rows if self.signature.has_rows else self.size
        axes = self.inputs.axes
        own, full = lengths_of(axes, rows), lengths_of(axes, self.size)
        if not all(1 <= length <= most for length, most in zip(own, full, strict=True)):
            raise GuardError(f"inputs must have 1 to {self.size} rows for this graph, got {pack(axes, own)}")
        clash = self.plan(rows).clash(values)
        if clash is not None:
            raise GuardError(f"{clash}; pass copies")
        if misfit := self.licence.misfit(values):
            raise GuardError(f"{misfit}; or capture with a call like this one")
        return values, rows

    def _note_time(self, elapsed: float) -> None:
        self.times += 1
        self._total_ms += elapsed
        self._least_ms = min(self._least_ms, elapsed)

    @property
    def replay_ms(self) -> float:
        """The shortest replay that was timed, copies included, in milliseconds; infinite before the first."""
        return min(self._least_ms, self.gain.replay_ms if self.gain is not None else math.inf)

    @property
    def avg_replay_time_ms(self) -> float:
        """Mean device time of the calls timed so far (``replay``, managers), copies included, in milliseconds.

        0.0 before the first. A call is not timed while the device has not finished an earlier timed one.
        """
        with self.pool.lock:
            self._stopwatch.collect()
            return self._total_ms / self.times if self.times else 0.0

    @property
    def label(self) -> str:
        """The captured callable and the size, as ranges of torch's profiler name them: ``decode 8``."""
        return graph_name(self.call.fn, self.key) if self.call is not None else size_text(self.key)

    @property
    def batch_descriptor(self) -> BatchDescriptor:
        """``descriptor``, by the name that vLLM's entries have for it."""
        return self.descriptor

    @property
    def cudagraph(self) -> Graph:
        """``graph``, by the name that vLLM's entries have for it."""
        return self.graph

    @property
    def input_addresses(self) -> tuple[int, ...]:
        """The addresses of the static inputs, or those that a registered graph was said to read; none once released."""
        if isinstance(self.signature, ForeignSignature):
            return self.signature.addresses or ()
        return () if self.is_released else tuple(view.data_ptr() for view in self.inputs.views(self.size))

    @property
    def output(self) -> Any:
        """The outputs in graph memory, padding rows included; the next replay of the pool overwrites them.

        None once the graph was released: an entry does not keep the memory of its outputs alive, whatever
        ``weak_ref_output`` says. A tensor that somebody else took from here stays as long as they hold it.
        """
        return self.outputs.tree

    @property
    def is_released(self) -> bool:
        """Whether the graph was given back, by its owner or to make room for others."""
        return self.state is EntryState.EVICTED

    @property
    def nbytes(self) -> int:
        """Bytes that releasing this entry alone frees; its pool and the shared inputs are not among them."""
        return self.graph.nbytes

    def release(self) -> None:
        """Give the graph back; idempotent. Waits for a call that is using it. Raises ``CaptureError`` within one."""
        self.pool.refuse_changes()
        with self.pool.lock:
            if not self.is_released:
                self.state = EntryState.EVICTED
                # Outputs in the pool go first: a pool that is released gives back only what nobody holds.
                self.held = ()
                self.outputs = Outputs(None, OutputRule(()), (), "clone", self.pool)
                self._plans = {}
                self.workspaces = self.guard = None
                self.graph.reset()
                self.inputs.leave(self)

    def __repr__(self) -> str:
        return (
            f"<CUDAGraphEntry {self.mode.name} {self.size} rows, {self.state.value}, "
            f"{self.replay_count} replays, {self.nbytes} bytes>"
        )


GraphEntry = CUDAGraphEntry
"""The older name of the same class."""


class Workspaces:
    """Memory that a graph reads but that no guard covers, such as a library's workspace. It is neither the graph's own
    nor one of its inputs. ``holds()`` tells whether it is still where it was, and as large."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._spans = self._read()

    def holds(self) -> bool:
        """Whether no storage has grown, shrunk or moved."""
        return self._read() == self._spans

    def _read(self) -> list[tuple[int, int]]:
        return [(storage.data_ptr(), storage.nbytes()) for storage in self._storages]
