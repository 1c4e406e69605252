"""NumPy arrays as inputs of a manager: served as tensors are, and answered in arrays."""

from typing import Any

import numpy as np
import pytest
import torch

import graphdispatch as gd

from ..helpers import with_options


def manager(**settings: Any) -> gd.CUDAGraphManager:
    """A manager that captures at once."""
    return gd.CUDAGraphManager(gd.CUDAGraphConfig(capture_sizes=(2, 4, 8), max_batch_size=8, **with_options(settings)))


def double(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Twice the input, and its sums."""
    return {"y": x * 2, "sums": x.sum(1)}


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_arrays_come_back_as_arrays(mode: str) -> None:
    """On every path: eager, capturing, comparing, replaying; padded or not."""
    served = manager(mode=mode, capture_after=1)
    for rows in (4, 4, 3, 3, 4, 3, 9):
        x = np.random.default_rng(rows).standard_normal((rows, 5), dtype=np.float32)
        found = served.execute_or_capture(rows, 1, double, {"x": x})
        assert type(found["y"]) is type(found["sums"]) is np.ndarray
        np.testing.assert_array_equal(found["y"], x * 2)
        np.testing.assert_array_equal(found["sums"], torch.from_numpy(x).sum(1).numpy())
    assert bool(served.stats.hits) is (mode == "FULL")


@pytest.mark.parametrize("is_inference", [False, True])
def test_what_is_written_is_in_the_array_that_torch_cannot_share(is_inference: bool) -> None:
    """By eager as by a graph; memory that is read-only says so, and one that nobody writes is taken."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1).sum(1)

    served, plain = manager(capture_after=1), np.arange(20, dtype=np.float32).reshape(4, 5)
    with torch.inference_mode(is_inference):
        for make in (lambda: plain.astype(">f4"), lambda: plain[:, ::-1].copy()[:, ::-1]):
            for _ in range(4):
                x = make()
                served.execute_or_capture(4, 1, step, {"x": x})
                np.testing.assert_array_equal(x, plain + 1)
        assert served.stats.hits
        fixed = plain.copy()
        fixed.setflags(write=False)
        with pytest.raises(ValueError, match="read-only"):
            served.execute_or_capture(4, 1, step, {"x": fixed})
        np.testing.assert_array_equal(served.execute_or_capture(4, 1, double, {"x": fixed})["y"], plain * 2)


def test_a_graph_captured_from_arrays_is_replayed_with_arrays() -> None:
    """By hand, too; one graph serves arrays and tensors. Who has tensors gets them, as what NumPy lacks."""
    served = manager()
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    served.capture_graph(4, 1, double, inputs={"x": x})
    for _ in range(2):  # compared, then replayed
        x = x + 1
        np.testing.assert_array_equal(served.replay_graph(4, 1, {"x": x})["y"], x * 2)
    found = served.replay_graph(4, 1, {"x": torch.from_numpy(x)})
    assert torch.equal(found["y"], torch.from_numpy(x) * 2)
    mixed = served.execute_or_capture(4, 1, lambda x, y: x + y, {"x": x, "y": torch.from_numpy(x)})
    assert torch.equal(mixed, torch.from_numpy(x) * 2)
    halves = served.execute_or_capture(4, 1, lambda x: (x, x.bfloat16()), {"x": x})
    assert [type(one) for one in halves] == [np.ndarray, torch.Tensor]
    assert served.num_graphs == 1


def test_an_array_is_not_copied() -> None:
    """The function works on its memory: what it writes is in the array, by a graph as by eager."""

    def step(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.sum(1)

    served, x = manager(capture_after=1), np.zeros((4, 5), np.float32)
    for expected in range(1, 5):
        x[0, 0] += 0.5  # another batch each time
        served.execute_or_capture(4, 1, step, {"x": x})
        assert x[1, 1] == expected
    assert served.stats.hits


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(4, 3)[::-1],
        np.arange(12.0).reshape(4, 3).T,
        np.arange(12, dtype=">i4").reshape(4, 3),
        np.broadcast_to(np.arange(3.0), (4, 3)),
        np.zeros((4, 3), [("a", "i1"), ("b", "<f4")])["b"],
        np.zeros((0, 3)),
        np.ones((4, 3), bool),
        np.ones((4, 3), np.complex64),
        np.array(3.5),
    ],
    ids=["reversed", "transposed", "big endian", "read-only", "strided", "empty", "bool", "complex", "scalar"],
)
def test_every_array_is_taken(array: Any) -> None:
    """Those whose memory torch cannot share are copied, without a warning."""
    found = manager(mode="NONE").execute_or_capture(4, 1, torch.clone, {"input": array}, dynamic={})
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([object()]), np.zeros(2, "M8[s]")])
def test_a_dtype_that_torch_lacks_is_named(array: Any) -> None:
    """With the input's name."""
    with pytest.raises(gd.ConfigError, match="input 'x' is an array of dtype"):
        manager().execute_or_capture(1, 1, double, {"x": array})
    with pytest.raises(gd.ConfigError, match="input 'x' must be a tensor"):  # a mask would be lost
        manager().execute_or_capture(1, 1, double, {"x": np.ma.masked_array([[1.0]], [[True]])})
