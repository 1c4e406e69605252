"""vLLM's CPU worker and model runner, with graphs captured at the warm-up."""

import time
from typing import Any

import torch
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.envs import enable_envs_cache
from vllm.logger import init_logger
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from .wrapper import StaticGraphWrapper, graph_stats

__all__ = ["GraphCpuModelRunner", "GraphCpuWorker"]

_logger = init_logger("vllm.graphdispatch")
_ROUNDS = 3
"""Warm-up steps of each graph: the capture, the comparison of another batch, and a replay."""


class GraphCpuModelRunner(CPUModelRunner):
    """Runs steps on the CPU by graphs, where the dispatcher finds one."""

    model: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and put the wrapper for FULL graphs around it."""
        super().load_model(*args, **kwargs)
        if self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            self.model = StaticGraphWrapper(self.model, self.vllm_config, CUDAGraphMode.FULL)

    def get_model(self) -> Any:
        """The model itself."""
        return self.model.unwrap() if isinstance(self.model, StaticGraphWrapper) else self.model

    def capture_model(self) -> int:
        """Capture every graph that the dispatcher names, and compare each with eager on another batch.

        From then on nothing is captured. Returns 0: the graphs' memory is ordinary memory.
        """
        if self.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
            return 0
        started = time.perf_counter()
        enable_envs_cache()  # which vLLM does soon after: its code reads the environment, and it sets variables here
        longest = self.model_config.max_model_len
        set_cudagraph_capturing_enabled(True)
        try:
            for mode, descriptors in self.cudagraph_dispatcher.get_capture_descs():
                for descriptor in descriptors:
                    for step in range(_ROUNDS):
                        self._fill_buffers(step)
                        lengths = min(longest, descriptor.num_tokens + 13 * step) if step else None
                        self._dummy_run(
                            descriptor.num_tokens,
                            mode,
                            force_attention=True,  # without it, pieces would be compared on memory that nobody wrote
                            uniform_decode=descriptor.uniform,
                            num_active_loras=descriptor.num_active_loras,
                            skip_eplb=True,
                            remove_lora=False,
                            is_graph_capturing=True,
                            profile_seq_lens=lengths,
                        )
        finally:
            set_cudagraph_capturing_enabled(False)
            self.maybe_remove_all_loras(self.lora_config)
        self._report(time.perf_counter() - started)
        return 0

    def _fill_buffers(self, step: int) -> None:
        """Tokens and positions that differ from step to step, so that a value that a capture froze shows."""
        tokens, positions = self.input_ids.cpu, self.positions
        limit = min(self.model_config.get_vocab_size(), 1 << 15)
        tokens.copy_((torch.arange(tokens.numel()) * 7 + 31 * step) % limit)
        positions.copy_((torch.arange(positions.shape[-1]) + 5 * step) % self.model_config.max_model_len)

    def _report(self, seconds: float) -> None:
        for mode, total in graph_stats().items():
            reasons = {reason.value: count for reason, count in total.eager.items() if not reason.leads_to_graph}
            _logger.info(
                "%d %s graphs after %.1f s, %d captures failed, other eager steps: %s",
                total.graphs,
                mode,
                seconds,
                total.failures,
                reasons or "none",
            )


class GraphCpuWorker(CPUWorker):
    """A CPU worker whose model runner has graphs."""

    def init_device(self) -> None:
        """Make the model runner. Model Runner V2 for the CPU stays vLLM's own, and without graphs."""
        super().init_device()
        if type(self.model_runner) is CPUModelRunner:
            self.model_runner.__class__ = GraphCpuModelRunner
        else:
            _logger.warning(
                "graphdispatch does not serve %s on the CPU; its steps run eagerly", type(self.model_runner)
            )

    def graph_totals(self) -> dict[str, dict[str, Any]]:
        """What this worker's graphs did, by mode, as plain data: ``llm.collective_rpc("graph_totals")`` asks all."""
        return {
            mode: total._asdict() | {"eager": {reason.value: count for reason, count in total.eager.items()}}
            for mode, total in graph_stats().items()
        }

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, then capture."""
        times = super().compile_or_warm_up_model()
        if isinstance(self.model_runner, GraphCpuModelRunner):
            self.model_runner.capture_model()
        return times
