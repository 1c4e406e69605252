"""A tensor-parallel decoder with its all-reduces inside the captured graph. All ranks take the same decisions.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py --device cpu

Every rank holds a slice of each layer. Before a step, the ranks agree on the mode and the padded size. All of them then
capture or replay the step, and compare it with an eager copy of the model. The collectives are gloo's on the CPU and
NCCL's on CUDA.
"""

import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import graphdispatch as gd

SIZES = (1, 2, 4, 8)
LAYERS, HIDDEN, HEADS, HEAD_DIM, VOCAB, WINDOW = 2, 64, 4, 16, 128, 32


class Layer(nn.Module):
    """One rank's share of a decoder layer: its heads and its part of the feed-forward."""

    def __init__(self, rank: int, world: int, device: torch.device, draw: torch.Generator) -> None:
        super().__init__()
        self.heads = HEADS // world
        full = {
            "qkv": (3 * HEADS * HEAD_DIM, HIDDEN),
            "out": (HIDDEN, HIDDEN),
            "up": (256, HIDDEN),
            "down": (HIDDEN, 256),
        }
        weights = {name: torch.randn(shape, generator=draw) * shape[1] ** -0.5 for name, shape in full.items()}
        # Column-parallel layers are cut along their outputs, row-parallel layers along their inputs.
        qkv = weights["qkv"].view(3, HEADS, HEAD_DIM, HIDDEN).chunk(world, 1)[rank].reshape(-1, HIDDEN)
        self.qkv = nn.Parameter(qkv.contiguous().to(device))
        self.up = nn.Parameter(weights["up"].chunk(world, 0)[rank].contiguous().to(device))
        self.out = nn.Parameter(weights["out"].chunk(world, 1)[rank].contiguous().to(device))
        self.down = nn.Parameter(weights["down"].chunk(world, 1)[rank].contiguous().to(device))

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, bias: Tensor
    ) -> Tensor:
        """[N, hidden] -> [N, hidden]. Writes the rows' keys and values into the cache in place."""
        parts = functional.linear(functional.rms_norm(x, (HIDDEN,)), self.qkv).view(-1, 3, self.heads, HEAD_DIM)
        query, keys[slots, positions], values[slots, positions] = parts.unbind(1)
        scores = torch.einsum("nhd,nwhd->nhw", query, keys[slots]) * HEAD_DIM**-0.5 + bias[positions].unsqueeze(1)
        mixed = torch.einsum("nhw,nwhd->nhd", scores.softmax(-1), values[slots]).flatten(1)
        x = x + reduced(functional.linear(mixed, self.out))
        hidden = functional.silu(functional.linear(functional.rms_norm(x, (HIDDEN,)), self.up))
        return x + reduced(functional.linear(hidden, self.down))


class Decoder(nn.Module):
    """One rank's share of a decoder. Every rank holds the whole embedding, which is also the output layer."""

    keys: Tensor
    values: Tensor
    bias: Tensor

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(Layer(rank, world, device, draw) for _ in range(LAYERS))
        self.embedding = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=draw).to(device))
        shape = (LAYERS, SIZES[-1] + 1, WINDOW, HEADS // world, HEAD_DIM)
        self.register_buffer("keys", torch.zeros(shape, device=device))
        self.register_buffer("values", torch.zeros(shape, device=device))
        self.register_buffer("bias", torch.full((WINDOW, WINDOW), float("-inf"), device=device).triu(1))
        self.requires_grad_(False).eval()

    def forward(self, ids: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Three int64 ``[N]`` -> logits ``[N, vocab]``, one row for each token."""
        x = self.embedding[ids]
        for i, layer in enumerate(self.layers):
            x = layer(x, self.keys[i], self.values[i], slots, positions, self.bias)
        return functional.linear(x, self.embedding)


def reduced(partial: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    dist.all_reduce(partial)
    return partial


def padded(rows: Tensor, size: int) -> Tensor:
    """Rows of (token, slot, position), padded with rows that write to the scratch slot."""
    scratch = rows.new_tensor([[0, SIZES[-1], 0]])
    return torch.cat([rows, scratch.expand(size - len(rows), -1)])


def decode(rank: int, world: int, device: torch.device, steps: int) -> tuple[float, str]:
    """Decode ``steps`` batches. Returns the largest difference from eager and a line about what happened."""
    graphed, eager = Decoder(rank, world, device), Decoder(rank, world, device)
    consensus = gd.RankConsensus(sizes=SIZES)
    wrapper = gd.CUDAGraphWrapper(graphed, agree=consensus.least)
    draw = random.Random(0)  # the same on every rank, as a tensor-parallel batch is
    position = [0] * SIZES[-1]
    largest = 0.0
    for _ in range(steps):
        slots = range(draw.randint(1, SIZES[-1]))
        rows = torch.tensor([[draw.randrange(VOCAB), slot, position[slot]] for slot in slots], device=device)
        graphs = [(wrapper.runtime_mode, one.num_tokens) for one in wrapper.get_cached_descriptors()]
        agreed = consensus.agree(len(rows), graphs)
        batch = padded(rows, agreed.size)
        logits = wrapper(*batch.unbind(1), batch_descriptor=agreed.descriptor, cudagraph_runtime_mode=agreed.mode)[
            : len(rows)
        ]
        largest = max(largest, float((logits - eager(*rows.unbind(1))).abs().max()))
        for slot in slots:
            position[slot] = (position[slot] + 1) % WINDOW
    stats = wrapper.get_stats()
    line = (
        f"rank {rank} of {world} on {device}: {steps} steps, {stats.captures} captures, {stats.replays} replays, "
        f"largest difference from eager {largest:.1e}"
    )
    return largest, line


def main() -> None:
    """Run one rank. The process exits with an error if a result differs from eager's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=48)
    options = parser.parse_args()
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        with torch.no_grad():
            largest, line = decode(dist.get_rank(), dist.get_world_size(), device, options.steps)
        print(line + "\n", end="", flush=True)  # in one write, since the ranks share the terminal
        if not largest < 1e-3:
            raise SystemExit(f"the results differ from eager's by {largest}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
