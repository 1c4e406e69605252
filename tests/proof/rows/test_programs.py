"""Programs that mix rows or follow their number are refused; independent ones are proven for all batches."""

import pytest
import torch

from graphdispatch.backends.operators import tensors_in

from .independent import INDEPENDENT
from .refused import REFUSED
from .runs import judge, refusal


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:Using torch.cross")
@pytest.mark.parametrize("name", REFUSED)
def test_a_program_that_mixes_rows_or_follows_their_number_is_refused(name: str) -> None:
    """A fault, or a restriction that excludes other batches, says so. Eagerly it runs."""
    fn, make = REFUSED[name]
    fn(*make(7)[0])
    assert refusal(fn, make)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_an_independent_program_is_proven_for_all_numbers_of_rows(name: str) -> None:
    """The verdict names no fault, no restriction excludes a batch, and each output has the rows."""
    verdict = judge(*INDEPENDENT[name])
    assert (verdict.mixes, verdict.unknown, verdict.independent) == ("", "", True)
    assert all((rows,) in verdict.space for rows in range(2, 65))
    assert all(dims is not None and (0,) in dims for dims in verdict.outputs)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_proven_program_keeps_its_rows_when_others_change(name: str) -> None:
    """What the labels promise of the outputs is true of the numbers: a padded batch gives the rows of the plain one."""
    fn, make = INDEPENDENT[name]
    verdict = judge(fn, make)
    torch.manual_seed(1)
    args, followed = make(9)
    torch.manual_seed(1)
    plain, _ = make(9)
    for tensor, _ in followed:
        tensor[5:] = tensor[:4].clone()
    for mine, theirs, dims in zip(tensors_in(fn(*args)), tensors_in(fn(*plain)), verdict.outputs, strict=True):
        assert dims is not None
        place = next(place for place, axes in enumerate(dims) if 0 in axes)
        size = mine.shape[place] // 9 * 5
        torch.testing.assert_close(mine.narrow(place, 0, size), theirs.narrow(place, 0, size), rtol=1e-4, atol=1e-5)
