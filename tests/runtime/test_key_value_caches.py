"""Key-value caches of transformers: as arguments, in closures and among outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphdispatch import Graphed, Reason, graphed

transformers = pytest.importorskip("transformers")
_COMMON = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_COMMON |= {"num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0}
STEPS = 10


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """A plain decoder, one with a sliding window, and one with convolutions in the place of attention."""
    torch.manual_seed(0)
    configs = {
        "full": transformers.LlamaConfig(**_COMMON),
        "sliding": transformers.Gemma2Config(**_COMMON, sliding_window=4, head_dim=8),
        "hybrid": transformers.Lfm2Config(**_COMMON, layer_types=["conv", "full_attention"]),
    }
    return {name: transformers.AutoModelForCausalLM.from_config(config).eval() for name, config in configs.items()}


def in_closure(model: Any, cache: Any) -> tuple[Any, Callable[..., Any]]:
    """The cache is a variable that the callable has captured."""
    serve = graphed(lambda ids, places: model(input_ids=ids, position_ids=places, past_key_values=cache), dynamic={})
    return serve, serve


def as_argument(model: Any, cache: Any) -> tuple[Any, Callable[..., Any]]:
    """The cache is an argument like others."""
    serve = graphed(model, dynamic={})
    return serve, lambda ids, places: serve(input_ids=ids, position_ids=places, past_key_values=cache)


PLACES = [in_closure, as_argument]


def make_cache(model: Any, kind: str) -> Any:
    """An empty cache."""
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=16)
    return transformers.DynamicCache(config=model.config)


def content(cache: Any) -> list[Any]:
    """All that the layers hold, in order."""
    flat = []
    for layer in cache.layers:
        for name, value in sorted(vars(layer).items()):
            flat += [(name, key, inner) for key, inner in (value.items() if isinstance(value, dict) else [("", value)])]
    return flat


def check_decoding(model: Any, kind: str, place: Callable[..., tuple[Any, Any]]) -> Graphed[..., Any]:
    """Decode with one cache eagerly and with another through ``place``; outputs and caches must be equal throughout."""
    plain, served = make_cache(model, kind), make_cache(model, kind)
    serve, step = place(model, served)
    for index in range(STEPS):
        ids, places = torch.tensor([[5 + index], [9 + index]]), torch.full((2, 1), index)
        want = model(input_ids=ids, position_ids=places, past_key_values=plain)
        got = step(ids, places)
        assert torch.equal(got.logits, want.logits)
        assert got.past_key_values is served
        for (name, key, value), (*_, expected) in zip(content(served), content(plain), strict=True):
            is_same = torch.equal(value, expected) if isinstance(expected, torch.Tensor) else value == expected
            assert is_same, (index, name, key)
    return serve


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", ["full", "hybrid"])
def test_a_static_cache_is_written_by_graphs(models: dict[str, Any], model: str, place: Any) -> None:
    """Wherever it is held, it is after each step what eager makes of it; no ``static=`` is needed."""
    stats = check_decoding(models[model], "static", place).stats
    assert (stats.captures, stats.capture_failures) == (1, 0)
    assert stats.hits == STEPS - 3


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("full", "dynamic", "use a static cache"),
        ("sliding", "dynamic", "use a static cache"),
        ("sliding", "static", r"graphdispatch\.integrations\.transformers serves it"),
    ],
)
def test_other_caches_are_refused_in_time(
    models: dict[str, Any], model: str, kind: str, message: str, place: Any
) -> None:
    """They are after each step as after one execution, and the reason says what to use."""
    serve = check_decoding(models[model], kind, place)
    decision = serve.last_decision
    assert decision.reason is Reason.STATE_REBOUND
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(decision.detail)
    assert (serve.stats.hits, serve.stats.captures) == (0, 0)


@pytest.mark.parametrize("model", ["full", "sliding", "hybrid"])
def test_a_cache_that_the_call_makes_is_made_anew(models: dict[str, Any], model: str) -> None:
    """A decoder as everyone calls it returns the cache that it made; decoding goes on with it as with eager's."""
    plain = models[model]
    step = graphed(plain, dynamic={"input_ids": 0}, sizes=(4,))
    for index in range(6):
        ids = torch.randint(1, 99, (4 - index % 2, 7))
        got, want = step(input_ids=ids), plain(input_ids=ids)
        assert type(got.past_key_values) is transformers.DynamicCache
        assert [*map(type, got.past_key_values.layers)] == [*map(type, want.past_key_values.layers)]
        torch.testing.assert_close(got.logits, want.logits)
        more = torch.randint(1, 99, (len(ids), 2))
        further = [plain(input_ids=more, past_key_values=one.past_key_values).logits for one in (got, want)]
        torch.testing.assert_close(*further)
    assert step.stats.captures == 1
    assert step.stats.hits
