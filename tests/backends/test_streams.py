"""Streams of the CPU."""

import contextlib

import pytest

from graphdispatch.backends import Backend, get_backend


def break_down() -> None:
    """A piece of work that fails."""
    raise ArithmeticError("the model broke")


@pytest.fixture
def backend() -> Backend:
    """The CPU's."""
    return get_backend("cpu")


def test_current_stream_nests_and_is_restored(backend: Backend) -> None:
    """``use`` puts the previous stream back, also when its block raises."""
    worker, other = backend.make_stream(), backend.make_stream()
    default = backend.current_stream()
    with backend.use_stream(worker):
        with contextlib.suppress(ArithmeticError), backend.use_stream(other):
            assert backend.current_stream() is other
            break_down()
        assert backend.current_stream() is worker
    assert backend.current_stream() is default
