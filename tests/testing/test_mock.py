"""``MockCUDAGraph``: the scripted graph keeps to the protocol of a real one, and fails on request."""

import pytest

from graphdispatch.errors import CaptureError, ReplayError
from graphdispatch.testing import MockCUDAGraph

from ..helpers import scripted


def test_replays_run_the_script_and_are_counted() -> None:
    """Each replay calls ``on_replay`` once, but the one that is to fail; as on a device, a capture does not execute."""
    runs: list[str] = []
    graph = scripted(on_replay=lambda: runs.append("run"), fail_replay_at=2)
    assert (graph.is_captured, runs) == (True, [])
    graph.replay()
    with pytest.raises(ReplayError, match="replay 2"):
        graph.replay()
    graph.replay()
    assert (graph.captures, graph.replays, runs) == (1, 3, ["run", "run"])
    assert repr(graph) == "<MockCUDAGraph captured, 3 replays>"


def test_a_capture_fails_as_scripted() -> None:
    """The scripted error is the cause; the graph is empty again, and the failure is not counted as a capture."""
    cause = MemoryError("full")
    graph = MockCUDAGraph(fail_capture=cause)
    graph.capture_begin()
    with pytest.raises(CaptureError, match="scripted failure: full") as caught:
        graph.capture_end()
    assert caught.value.__cause__ is cause
    assert (graph.captures, graph.is_captured) == (0, False)
    with pytest.raises(CaptureError, match="without capture_begin"):
        graph.capture_end()


def test_only_what_was_captured_is_replayed() -> None:
    """Neither an empty graph nor a released one; releasing twice is fine."""
    released = scripted()
    released.reset()
    released.reset()
    for graph in (MockCUDAGraph(), released):
        with pytest.raises(ReplayError, match="without a capture"):
            graph.replay()


@pytest.mark.parametrize("state", ["capturing", "captured", "released"])
def test_a_graph_is_captured_once(state: str) -> None:
    """A second capture needs a new graph, and the message tells the state of this one."""
    graph = MockCUDAGraph()
    graph.capture_begin()
    if state != "capturing":
        graph.capture_end()
    if state == "released":
        graph.reset()
    with pytest.raises(CaptureError, match=f"is {state} already"):
        graph.capture_begin()
