"""The instructions of code, which are read without ``dis``, are those that ``dis`` tells; what some of them say, and
whether code may find out that two arguments are one object."""

import collections
import dataclasses
import dis
import enum
import operator
import typing
from collections.abc import Callable, Iterator
from functools import partial
from operator import is_, is_not
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from graphdispatch import Reason
from graphdispatch.proof.watch import bytecode
from graphdispatch.proof.watch.bytecode import code_reads, instructions_of

from ...behaviour.cases import Box
from ...helpers import assert_same, batch, check_calls, make

WITH_NAMES = {*dis.hasname, *dis.hasconst, *dis.haslocal, *dis.hasfree} - {dis.opmap.get("KW_NAMES")}


def codes_of(file: str) -> Iterator[CodeType]:
    """All code objects of a file."""
    pending: list[Any] = [compile(Path(file).read_text(encoding="utf-8"), file, "exec")]
    while pending:
        if isinstance(code := pending.pop(), CodeType):
            yield code
            pending += code.co_consts


@pytest.mark.parametrize("module", [collections, dataclasses, dis, enum, typing], ids=lambda module: module.__name__)
def test_instructions_are_those_of_dis(module: Any) -> None:
    """Also of large code, whose arguments take several bytes, and in parts."""
    for code in codes_of(module.__file__):
        theirs = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "EXTENDED_ARG")]
        ours = list(instructions_of(code))
        assert [i[:4] for i in ours] == [(i.offset, i.opcode, i.arg, i.opname) for i in theirs]
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if b.opcode in WITH_NAMES]
        assert [repr(a.argval) for a, _ in pairs] == [repr(b.argval) for _, b in pairs]
        assert list(map(repr, instructions_of(code, WITH_NAMES))) == [repr(a) for a, _ in pairs]


@pytest.mark.parametrize("text", ["'a' in sys.modules", "sys.modules['a']", "sys.modules.get('a', b)", "m.modules()"])
def test_code_that_names_the_module_finds_no_other(text: str) -> None:
    """The name stands in the code, as a constant or as that of the code's own module."""
    assert not code_reads(compile(text, "", "eval")).finds_modules
    assert not code_reads(compile(text.replace("'a'", "__name__"), "", "eval")).finds_modules


@pytest.mark.parametrize(
    "text",
    [
        *("a in sys.modules", "'a' + b in sys.modules", "sys.modules[a]", "sys.modules['a' + b]", "list(sys.modules)"),
        *("sys.modules.get(a)", "sys.modules.get('a' + b)", "sys.modules.pop('a')", "getattr(sys, 'modules')"),
        *(
            "'a' in dict(sys.modules)",
            "sys.modules",
            "(lambda: sys.modules)()['a']",
            "(a or 'a') in sys.modules",
            "(a if b else 'a') in sys.modules",
            "sys.modules[a or 'a']",
            "('a' if b else a) in sys.modules",
        ),
    ],
)
def test_code_that_makes_a_name_up_may_find_any_module(text: str) -> None:
    """Or it passes ``sys.modules`` on."""
    codes = [code := compile(text, "", "eval"), *(one for one in code.co_consts if isinstance(one, CodeType))]
    assert any(code_reads(code).finds_modules for code in codes)


@pytest.mark.parametrize(
    ("text", "compared"),
    [("a is b", {"b"}), ("a is a.input", {"input"}), *((f"a is {one}", set()) for one in ("None", "len", "a.dtype"))],
)
def test_what_may_be_a_tensor_is_compared_by_identity(text: str, compared: set[str]) -> None:
    """Not constants, builtins and types; an attribute may have a builtin's name."""
    assert code_reads(compile(text, "", "eval")).compared == compared


@pytest.mark.parametrize(
    ("text", "reads_whole"),
    [
        *(("a.format", True), ("a.format(b)", False), ("a.format('vars')", False), ("format(a)", False)),
        *(("format", False), ("getattr(a, 'b')", False)),
    ],
)
def test_a_method_that_is_kept_may_read_any_attribute(text: str, reads_whole: bool) -> None:
    """Where it is called the text is heard of; and ``format`` of the builtins reads no attributes."""
    assert code_reads(compile(text, "", "eval")).reads_whole is reads_whole


def test_each_instruction_with_a_name_is_classified() -> None:
    """A new one of the next Python does not pass unseen."""
    real = [name for name, code in dis.opmap.items() if code in dis.hasname and code < 256]
    seen = {*bytecode._ATTRIBUTES, *bytecode._VARIABLES, "IMPORT_NAME"}
    assert {name for name in real if not name.startswith("INSTRUMENTED_")} <= seen


def test_names_that_code_assigns_are_read() -> None:
    """Of a text and of a class, too."""
    code = compile("a = 1\ndel b\nclass C:\n    c = 1", "text", "exec")
    (inner,) = (one for one in code.co_consts if isinstance(one, CodeType))
    assert {"a", "b", "C"} <= code_reads(code).variables
    assert "c" in code_reads(inner).variables


class Giving(Box):
    """Gives what it is given."""

    @staticmethod
    def given(value: Any) -> Any:
        return value


def pick(_: type, value: Any) -> Any:
    """Give the last."""
    return value


_id, _same, _held = id, partial(is_), Giving(same=is_)
ALIKE: dict[str, Callable[[Any, Any], bool]] = {
    "is": lambda x, y: x is y,
    "is, of what a call with a type gives": lambda x, y: pick(type(x), y) is x,
    "is, of what a method of a type gives": lambda x, y: type(_held).given(y) is x,
    "is_": lambda x, y: is_(x, y),
    "is_not": lambda x, y: not is_not(x, y),
    "is_ of the module": lambda x, y: operator.is_(x, y),
    "is_ in an attribute": lambda x, y: _held.same(x, y),
    "is_ in a partial": lambda x, y: _same(x, y),
    "is_ mapped": lambda x, y: all(map(is_, [x], [y])),
    "id": lambda x, y: id(x) == id(y),
    "id under another name": lambda x, y: _id(x) == _id(y),
    "object's hash": lambda x, y: object.__hash__(x) == object.__hash__(y),
    "object's comparison": lambda x, y: object.__eq__(x, y) is True,
    "object's text": lambda x, y: object.__repr__(x) == object.__repr__(y),
    "key": lambda x, y: y in {x: 1},
    "weak key": lambda x, y: y in WeakIdKeyDictionary({x: 1}),
    "tuples": lambda x, y: (x,) == (y,),
    "dicts": lambda x, y: {1: x} == {1: y},
    "in": lambda x, y: y in [x],
    "contains": lambda x, y: operator.contains([x], y),
    "count": lambda x, y: (x,).count(y) == 1,
}


UNSEEN = ("is_ in an attribute", "is_ in a partial", "id under another name")
"""Where a compiled function tells objects from one another under a name that is not its own."""


@pytest.mark.parametrize("name", ALIKE)
def test_one_argument_in_two_places(name: str) -> None:
    """Graphs serve calls with two tensors, or are refused; one with a single tensor has eager's answer, and then two
    again."""
    alike = ALIKE[name]

    def fn(x: Tensor, y: Tensor) -> Tensor:
        try:
            is_one = alike(x, y)
        except RuntimeError:  # which of the numbers shall decide, torch says
            is_one = False
        return x * 2 if is_one else y * 3

    step = make(fn, dynamic={"x": 0, "y": 0})
    for _ in range(5):
        check_calls(step, (batch(4), batch(4)))
    found = step.last_decision.reason
    assert found is Reason.STATE_UNSEEN if name in UNSEEN else found.is_graph
    x = batch(4)
    for _ in range(2):
        assert_same(step(x, x), x * 2)
    check_calls(step, (batch(4), batch(4)))


def test_numbers_that_are_compared_are_no_objects() -> None:
    """Comparing what the call made needs no look at the arguments: hits stay plain."""
    step = make(lambda x, y: torch.where(x * 1 == y * 1, x, y), dynamic={"x": 0, "y": 0})
    for _ in range(5):
        check_calls(step, (batch(4), batch(4)))
    assert step.last_decision.reason.is_graph
    assert all(entry.licence.metadata is None for entry in step.entries)
