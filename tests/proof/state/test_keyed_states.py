"""Graphs belong to a state of the callable: one that comes back is served, one that nothing reads ends no graph."""

import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

from graphdispatch import Reason, graphed
from graphdispatch.engines import EntryState

from ...behaviour.cases import Box
from ...helpers import check_calls, check_rows, make


def test_a_failure_survives_a_change_of_state() -> None:
    """An uncapturable model with an attribute that is set before each call is tried a few times, not each time."""

    owner = Box(number=0)
    step = make(lambda x: x * x.sum().item() + owner.number, max_failures=2, capture_after=2)
    for owner.number in range(60):
        step(torch.ones(4, 3))
    assert 1 <= step.stats.capture_failures <= 4


def test_graphs_of_another_state_cost_calls_without_a_hit_nothing() -> None:
    """They are compared again when the present state has changed, and go when their weights have moved by then."""
    model = nn.Linear(3, 3)
    owner = Box(factor=1.0)
    step = make(lambda x: model(x) * owner.factor)
    x = torch.randn(4, 3)
    step(x)
    (first,) = step.entries
    compared: list[str] = []
    holds = first.guard.holds
    first.guard.holds = lambda: compared.append("") or holds()
    owner.factor = 2.0
    step(x)
    compared.clear()
    check_calls(step, *[x] * 7)  # the batch of the capture, which is no hit yet
    assert step.stats.captures == 2
    assert not compared
    owner.factor = 1.0
    check_calls(step, x)
    assert step.stats.captures == 2
    assert compared
    owner.factor = 2.0
    step(x)
    model.weight = nn.Parameter(torch.randn(3, 3))
    check_calls(step, x)
    assert len(step.entries) == 1
    assert first.state is EntryState.EVICTED


def test_a_state_that_is_gone_for_good_frees_its_weights() -> None:
    """An adapter that nothing reaches any more goes with its graph, although the graph of the next one still fits."""
    owner = Box(adapter=nn.Linear(3, 3), others=[])
    step = make(lambda x: owner.adapter(x))
    x = torch.randn(4, 3)
    step(x)
    first, (entry,) = weakref.ref(owner.adapter.weight), step.entries
    owner.others.append(owner.adapter)
    owner.adapter = nn.Linear(3, 3)
    check_calls(step, x, x, x)
    assert step.stats.captures == 2
    assert len(step.entries) == 2
    owner.others.clear()
    check_calls(step, x)
    assert step.stats.captures == 2
    assert entry.state is EntryState.EVICTED
    del entry
    gc.collect()
    assert first() is None


def test_graphs_that_read_the_same_share_a_guard() -> None:
    """Graphs of two sizes are compared once; those of two objects in ``static=`` each have a guard of their own."""
    model = nn.Linear(3, 3).eval()
    step = graphed(lambda x, config: model(x) * config.factor, dynamic={"x": 0}, sizes=(2, 4), static=["config"])
    configs = Box(factor=2.0), Box(factor=3.0)
    for rows in (2, 4):
        for config in configs:
            step.prewarm(torch.ones(rows, 3), config)
    guards = [entry.guard for entry in step.entries]
    assert len(guards) == 4
    assert len(set(guards)) == 2
    configs[1].factor = 5.0
    check_calls(step, *((torch.randn(rows, 3), config) for rows in (2, 4) for config in configs))


def test_graphs_that_used_other_results_of_a_cache_share_no_guard() -> None:
    """A cache is emptied, and only the result that one of two graphs used comes back as it was."""
    factors = {"one": 2.0, "other": 4.0}
    factor = functools.cache(lambda key: factors[key])
    step = make(lambda x, key: x * factor(key))
    for key in factors:
        factor(key)  # so that no watched run calls what is cached
        check_calls(step, *((torch.randn(4, 3), key) for _ in range(4)))
    assert step.stats.captures == 2, step.last_decision
    factors["other"] = 5.0
    factor.cache_clear()
    factor("one")
    x = torch.randn(4, 3)
    assert torch.equal(step(x, "other"), x * 5.0)


def test_a_guard_that_watches_less_is_not_shared() -> None:
    """A variable of a module came between two captures; only the later guard watches it."""
    settings = types.ModuleType("settings")
    settings.factor = 2.0
    box = Box(settings=settings)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * box.settings.factor * (getattr(box.settings, "further", 1.0) if len(x) > 2 else 1.0)

    for _ in range(2):  # the second time torch's own code is known
        vars(settings).pop("further", None)
        step = make(fn)
        check_rows(step, *[2] * 4)
        for rows, further in ((4, 3.0), (4, 4.0), (2, 4.0)):
            settings.further = further
            check_rows(step, *[rows] * 4)


@inductor_config.patch(deterministic=True)  # type: ignore[untyped-decorator]
def test_determinism_of_the_compiler_is_left_alone() -> None:
    """A callable that changes the default dtype has that put back, and nothing else."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64 if torch.get_default_dtype() is torch.float32 else torch.float32)
        return x * 2

    try:
        graphed(fn, dynamic={"x": 0}, sizes=(2,)).prewarm(torch.ones(2, 3))
        assert torch.get_default_dtype() is torch.float32
        assert inductor_config.deterministic
    finally:
        torch.set_default_dtype(torch.float32)


def imports_within(x: torch.Tensor) -> torch.Tensor:
    """The names that it takes stand in the code."""
    from json import decoder  # as models import what is optional

    return x * (2 if decoder else 3)


def wraps_within(x: torch.Tensor) -> torch.Tensor:
    """What it takes over from the other function is named by whoever uses it."""

    @functools.wraps(FACTOR.scale)
    def scale(given: torch.Tensor) -> torch.Tensor:
        return FACTOR.scale(given) * scale.by

    return scale(x)


class Factor:
    """Something with a function that carries a number."""

    @staticmethod
    def scale(given: torch.Tensor) -> torch.Tensor:
        return given + 1


FACTOR = Factor()
Factor.scale.by = 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("fn", [imports_within, wraps_within])
def test_code_of_libraries_within_a_call_reads_no_whole_objects(
    fn: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import, and ``functools.wraps``; what the code names is compared."""
    step = make(fn)
    check_rows(step, *[4] * 3)
    assert not step.entries[0].guard.notes.reads_whole
    monkeypatch.setattr(Factor.scale, "by", 3.0)
    check_rows(step, 4)


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda line: Box(settings=line),
    "list": lambda line: Box(settings=[line]),
    "object": lambda line: Box(box=Box(settings=line)),
}


def check_prewarmed(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Graphs serve all sizes behind a prewarm."""
    step = graphed(fn, dynamic={"x": 0}, sizes=(2, 4))
    step.prewarm(torch.ones(4, 3))
    assert check_rows(step, 4, 3, 2) == [Reason.EXACT, Reason.PADDED, Reason.EXACT]


@pytest.mark.parametrize("place", HOLDERS)
def test_what_no_code_names_does_not_stand_against_a_prewarm(place: str) -> None:
    """Code that runs cannot come to the iterator."""
    line = iter([1, 2, 3])
    model = torch.nn.Identity()
    model.held = HOLDERS[place](line)  # type: ignore[assignment]
    check_prewarmed(lambda x: model(x) * 2)
    assert next(line) == 1


def test_a_function_that_is_watched_meanwhile_is_no_state() -> None:
    """Something stands in for ``torch.tensor_split`` while runs are watched: code that names it changes nothing."""
    check_prewarmed(lambda x: torch.tensor_split(x, 3, dim=1)[1] * 2)
