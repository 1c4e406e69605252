"""Workloads: weights by size from every source, in time or without, and files that are not what they should be."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphdispatch import CUDAGraphStats, Reason
from graphdispatch.errors import ConfigError
from graphdispatch.plan import Workload


def table(workload: Workload) -> dict[int, tuple[float, float]]:
    """The weights of decode and mixed steps, by size."""
    rows = zip(workload.sizes.tolist(), workload.decode.tolist(), workload.mixed.tolist(), strict=True)
    return {size: (decode, mixed) for size, decode, mixed in rows}


def test_steps_are_counted_by_size_and_kind() -> None:
    """Sizes are sorted and unique; each step weighs 1 among the steps of its kind."""
    workload = Workload.from_steps([5, 2, 5, 2, 9], [0, 1, 1, 1, 0])
    assert table(workload) == {2: (2, 0), 5: (1, 1), 9: (0, 1)}
    assert (workload.total, workload.largest, workload.counts.tolist()) == (5.0, 9, [2, 2, 1])
    assert (workload.sizes.dtype, workload.decode.dtype, workload.mixed.dtype) == (np.int64, np.float64, np.float64)


def test_steps_of_no_told_kind_are_uniform_decode() -> None:
    """A full graph serves the batches of a callable that tells no kinds apart."""
    assert table(Workload.from_steps([3, 3])) == {3: (2, 0)}


def test_a_histogram_says_how_much_of_it_is_decode() -> None:
    """Weights may be any share; a size without weight is none of the workload's."""
    assert table(Workload.from_histogram({8: 2.5, 2: 4, 5: 0}, {2: 1})) == {2: (1, 3), 8: (0, 2.5)}
    assert table(Workload.from_histogram({8: 2.5})) == {8: (2.5, 0)}


def test_arrays_are_copies_that_nobody_can_write() -> None:
    """What the caller does to its own array later does not reach the workload, and nobody writes to the workload's."""
    mine = np.array([1, 2, 3])
    workload = Workload.from_steps(mine)
    mine[:] = 7
    assert workload.sizes.tolist() == [1, 2, 3]
    assert workload.steps is not None
    for array in (workload.sizes, workload.decode, workload.mixed, *workload.steps[:2]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_split_is_in_time() -> None:
    """The first part holds the first steps, the second all others, each with its own order."""
    first, second = Workload.from_steps([1, 1, 2, 3], [1, 0, 1, 0], [1, 1, 1, 1]).split(0.5)
    assert (table(first), table(second)) == ({1: (1, 1)}, {2: (1, 0), 3: (0, 1)})
    assert second.steps is not None
    assert second.steps.num_tokens.tolist() == [2, 3]


def test_what_has_no_order_is_not_split() -> None:
    """A histogram cannot be divided in time; the error says what can."""
    workload = Workload.from_histogram({4: 10})
    with pytest.raises(ConfigError, match="without ordered steps cannot split in time; make it with from_steps"):
        workload.split(0.5)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, 1e-9, float("nan")])
def test_a_split_leaves_both_sides_steps(fraction: float) -> None:
    """A part without any step is no workload."""
    with pytest.raises(ConfigError, match="fraction must leave steps on both sides"):
        Workload.from_steps([1, 2, 3]).split(fraction)


def test_merging_adds_weights_and_keeps_an_order_that_all_have() -> None:
    """Traces follow each other; with a histogram among them only the weights are left."""
    trace, histogram = Workload.from_steps([1, 2], [1, 0]), Workload.from_histogram({2: 5, 7: 1})
    both = trace.merge(trace)
    assert both.steps is not None
    assert both.steps.num_tokens.tolist() == [1, 2, 1, 2]
    mixed = trace.merge(histogram, trace)
    assert table(mixed) == {1: (2, 0), 2: (5, 2), 7: (1, 0)}
    assert mixed.steps is None


def test_live_counters_are_a_workload() -> None:
    """Hits and misses count alike, by real rows; calls of unknown rows do not."""
    stats = CUDAGraphStats()
    padded = CUDAGraphStats(knows_rows=False)
    padded.record_hit(1, 1)
    for unknown in (stats, padded):
        with pytest.raises(ConfigError, match="stats must have counted calls by rows"):
            Workload.from_stats(unknown)
    stats.record_hit(3, 4)
    stats.record_hit(3, 4)
    stats.record_eager(Reason.ABOVE_LARGEST_SIZE, 900)
    stats.record_eager(Reason.FIRST_SIGHTING, 3)
    stats.record_eager(Reason.NO_ROWS)
    assert table(Workload.from_stats(stats)) == {3: (3, 0), 900: (1, 0)}


@pytest.mark.parametrize(
    "workload",
    [
        Workload.from_steps([5, 1, 5], [1, 0, 0], [5, 1, 2]),
        Workload.from_steps([5, 1, 5]),
        Workload.from_histogram({3: 0.1 + 0.2, 8: 1e-300}, {3: 0.1}),
    ],
    ids=["steps", "steps without requests", "histogram"],
)
def test_it_saves_and_loads_exactly(workload: Workload, tmp_path: Path) -> None:
    """Every weight and every step comes back as it was."""
    path = tmp_path / "workload.json"
    path.write_text("an older file")
    workload.save(path)
    loaded = Workload.load(path)
    assert table(loaded) == table(workload)
    assert (loaded.steps is None) == (workload.steps is None)
    if workload.steps is not None and loaded.steps is not None:
        for before, after in zip(workload.steps, loaded.steps, strict=True):
            np.testing.assert_array_equal(before, after)
    assert [file.name for file in tmp_path.iterdir()] == ["workload.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    """A file is replaced whole or not at all, and nothing is left beside it."""
    path = tmp_path / "taken"
    path.mkdir()
    with pytest.raises(OSError, match="taken"):
        Workload.from_steps([1]).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([],), "num_tokens must hold at least one"),
        (([[1]],), "num_tokens must hold at least one number, in one dimension"),
        (([1, 0],), r"num_tokens\[1\] must be an integer from 1 to 1048576, got 0"),
        (([2**21],), r"num_tokens\[0\] must be an integer from 1"),
        (([10**30],), "num_tokens must be integers that fit 64 bits"),
        (([1.5],), "num_tokens must be integers"),
        ((["4"],), "num_tokens must be integers"),
        (([1, 2], [1]), "is_decode must have an element for each of 2 steps, got 1"),
        (([1], [2]), "is_decode must be booleans"),
        (([1], None, [2]), r"num_reqs\[0\] must be at most num_tokens=1, got 2"),
    ],
)
def test_impossible_steps_are_refused(arguments: tuple[Any, ...], match: str) -> None:
    """The error names the argument, the element and what it must be."""
    with pytest.raises(ConfigError, match=match):
        Workload.from_steps(*arguments)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (({},), "counts must hold at least one"),
        (({4: 0},), "counts must hold a size with a weight above 0"),
        (({4: -1},), r"counts\[0\] must be a finite number >= 0, got -1"),
        (({4: float("nan")},), "counts.0. must be a finite number >= 0, got nan"),
        (({0: 1},), r"counts\[0\] must be an integer from 1"),
        (({4: 1}, {4: 2}), r"decode\[4\] must be from 0 to counts\[4\]=1, got 2"),
        (({4: 1}, {5: 1}), r"decode\[5\] must be from 0 to counts\[5\]=None"),
    ],
)
def test_impossible_histograms_are_refused(arguments: tuple[Any, ...], match: str) -> None:
    """Negative, unknown and infinite weights are no weights."""
    with pytest.raises(ConfigError, match=match):
        Workload.from_histogram(*arguments)


GOOD = {"format": "graphdispatch.workload", "version": 1, "histogram": {"sizes": [4], "decode": [1.0], "mixed": [0.0]}}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "at the whole: Invalid JSON"),
        ("[" * 100_000, "Invalid JSON: recursion limit"),
        (json.dumps([GOOD]), "at the whole"),
        (json.dumps(GOOD | {"version": 2}), "at version"),
        (json.dumps(GOOD | {"other": 1}), "at other"),
        (json.dumps(GOOD | {"steps": {"num_tokens": [1], "is_decode": [True]}}), "expected either steps or histogram"),
        (json.dumps(GOOD | {"histogram": {"sizes": [4], "decode": [1.0, 2.0], "mixed": [0.0]}}), "equally long"),
        (json.dumps(GOOD | {"histogram": {"sizes": [4, 4], "decode": [1.0] * 2, "mixed": [0.0] * 2}}), "unique"),
        (json.dumps(GOOD | {"histogram": {"sizes": [10**40], "decode": [1.0], "mixed": [0.0]}}), "histogram.sizes.0"),
        (json.dumps(GOOD | {"histogram": {"sizes": [4], "decode": [float("nan")], "mixed": [0.0]}}), "decode.0"),
        (json.dumps(GOOD | {"histogram": {"sizes": ["4"], "decode": [1.0], "mixed": [0.0]}}), "histogram.sizes.0"),
    ],
)
def test_a_file_that_holds_no_workload_is_refused(content: str, match: str, tmp_path: Path) -> None:
    """Nothing of a hostile or damaged file is used; the error names the file and the field."""
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"bad\.json.*{match}"):
        Workload.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that is not there is an error of its own name."""
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read"):
        Workload.load(tmp_path / "absent.json")
