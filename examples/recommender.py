"""A ranker with embedding bags: requests with 1 to 64 candidates each, served by a planned set of sizes."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import graphdispatch as gd
from graphdispatch.plan import Workload, plan_sizes

ITEMS, HISTORY, WIDTH = 5000, 20, 32
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class Ranker(nn.Module):
    """Scores candidates by the user's history, the item and dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(ITEMS, WIDTH, mode="sum")
        self.item = nn.Embedding(ITEMS, WIDTH)
        self.score = nn.Sequential(
            nn.Linear(2 * WIDTH + 8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, history: Tensor, weights: Tensor, item: Tensor, features: Tensor) -> Tensor:
        """Ids and weights [N, HISTORY], items [N], features [N, 8] -> scores [N]. A weight of zero is no id."""
        seen = self.history(history, per_sample_weights=weights)
        return self.score(torch.cat([seen, self.item(item), features], -1))[:, 0]


def make_request(candidates: int) -> Batch:
    """One user's history, beside each of the candidates."""
    length = int(torch.randint(0, HISTORY + 1, ()))
    history = torch.randint(0, ITEMS, (1, HISTORY)).expand(candidates, -1).contiguous()
    weights = (torch.arange(HISTORY) < length).float().expand(candidates, -1).contiguous()
    return history, weights, torch.randint(0, ITEMS, (candidates,)), torch.randn(candidates, 8)


def rank(model: Callable[..., Tensor], requests: Sequence[Batch]) -> tuple[list[Tensor], float]:
    """The scores of each request, and the seconds that it took."""
    start = time.perf_counter()
    scores = [model(*request) for request in requests]
    return scores, time.perf_counter() - start


@torch.inference_mode()
def main() -> None:
    """Plan, rank eagerly and by graphs, and compare. Exits with an error if a score differs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Ranker().eval().requires_grad_(False)
    counts = (64 * torch.rand(400) ** 2).int().clamp(1, 64).tolist()  # many small requests, a few large ones
    plan = plan_sizes(Workload.from_steps(counts[:200]), max_graphs=8)
    print(
        plan, f"padding on new traffic {100 * plan.evaluate(Workload.from_steps(counts[200:])).padding:.0f} %", sep="\n"
    )

    serve = gd.graphed(model, dynamic={"history": 0, "weights": 0, "item": 0, "features": 0}, sizes=plan)
    serve.prewarm(*make_request(64))
    requests = [make_request(count) for count in counts[200:]]
    for one in (model, serve):  # both are warm before the clock runs
        rank(one, requests)
    expected, eager = rank(model, requests)
    scores, graphs = rank(serve, requests)

    difference = max(float((one - other).abs().max()) for one, other in zip(scores, expected, strict=True))
    print(serve.stats)
    print(f"largest difference from eager {difference:.1e}; eager {1e3 * eager:.0f} ms, graphs {1e3 * graphs:.0f} ms")
    if not difference < 1e-4:
        raise SystemExit("the scores differ from eager's")


if __name__ == "__main__":
    main()
