"""Programs that mix rows or follow their number are refused; independent ones are proven for all batches."""

import pytest
import torch

from .attacks import ATTACKS
from .programs import BAD, GOOD
from .runs import judge, refusal

NAMES_SLOTS = ("state by name", "state by name, added")
"""Rows write state at places that they name. No row depends on how many others there are; whether padding names a place
of a real row is seen when a padded batch is compared."""


@pytest.mark.parametrize("name", BAD)
def test_a_program_that_mixes_rows_or_follows_their_number_is_refused(name: str) -> None:
    """A fault, or a restriction that excludes other batches, says so."""
    assert refusal(*BAD[name])


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in NAMES_SLOTS])
def test_an_attack_is_refused(name: str) -> None:
    """Neither side ways to sizes nor to other rows go unseen."""
    assert refusal(*ATTACKS[name])


@pytest.mark.parametrize("name", GOOD)
def test_an_independent_program_is_proven_for_all_numbers_of_rows(name: str) -> None:
    """The verdict names no fault, and no restriction excludes a batch."""
    verdict = judge(*GOOD[name])
    assert (verdict.mixes, verdict.unknown, verdict.independent) == ("", "", True)
    assert all(verdict.speaks_for((rows,)) for rows in range(2, 65))


@pytest.mark.parametrize("name", NAMES_SLOTS)
def test_state_at_named_places_is_left_to_the_comparison(name: str) -> None:
    """The verdict says that it writes state, so that what padding writes is looked at."""
    verdict = judge(*ATTACKS[name])
    assert verdict.independent
    assert verdict.writes_state


@pytest.mark.parametrize("name", GOOD)
def test_a_proven_program_keeps_its_rows_when_others_change(name: str) -> None:
    """What the labels promise of the outputs is true of the numbers: a padded batch gives the rows of the plain one."""
    fn, make = GOOD[name]
    verdict = judge(fn, make)
    torch.manual_seed(1)
    args, kwargs, followed = make(9)
    torch.manual_seed(1)
    plain, _, _ = make(9)
    for tensor, _ in followed:
        tensor[5:] = tensor[:4].clone()
    with torch.no_grad():
        got, wanted = _outputs(fn(*args, **kwargs)), _outputs(fn(*plain, **kwargs))
    for mine, theirs, dims in zip(got, wanted, verdict.outputs, strict=True):
        assert dims is not None
        place = next(place for place, axes in enumerate(dims) if 0 in axes)
        size = mine.shape[place] // 9 * 5
        torch.testing.assert_close(mine.narrow(place, 0, size), theirs.narrow(place, 0, size), rtol=1e-4, atol=1e-5)


def _outputs(out: object) -> list[torch.Tensor]:
    from .runs import tensors_of

    return tensors_of(out)
