"""Rules of operators that read or write at places which a tensor names; see Note [slots] in ``slots.py``."""

from collections.abc import Sequence

from torch import Tensor

from .calls import Call, Rule, is_flags
from .experts import is_permutation, places_put
from .labels import (
    ROWS_AXIS,
    Label,
    MixError,
    UnknownError,
    axes_of,
    has_rows,
    holds_rows,
    is_dynamic,
    plain_dim,
    plain_dims,
    row_place,
)


def embedding(c: Call) -> list[Label]:
    """Rows of a table."""
    c.blend(c.label("weight").dims, "a table made of rows")
    c.read_places(c.a["weight"], [0] if holds_rows(c.certain_label("indices")) else [])
    return [Label((*c.certain_label("indices").dims, plain_dim(c.outs[0].shape[-1])))]


def embedding_bag(c: Call) -> list[Label]:
    """Means or sums of as many rows of a table for each row, whose parts lie one behind the other."""
    c.blend(c.label("weight").dims, "a table made of rows")
    parts, starts = c.certain_label("indices"), c.certain_label("offsets")
    is_own = starts.tag is not None and starts.tag.kind == "starts" and parts.dims == (starts.tag.of,)
    if not is_own or c.a.get("include_last_offset"):
        raise MixError("bags of any length")
    if c.has("per_sample_weights") and c.certain_label("per_sample_weights").dims != parts.dims:
        raise UnknownError("weights of another shape")
    result = Label((*starts.dims, plain_dim(c.outs[0].shape[-1])))
    return [result, *(Label(plain_dims(out.shape), is_lost=True) for out in c.outs[1:])]


class Picked:
    """What ``x[indices]`` takes: its dimensions, and along which of the tensor's dimensions rows name places."""

    def __init__(self, c: Call, tensor: Tensor, indices: Sequence[Tensor | None]) -> None:
        dims = c.certain_label(tensor, is_data=False).dims
        at = [place for place, index in enumerate(indices) if index is not None]
        given = [index for index in indices if index is not None]
        if any(map(is_flags, given)):
            raise UnknownError("a choice by flags")
        labels = [c.certain_label(index, is_data=False) for index in given]
        joint = c.broadcast([label.dims for label in labels])
        self.row = row_place(dims)
        self.by_rows = [place for place, label in zip(at, labels, strict=True) if holds_rows(label)]
        self.axes = set().union(*map(axes_of, joint))
        for place, index, label in zip(at, given, labels, strict=True):
            if label.tag is None or (label.tag.kind, label.tag.of) != ("numbers", dims[place]):
                c.label(index)  # as numbers: they name no rows of this tensor
                c.blend([dims[place]], "rows by an index")
                c.require_index(dims[place], index)
            elif not holds_rows(label):
                raise MixError("one row for all")
        if self.row is not None and self.row not in at and self.by_rows:
            raise MixError("rows by an index of rows")
        is_adjacent = at == list(range(at[0], at[-1] + 1))
        before = at[0] if is_adjacent else 0
        others = [dim for place, dim in enumerate(dims) if place not in at]
        self.dims = (*others[:before], *joint, *others[before:])


def index(c: Call) -> list[Label]:
    """``x[indices]``, and entries along a dimension."""
    tensor, indices = c.a["self"], c.a["indices"] if "indices" in c.a else _along_dim(c)
    picked, label = Picked(c, tensor, indices), c.moved
    c.read_places(tensor, picked.by_rows)
    tag = label.tag
    if tag is not None and not (len(label.dims) == 1 and is_permutation(c, indices[0])):
        tag = tag._replace(is_each_once=False) if tag.kind == "numbers" or tag.fault is not None else None
    return [Label(picked.dims, tag=tag)]


def _name_places(c: Call, dims: list[int], axes: set[int], *, adds: bool) -> None:
    """Elements along these axes write where they say."""
    if not axes:
        return
    if ROWS_AXIS in axes and not dims:
        raise MixError("rows write at one place")
    if c.is_outside(c.a["self"]):
        c.run.slots.note_write(c.operator.name, c.a["self"], dims, axes, adds=adds)
    elif dims:
        raise MixError("rows write at places that they name")


def index_put(c: Call) -> list[Label]:
    """``x[indices] = values``."""
    tensor, indices, values = c.a["self"], c.a["indices"], c.a["values"]
    label = c.certain_label(tensor)
    if len(indices) == 1 and indices[0] is not None and is_flags(indices[0]):
        if values.dim():
            raise UnknownError("a choice by flags")
        c.fit(label.dims[: indices[0].dim()], indices[0])
        return [Label(label.dims)]
    if len(indices) == 1 and (put := places_put(c, indices[0], values)) is not None:
        return [put]
    return _put(c, indices, values, adds=bool(c.a["accumulate"]))


def _put(c: Call, indices: Sequence[Tensor | None], values: Tensor | None, *, adds: bool) -> list[Label]:
    """What the indices pick is written."""
    picked = Picked(c, c.a["self"], indices)
    if values is not None:
        c.fit(picked.dims, values)
    c.run.mixed |= picked.axes  # two elements of a length may name one place
    if picked.row is None:
        _name_places(c, picked.by_rows, picked.axes, adds=adds)
    return [Label(c.label("self").dims)]


def _along_dim(c: Call) -> list[Tensor | None]:
    """The indices of an operator that is given one of them, and a dimension."""
    if not (c.a["self"].dim() and c.a["index"].dim()):
        raise UnknownError("a single place")
    return [*[None] * c.place("dim", c.a["self"].dim()), c.a["index"]]


def index_dim(c: Call) -> list[Label]:
    """Entries along a dimension are written: ``index_copy``, ``index_add``, ``index_fill``."""
    if c.has("value"):
        c.blend(c.certain_label("value").dims, "rows in a value for all")
    return _put(c, _along_dim(c), c.a.get("source"), adds=c.name == "index_add")


def gather(c: Call) -> list[Label]:
    """For each place of an index an element of the same line."""
    label, chosen = c.certain_label("self"), c.certain_label("index")
    at = c.place("dim", len(label.dims))
    c.blend([label.dims[at]], "rows by an index")
    c.require_index(label.dims[at], c.a["index"])
    c.read_places(c.a["self"], [at] if holds_rows(chosen) else [])
    dims = []
    for place, (one, other) in enumerate(zip(label.dims, chosen.dims, strict=True)):
        if place == at or not (is_dynamic(one) or is_dynamic(other)):
            dims.append(other)
        elif () in (one, other):  # an index may be shorter, and takes the first line then
            c.blend([one], "one row for all")
            dims.append(other)
        elif is_dynamic(one):
            dims.append(c.sizes.joined(one, other))
        else:  # line k of a table for element k
            c.is_by_place = c.is_by_place or has_rows(other)
            dims.append(c.sizes.joined(one, c.sizes.in_order(other)))
    return [Label(tuple(dims))]


def scatter(c: Call) -> list[Label]:
    """For each place of an index an element of the same line is written."""
    label = c.certain_label("self")
    at = c.place("dim", len(label.dims))
    given = [c.a["index"], *([c.a["src"]] if c.has("src") else [])]
    for tensor in (c.a["self"], *given):
        c.blend(c.certain_label(tensor).dims[at : at + 1], "rows by an index")
    c.require_index(label.dims[at], c.a["index"])
    for tensor in given:
        for place, (own, dim) in enumerate(zip(label.dims, c.certain_label(tensor).dims, strict=True)):
            if place == at or not (is_dynamic(own) or is_dynamic(dim)):
                continue
            if has_rows(dim) != has_rows(own):
                raise MixError("rows written where none lie")
            c.sizes.joined(own, dim)
    return [Label(label.dims)]


RULES: dict[Rule, str] = {
    embedding: "embedding",
    embedding_bag: "_embedding_bag _embedding_bag_forward_only",
    index: "index _unsafe_index index_select",
    index_put: "index_put _index_put_impl",
    index_dim: "index_copy index_add index_fill",
    gather: "gather",
    scatter: "scatter scatter_add scatter_reduce",
}
NAME_PLACES = (embedding, index, index_put, index_dim, gather)
