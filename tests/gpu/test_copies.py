"""Inputs and outputs of a hit by kernels of ours that the driver launches: all is as by torch's copies."""

from collections.abc import Iterator

import pytest

from graphdispatch.backends import Backend

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the source distribution")

from benchmarks.gpu.copies import wrong_batches

from ..copy_kernels import Launch, noting
from ..helpers import HAS_CORE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CORE, reason="the core launches them")]


@pytest.fixture
def launches(cuda: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """The launches of the first kernel."""
    monkeypatch.setattr(cuda, "copy_kernel", None)
    monkeypatch.setenv("GRAPHDISPATCH_COPY_KERNEL", "1")
    cuda.make_pool()
    made: list[Launch] = []
    assert cuda.copy_kernel is not None
    kernel, noted = noting(cuda.copy_kernel, made)
    monkeypatch.setattr(cuda, "copy_kernel", kernel)
    yield made
    cuda.synchronize()
    del noted


def test_random_batches_are_served_as_by_torch(cuda: Backend, launches: list[Launch]) -> None:
    """Any dtypes, widths, pad rules, numbers of rows, addresses, gaps and streams; most are what the kernels fit."""
    assert sum(wrong_batches(cuda, seed) for seed in range(12)) == 0
    assert len(launches) > 24
    assert max(launch.inputs for launch in launches) > 1
    assert sum(bool(launch.outputs) for launch in launches) > 12
