"""Which rule an operator has. A rule reads shapes and arguments, never data; where it tells nothing, rows may mix.

Note [checked versions]
    The table was checked with the operators of the versions of torch named here. Another version may have given a name
    another meaning, so it has no rules.
"""

import re

import torch
from torch._ops import OpOverload

from ...backends.operators import OperatorKind, kind_of, per_operator
from . import creation, custom, elementwise, experts, places, products, views
from .elementwise import Rule, pointwise

CHECKED = ((2, 11), (2, 13))
"""The first and the last version of torch that the table was checked with; see Note [checked versions]."""

_MODULES = (elementwise, views, creation, products, places, experts)
TABLE: dict[str, Rule] = {
    name: rule for module in _MODULES for rule, names in module.RULES.items() for name in names.split()
}
"""The rules of torch's operators, by name."""
_PLACES: dict[Rule, tuple[str, ...]] = {**views.PLACES, **elementwise.PLACES, **places.PLACES, **experts.PLACES}
"""The arguments that rules take as places, and whose tags they pass on or check themselves. In any other argument,
places among all rows are data that mixes."""


def version_of_torch() -> tuple[int, ...]:
    """The running version of torch, as ``(2, 13)``."""
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


IS_CHECKED = CHECKED[0] <= version_of_torch() <= CHECKED[1]


@per_operator
def _rule_of_torch(func: OpOverload) -> Rule | None:
    schema = func._schema
    if not IS_CHECKED or func.namespace not in ("aten", "prims"):
        return None
    name = schema.name.partition("::")[2]
    if name in ("view", "view_copy") and func._overloadname.startswith("dtype"):
        return views.retyped
    found = TABLE.get(name) or (TABLE.get(name[:-1]) if name.endswith("_") and not name.startswith("__") else None)
    return found or (pointwise if torch.Tag.pointwise in func.tags else None)


def rule_of(func: OpOverload) -> Rule | None:
    """The rule of an operator; None: nobody knows what it does to rows."""
    return _rule_of_torch(func) or custom.word_for(func._schema.name)


_NAME_PLACES: frozenset[Rule] = frozenset(places.NAME_PLACES)


def may_name_places(rule: Rule | None) -> bool:
    """Whether rows may say at which places of state the operator reads or writes: see Note [slots] in ``slots.py``."""
    return rule in _NAME_PLACES


def reads_all(func: OpOverload) -> bool:
    """Whether the operator may read all of its tensors: it makes no view, and nobody gave a rule for it."""
    return kind_of(func) is not OperatorKind.VIEW and not custom.has_rule(func._schema.name)


_KEEP_PLACES = (pointwise, elementwise.keep, TABLE["fill"])


def keeps_places(func: OpOverload, rule: Rule | None) -> bool:
    """Whether each element of a result is made of those at its own place."""
    return rule in _KEEP_PLACES or kind_of(func) is OperatorKind.VIEW


@per_operator
def takes_sizes(func: OpOverload) -> bool:
    """Whether sizes are among the arguments, so that a result may follow the batch where no argument does."""
    return _rule_of_torch(func) in (views.expand, creation.made, creation.arange, creation.repeat)


def makes_alike(rule: Rule | None) -> bool:
    """Whether an operator that makes rows of a tensor without rows makes all of them alike."""
    return rule in (views.expand, creation.made, creation.repeat)


def names_of_places(rule: Rule | None) -> tuple[str, ...]:
    """The arguments that an operator takes as places among rows, and not as data."""
    return () if rule is None else _PLACES.get(rule, ())
