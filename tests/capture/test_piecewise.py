"""PIECEWISE captures: graphs and eager parts in turn give eager's answer, or a clear error, and nothing in between."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphMode, Reason, eager_break, graphed
from graphdispatch.backends import get_backend
from graphdispatch.capture.piecewise import EagerPart, break_figures
from graphdispatch.engines import CUDAGraphWrapper, cudagraph_context

from ..helpers import AT_ONCE
from ..pieces import FULL, ONE, PIECEWISE, agrees, graph_of, host_scale, pieces
from ..spy import Spy


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    """Graphs are for inference."""
    with torch.no_grad():
        yield


# What a capture consists of.


def test_without_a_break_there_is_one_graph() -> None:
    """A PIECEWISE capture of a callable without marks is one graph."""
    served = pieces(lambda x: x * 2 + 1)
    graph = graph_of(served)
    assert (len(graph.graphs), len(graph.breaks)) == (1, 0)
    agrees(served)


def test_graphs_and_breaks_alternate() -> None:
    """Two breaks make three graphs around them, in order."""
    graph = graph_of(pieces(lambda x: host_scale(host_scale(x + 1) * 2) - 1))
    kinds = [isinstance(part, EagerPart) for part in graph._parts]
    assert kinds == [False, True, False, True, False]
    assert "3 graphs, 2 breaks" in repr(graph)


def test_breaks_run_in_order_and_graphs_do_not_call_python() -> None:
    """A replay calls the breaks in their order, each once, and none of the Python around them."""
    order = Spy()
    first = eager_break(lambda x: (order.append("first"), x + 1)[1])
    second = eager_break(lambda x: (order.append("second"), x * 2)[1])

    def model(x: Tensor) -> Tensor:
        order.append("python")
        return second(first(x * 3) + 1) - 1  # type: ignore[no-any-return]

    served = pieces(lambda x: model(x))
    before = len(order)
    served(x=torch.randn(4, 3))
    assert order[before:] == ["first", "second"]


def test_a_break_may_read_values_back() -> None:
    """Control flow on values, which a FULL capture refuses, is right at each replay."""
    model = lambda x: host_scale(x + 1) - 1  # noqa: E731
    agrees(pieces(model), times=8)
    full = graphed(model, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    full(x=torch.randn(4, 3))
    assert full.last_decision is not None
    assert full.last_decision.reason is Reason.CAPTURE_UNSAFE


def test_breaks_count_their_runs_and_time() -> None:
    """Each break knows where it was called, how often it ran and for how long; the graph knows its time in all."""
    served = pieces(lambda x: host_scale(x + 1))
    graph = graph_of(served)
    (part,) = graph.breaks
    before = part.runs, part.time_s, graph.runs, graph.time_s
    agrees(served, times=3)
    assert (part.runs, graph.runs) == (before[0] + 3, before[2] + 3)
    assert part.time_s > before[1]
    assert part.time_s - before[1] < graph.time_s - before[3]
    assert "test_piecewise.py:" in part.where
    assert part.where.endswith("served = pieces(lambda x: host_scale(x + 1))")


def test_figures_of_breaks_are_those_of_all_graphs() -> None:
    """Breaks that one line calls, in any graph, are one; graphs in one piece have no part in it."""
    negate = eager_break(torch.nn.Identity())

    def model(x: Tensor) -> Tensor:
        for _ in range(2):
            x = host_scale(x + 1)
        return negate(x)

    served = pieces(lambda x: model(x), sizes=(2, 4))
    found = {figures.name: figures for figures in break_figures([*served.entries, *pieces(lambda x: x + 1).entries])}
    graphs = [entry.graph for entry in served.entries]
    assert set(found) == {"host_scale", "Identity"}
    for name, figures in found.items():
        parts = [part for graph in graphs for part in graph.breaks if part.name == name]  # type: ignore[attr-defined]
        assert figures.runs == sum(part.runs for part in parts)
        assert figures.time_ms == pytest.approx(sum(part.time_s for part in parts) * 1e3)
        assert figures.share == pytest.approx(figures.time_ms / sum(g.time_s * 1e3 for g in graphs))  # type: ignore[attr-defined]
    assert found["host_scale"].runs == 2 * found["Identity"].runs > 0
    assert 0 < sum(figures.share for figures in found.values()) < 1
    assert found["Identity"].place.startswith("test_piecewise.py:")


def test_an_explanation_names_the_breaks() -> None:
    """``explain`` says of a graph in pieces how many there are and where it breaks; one in one piece has none."""
    x = torch.randn(3, 3)
    served = pieces(lambda x: host_scale(host_scale(x + 1)))
    agrees(served, rows=3)
    place = break_figures(served.entries)[0].place
    text = served.explain(x=x)
    assert text.startswith("PIECEWISE graph, 3 -> 4 rows, 25.0 % padding; graphs: 3, breaks: 2 x host_scale at ")
    assert f"{place} (" in text
    assert text.endswith(" % of the time)")
    assert pieces(lambda x: x + 1).explain(x=x).endswith("; graphs: 1, breaks: none")


# What a break returns.


def test_fresh_tensors_are_copied_into_place() -> None:
    """A break that makes a new tensor each time feeds the next graph at one address."""
    fresh = eager_break(lambda x: torch.from_numpy(x.numpy() * 2))
    agrees(pieces(lambda x: fresh(x + 1) + x))


def test_a_replay_retains_no_fresh_tensor() -> None:
    """What a break makes at a replay is let go as soon as it was copied."""
    made = Spy()

    @eager_break
    def note(x: Tensor) -> Tensor:
        result = x * 2
        made.append(weakref.ref(result))
        return result

    served = pieces(lambda x: note(x + 1) + 1)
    made.clear()
    agrees(served, times=3)
    gc.collect()
    assert made
    assert all(ref() is None for ref in made)


def test_a_replay_retains_no_quantised_activations() -> None:
    """A break between quantised activations and their scales, which are new tensors each time, keeps none of them."""
    made = Spy()

    @eager_break
    def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(1, keepdim=True) / 127
        values = (x / scale).round().to(torch.int8)
        made.extend((weakref.ref(values), weakref.ref(scale)))
        return values, scale

    def model(x: Tensor) -> Tensor:
        values, scale = quantise(x + 1)
        return values.float() * scale - x

    served = pieces(model)
    made.clear()
    held = served.memory_bytes
    agrees(served, times=3)
    gc.collect()
    assert len(made) == 2 * 6  # by the replay and by eager
    assert all(ref() is None for ref in made)
    assert served.memory_bytes == held


def test_in_place_breaks() -> None:
    """A break may change its argument in place and return it, or return nothing."""
    returns = eager_break(lambda x: x.mul_(2))

    @eager_break
    def nothing(x: Tensor) -> None:
        x.add_(float(x[0, 0]))

    def model(x: Tensor) -> Tensor:
        h = x + 1
        y = returns(h)
        nothing(y)
        return h + y.add_(1)  # type: ignore[no-any-return]

    agrees(pieces(model))


def test_in_place_work_behind_a_break_reaches_what_it_returned() -> None:
    """The next graph writes to a break's fresh result, and to a view of it, as eager does."""
    fresh = eager_break(lambda x: (y := x.clone(), y[:, 1:]))

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        whole, view = fresh(x + 1)
        view.mul_(2)
        return whole, view + 1

    agrees(pieces(model))


def test_a_view_of_an_argument_is_not_copied() -> None:
    """A break that returns a view of its argument leaves it one: what is written to it shows in the argument."""
    view = eager_break(lambda x: x[:, :2])

    def model(x: Tensor) -> Tensor:
        h = x + 1
        view(h).zero_()
        return h

    agrees(pieces(model))


def test_an_expanded_result_is_served() -> None:
    """A result whose elements overlap, to which nothing can be copied, is made dense."""
    spread = eager_break(lambda x: x.sum(1, keepdim=True).expand(-1, 3))
    agrees(pieces(lambda x: spread(x + 1) * 2))


def test_several_results_in_a_nest() -> None:
    """Tensors in tuples, lists and dicts, with constants between them."""
    nest = eager_break(lambda x: {"a": (x * 2, 7, None), "b": [x + float(x[0, 0])]})

    def model(x: Tensor) -> Tensor:
        got = nest(x + 1)
        return got["a"][0] * got["a"][1] + got["b"][0]  # type: ignore[no-any-return]

    agrees(pieces(model))


def test_breaks_at_the_ends_and_side_by_side() -> None:
    """A callable may begin and end with a break, and have nothing between two of them."""
    agrees(pieces(lambda x: host_scale(host_scale(x))))


def test_a_break_on_weights_of_its_own() -> None:
    """A marked module writes to its own cache and reads its own parameters."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3).requires_grad_(False)
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.copy_(x[0])  # type: ignore[operator]
            return self.lin(x) + self.seen  # type: ignore[no-any-return]

    cached = eager_break(Cached())
    served = pieces(lambda x: cached(x + 1) * 2)
    x = torch.randn(4, 3)
    served(x=x)
    assert torch.equal(cached.seen, x[0] + 1)
    agrees(served)


# Values that live across breaks.


def test_values_across_breaks_stay_when_many_sizes_share_a_pool() -> None:
    """What one graph leaves for a part behind a break is not taken by the other sizes' graphs, in any order."""

    def model(x: Tensor) -> Tensor:
        a, b = x * 2, x + 1
        c = host_scale(a) + b
        d = c.sin()
        return host_scale(d) + a * b + c  # type: ignore[no-any-return]

    served = pieces(model, sizes=(1, 2, 4, 8, 16))
    generator = torch.Generator().manual_seed(0)
    for rows in torch.randint(1, 17, (60,), generator=generator).tolist():
        x = torch.randn(rows, 3)
        torch.testing.assert_close(served(x=x), model(x))
    assert served.stats.hits == 60
    served.check_integrity()


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("second", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_graph_may_be_replayed_in_another_mode(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    """Breaks run in the mode of their capture, so that tensors across them can be written in place."""
    weight = nn.Linear(3, 3)
    in_place = eager_break(lambda x: (x.mul_(2), weight(x)))

    def model(x: Tensor) -> Tensor:
        h, fresh = in_place(x + 1)
        return fresh.add_(1) + h  # type: ignore[no-any-return]

    with first():
        (entry,) = pieces(lambda x: model(x)).entries
        x = torch.randn(4, 3)
        expected = model(x)
    with second():
        got = entry.replay({"x": x})
    assert torch.equal(got, expected)
    assert not got.requires_grad


def test_breaks_keep_the_order_of_a_stream() -> None:
    """On a stream with a queue of its own, breaks run between the graphs around them."""
    backend = get_backend("cpu")
    served = pieces(lambda x: host_scale(host_scale(x + 1) * 2) - 1)
    stream = backend.make_stream()
    inputs = [torch.randn(4, 3) for _ in range(5)]
    results: list[Tensor] = []
    for x in inputs:
        stream.submit(lambda x=x: results.append(served(x=x)))  # type: ignore[misc]
    stream.close()
    assert all(torch.equal(got, served.unwrap()(x=x)) for got, x in zip(results, inputs, strict=True))


def test_threads_take_turns() -> None:
    """Several threads through one object get their own answers."""
    served = pieces(lambda x: host_scale(x + 1) * 2, sizes=(2, 4))
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for rows in (1, 2, 3, 4) * 5:
                x = torch.randn(rows, 3, generator=generator)
                if not torch.allclose(served(x=x), served.unwrap()(x=x)):
                    wrong.append(rows)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Wrappers.


@pytest.mark.parametrize("mode", [None, CUDAGraphMode.NONE, FULL])
def test_a_piecewise_wrapper_passes_other_modes_through(mode: CUDAGraphMode | None) -> None:
    """Without its mode it calls the runnable and captures nothing."""
    wrapper = CUDAGraphWrapper(lambda x: host_scale(x), PIECEWISE)
    x = torch.randn(4, 3)
    assert torch.equal(wrapper(x, batch_descriptor=ONE, cudagraph_runtime_mode=mode), host_scale(x))
    assert wrapper.get_cached_descriptors() == []


def test_a_wrapper_serves_full_steps_unless_told_otherwise() -> None:
    """The default mode is FULL and no other, unlike that of vLLM's breakable wrapper, which takes any mode that has
    graphs: a FULL wrapper around PIECEWISE ones must leave them their steps."""
    wrapper = CUDAGraphWrapper(lambda x: host_scale(x + 1))
    x = torch.randn(4, 3)
    assert torch.equal(wrapper(x, batch_descriptor=ONE, cudagraph_runtime_mode=PIECEWISE), host_scale(x + 1))
    assert (wrapper.runtime_mode, wrapper.get_stats().calls) == (FULL, 0)
    wrapper(x, batch_descriptor=ONE, cudagraph_runtime_mode=FULL)
    assert wrapper.get_stats().calls == 1


def test_nested_wrappers_share_pool_and_serve_each_its_own_mode() -> None:
    """A FULL wrapper around a PIECEWISE one: a FULL step is one graph, a PIECEWISE step goes to the inner one."""
    backend = get_backend("cpu")
    pool = backend.make_pool()
    double = eager_break(lambda x: x * 2)
    inner = CUDAGraphWrapper(lambda x: double(x + 1) + 1, PIECEWISE, backend=backend, pool=pool)
    outer = CUDAGraphWrapper(inner, FULL, backend=backend, pool=pool)
    for _ in range(4):
        for mode in (FULL, PIECEWISE):
            x = torch.randn(4, 3)
            with cudagraph_context(mode, ONE):
                assert torch.equal(outer(x), (x + 1) * 2 + 1)
    assert (inner.get_stats().hits, outer.get_stats().hits) == (2, 2)
    assert outer.unwrap() is inner.unwrap()


def test_two_routines_keep_all_their_graphs() -> None:
    """FULL_AND_PIECEWISE captures every size twice, and by default there is room for all of them."""
    sizes = tuple(range(1, 61))
    served = graphed(
        lambda x: x + 1, dynamic={"x": 0}, sizes=sizes, mode="FULL_AND_PIECEWISE", uniform_decode=lambda x: True
    )
    served.prewarm(x=torch.randn(4, 3))
    assert len(served.entries) == 2 * len(sizes)


# A model from outside.


def test_a_hugging_face_decoder_with_its_attention_marked_from_outside() -> None:
    """64 greedy tokens of an unmodified Llama with a ``StaticCache``, in five graphs and four breaks, have eager's
    logits bit for bit."""
    transformers = pytest.importorskip("transformers")
    tokens = 64
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        max_position_embeddings=2 * tokens,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)

    def decoder(layers: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        cache = transformers.StaticCache(config=config, max_cache_len=tokens)

        def step(input_ids: Tensor, position_ids: Tensor) -> Tensor:
            out = layers(input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True)
            return out.logits  # type: ignore[no-any-return]

        # The first token of a cache takes another path in transformers: it allocates.
        step(torch.tensor([[1]]), torch.tensor([[0]]))
        cache.reset()
        return step

    marked = copy.deepcopy(model)
    for layer in marked.model.layers:
        eager_break(layer.self_attn)
    eager, wrapped = decoder(model), CUDAGraphWrapper(decoder(marked), PIECEWISE)
    token = torch.tensor([[1]])
    for position in range(tokens):
        where = torch.tensor([[position]])
        expected = eager(token, where)
        got = wrapped(token, where, batch_descriptor=ONE, cudagraph_runtime_mode=PIECEWISE)
        assert torch.equal(got, expected), f"token {position}"
        token = expected[:, -1].argmax(-1, keepdim=True)
    assert wrapped.get_stats().hits == tokens - 2
    entry = wrapped.get_entry(ONE)
    assert entry is not None
    assert [part.name for part in entry.graph.breaks] == ["LlamaAttention"] * 4  # type: ignore[attr-defined]
    assert len(entry.graph.graphs) == 5  # type: ignore[attr-defined]
