"""``GraphedGeneration``: ``model.generate(...)`` with its decode steps served by graphs."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode

from ...api.progress import Progress, reporter
from ...config import CUDAGraphOptions
from ...errors import ConfigError, check_count, shown
from ...runtime.memory import MemoryReport, memory_report
from .caches import KeptCache, layers_of, take_out
from .hooks import Hooks, hooked_class
from .slots import CACHE_NAMES, GenerationStats, NotServed, Slot, SlotKey, SlotPool

_SERVED_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
_SHORTEST, _LONGEST = 64, 4096
_TOKENS_TO_HIT = 5
"""The prompt's only token, that of the prefill, and three steps: one captures, one compares, one is a hit."""
_log = logging.getLogger("graphdispatch")


class GraphedGeneration:
    """Within the block, ``model.generate(...)`` serves its decode steps by graphs, and gives the same tokens.

    A request of ``n`` rows that may need ``t`` tokens uses a static cache of ``n`` rows and the smallest of
    ``cache_lengths`` that holds ``t``. Caches are kept from request to request, and each has one graph, which is
    captured at the first decode step that uses it. Prefills run eagerly. A request that graphs do not serve runs as it
    would without the block; ``stats.not_served`` and ``explain`` say why.

    The model's class is replaced by a subclass of the same name, and put back at the end of the block. Caches and
    graphs stay for the next block of this object; ``unpatch`` releases them. Copies and pickles of the model are of the
    original class. Threads may generate at the same time; while two of them need one cache, the second request runs
    without graphs.

    Args:
        model: A model with transformers' ``generate()``.
        cache_lengths: The lengths of caches, in tokens. None: powers of two from 64 up to what the model's positions
            allow, at most 4,096.
        max_batch_size: The most prompts of a request that graphs serve.
        max_caches: The most caches that are kept.
        options: As for ``graphed``; ``capture_after`` is 1 if it is not given.

    Raises:
        ConfigError: The model cannot generate, is served already, or an argument is wrong.
    """

    def __init__(
        self,
        model: Any,
        *,
        cache_lengths: Iterable[int] | None = None,
        max_batch_size: int = 8,
        max_caches: int = 16,
        options: CUDAGraphOptions | None = None,
    ) -> None:
        if not isinstance(model, GenerationMixin):
            raise ConfigError(f"model must have transformers' generate(), got {shown(model)}")
        for name, value in (("max_batch_size", max_batch_size), ("max_caches", max_caches)):
            check_count(name, value)
        self.model = model
        self.cache_lengths = _lengths(model, cache_lengths)
        """The lengths of caches, increasing."""
        self.max_batch_size = max_batch_size
        original = type(model)
        if issubclass(original, Hooks):
            raise ConfigError(f"this {original.__name__} is served already; unpatch() the GraphedGeneration that does")
        self._original: type = original
        self._hooked = hooked_class(original, self)
        self.plain_call = MethodType(original.__call__, model)
        """The model's own call."""
        chosen = CUDAGraphOptions.or_default(options, "options")
        chosen.refuse(("outputs",), "GraphedGeneration", "generate() keeps what each step returns")
        if chosen.capture_after is None:
            chosen = chosen.replace(capture_after=1)
        # Layers of linear attention have the same cache in both kinds, whatever the model says of itself.
        self._fits_static_cache = model._can_compile_fullgraph or KeptCache(model.config, 1).is_linear_alone
        self._pool = SlotPool(self.plain_call, model, max_caches, chosen)
        self._local = threading.local()

    def patch(self) -> "GraphedGeneration":
        """Serve from now on. Harmless when it does already."""
        kind: type = type(self.model)
        if kind is not self._hooked:
            if kind is not self._original:
                raise ConfigError(f"the model's class has changed to {kind.__name__}; unpatch() what changed it first")
            self.model.__class__ = self._hooked
        return self

    def unpatch(self) -> None:
        """Give the model its class back and release caches and graphs. Requests under way finish as they began."""
        self._put_back()
        self._pool.close()

    def _put_back(self) -> None:
        if type(self.model) is self._hooked:
            self.model.__class__ = self._original

    def __enter__(self) -> "GraphedGeneration":
        return self.patch()

    def __exit__(self, *error: object) -> None:
        self._put_back()

    def prewarm(
        self,
        rows: Iterable[int] = (1,),
        cache_lengths: Iterable[int] | None = None,
        *,
        progress: bool | Progress = False,
    ) -> tuple[tuple[int, int], ...]:
        """Capture the decode steps of requests now, so that their first tokens need not wait for it.

        For each cache a request of ones is made that generates a few tokens, as ``model.generate`` would with the
        model's ``generation_config``. The counters of ``stats`` count these requests. What the model raises passes
        through.

        Args:
            rows: The numbers of rows: of prompts, times beams or sequences for each.
            cache_lengths: Some of the lengths of caches. None: all.
            progress: As in ``Graphed.prewarm``; it counts caches.

        Returns:
            The rows and length of each of these caches that has a graph now; ``explain`` says why others have none.

        Raises:
            ConfigError: There are more caches than ``max_caches``, or an argument is wrong.
        """
        lengths = _some_of("cache_lengths", self.cache_lengths, cache_lengths)
        counts = _some_of("rows", range(1, self.max_batch_size + 1), rows)
        wanted = [(count, length) for length in reversed(lengths) for count in reversed(counts)]
        if len(wanted) > self._pool.most:
            raise ConfigError(
                f"prewarm of {len(wanted)} caches needs max_caches >= {len(wanted)}, got {self._pool.most}; raise it, "
                "or name fewer"
            )
        was_patched, started = type(self.model) is self._hooked, time.perf_counter()
        with reporter(progress) as report:
            self.patch()
            try:
                for done, (count, length) in enumerate(wanted, 1):
                    self._request_few_tokens(count, length)
                    if report is not None:
                        each_s = (time.perf_counter() - started) / done
                        report(done, len(wanted), each_s * (len(wanted) - done))
            finally:
                if not was_patched:
                    self._put_back()
        captured = {(slot.key.rows, slot.key.length) for slot in self._pool if slot.step.entries}
        return tuple(pair for pair in wanted if pair in captured)

    def _request_few_tokens(self, rows: int, length: int) -> None:
        """Generate the tokens of a capture, of its comparison and of a hit, with the cache of this length."""
        ids = torch.ones((rows, 1), dtype=torch.long, device=self.model.device)
        ends = transformers.StoppingCriteriaList([_EndsAt(_TOKENS_TO_HIT)])
        no_token = self.model.config.get_text_config(decoder=True).vocab_size  # so that nothing ends the request before
        settings = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "eos_token_id": no_token}
        self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            stopping_criteria=ends,
            **settings,
        )

    @property
    def stats(self) -> GenerationStats:
        """What happened so far."""
        return self._pool.stats

    def memory_report(self) -> MemoryReport:
        """The bytes that the graphs of all caches hold, part by part; the caches themselves are not counted."""
        return memory_report(entry for slot in self._pool for entry in slot.step.entries)

    def explain(self) -> str:
        """What served which requests, and why graphs did not serve others, a line for each."""
        stats = self.stats
        lines = [f"{stats.served} of {stats.requests} requests served, {stats.hits} of {stats.steps} steps by graphs"]
        lines += [slot.explain() for slot in self._pool]
        lines += [f"{count} requests ran as before: {why.text}" for why, count in stats.not_served.items()]
        return "\n".join(lines)

    @property
    def request(self) -> "Request | None":
        """The calling thread's request that is under way, or None."""
        stack: list[Request] = getattr(self._local, "stack", [])
        return stack[-1] if stack else None

    @contextmanager
    def begin(self, refusal: NotServed | None = None) -> Iterator["Request"]:
        """A request, from its beginning to its end; with a ``refusal`` it runs as before."""
        request = Request(self, refusal)
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        self._local.stack.append(request)
        try:
            yield request
        finally:
            self._local.stack.pop()
            if request.slot is not None:
                self._pool.give_back(request.slot)
            if request.was_passed_by:
                self._note_passed_by()

    def assign(self, request: "Request", config: GenerationConfig, arguments: dict[str, Any]) -> Slot | None:
        """The slot of a request, by the arguments of ``_prepare_cache_for_generation``; None and a count otherwise."""
        found = self._why_not(request, config, arguments)
        if not isinstance(found, NotServed):
            slot = self._pool.get(found)
            if slot is not None and (slot.error or slot.is_hopeless):
                found = NotServed.RAISED if slot.error else NotServed.NO_GRAPH
        if not isinstance(found, NotServed):
            request.slot = self._pool.take(found)
            found = found if request.slot is not None else NotServed.BUSY
        self._count(found if isinstance(found, NotServed) else None)
        if request.slot is not None:
            _give_mask(self.model, config, arguments["model_kwargs"], request.slot.key.rows)
        return request.slot

    def begin_again(self) -> AbstractContextManager["Request"]:
        """The same request once more, as before; what it was counted as is taken back."""
        with self._pool.lock:
            self._pool.counted.requests -= 1
            self._pool.counted.served -= 1
        return self.begin(NotServed.RAISED)

    def _note_passed_by(self) -> None:
        """Note that a request which was to be served was not, since the model never got the slot's cache."""
        counted = self._pool.counted
        with self._pool.lock:
            is_first = not counted.not_served[NotServed.PASSED_BY]
            counted.served -= 1
            counted.not_served[NotServed.PASSED_BY] += 1
        if is_first:
            name = type(self.model).__name__
            _log.warning("transformers %s, %s: %s", transformers.__version__, name, NotServed.PASSED_BY.text)

    def _count(self, why: NotServed | None) -> None:
        counted = self._pool.counted
        with self._pool.lock:
            counted.requests += 1
            counted.served += why is None
            if why is not None:
                counted.not_served[why] += 1

    def _why_not(self, request: "Request", config: GenerationConfig, arguments: dict[str, Any]) -> NotServed | SlotKey:
        """Why no graph serves a request, or the key of its slot."""
        model, given = self.model, arguments.get("model_kwargs", {})
        if request.refusal is not None:
            return request.refusal
        if getattr(config, "is_assistant", False):
            return NotServed.ASSISTANT
        if arguments.get("generation_mode") not in _SERVED_MODES:
            return NotServed.MODE
        if any(given.get(name) is not None for name in CACHE_NAMES):
            return NotServed.OWN_CACHE
        if config.output_attentions:
            return NotServed.ATTENTIONS
        if model.training:
            return NotServed.TRAINING
        if config.use_cache is False or not model._supports_default_dynamic_cache():
            return NotServed.NO_CACHE
        if config.cache_implementation not in (None, "static"):
            return NotServed.OTHER_CACHE
        if model.config.is_encoder_decoder or not self._fits_static_cache:
            return NotServed.MODEL
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            return NotServed.DEVICES
        if torch.is_autocast_enabled(model.device.type):
            return NotServed.AUTOCAST
        if "flash" in str(model.config._attn_implementation):
            return NotServed.FLASH
        if arguments["batch_size"] > self.max_batch_size:
            return NotServed.BATCH_TOO_LARGE
        needed = max(arguments["max_cache_length"], getattr(config, "max_cache_len", None) or 0)
        length = next((length for length in self.cache_lengths if length >= needed), None)
        if length is None:
            return NotServed.TOO_LONG
        rows = arguments["batch_size"] * max(config.num_beams or 1, config.num_return_sequences or 1)
        layers = layers_of(model.config, length)
        return SlotKey(rows, length, layers, model.dtype, model.device, torch.is_inference_mode_enabled())


class Request:
    """One ``generate`` from beginning to end, on one thread."""

    def __init__(self, owner: GraphedGeneration, refusal: NotServed | None) -> None:
        self.refusal = refusal
        """Why it runs as before, if that is known from the beginning."""
        self.slot: Slot | None = None
        self._owner = owner
        self._is_prefilled = False
        self._was_called = self._got_cache = False

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's answer to one step: by a graph where it is a decode step with the slot's cache."""
        slot = self.slot
        self._was_called = True
        if slot is None or not self.uses(kwargs):
            return self._owner.plain_call(*args, **kwargs)
        self._got_cache = True
        ids = kwargs.get("input_ids")
        if self._is_prefilled and not args and ids is not None and ids.shape[1] == 1 and not slot.is_hopeless:
            return slot.run_step(kwargs)
        answer = self._owner.plain_call(*args, **kwargs)
        self._is_prefilled = True
        return answer

    @property
    def was_passed_by(self) -> bool:
        """Whether the model was called, and never with the cache of the request's slot."""
        return self.slot is not None and self._was_called and not self._got_cache

    @property
    def may_begin_again(self) -> bool:
        """Whether the model raised at its first step with a kept cache, so that nothing has happened yet."""
        return self.slot is not None and not self._is_prefilled and not self.was_passed_by

    def uses(self, arguments: dict[str, Any]) -> bool:
        """Whether arguments of the model hold the slot's cache."""
        return self.slot is not None and any(arguments.get(name) is self.slot.cache for name in CACHE_NAMES)

    def released(self, result: Any) -> Any:
        """The request's result, in which a copy takes the place of the cache: the next request overwrites that."""
        for name in CACHE_NAMES:
            if self.slot is not None and getattr(result, name, None) is self.slot.cache:
                setattr(result, name, take_out(self.slot.cache, self._owner.model.config))
        return result


def _give_mask(model: Any, config: GenerationConfig, arguments: dict[str, Any], rows: int) -> None:
    """Put back a mask of ones that transformers has dropped, for models that make their own masks of it: without one
    they take another path, and would need a second graph."""
    length = getattr(config, "_mask_length", None)
    if (
        length is not None
        and hasattr(model, "create_masks_for_generate")
        and arguments.get("attention_mask", config) is None
    ):
        arguments["attention_mask"] = torch.ones((rows, length), dtype=torch.long, device=model.device)


def _lengths(model: Any, given: Iterable[int] | None) -> tuple[int, ...]:
    if given is None:
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or _LONGEST
        most = min(positions, _LONGEST)
        return (*(length for length in (_SHORTEST << i for i in range(7)) if length < most), most)
    lengths = tuple(given) if isinstance(given, Iterable) else ()
    if not lengths or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in lengths):
        raise ConfigError(f"cache_lengths must be numbers of tokens, as (256, 1024), got {shown(given)}")
    return tuple(sorted(set(lengths)))


def _some_of(name: str, every: Sequence[int], given: Iterable[int] | None) -> tuple[int, ...]:
    """What is given of these numbers, increasing; None: all. Raises ``ConfigError``."""
    chosen = tuple(every) if given is None else tuple(given) if isinstance(given, Iterable) else (None,)
    if not chosen or any(one not in every for one in chosen):
        raise ConfigError(f"{name} must be some of {tuple(every)}, got {shown(given)}")
    return tuple(sorted(set(chosen)))


class _EndsAt(transformers.StoppingCriteria):
    """Ends a request at a number of tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self._tokens, device=input_ids.device)


def graphed_generation(model: Any, **settings: Any) -> GraphedGeneration:
    """Serve ``model.generate(...)`` by graphs from now on, until ``unpatch()`` of what it returns.

    Args:
        model: A model with transformers' ``generate()``.
        **settings: Further arguments of ``GraphedGeneration``.

    Returns:
        The object that serves the model.

    Raises:
        ConfigError: The model cannot generate, is served already, or a setting is wrong.
    """
    return GraphedGeneration(model, **settings).patch()
