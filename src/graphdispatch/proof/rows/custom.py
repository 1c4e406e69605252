"""Rules for operators of other libraries, as text: those that users give, and those of libraries that many use."""

import re

from ...errors import ConfigError, check_type, shown
from .rule_text import ANY, REST, ROWS, TextRule

_OPERATOR = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")
_TERM = re.compile(r"_|\?|(?:\.\.\.|[A-Za-z]\w*|\d+)(?: +(?:\.\.\.|[A-Za-z]\w*|\d+))*")

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


def _parsed(rule: str) -> TextRule:
    sides = [[term.strip() for term in side.split(",")] for side in rule.split("->")]
    terms = [term for side in sides for term in side]
    is_named = all(_TERM.fullmatch(term) and max(map(term.split().count, (ROWS, REST))) < 2 for term in terms)
    if len(sides) != 2 or not is_named or ANY in sides[0] or not any(ROWS in term.split() for term in sides[0]):
        raise ConfigError(
            "rule must name each dimension of each tensor once, with the rows, n, in an argument, and have '?' for "
            f'results alone, got {shown(rule)}; write it as "n ..., _ -> n ...": what the tensors hold, in order, then '
            "the results"
        )
    return TextRule(rule, is_word=True)


_known: dict[str, TextRule] = {operator: _parsed(rule) for operator, rule in SHIPPED.items()}


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


def word_for(operator: str) -> TextRule | None:
    """The rule that was given for the operator of this name, or shipped; None if none was."""
    return _known.get(operator)
