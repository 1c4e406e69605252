"""transformers' continuous batching on our graphs: the same tokens, and nothing left behind."""

from typing import Any

import pytest
import torch

from graphdispatch.errors import ConfigError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about its own arguments

from transformers.generation.continuous_batching import initialization, model_runner  # noqa: E402

from graphdispatch.integrations.transformers import graphed_continuous_batching  # noqa: E402

from ..integrations.families import make_model  # noqa: E402

PROMPTS = [torch.randint(2, 99, (3 + i,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(4)]


def tokens(model: Any, *, on_graphs: bool) -> list[list[int]]:
    """What continuous batching generates for the prompts."""
    padding = {"q_padding_interval_size": 16, "kv_padding_interval_size": 64} if on_graphs else {}
    found = model.generate_batch(
        inputs=PROMPTS,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=32,
            page_size=32,
            max_batch_tokens=32,
            use_cuda_graph=on_graphs,
            use_async_batching=False,
            **padding,
        ),
        progress_bar=False,
        warmup=False,
    )
    return [found[key].generated_tokens for key in sorted(found)]


def test_batches_give_the_same_tokens() -> None:
    """Graphs replay most steps, another model runs as before, and the hooks are gone afterwards."""
    model, other = make_model("llama"), make_model("qwen3")
    plain = (
        model_runner.ModelRunner.compute_batch,
        initialization.get_accelerator_graph_name,
        model_runner.get_memory_pools,
    )
    expected, others = tokens(model, on_graphs=False), tokens(other, on_graphs=False)
    with graphed_continuous_batching(model) as served:
        assert tokens(model, on_graphs=True) == expected
        before = served.stats
        assert tokens(other, on_graphs=True) == others
        assert served.stats == before
    assert before.hits > before.captures > 0
    assert before.capture_failures == 0, served.explain()
    assert "steps by graphs" in served.explain()
    assert plain == (
        model_runner.ModelRunner.compute_batch,
        initialization.get_accelerator_graph_name,
        model_runner.get_memory_pools,
    )
    assert tokens(model, on_graphs=False) == expected


def test_a_model_without_batches_is_an_error() -> None:
    """It must have ``generate_batch``."""
    with pytest.raises(ConfigError, match=r"model must have transformers' generate_batch"):
        graphed_continuous_batching(torch.nn.Linear(2, 2))
