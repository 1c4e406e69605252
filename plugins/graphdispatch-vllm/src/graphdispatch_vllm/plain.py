"""vLLM's CPU worker where graphs do not serve."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

__all__ = ["PlainCpuWorker"]


class PlainCpuWorker(CPUWorker):
    """vLLM's own CPU worker, which also says what graphs did."""

    def graph_totals(self) -> dict[str, dict[str, Any]]:
        """Nothing, for there are none."""
        return {}
