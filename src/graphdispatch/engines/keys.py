"""Which graph serves a batch, by the keys of the graphs that there are: the table, and vLLM's dispatcher over it.

A batch is uniform decode (every request schedules the same number of tokens, its *query length*) or mixed. The table
prefers FULL to PIECEWISE, then the nearest size, then the nearest variant, then a uniform graph to a general one, then
the graph that was captured for fewer requests.

Note [decisions on demand]
    A table of a thousand sizes and eight variants has some hundred thousand decisions, and traffic needs a few
    hundred of them. Each is made at its first lookup, by a search from the first size that is large enough, and kept.
    So making a table costs no more than to sort its keys, and every later decision, hit or miss, is a lookup.
"""

import sys
import warnings
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Mapping
from itertools import chain, islice, product
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from ..config import parse_mode
from ..copying import MadeAnew, Unlocked, make_lock
from ..descriptors import BatchDescriptor
from ..errors import ConfigError, FallbackError, check_count, check_type, shown
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..runtime.decide import Decision, Memo
from ..sizes import check_sizes, named_sizes

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
RUNTIME_MODES = frozenset((NONE, PIECEWISE, FULL))
"""The modes that one batch can run in."""

_Answer = tuple[CUDAGraphMode, BatchDescriptor | None]
_Keys = Mapping[CUDAGraphMode, frozenset[BatchDescriptor]]
_Kind = tuple[int, int | None, Hashable]
"""What decides, besides its tokens, which graphs may serve a batch: requests, query length and variant."""
_Batch = tuple[int, int | None, int | None, Hashable, frozenset[CUDAGraphMode]]
"""The arguments of ``KeyTable.decide``."""


def request_limit(key: BatchDescriptor) -> int:
    """The most requests that a batch may have for the graph of ``key``; ``sys.maxsize`` if only its tokens limit it."""
    num_tokens, num_reqs, is_uniform_decode, _ = key
    if num_reqs is None or is_uniform_decode or num_reqs >= num_tokens:
        return sys.maxsize
    return num_reqs


def query_len_of(key: BatchDescriptor, default: int | None) -> int | None:
    """The query length that a uniform graph serves: ``default`` if its key names no requests. None if no batch fits."""
    if key.num_reqs is None:
        return default if default and key.num_tokens % default == 0 else None
    return key.num_tokens // key.num_reqs if key.num_reqs > 0 and key.num_tokens % key.num_reqs == 0 else None


class KeyTable(MadeAnew):
    """Every decision that a set of keys allows. Immutable and thread-safe.

    ``mode`` is the configured mode and ``query_len`` the uniform query length. Both are None until the keys are
    initialised, and until then no graph serves. No batch has more than ``max_num_reqs`` requests. See Note [decisions
    on demand].
    """

    def __init__(
        self,
        keys: Mapping[CUDAGraphMode, Collection[BatchDescriptor]],
        *,
        mode: CUDAGraphMode | None = None,
        query_len: int | None = None,
        max_num_reqs: int | None = None,
    ) -> None:
        self.keys: _Keys = MappingProxyType({graph: frozenset(keys.get(graph, ())) for graph in (PIECEWISE, FULL)})
        """All keys, by runtime mode."""
        self.mode, self.query_len, self.max_num_reqs = mode, query_len, max_num_reqs
        self._ranked: dict[CUDAGraphMode, list[BatchDescriptor]] = {}
        """By mode, FULL first, the keys that can serve a batch, in order of preference."""
        for graph in (FULL, PIECEWISE) if mode is not None else ():
            usable = (key for key in self.keys[graph] if graph is FULL or not key.is_uniform_decode)
            self._ranked[graph] = sorted(usable, key=_rank)
        self._decisions = Memo[_Batch, Decision](self._decide)
        self.answers = Memo[tuple[BatchDescriptor, bool], _Answer](self._answer)
        """What a descriptor is dispatched to, with full graphs or without: the exact full graph, a general full one, a
        general piecewise one."""

    def decide(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
        query_len: int | None = None,
        variant: Hashable = None,
        allowed: frozenset[CUDAGraphMode] = RUNTIME_MODES,
    ) -> Decision:
        """The decision for any batch, by a graph of a mode that is allowed; see ``CudagraphKeyDispatcher.decide``."""
        return self._decisions[num_tokens, num_reqs, query_len, variant, allowed]

    def _decide(self, batch: _Batch) -> Decision:
        """Make a decision, at its first lookup."""
        num_tokens, num_reqs, query_len, variant, allowed = batch
        _check_batch(num_tokens, query_len, allowed)
        if query_len is not None:
            reqs = num_tokens // query_len if num_reqs is None else num_reqs
            query_len = query_len if reqs * query_len == num_tokens else None
        if num_reqs is None:
            num_reqs = min(num_tokens // (query_len or 1), self.max_num_reqs or num_tokens)
        for graph in self._ranked if num_tokens else ():
            key = self._first(graph, num_tokens, (num_reqs, query_len, variant)) if graph in allowed else None
            if key is not None:
                reason = Reason.EXACT if key.num_tokens == num_tokens else Reason.PADDED
                return Decision(graph, key, key.num_tokens, reason, num_tokens)
        decision = self._miss(query_len, variant, allowed, num_tokens)
        if NONE not in allowed and num_tokens:
            raise FallbackError(
                f"allowed_modes must hold NONE for a batch that no graph serves, got {_names(allowed)} for "
                f"{num_tokens} tokens: {decision.explain()}; allow NONE, or capture a graph for it",
                decision.reason,
            )
        return decision

    def _first(self, graph: CUDAGraphMode, num_tokens: int, kind: _Kind) -> BatchDescriptor | None:
        """The best key of one mode with room for a batch."""
        keys = self._ranked[graph]
        larger = islice(keys, bisect_left(keys, num_tokens, key=_tokens), None)
        return next((key for key in larger if self._serves(key, kind)), None)

    def _serves(self, key: BatchDescriptor, kind: _Kind) -> bool:
        """Whether the graph of a key serves batches of a kind, whatever their tokens."""
        num_reqs, query_len, variant = kind
        if not _takes(key.variant, variant):
            return False
        if key.is_uniform_decode:
            return query_len is not None and query_len_of(key, self.query_len) == query_len
        return num_reqs <= request_limit(key)

    def _miss(
        self, query_len: int | None, variant: Hashable, allowed: frozenset[CUDAGraphMode], num_tokens: int
    ) -> Decision:
        """The eager decision for a batch that no graph serves, with the reason."""
        kind = 0, query_len, variant
        keys = list(chain.from_iterable(self._ranked.values()))
        variants = {key.variant for key in keys}
        lengths = {query_len_of(key, self.query_len) for key in keys if key.is_uniform_decode} - {None}
        largest = max((key.num_tokens for key in keys if self._serves(key, kind)), default=0)
        roomy = {graph for graph in self._ranked if self._first(graph, num_tokens, kind) is not None}
        reason, detail = Reason.NOT_CAPTURED, ""
        if not num_tokens:
            reason = Reason.NO_ROWS
        elif self.mode is None:
            reason = Reason.NOT_INITIALIZED
        elif not keys:
            reason = Reason.DISABLED if self.mode is NONE else Reason.NOT_CAPTURED
        elif not any(_takes(captured, variant) for captured in variants):
            reason = Reason.VARIANT_NOT_CAPTURED
            detail = f"{reason.text} (wanted: {variant!r}, captured: {_names(variants)})"
        elif roomy:
            reason = Reason.MODE_EXCLUDED if allowed.isdisjoint(roomy) else Reason.TOO_MANY_REQUESTS
        elif largest:
            reason = Reason.ABOVE_LARGEST_SIZE
            detail = f"the batch is larger than the largest graph for it ({largest}); capture a larger size"
        elif lengths and query_len is None:
            reason = Reason.MIXED_BATCH
        elif lengths:
            reason = Reason.QUERY_LEN_NOT_CAPTURED
            detail = f"{reason.text} (wanted: {query_len}, captured: {_names(lengths)})"
        return Decision.eager(reason, num_tokens, detail)

    def _answer(self, question: tuple[BatchDescriptor, bool]) -> _Answer:
        """What vLLM 0.11.1's rules give for a batch that the caller has padded."""
        wanted, has_full = question
        check_type("batch_descriptor", wanted, BatchDescriptor, "a BatchDescriptor")
        if self.mode is None:
            return NONE, None
        if wanted.is_uniform_decode and has_full and wanted in self.keys[FULL]:
            return FULL, wanted
        for mode in (FULL, PIECEWISE) if has_full else (PIECEWISE,):
            if wanted.non_uniform in self.keys[mode]:
                return mode, wanted.non_uniform
        if wanted.num_reqs is None:
            return NONE, None
        # A key without a number of requests serves every number of them, but no uniform batch of another length.
        is_uniform = wanted.is_uniform_decode and wanted.num_reqs * (self.query_len or 0) == wanted.num_tokens
        return self._answer((wanted._replace(num_reqs=None, is_uniform_decode=is_uniform), has_full))


_tokens = attrgetter("num_tokens")


def _rank(key: BatchDescriptor) -> tuple[int, int, bool, int, int]:
    """What orders the keys of a mode. No two that serve the same batch are equal, so that every process decides alike,
    whatever order its sets have."""
    count = key.variant if isinstance(key.variant, int) else 0
    return key.num_tokens, count, not key.is_uniform_decode, request_limit(key), key.num_reqs or 0


def _takes(captured: Hashable, wanted: Hashable) -> bool:
    """Whether a graph of one variant serves a step of another: a number is rounded up, anything else is equal."""
    if isinstance(captured, int) and isinstance(wanted, int):
        return captured >= wanted
    return captured == wanted


def _check_batch(num_tokens: int, query_len: int | None, allowed: frozenset[CUDAGraphMode]) -> None:
    if not allowed or not allowed <= RUNTIME_MODES:
        raise ConfigError(
            f"allowed_modes less excluded_modes must leave some of NONE, PIECEWISE and FULL, got {_names(allowed)}; "
            "a configured mode such as FULL_AND_PIECEWISE is not the mode of one batch"
        )
    if num_tokens < 0 or (query_len is not None and query_len < 1):
        raise ConfigError(
            f"num_tokens must be >= 0 and query_len >= 1 or None, got {num_tokens} and {query_len}; "
            "a mixed batch has query_len=None"
        )


def _names(values: Iterable[object]) -> str:
    return ", ".join(sorted(str(getattr(value, "name", value)) for value in values)) or "none"


_AUTO_LARGEST = 512


class EngineSettings(NamedTuple):
    """What a ``CudagraphKeyDispatcher`` takes from an engine's configuration; the defaults stand for none."""

    capture_sizes: str | Iterable[int] = "auto"
    max_num_reqs: int = 256
    variants: Iterable[Hashable] = (None,)
    piecewise: bool = True

    @classmethod
    def of(cls, config: Any) -> "EngineSettings":
        """Read ``compilation_config``, ``scheduler_config`` and ``lora_config`` of ``config``, as vLLM 0.11.1 does.

        Raises ``ConfigError`` for an object of another shape.
        """
        try:
            compilation, most = config.compilation_config, config.scheduler_config.max_num_seqs
            sizes = compilation.cudagraph_capture_sizes or "auto"
        except AttributeError as error:
            raise ConfigError(f"vllm_config must have what vLLM's has, got {shown(config)}: {error}") from None
        variants: tuple[Hashable, ...] = (None,)
        if getattr(config, "lora_config", None) is not None:
            variants = (True, False) if getattr(compilation, "cudagraph_specialize_lora", True) else (True,)
        is_split = getattr(compilation, "is_attention_compiled_piecewise", lambda: True)
        return cls(sizes, most, variants, bool(is_split()))


def mode_of(value: Any) -> CUDAGraphMode:
    """The mode that ``value`` means, as a member of an engine's own enumeration, too; by its name."""
    return parse_mode(getattr(value, "name", value))


def get_cudagraph_sizes(
    capture_sizes: str | Iterable[int] | None,
    max_num_reqs: int,
    max_num_tokens: int,
    mode: CUDAGraphMode,
    *,
    query_len: int = 1,
) -> list[int]:
    """The sizes, in tokens, to capture for an engine's limits.

    Args:
        capture_sizes: ``"auto"`` or None for vLLM's sizes up to ``min(2 * max_num_reqs, 512, max_num_tokens)``; another
            name of ``named_sizes`` for its sizes up to the same limit; or sizes in any order. To named sizes both
            limits are added where they are not larger. Explicit sizes above ``max_num_tokens``, which no batch can
            reach, are dropped with a ``UserWarning``.
        max_num_reqs: The most requests of a batch.
        max_num_tokens: The most tokens of a batch.
        mode: The configured mode. In ``FULL_DECODE_ONLY`` no size exceeds ``max_num_reqs * query_len``, the tokens of
            the largest uniform decode batch.
        query_len: The tokens that each request of a decode batch schedules; more than 1 with speculative decoding.

    Returns:
        The sizes, strictly increasing; empty in mode ``NONE``.

    Raises:
        ConfigError: An argument is wrong, or no explicit size is left.
    """
    check_type("mode", mode, CUDAGraphMode, "a CUDAGraphMode, as CUDAGraphMode.FULL")
    check_count("max_num_reqs", max_num_reqs)
    check_count("max_num_tokens", max_num_tokens)
    check_count("query_len", query_len)
    if not mode.has_graphs():
        return []
    bound = max_num_tokens
    if mode is CUDAGraphMode.FULL_DECODE_ONLY:
        bound = min(bound, max_num_reqs * query_len)
    if capture_sizes is None or isinstance(capture_sizes, str):
        largest = min(2 * max_num_reqs, _AUTO_LARGEST, bound)
        exact = {size for size in (max_num_reqs, bound) if size <= largest}
        return sorted(exact.union(named_sizes("vllm" if capture_sizes in (None, "auto") else capture_sizes, largest)))
    given = sorted_sizes(capture_sizes)
    if given[0] > bound:
        raise ConfigError(
            f"capture_sizes must hold a size that a batch of at most {bound} tokens reaches, got {given[0]} as the "
            "smallest"
        )
    dropped = ", ".join(str(size) for size in given if size > max_num_tokens)
    if dropped:
        text = f"capture_sizes {dropped} are above max_num_tokens={max_num_tokens} and were dropped"
        warnings.warn(f"{text}: no batch reaches them", UserWarning, stacklevel=2)
    return [size for size in given if size <= bound]


def sorted_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """``sizes`` in increasing order, each once. Raises ``ConfigError`` as ``check_sizes`` does for anything else."""
    if isinstance(sizes, (str, bytes, Mapping)) or not isinstance(sizes, Iterable):
        raise ConfigError(f"capture_sizes must be sizes, as [8, 16], got {shown(sizes)}")
    given = tuple(sizes)
    for index, size in enumerate(given):
        check_count(f"capture_sizes[{index}]", size)
    return check_sizes(sorted(set(given)), "capture_sizes")


class CudagraphKeyDispatcher(Unlocked):
    """Decides which mode and which graph serve a batch; the keys are the only source of truth for valid graphs.

    It runs nothing and needs no torch. vLLM calls it ``CudagraphDispatcher``; here that name runs graphs. Thread-safe:
    a change of the keys builds a new table and swaps it whole, under a lock that no decision takes.

    Args:
        vllm_config: An object of the shape of vLLM's ``VllmConfig``. It gives the capture sizes, the requests, whether
            the model is split, and the LoRA cases (variants True and False); an argument that is given goes before it.
        capture_sizes: Numbers of tokens in any order, ``"auto"``, or the name of an engine's sizes (see
            ``get_cudagraph_sizes``) up to ``min(2 * max_num_reqs, 512)``. None: as in ``vllm_config``, or ``"auto"``.
        max_num_reqs: The most requests of a batch. None: as in ``vllm_config``, or 256.
        variants: The variants of the captured code, each hashable; every size gets a key for each.
        piecewise: Whether the model is split around what no graph can hold. None: as in ``vllm_config``, or True.

    Raises:
        ConfigError: An argument is wrong.
    """

    table: KeyTable
    """The table of decisions as it is now."""

    def __init__(
        self,
        vllm_config: Any = None,
        *,
        capture_sizes: str | Iterable[int] | None = None,
        max_num_reqs: int | None = None,
        variants: Iterable[Hashable] | None = None,
        piecewise: bool | None = None,
    ) -> None:
        engine = EngineSettings() if vllm_config is None else EngineSettings.of(vllm_config)
        self.max_num_reqs = engine.max_num_reqs if max_num_reqs is None else max_num_reqs
        self.piecewise = engine.piecewise if piecewise is None else piecewise
        self.variants = tuple(dict.fromkeys(engine.variants if variants is None else variants))
        check_count("max_num_reqs", self.max_num_reqs)
        sizes = engine.capture_sizes if capture_sizes is None else capture_sizes
        if isinstance(sizes, str):
            sizes = get_cudagraph_sizes(sizes, self.max_num_reqs, 2 * self.max_num_reqs, FULL)
        self.capture_sizes = sorted_sizes(sizes)
        self._lock = make_lock()
        self.table = KeyTable({}, max_num_reqs=self.max_num_reqs)

    @property
    def cudagraph_keys(self) -> Mapping[CUDAGraphMode, frozenset[BatchDescriptor]]:
        """The keys by runtime mode, PIECEWISE and FULL, as they are now; ``add_cudagraph_key`` makes others."""
        return self.table.keys

    @property
    def keys_initialized(self) -> bool:
        """Whether ``initialize_cudagraph_keys`` was called; until then no graph serves."""
        return self.table.mode is not None

    def add_cudagraph_key(self, runtime_mode: CUDAGraphMode, batch_descriptor: BatchDescriptor) -> None:
        """Add the key of one more graph. Each call builds a new table: to add many keys, initialise them.

        Args:
            runtime_mode: ``PIECEWISE`` or ``FULL``.
            batch_descriptor: The key. A uniform key that names its requests serves the query length that follows from
                them.

        Raises:
            ConfigError: The mode is another one, or the key is no descriptor of at least one token.
        """
        if runtime_mode not in (PIECEWISE, FULL):
            raise ConfigError(f"runtime_mode must be PIECEWISE or FULL for a key, got {shown(runtime_mode)}")
        if not isinstance(batch_descriptor, BatchDescriptor) or batch_descriptor.num_tokens < 1:
            raise ConfigError(
                f"batch_descriptor must be a BatchDescriptor, num_tokens >= 1, got {shown(batch_descriptor)}"
            )
        with self._lock:
            self._change({runtime_mode: self.table.keys[runtime_mode] | {batch_descriptor}})

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode, uniform_decode_query_len: int = 1) -> None:
        """Add the keys of all graphs of a configured mode; keys that are there already stay.

        Mixed batches get a key for each size and variant. If uniform decode has graphs of its own, their sizes go from
        the query length to the most tokens of ``max_num_reqs`` requests, as in vLLM 0.11.1.

        Args:
            cudagraph_mode: The mode; it may be a member of vLLM's own enumeration.
            uniform_decode_query_len: The tokens that each request of a uniform decode batch schedules.

        Raises:
            ConfigError: The mode needs a split model and ``piecewise`` is False, or the query length is wrong.
        """
        cudagraph_mode = mode_of(cudagraph_mode)
        check_count("uniform_decode_query_len", uniform_decode_query_len)
        if cudagraph_mode.has_piecewise_cudagraphs() and not self.piecewise:
            raise ConfigError(
                f"cudagraph_mode must not need piecewise graphs with piecewise=False, got {cudagraph_mode.name}; "
                "split the model around attention, or use FULL or FULL_DECODE_ONLY"
            )
        every = list(product(self.capture_sizes, self.variants))
        mixed, most = cudagraph_mode.mixed_mode(), uniform_decode_query_len * self.max_num_reqs
        with self._lock:
            keys = dict(self.table.keys)
            if mixed is not NONE:
                keys[mixed] |= {BatchDescriptor(size, variant=variant) for size, variant in every}
            if cudagraph_mode.decode_mode() is FULL and cudagraph_mode.separate_routine():
                fitting = ((size, variant) for size, variant in every if uniform_decode_query_len <= size <= most)
                keys[FULL] |= {BatchDescriptor(size, None, True, variant) for size, variant in fitting}
            self._change(keys, cudagraph_mode, uniform_decode_query_len)

    def dispatch(
        self, batch_descriptor: BatchDescriptor, use_cascade_attn: bool = False
    ) -> tuple[CUDAGraphMode, BatchDescriptor | None]:
        """The runtime mode and key for a batch that the caller has padded, by the rules of vLLM 0.11.1.

        That is the exact full graph, else the full graph for any batch, else the piecewise one, else ``(NONE, None)``.
        Keys that name no requests serve every number of them.

        Args:
            batch_descriptor: The padded batch.
            use_cascade_attn: Whether the step uses cascade attention, which skips full graphs.

        Returns:
            The mode and the key of the graph. If a more general graph serves a uniform batch, it is the key of that
                graph.
        """
        return self.table.answers[batch_descriptor, not use_cascade_attn]

    def decide(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
        *,
        query_len: int | None = None,
        variant: Hashable = None,
        allowed_modes: Collection[CUDAGraphMode] | None = None,
        excluded_modes: Collection[CUDAGraphMode] = (),
    ) -> Decision:
        """The decision for a batch before padding: mode, key, padded size and the reason.

        For a batch that was decided before this is one lookup, hit or miss.

        Args:
            num_tokens: The number of tokens.
            num_reqs: The number of requests. None: as many as tokens, up to ``max_num_reqs``.
            query_len: The tokens that *every* request of a uniform decode batch schedules; None for a mixed batch. If
                the counts contradict it, the batch counts as mixed.
            variant: The variant that the step needs. An integer is rounded up to a captured one; any other must be
                captured itself.
            allowed_modes: The runtime modes to choose from. None: all.
            excluded_modes: Runtime modes to leave out of those.

        Returns:
            The decision.

        Raises:
            ConfigError: ``num_tokens`` is negative, or no mode is left.
            FallbackError: No graph serves the batch, and ``NONE`` is not allowed.
        """
        allowed = RUNTIME_MODES if allowed_modes is None else frozenset(allowed_modes)
        if excluded_modes:
            allowed = allowed.difference(excluded_modes)
        return self.table.decide(num_tokens, num_reqs, query_len, variant, allowed)

    def _change(self, keys: _Keys, mode: CUDAGraphMode | None = None, query_len: int | None = None) -> None:
        """Swap the table for one with other keys in some modes; None: in the mode, and of the query length, that it
        has."""
        old = self.table
        self.table = KeyTable(
            {**old.keys, **keys},
            mode=old.mode if mode is None else mode,
            query_len=query_len or old.query_len,
            max_num_reqs=self.max_num_reqs,
        )
