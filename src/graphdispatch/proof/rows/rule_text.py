"""Rules as text: which dimensions of an operator's tensors are kept, pair, go into each other, or are new.

A rule has a term for each argument that may hold tensors, in order, and after ``->`` one for each result. So
``"a k*, k* b -> a b"`` is the product of two matrices.

name      one dimension; those of the same name broadcast
...       any number of dimensions
name*     a dimension whose elements go into each other: no rows lie there, and its size may change; of a result alone:
          its size may follow from any of these
+ names   a tensor that broadcasts to these dimensions; ``+`` alone: to the first result
_         a tensor without rows, as all that the rule leaves out
?         a result that nobody may use

A name that only a result has is a dimension of the same size for all batches.
"""

from collections.abc import Iterator
from itertools import zip_longest

from ...backends.operators import tensors_in
from .calls import NO_ROWS, Call
from .labels import Dim, Fault, Label, UnknownError, axes_of, own_size, plain_dims

ROWS, REST, NONE, ANY, FITS = "n", "...", "_", "?", "+"
Dims = tuple[Dim, ...]


class TextRule:
    """The rule that a text states.

    Args:
        text: The rule.
        is_word: Whether it is a user's word for an operator. Then ``n`` are the rows, and nothing is said of other
            dimensions but that no rows lie there.
    """

    def __init__(self, text: str, *, is_word: bool = False) -> None:
        given, results = ([term.split() for term in side.split(",")] for side in text.split("->"))
        names = {name for term in (*given, *results) for name in term}
        self.text, self._is_word = text, is_word
        self._mixed = names - {ROWS} if is_word else {name[:-1] for name in names if name.endswith("*")}
        self._given, self._results = (
            [[n.removesuffix("*") for n in term] for term in side] for side in (given, results)
        )

    def __call__(self, c: Call) -> list[Label]:
        """The labels of the results."""
        values = [c.a[name] for name in c.operator.tensors]
        if len(self._given) > len(values):
            raise UnknownError(f'its rule "{self.text}" has {len(self._given)} tensors, but it takes {len(values)}')
        found: dict[str, Dims] = {}
        fitting = []
        for term, value in zip_longest(self._given, values, fillvalue=[NONE]):
            for tensor in tensors_in(value):
                dims = c.certain_label(tensor).dims
                if term == [NONE]:
                    c.blend(dims, NO_ROWS)
                elif term[0] == FITS:
                    fitting.append((term[1:], tensor))
                else:
                    self._read(c, term, dims, found)
        made = [
            self._result(c, term, plain_dims(out.shape), found)
            for term, out in zip(self._results, c.outs, strict=False)
        ]
        for names, tensor in fitting:
            c.fit([dim for name in names for dim in found[name]] if names else made[0].dims, tensor)
        return made

    def _read(self, c: Call, term: list[str], dims: Dims, found: dict[str, Dims]) -> None:
        """Note the dimensions of a tensor by their names."""
        for name, part in _named(term, dims):
            if name in self._mixed:
                c.blend(part, NO_ROWS if self._is_word else "")
            if name not in found:
                found[name] = part
            elif name == ROWS or not self._is_word:
                found[name] = c.broadcast([found[name], part])

    def _result(self, c: Call, term: list[str], plain: Dims, found: dict[str, Dims]) -> Label:
        if term == [ANY]:
            return Label(plain, Fault(False, f"a result of {c.operator.name} that its rule leaves out is used"), True)
        if term == [NONE]:
            return Label(plain)
        dims: list[Dim] = []
        for name, part in _named(term, plain):
            given = found.get(name, ())
            if name not in self._mixed:
                dims += given or part
            elif len(given) == len(part) and (
                not self._is_word or list(map(own_size, given)) == list(map(own_size, part))
            ):
                dims += map(c.resized, given, map(own_size, part))
            else:
                lengths = {axis for one in self._mixed & found.keys() for dim in found[one] for axis in axes_of(dim)}
                c.space.restrict_to_own(sorted(lengths), "a size that no rule tells for other batches")
                dims += part
        return Label(tuple(dims))


def _named(term: list[str], dims: Dims) -> Iterator[tuple[str, Dims]]:
    """Dimensions by their names in a term."""
    more = len(dims) - len(term) + 1
    if more < 0 or (REST not in term and more != 1):
        raise UnknownError(f"its rule has {' '.join(term)} for a tensor of {len(dims)} dimensions")
    at = 0
    for name in term:
        count = more if name == REST else 1
        yield name, dims[at : at + count]
        at += count
