"""``CudagraphKeyDispatcher``: which graph serves a batch, by vLLM's key sets and by the rules of its later versions."""

from collections.abc import Collection, Hashable, Iterable, Mapping
from itertools import product
from typing import Any

from ..copying import Unlocked
from ..decide.decision import Decision
from ..descriptors import BatchDescriptor
from ..errors import ConfigError, check_count, shown
from ..forking import make_lock
from ..modes import CUDAGraphMode
from .config import EngineSettings, check_split, get_cudagraph_sizes, mode_of, sorted_sizes
from .key_table import KeyTable

__all__ = ["CudagraphKeyDispatcher"]

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


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
        ConfigError: An argument is wrong, or the configured mode needs a split model and ``piecewise`` is False.
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
        check_split(engine.mode, self.piecewise)
        sizes = engine.capture_sizes if capture_sizes is None else capture_sizes
        if isinstance(sizes, str):
            sizes = get_cudagraph_sizes(sizes, self.max_num_reqs, 2 * self.max_num_reqs, FULL)
        self.capture_sizes = sorted_sizes(sizes)
        self._lock = make_lock()
        self._swap({}, None, None)

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
        _check_runtime_mode(runtime_mode)
        if not isinstance(batch_descriptor, BatchDescriptor) or batch_descriptor.num_tokens < 1:
            raise ConfigError(
                f"batch_descriptor must be a BatchDescriptor, num_tokens >= 1, got {shown(batch_descriptor)}"
            )
        with self._lock:
            table = self.table
            keys = {**table.keys, runtime_mode: table.keys[runtime_mode] | {batch_descriptor}}
            self._swap(keys, table.mode, table.query_len)

    def remove_cudagraph_key(self, runtime_mode: CUDAGraphMode, batch_descriptor: BatchDescriptor) -> None:
        """Remove the key of a graph that is gone. Builds a new table.

        Args:
            runtime_mode: ``PIECEWISE`` or ``FULL``.
            batch_descriptor: The key; one that is not there is ignored.

        Raises:
            ConfigError: The mode is another one.
        """
        _check_runtime_mode(runtime_mode)
        with self._lock:
            table = self.table
            keys = {**table.keys, runtime_mode: table.keys[runtime_mode] - {batch_descriptor}}
            self._swap(keys, table.mode, table.query_len)

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
        check_split(cudagraph_mode, self.piecewise)
        added = self._keys_of(cudagraph_mode, uniform_decode_query_len)
        with self._lock:
            keys = {runtime: old | added.get(runtime, set()) for runtime, old in self.table.keys.items()}
            self._swap(keys, cudagraph_mode, uniform_decode_query_len)

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
        table = self.table
        return (table.piecewise_answers if use_cascade_attn else table.answers)[batch_descriptor]

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
        return self.table.decide(num_tokens, num_reqs, query_len, variant, allowed_modes, excluded_modes)

    def __repr__(self) -> str:
        table = self.table
        mode = "not initialised" if table.mode is None else table.mode.name
        counts = ", ".join(f"{len(keys)} {runtime.name}" for runtime, keys in table.keys.items())
        return f"<CudagraphKeyDispatcher {mode}, {counts} keys>"

    def _keys_of(self, mode: CUDAGraphMode, query_len: int) -> dict[CUDAGraphMode, set[BatchDescriptor]]:
        keys: dict[CUDAGraphMode, set[BatchDescriptor]] = {}
        every = list(product(self.capture_sizes, self.variants))
        if mode.mixed_mode() is not NONE:
            keys[mode.mixed_mode()] = {BatchDescriptor(size, variant=variant) for size, variant in every}
        if mode.decode_mode() is FULL and mode.separate_routine():
            most = query_len * self.max_num_reqs
            keys[FULL] = {BatchDescriptor(size, None, True, one) for size, one in every if query_len <= size <= most}
        return keys

    def _swap(
        self,
        keys: Mapping[CUDAGraphMode, Collection[BatchDescriptor]],
        mode: CUDAGraphMode | None,
        query_len: int | None,
    ) -> None:
        self.table = KeyTable(keys, mode=mode, query_len=query_len, max_num_reqs=self.max_num_reqs)


def _check_runtime_mode(mode: CUDAGraphMode) -> None:
    if mode not in (PIECEWISE, FULL):
        raise ConfigError(f"runtime_mode must be PIECEWISE or FULL for a key, got {shown(mode)}")
