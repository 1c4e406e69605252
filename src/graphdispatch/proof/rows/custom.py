"""Rules for operators of other libraries, as text: those that users give, and those of libraries that many use."""

import re
from typing import NamedTuple

from torch import Tensor

from ...errors import ConfigError, check_type, shown
from .calls import Call
from .labels import (
    Dim,
    Label,
    MixError,
    UnknownError,
    axes_of,
    fault_here,
    has_rows,
    merged,
    own_size,
    plain_dims,
)

_ROWS, _REST, _NONE, _ANY = "n", "...", "_", "?"
_OPERATOR = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")
_TERM = re.compile(r"_|\?|(?:\.\.\.|[A-Za-z]\w*|\d+)(?: +(?:\.\.\.|[A-Za-z]\w*|\d+))*")
_REMEDY = 'write it as "n ..., _ -> n ...": what the tensors hold, in order, then the results'

SHIPPED = {
    # (batch, length, heads, width); what is left for the backward pass nobody reads
    "flash_attn::_flash_attn_forward": "n ..., n ..., n ..., _ -> n ..., n ..., ?, ?",
    "torchvision::deform_conv2d": "n ..., _, n ..., n ..., _ -> n ...",
    "torchao::int_scaled_matmul": "n ..., _, n ... -> n ...",
    "bitsandbytes::int8_linear_matmul": "n ..., _ -> n ...",
    "bitsandbytes::int8_mm_dequant": "n ..., n, _, _ -> n ...",
    "bitsandbytes::int8_scaled_mm": "n ..., _, n, _, _ -> n ...",
}
"""Rules of well-known libraries. What packs rows behind each other, or looks at several, has none."""


class RowRule(NamedTuple):
    """A rule: for each tensor among the arguments, and for each result, the names of its dimensions."""

    text: str
    given: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]


def _parsed(rule: str) -> RowRule:
    sides = rule.split("->")
    if len(sides) != 2:
        raise ConfigError(f"rule must have one '->', got {shown(rule)}; {_REMEDY}")
    given, results = (tuple(_term(rule, term.strip()) for term in side.split(",")) for side in sides)
    if (_ANY,) in given:
        raise ConfigError(f"rule must say of each argument where its rows are, got '?' in {shown(rule)}; {_REMEDY}")
    if not any(_ROWS in term for term in given):
        raise ConfigError(f"rule must have rows, n, in an argument, got {shown(rule)}; {_REMEDY}")
    return RowRule(rule, given, results)


def _term(rule: str, term: str) -> tuple[str, ...]:
    if not _TERM.fullmatch(term):
        raise ConfigError(
            f"rule must name the dimensions of each tensor, or have '...', '_' or '?' for them, got {shown(term)} "
            f"in {shown(rule)}; {_REMEDY}"
        )
    names = tuple(term.split())
    if names.count(_ROWS) > 1 or names.count(_REST) > 1:
        raise ConfigError(
            f"rule must have n and '...' at most once in a tensor, got {shown(term)} in {shown(rule)}; {_REMEDY}"
        )
    return names


_known: dict[str, RowRule] = {operator: _parsed(rule) for operator, rule in SHIPPED.items()}


def row_rule(operator: str, rule: str) -> None:
    """Say how rows go through an operator that graphdispatch has no rule for.

    With the rule, a model that calls the operator is served in padded batches where nothing else mixes rows. The rule
    is your word: nothing checks it, and a wrong one makes wrong answers. It holds for the whole process.

    For example ``row_rule("mylib::swiglu", "n ..., _ -> n ...")``: the first tensor has its rows along the first
    dimension, the second has none, and each row of the result depends on that row of the first tensor alone.

    Args:
        operator: The operator's name with its namespace, ``"mylib::op"``, for all its overloads.
        rule: The tensors among the arguments, in order and separated by commas, then ``->`` and the results. ``n`` is
            the dimension of rows, ``...`` any others, and a name or a number one other. ``_`` stands for a tensor
            without rows, and ``?`` for a result that nobody may use. Tensors that the rule leaves out have no rows,
            and a list of tensors counts as one. If the operator returns nothing, the results are what it writes. Rows
            may write state at any place: then they are padded only with ``padding_writes="allow"``.

    Raises:
        ConfigError: An argument is no such text.
    """
    check_type("operator", operator, str, 'a name such as "mylib::op"')
    check_type("rule", rule, str, 'text such as "n ..., _ -> n ..."')
    if not _OPERATOR.fullmatch(operator):
        raise ConfigError(f'operator must be a name with its namespace, such as "mylib::op", got {shown(operator)}')
    _known[operator] = _parsed(rule)


def has_rule(operator: str) -> bool:
    """Whether a rule was given for the operator of this name, or shipped."""
    return operator in _known


def apply_rule(c: Call) -> list[Label]:
    """The labels of the results, by the operator's rule."""
    rule = _known[c.func._schema.name]
    values = [v for v in c.a.values() if isinstance(v, Tensor) or _is_list(v)]
    optional = [a.name for a in c.func._schema.arguments if "Tensor" in str(a.type)]
    given = [c.a[name] for name in optional] if optional else values
    if len(rule.given) > len(given):
        raise UnknownError(f'its rule "{rule.text}" has {len(rule.given)} tensors, but it takes {len(given)}')
    rows, rest = _read(c, rule, given)
    return [_result(c, term, out.shape, rows, rest) for term, out in zip(rule.results, c.outs, strict=False)]


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)


def _read(c: Call, rule: RowRule, given: list[object]) -> tuple[Dim, dict[str, tuple[Dim, ...]]]:
    """The dimension of rows, and the others by their name."""
    rows: Dim = ()
    rest: dict[str, tuple[Dim, ...]] = {}
    for place, value in enumerate(given):
        term = rule.given[place] if place < len(rule.given) else (_NONE,)
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(tensor, Tensor):
                continue
            for name, dims in _named(c, term, c.certain_label(tensor).dims).items():
                if name == _ROWS:
                    rows = c.sizes.joined(rows, dims[0])
                    continue
                if any(map(has_rows, dims)):
                    raise MixError("rows where its rule has none")
                c.mixed.update(*map(axes_of, dims))
                rest.setdefault(name, dims)
    return rows, rest


def _named(c: Call, term: tuple[str, ...], dims: tuple[Dim, ...]) -> dict[str, tuple[Dim, ...]]:
    """Dimensions by their names in a term."""
    if term == (_NONE,):
        return {_NONE: dims}
    more = len(dims) - len(term) + 1
    if more < 0 or (_REST not in term and len(dims) != len(term)):
        raise UnknownError(f"its rule has {' '.join(term)} for a tensor of {len(dims)} dimensions")
    found: dict[str, tuple[Dim, ...]] = {}
    at = 0
    for name in term:
        count = more if name == _REST else 1
        found[name] = dims[at : at + count]
        at += count
    return found


def _result(
    c: Call, term: tuple[str, ...], shape: tuple[int, ...], rows: Dim, rest: dict[str, tuple[Dim, ...]]
) -> Label:
    own = plain_dims(shape)
    if term == (_ANY,):
        return Label(own, fault_here(False, c.func._schema.name, "a result that its rule leaves out"), is_lost=True)
    dims: list[Dim] = []
    for name, plain in _named(c, term, own).items():
        if name == _ROWS:
            dims.append(rows)
            continue
        given = rest.get(name, ())
        is_same = tuple(map(own_size, given)) == tuple(map(own_size, plain))
        if not is_same and rest:
            lengths = sorted(axes_of(merged(a for each in rest.values() for dim in each for a in dim)))
            c.space.restrict_to_own(lengths, "a size that no rule tells for other batches")
        dims += given if is_same else plain
    return Label(tuple(dims))
