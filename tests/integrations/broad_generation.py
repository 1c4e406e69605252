"""All families in all modes, too many for each run of the tests: ``make generate-test``."""

import pytest

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about its own arguments

from graphdispatch.integrations.transformers import GraphedGeneration  # noqa: E402

from .families import FAMILIES, GREEDY, MODES, answers, make_model, prompts  # noqa: E402
from .test_generation import check_same  # noqa: E402


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_equal(family: str, mode: str) -> None:
    """Batches of 1 and 8, long and short, with padding and without."""
    sizes = ((1, 6, False), (8, 5, True), (8, 11, False))
    requests = [(prompts(rows, length, pads=pads), MODES[mode]) for rows, length, pads in sizes]
    stats = check_same(make_model(family), requests, cache_lengths=(32,)).stats
    assert (stats.served, stats.captures, stats.capture_failures) == (6, 2, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_forty_requests_of_mixed_shapes(family: str) -> None:
    """At most one capture for each number of rows and cache length, and 95 % hits after the first request."""
    model = make_model(family)
    sizes = [(1 + i % 3, 4 + 7 * (i % 4), i % 2 == 0) for i in range(40)]
    requests = [(prompts(rows, length, pads=pads), GREEDY | {"max_new_tokens": 24}) for rows, length, pads in sizes]
    expected = answers(model, requests)
    with GraphedGeneration(model, cache_lengths=(32, 64)) as generation:
        first = answers(model, requests[:1])
        before = generation.stats
        got = first + answers(model, requests[1:])
        stats = generation.stats
    assert all((a == b).all() for a, b in zip(got, expected, strict=True))
    assert stats.captures <= 6
    assert (stats.hits - before.hits) / (stats.steps - before.steps) >= 0.95
