"""Bad arguments at every front door: one ``ConfigError`` that names the argument, and the door works as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphdispatch as gd

FULL = gd.CUDAGraphMode.FULL
X = torch.ones(4, 3)
KEY = gd.DispatchKey(4, 4)
CONFIG = gd.CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4, capture_after=1)


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice the input."""
    return x * 2


def dummy(descriptor: gd.BatchDescriptor) -> torch.Tensor:
    """An argument of so many rows."""
    return torch.ones(descriptor.num_tokens, 3)


def _serve_manager(manager: gd.CUDAGraphManager) -> torch.Tensor:
    served: torch.Tensor = manager.execute_or_capture(4, 1, double, {"x": X})
    return served


def _serve_registry(registry: gd.CUDAGraphRegistry) -> torch.Tensor:
    served: torch.Tensor = registry.capture(4, 1, double, {"x": (4, 3)}).replay({"x": X})
    return served


def _serve_wrapper(wrapper: gd.CUDAGraphWrapper) -> torch.Tensor:
    with gd.cudagraph_context(FULL, gd.BatchDescriptor(4)):
        served: torch.Tensor = wrapper(X)
    return served


def _serve_dispatcher(dispatcher: Any) -> torch.Tensor:
    served: torch.Tensor = dispatcher.dispatch(KEY, X)
    return served


def in_context(*context: Any) -> Callable[[Any], Any]:
    """A call within ``cudagraph_context(*context)``."""

    def call(wrapper: Any) -> Any:
        with gd.cudagraph_context(*context):
            return wrapper(X)

    return call


def composite() -> gd.CompositeDispatcher:
    """A composite of one member."""
    made = gd.CompositeDispatcher()
    made.add_dispatcher("only", gd.CudagraphDispatcher(double))
    return made


MANAGER: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: m.execute_or_capture("4", 1, double, {"x": X}), "batch_size must be an integer, got '4'"),
    (lambda m: m.execute_or_capture(4.0, 1, double, {"x": X}), "batch_size must be an integer, got 4.0"),
    (lambda m: m.execute_or_capture(4, None, double, {"x": X}), "seq_len must be an integer, got None"),
    (lambda m: m.execute_or_capture(4, 1, None, {"x": X}), "execute_fn must be callable, got None"),
    (lambda m: m.execute_or_capture(4, 1, double, [X]), "inputs must be a mapping from name to tensor, got a list"),
    (lambda m: m.execute_or_capture(4, 1, double, {"x": X, "k": 2}), "input 'k' must be a tensor, got 2"),
    (lambda m: m.execute_or_capture(4, 1, double, {"x": X}, [(4, 3)]), "input_shapes must map names to shapes"),
    (lambda m: m.execute_or_capture(4, 1, double, {"x": X}, None, {"y": 4}), "output_shapes must map names to shapes"),
    (lambda m: m.capture_graph(4, 1, None, {"x": (4, 3)}), "capture_fn must be callable, got None"),
    (lambda m: m.should_capture("4", 1), "batch_size must be an integer, got '4'"),
]
REGISTRY: list[tuple[Callable[[Any], Any], str]] = [
    (lambda r: r.capture(4, 1, double, {"x": (4, -3)}), "input_shapes must hold lengths >= 0"),
    (lambda r: r.capture(4, 1, double, {"x": "ab"}), "input_shapes must map names to shapes"),
    (lambda r: r.capture(4, 1, double, inputs={"x": 3}), "input 'x' must be a tensor, got 3"),
    (lambda r: r.capture(4, 1, double, {"x": (4, 3)}, size=2), "size must be at least batch_size=4, got 2"),
]
WRAPPER: list[tuple[Callable[[Any], Any], str]] = [
    (lambda w: w(X, batch_descriptor=gd.BatchDescriptor(4), cudagraph_runtime_mode="FULL"), "must be a CUDAGraphMode"),
    (lambda w: w(X, batch_descriptor=4, cudagraph_runtime_mode=FULL), "must be a BatchDescriptor, .* got 4"),
    (
        lambda w: w(X, batch_descriptor=KEY, cudagraph_runtime_mode=FULL),
        "must be a BatchDescriptor, .* got DispatchKey",
    ),
    (in_context(FULL, 4), "descriptor must be a BatchDescriptor in mode FULL, got 4"),
    (lambda w: w.prewarm(4, dummy), "shapes must be several descriptors or numbers of tokens, got 4"),
    (lambda w: w.prewarm(["4"], dummy), "shapes: a number of tokens must be an integer >= 1, got '4'"),
    (lambda w: w.prewarm([0], dummy), "shapes: a number of tokens must be an integer >= 1, got 0"),
    (lambda w: w.prewarm([4], None), "dummy_fn must be a function"),
    (lambda w: w.capture_size(4), "capture_size needs a dummy_fn"),
]
DISPATCHER: list[tuple[Callable[[Any], Any], str]] = [
    (lambda d: d.enable_mode("piecewise"), "mode must be a DispatchMode, got 'piecewise'"),
    (lambda d: d.disable_mode("cudagraph"), "mode must be a DispatchMode, got 'cudagraph'"),
    (lambda d: d.dispatch(4, X), "key must be a DispatchKey, got 4"),
    (lambda d: d.dispatch(gd.BatchDescriptor(4), X), r"key must be a DispatchKey, got BatchDescriptor\("),
    (lambda d: d.register_graph(KEY, gd.MockCUDAGraph(), X.data_ptr()), "input_ptrs must be addresses"),
    (lambda d: d.register_graph(KEY, gd.MockCUDAGraph(), [X]), "input_ptrs must be addresses"),
]
COMPOSITE: list[tuple[Callable[[Any], Any], str]] = [
    (lambda c: c.add_dispatcher(4, gd.CudagraphDispatcher(double)), "name must be of type str, got 4"),
    (lambda c: c.add_dispatcher("b", gd.CudagraphDispatcher(double), "high"), "priority must be of type int"),
    (lambda c: c.dispatch(4, X), "key must be a DispatchKey, got 4"),
]
DOORS: list[tuple[Callable[[], Any], Callable[[Any], torch.Tensor], list[tuple[Callable[[Any], Any], str]]]] = [
    (lambda: gd.CUDAGraphManager(CONFIG), _serve_manager, MANAGER),
    (lambda: gd.CUDAGraphRegistry(CONFIG), _serve_registry, REGISTRY),
    (lambda: gd.AdaptiveCUDAGraphWrapper(double), _serve_wrapper, WRAPPER),
    (lambda: gd.CudagraphDispatcher(double), _serve_dispatcher, DISPATCHER),
    (composite, _serve_dispatcher, COMPOSITE),
]
CASES = [(make, serve, call, named) for make, serve, cases in DOORS for call, named in cases]


@pytest.mark.parametrize(("make", "serve", "call", "named"), CASES, ids=[named for *_, named in CASES])
def test_a_bad_call_is_named_and_changes_nothing(
    make: Callable[[], Any], serve: Callable[[Any], torch.Tensor], call: Callable[[Any], Any], named: str
) -> None:
    """The next good call is served as if the bad one had not been made."""
    door = make()
    with pytest.raises(gd.ConfigError, match=named):
        call(door)
    assert torch.equal(serve(door), double(X))
    assert repr(door).startswith(f"<{type(door).__name__} ")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: gd.CUDAGraphManager({"mode": "FULL"}), "config must be a CUDAGraphConfig or None"),  # type: ignore[arg-type]
        (lambda: gd.CUDAGraphRegistry({"mode": "FULL"}), "config must be a CUDAGraphConfig or None"),  # type: ignore[arg-type]
        (lambda: gd.CUDAGraphWrapper(double, FULL, {}), "options must be a CUDAGraphOptions or None"),  # type: ignore[arg-type]
        (lambda: gd.CudagraphDispatcher(double, "adaptive"), "policy must be a DispatchPolicy or None"),  # type: ignore[arg-type]
        (lambda: gd.StreamDispatcher(double, policy=gd.DefaultDispatchPolicy), "policy must be a DispatchPolicy"),  # type: ignore[arg-type]
        (lambda: gd.CudagraphDispatcher(double, None, 2.5), "max_cached_graphs must be an integer >= 1, got 2.5"),  # type: ignore[arg-type]
        (lambda: gd.DefaultDispatchPolicy("a"), "min_tokens_for_graph must be an integer >= 1, got 'a'"),  # type: ignore[arg-type]
        (lambda: gd.get_cudagraph_sizes(8, 8, 64, FULL), "capture_sizes must be increasing sizes, got 8"),  # type: ignore[arg-type]
        (lambda: CONFIG.get_padded_batch_size(2.5), "batch_size must be an integer, got 2.5"),  # type: ignore[arg-type]
        (lambda: gd.CudagraphKeyDispatcher().dispatch(4), "batch_descriptor must be a BatchDescriptor, got 4"),  # type: ignore[arg-type]
        (lambda: gd.CudagraphKeyDispatcher().add_cudagraph_key(FULL, 4), "must be a BatchDescriptor, .* got 4"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_made_says_why(make: Callable[[], Any], named: str) -> None:
    """At construction, or where plain data is asked."""
    with pytest.raises(gd.ConfigError, match=named):
        make()
