"""Rules of operators that make tensors of sizes, or put tensors together."""

from collections.abc import Sequence
from functools import reduce

from .calls import Call, Rule
from .elementwise import WIDE
from .labels import (
    Dim,
    Label,
    Tag,
    has_rows,
    merged,
    plain_dim,
    plain_dims,
)


def made(c: Call) -> list[Label]:
    """All elements alike, or drawn; a tensor gives their type alone."""
    for tensor in c.tensors:
        c.label(tensor)
    shape = c.outs[0].shape
    return c.each(Label(tuple(c.given_at(place, len(shape), size) for place, size in enumerate(shape))))


def arange(c: Call) -> list[Label]:
    """Numbers in a row; from zero on, each is the number of its own place."""
    start, end, step = c.a.get("start") or 0, c.a["end"], 1 if c.a.get("step") is None else c.a["step"]
    count = c.outs[0].shape[0]
    if not all(type(v) is int for v in (start, end, step)):
        return [Label(plain_dims((count,)))]
    number = c.caller.size(end)
    if number is None:
        dim = c.given(count) if start == 0 and end == count * step else plain_dim(count)
    else:
        dim = c.sizes.dim_of_values(-((start - number.values) // step))
    dim = c.sizes.in_order(dim)
    if start != 0 or not has_rows(dim) or c.outs[0].dtype not in WIDE:
        return [Label((dim,))]
    if step == 1:
        return [Label((dim,), tag=Tag("numbers", dim, is_each_once=True))]
    whole = (*dim, step) if number is None else c.sizes.dim_of(number)
    return [Label((dim,), tag=Tag("starts", whole) if whole == (*dim, step) else None)]


def like(c: Call) -> list[Label]:
    """All elements alike, in the shape of another tensor."""
    return c.each(Label(c.certain_label(c.first).dims))


def cat(c: Call) -> list[Label]:
    """Tensors one behind the other."""
    tensors = [t for t in c.a["tensors"] if t.dim() > 1 or t.numel()]
    labels = list(map(c.certain_label, tensors))
    at = c.place("dim", c.outs[0].dim())
    sides = enumerate(zip(*(label.dims for label in labels), strict=True))
    dims = [_behind(c, side) if place == at else reduce(c.sizes.joined, side) for place, side in sides]
    return [Label(tuple(dims), tag=_one_choice(c, labels))]


def _one_choice(c: Call, labels: Sequence[Label]) -> Tag | None:
    """Several choices among as many, as one."""
    tags = [label.tag for label in labels]
    limits = {tag.of[1] if tag is not None and tag.kind == "chosen" else None for tag in tags}
    limit = limits.pop() if len(limits) == 1 else None
    return Tag("chosen", (object(), limit)) if limit is not None and c.outs[0].dtype in WIDE else None


def _behind(c: Call, parts: Sequence[Dim]) -> Dim:
    """One dimension of several, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    heads = [part[0] if part and type(part[0]) is int else 1 for part in parts]
    tails = {part[1:] if part and type(part[0]) is int else part for part in parts}
    if len(tails) == 1:
        return merged((sum(heads), *tails.pop()))
    c.blend(parts, "rows behind others")
    return c.sizes.dim_of_values(sum(map(c.sizes.values, parts[1:]), c.sizes.values(parts[0])))


def stack(c: Call) -> list[Label]:
    """Tensors beside each other."""
    dims = c.broadcast([c.certain_label(tensor).dims for tensor in c.a["tensors"]])
    at = c.place("dim", c.outs[0].dim())
    return [Label((*dims[:at], plain_dim(len(c.a["tensors"])), *dims[at:]))]


def repeat(c: Call) -> list[Label]:
    """Each dimension several times, one behind the other."""
    label, times = c.certain_label(c.first), c.a["repeats"]
    old = ((),) * (len(times) - len(label.dims)) + label.dims
    factors = (c.given_at(place, len(times), count) for place, count in enumerate(times))
    return [Label(tuple(merged((*factor, *dim)) for factor, dim in zip(factors, old, strict=True)))]


def pad(c: Call) -> list[Label]:
    """Elements before and after a dimension."""
    label, widths = c.certain_label(c.first), c.a["pad"]
    dims = list(label.dims)
    for place in range(len(widths) // 2):
        before, after = widths[2 * place : 2 * place + 2]
        at = len(dims) - 1 - place
        if before or after:
            c.blend([dims[at]], "rows at other places")
            dims[at] = c.sizes.dim_of_values(c.sizes.values(dims[at]) + before + after)
    return [Label(tuple(dims))]


RULES: dict[Rule, str] = {
    made: "zeros ones empty full rand randn new_zeros new_ones new_empty new_full empty_strided new_empty_strided",
    arange: "arange",
    like: "zeros_like ones_like empty_like full_like",
    cat: "cat",
    stack: "stack",
    repeat: "repeat",
    pad: "constant_pad_nd",
}
