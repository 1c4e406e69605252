"""State: what the callable writes, memory that moves, and Python that a graph cannot see."""

import ctypes
import gc
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from graphdispatch import CUDAGraphOptions, Reason, graphed

from ..helpers import check_rows, make
from .features import needs
from .front_end import Open

INPUT = {"dynamic": {"input": 0}}


def test_version_of_state(settled: Open) -> None:
    """LIMIT: a replay that writes state leaves torch's counter of writes, by which ``backward()`` would notice."""
    state, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    step = settled(lambda x: state.add_(1) + x)
    with torch.enable_grad():
        loss = (state * weight).sum()
    before = state.clone()
    step(torch.randn(4, 3))
    loss.backward()
    assert torch.equal(weight.grad, before + 1)  # type: ignore[arg-type]


def test_state_written_in_place(settled: Open) -> None:
    """Captures and comparisons run a model several times; its state sees each call once."""
    count, total = torch.zeros((), dtype=torch.int64), torch.zeros(3)

    def fn(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        total.add_(rows)
        return x + count

    step = settled(fn, lambda rows: (torch.ones(rows, 3), torch.tensor(rows)))
    step(torch.ones(4, 3), torch.tensor(4))
    assert int(count) == step.calls
    assert torch.equal(total, torch.full((3,), float(sum(step.order) + 4)))


KEPT = torch.zeros(2)


@torch.library.custom_op("graphdispatch_footguns::workspace", mutates_args=())
def workspace(x: torch.Tensor) -> torch.Tensor:
    """Memory that it keeps."""
    return KEPT


@pytest.mark.parametrize("get", [workspace, lambda x: x.new_empty(0).set_(KEPT.untyped_storage(), 0, (2,))])
def test_memory_that_no_operator_made(opened: Open, get: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What is written there is written once for each call, and not by a capture ahead."""
    step, x = opened(lambda x: (get(x).add_(1), x * 2)[1]), torch.ones(4, 3)
    KEPT.zero_()
    (step.front.prewarm if step.name == "graphed" else step.prepare)(x)
    for count in range(5):
        assert torch.equal(KEPT, torch.full((2,), float(count)))
        step.check_calls(x, fn=lambda x: x * 2)
    assert step.was_hit()


def test_state_too_large(tried: Open) -> None:
    """State that is too large to be saved keeps the call eager, and is written once."""
    state = torch.zeros(1000)
    step = tried(lambda x: state.add_(1)[:3] + x, options=CUDAGraphOptions(state_limit_bytes=100))
    step.check(Reason.STATE_TOO_LARGE)
    assert float(state[0]) == step.calls


def test_check_without_result(settled: Open) -> None:
    """An operator that raises for some data does so in a replay, too, though nobody needs its result."""
    options = CUDAGraphOptions(rows="independent")  # padding rows are checked, too
    step = settled(lambda x: (torch._assert_async((x < 100).all()), x + 1)[1], options=options)
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value, but got zero"):
        step(torch.full((4, 3), 200.0))
    step.check_calls(4)


def test_weights_converted(settled: Open) -> None:
    """``.to(dtype)`` moves all weights: the graph of the old ones is dropped."""
    model = nn.Linear(3, 3).eval()
    step = settled(model, **INPUT)
    model.double()
    step.check_calls(torch.randn(4, 3, dtype=torch.float64))
    step.check(Reason.CAPTURED_NOW)


@pytest.mark.parametrize("serves", [False, True], ids=["before a capture", "between hits"])
def test_exception_in_model(opened: Open, serves: bool) -> None:
    """The model's own exception passes unchanged, its effects happen once, and later calls are served."""
    count = torch.zeros((), dtype=torch.int64)

    def fn(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        if x.shape[1] != 3:
            raise KeyError("three columns")
        return x * 2

    step = opened(fn)
    if serves:
        step.settle(lambda rows: (torch.randn(rows, 3),))
    for _ in range(2):
        with pytest.raises(KeyError, match="three columns"):
            step(torch.randn(4, 5))
        assert int(count) == step.calls
        x = torch.randn(4, 3)
        assert torch.equal(step(x), x * 2)
        assert step.was_hit() or not serves
        assert int(count) == step.calls


@needs("padding")
def test_exception_while_capturing(tried: Open) -> None:
    """A model that fails on padded sizes alone gives eager's answers, with the error in the explanation."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 4:
            raise KeyError("four rows")
        return x * 2

    step = tried(fn, lambda rows: (torch.randn(3, 3),))
    step.check_calls(3)
    step.check(Reason.CAPTURE_FAILED)
    said = "KeyError: 'four rows'"
    assert said in (step.explanation(torch.randn(3, 3)) or said)


def test_nested(settled: Open) -> None:
    """Inside of a capture an inner step runs as it is and becomes part of the outer graph."""
    inner = settled(lambda x: x + 1)
    serve = inner.plain
    outer = settled(lambda x: serve(x) * 2)
    hits = inner.hits
    outer.check_calls(4, fn=lambda x: (x + 1) * 2)
    assert inner.hits == hits


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.weight


@pytest.mark.parametrize("what", ["attribute", "weights"])
def test_scripted_attribute_changed(settled: Open, what: str) -> None:
    """LIMIT: a scripted module keeps its attributes where no guard looks, and so does one whose weights
    ``load_state_dict`` puts in place of others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(Scalar().eval())
    step = settled(model, options=CUDAGraphOptions(rows="independent"))
    if what == "attribute":
        model.scale = 5.0
    else:
        model.load_state_dict({"weight": torch.randn(3)}, assign=True)
    step.check_calls(4, fn=lambda x: x * 2.0)


def test_ambient_value_changed(settled: Open, tmp_path: Path) -> None:
    """LIMIT: what Python reads from a file or a clock is that of the capture."""
    file = tmp_path / "scale"
    file.write_text("2.0")
    step = settled(lambda x: x * float(file.read_text()))
    file.write_text("5.0")
    step.check_calls(4, fn=lambda x: x * 2.0)


@needs("static_objects", "constants")
def test_static_object_changed(settled: Open) -> None:
    """What the callable reads of an object in ``static=`` is compared, too."""
    config = SimpleNamespace(scale=2.0)
    step = settled(lambda x, config: x * config.scale, lambda rows: (torch.randn(rows, 3), config), static=("config",))
    config.scale = 5.0
    step.check_calls((torch.randn(4, 3), config))


def test_python_side_effect(settled: Open) -> None:
    """LIMIT: what Python sends out of the process happens at each run of Python, and never in a replay."""
    reading, writing = os.pipe()
    try:
        step = settled(lambda x: (os.write(writing, b"x"), x * 2)[1])
        assert len(os.read(reading, 100)) > 2
        step(torch.randn(4, 3))
        os.write(writing, b"end")
        assert os.read(reading, 100) == b"end"
    finally:
        os.close(reading)
        os.close(writing)


def test_numpy_writes_unseen(settled: Open) -> None:
    """LIMIT: what code outside of torch writes to memory that only a tensor shows is not replayed."""
    tensor = torch.full((3,), 3.0)
    address = tensor.data_ptr()

    def fn(x: torch.Tensor) -> torch.Tensor:
        ctypes.memset(address, 0, 12)
        return x + tensor

    step = settled(fn)
    tensor.fill_(7.0)
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x + 7.0)
    assert torch.equal(fn(x), x)


def test_tensor_literal_changed_inside(settled: Open) -> None:
    """``torch.tensor(...)`` within the call has its own value in each replay, even if it is then written in place."""
    settled(lambda x: x + torch.tensor([1.0, 2.0, 3.0]).add_(1)).check_calls(4, 4)


def _noisy(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return x + torch.rand(3)


def test_generator_put_back(tried: Open) -> None:
    """A model that draws and puts the generator back gives the same noise each time; a replay would move on."""
    step = tried(_noisy)
    step.check(Reason.STATE_REBOUND)
    before = torch.get_rng_state()
    x = torch.randn(4, 3, generator=torch.Generator())
    assert torch.equal(step(x), step(x))
    assert torch.equal(torch.get_rng_state(), before)


def test_generator_put_back_instead(settled: Open) -> None:
    """A generator of the model's own moves on by each call, and leaves the default one alone."""
    ours, theirs = (torch.Generator().manual_seed(1) for _ in range(2))
    step = settled(lambda x: x * 0 + torch.rand(3, generator=ours))
    for _ in range(step.calls):
        torch.rand(3, generator=theirs)
    assert torch.equal(step(torch.randn(4, 3)), torch.rand(3, generator=theirs).expand(4, 3))


def _seeds(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return x * 2


def _forks_and_seeds(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        noise = torch.rand(3)
    torch.set_rng_state(SEEDED)
    return x + noise * 0


SEEDED = torch.Generator().manual_seed(7).get_state()


def _seeds_as_compiled(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.disable(torch.manual_seed)(7)  # as torch does with it once it has compiled something
    return x * 2


@pytest.mark.parametrize("fn", [_seeds, _seeds_as_compiled, _forks_and_seeds])
def test_generator_seeded(tried: Open, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What is drawn after the call follows the seed that it sets, each time, also where it was padded."""
    step = tried(fn)
    step.check(Reason.STATE_REBOUND)
    drawn = []
    for seed, rows in enumerate([4] * 6 + [3] * 6):
        torch.manual_seed(seed)
        step(torch.randn(rows, 3))
        drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 1


class Owner:
    """Lives as long as somebody holds it."""

    scale = 2.0


def test_weakly_held_object(settled: Open) -> None:
    """LIMIT: a graph holds what its callable reads, so that an object which only weak references hold lives on."""
    owner = Owner()
    reference = weakref.ref(owner)
    step = settled(lambda x: x * (0.0 if reference() is None else 2.0))
    del owner
    gc.collect()
    assert reference() is not None
    step.check_calls(4, fn=lambda x: x * 2.0)


def test_weakly_held_object_instead() -> None:
    """``invalidate()`` lets it go, and later calls see that it has gone."""
    owner = Owner()
    reference = weakref.ref(owner)
    step = make(lambda x: x * (0.0 if reference() is None else 2.0))
    check_rows(step, *[4] * 4)
    assert step.stats.hits
    del owner
    step.invalidate("the owner goes")
    gc.collect()
    assert reference() is None
    check_rows(step, *[4] * 4)


class Scales(nn.Module):
    """Scales by the largest number of its first batch."""

    scale: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = x.amax()
        return x / self.scale


@pytest.mark.parametrize("called", [False, True])
def test_first_run_scales(called: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A prewarm makes no graph of it, and no state, and says so aloud, as does ``explain``; a call with real data makes
    that of its own batch, and a prewarm behind it changes nothing."""
    step, x = graphed(Scales(), dynamic={"x": 0}, sizes=(4,)), torch.full((4, 3), 8.0)
    if called:
        step(x)
    report = step.prewarm(torch.full((4, 3), 2.0))
    assert set(report.reasons.values()) == (set() if called else {Reason.STATE_REBOUND})
    assert all("call it once before" in why for why in (*report.left_out.values(), *[step.explain(x)][called:]))
    assert called is not ("prewarm captured no graph" in caplog.text)
    assert torch.equal(step(x), x / 8.0)


def factor_of(fn: Callable[..., object]) -> float:
    """Its attribute, or 2.0."""
    try:
        return fn.factor  # type: ignore[attr-defined, no-any-return]
    except AttributeError:
        return 2.0


def test_made_name_in_module(settled: Open) -> None:
    """LIMIT: an object of a module that the code was given, under a name that it makes up."""
    module = ModuleType("user_settings")
    module.inner = SimpleNamespace(scale=2.0)  # type: ignore[attr-defined]
    name = "".join(["in", "ner"])
    step = settled(lambda x: x * vars(module)[name].scale)
    module.inner.scale = 5.0
    step.check_calls(4, fn=lambda x: x * 2.0)


def test_attribute_tried_for(settled: Open) -> None:
    """LIMIT: an attribute that a function gets later, where code tries for it."""

    def noted() -> None: ...

    step = settled(lambda x: x * factor_of(noted))
    noted.factor = 5.0  # type: ignore[attr-defined]
    step.check_calls(4, fn=lambda x: x * 2.0)
