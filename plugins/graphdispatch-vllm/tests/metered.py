"""Serves requests by an asynchronous engine, as ``vllm serve`` does, and prints our counters of Prometheus as JSON."""

import asyncio
import json
import sys

from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM


async def serve(place: str) -> None:
    """Twelve requests for two replicas of the model; vLLM's own tables go to its log."""
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=place,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=8,
            data_parallel_size=2,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=16 << 20,
            cudagraph_metrics=True,
            compilation_config={
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8, 256],
            },
        )
    )

    async def ask(number: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=5 + number, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": list(range(2, 9 + number))}
        async for _ in engine.generate(prompt, params, request_id=str(number)):
            pass

    await asyncio.gather(*map(ask, range(12)))
    await engine.do_log_stats()
    engine.shutdown()
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    ours = [
        sample for sample in samples if sample.name.startswith("graphdispatch_vllm_") and sample.name.endswith("_total")
    ]
    print(json.dumps([[sample.name, sample.labels, sample.value] for sample in ours]))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
