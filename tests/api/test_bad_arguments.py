"""Mistakes in arguments of public methods: one line that names the argument, before anything has happened."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch import CUDAGraphMode
from graphdispatch.engines import BatchDescriptor, DispatchKey, DispatchMode

from ..helpers import AT_ONCE, double

KEY = DispatchKey(3, 3)
FULL = CUDAGraphMode.FULL


X = torch.ones(3, 3)
SHAPES: dict[str, tuple[int, ...]] = {"x": (3, 3)}


def served() -> Any:
    """A graphed callable with a graph."""
    step = gd.graphed(double, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for rows in (3, 4, 3):
        step(torch.ones(rows, 3))
    return step


def wrapper() -> Any:
    """A wrapper."""
    return gd.CUDAGraphWrapper(double)


def adaptive() -> Any:
    """A wrapper with room for two graphs."""
    return gd.AdaptiveCUDAGraphWrapper(double, max_cached_graphs=2)


def registry() -> Any:
    """A registry without graphs."""
    return gd.CUDAGraphRegistry()


def manager() -> Any:
    """A manager."""
    return gd.CUDAGraphManager(gd.CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4))


def streams() -> Any:
    """A dispatcher over one stream."""
    return gd.StreamDispatcher(double, 1)


def dispatcher() -> Any:
    """A dispatcher."""
    return gd.CudagraphDispatcher(double)


def composite() -> Any:
    """A composite with one member."""
    one = gd.CompositeDispatcher()
    one.add_dispatcher("a", dispatcher())
    return one


class Unprintable:
    def __repr__(self) -> str:
        raise KeyError("repr")


THING: Any = Unprintable()
MISTAKES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "prewarm sizes a number": (served, lambda s: s.prewarm(X, sizes=3), "sizes"),
    "prewarm sizes text": (served, lambda s: s.prewarm(X, sizes="12"), "sizes must be several"),
    "prewarm sizes true": (served, lambda s: s.prewarm(X, sizes=[True]), "sizes"),
    "capture_size text": (served, lambda s: s.capture_size("4"), "size"),
    "invalidate a number": (served, lambda s: s.invalidate(3), "tag"),
    "sleep a list": (served, lambda s: s.sleep(["x"]), "tag"),
    "entry inputs": (lambda: served().entries[0], lambda e: e.replay([X]), "inputs"),
    "wrapper invalidate": (wrapper, lambda w: w.invalidate(3), "tag"),
    "wrapper descriptor a list": (
        wrapper, lambda w: w(X, batch_descriptor=[3], cudagraph_runtime_mode=FULL), "batch_descriptor",
    ),
    "wrapper variant a list": (
        wrapper,
        lambda w: w(X, batch_descriptor=BatchDescriptor(3, variant=[]), cudagraph_runtime_mode=FULL),  # type: ignore[arg-type]
        "batch_descriptor",
    ),
    "wrapper get_entry": (wrapper, lambda w: w.get_entry([3]), "descriptor"),
    "wrapper backend": (wrapper, lambda w: gd.CUDAGraphWrapper(double, backend="cpu", pool=3), "backend"),
    "manager tag": (manager, lambda m: m.invalidate(3), "tag"),
    "manager names": (manager, lambda m: m.execute_or_capture(3, 1, double, {3: X}), "name of an input"),
    "manager dynamic a list": (
        manager, lambda m: m.capture_graph(3, 1, double, inputs={"x": X}, dynamic=["x"]), "dynamic",
    ),
    "manager dynamic text": (
        manager, lambda m: m.execute_or_capture(3, 1, double, {"x": X}, dynamic={"x": "a"}), "dynamic",
    ),
    "registry size": (manager, lambda m: m.capture(3, 1, double, inputs={"x": X}, size="3"), "size"),
    "registry seq_len": (manager, lambda m: m.capture(3, None, double, inputs={"x": X}), "seq_len"),
    "registry mode": (manager, lambda m: m.capture(3, 1, double, inputs={"x": X}, mode="x"), "mode"),
    "dispatch key": (dispatcher, lambda d: d.dispatch([1], X), "key"),
    "streams args": (streams, lambda s: s.capture(KEY, 3), "args"),
    "streams kwargs": (streams, lambda s: s.capture(KEY, (X,), 3), "kwargs"),
    "streams key": (streams, lambda s: s.capture(None, (X,)), "key"),
    "composite key": (composite, lambda c: c.dispatch(3, X), "key"),
    "composite accepts": (composite, lambda c: c.add_dispatcher("b", dispatcher(), accepts=3), "accepts"),
    "composite name taken": (composite, lambda c: c.add_dispatcher("a", dispatcher()), "name 'a' is taken"),
    "composite itself": (composite, lambda c: c.add_dispatcher("b", c), "dispatcher must be another dispatcher"),
    "composite empty": (composite, lambda c: gd.CompositeDispatcher().dispatch(KEY), "no member accepts"),
    "streams none": (streams, lambda s: gd.StreamDispatcher(double, 0), "num_streams must be an integer >= 1, got 0"),
    "streams room": (streams, lambda s: gd.StreamDispatcher(double, max_cached_graphs=0), "max_cached_graphs must be"),
    "dispatcher runner": (
        dispatcher, lambda d: gd.CudagraphDispatcher(None), "eager_runner must be callable, got None",
    ),
    "dispatcher room": (dispatcher, lambda d: gd.CudagraphDispatcher(double, None, 0), "max_cached_graphs must be"),
    "register a graph": (dispatcher, lambda d: d.register_graph(KEY, 3), r"graph must have a replay\(\) method"),
    "register eager": (
        dispatcher,
        lambda d: d.register_graph(KEY, gd.MockCUDAGraph(), mode=DispatchMode.EAGER),
        "mode must be CUDAGRAPH",
    ),
    "register no rows": (
        dispatcher,
        lambda d: d.register_graph(DispatchKey(0, 1), gd.MockCUDAGraph()),
        "DispatchKey with num_tokens >= 1",
    ),
    "register no key": (
        dispatcher, lambda d: d.register_graph(8, gd.MockCUDAGraph()), "DispatchKey with num_tokens >= 1",
    ),
    "disable eager": (dispatcher, lambda d: d.disable_mode(DispatchMode.EAGER), "EAGER cannot be disabled"),
    "wrapper mode": (
        wrapper, lambda w: gd.CUDAGraphWrapper(double, CUDAGraphMode.NONE), "runtime_mode must be PIECEWISE",
    ),
    "wrapper runnable": (wrapper, lambda w: gd.CUDAGraphWrapper(3), "runnable must be callable, got 3"),
    "adaptive no shapes": (adaptive, lambda w: w.get_hot_shapes(0), "top_k must be an integer >= 1, got 0"),
    "adaptive least": (
        adaptive, lambda w: gd.AdaptiveCUDAGraphWrapper(double, min_replays_to_keep=-1), "min_replays_to_keep must be",
    ),
    "adaptive no room": (
        adaptive,
        lambda w: w.prewarm([1, 2, 3], pytest.fail),
        "prewarm of 3 shapes needs max_cached_graphs >= 3, got 2",
    ),
    "registry contradiction": (
        registry,
        lambda r: r.capture(3, 1, double, {"x": (3, 9)}, inputs={"x": X}),
        r"input 'x' must have shape \(3, 9\) as input_shapes says, got \(3, 3\)",
    ),
    "registry shape alone": (
        registry,
        lambda r: r.capture(3, 1, double, {"z": (3,)}, inputs={"x": X}),
        "input_shapes names 'z', which inputs does not",
    ),
    "registry nothing": (registry, lambda r: r.capture(3, 1, double), "input_shapes must name the inputs"),
    "registry no rows": (registry, lambda r: r.capture(0, 1, double, SHAPES), "batch_size must be an integer >= 1"),
    "registry dynamic": (
        registry, lambda r: r.capture(3, 1, double, SHAPES, dynamic={"y": 0}), "dynamic names 'y', which is no input",
    ),
    "registry no batch": (
        registry,
        lambda r: r.capture(3, 1, double, SHAPES | {"y": (9,)}),
        r"input 'y' has shape \(9,\), whose dimension 0 is not batch_size=3",
    ),
    "registry output": (registry, lambda r: r.capture(3, 1, double, SHAPES, {"y": (3, 9)}), "as output_shapes says"),
    "registry no tensors": (
        registry, lambda r: r.capture(3, 1, lambda: torch.ones(4), inputs={}), "no argument is a tensor",
    ),
    "manager other rows": (
        manager,
        lambda m: m.execute_or_capture(2, 1, torch.neg, {"x": X}),
        r"input 'x' has shape \(3, 3\), whose dimension 0 is not batch_size=2",
    ),
    "manager input shapes": (
        manager, lambda m: m.execute_or_capture(3, 1, pytest.fail, {"x": X}, {"x": (3, 9)}),
        r"input 'x' must have shape \(3, 9\)",
    ),
    "manager too large": (
        manager,
        lambda m: m.capture_graph(9, 1, double, {"x": (9, 3)}),
        "batch_size=9, seq_len=1 is served by no graph in mode FULL with at most 4",
    ),
    "prewarm another size": (served, lambda s: s.prewarm(X, sizes=(3,)), r"among the capture sizes \(4,\), got 3"),
    "prewarm no rows": (served, lambda s: s.prewarm(X[:0]), "prewarm cannot capture from this example"),
    "graphed nothing": (served, lambda s: gd.graphed(3, dynamic={}), "fn must be callable, got 3"),
    "unprintable tag": (served, lambda s: s.invalidate(THING), "Unprintable"),
    "unprintable size": (served, lambda s: s.prewarm(X, sizes=[THING]), "Unprintable"),
    "unprintable callable": (served, lambda s: gd.graphed(THING, dynamic={}), "Unprintable"),
    "unprintable key": (dispatcher, lambda d: d.dispatch(THING, X), "Unprintable"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str) -> None:
    """A wrong argument is a ``ConfigError`` (``GuardError`` for an input) of one line, whatever its ``repr`` does.
    Nothing is run, and no graph is made."""
    make, call, name = MISTAKES[mistake]
    target = make()
    with pytest.raises((gd.ConfigError, gd.errors.GuardError, gd.CaptureError), match=name) as caught:
        call(target)
    assert "\n" not in str(caught.value)
    assert getattr(target, "num_graphs", 0) == 0


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown argument": ({"dynamic": {"y": 0}}, "dynamic names 'y', which is no argument of double"),
    "unknown pad": ({"pad": {"y": 0}}, "pad names 'y'"),
    "pad without dynamic": ({"dynamic": {}, "pad": {"x": 0}}, "pad names 'x', which dynamic does not"),
    "unknown pad rule": ({"pad": {"x": "zeros"}}, r"pad\['x'\] must be a Pad, a number, one of 'zero'"),
    "no pad rule": ({"pad": {"x": None}}, r"pad\['x'\] must be a Pad"),
    "a list as a pad rule": ({"pad": {"x": [0]}}, r"pad\['x'\] must be a Pad"),
    "static and dynamic": ({"static": "x"}, r"\['x'\] are in both dynamic and static"),
    "dimension is no number": ({"dynamic": {"x": "0"}}, r"dynamic\['x'\] must be the number of a dimension"),
    "several dimensions": ({"dynamic": {"x": (0, 1)}}, r"or as \{0: 'batch', 1: 'length'\}, got \(0, 1\)"),
    "dynamic is no mapping": (
        {"dynamic": ["x"]},
        r"dynamic must map argument names to dimensions, as \{'input': 0\}",
    ),
    "sizes not increasing": ({"sizes": (4, 2)}, "^sizes must be strictly increasing, got 4 before 2"),
    "size zero": ({"sizes": (0, 2)}, r"^sizes\[0\] must be an integer >= 1"),
    "unknown name": ({"sizes": "fibonacci"}, "^sizes must be one of"),
    "size above max_size": (
        {"sizes": (2, 4), "max_size": 3},
        "^sizes must be at most max_size=3, got 4; raise max_size",
    ),
    "max_size zero": ({"max_size": 0}, "^max_size must be greater than or equal to 1, got 0"),
    "mode": ({"mode": "PIECE"}, "mode must be one of"),
    "outputs": ({"outputs": "copy"}, "outputs must be 'clone', 'view' or 'static'"),
    "backend": ({"backend": "tpu"}, "tpu"),
    "options is a mapping": (
        {"options": {"verify": False}},
        r"options must be a CUDAGraphOptions or None, .*from_dict",
    ),
    "options is empty": ({"options": {}}, "options must be a CUDAGraphOptions or None, got {}"),
    "options with static inputs": (
        {"options": gd.CUDAGraphOptions(inputs="static")},
        "options.inputs must be 'copy' for graphed, got 'static'; .* static=",
    ),
    "outputs given twice": (
        {"outputs": "clone", "options": gd.CUDAGraphOptions(outputs="view")},
        "outputs='clone' contradicts options.outputs='view'; give one of them",
    ),
    "pad is no mapping": ({"pad": 5}, "pad must map argument names to pad rules, .*got 5"),
    "pad is false": ({"pad": 0}, "pad must map argument names to pad rules, .*got 0"),
    "static is no names": ({"static": 5}, "static must name arguments, got 5"),
    "a name is no text": ({"dynamic": {0: 0}}, "dynamic must name arguments by text, got 0"),
    "two modes": ({"mode": "FULL_AND_PIECEWISE"}, "mode must be FULL, PIECEWISE or NONE for graphed"),
    "sizes is a file that is not there": ({"sizes": "none.json"}, "none.json cannot be read"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_option_is_an_error(name: str) -> None:
    """Every bad option is refused when the step is made, in a sentence that names it."""
    options, words = BAD_OPTIONS[name]
    with pytest.raises(gd.errors.GraphDispatchError, match=words):
        gd.graphed(double, **({"dynamic": {"x": 0}, "sizes": (2, 4)} | options))
