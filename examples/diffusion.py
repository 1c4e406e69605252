"""A denoising loop with guidance: each step, model and update of the sample, is one replay."""

import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

import graphdispatch as gd

STEPS, CLASSES = 30, 4


class Denoiser(nn.Module):
    """A small network with skip connections, which takes the noise level and the class."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.up = nn.Conv2d(width, width, 3, 2, 1), nn.ConvTranspose2d(width, width, 2, 2)
        self.level, self.label = nn.Linear(1, width), nn.Embedding(CLASSES + 1, width)  # the last class is none

    def forward(self, sample: Tensor, sigma: Tensor, label: Tensor) -> Tensor:
        """[N, 3, H, W], [N], [N] -> the noise in the sample."""
        given = (self.level(sigma[:, None]) + self.label(label))[..., None, None]
        hidden = functional.silu(self.enter(sample) + given)
        inner = functional.silu(self.down(hidden) + given)
        return self.leave(hidden + self.up(inner))


def make_step(model: nn.Module, guidance: float = 2.0) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """One step of Euler's method. Noise levels are tensors: a number would be part of what selects the graph."""

    def step(sample: Tensor, sigma: Tensor, following: Tensor, label: Tensor) -> Tensor:
        with_label, without = model(sample, sigma, label), model(sample, sigma, torch.full_like(label, CLASSES))
        noise = without + guidance * (with_label - without)
        return sample + (following - sigma)[:, None, None, None] * noise

    return step


def generate(step: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], noise: Tensor, label: Tensor) -> Tensor:
    """The whole loop."""
    sample, sigmas = noise, torch.linspace(1, 0, STEPS + 1)
    for now, following in pairwise(sigmas.repeat(len(noise), 1).T.contiguous()):
        sample = step(sample, now, following, label)
    return sample


@torch.inference_mode()
def main() -> None:
    """Generate eagerly and by graphs, and compare. Exits with an error if a sample differs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    step = make_step(Denoiser().eval().requires_grad_(False))
    serve = gd.graphed(step, dynamic={"sample": 0, "sigma": 0, "following": 0, "label": 0}, sizes=(1, 2, 4))
    serve.prewarm(torch.randn(4, 3, 16, 16), torch.rand(4), torch.rand(4), torch.arange(4))

    for rows in (1, 3, 4):
        noise, label = torch.randn(rows, 3, 16, 16), torch.randint(0, CLASSES, (rows,))
        generate(serve, noise, label)  # it is warm before the clock runs
        start = time.perf_counter()
        expected = generate(step, noise, label)
        middle = time.perf_counter()
        difference = float((generate(serve, noise, label) - expected).abs().max())
        eager, graphs = 1e3 * (middle - start), 1e3 * (time.perf_counter() - middle)
        print(f"{rows} samples: eager {eager:.0f} ms, graphs {graphs:.0f} ms, largest difference {difference:.1e}")
        if not difference < 1e-3:
            raise SystemExit("the samples differ from eager's")
    print(serve.stats)


if __name__ == "__main__":
    main()
