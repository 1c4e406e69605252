"""``graphed()`` on the CPU beside its peers: eager, a frozen TorchScript trace, ``torch.compile``, tensordict.

Models: the demo's tiny decoder, decode steps of a small Llama of Hugging Face with a static cache, which starts anew
before each turn, and an MLP. Every peer has a twin of the model. ``torch.compile`` compiles for the batch (default), or
once for all of them (dynamic), without its caches; the seconds that this takes stand beside those of ``graphed()``'s
captures. A peer that cannot run a model is left out.
"""

import gc
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from statistics import median
from time import perf_counter, thread_time
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch._inductor.config
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, graphed
from graphdispatch.demo import PRESETS, Decoder

from .timing import Effort, Row, Seconds, compared

__all__ = ["TITLE", "llama", "rows"]

TITLE = "eager and its alternatives on the CPU, each beside eager"
_BATCHES = (1, 8, 64)
_TURNS = 41
_CALLS = 10  # in a turn
_CACHE = 64  # tokens
_MODES = ("inference", "no_grad", "default")

Step = Callable[..., Any]


class Model(NamedTuple):
    """A model by the step that a peer gets: a callable of tensors, made anew for each peer and batch."""

    name: str
    make: Callable[[int], Step]
    batch: Callable[[int], tuple[Tensor, ...]]
    dynamic: dict[str, int]
    """The batch dimensions of the step's arguments; none where it takes one batch size alone."""
    modes: tuple[str, ...] = ("inference", "default")
    restart: Callable[[], None] = lambda: None
    """Called before each turn, outside of the time that counts."""


def rows(effort: Effort) -> list[Row]:
    """For each model and batch: every peer beside eager in the same turns, then what each needed before its first.

    First in inference mode, then as ``generate`` calls a model, without gradients, then as a model is called by
    default: with gradients on.
    """
    found: list[Row] = []
    torch._inductor.config.force_disable_caches = True
    for mode in _MODES:
        with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "default"):
            for model in _models():
                if mode not in model.modes:
                    continue
                dynamic = _Prepared("torch.compile, dynamic", _compiled(model.make(_BATCHES[-1]), dynamic=True))
                for count in _BATCHES:
                    found += _compare(model, mode, count, dynamic, min(effort.turns, _TURNS))
                    torch._dynamo.reset()
                    gc.collect()
    return found


class _Prepared:
    """A peer's step, and the seconds of its calls until it ran at full speed."""

    def __init__(self, name: str, step: Step) -> None:
        self.name = name
        self.step = step
        self.seconds = 0.0

    def prepare(self, batches: list[tuple[Tensor, ...]]) -> bool:
        """Call it with each batch; whether it can run them."""
        start = perf_counter()
        try:
            for batch in batches:
                self.step(*batch)
        except Exception as error:  # a peer that refuses a model is no failure of the benchmark
            print(f"{self.name} is left out: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            return False
        self.seconds = perf_counter() - start
        return True


def _compare(model: Model, mode: str, count: int, dynamic: _Prepared, turns: int) -> list[Row]:
    batch = model.batch(count)
    serve = graphed(model.make(count), dynamic=model.dynamic, sizes=(count,), options=CUDAGraphOptions(capture_after=1))
    peers = [_Prepared("graphed()", serve), *_others(model, count), dynamic]
    batches = [model.batch(count), model.batch(count), batch]
    ready = [peer for peer in peers if peer.prepare(batches)]
    for peer, each in itertools.product(ready, batches):  # a peer's imports may have changed what another one reads
        peer.step(*each)
    eager = model.make(count)
    assert serve.last_decision is not None
    assert serve.last_decision.reason.is_graph, serve.last_decision.explain()
    spans = _turns([lambda: eager(*batch), *(lambda p=peer: p.step(*batch) for peer in ready)], model.restart, turns)
    base = spans[0]
    found = []
    for peer, took in zip(ready, spans[1:], strict=True):
        case = f"{model.name}, {mode}, batch {count:2}: {peer.name}"
        found.append(compared(case, took, base))
        found.append(Row(f"{case}, seconds before it", peer.seconds, unit="s"))
    return found


def _turns(sides: list[Callable[[], object]], restart: Callable[[], None], turns: int) -> list[Seconds]:
    """Seconds of one call of each side, the sides in turns: those that this thread had a processor."""
    spans: list[list[float]] = [[] for _ in sides]
    gc.disable()
    try:
        for _ in range(turns):
            for side, span in zip(sides, spans, strict=True):
                restart()
                side()
                start = thread_time()
                for _ in range(_CALLS):
                    side()
                span.append((thread_time() - start) / _CALLS)
    finally:
        gc.enable()
    return [Seconds(median(span), min(span)) for span in spans]


def _others(model: Model, count: int) -> Iterator[_Prepared]:
    """The peers that serve one batch size."""
    traced = _traced(model.make(count), model.batch(count))
    if traced is not None:
        yield _Prepared("torch.jit.trace and freeze", traced)
    yield _Prepared("torch.compile", _compiled(model.make(count), dynamic=False))
    if importlib.util.find_spec("tensordict") is not None:
        from tensordict.nn import CudaGraphModule

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that there is no GPU, and calls the step
            yield _Prepared("tensordict CudaGraphModule", CudaGraphModule(model.make(count)))


def _compiled(step: Step, *, dynamic: bool) -> Step:
    compiled: Step = torch.compile(step, dynamic=dynamic)
    return compiled


def _traced(step: Step, batch: tuple[Tensor, ...]) -> Step | None:
    if not isinstance(step, nn.Module):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated, and what a trace takes for a constant
        try:
            traced: Step = torch.jit.freeze(torch.jit.trace(step.eval(), batch, check_trace=False))
        except Exception as error:
            print(f"torch.jit.trace is left out: {type(error).__name__}")
            return None
    return traced


def _models() -> Iterator[Model]:
    decoder, steps = Decoder(PRESETS["tiny"], max(_BATCHES)).eval(), itertools.count()
    yield Model(
        "tiny decoder",
        lambda _: decoder.twin(),
        lambda count: (torch.arange(count) + 1, torch.arange(count), (torch.arange(count) + next(steps)) % 8),
        dict.fromkeys(("token_ids", "slots", "positions"), 0),
    )
    mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).eval()
    yield Model("MLP", lambda _: deepcopy(mlp), lambda count: (torch.randn(count, 64),), {"input": 0})
    if importlib.util.find_spec("transformers") is not None:
        yield llama()


def llama() -> Model:
    """A decode step of transformers with a static cache, which starts anew before each turn."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2 * _CACHE}
    model, steps = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval(), itertools.count()
    caches: WeakSet[StaticCache] = WeakSet()

    def make(count: int) -> Step:
        twin = deepcopy(model)
        cache = StaticCache(config=model.config, max_cache_len=_CACHE)
        caches.add(cache)

        def step(input_ids: Tensor, position_ids: Tensor) -> Tensor:
            out = twin(input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True)
            logits: Tensor = out.logits
            return logits

        step(torch.ones(count, 1, dtype=torch.long), torch.zeros(count, 1, dtype=torch.long))
        return step

    def restart() -> None:
        for cache in caches:
            cache.reset()

    return Model(
        "Llama step",
        make,
        lambda count: ((torch.arange(count)[:, None] + next(steps)) % 100, torch.zeros(count, 1, dtype=torch.long)),
        {},
        _MODES[:2],  # with gradients on, the cache requires one
        restart,
    )
