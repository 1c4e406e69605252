"""The graphs of a ``CudagraphDispatcher``, and what they decide for every key: one immutable thing, swapped whole."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..decide.decision import Decision
from ..decide.memo import Memo
from ..descriptors import BatchDescriptor, DispatchKey
from ..errors import ConfigError, check_type, shown
from ..memory.entry import CUDAGraphEntry
from ..modes import CUDAGraphMode, DispatchMode, EntryState
from ..reasons import Reason
from ..serve.group import Route
from ..serve.server import Server
from .external_graphs import Replayable
from .key_table import KeyTable

__all__ = [
    "GRAPH_MODES",
    "Candidates",
    "Registered",
    "RegisteredGraphs",
    "Slot",
    "attempt",
    "check_key",
    "checked_example",
]

GRAPH_MODES = {DispatchMode.CUDAGRAPH: CUDAGraphMode.FULL, DispatchMode.PIECEWISE: CUDAGraphMode.PIECEWISE}
"""The modes that a graph can be registered in, the better first, and the runtime mode of each."""

Slot = tuple[DispatchKey, DispatchMode]
_MOST_KEPT = 16384  # keys


@dataclass(frozen=True, eq=False)
class Registered:
    """A graph as it was registered, its entry, and the route by which the server serves it.

    Registering a graph again makes another one, with a route of its own: what is done to the older one, by a call that
    chose it before, does not touch the newer one.
    """

    key: DispatchKey
    mode: DispatchMode
    graph: Replayable | CUDAGraphEntry
    entry: CUDAGraphEntry
    route: Route

    @property
    def slot(self) -> Slot:
        """What it is registered for."""
        return self.key, self.mode

    @property
    def is_captured(self) -> bool:
        """Whether the worker captured it; else somebody else did, and only they release it."""
        return self.route.entry is None

    @property
    def place(self) -> Hashable:
        """Its key in the worker's cache."""
        return self.entry.place if self.is_captured else self.route.key

    @property
    def is_gone(self) -> bool:
        """Whether the graph was released, or failed when it was last replayed or compared."""
        return self.entry.state in (EntryState.EVICTED, EntryState.FAILED)


class Candidates(NamedTuple):
    """What may serve a key: by mode, the better first, the graph and its decision; and why eager does, without one."""

    graphs: Mapping[DispatchMode, tuple[Registered, Decision]]
    modes: tuple[DispatchMode, ...]
    eager: Decision


class RegisteredGraphs:
    """Registered graphs and the enabled modes; ``candidates[key]`` is what they decide for a key. Immutable.

    The keys of graphs are those of two ``KeyTable``, for decode and for prefill, which never serve each other. A decode
    key whose tokens are a multiple of its requests is uniform decode. A graph that pads serves smaller batches with
    sequences of at most the same length (those of unknown length, if its own is); any other graph is a variant of its
    own, which only its key selects.
    """

    def __init__(self, graphs: Mapping[Slot, Registered], modes: frozenset[DispatchMode]) -> None:
        self.graphs = MappingProxyType(dict(graphs))
        self.modes = modes
        self.candidates = Memo[DispatchKey, Candidates](self._find, _MOST_KEPT)
        """For each key what may serve it; the first lookup of a key goes to the tables, later ones to a dictionary."""
        self._by_descriptor = {_place(found): found for found in self.graphs.values()}
        self._tables = {is_prefill: self._table(is_prefill) for is_prefill in (False, True)}

    def _table(self, is_prefill: bool) -> KeyTable:
        keys: dict[CUDAGraphMode, list[BatchDescriptor]] = {mode: [] for mode in GRAPH_MODES.values()}
        for kind, mode, descriptor in self._by_descriptor:
            if kind is is_prefill:
                keys[mode].append(descriptor)
        return KeyTable(keys, mode=CUDAGraphMode.FULL_AND_PIECEWISE)

    def _find(self, key: DispatchKey) -> Candidates:
        if not isinstance(key, DispatchKey):
            raise ConfigError(f"key must be a DispatchKey, got {shown(key)}; create_dispatch_key() makes one")
        found = {mode: best for mode in GRAPH_MODES if (best := self._best(key, mode)) is not None}
        enabled = {mode: best for mode, best in found.items() if mode in self.modes}
        eager = Decision.eager(Reason.DISABLED, key.num_tokens) if found else self._why_none(key)
        return Candidates(enabled, (*enabled, DispatchMode.EAGER), eager)

    def _best(self, key: DispatchKey, mode: DispatchMode) -> tuple[Registered, Decision] | None:
        for variant in (key, key.max_seq_len or None):
            decision = self._decide(key, variant, frozenset((CUDAGraphMode.NONE, GRAPH_MODES[mode])))
            if decision.descriptor is not None:
                return self._by_descriptor[key.is_prefill, decision.mode, decision.descriptor], decision
        return None

    def _why_none(self, key: DispatchKey) -> Decision:
        decision = self._decide(key, key.max_seq_len or None, None)
        if decision.reason is Reason.VARIANT_NOT_CAPTURED:
            return Decision.eager(Reason.NOT_CAPTURED, key.num_tokens)
        return decision

    def _decide(self, key: DispatchKey, variant: Any, allowed: frozenset[CUDAGraphMode] | None) -> Decision:
        return self._tables[key.is_prefill].decide(key.num_tokens, key.num_reqs, _query_len(key), variant, allowed)


def _query_len(key: DispatchKey) -> int | None:
    """The tokens of each request of uniform decode; None for a batch that is not, or not for certain."""
    if key.is_prefill or key.num_reqs < 1 or key.num_tokens % key.num_reqs:
        return None
    return key.num_tokens // key.num_reqs


def _place(found: Registered) -> tuple[bool, CUDAGraphMode, BatchDescriptor]:
    """The table, mode and descriptor of a registered graph; each has its own."""
    key, mode = found.key, GRAPH_MODES[found.mode]
    is_uniform = mode is CUDAGraphMode.FULL and _query_len(key) is not None
    variant = (key.max_seq_len or None) if found.entry.inputs.has_rows else key
    return key.is_prefill, mode, BatchDescriptor(key.num_tokens, key.num_reqs, is_uniform, variant)


def attempt(server: Server, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any, Decision]:
    """Serve a call by a verified graph: whether one did, its answer, and the decision. Never runs the callable.

    Raises ``ReplayError`` if the graph cannot be replayed.
    """
    choice = server.preview(route, args, kwargs)
    if choice.entry is None or not choice.decision.reason.is_graph:
        return False, None, choice.decision
    with torch.no_grad():
        answer = server.observed(choice.entry, choice.rows, choice.leaves)
    server.local.decision = choice.decision
    return True, answer, choice.decision


def check_key(key: Any) -> None:
    """Raise ``ConfigError`` unless ``key`` is the key of a batch."""
    if not isinstance(key, DispatchKey) or type(key.num_tokens) is not int or key.num_tokens < 1:
        raise ConfigError(
            f"key must be a DispatchKey with num_tokens >= 1, got {shown(key)}; create_dispatch_key() makes one"
        )


def checked_example(
    key: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an example call. Raises ``ConfigError`` for what is no key, and for what are no arguments."""
    check_key(key)
    check_type("args", args, (tuple, list), "a tuple of positional arguments, as (x,)")
    check_type("kwargs", {} if kwargs is None else kwargs, Mapping, "a mapping from names to arguments, or None")
    return tuple(args), dict(kwargs or {})
