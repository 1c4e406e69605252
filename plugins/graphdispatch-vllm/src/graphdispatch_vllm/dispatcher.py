"""vLLM's dispatcher, decided by this library: its names, its enumeration and its descriptors."""

from collections.abc import Callable, Set
from itertools import product
from typing import Any

from vllm.config import CUDAGraphMode as TheirMode
from vllm.config import VllmConfig
from vllm.forward_context import BatchDescriptor as TheirDescriptor
from vllm.logger import init_logger
from vllm.lora.utils import get_captured_lora_counts

from .core import BatchDescriptor, ConfigError, Decision, FallbackError, KeyTable, Reason, mode_of
from .engine import EagerSteps

__all__ = ["CudagraphDispatcher"]

_logger = init_logger("vllm.graphdispatch")
_OURS = {mode: mode_of(mode) for mode in TheirMode}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
_GRAPHS = (TheirMode.PIECEWISE, TheirMode.FULL)
_Answer = tuple[Any, Any]
"""What vLLM's dispatcher answers: its mode and its descriptor."""


class _Keys(set[Any]):
    """The keys of one runtime mode; each change has the dispatcher decide anew."""

    def __init__(self, forget: Callable[[], None]) -> None:
        super().__init__()
        self.forget = forget


def _forgetting(name: str) -> Callable[..., Any]:
    def change(self: _Keys, *args: Any) -> Any:
        self.forget()
        return getattr(set, name)(self, *args)

    return change


for _name in set(dir(set)).difference(dir(frozenset)):  # all that change a set
    setattr(_Keys, _name, _forgetting(_name))


class CudagraphDispatcher:
    """Takes the place of vLLM 0.32's ``CudagraphDispatcher``: the same decisions, each made once.

    What vLLM's model runners touch is here under the same names: ``cudagraph_keys`` (mutable sets of vLLM's own
    descriptors, by vLLM's own mode), ``keys_initialized``, ``initialize_cudagraph_keys``, ``add_cudagraph_key``,
    ``get_capture_descs`` and ``dispatch``. The keys are the only source of truth for valid graphs; ``KeyTable`` decides
    by them. A step that was decided before costs one look-up. ``decision`` is the latest, and ``eager`` counts the
    steps that were sent to no graph, by reason. Not thread-safe, as vLLM's own is not.
    """

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> "CudagraphDispatcher":
        """The dispatcher for a ``VllmConfig``. Raises ``ConfigError`` if it wants pieces of an unsplit model."""
        return cls(vllm_config)

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.compilation_config = vllm_config.compilation_config
        self.uniform_decode_query_len = 1 + vllm_config.num_speculative_tokens
        self.cudagraph_mode = TheirMode.NONE
        self.keys_initialized = False
        lora = vllm_config.lora_config
        self.specialize_lora_count = lora is not None and lora.specialize_active_lora
        self.captured_lora_counts: list[int] = []
        self.cudagraph_keys: dict[Any, _Keys] = {mode: _Keys(self._forget) for mode in _GRAPHS}
        self.decision: Decision | None = None
        self.eager = EagerSteps("step", _logger)
        self._answers: dict[Any, tuple[_Answer, Decision]] = {}
        self._table: KeyTable | None = None
        wanted = self.compilation_config.cudagraph_mode
        if wanted.requires_piecewise_compilation() and not (
            self.compilation_config.is_attention_compiled_piecewise() or _breaks_by_itself()
        ):
            raise ConfigError(
                f"cudagraph_mode must not need piecewise graphs of an unsplit model, got {wanted.name}; compile the "
                "model with attention among the splitting_ops, or use FULL or FULL_DECODE_ONLY"
            )

    def initialize_cudagraph_keys(self, cudagraph_mode: TheirMode, uniform_decode_query_len: int = 1) -> None:
        """Add the keys of all graphs of a configured mode, as vLLM does; keys that are there already stay.

        Raises ``ConfigError`` for a size of ``compile_sizes`` that would be padded.
        """
        self.cudagraph_mode = cudagraph_mode
        self.keys_initialized = True
        self._forget()
        if cudagraph_mode == TheirMode.NONE:
            return
        sizes = self.compilation_config.cudagraph_capture_sizes
        self._check_compiled(sizes)
        cases = self._lora_cases()
        self.captured_lora_counts = [count for count in cases if count]
        mixed, most = cudagraph_mode.mixed_mode(), self.vllm_config.scheduler_config.max_num_seqs
        if mixed != TheirMode.NONE:
            reqs = {size: None if mixed == TheirMode.PIECEWISE else min(size, most) for size in sizes}
            keys = (TheirDescriptor(size, reqs[size], False, n > 0, n) for size, n in product(sizes, cases))
            self.cudagraph_keys[mixed].update(keys)
        if cudagraph_mode.decode_mode() == TheirMode.FULL and cudagraph_mode.separate_routine():
            lengths = self.uniform_decode_query_len
            uniform = [size for size in sizes if uniform_decode_query_len <= size <= uniform_decode_query_len * most]
            self.cudagraph_keys[TheirMode.FULL].update(
                TheirDescriptor(size, min(size // lengths, most), True, n > 0, n) for size, n in product(uniform, cases)
            )

    def add_cudagraph_key(self, runtime_mode: TheirMode, batch_descriptor: TheirDescriptor) -> None:
        """Add the key of one more graph."""
        self.cudagraph_keys[runtime_mode].add(batch_descriptor)

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        valid_modes: Set[TheirMode] | None = None,
        invalid_modes: Set[TheirMode] | None = None,
    ) -> _Answer:
        """The runtime mode and the padded descriptor of a step, in vLLM's own types; ``(NONE, ...)`` for eager.

        ``valid_modes`` less ``invalid_modes`` are the modes to choose from; neither set is changed. Raises
        ``AssertionError``, as vLLM does, if no graph serves the step and NONE is not among them.
        """
        batch = (
            num_tokens,
            uniform_decode,
            has_lora,
            num_active_loras,
            None if valid_modes is None else frozenset(valid_modes),
            None if invalid_modes is None else frozenset(invalid_modes),
        )
        found = self._answers.get(batch)
        if found is None:
            found = self._answers[batch] = self._decide(*batch)
        answer, self.decision = found
        if answer[0] is TheirMode.NONE and self.keys_initialized:
            self.eager.note(self.decision)
        return answer

    def get_capture_descs(self) -> list[tuple[TheirMode, list[TheirDescriptor]]]:
        """What to capture, largest first: piecewise graphs, then full ones; empty until the keys are initialised."""
        if not self.keys_initialized or self.cudagraph_mode == TheirMode.NONE:
            return []
        return [
            (mode, sorted(keys, key=lambda key: (key.num_tokens, key.num_active_loras), reverse=True))
            for mode in _GRAPHS
            if (keys := self.cudagraph_keys[mode])
        ]

    def _decide(
        self,
        num_tokens: int,
        uniform: bool,
        has_lora: bool,
        loras: int,
        valid: frozenset[TheirMode] | None,
        invalid: frozenset[TheirMode] | None,
    ) -> tuple[_Answer, Decision]:
        allowed = frozenset(valid or _RUNTIME) - (invalid or frozenset())
        eager = TheirMode.NONE, TheirDescriptor(num_tokens)
        why = self._why_eager(num_tokens, has_lora != (loras > 0), allowed)
        if why is not None:
            more = f"{num_tokens} tokens are more than the largest of cudagraph_capture_sizes, {self._largest}"
            return eager, Decision.eager(why, num_tokens, more if why is Reason.ABOVE_LARGEST_SIZE else "")
        query_len = self.uniform_decode_query_len if uniform and self.cudagraph_mode.separate_routine() else None
        variant = self._effective(loras) if has_lora else None
        try:
            decision = self._decisions.decide(
                num_tokens, None, query_len, variant, frozenset(_OURS[mode] for mode in allowed)
            )
        except FallbackError as error:
            raise AssertionError(str(error)) from error
        if decision.descriptor is None:
            return eager, decision
        return (_THEIRS[decision.mode], _theirs(decision.descriptor)), decision

    def _why_eager(self, num_tokens: int, is_odd: bool, allowed: frozenset[TheirMode]) -> Reason | None:
        """Why no table decides. A batch that is ``is_odd`` has adapters and none active, or the other way round."""
        if not self.keys_initialized:
            return Reason.NOT_INITIALIZED
        if self.cudagraph_mode == TheirMode.NONE or not self._largest:
            return Reason.DISABLED
        if allowed <= {TheirMode.NONE}:
            return Reason.MODE_EXCLUDED
        if num_tokens > self._largest:
            return Reason.ABOVE_LARGEST_SIZE
        return Reason.VARIANT_NOT_CAPTURED if is_odd else None

    @property
    def _largest(self) -> int:
        return self.compilation_config.max_cudagraph_capture_size or 0

    @property
    def _decisions(self) -> KeyTable:
        """The table of the keys as they are now."""
        if self._table is None:
            keys = {_OURS[mode]: [_ours(key) for key in keys] for mode, keys in self.cudagraph_keys.items()}
            most = self.vllm_config.scheduler_config.max_num_seqs
            self._table = KeyTable(
                keys,
                mode=_OURS[self.cudagraph_mode],
                query_len=self.uniform_decode_query_len,
                max_num_reqs=most,
            )
        return self._table

    def _forget(self) -> None:
        self._table = None
        self._answers = {}

    def _lora_cases(self) -> list[int]:
        """The numbers of active adapters that graphs are captured for; 0 is without adapters."""
        lora = self.vllm_config.lora_config
        if lora is None:
            return [0]
        if not self.compilation_config.cudagraph_specialize_lora:
            return [lora.max_loras + 1]
        return [0, *get_captured_lora_counts(lora.max_loras, self.specialize_lora_count)]

    def _effective(self, loras: int) -> int:
        """Without graphs for each number of adapters, one graph serves all of them."""
        lora = self.vllm_config.lora_config
        return loras if self.specialize_lora_count or lora is None else lora.max_loras + 1

    def _check_compiled(self, sizes: list[int]) -> None:
        compiled = [int(size) for size in self.compilation_config.compile_sizes or ()]
        padded = [size for size in compiled if size <= self._largest and size not in sizes]
        if padded:
            raise ConfigError(
                f"compile_sizes must be among the capture sizes up to {self._largest}, got {padded}, which would be "
                "padded to a size without their compiled code; capture them too, or drop them"
            )


_RUNTIME = frozenset((TheirMode.NONE, *_GRAPHS))


def _ours(key: Any) -> BatchDescriptor:
    """ "No adapter" is a variant of its own: as the number 0 it would be rounded up to a graph with adapters."""
    return BatchDescriptor(key.num_tokens, key.num_reqs, key.uniform, key.num_active_loras if key.has_lora else None)


def _theirs(key: BatchDescriptor) -> Any:
    loras = 0 if key.variant is None else key.variant
    return TheirDescriptor(key.num_tokens, key.num_reqs, key.is_uniform_decode, bool(loras), loras)


def _breaks_by_itself() -> bool:
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    return bool(is_breakable_cudagraph_enabled())
