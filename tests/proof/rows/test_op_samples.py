"""The rules against torch's own samples of its operators."""

import warnings
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from ...helpers import run_python
from .op_samples import cases, wrong

PARTS = 250


@cache
def _outcomes(part: int) -> tuple[str, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(map(wrong, cases(part, PARTS)))


def test_no_rule_is_for_a_torch_that_was_not_checked() -> None:
    """Each of its operators is unknown, so that nothing is padded by itself."""
    code = (
        "import torch; torch.__version__ = '2.99.0'; from graphdispatch.proof.rows.rules import operator_of; "
        "print([operator_of(op).rule for op in (torch.ops.aten.mul.Tensor, torch.ops.aten.view.default)])"
    )
    assert run_python("-c", code) == "[None, None]\n"


@given(part=st.integers(0, PARTS - 1))
def test_no_label_of_torch_s_own_samples_is_wrong(part: int) -> None:
    """Where a rule lets a sample pass, an element changes only with the row that its label says."""
    assert [outcome for outcome in _outcomes(part) if outcome not in ("", "refused")] == []
