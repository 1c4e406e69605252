"""Mistakes in arguments of public methods: one line that names the argument, before anything has happened."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch import CUDAGraphMode
from graphdispatch.engines import BatchDescriptor, DispatchKey, DispatchMode, RankConsensus

from ..helpers import AT_ONCE, check_rows, double

KEY = DispatchKey(3, 3)
NO_ROWS = DispatchKey(0, 1)
UNHASHABLE = BatchDescriptor(3, variant=[])  # type: ignore[arg-type]
FULL, NONE, EAGER, RAN = CUDAGraphMode.FULL, CUDAGraphMode.NONE, DispatchMode.EAGER, DispatchMode.CUDAGRAPH
BAD_SIZES: tuple[tuple[int, ...], ...] = (), (0, 1), (2, 2), (4, 2)
X = torch.ones(3, 3)
SHAPES: dict[str, tuple[int, ...]] = {"x": (3, 3)}


def served() -> Any:
    """A graphed callable with a graph."""
    step = gd.graphed(double, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    check_rows(step, 3, 4, 3)
    return step


def composite() -> Any:
    """A composite with one member."""
    one = gd.CompositeDispatcher()
    one.add_dispatcher("a", gd.CudagraphDispatcher(double))
    return one


def agreeing(agree: Callable[[Any], Any]) -> Any:
    """A call of one of several ranks, which agree by this function."""
    wrapper = gd.CUDAGraphWrapper(double, agree=agree)
    return wrapper(X, batch_descriptor=BatchDescriptor(len(X)), cudagraph_runtime_mode=FULL)


TARGETS: dict[str, Callable[[], Any]] = {
    "graphed": served,
    "entry": lambda: served().entries[0],
    "wrapper": lambda: gd.CUDAGraphWrapper(double),
    "adaptive": lambda: gd.AdaptiveCUDAGraphWrapper(double, max_cached_graphs=2),
    "registry": gd.CUDAGraphRegistry,
    "manager": lambda: gd.CUDAGraphManager(gd.CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4)),
    "streams": lambda: gd.StreamDispatcher(double, 1),
    "dispatcher": lambda: gd.CudagraphDispatcher(double),
    "composite": composite,
    "policy": gd.AdaptiveDispatchPolicy,
    "predictor": lambda: gd.SizePredictor((4,)),
    "prewarmer": lambda: gd.Prewarmer(gd.SizePredictor((4,))),
    "ranks": lambda: RankConsensus(sizes=(1, 2, 4)),
}


class Unprintable:
    def __repr__(self) -> str:
        raise KeyError("repr")


THING: Any = Unprintable()
MISTAKES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("graphed", lambda s: s.prewarm(X, sizes=3), "sizes"),
    ("graphed", lambda s: s.prewarm(X, sizes="12"), "sizes must be several"),
    ("graphed", lambda s: s.prewarm(X, sizes=[True]), "sizes"),
    ("graphed", lambda s: s.prewarm(X, sizes=(3,)), r"among the capture sizes \(4,\), got 3"),
    ("graphed", lambda s: s.prewarm(X, max_seconds=0), "max_seconds"),
    ("graphed", lambda s: s.prewarm(X, max_seconds="soon"), "max_seconds"),
    ("graphed", lambda s: s.prewarm(X[:0]), "prewarm cannot capture from this example"),
    ("graphed", lambda s: s.prewarm(X, sizes=["4"]), "size"),
    ("graphed", lambda s: s.prewarm(X, sizes=[torch.tensor([2, 4])]), "size"),
    ("graphed", lambda s: s.invalidate(3), "tag"),
    ("graphed", lambda s: s.sleep(["x"]), "tag"),
    ("graphed", lambda s: gd.graphed(3, dynamic={}), "fn must be callable, got 3"),
    ("graphed", lambda s: gd.graphed(torch.nn.ReLU, dynamic={}), "got the class ReLU; give an object of it"),
    ("graphed", lambda s: s.invalidate(THING), "Unprintable"),
    ("graphed", lambda s: s.prewarm(X, sizes=[THING]), "Unprintable"),
    ("graphed", lambda s: gd.graphed(THING, dynamic={}), "Unprintable"),
    ("entry", lambda e: e.replay([X]), "inputs"),
    ("wrapper", lambda w: w.invalidate(3), "tag"),
    ("wrapper", lambda w: w(X, batch_descriptor=[3], cudagraph_runtime_mode=FULL), "batch_descriptor"),
    ("wrapper", lambda w: w(X, batch_descriptor=UNHASHABLE, cudagraph_runtime_mode=FULL), "batch_descriptor"),
    ("wrapper", lambda w: w.get_entry([3]), "descriptor"),
    ("wrapper", lambda w: gd.CUDAGraphWrapper(double, backend="cpu", pool=3), "backend"),
    ("wrapper", lambda w: gd.CUDAGraphWrapper(double, NONE), "runtime_mode must be PIECEWISE"),
    ("wrapper", lambda w: gd.CUDAGraphWrapper(3), "runnable must be callable, got 3"),
    ("wrapper", lambda w: gd.CUDAGraphWrapper(double, agree=3), "agree must be a function from integers"),
    ("wrapper", lambda w: agreeing(min), "agree must return as many integers as it gets"),
    ("wrapper", lambda w: agreeing(lambda numbers: [0.5, 0.5]), "agree must return as many integers as it gets"),
    ("adaptive", lambda w: w.get_hot_shapes(0), "top_k must be an integer >= 1, got 0"),
    ("adaptive", lambda w: type(w)(double, min_replays_to_keep=-1), "min_replays_to_keep must be"),
    ("adaptive", lambda w: w.prewarm([1, 2, 3], pytest.fail), "of 3 sizes needs max_cached_graphs >= 3, got 2"),
    ("manager", lambda m: m.invalidate(3), "tag"),
    ("manager", lambda m: m.execute_or_capture(3, 1, double, {3: X}), "name of an input"),
    ("manager", lambda m: m.capture_graph(3, 1, double, inputs={"x": X}, dynamic=["x"]), "dynamic"),
    ("manager", lambda m: m.execute_or_capture(3, 1, double, {"x": X}, dynamic={"x": "a"}), "dynamic"),
    ("manager", lambda m: m.capture(3, 1, double, inputs={"x": X}, size="3"), "size"),
    ("manager", lambda m: m.capture(3, None, double, inputs={"x": X}), "seq_len"),
    ("manager", lambda m: m.capture(3, 1, double, inputs={"x": X}, mode="x"), "mode"),
    ("manager", lambda m: m.execute_or_capture(2, 1, torch.neg, {"x": X}), "'x' .* dimension 0 is not batch_size=2"),
    ("manager", lambda m: m.execute_or_capture(3, 1, pytest.fail, {"x": X}, {"x": (3, 9)}), "'x' must have shape"),
    ("manager", lambda m: m.capture_graph(9, 1, double, {"x": (9, 3)}), "by no graph in mode FULL with at most 4"),
    ("registry", lambda r: r.capture(3, 1, double), "input_shapes must name the inputs"),
    ("registry", lambda r: r.capture(0, 1, double, SHAPES), "batch_size must be an integer >= 1"),
    ("registry", lambda r: r.capture(3, 1, double, SHAPES, dynamic={"y": 0}), "dynamic names 'y', which is no input"),
    ("registry", lambda r: r.capture(3, 1, double, SHAPES, {"y": (3, 9)}), "as output_shapes says"),
    ("registry", lambda r: r.capture(3, 1, lambda: torch.ones(4), inputs={}), "no argument is a tensor"),
    ("registry", lambda r: r.capture(3, 1, double, {"x": (3, 9)}, inputs={"x": X}), r"'x' .* as input_shapes says"),
    ("registry", lambda r: r.capture(3, 1, double, {"z": (3,)}, inputs={"x": X}), "names 'z', which inputs does not"),
    ("registry", lambda r: r.capture(3, 1, double, SHAPES | {"y": (9,)}), "'y' .* dimension 0 is not batch_size=3"),
    ("streams", lambda s: s.capture(KEY, 3), "args"),
    ("streams", lambda s: s.capture(KEY, (X,), 3), "kwargs"),
    ("streams", lambda s: s.capture(None, (X,)), "key"),
    ("streams", lambda s: gd.StreamDispatcher(double, 0), "num_streams must be an integer >= 1, got 0"),
    ("streams", lambda s: gd.StreamDispatcher(double, max_cached_graphs=0), "max_cached_graphs must be"),
    ("dispatcher", lambda d: d.dispatch([1], X), "key"),
    ("dispatcher", lambda d: d.dispatch(THING, X), "Unprintable"),
    ("dispatcher", lambda d: gd.CudagraphDispatcher(None), "eager_runner must be callable, got None"),
    ("dispatcher", lambda d: gd.CudagraphDispatcher(double, None, 0), "max_cached_graphs must be"),
    ("dispatcher", lambda d: d.register_graph(KEY, 3), r"graph must have a replay\(\) method"),
    ("dispatcher", lambda d: d.register_graph(KEY, gd.MockCUDAGraph(), mode=EAGER), "mode must be CUDAGRAPH"),
    ("dispatcher", lambda d: d.register_graph(NO_ROWS, gd.MockCUDAGraph()), "DispatchKey with num_tokens >= 1"),
    ("dispatcher", lambda d: d.register_graph(8, gd.MockCUDAGraph()), "DispatchKey with num_tokens >= 1"),
    ("dispatcher", lambda d: d.disable_mode(EAGER), "EAGER cannot be disabled"),
    ("dispatcher", lambda d: gd.CudagraphDispatcher(double, "fast"), "policy must be"),
    ("dispatcher", lambda d: d.prewarm([4], lambda key: X), "key must be a DispatchKey"),
    ("composite", lambda c: c.dispatch(3, X), "key"),
    ("composite", lambda c: c.add_dispatcher("b", composite(), accepts=3), "accepts"),
    ("composite", lambda c: c.add_dispatcher("a", composite()), "name 'a' is taken"),
    ("composite", lambda c: c.add_dispatcher("b", c), "dispatcher must be another dispatcher"),
    ("composite", lambda c: gd.CompositeDispatcher().dispatch(KEY), "no member accepts"),
    *(
        ("policy", lambda p, ms=ms: p.record(KEY, RAN, ms), "latency must be a finite")
        for ms in (-1.0, math.nan, math.inf)
    ),
    ("policy", lambda p: p.record(KEY, DispatchMode.HYBRID, 1.0), "record what really ran"),
    *(("policy", lambda p, size=size: type(p)(size), "history_size must be an integer >= 1") for size in (0, 2.5)),
    ("policy", lambda p: gd.DefaultDispatchPolicy(0), "min_tokens_for_graph must be an integer >= 1, got 0"),
    ("policy", lambda p: gd.DefaultDispatchPolicy(9, 8), "max_tokens_for_graph must be at least .*9, got 8"),
    ("predictor", lambda p: type(p)((4, 2)), "sizes must be strictly"),
    ("predictor", lambda p: type(p)((4,), 0), "memory must be"),
    ("predictor", lambda p: p.forecast(0), "horizon must be"),
    ("prewarmer", lambda p: type(p)(p.predictor, budget=-0.1), "budget, allowance_ms and least must be >= 0"),
    ("prewarmer", lambda p: type(p)(p.predictor, least=math.nan), "budget, allowance_ms and least must be >= 0"),
    ("prewarmer", lambda p: type(p)(p.predictor, allowance_ms=-1.0), "budget, allowance_ms and least must be >= 0"),
    ("prewarmer", lambda p: p.step_ended(), r"step_ended\(\) must follow step_started\(\)"),
    *(("ranks", lambda r, sizes=sizes: type(r)(sizes=sizes), r"sizes(\[0\])? must") for sizes in BAD_SIZES),
    ("ranks", lambda r: r.agree(-1, ()), "rows must be an integer >= 0, got -1"),
    ("ranks", lambda r: r.agree(1, (), CUDAGraphMode.FULL_DECODE_ONLY), "mode must be FULL, PIECEWISE or NONE"),
]
"""On what a mistake is made, by its name in ``TARGETS``; the mistake; what the error says."""


@pytest.mark.parametrize(("target", "call", "words"), MISTAKES, ids=lambda one: one if isinstance(one, str) else "of")
def test_a_mistake_is_one_line(target: str, call: Callable[[Any], Any], words: str) -> None:
    """A wrong argument is a ``ConfigError`` (``GuardError`` for an input) of one line, whatever its ``repr`` does.
    Nothing is run, and no graph is made."""
    one = TARGETS[target]()
    with pytest.raises((gd.ConfigError, gd.errors.GuardError, gd.CaptureError), match=words) as caught:
        call(one)
    assert "\n" not in str(caught.value)
    assert getattr(one, "num_graphs", 0) == 0


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"dynamic": {"y": 0}}, "dynamic names 'y', which is no argument of double"),
    ({"dynamic": {"x": "0"}}, r"dynamic\['x'\] must be the number of a dimension"),
    ({"dynamic": {"x": (0, 1)}}, r"or as \{0: 'batch', 1: 'length'\}, got \(0, 1\)"),
    ({"dynamic": ["x"]}, r"dynamic must map argument names to dimensions, as \{'input': 0\}"),
    ({"dynamic": {0: 0}}, "dynamic must name arguments by text, got 0"),
    ({"dynamic": {}, "pad": {"x": 0}}, "pad names 'x', which dynamic does not"),
    ({"pad": {"y": 0}}, "pad names 'y'"),
    ({"pad": {"x": "zeros"}}, r"pad\['x'\] must be a Pad, a number, one of 'zero'"),
    ({"pad": {"x": None}}, r"pad\['x'\] must be a Pad"),
    ({"pad": {"x": gd.Pad.zero}}, r"pad\['x'\] must be a Pad"),
    ({"pad": {"x": [0]}}, r"pad\['x'\] must be a Pad"),
    ({"pad": 5}, "pad must map argument names to pad rules, .*got 5"),
    ({"pad": 0}, "pad must map argument names to pad rules, .*got 0"),
    ({"static": "x"}, "'x' is in both dynamic and static"),
    ({"static": 5}, "static must name arguments, got 5"),
    ({"sizes": (4, 2)}, "^sizes must be strictly increasing, got 4 before 2"),
    ({"sizes": (0, 2)}, r"^sizes\[0\] must be an integer >= 1"),
    ({"sizes": "fibonacci"}, "^sizes must be one of"),
    ({"sizes": "vlm"}, r"got 'vlm'; did you mean 'vllm'\?$"),
    ({"sizes": 8}, r"^sizes must be increasing sizes, as \(1, 2, 4, 8\), .*got 8; max_size=8 sets the largest alone"),
    ({"maxsize": 8}, r"^graphed\(\) has no argument 'maxsize'; did you mean 'max_size'\?$"),
    ({"bananas": 8}, r"^graphed\(\) has no argument 'bananas'; it takes fn, dynamic, pad, "),
    ({"sizes": "none.json"}, "none.json cannot be read"),
    ({"sizes": (2, 4), "max_size": 3}, "^sizes must be at most max_size=3, got 4; raise max_size"),
    ({"max_size": 0}, "^max_size must be greater than or equal to 1, got 0"),
    ({"mode": "PIECE"}, "mode must be one of"),
    ({"mode": "ful"}, r"did you mean 'FULL'\?$"),
    ({"mode": "FULL_AND_PIECEWISE"}, "mode must be FULL, PIECEWISE or NONE for graphed"),
    ({"outputs": "copy"}, "outputs must be 'clone', 'view' or 'static'"),
    ({"backend": "tpu"}, "tpu"),
    ({"options": {"verify": False}}, r"options must be a CUDAGraphOptions or None, .*from_dict"),
    ({"options": {}}, "options must be a CUDAGraphOptions or None, got {}"),
    ({"options": gd.CUDAGraphOptions(inputs="static")}, "options.inputs must be 'copy' for graphed, .* static="),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS)
def test_bad_option_is_an_error(options: dict[str, Any], words: str) -> None:
    """Every bad option is refused when the step is made, in a sentence that names it."""
    with pytest.raises(gd.errors.GraphDispatchError, match=words):
        gd.graphed(double, **({"dynamic": {"x": 0}, "sizes": (2, 4)} | options))


CALLS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: gd.graphed(double, {"x": 0}),
        r"^graphed\(\) takes one argument without a name, fn, got 2; .* as dynamic={'x': 0}",
    ),
    (lambda: gd.graphed(double), r"^graphed\(\) needs dynamic=, .*; give it by name, as dynamic={'x': 0}"),
    (lambda: gd.graphed(3), r"^graphed\(\) needs dynamic=, .*; give it by name, as dynamic={'x': 0}"),
    (lambda: gd.graphed(dynamic={}), r"^graphed\(\) needs fn, which it serves, as graphed\(model, dynamic={...}\)"),
    (lambda: gd.attach(torch.nn.ReLU()), r"^attach\(\) needs dynamic=, .* as dynamic={'input': 0}"),
    (lambda: gd.attach(torch.nn.ReLU(), dynamic={}, metod="x"), r"^attach\(\) has .* did you mean 'method'\?$"),
    (lambda: gd.attach(torch.nn.ReLU(), dynamic={}, maxsize=4), r"^attach\(\) has .* did you mean 'max_size'\?$"),
    (lambda: gd.CUDAGraphOptions(max_cached_graph=4), r"unknown to CUDAGraphOptions; did you mean 'max_cached_graphs'"),
    (lambda: gd.CUDAGraphOptions(bananas=4), "unknown to CUDAGraphOptions; expected one of debug_log_enable, "),
]


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_a_name_that_is_wrong_or_missing_says_what_was_meant(call: Callable[[], Any], words: str) -> None:
    """A keyword that there is not, one that is missing, or a position in place of a name is a ``ConfigError`` that
    names the argument, with the name that was probably meant, or those that there are."""
    with pytest.raises(gd.ConfigError, match=words):
        call()


def test_what_graphs_serve_already_is_not_served_once_more() -> None:
    """Neither what ``graphed`` returned nor a module with ``attach``, until it is given back; the error says how."""
    step, module = gd.graphed(double, dynamic={"x": 0}), torch.nn.ReLU()
    with pytest.raises(gd.ConfigError, match=r"must not be served by graphs already, .*; give what it wraps"):
        gd.graphed(step, dynamic={"x": 0})
    gd.graphed(step.unwrap(), dynamic={"x": 0})
    handle = gd.attach(module, dynamic={"input": 0})
    with pytest.raises(gd.ConfigError, match=r"must not be served by graphs already, .*; detach\(\) what attach"):
        gd.graphed(module, dynamic={"input": 0})
    handle.detach()
    gd.graphed(module, dynamic={"input": 0})
