"""Rules of operators that look at the same elements in another shape."""

import numpy as np
from torch import Tensor

from .batches import Array, Num, is_equal
from .calls import Call, Rule, view_of
from .labels import Atom, Dim, Label, UnknownError, flat, has_rows, is_dynamic, merged, own_size, plain_dim, plain_dims
from .rule_text import TextRule


def _moved(label: Label, dims: tuple[Dim, ...], *, is_whole: bool = True) -> Label:
    """The label of the same elements in another shape, or of some of them."""
    tag = label.tag
    if tag is None or is_whole:
        return Label(dims, label.fault, tag=tag)
    if tag.kind != "numbers":
        return Label(dims, label.fault or tag.fault)
    return Label(dims, label.fault, tag=tag._replace(is_each_once=False))


def view(c: Call) -> list[Label]:
    """The factors of the old shape, in order, are dealt to the sizes of the new one."""
    label = c.moved
    rest = list(flat(label.dims))
    return [_moved(label, tuple(_dealt(rest, size) for size in c.outs[0].shape))]


def _dealt(rest: list[Atom | int], size: int) -> Dim:
    """The next factors, as many as make ``size``."""
    taken: list[Atom | int] = []
    now = 1
    while now != size:
        atom = rest.pop(0)
        if isinstance(atom, Atom):
            now *= atom.own
            taken.append(atom)
            if size % now:
                raise UnknownError("a view that cuts the batch")
            continue
        need, left = divmod(size, now)
        factor = 0 if left else atom if need % atom == 0 else need if atom % need == 0 else 0
        if not factor:
            raise UnknownError("a view across sizes")
        if atom != factor:
            rest.insert(0, atom // factor)
        taken.append(factor)
        now *= factor
    return merged(taken)


def permute(c: Call) -> list[Label]:
    """Dimensions in another order."""
    label = c.moved
    order = list(range(len(label.dims)))
    if c.name == "t":
        order.reverse()
    elif c.name == "transpose":
        one, other = c.place("dim0", len(order)), c.place("dim1", len(order))
        order[one], order[other] = order[other], order[one]
    else:
        order = c.places(c.a["dims"], len(order))
    return [_moved(label, tuple(label.dims[d] for d in order))]


def unsqueeze(c: Call) -> list[Label]:
    """A further dimension of one element."""
    label = c.moved
    at = c.place("dim", len(label.dims) + 1)
    return [_moved(label, (*label.dims[:at], (), *label.dims[at:]))]


def squeeze(c: Call) -> list[Label]:
    """Dimensions of one element go; a dynamic one is never of one element, see Note [a batch of one]."""
    label = c.moved
    places = c.places(c.a.get("dim"), len(label.dims))
    for place in places:
        c.space.restrict(np.minimum(c.sizes.values(label.dims[place]), 2), "squeezes a size of one")
    return [_moved(label, tuple(dim for i, dim in enumerate(label.dims) if i not in places or dim != ()))]


def expand(c: Call) -> list[Label]:
    """Dimensions of one element become longer."""
    label = c.moved
    shape = c.outs[0].shape
    more = len(shape) - len(label.dims)
    dims: list[Dim] = []
    for place, size in enumerate(shape):
        old = label.dims[place - more] if place >= more else ()
        dims.append(old if size == own_size(old) else c.given_at(place, len(shape), size))
    return [_moved(label, tuple(dims), is_whole=False)]


def select(c: Call) -> list[Label]:
    """One element along a dimension."""
    label = c.moved
    at = c.place("dim", len(label.dims))
    c.blend([label.dims[at]], "one row for all")
    index = c.a["index"]
    c.require_places(label.dims[at], index, index)
    return [_moved(label, (*label.dims[:at], *label.dims[at + 1 :]), is_whole=False)]


def slice_(c: Call) -> list[Label]:
    """A part of a dimension."""
    label = c.moved
    at = c.place("dim", len(label.dims))
    new = _sliced(c, label.dims[at], c.outs[0].shape[at])
    return [_moved(label, (*label.dims[:at], new, *label.dims[at + 1 :]), is_whole=new == label.dims[at])]


def _cut(value: int, number: Num | None, whole: Array) -> Array:
    """An end of a slice for all batches, within the dimension."""
    given = np.asarray(value) if number is None else number.values
    return np.clip(np.where(given < 0, given + whole, given), 0, whole)


def _copies(c: Call, old: Dim, sizes: Array) -> Dim | None:
    """As many of the copies of all rows (or all of a length), one behind the other, as have these sizes for all
    batches; None if they are no whole ones."""
    if not old or type(old[0]) is not int:
        return None
    count = int(c.space.of_run(sizes)) // own_size(old[1:])
    return merged((count, *old[1:])) if is_equal(sizes, count * c.sizes.values(old[1:])) else None


_SLICES = frozenset({"__getitem__", "__setitem__", "narrow"})


def _sliced(c: Call, old: Dim, size: int) -> Dim:
    start, end = (c.caller.size(v) if v else None for v in (c.a["start"], c.a["end"]))
    is_plain = start is None and end is None
    if is_plain and not is_dynamic(old):
        return plain_dim(size)
    whole = c.sizes.values(old)

    first = _cut(c.a["start"] or 0, start, whole)
    last, step = _cut(2**62 if c.a["end"] is None else c.a["end"], end, whole), c.a["step"]
    begins, part = _copies(c, old, first), _copies(c, old, last - first)
    if step == 1 and begins is not None and part and 0 not in part:
        return part
    c.space.restrict(first, "a slice that starts at a size")
    sizes, is_from_start = np.maximum(-(-(last - first) // step), 0), not np.any(first)
    if step == 1 and is_from_start and is_equal(sizes, whole):
        return old
    c.blend([old], "a part of the rows")
    if is_plain and c.caller.function not in _SLICES:
        return c.resized(old, size)  # torch computed the ends, and for another batch they are others
    new = c.sizes.dim_of_values(sizes)
    if not is_dynamic(old):
        new = c.sizes.in_order(new)
    if has_rows(new) and not (is_from_start and step == 1):
        raise UnknownError("a slice that starts at a number of rows")
    return new


def split(c: Call) -> list[Label]:
    """Parts of a dimension. Python gets their number."""
    c.run.label_of_size(c.first)
    label = c.moved
    at = c.place("dim", len(label.dims))
    old, before, after = label.dims[at], label.dims[:at], label.dims[at + 1 :]
    is_unbind = c.name.startswith("unbind")
    if is_dynamic(old):
        if not is_unbind and (parts := _whole_parts(c, old)):
            return [_moved(label, (*before, part, *after), is_whole=False) for part in parts]
        c.space.restrict(c.sizes.values(old), "splits a size that follows the batch")
        if has_rows(old):
            raise UnknownError("parts of the rows")
        c.blend([old], "parts of a length")
    if is_unbind:
        return c.each(_moved(label, (*before, *after), is_whole=False))
    return [_moved(label, (*before, plain_dim(o.shape[at]), *after), is_whole=False) for o in c.outs]


def _whole_parts(c: Call, old: Dim) -> list[Dim]:
    """The parts, if each has whole copies of all rows, or all of a length; else none."""
    count, head, arguments = len(c.outs), old[0], c.caller.arguments
    if c.caller.function == "chunk":
        is_even = type(head) is int and head % count == 0 and count == (arguments[1] if len(arguments) > 1 else count)
        return [merged((head // count, *old[1:]))] * count if is_even else []  # type: ignore[operator]
    sizes = c.a.get("split_sizes") or [c.a.get("split_size")] * count
    numbers = [c.caller.size(size) if type(size) is int else None for size in sizes]
    parts = [None if number is None else _copies(c, old, number.values) for number in numbers]
    made = [part for part in parts if part is not None]
    return made if len(made) == count and sum(map(own_size, made)) == own_size(old) else []


_BITS, _PARTS = TextRule("... -> ..."), TextRule("... a* -> ... a")


def retyped(c: Call) -> list[Label]:
    """The same memory as numbers of another type, which may be wider or narrower."""
    return (_BITS if c.outs[0].shape == c.first.shape else _PARTS)(c)


def as_strided(c: Call) -> list[Label]:
    """Any view of memory; only the same one is known, where strides of dimensions of one element say nothing, and
    windows along a last dimension that follows no batch, as ``torch.stft`` makes them."""
    before = c.before if c.writes else view_of(c.first)  # in place the argument is as it is afterwards
    if before == view_of(c.outs[0]):
        return [c.label(c.first, is_data=False)]
    if (
        not c.writes
        and _are_windows(c.outs[0], c.first)
        and not is_dynamic((label := c.certain_label(c.first)).dims[-1])
    ):
        return [Label((*label.dims[:-1], *plain_dims(c.outs[0].shape[-2:])))]
    raise UnknownError("strides")


def _are_windows(out: Tensor, tensor: Tensor) -> bool:
    """Whether ``out`` is what ``unfold`` gives along the last dimension of ``tensor``."""
    if not 0 < tensor.dim() == out.dim() - 1 or not 0 < out.shape[-1] <= tensor.shape[-1]:
        return False
    step = out.stride(-2) // max(tensor.stride(-1), 1)
    return step > 0 and view_of(tensor.unfold(-1, out.shape[-1], step)) == view_of(out)


def unfold(c: Call) -> list[Label]:
    """Windows along a dimension."""
    label, length = c.certain_label(c.first), c.a["size"]
    at = c.place("dimension", len(label.dims))
    c.blend([label.dims[at]], "windows of rows")
    new = c.sizes.dim_of_values((c.sizes.values(label.dims[at]) - length) // c.a["step"] + 1)
    return [Label((*label.dims[:at], new, *label.dims[at + 1 :], plain_dim(length)))]


RULES: dict[Rule, str] = {
    view: "view view_copy _unsafe_view _reshape_alias _reshape_copy",
    permute: "permute transpose t permute_copy",
    unsqueeze: "unsqueeze",
    squeeze: "squeeze",
    expand: "expand expand_copy",
    select: "select",
    slice_: "slice",
    split: "split split_with_sizes unbind unsafe_split split_with_sizes_copy unbind_copy",
    TextRule("... two* -> ..."): "view_as_complex",
    TextRule("... -> ... two"): "view_as_real",
    as_strided: "as_strided",
    unfold: "unfold",
}
