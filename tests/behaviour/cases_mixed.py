"""The cases of state that a call reads and writes, so that some calls leave it as it is, and graphs may serve those."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, ones, zeros

from .cases import MIXED, Box, Case, Made
from .cases_read import enter, put, to
from .cases_written import picture

__all__ = ["MIXED"]


def mixed(name: str) -> Callable[..., None]:
    """A case whose call uses the state."""

    def case(make: Callable[[], Any], use: Callable[[Any, Tensor], Any], change: Callable[[Any], Any]) -> None:
        def made() -> Made:
            held = make()
            return Made(lambda x: use(held, x), lambda: change(held), lambda: picture(held))

        MIXED[name] = Case(made)

    return case


def for_a_while(held: Any, x: Tensor) -> Tensor:
    """Set an attribute, read it, and put it back."""
    before, held.k = held.k, held.k * 2
    try:
        return x * held.k
    finally:
        held.k = before


def deeper(held: Any, x: Tensor) -> Tensor:
    """Count how many calls are under way."""
    held.depth[0] += 1
    try:
        return x * (held.k if held.depth[0] == 1 else 7.0)
    finally:
        held.depth[0] -= 1


def turn(held: Any, x: Tensor) -> Tensor:
    """Let two tensors change places."""
    held.a, held.b = held.b, held.a
    return x + held.a


def ring(held: Any, x: Tensor) -> Tensor:
    """Write to the next row of some."""
    held.rows[held.at] += 1
    held.at = (held.at + 1) % 3
    return x + held.rows.sum(0)


def by_size(held: Any, x: Tensor) -> Tensor:
    """Keep a number for each number of rows."""
    return x * held.memo.setdefault(len(x), held.k)


def of_two(held: Any, x: Tensor) -> Tensor:
    """Write for two rows alone."""
    if len(x) == 2:
        held.calls += 1
    return x * held.k


def in_place(held: Any, x: Tensor) -> Tensor:
    """Count in a tensor."""
    held.total.add_(1)
    return x + held.total % 5


def trips(held: Any, x: Tensor) -> Tensor:
    """Count, and raise once it is said."""
    held.total.add_(1)
    if held.is_up:
        held.is_up = False
        raise LookupError
    return x + 1


def sets(**attributes: Any) -> Callable[[Any, Tensor], Tensor]:
    """Set attributes, to what they are by the second call."""
    return lambda held, x: (to(held, **attributes), x * 2)[1]


def in_two_places() -> Any:
    """A list under two names, and in a tuple."""
    one = [2.0]
    return Box(a=one, b=one, pair=(one, [one]))


mixed("attribute set for a while")(lambda: Box(k=2.0), for_a_while, put(k=5.0))
mixed("depth of calls")(lambda: Box(k=2.0, depth=[0]), deeper, put(k=5.0))
mixed("two tensors that change places")(lambda: Box(a=zeros(3), b=ones(3)), turn, lambda h: h.a.add_(3))
mixed("list turned round")(lambda: [2.0, 3.0], lambda h, x: (h.reverse(), x * h[0])[1], enter(0, 5.0))
mixed("ring")(lambda: Box(rows=zeros(3, 3), at=0), ring, put(at=2))
mixed("number for each size")(lambda: Box(memo={}, k=2.0), by_size, lambda h: (to(h, k=5.0), h.memo.clear()))
mixed("written for two rows")(lambda: Box(k=2.0, calls=0), of_two, put(k=5.0))
mixed("rows that are counted")(lambda: Box(rows=0), lambda h, x: (to(h, rows=h.rows + len(x)), x * 2)[1], put(rows=0))
mixed("tensor that counts")(lambda: Box(total=zeros(())), in_place, lambda h: h.total.zero_())
mixed("tensor that counts, replaced")(lambda: Box(total=zeros(())), in_place, lambda h: to(h, total=ones(())))
mixed("error")(lambda: Box(total=zeros(()), is_up=False), trips, put(is_up=True))
mixed("same number again")(Box, sets(ready=True), put(ready=False))
mixed("same tensor again")(lambda: Box(k=ones(3), now=None), lambda h, x: (to(h, now=h.k), x * 2)[1], put(now=None))
mixed("entry that is there")(dict, lambda h, x: (h.setdefault("k", 1), x * 2)[1], lambda h: h.clear())
mixed("text that assigns")(lambda: {"__builtins__": {}}, lambda h, x: (exec("last = 1", h), x * 2)[1], enter("last", 0))
mixed("empty table emptied")(dict, lambda h, x: (h.clear(), x * 2)[1], lambda h: h.update(k=1))
mixed("list in three places")(
    in_two_places, lambda h, x: x * h.a[0] + h.pair[1][0][0] + (h.a is h.b), lambda h: enter(0, [5.0])(h.pair[1])
)
mixed("inference tensor")(
    torch.inference_mode()(lambda: Box(k=ones(3))), lambda h, x: x * h.k, lambda h: to(h, k=torch.full((3,), 5.0))
)
