"""An argument that was alike in many batches is no constant: padded batches are compared as soon as it changes."""

import torch

from graphdispatch import Reason, graphed


def _mixes(x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Rows depend on each other by ``kinds`` alone, which nothing shows while all of them are 0."""
    return x + kinds.float().mean(0)


def test_a_change_after_many_batches_is_compared() -> None:
    """After 40 padded batches with zeros others come: every answer is that of eager, and dependent rows are found."""
    served = graphed(_mixes, dynamic={"x": 0, "kinds": 0}, sizes=[4])
    for step in range(60):
        x, kinds = torch.randn(3, 2), torch.full((3, 2), int(step >= 40))
        torch.testing.assert_close(served(x, kinds), _mixes(x, kinds))
    assert served.stats.hits > 15
    assert served.stats.reasons[Reason.VERIFICATION_FAILED]


def test_independent_rows_are_served_again() -> None:
    """A model of independent rows is compared once when the argument changes, and then served for any values of it."""
    served = graphed(lambda x, kinds: x + kinds.float(), dynamic={"x": 0, "kinds": 0}, sizes=[4])
    for step in range(60):
        x = torch.randn(3, 2)
        kinds = torch.randint(3, (3, 2)) if step >= 40 else torch.zeros(3, 2, dtype=torch.long)
        assert torch.equal(served(x, kinds), x + kinds.float())
    assert served.stats.reasons[Reason.VERIFIED_NOW] < 25
    assert served.stats.hits > 30
