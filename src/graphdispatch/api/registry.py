"""``CUDAGraphRegistry``: graphs by (batch size, sequence length), captured from functions of named tensors."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ..backends import get_backend
from ..call.rules import ArgumentRules
from ..call.signature import Refusal
from ..call.spec import CallSpec
from ..capture.request import CaptureResult
from ..config import CUDAGraphConfig
from ..descriptors import BatchDescriptor
from ..errors import CaptureError, ConfigError
from ..memory.accounting import memory_report
from ..memory.budget import MemoryBudget
from ..memory.cache import make_cache
from ..memory.entry import CUDAGraphEntry
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..serve.graphset import GraphSet
from ..serve.group import GraphGroup
from ..sizes import check_count
from ..state.guards import same_callable
from ..stats import CUDAGraphStats, EvictionReason

__all__ = ["CUDAGraphRegistry", "Member"]

Shapes = Mapping[str, Sequence[int]]
Key = tuple[int, int]
_MOST_WAITING = 8  # callables of one key that have no graph


class Member(NamedTuple):
    """One callable under a key, with a number of its own there."""

    place: tuple[Key, int]
    graphs: GraphSet

    @property
    def group(self) -> GraphGroup | None:
        """What is known of its calls, once a capture was tried."""
        return self.graphs.groups.get(self.place)

    @property
    def entry(self) -> CUDAGraphEntry | None:
        """Its graph, if there is one whose workspaces are where they were."""
        return None if self.group is None else self.graphs.current(self.group, self.place[0][0])


class CUDAGraphRegistry:
    """Graphs by (batch size, sequence length); all share one pool, one cache and one set of statistics.

    A function takes its static inputs by name, as keyword arguments, and returns a tensor or a nest of tensors. Every
    input's dimension 0 is the batch unless ``dynamic`` (name to dimension) says which inputs have one and where.
    A key has one graph, but for callers that capture what comes often, one for each callable. ``budget`` is one that
    other front doors share. Thread-safe.
    """

    def __init__(self, config: CUDAGraphConfig | None = None, *, budget: MemoryBudget | None = None) -> None:
        self.config = CUDAGraphConfig.or_default(config, "config")
        self._backend = get_backend(self.config.backend)
        self._pool = self._backend.make_pool()
        self.stats = CUDAGraphStats()
        """Captures, replays, hits, misses and reasons over all graphs."""
        self._cache = make_cache(self.config, budget, self.stats)
        self._sets: dict[Key, dict[int, GraphSet]] = {}
        self.admission = self._cache.admission
        """For callers that capture what comes often (``CUDAGraphManager``)."""

    def capture(
        self,
        batch_size: int,
        seq_len: int,
        capture_fn: Callable[..., Any],
        input_shapes: Shapes | None = None,
        output_shapes: Shapes | None = None,
        *,
        inputs: Mapping[str, torch.Tensor] | None = None,
        dynamic: Mapping[str, int] | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        size: int | None = None,
    ) -> CUDAGraphEntry:
        """Capture ``capture_fn`` for ``batch_size`` rows, replacing an older graph of the key; returns its entry.

        With ``size`` the graph has that many rows, of which the example fills ``batch_size``, and its key is
        ``(size, seq_len)``.

        The example it is captured and checked with is ``inputs``, or zeros of ``input_shapes`` (float32 unless
        ``dtypes`` says otherwise). What the runs write is put back. ``output_shapes`` are checked if given.
        Raises ``ConfigError`` for arguments that contradict each other, ``CaptureError`` if there can be no graph.
        """
        check_callable("capture_fn", capture_fn)
        example = self._example(batch_size, input_shapes, inputs, dtypes)
        size = batch_size if size is None else size
        if size < batch_size:
            raise ConfigError(f"size must be at least batch_size={batch_size}, got {size!r}")
        key = (size, seq_len)
        if not all(same_callable(graphs.fn, capture_fn) for graphs in self._sets.get(key, {}).values()):
            self.remove(*key)
        member = self.member(key, capture_fn)
        outcome = self.run_and_capture(member, example, batch_size, dynamic=dynamic, keep_effects=False)
        if outcome.entry is None:
            raise CaptureError(
                f"no graph for batch_size={batch_size}, seq_len={seq_len}: {outcome.detail}", outcome.reason
            ) from outcome.error
        try:
            check_output_shapes(outcome.answer, output_shapes)
        except ConfigError:
            self.remove(size, seq_len)
            raise
        return outcome.entry

    def get(self, batch_size: int, seq_len: int) -> CUDAGraphEntry | None:
        """The entry of exactly this key, or None; of several callables' that which was used last."""
        return max(self._entries((batch_size, seq_len)), key=lambda entry: entry.last_used, default=None)

    def has(self, batch_size: int, seq_len: int) -> bool:
        """Whether there is a graph for exactly this key now."""
        return self.get(batch_size, seq_len) is not None

    def remove(self, batch_size: int, seq_len: int) -> bool:
        """Release what there is for a key; whether there was a graph."""
        entries = self._entries((batch_size, seq_len))
        self._sets.pop((batch_size, seq_len), None)
        for entry in entries:
            self._cache.remove(entry.key)
            entry.release()
        return bool(entries)

    def invalidate(self, tag: str = "") -> None:
        """Release all graphs, since what they captured changed in a way that no guard sees; ``tag`` says what, for
        ``stats.last_evictions``."""
        self._rearm(EvictionReason.INVALIDATED, tag)

    def sleep(self, tag: str = "") -> None:
        """Release all graphs, their buffers and the pool, until captures bring them back."""
        self._backend.synchronize()
        self._rearm(EvictionReason.ASLEEP, tag)
        self._sets.clear()
        self._renew_pool()

    def _rearm(self, reason: EvictionReason, tag: str) -> None:
        for graphs in [graphs for sets in self._sets.values() for graphs in sets.values()]:
            with graphs.lock:
                graphs.rearm(reason, tag)

    def clear(self) -> None:
        """Release all graphs. The statistics stay."""
        self._sets.clear()
        self.admission.clear()
        for entry in self._cache.clear():
            entry.release()
        self._renew_pool()

    def _renew_pool(self) -> None:
        self._pool.close()
        self._pool = self._backend.make_pool()

    def __repr__(self) -> str:
        return f"<CUDAGraphRegistry {self.num_graphs} of {self.config.max_cached_graphs} graphs, {self.stats!r}>"

    @property
    def num_graphs(self) -> int:
        """How many graphs there are now."""
        return len(self._cache)

    @property
    def memory_bytes(self) -> int:
        """Bytes held by the pool, the graphs, and their static inputs and output buffers."""
        return memory_report(self._cache, [self._pool]).total

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache's accounting is off."""
        self._cache.check_integrity()

    def member(self, key: Key, fn: Callable[..., Any]) -> Member:
        """``fn`` under ``key``. Of the callables without a graph, the eight that were wanted last are remembered."""
        sets = self._sets.setdefault(key, {})
        number = self._number(key, fn)
        if number is None:
            waiting = [n for n in sets if self._cache.get(((key, n), key[0])) is None]
            number = waiting[0] if len(waiting) >= _MOST_WAITING else len(sets)
            self.admission.forget(((key, number), key[0]))
            sets.pop(number, None)
            sets[number] = GraphSet(fn, self.config.options, self._cache, backend=self._backend, pool=self._pool)
        return Member((key, number), sets[number])

    def latest_member(self, key: Key) -> Member | None:
        """The callable under ``key`` that was sighted last, or None."""
        number = next(reversed(self._sets.get(key, {})), None)
        return Member((key, number), self._sets[key][number]) if number is not None else None

    def _number(self, key: Key, fn: Callable[..., Any]) -> int | None:
        return next((n for n, graphs in self._sets.get(key, {}).items() if same_callable(graphs.fn, fn)), None)

    def _entries(self, key: Key) -> list[CUDAGraphEntry]:
        found = [self._cache.get(((key, number), key[0])) for number in self._sets.get(key, {})]
        return [entry for entry in found if entry is not None]

    def refusal(self, key: Hashable) -> Refusal | None:
        """Why a cache key without a graph is not captured now, or None. Counts nothing."""
        reason = self.admission.decide(key, self._cache)
        return None if reason is Reason.CAPTURED_NOW else Refusal(reason, self.admission.detail(reason, key))

    def sight(self, member: Member) -> None:
        """Count a call that ran eagerly since its callable has no graph yet; so many end a quarantine."""
        key, number = member.place
        self.admission.sight((member.place, key[0]))
        self._sets[key][number] = self._sets[key].pop(number)  # at the end: in the order of their latest sightings
        if member.group is not None:
            member.group.sightings[key[0]] += 1

    def needs_gradients(self, key: Key, fn: Callable[..., Any], inputs: Mapping[str, torch.Tensor]) -> bool:
        """Whether a call of ``fn`` with gradients on may have to be differentiated."""
        return self.member(key, fn).graphs.needs_gradients((), dict(inputs))

    def run_and_capture(
        self,
        member: Member,
        inputs: Mapping[str, torch.Tensor],
        rows: int,
        *,
        dynamic: Mapping[str, int] | None = None,
        keep_effects: bool = True,
    ) -> CaptureResult:
        """Run a callable on ``inputs`` of ``rows`` rows and capture it for its key's batch size; the outcome holds
        eager's answer.

        For callers that serve a step (``CUDAGraphManager``); ``capture`` is the plain door.
        """
        graphs, group, size = member.graphs, member.group, member.place[0][0]
        form = CallSpec(graphs.fn, 0, tuple(inputs))
        with torch.no_grad(), graphs.lock:
            values = form.values((), inputs)
            leaves = group.caller.flatten(values) if group is not None else None
            if group is None or leaves is None or group.signature.match(leaves) < 0:
                rules = ArgumentRules(batch_dims(inputs, rows, dynamic), {}, frozenset())
                made = graphs.make_group(member.place, form, values, rules, size)
                if isinstance(made, Refusal):
                    return CaptureResult(None, None, made.reason, made.detail)
                group, leaves = made
            assert leaves is not None
            descriptor = BatchDescriptor(size)
            return graphs.capture(
                group, leaves, rows, size, descriptor=descriptor, mode=CUDAGraphMode.FULL, keep_effects=keep_effects
            )

    def _example(
        self,
        batch_size: int,
        input_shapes: Shapes | None,
        inputs: Mapping[str, torch.Tensor] | None,
        dtypes: Mapping[str, torch.dtype] | None,
    ) -> Mapping[str, torch.Tensor]:
        check_count("batch_size", batch_size)
        if inputs is None:
            if not input_shapes:
                raise ConfigError("input_shapes must name the inputs and their shapes, or give inputs= as an example")
            device = self._backend.device
            return {
                name: torch.zeros(shape, dtype=(dtypes or {}).get(name, torch.float32), device=device)
                for name, shape in _checked_shapes("input_shapes", input_shapes).items()
            }
        check_input_shapes(inputs, input_shapes)
        return inputs


def check_callable(name: str, fn: Any) -> None:
    """Raise ``ConfigError`` that names the argument if ``fn`` cannot be called."""
    if not callable(fn):
        raise ConfigError(f"{name} must be callable, got {fn!r}")


def check_input_shapes(inputs: Mapping[str, torch.Tensor], shapes: Shapes | None) -> None:
    """Raise ``ConfigError`` if ``inputs`` are no mapping of tensors, or not what ``shapes`` says."""
    if not isinstance(inputs, Mapping):
        raise ConfigError(f"inputs must be a mapping from name to tensor, got a {type(inputs).__name__}")
    for name, tensor in inputs.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"input {name!r} must be a tensor, got {tensor!r}; give others to the callable itself")
    for name, shape in _checked_shapes("input_shapes", shapes or {}).items():
        if name not in inputs:
            raise ConfigError(f"input_shapes names {name!r}, which inputs does not; inputs are {list(inputs)}")
        if tuple(inputs[name].shape) != shape:
            raise ConfigError(
                f"input {name!r} must have shape {shape} as input_shapes says, got {tuple(inputs[name].shape)}"
            )


def check_output_shapes(outputs: Any, shapes: Shapes | None) -> None:
    """Raise ``ConfigError`` if ``outputs`` are not what ``shapes`` says: by key for a mapping, else in order."""
    if not shapes:
        return
    named = outputs if isinstance(outputs, Mapping) else dict(zip(shapes, tree_leaves(outputs), strict=False))
    for name, shape in _checked_shapes("output_shapes", shapes).items():
        if not isinstance(named.get(name), torch.Tensor) or tuple(named[name].shape) != shape:
            found = tuple(named[name].shape) if isinstance(named.get(name), torch.Tensor) else named.get(name)
            raise ConfigError(f"output {name!r} must have shape {shape} as output_shapes says, got {found}")


def _checked_shapes(argument: str, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    try:
        checked = {name: tuple(map(index, shape)) for name, shape in shapes.items()}
    except (AttributeError, TypeError):
        raise ConfigError(f"{argument} must map names to shapes, as {{'x': (8, 64)}}, got {shapes!r}") from None
    if any(length < 0 for shape in checked.values() for length in shape):
        raise ConfigError(f"{argument} must hold lengths >= 0, got {shapes!r}")
    return checked


def batch_dims(inputs: Mapping[str, torch.Tensor], rows: int, dynamic: Mapping[str, int] | None) -> Mapping[str, int]:
    """The batch dimension of each input that has one. Raises ``ConfigError`` for inputs without ``rows`` rows."""
    if dynamic is not None:
        for name in dynamic:
            if name not in inputs:
                raise ConfigError(f"dynamic names {name!r}, which is no input; inputs are {list(inputs)}")
        return dynamic
    for name, tensor in inputs.items():
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise ConfigError(
                f"input {name!r} has shape {tuple(tensor.shape)}, whose dimension 0 is not batch_size={rows}; "
                "say in dynamic={name: dimension} which inputs have a batch dimension"
            )
    return dict.fromkeys(inputs, 0)
