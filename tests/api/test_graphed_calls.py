"""Calls of many kinds, and odd ones: which kinds keep their place, and what is said of what no graph serves."""

import gc
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphdispatch import MemoryBudget, Reason
from graphdispatch.errors import ConfigError

from ..doubled import batch, make, reason


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def takes_two(x: torch.Tensor, y: Any) -> torch.Tensor:
    """Ignores its second argument."""
    return x * 2


def test_max_signatures() -> None:
    """Kinds of calls past the limit run eagerly; those before it are served on."""
    step = make(max_signatures=2)
    for columns in (3, 4):
        step(torch.randn(4, columns))
    x = torch.randn(4, 5)
    assert torch.equal(step(x), x * 2)
    assert reason(step, x) is Reason.TOO_MANY_SIGNATURES
    assert reason(step, batch(4)) is Reason.VERIFIED_NOW


def test_kinds_seen_once_make_way() -> None:
    """However many kinds of calls came once, a kind that comes again is captured, and one that is served stays."""
    step = make(max_signatures=4, capture_after=2)
    for _ in range(4):
        step(batch(4))
    for columns in range(10, 40):
        x = torch.randn(4, columns)
        assert torch.equal(step(x), x * 2)
    assert len(step._graphs.groups) == 4
    assert [reason(step, torch.randn(4, 50)) for _ in range(4)][1:] == [
        Reason.CAPTURED_NOW,
        Reason.VERIFIED_NOW,
        Reason.EXACT,
    ]
    assert reason(step, batch(4)) is Reason.EXACT
    assert step.memory_bytes == step.memory_report().total
    step.check_integrity()


def test_spellings_go_with_their_last_kind() -> None:
    """Each that is left leads to kinds that are there, whichever went."""
    step = make(takes_two, max_signatures=3, capture_after=2)
    for columns in range(1, 40):
        x = torch.ones(4, columns)
        for args, kwargs in ([(x, 1), {}], [(x,), {"y": 1}], [(), {"x": x, "y": 1}])[columns % 3 :]:
            assert torch.equal(step(*args, **kwargs), x * 2)
            spellings = step._decode.spellings.values()
            assert {group for spelling in spellings for group in spelling.groups} == set(step._graphs.groups.values())
            assert all(spelling.latest[0] in spelling.groups for spelling in spellings)


def test_the_only_kind_makes_way() -> None:
    """Its spelling begins anew with the next one."""
    step = make(max_signatures=1, capture_after=2)
    step(batch(4))
    assert [reason(step, torch.randn(4, 5)) for _ in range(2)] == [Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW]


def test_a_cycle_over_more_kinds_than_the_limit_gets_graphs() -> None:
    """As a number of steps would be that counts up to more: what makes way is not what comes next."""
    step = make(takes_two, dynamic={"x": 0}, max_signatures=8, capture_after=2)
    for _ in range(12):
        for number in range(12):
            step(batch(4), number)
    assert 4 <= len(step.entries) <= 8


def test_all_that_has_graphs_stays() -> None:
    """A call too many says what to do, and so does one where captures failed; ``clear`` lets others come."""
    step = make(max_signatures=1)
    step(batch(4))
    assert "1 other kinds of argument lists have graphs" in step.explain(torch.randn(4, 5))
    assert "raise max_signatures, or clear() them" in step.explain(torch.randn(4, 5))
    step.clear()
    assert reason(step, torch.randn(4, 5)) is Reason.CAPTURED_NOW
    failing = make(lambda x: x * x.sum().item(), max_signatures=1)
    for columns in (3, 4, 5):
        failing(torch.randn(4, columns))
    assert (failing.last_decision.reason, failing.stats.capture_failures) == (Reason.TOO_MANY_SIGNATURES, 1)


def test_a_kind_whose_graph_was_evicted_makes_way() -> None:
    """It is the graphs that are there which count."""
    budget = MemoryBudget(max_cached_graphs=1)
    step, other = (make(max_signatures=1, budget=budget) for _ in range(2))
    step(batch(4))
    (group,) = step._graphs.groups.values()
    gone = weakref.ref(group.inputs)
    del group
    other(batch(4))
    assert reason(step, torch.randn(4, 5)) is Reason.CAPTURED_NOW
    gc.collect()
    assert (len(step._graphs.groups), gone()) == (1, None)


def test_threads_that_read_while_kinds_make_way() -> None:
    """Each gets its own answer, whichever kinds are dropped meanwhile."""
    step = make(max_signatures=2, capture_after=2)
    wrong: list[int] = []

    def work(seed: int) -> None:
        with torch.no_grad():
            for i in range(150):
                x = torch.full((4, 1 + (i * seed) % 7), float(i))
                if not torch.equal(step(x), x * 2):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(step._graphs.groups) == 2


def test_a_call_that_the_rules_do_not_fit_is_odd_once_one_has_fitted() -> None:
    """In the middle of serving it runs eagerly and says why; the rest is served as before."""
    step = make(lambda x, **more: x * 2 + sum(more.values()), dynamic={"x": 0, "y": 0}, sizes=(4,))
    with pytest.raises(ConfigError, match="the tensor has no dimensions; leave it out"):
        step(batch(4), y=torch.tensor(1.0))
    y = torch.ones(4, 1)
    assert [reason(step, batch(4), y=y) for _ in range(2)] == [Reason.CAPTURED_NOW, Reason.VERIFIED_NOW]
    assert reason(step, batch(4), y=torch.tensor(1.0)) is Reason.ARGUMENTS_CHANGED
    assert "dynamic['y'] = 0, but the tensor has no dimensions" in step.explain(batch(4), y=torch.tensor(1.0))
    assert torch.equal(step(x := batch(4), y=torch.tensor(1.0)), x * 2 + 1)
    assert reason(step, batch(4), y=y) is Reason.EXACT


@dataclass
class Batch:
    """What graphs cannot look into."""

    ids: torch.Tensor


def test_an_array_is_named_with_what_makes_a_tensor_of_it() -> None:
    """It is what people pass first."""
    step = make(lambda b: b * 2, dynamic={"b": 0})
    said = step.explain(batch(4).numpy())
    assert (
        said
        == "eager: no argument is a tensor; argument 'b' is a numpy.ndarray (torch.from_numpy makes a tensor of it)"
    )


def test_a_dataclass_is_named_by_its_type() -> None:
    """As an argument, and as an output that no graph can make, in one line without values, with what opens it."""
    step = make(lambda b: b.ids * 2, dynamic={})
    assert reason(step, Batch(batch(4))) is Reason.NO_TENSORS
    opened = r"a .*\.Batch \(torch\.utils\._pytree\.register_dataclass\(Batch\) lets graphs see its fields\)"
    said = step.explain(Batch(batch(4)))
    assert re.fullmatch(rf"eager: no argument is a tensor; argument 'b' is {opened}", said)
    step = make(lambda x, b: x * 2)
    assert reason(step, batch(4), Batch(batch(4))) is Reason.UNGUARDED_ARGUMENT
    assert re.search(rf"argument 'b' is {opened}, whose change", step.explain(batch(4), Batch(batch(4))))
    step = make(lambda x: (Batch(x * 2),) * 2)
    assert reason(step, batch(4)) is Reason.OUTPUT_UNSUPPORTED
    said = step.explain(batch(4))
    assert re.search(rf"an output that is no tensor is {opened} in eager and another one in the graph", said)
    assert "tensor(" not in said
    assert "\n" not in said


def test_an_argument_may_have_any_name() -> None:
    """Also that of the first parameter of a method."""
    step = make(lambda self, fn: self + fn, dynamic={"self": 0, "fn": 0})
    for _ in range(4):
        x = batch(4)
        assert torch.equal(step(self=x, fn=x), x + x)
    assert step.stats.hits
    assert "graph" in step.explain(self=x, fn=x)
