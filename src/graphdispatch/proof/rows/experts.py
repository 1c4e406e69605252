"""Mixtures of experts: rows are sorted by expert, multiplied in groups, and put back.

Note [rows in another order]
    What sorts rows gives them an order of their own, an arrangement, in which each still belongs to itself. An index
    that numbers rows picks them, and an index that says where each row lies brings them back. The latter follows from
    all rows, so as numbers its elements mix; they may only serve as places. A capacity compares them, and mixes.

    The groups of a grouped product are right for each row if their bounds are the counts of the choice that the rows
    are sorted by, and if all choices lie below the number of groups: an operator chose them among as many.
"""

import torch
from torch import Tensor

from .batches import is_equal
from .calls import Call, Rule, is_whole
from .elementwise import along, pointwise, reduction
from .labels import (
    Atom,
    Dim,
    Label,
    MixError,
    Tag,
    UnknownError,
    axes_of,
    fault_here,
    has_rows,
    is_dynamic,
    merged,
    numbers_places,
    own_size,
    plain_dims,
)


def choice(c: Call) -> list[Label]:
    """The largest elements along a dimension, and where they lie."""
    label, dim = c.certain_label(c.first), c.a.get("dim")
    results = along(c) if c.name == "topk" else reduction(c)
    if dim is None or not label.dims:
        return results
    place = int(dim) % len(label.dims)
    if c.name == "topk":  # as many as it is given, and no fewer
        c.space.restrict_to_own(sorted(axes_of(label.dims[place])), "a size that no rule tells for other batches")
    if not is_dynamic(label.dims[place]):
        results[-1] = results[-1]._replace(tag=Tag("chosen", (object(), own_size(label.dims[place]))))
    return results


def sort(c: Call) -> list[Label]:
    """Elements in order, and where they lay. Rows themselves may be sorted if they are the only dimension."""
    label = c.moved
    tag, is_ascending = label.tag, not c.a.get("descending")
    if tag is not None and is_permutation(c, c.first) and _is_arranged(label.dims[0]) and is_ascending:
        dim = label.dims[0]
        back = Tag("numbers", dim, fault_here(True, c.operator.name, "places among all rows"), is_each_once=True)
        return [Label((tag.of,), fault_here(True, c.operator.name))] * (len(c.outs) - 1) + [Label((tag.of,), tag=back)]
    if len(label.dims) != 1 or not has_rows(label.dims[0]):
        return along(c)
    c.label(c.first)  # as data: what sorts
    dim = label.dims[0]
    arranged = c.sizes.arranged(dim)
    if tag is not None and tag.kind == "chosen" and is_ascending:
        c.sizes.sorted_by[arranged] = tag.of
    values = Label((arranged,), tag=tag if tag and tag.kind == "chosen" else None)
    return [values] * (len(c.outs) - 1) + [Label((arranged,), tag=Tag("numbers", dim, is_each_once=True))]


def _is_arranged(dim: Dim) -> bool:
    return len(dim) == 1 and isinstance(dim[0], Atom) and dim[0].is_arranged


def is_permutation(c: Call, index: Tensor | None) -> bool:
    """Whether an index holds the number of each row once."""
    if index is None:
        return False
    label = c.label(index, is_data=False)
    if label.tag is None or not label.tag.is_each_once or len(label.dims) != 1:
        return False
    is_turned = _is_arranged(label.dims[0]) != _is_arranged(label.tag.of)
    return is_turned and is_equal(c.sizes.values(label.dims[0]), c.sizes.values(label.tag.of))


def places_put(c: Call, index: Tensor | None, values: Tensor) -> Label | None:
    """``x[index] = arange(n)``, where ``x`` was made for it: it says where each row lies. None if it is something
    else."""
    tensor = c.a["self"]
    if index is None or not is_permutation(c, index) or c.is_outside(tensor) or c.a["accumulate"]:
        return None
    order, given = c.label(index, is_data=False), c.certain_label(values)
    assert order.tag is not None
    arranged, back = order.dims[0], order.tag.of
    if c.certain_label(tensor).dims != (arranged,) or not _is_arranged(arranged) or not is_whole(tensor):
        return None
    if given.tag is None or not given.tag.is_each_once or given.tag.of != back or given.dims != (back,):
        return None
    c.rearranges = True
    fault = fault_here(True, c.operator.name, "places among all rows")
    return Label((back,), tag=Tag("numbers", arranged, fault, is_each_once=True))


def histogram(c: Call) -> list[Label]:
    """How many elements lie in each bin; of a choice, how many chose each."""
    label = c.certain_label(c.first)
    bins, low, high = c.a["bins"], c.a["min"], c.a["max"]
    if label.tag is None or label.tag.kind != "chosen" or (bins, low, high) != (label.tag.of[1], 0, bins - 1):
        c.blend(label.dims, "counts of all rows")
        return [Label(plain_dims(c.outs[0].shape))]
    fault = fault_here(True, c.operator.name, "counts of all rows")
    return [Label(((bins,),) if bins > 1 else ((),), tag=Tag("counts", label.tag.of, fault))]


def cumulate(c: Call) -> list[Label]:
    """Sums of all elements up to each; of counts, the bounds of groups."""
    label = c.moved
    if label.tag is not None and label.tag.kind == "counts" and c.outs[0].dtype in (torch.int32, torch.int64):
        return [Label(label.dims, tag=label.tag._replace(kind="bounds"))]
    return along(c)


def grouped_product(c: Call) -> list[Label]:
    """Each row by the matrix of its group."""
    rows, weight = c.certain_label("self").dims, c.certain_label("mat2").dims
    if len(rows) != 2 or len(weight) != 3:
        raise UnknownError("groups of another kind")
    c.blend([rows[1]], "a product over rows")
    c.blend(weight, "matrices made of rows")
    bounds = c.label("offs", is_data=False).tag if c.has("offs") else None
    key = c.sizes.sorted_by.get(rows[0])
    if (
        bounds is None
        or bounds.kind != "bounds"
        or key is None
        or bounds.of is not key
        or key[1] != own_size(weight[0])
    ):
        raise MixError("groups that are not those of the rows' own choice")
    return [Label((rows[0], weight[2]))]


def whole_quotient(c: Call) -> list[Label]:
    """A quotient of integers; of the number of a row's part, the number of the row."""
    label = c.moved
    divisor = c.caller.arguments[1] if len(c.caller.arguments) > 1 else None
    is_python = c.caller.function in ("__floordiv__", "floor_divide") and type(divisor) is int and divisor > 0
    if label.tag is not None and numbers_places(label) and is_python and c.outs[0].dtype == c.first.dtype:
        of = label.tag.of
        *rows, parts = of if type(of[-1]) is int else (*of, 1)  # of each row, one after the other
        if parts % divisor == 0:
            tag = label.tag._replace(of=merged((*rows, parts // divisor)), is_each_once=False)
            return [Label(label.dims, tag=tag)]
    return pointwise(c)


RULES: dict[Rule, str] = {
    choice: "topk argmax max",
    sort: "sort",
    histogram: "histc",
    cumulate: "cumsum",
    grouped_product: "_grouped_mm",
    whole_quotient: "floor_divide",
}
