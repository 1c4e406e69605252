"""Which rule an operator has. A rule reads shapes and arguments, never data; where it tells nothing, rows may mix.

Note [checked versions]
    The table was checked with the operators of the versions of torch named here. Another version may have given a name
    another meaning, so it has no rules.
"""

import re

import torch
from torch._ops import OpOverload

from ...backends.operators import OperatorKind, changes_view, is_seeded, keeps_elements, kind_of, per_operator
from . import creation, elementwise, experts, places, products, views
from .calls import Operator, Rule
from .custom import word_for
from .elementwise import pointwise

CHECKED = ((2, 11), (2, 13))
"""The first and the last version of torch that the table was checked with; see Note [checked versions]."""

_MODULES = (elementwise, views, creation, products, places, experts)
TABLE: dict[str, Rule] = {
    name: rule for module in _MODULES for rule, names in module.RULES.items() for name in names.split()
}
"""The rules of torch's operators, by name."""


def version_of_torch() -> tuple[int, ...]:
    """The running version of torch, as ``(2, 13)``."""
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


IS_CHECKED = CHECKED[0] <= version_of_torch() <= CHECKED[1]


def _rule_of_torch(func: OpOverload) -> Rule | None:
    if not IS_CHECKED or func.namespace not in ("aten", "prims"):
        return None
    name = func._schema.name.partition("::")[2]
    if name in ("view", "view_copy") and func._overloadname.startswith("dtype"):
        return views.retyped
    found = TABLE.get(name) or (TABLE.get(name[:-1]) if name.endswith("_") and not name.startswith("__") else None)
    return found or (pointwise if torch.Tag.pointwise in func.tags else None)


@per_operator
def operator_of(func: OpOverload) -> Operator:
    """What the run has to know of an operator."""
    name, arguments, rule, kind = func._schema.name, func._schema.arguments, _rule_of_torch(func), kind_of(func)
    return Operator(
        name=name,
        plain_name=name.partition("::")[2].removesuffix("_"),
        defaults={argument.name: argument.default_value for argument in arguments},
        tensors=tuple(argument.name for argument in arguments if "Tensor" in str(argument.type)),
        rule=rule,
        names_places=rule in places.NAME_PLACES,
        keeps_places=rule in (pointwise, elementwise.keep, TABLE["fill"]),
        takes_sizes=rule in (views.expand, creation.made, creation.arange, creation.repeat),
        makes_alike=rule in (views.expand, creation.made, creation.repeat),
        fills=rule in (creation.made, creation.like),
        is_view=kind is OperatorKind.VIEW,
        changes_view=changes_view(func),
        keeps_elements=keeps_elements(func),
        is_seeded=is_seeded(func),
        writes=kind is OperatorKind.WRITE,
    )


def rule_of(operator: Operator) -> Rule | None:
    """The rule of an operator; None: nobody knows what it does to rows."""
    return operator.rule or word_for(operator.name)
