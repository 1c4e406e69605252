"""transformers' ``generate()`` of Llamas of random weights: by graphs, by hand, and by transformers' own ways."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..generate import make_model
from .bench import Bench, Figures, Row, by_graphs, latencies, percentile, served
from .peers import raw_graph

__all__ = ["TITLE", "run"]

TITLE = "generate(), 64 new tokens (tokens per second of whole requests; median of turns)"
_LLAMAS = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32_000},
    "8B": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "vocab_size": 128_256},
}
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
_PROMPT, _CACHE = 9, 128  # tokens; the latter are enough for the prompt and what is generated
_SECONDS = {"1B": 10, "8B": 20}  # about how long a batch size takes
_COMPILE_SECONDS = 50
_GRAPHS, _HAND = "graphed_generation()", "hand-written loop"
_DEFAULT, _COMPILED = "default cache", "static cache, compiled"
_Way = Callable[[], Tensor]


class _Case(NamedTuple):
    """A model that transformers serves, one that graphs serve, and a batch for both."""

    name: str
    plain: Any
    twin: Any
    serving: Any
    ids: Tensor
    tokens: int


def run(bench: Bench) -> None:
    """Each model at batch 1 and 8; last of all, while there is time, beside the compiled static cache."""
    import transformers

    is_small = bench.quick or bench.device.type == "cpu"
    cases = []
    for model in ("small",) if is_small else _LLAMAS:
        if not bench.has_time(2 * _SECONDS.get(model, 0), model):
            continue
        for case in _cases(bench, transformers, model):
            if bench.has_time(_SECONDS.get(model, 0), case.name):
                cases.append(case)
                _measure(bench, case, _ways(bench, transformers, case))
    for case in cases if bench.compiles else []:
        name = f"{case.name}, beside torch.compile"
        if bench.has_time(_COMPILE_SECONDS, name):
            ways = _ways(bench, transformers, case)
            ways[_COMPILED] = _compiled(transformers, case)
            del ways[_DEFAULT]
            _measure(bench, case._replace(name=name), ways)


def _cases(bench: Bench, transformers: Any, model: str) -> list[_Case]:
    """The model in two copies, the second behind graphs."""
    from graphdispatch.integrations.transformers import graphed_generation

    sizes = {**_LLAMAS[model], **_HEADS} if model in _LLAMAS else {}
    with torch.device(bench.device):
        plain, twin = (make_model(transformers, bench.dtype, **sizes) for _ in range(2))
    serving = graphed_generation(twin, cache_lengths=(_CACHE,))
    tokens = 16 if bench.quick else 64
    made = []
    for rows in (1, 8):
        torch.manual_seed(rows)
        ids = torch.randint(2, 1000, (rows, _PROMPT)).to(bench.device)
        made.append(_Case(f"{model}, batch {rows}", plain, twin, serving, ids, tokens))
    return made


def _request(case: _Case) -> dict[str, Any]:
    batch = {"input_ids": case.ids, "attention_mask": torch.ones_like(case.ids)}
    return {**batch, "max_new_tokens": case.tokens, "min_new_tokens": case.tokens, "do_sample": False}


def _ways(bench: Bench, transformers: Any, case: _Case) -> dict[str, _Way]:
    request = {**_request(case), "disable_compile": True}
    ways: dict[str, _Way] = {
        _GRAPHS: partial(case.twin.generate, **request),
        _DEFAULT: partial(case.plain.generate, **request),
    }
    by_hand = bench.attempt(case.name, _HAND, lambda: _ByHand(bench, transformers, case))
    return ways if by_hand is None else {**ways, _HAND: by_hand}


def _compiled(transformers: Any, case: _Case) -> _Way:
    config = transformers.CompileConfig(mode="reduce-overhead")
    return partial(case.plain.generate, **_request(case), cache_implementation="static", compile_config=config)


class _ByHand:
    """What one writes by hand: a captured step of one token for each row, with the argmax that gives the next one.

    Nothing is checked, and nobody looks at the tokens before all are there.
    """

    def __init__(self, bench: Bench, transformers: Any, case: _Case) -> None:
        self._model, self._ids, self._tokens = case.plain, case.ids, case.tokens
        self._cache = transformers.StaticCache(config=case.plain.config, max_cache_len=_CACHE)
        self._token = case.ids.new_zeros(len(case.ids), 1)
        self._forward(case.ids)  # the cache is made by its first use
        self._graph, _ = raw_graph(bench, lambda: self._forward(self._token), ())

    def _forward(self, ids: Tensor) -> None:
        logits = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        self._token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def __call__(self) -> Tensor:
        """Serve the request; the prompt runs eagerly."""
        self._cache.reset()
        self._forward(self._ids)
        made = [self._ids, self._token.clone()]
        for _ in range(self._tokens - 1):
            self._graph.replay()
            made.append(self._token.clone())
        return torch.cat(made, 1)


def _measure(bench: Bench, case: _Case, ways: dict[str, _Way]) -> None:
    """Each way untimed, then in turns; and the share of the hand-written loop's tokens that it gives, too."""
    made: dict[str, Tensor] = {}
    for side, way in ways.items():
        for _ in range(1 if side == _DEFAULT else 2):  # the others make graphs in the first request, or use them later
            got = bench.attempt(case.name, side, way)
            if got is not None:
                made[side] = got
            else:
                break
    turns = 2 if bench.quick else 3
    before = served(case.serving.stats)
    taken = latencies(bench, {side: [ways[side]] * turns for side in made})
    speeds = {side: case.ids.shape[0] * case.tokens / percentile(times, 50) for side, times in taken.items()}
    for side, speed in speeds.items():
        figures: Figures = {"tokens_per_s": speed}
        if side == _GRAPHS:  # the first token of a request is the prompt's
            figures |= by_graphs(case.serving.stats, before, turns * (case.tokens - 1))
        if _HAND in made:
            figures["same_tokens"] = float((made[side] == made[_HAND]).double().mean())
        bench.emit(Row(case.name, side, figures))
    for side in speeds:
        if side != _GRAPHS and _GRAPHS in speeds:
            ratio: Figures = {"tokens_per_s_ratio": speeds[_GRAPHS] / speeds[side]}
            bench.emit(Row(case.name, f"{_GRAPHS} over {side}", ratio))
