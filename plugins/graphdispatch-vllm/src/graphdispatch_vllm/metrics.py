"""Prometheus counters of a served vLLM: steps by mode and by our reason, and padding."""

from functools import cache
from typing import Any

from prometheus_client import Counter
from vllm.platforms import current_platform
from vllm.v1.metrics import loggers

__all__ = ["GraphStatLogger", "stat_loggers"]

_theirs = loggers.load_stat_logger_plugin_factories


def stat_loggers() -> list[Any]:
    """The stat loggers of the installed plug-ins, and ours unless this library declined what is started.

    Takes the place of vLLM's function, which reads the entry points ``vllm.stat_logger_plugins``. One of ours there
    would have vLLM keep statistics even where this library is switched off.
    """
    declines = getattr(current_platform, "declines", False)
    return [*_theirs(), *([] if declines else [GraphStatLogger])]


class GraphStatLogger(loggers.StatLoggerBase):
    """Counts an engine's steps for Prometheus. vLLM reports them if it runs with ``--cudagraph-metrics``.

    ``graphdispatch_vllm_steps_total`` has the labels ``engine``, ``mode`` and ``reason``: why the step ran eagerly, or
    ``graph``. ``graphdispatch_vllm_padding_tokens_total`` counts the padding of steps that graphs served.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._engine = str(engine_index)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Count one step, if there was one."""
        stats = getattr(scheduler_stats, "cudagraph_stats", None)
        if stats is None:
            return
        mode, _, reason = stats.runtime_mode.partition(": ")
        _counter("steps", "Steps by mode, and by the reason of those that ran eagerly.", "mode", "reason").labels(
            self._engine, mode, reason or ("graph" if mode != "NONE" else "")
        ).inc()
        _counter("padding_tokens", "Tokens of padding in steps that graphs served.").labels(self._engine).inc(
            stats.num_paddings if mode != "NONE" else 0
        )

    def log_engine_initialized(self) -> None:
        """There is nothing to log."""


@cache
def _counter(name: str, text: str, *labels: str) -> Any:
    """A counter of this process. Prometheus has one registry, and refuses a second counter of the same name."""
    return Counter(f"graphdispatch_vllm_{name}", text, ("engine", *labels))
