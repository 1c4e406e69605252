"""vLLM's CPU worker and model runner, with graphs captured at the warm-up."""

import dataclasses
import inspect
import time
from collections import Counter
from typing import Any

import torch
from tqdm import tqdm
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.envs import enable_envs_cache
from vllm.forward_context import BatchDescriptor
from vllm.logger import init_logger
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.parameter import BasevLLMParameter
from vllm.v1.sample.ops.logprobs import batched_count_greater_than
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from .core import Reason, mode_of
from .dispatcher import CudagraphDispatcher
from .engine import on_all_ranks
from .plain import PlainCpuWorker
from .wrapper import GraphTotals, StaticGraphWrapper, graph_stats

__all__ = ["GraphCpuModelRunner", "GraphCpuWorker"]

_logger = init_logger("vllm.graphdispatch")
_ROUNDS = 3
"""Warm-up steps of each graph: the capture, the comparison of another batch, and a replay."""
_MOST_ROUNDS = 6
"""Where a capture is refused at first: a first collective has torch set a variable of the environment."""


class GraphCpuModelRunner(CPUModelRunner):
    """Runs steps on the CPU by graphs, where the dispatcher finds one."""

    model: Any
    execute_model_state: Any
    attn_groups: list[list[Any]]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and put the wrapper for FULL graphs around it.

        Pieces are given parameters as arguments, and graphs take no tensors of other classes than torch's own.
        """
        super().load_model(*args, **kwargs)
        if self.compilation_config.cudagraph_mode.has_piecewise_cudagraphs():
            _make_parameters_plain(self.model)
        if self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            _leave_masks_uncompiled()
            self.model = StaticGraphWrapper(self.model, self.vllm_config, CUDAGraphMode.FULL)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Reload the weights as vLLM does, and capture every graph anew.

        vLLM packs the new weights into other memory than that which the graphs read. Requests go on where they were:
        what the captures run writes to the null block alone. The old graphs are released before, so that none serves
        where the reload fails halfway.
        """
        StaticGraphWrapper.clear_all_graphs()
        super().reload_weights(*args, **kwargs)
        if self.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
            return
        if self.compilation_config.cudagraph_mode.has_piecewise_cudagraphs():
            _make_parameters_plain(self.get_model())
        _logger.info("graphdispatch captures its graphs anew, since the weights were reloaded")
        self.capture_model()

    def get_model(self) -> Any:
        """The model itself."""
        return self.model.unwrap() if isinstance(self.model, StaticGraphWrapper) else self.model

    def capture_model(self) -> int:
        """Capture every graph that the dispatcher names, and compare each with eager on another batch.

        A graph that some rank could not capture is left out on all ranks. From then on nothing is captured. Returns 0:
        the graphs' memory is ordinary memory.
        """
        if self.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
            return 0
        started = time.perf_counter()
        _run_compiler()
        _read_annotations(self.get_model())
        enable_envs_cache()  # which vLLM does soon after: its code reads the environment, and it sets variables here
        set_cudagraph_capturing_enabled(True)
        try:
            for mode, descriptors in self.cudagraph_dispatcher.get_capture_descs():
                self._capture(mode, descriptors)
        finally:
            set_cudagraph_capturing_enabled(False)
            self.maybe_remove_all_loras(self.lora_config)
        self._report(time.perf_counter() - started)
        return 0

    def _capture(self, mode: CUDAGraphMode, descriptors: list[BatchDescriptor]) -> None:
        """Capture the graphs of one mode, with a bar as vLLM's; the dispatcher forgets those that cannot be kept."""
        keys = self.cudagraph_dispatcher.cudagraph_keys[mode]
        is_quiet = not (self.load_config.use_tqdm_on_load and is_global_first_rank())
        for descriptor in tqdm(descriptors, desc=f"graphdispatch: {mode.name} graphs", disable=is_quiet):
            if any(self._serves(mode, descriptor, step) for step in range(_MOST_ROUNDS)):
                continue
            if isinstance(self.model, StaticGraphWrapper) and self.model.is_refused:
                keys.clear()
                _logger.warning(
                    "graphdispatch keeps no %s graph: one gave other values than vLLM's own eager", mode.name
                )
                return
            keys.discard(descriptor)
            _logger.warning(
                "graphdispatch keeps no %s graph for %s: some rank could not capture it", mode.name, descriptor
            )

    def _serves(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, step: int) -> bool:
        """Run one step of the warm-up: whether graphs served it, on all ranks, so that all keep the same graphs."""
        self._fill_buffers(step)
        self._dummy_run(
            descriptor.num_tokens,
            mode,
            force_attention=True,  # without it, pieces would be compared on memory that nobody wrote
            uniform_decode=descriptor.uniform,
            num_active_loras=descriptor.num_active_loras,
            skip_eplb=True,
            remove_lora=False,
            is_graph_capturing=True,
            profile_seq_lens=self._lengths(descriptor, step),  # a tensor, too: vLLM assigns it as its own
        )
        if step + 1 < _ROUNDS:
            return False
        return on_all_ranks(StaticGraphWrapper.why_any_eager(mode_of(mode)) is None)

    def _lengths(self, descriptor: BatchDescriptor, step: int) -> int | torch.Tensor | None:
        """The lengths of the sequences of one step of the warm-up, which differ from step to step.

        In the last one that of the first request is beyond all windows, so that the attention groups of a model with
        several share out other work, and those of the others are short, so that threads share the first one's.
        """
        longest: int = self.model_config.max_model_len
        tokens: int = descriptor.num_tokens
        reqs: int | None = descriptor.num_reqs
        if not step:
            return None
        if reqs is None or step + 1 < _ROUNDS:
            return min(longest, tokens + 13 * step)
        builders = (group.get_metadata_builder() for groups in self.attn_groups for group in groups)
        window = max((getattr(each, "window_size", 0) for each in builders), default=0)
        lengths = torch.full((reqs,), tokens - tokens // reqs * (reqs - 1), dtype=torch.int32)
        lengths[0] += 2 * max(window, 0) + 13 * step
        return lengths.clamp(max=longest)

    def _fill_buffers(self, step: int) -> None:
        """Tokens and positions that differ from step to step, so that a value that a capture froze shows."""
        tokens, positions = self.input_ids.cpu, self.positions
        limit = min(self.model_config.get_vocab_size(), 1 << 15)
        tokens.copy_((torch.arange(tokens.numel()) * 7 + 31 * step) % limit)
        positions.copy_((torch.arange(positions.shape[-1]) + 5 * step) % self.model_config.max_model_len)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample as vLLM does. With ``--cudagraph-metrics`` an eager step's mode is NONE, with the reason behind it."""
        state = self.execute_model_state
        if state is not None and state.cudagraph_stats is not None and (why := self.why_eager()) is not None:
            stats = dataclasses.replace(state.cudagraph_stats, runtime_mode=f"NONE: {why.value}")
            self.execute_model_state = state._replace(cudagraph_stats=stats)
        return super().sample_tokens(*args, **kwargs)

    def why_eager(self) -> Reason | None:
        """Why the latest step, or a piece of it, ran eagerly; None if graphs served it."""
        decision = self.cudagraph_dispatcher.decision
        return StaticGraphWrapper.why_any_eager(decision.mode) if decision.mode.has_graphs() else decision.reason

    def _report(self, seconds: float) -> None:
        """One line of the log: which steps graphs serve."""
        kept = self.cudagraph_dispatcher.get_capture_descs()
        served = [f"{mode.name} at {len(keys)} sizes up to {keys[0].num_tokens} tokens" for mode, keys in kept]
        _logger.info(
            "graphdispatch serves steps by graphs, captured and compared with eager in %.1f s: %s",
            seconds,
            ", ".join(served) or "none, so that every step runs eagerly",
        )


def _make_parameters_plain(model: torch.nn.Module) -> None:
    """Put parameters of torch's class in the place of those of vLLM's classes, with the same memory.

    vLLM's classes know how a checkpoint is loaded into them, and compute as torch's does. Modules go on sharing what
    they shared.
    """
    plain = dict[torch.nn.Parameter, torch.nn.Parameter]()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, BasevLLMParameter):
                if parameter not in plain:
                    plain[parameter] = torch.nn.Parameter(parameter.data, requires_grad=False)
                setattr(module, name, plain[parameter])


def _leave_masks_uncompiled() -> None:
    """Run vLLM's masks for a rank's part of the vocabulary as they are written, and not by code of torch's compiler.

    Such code may read all that the model reaches: with several ranks also the sockets between them, which no guard can
    compare. A FULL graph runs the same few operators on integers.
    """
    compiled = vocab_parallel_embedding.get_masked_input_and_mask
    vocab_parallel_embedding.get_masked_input_and_mask = inspect.unwrap(compiled)


def _run_compiler() -> None:
    """Compile one of vLLM's functions before any graph is captured.

    When torch's compiler first runs in a process it sets an environment variable and a flag of ``nn.Module``, which the
    guards of graphs compare. vLLM compiles functions of its sampler when a request first wants them (``logprobs``).
    """
    try:
        batched_count_greater_than(torch.zeros(2, 3), torch.zeros(2, 1))
    except RuntimeError as error:  # vLLM itself can then compile nothing, so no request changes anything
        _logger.warning("graphdispatch: torch's compiler, which vLLM's sampler needs for logprobs, fails: %s", error)


def _read_annotations(model: torch.nn.Module) -> None:
    """Read the annotations of the classes of a model's modules before any graph is captured.

    Python gives a class without annotations a table of them when one is first read, as a check against a protocol
    does. vLLM checks its model in the first real step, and the guards of graphs compare what a class has.
    """
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        getattr(kind, "__annotations__", None)


class GraphCpuWorker(PlainCpuWorker):
    """A CPU worker whose model runner has graphs."""

    def init_device(self) -> None:
        """Make the model runner, and have it decide by this library."""
        super().init_device()
        self.model_runner.__class__ = GraphCpuModelRunner
        self.model_runner.cudagraph_dispatcher = CudagraphDispatcher(self.vllm_config)

    def graph_totals(self) -> dict[str, dict[str, Any]]:
        """What this worker's graphs did, by mode, as plain data; of all: ``llm.collective_rpc("graph_totals")``.

        NONE has the steps that the dispatcher sent to no graph.
        """
        none = GraphTotals(0, 0, 0, 0, Counter(self.model_runner.cudagraph_dispatcher.eager))
        return {
            mode: total._asdict() | {"eager": {reason.value: count for reason, count in total.eager.items()}}
            for mode, total in {"NONE": none, **graph_stats()}.items()
        }

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, then capture."""
        times = super().compile_or_warm_up_model()
        self.model_runner.capture_model()
        return times
