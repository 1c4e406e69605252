"""Rules that users give for operators."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from graphdispatch.errors import ConfigError
from graphdispatch.proof.rows import custom
from graphdispatch.proof.rows.custom import SHIPPED, row_rule

from .runs import Batch, D, by_rows, grid, judge

LIBRARY = torch.library.Library("graphdispatch_rules", "DEF")
LIBRARY.define("scale(Tensor x, Tensor w, Tensor? bias=None) -> Tensor")
LIBRARY.define("split(Tensor x) -> (Tensor, Tensor)")
LIBRARY.define("pick(Tensor[] parts, Tensor x) -> Tensor")
LIBRARY.define("paged(Tensor x, Tensor cache, Tensor slots) -> Tensor")
LIBRARY.define("keep(Tensor(a!) cache, Tensor slots, Tensor x) -> ()")
LIBRARY.define("store(Tensor(a!) out, Tensor x) -> ()")


def _scale(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return x * w if bias is None else x * w + bias


LIBRARY.impl("scale", _scale, "CPU")
LIBRARY.impl("split", lambda x: (x[..., :2].clone(), x.sum(-1)), "CPU")
LIBRARY.impl("pick", lambda parts, x: sum(parts) + x, "CPU")
LIBRARY.impl("store", lambda out, x: (out.copy_(x), None)[1], "CPU")
LIBRARY.impl("paged", lambda x, cache, slots: x + cache[slots], "CPU")
LIBRARY.impl("keep", lambda cache, slots, x: (cache.index_copy_(0, slots, x), None)[1], "CPU")
OPS = torch.ops.graphdispatch_rules
WEIGHT = torch.ones(D)


@pytest.fixture(autouse=True)
def _own_rules() -> Iterator[None]:
    """Rules of one test are none of another's."""
    before = dict(custom._known)
    yield
    custom._known.clear()
    custom._known.update(before)


def test_a_rule_says_where_the_rows_of_a_result_are() -> None:
    """With the rule the output has its rows; its other dimensions are those of the argument."""
    row_rule("graphdispatch_rules::scale", "n ..., _ -> n ...")
    verdict = judge(lambda x: OPS.scale(x, WEIGHT))
    assert (verdict.mixes, verdict.unknown, verdict.outputs) == ("", "", (((0,), ()),))
    assert all((n,) in verdict.space for n in range(2, 65))


def test_a_result_of_another_size_speaks_for_its_length_alone() -> None:
    """The rule does not say how long it is for another length; rows may be as many as they like."""
    row_rule("graphdispatch_rules::split", "n s d -> n s d, n s")
    verdict = judge(lambda x: OPS.split(x.transpose(1, 2))[0], grid, own=(7, 11))
    assert (9, 11) in verdict.space
    assert (9, 12) not in verdict.space
    row_rule("graphdispatch_rules::scale", "n s d, _ -> n s d")
    assert (9, 12) in judge(lambda x: OPS.scale(x, WEIGHT), grid, own=(7, 11)).space


def test_a_rule_counts_a_length_as_mixed() -> None:
    """Nothing tells what an operator does along a length, though the result has it."""
    row_rule("graphdispatch_rules::scale", "n s d, _ -> n s d")
    verdict = judge(lambda x: OPS.scale(x, WEIGHT), grid, own=(7, 11))
    assert (verdict.independent, verdict.mixed_axes, verdict.outputs) == (True, {1}, (((0,), (1,), ()),))


def test_rows_where_the_rule_has_none_mix() -> None:
    """The second tensor may hold no rows, nor may one that the rule leaves out."""
    row_rule("graphdispatch_rules::scale", "n ..., _ -> n ...")
    assert "rows where its rule has none" in judge(lambda x: OPS.scale(x, x)).mixes
    assert "rows where its rule has none" in judge(lambda x: OPS.scale(x, WEIGHT, x)).mixes
    assert "rows where its rule has none" in judge(lambda x: OPS.scale(x.T, WEIGHT[:1]).T).mixes


def test_a_result_may_be_left_out() -> None:
    """Nobody may use what the rule calls ``?``, and the others are as they are named."""
    row_rule("graphdispatch_rules::split", "n ... -> n d, ?")
    assert judge(lambda x: OPS.split(x)[0]).outputs == (((0,), ()),)
    assert "leaves out" in judge(lambda x: OPS.split(x)[1]).unknown
    row_rule("graphdispatch_rules::split", "n ... -> n d, n")
    assert judge(lambda x: OPS.split(x)[1]).outputs == (((0,),),)


def test_a_list_of_tensors_counts_as_one() -> None:
    """Each tensor of the list is as the rule says."""
    row_rule("graphdispatch_rules::pick", "n ..., n ... -> n ...")
    assert judge(lambda x: OPS.pick([x, x * 2], x)).independent
    row_rule("graphdispatch_rules::pick", "_, n ... -> n ...")
    assert judge(lambda x: OPS.pick([x], x)).mixes


def test_what_an_operator_writes_follows_its_rule() -> None:
    """An operator that returns nothing has as results what it writes."""

    def fn(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        OPS.store(out, x)
        return out

    row_rule("graphdispatch_rules::store", "n ..., n ... -> n ...")
    assert judge(fn).outputs == (((0,), ()),)


def test_an_operator_in_python_is_followed_without_a_rule() -> None:
    """Its kernel is Python, so that its own operators tell; a rule comes before."""
    assert judge(lambda x: OPS.scale(x, WEIGHT)).independent
    assert "aten::sum" in judge(lambda x: OPS.scale(x, x.sum(0))).mixes
    row_rule("graphdispatch_rules::scale", "_, n ... -> n ...")
    assert judge(lambda x: OPS.scale(x, WEIGHT)).mixes


def test_the_parts_of_an_operator_with_a_rule_have_any_shapes() -> None:
    """What runs within it is not followed, so that another batch may have other shapes there."""
    row_rule("graphdispatch_rules::scale", "n ..., _ -> n ...")
    verdict = judge(lambda x: OPS.scale(x, WEIGHT))
    product = torch.ops.aten.mul.Tensor
    assert [step.operator for step in verdict.steps] == [product]
    assert verdict.has_shapes([(product, ((9, D), (D, D), (9, D)))], (9,))


def test_a_rule_that_does_not_fit_is_unknown() -> None:
    """A rule for other tensors says nothing of these."""
    row_rule("graphdispatch_rules::scale", "n a b, _ -> n a b")
    assert "n a b for a tensor of 2 dimensions" in judge(lambda x: OPS.scale(x, WEIGHT)).unknown
    row_rule("graphdispatch_rules::split", "n ..., _ -> n ..., n")
    assert "has 2 tensors, but it takes 1" in judge(lambda x: OPS.split(x)).unknown


@pytest.mark.parametrize(
    ("operator", "rule", "says"),
    [
        ("mylib.op", "n -> n", "operator must be a name with its namespace"),
        (3, "n -> n", "operator must be a name"),
        ("mylib::op", None, "rule must be text"),
        ("mylib::op", "n ...", "rule must name each dimension"),
        ("mylib::op", "_ -> n", "rule must name each dimension"),
        ("mylib::op", "n n -> n", "rule must name each dimension"),
        ("mylib::op", "n, ? -> n", "rule must name each dimension"),
    ],
)
def test_a_wrong_rule_is_refused(operator: object, rule: object, says: str) -> None:
    """The error names the argument and shows how to write it."""
    with pytest.raises(ConfigError, match=says) as error:
        row_rule(operator, rule)  # type: ignore[arg-type]
    assert "::" in str(error.value) or "->" in str(error.value)


def test_shipped_rules_are_rules() -> None:
    """Each is as a user would write it."""
    for operator, rule in SHIPPED.items():
        row_rule(operator, rule)
        assert custom.word_for(operator) is not None


def _slots(n: int) -> Batch:
    x, slots = torch.randn(n, D), torch.randperm(40)[:n]
    return by_rows(x, slots, others=[torch.zeros(64, D)])


def test_a_rule_vouches_for_what_an_operator_reads_of_slots() -> None:
    """It says that each row of the result follows that row alone, so that it reads no slot of padding."""
    row_rule("graphdispatch_rules::paged", "n ..., _, n -> n ...")

    def step(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        cache[slots] = x
        return OPS.paged(x, cache, slots)

    assert judge(step, _slots).independent


def test_an_operator_that_writes_state_may_write_anywhere() -> None:
    """Nobody sees where rows write, so that the verdict counts it as places that they name, and as a sum."""
    row_rule("graphdispatch_rules::keep", "_, n, n ... -> _")
    verdict = judge(lambda x, slots, cache: (OPS.keep(cache, slots, x), x * 2)[1], _slots)
    assert (verdict.independent, verdict.slots.axes, verdict.slots.adds) == (True, {0}, True)


def test_a_row_that_an_operator_writes_itself_names_no_place() -> None:
    """What it writes has the rows that its rule says."""
    row_rule("graphdispatch_rules::store", "n ..., n ... -> n ...")
    verdict = judge(lambda x: (OPS.store(x, x * 2), x + 1)[1])
    assert (verdict.independent, verdict.slots.where) == (True, "")
