"""The instructions of code, which are read without ``dis``, are those that ``dis`` tells."""

import collections
import dataclasses
import dis
import enum
import typing
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from graphdispatch.proof.watch.bytecode import instructions_of

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
