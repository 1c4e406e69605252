"""State in objects of compiled code: ordered dicts, files in memory, ``ctypes``, random generators of one's own."""

import ctypes
import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphdispatch import Reason, eager_break

from ..python_objects import served


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class _Pair(ctypes.Structure):
    _fields_ = (("one", ctypes.c_int), ("two", ctypes.c_float))


def _first(table: Any) -> Any:
    return next(iter(table))


WRITES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "OrderedDict": (lambda: OrderedDict(a=1, b=2, c=3), lambda o: o.move_to_end(_first(o)), list),
    "BytesIO": (io.BytesIO, lambda o: o.write(b"x"), lambda o: (o.getvalue(), o.tell())),
    "StringIO": (io.StringIO, lambda o: o.write("x"), lambda o: (o.getvalue(), o.tell())),
    "c_int": (ctypes.c_int, lambda o: setattr(o, "value", o.value + 1), lambda o: o.value),
    "ctypes array": ((ctypes.c_int * 2), lambda o: o.__setitem__(1, o[1] + 1), list),
    "ctypes structure": (_Pair, lambda o: setattr(o, "two", o.two + 1), lambda o: o.two),
}


@pytest.mark.parametrize(("make", "write", "read"), WRITES.values(), ids=WRITES.keys())
def test_each_call_writes_once(
    make: Callable[[], Any], write: Callable[[Any], Any], read: Callable[[Any], Any]
) -> None:
    """No graph serves such a call, and a capture ahead of traffic leaves the object as it was."""
    mine, eager = make(), make()
    step = served(lambda x: (write(mine), x * 2)[1], capture_after=1)
    step.prewarm(torch.ones(4, 3), sizes=(4,))
    assert read(mine) == read(eager)
    for _ in range(4):
        step(torch.ones(4, 3))
        write(eager)
        assert read(mine) == read(eager)
    assert step.stats.reasons[Reason.STATE_REBOUND]


READS: dict[str, tuple[Any, Callable[[Any], float], Callable[[Any], Any]]] = {
    "OrderedDict": (OrderedDict(a=2.0, b=3.0), lambda o: _first(o.values()), lambda o: o.move_to_end("a")),
    "StringIO": (io.StringIO("2.0"), lambda o: float(o.getvalue()), lambda o: (o.seek(0), o.write("3.0"))),
    "c_float": (ctypes.c_float(2.0), lambda o: float(o.value), lambda o: setattr(o, "value", 3.0)),
}


@pytest.mark.parametrize(("held", "read", "change"), READS.values(), ids=READS.keys())
def test_what_they_hold_is_compared(held: Any, read: Callable[[Any], float], change: Callable[[Any], Any]) -> None:
    """A graph that read another value does not serve."""
    step = served(lambda x: x * read(held), capture_after=1)
    for _ in range(4):
        assert float(step(torch.ones(4, 1))[0]) == 2.0
    assert step.stats.hits
    change(held)
    assert float(step(torch.ones(4, 1))[0]) == 3.0


def test_a_generator_that_the_call_seeds() -> None:
    """A replay draws on and would not seed it again, so no graph serves the call."""
    mine, eager = torch.Generator(), torch.Generator()

    def fn(x: torch.Tensor, generator: torch.Generator = mine) -> torch.Tensor:
        generator.manual_seed(3)
        return x + torch.rand(x.shape, generator=generator)

    step = served(lambda x: fn(x), capture_after=1)
    for _ in range(4):
        x = torch.randn(4, 3)
        assert torch.equal(step(x), fn(x, eager))
    assert step.stats.reasons[Reason.STATE_REBOUND]


def test_an_attribute_of_an_argument_that_a_break_reads() -> None:
    """A break gets the graph's own copy of the argument, without its attributes; so such a call runs eagerly."""
    step = served(eager_break(lambda x: x * getattr(x, "tag", 1.0)), mode="PIECEWISE", capture_after=1)
    for tag in (None, None, None, 0.5, None, 0.25):
        x = torch.ones(4, 1)
        if tag is not None:
            x.tag = tag  # type: ignore[attr-defined]
        assert float(step(x)[0]) == (tag or 1.0)
