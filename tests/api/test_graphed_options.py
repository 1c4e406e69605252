"""The options of ``graphed()``, and what bad input gives: an error that says what to do, or eager with a reason."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphdispatch import CUDAGraphOptions, Pad, Reason, graphed
from graphdispatch.engines import OutputView
from graphdispatch.errors import ConfigError, FallbackError, GraphDispatchError

from ..doubled import batch, double, make, reason
from ..helpers import AT_ONCE


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("after", [1, 2, 4])
def test_capture_after(after: int) -> None:
    """A size is captured at its ``capture_after``-th sighting; other sizes count for themselves."""
    step = make(capture_after=after)
    seen = [reason(step, batch(4)) for _ in range(after)]
    assert seen == [Reason.FIRST_SIGHTING] * (after - 1) + [Reason.CAPTURED_NOW]
    assert reason(step, batch(2)) is (Reason.CAPTURED_NOW if after == 1 else Reason.FIRST_SIGHTING)


def test_strict_raises_instead_of_eager() -> None:
    """With ``strict`` a step that no graph can ever serve raises before it runs; those on the way to one do not."""
    step = make(strict=True)
    assert reason(step, batch(4)) is Reason.CAPTURED_NOW
    with pytest.raises(FallbackError, match="larger than the largest graph") as caught:
        step(batch(5))
    assert caught.value.reason is Reason.ABOVE_LARGEST_SIZE
    assert reason(step, batch(4)) is Reason.VERIFIED_NOW


def test_strict_keeps_the_cause() -> None:
    """A capture that fails raises with ``strict``, and says why."""
    with pytest.raises(FallbackError, match=r"reads a value back to the host \(.item") as caught:
        make(lambda x: x * x.sum().item(), strict=True)(batch(4))
    assert caught.value.reason is Reason.CAPTURE_UNSAFE


@pytest.mark.parametrize(
    ("pad", "expected"),
    [(None, 0.0), ("zero", 0.0), (7.0, 7.0), ("repeat_last", 2.0), (Pad.value(3), 3.0), (lambda p, r: p.fill_(5), 5.0)],
)
def test_pad_rule_reaches_the_padding(pad: Any, expected: float) -> None:
    """The padding row that a model sees holds what the rule says."""
    seen = torch.zeros(4, 3)
    options = CUDAGraphOptions(padding_writes="allow")
    rules = {} if pad is None else {"pad": {"x": pad}}
    step = make(lambda x: seen[: x.shape[0]].copy_(x) * 1, sizes=(4,), options=options, **rules)
    step.prewarm(batch(3))
    step(batch(3))  # the first padded batch with rows that differ is compared with eager, and its writes are eager's
    step(torch.full((3, 3), 2.0))
    assert torch.equal(seen[3], torch.full((3,), expected))


def test_padding_writes_are_refused() -> None:
    """By default a model whose padding writes state of its own stays eager at padded sizes."""
    state = torch.zeros(4, 3)
    step = make(lambda x: state[: x.shape[0]].copy_(x) * 1, sizes=(4,))
    assert reason(step, batch(3)) is Reason.PADDING_WRITES_STATE


def test_failure_is_retried_with_back_off() -> None:
    """A size whose capture failed is tried again after 16 sightings, then after 64, then never."""
    step = make(lambda x: x * x.sum().item(), sizes=(4,))
    for _ in range(200):
        step(batch(4))
    assert step.stats.capture_failures == 3


def test_max_failures() -> None:
    """With ``max_failures=1`` a failed capture is not tried again."""
    step = make(lambda x: x * x.sum().item(), sizes=(4,), options=CUDAGraphOptions(max_failures=1))
    for _ in range(50):
        step(batch(4))
    assert step.stats.capture_failures == 1


class Counting(torch.nn.Module):
    """Counts its calls in Python, as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = True
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        return x * 2


def test_what_rebinds_its_state_is_not_captured_in_vain_at_each_call() -> None:
    """It is tried at once again, after 16, 64, ... sightings, and captured when it no longer does."""
    model = Counting().eval()
    step = make(model, sizes=(4,), capture_after=1, options=CUDAGraphOptions(max_failures=1))
    for number in range(100):
        x = batch(4)
        assert torch.equal(step(x), x * 2)
        assert step.last_decision.reason is Reason.STATE_REBOUND
        assert model.calls == number + 1
    assert step.stats.capture_failures == 4
    model.counts = False
    for _ in range(260):
        step(batch(4))
    assert step.last_decision.reason is Reason.EXACT
    assert step.stats.captures == 1


def test_what_is_made_in_the_first_call_alone_is_captured_at_the_second() -> None:
    """A table that ``forward`` makes when it is first called."""

    class Lazy(torch.nn.Module):
        table = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.ones(3)
            return x + self.table

    step = make(Lazy().eval(), sizes=(4,), capture_after=1)
    reasons = [reason(step, batch(4)) for _ in range(4)]
    assert reasons == [Reason.STATE_REBOUND, Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.EXACT]


def test_unguarded_weights_are_captured_anew_after_clear() -> None:
    """With ``guard_weights=False`` the caller says when they move; what is captured then is guarded from then on."""
    layer = torch.nn.Linear(3, 3).eval()
    step = make(layer, dynamic={"input": 0}, sizes=(4,), options=CUDAGraphOptions(guard_weights=False))
    for _ in range(4):
        step(batch(4))
    layer.weight = torch.nn.Parameter(torch.randn(3, 3), requires_grad=False)
    step.clear()
    for _ in range(4):
        x = batch(4)
        assert torch.equal(step(x), layer(x))
    assert step.last_decision.reason is Reason.EXACT


def test_failure_is_per_size() -> None:
    """A size that cannot be captured leaves the others alone."""
    step = make(lambda x: x * (x.sum().item() if x.shape[0] == 4 else 2.0))
    assert reason(step, batch(4)) is Reason.CAPTURE_UNSAFE
    assert reason(step, batch(2)) is Reason.CAPTURED_NOW


def test_memory_budget_keeps_no_graph_that_is_larger() -> None:
    """Under a budget that no graph keeps, none stays, and answers stay right."""
    step = make(lambda x: x @ x.new_ones(3, 100), memory_budget_bytes=1, sizes=(1, 2, 4))
    for rows in (4, 2, 1, 4):
        x = batch(rows)
        assert torch.equal(step(x), x @ x.new_ones(3, 100))
        assert step.entries == []
    assert step.stats.evictions == 3
    step.check_integrity()


def test_max_cached_graphs() -> None:
    """At most so many graphs are kept; the least recently used goes."""
    step = make(max_cached_graphs=1)
    for rows in (4, 2):
        step(batch(rows))
    assert [entry.size for entry in step.entries] == [2]


@pytest.mark.parametrize("mode", ["NONE", "none", 0])
def test_mode_none(mode: Any) -> None:
    """In mode NONE everything is eager, with that reason."""
    assert reason(make(mode=mode), batch(4)) is Reason.DISABLED


def test_explain_tells_what_would_happen() -> None:
    """``explain`` has a line for each stage of a size, and neither runs nor counts anything."""
    step = make(capture_after=2, sizes=(4,))
    lines = []
    for _ in range(4):
        lines.append(step.explain(batch(3)))
        step(batch(3))
    assert lines == [
        "eager, 3 rows: this size was seen for the first time; it is captured when it comes again",
        "eager, 3 rows: this call captured the graph; its result comes from eager",
        "eager, 3 rows: this call compared the graph with eager; its result comes from eager",
        "FULL graph, 3 -> 4 rows, 25.0 % padding",
    ]
    assert step.stats.calls == 4


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((torch.zeros(0, 3),), "no rows"),
        ((torch.zeros(9, 3),), r"larger than the largest graph.*\(largest: 4\)"),
        ((torch.zeros(4, 3, requires_grad=True),), "eager, 4 rows|captured"),
    ],
)
def test_explain_of_odd_batches(args: tuple[Any, ...], words: str) -> None:
    """``explain`` has a line for batches that no graph serves, too."""
    assert re.search(words, make().explain(*args))


class Stateful(nn.Module):
    """A counter, a statistic and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.total.mul_(0.5)
        return nn.functional.dropout(x, 0.5) + self.total


def test_prewarm_leaves_no_effect() -> None:
    """``prewarm`` leaves state, generator and arguments as they were, and every later call is a replay."""
    model = Stateful()
    model.total.fill_(8.0)
    step = make(model, sizes=(1, 2, 4))
    x = batch(3)
    kept, generator = x.clone(), torch.get_rng_state()
    step.prewarm(x)
    assert int(model.count) == 0
    assert torch.equal(model.total, torch.full((3,), 8.0))
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [entry.size for entry in step.entries] == [1, 2, 4]


def test_prewarmed_calls_are_hits() -> None:
    """After ``prewarm`` every number of rows up to the largest is served at once."""
    step = make(sizes=(1, 2, 4))
    step.prewarm(batch(2))
    assert [reason(step, batch(rows)).is_graph for rows in (1, 2, 3, 4)] == [True] * 4
    assert step.stats.hit_rate == 1.0


def test_prewarm_of_some_sizes() -> None:
    """``sizes`` names what to capture."""
    step = make(sizes=(1, 2, 4))
    step.prewarm(batch(1), sizes=(2,))
    assert [entry.size for entry in step.entries] == [2]


def test_prewarm_checks_its_sizes() -> None:
    """A size that is no capture size is an error."""
    with pytest.raises(ConfigError, match=r"must be among the capture sizes \(2, 4\), got 3"):
        make().prewarm(batch(1), sizes=(3,))


@pytest.mark.parametrize("example", [(torch.zeros(0, 3),), (), (3,)])
def test_prewarm_checks_its_example(example: tuple[Any, ...]) -> None:
    """An example that no graph can come from is an error."""
    with pytest.raises(ConfigError, match="prewarm cannot capture from this example"):
        make(lambda x=1: x).prewarm(*example)


def test_prewarm_finds_mixed_rows() -> None:
    """``prewarm`` compares padded with unpadded, so that a model that mixes rows gets no graph that pads."""
    step = make(lambda x: x - x.mean(0), sizes=(4,))
    step.prewarm(batch(3))
    x = batch(3)
    assert torch.equal(step(x), x - x.mean(0))
    assert step.entries == []


def test_clear_keeps_the_statistics() -> None:
    """``clear`` releases graphs; calls capture anew."""
    step = make()
    step.prewarm(batch(1))
    step.clear()
    assert (step.entries, step.stats.captures) == ([], 2)
    assert reason(step, batch(4)) is Reason.CAPTURED_NOW


def test_threads_share_a_step() -> None:
    """Calls from several threads each get the answer for their own batch."""
    step = make(sizes=(1, 2, 4, 8))
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(60):
            x = torch.randn(1 + (seed + i) % 8, 3, generator=generator)
            if not torch.equal(step(x), x * 2):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert step.stats.calls == 240


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown argument": ({"dynamic": {"y": 0}}, "dynamic names 'y', which is no argument of double"),
    "unknown pad": ({"pad": {"y": 0}}, "pad names 'y'"),
    "pad without dynamic": ({"dynamic": {}, "pad": {"x": 0}}, "pad names 'x', which dynamic does not"),
    "unknown pad rule": ({"pad": {"x": "ones"}}, r"pad\['x'\] must be a Pad"),
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
    "outputs": ({"outputs": "copy"}, "outputs must be 'clone', 'view', 'static' or 'ring:N'"),
    "backend": ({"backend": "tpu"}, "tpu"),
    "options is a mapping": (
        {"options": {"verify": False}},
        r"options must be a CUDAGraphOptions or None, .*from_dict",
    ),
    "options is empty": ({"options": {}}, "options must be a CUDAGraphOptions or None, got {}"),
    "options with static inputs": (
        {"options": CUDAGraphOptions(inputs="static")},
        "options.inputs must be 'copy' for graphed, got 'static'; .* static=",
    ),
    "outputs given twice": (
        {"outputs": "clone", "options": CUDAGraphOptions(outputs="view")},
        "outputs='clone' contradicts options.outputs='view'; give one of them",
    ),
    "pad is no mapping": ({"pad": 5}, "pad must map argument names to pad rules, .*got 5"),
    "pad is false": ({"pad": 0}, "pad must map argument names to pad rules, .*got 0"),
    "static is no names": ({"static": 5}, "static must name arguments, got 5"),
    "a name is no text": ({"dynamic": {0: 0}}, "dynamic must name arguments by text, got 0"),
    "budget is bytes": (
        {"options": CUDAGraphOptions(budget=1 << 20)},
        "budget must be a MemoryBudget or None, got 1048576; memory_budget_bytes=",
    ),
    "uniform_decode": ({"uniform_decode": True}, "uniform_decode must be a function of a call's arguments, got True"),
    "sizes is a file that is not there": ({"sizes": "none.json"}, "none.json cannot be read"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_option_is_an_error(name: str) -> None:
    """Every bad option is refused when the step is made, in a sentence that names it."""
    options, words = BAD_OPTIONS[name]
    with pytest.raises(GraphDispatchError, match=words):
        graphed(double, **({"dynamic": {"x": 0}, "sizes": (2, 4)} | options))


def test_callable_is_required() -> None:
    """What cannot be called cannot be graphed."""
    with pytest.raises(ConfigError, match="fn must be callable, got 3"):
        graphed(3, dynamic={})  # type: ignore[arg-type]


@pytest.mark.parametrize(("dim", "x"), [(2, torch.ones(4, 3)), (-3, torch.ones(4, 3)), (0, torch.tensor(1.0))])
def test_dimension_out_of_range(dim: int, x: torch.Tensor) -> None:
    """A dimension that the tensor has not is an error at the call, and a call that has it is served afterwards."""
    step = make(dynamic={"x": dim})
    with pytest.raises(ConfigError, match=r"dynamic\['x'\] = .*(out of range|no dimensions)"):
        step(x)
    assert reason(step, torch.randn(4, 4, 4)) is Reason.CAPTURED_NOW


def test_outputs_are_those_of_the_options() -> None:
    """Unless they are given; then those are."""
    x = batch(4)
    assert isinstance(make(options=CUDAGraphOptions(outputs="view"))(x), OutputView)
    assert isinstance(make(options=CUDAGraphOptions(verify=False), outputs="view")(x), OutputView)
    assert isinstance(make(options=CUDAGraphOptions(outputs="view"), outputs="view")(x), OutputView)
    assert isinstance(make()(x), torch.Tensor)


def takes_two(x: torch.Tensor, y: Any) -> torch.Tensor:
    """Ignores its second argument."""
    return x * 2


ODD_CALLS: dict[str, tuple[tuple[Any, ...], Reason]] = {
    "two devices": ((torch.ones(4, 3), torch.ones(4, device="meta")), Reason.DEVICES_DISAGREE),
    "requires grad": ((torch.ones(4, 3, requires_grad=True), None), Reason.NEEDS_GRADIENTS),
    "zero rows": ((torch.ones(0, 3), None), Reason.NO_ROWS),
    "above the largest": ((torch.ones(5, 3), None), Reason.ABOVE_LARGEST_SIZE),
    "a set": ((torch.ones(4, 3), {1, 2}), Reason.UNGUARDED_ARGUMENT),
    "an array": ((torch.ones(4, 3), np.ones(2)), Reason.UNGUARDED_ARGUMENT),
    "a numpy array": ((torch.ones(4, 3), np.ones(2)), Reason.UNGUARDED_ARGUMENT),
    "a sparse tensor": ((torch.ones(4, 3), torch.eye(2).to_sparse()), Reason.TENSOR_SUBCLASS),
    "a lazy conjugate": ((torch.ones(4, 3), torch.ones(2, dtype=torch.complex64).conj()), Reason.TENSOR_SUBCLASS),
    "no tensor": ((3, None), Reason.NO_TENSORS),
}


@pytest.mark.parametrize("name", ODD_CALLS)
def test_odd_call_is_eager(name: str) -> None:
    """A call that no graph can serve has eager's answer and a reason, and the next usual call is served."""
    args, expected = ODD_CALLS[name]
    step = make(takes_two, dynamic={"x": 0} if name != "no tensor" else {})
    with torch.enable_grad():
        got = step(*args)
    assert step.last_decision is not None
    assert step.last_decision.reason is expected
    torch.testing.assert_close(got, takes_two(*args))
    assert reason(step, batch(4), None) is Reason.CAPTURED_NOW


def test_rows_disagree_is_eager() -> None:
    """Arguments with different numbers of rows are named in the explanation."""
    step = make(lambda x, y: x * y, dynamic={"x": 0, "y": 0})
    assert reason(step, batch(4), batch(1)) is Reason.ROWS_DISAGREE
    assert "{'x': 4, 'y': 1}" in step.explain(batch(4), batch(1))


def test_error_for_the_callable_is_its_own() -> None:
    """A call that the callable does not accept raises the callable's own TypeError."""
    step = make()
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        step(batch(4), scale=2)
    assert reason(step, batch(4)) is Reason.CAPTURED_NOW


def test_attributes_are_set_on_the_callable() -> None:
    """An attribute that only the served callable had would change nothing, so it cannot be set."""
    step = graphed(torch.nn.Dropout(0.5).eval(), dynamic={"input": 0})
    with pytest.raises(AttributeError, match="no attribute 'p'"):
        step.p = 0.1
    assert step.p == 0.5


def test_public_name_is_the_function() -> None:
    """``graphdispatch.graphed`` is the function, whatever part of the package was imported before."""
    code = "from graphdispatch import Graphed, graphed; assert callable(graphed), graphed"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize("dynamic", [{"inputs": 0}, {"inputs[0]": 0, "inputs[1]": 0}], ids=["all", "one by one"])
def test_variadic_arguments_are_named_after_their_parameter(dynamic: dict[str, int]) -> None:
    """``*inputs`` is one name for all of them, and each has its own."""

    def add(*inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0] + 2 * inputs[1]

    step = graphed(add, dynamic=dynamic, sizes=(4,), options=AT_ONCE)
    with torch.no_grad():
        for rows in (4, 3, 4, 3):
            a, b = torch.randn(rows, 2), torch.randn(rows, 2)
            assert torch.equal(step(a, b), a + 2 * b)
    assert step.stats.hits == 2
