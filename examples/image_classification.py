"""Image classification in batches of any size: a small residual network, eagerly and by graphs.

    python examples/image_classification.py

A model of timm takes the place of the network as it is: ``timm.create_model("resnet18").eval()``.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import graphdispatch as gd


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[N, width, H, W] -> the same shape."""
        hidden = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(hidden)))


def make_model(width: int = 16, blocks: int = 4, classes: int = 10) -> nn.Module:
    """Pixels [N, 3, 16, 16] -> logits [N, classes]. In eval mode rows are independent, as padding needs."""
    stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
    layers = [Block(width) for _ in range(blocks)]
    model = nn.Sequential(stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    return model.eval().requires_grad_(False)


def classify(model: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """The logits of each batch, and the seconds that it took."""
    start = time.perf_counter()
    answers = [model(batch) for batch in batches]
    return answers, time.perf_counter() - start


@torch.inference_mode()
def main() -> None:
    """Classify eagerly and by graphs, and compare. Exits with an error if an answer differs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = make_model()
    batches = [torch.randn(rows, 3, 16, 16) for rows in torch.randint(1, 9, (60,)).tolist()]

    serve = gd.graphed(model, dynamic={"input": 0}, sizes=(1, 2, 4, 6, 8))
    print(serve.prewarm(torch.randn(8, 3, 16, 16)))
    for one in (model, serve):  # both are warm before the clock runs
        classify(one, batches)
    expected, eager = classify(model, batches)
    answers, graphs = classify(serve, batches)

    difference = max(float((one - other).abs().max()) for one, other in zip(answers, expected, strict=True))
    print(serve.stats)
    print(f"largest difference from eager {difference:.1e}; eager {1e3 * eager:.0f} ms, graphs {1e3 * graphs:.0f} ms")
    if not difference < 1e-3:
        raise SystemExit("the logits differ from eager's")


if __name__ == "__main__":
    main()
