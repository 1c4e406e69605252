"""``generate()`` of a Hugging Face model, its decode steps by graphs: the same tokens, eagerly and served.

    python examples/huggingface_generation.py [MODEL]

Without a model's name it makes a small Llama with random weights, so that it needs no download.
"""

import sys
import time
from collections.abc import Sequence

import torch
import transformers
from torch import Tensor

from graphdispatch.integrations.transformers import GraphedGeneration

LENGTHS = (64, 128)  # static caches of these lengths; a request takes the shortest that holds its tokens


def make_model(name: str | None) -> transformers.PreTrainedModel:
    """The named model, or a small one."""
    if name is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(name).eval()
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=1000
    )
    return transformers.LlamaForCausalLM(config).eval()


def requests(vocabulary: int) -> list[dict[str, Tensor]]:
    """Batches of one to four prompts of one length, as a server might collect them."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 9), (3, 20), (4, 5), (1, 60), (2, 12), (3, 33)]
    ids = [torch.randint(5, vocabulary, shape, generator=draw) for shape in shapes]
    return [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]


def generate_all(
    model: transformers.PreTrainedModel, batches: Sequence[dict[str, Tensor]]
) -> tuple[list[Tensor], float]:
    """The tokens of each batch, and the seconds that it took."""
    start = time.perf_counter()
    tokens = [
        model.generate(**batch, max_new_tokens=24, do_sample=False, cache_implementation="static", pad_token_id=0)
        for batch in batches
    ]
    return tokens, time.perf_counter() - start


def main() -> None:
    """Generate eagerly and by graphs, and compare. Exits with an error if a token differs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = make_model(sys.argv[1] if len(sys.argv) > 1 else None)
    batches = requests(model.config.vocab_size)
    model.generation_config.disable_compile = True
    expected, eager = generate_all(model, batches)
    with GraphedGeneration(model, cache_lengths=LENGTHS, max_batch_size=4) as served:
        generate_all(model, batches)  # captures a graph for each number of rows and length
        tokens, graphs = generate_all(model, batches)
        print(served.explain())
        hit_rate = served.stats.hit_rate
    if not all(map(torch.equal, tokens, expected)):
        raise SystemExit("the tokens differ from eager's")
    print(f"{len(batches)} requests, the same tokens; {100 * hit_rate:.0f} % of the decode steps by graphs")
    print(f"eager {eager:.2f} s, graphs {graphs:.2f} s")


if __name__ == "__main__":
    main()
