"""One rank of the consensus tests: ``python rank_worker.py RANK WORLD FOLDER SCENARIO...``.

Writes what it decided to ``FOLDER/RANK.json``. Ranks that must meet at a point do so through the store.
"""

import json
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from graphdispatch import CUDAGraphMode, CUDAGraphOptions
from graphdispatch.backends import get_backend
from graphdispatch.engines import Agreement, BatchDescriptor, CUDAGraphWrapper, RankConsensus
from graphdispatch.errors import ConfigError, ConsensusError

SIZES = (1, 2, 4, 8)
STEPS = 40
SHORT_S = 3.0
"""The votes' timeout where a rank is meant to be missed."""
LONG_S = 60.0
"""A timeout that is reached only where something hangs."""


def graphs_of(wrapper: CUDAGraphWrapper) -> set[tuple[CUDAGraphMode, int]]:
    """The graphs that a rank has, as it votes for them."""
    return {(wrapper.runtime_mode, descriptor.num_tokens) for descriptor in wrapper.get_cached_descriptors()}


class Rank:
    """A wrapped model whose every step the ranks agree on."""

    def __init__(self, rank: int, failing: bool) -> None:
        self.rank = rank
        self.failing = failing
        self.consensus = RankConsensus(sizes=SIZES, timeout_s=LONG_S)
        self.wrapper = CUDAGraphWrapper(self.call)

    def call(self, x: torch.Tensor) -> torch.Tensor:
        """The model without collectives; on the failing rank size 4 does what no graph can hold."""
        if self.failing and x.shape[0] == 4 and get_backend("cpu").is_capturing():
            x.sum().item()
        return x * 2 + self.rank

    def step(self, rows: int, mode: CUDAGraphMode) -> tuple[Agreement, bool]:
        """One step: agree, run; and whether the answer is eager's."""
        agreed = self.consensus.agree(rows, graphs_of(self.wrapper), mode)
        size = agreed.size if agreed.descriptor is not None else rows
        x = torch.arange(float(size * 3)).view(size, 3)
        result = self.wrapper(x, batch_descriptor=agreed.descriptor, cudagraph_runtime_mode=agreed.mode)
        return agreed, torch.equal(result, x * 2 + self.rank)


def disagree(rank: int, world: int) -> Any:
    """Random local batches and modes, and one rank that cannot capture size 4."""
    draw = random.Random(rank)
    ours = Rank(rank, failing=rank == world - 1)
    steps = []
    for _ in range(STEPS):
        mode = CUDAGraphMode.FULL if draw.random() < 0.95 else CUDAGraphMode.NONE
        rows = draw.choice((4, 5, 8, 9)) if draw.random() < 0.1 else draw.choice((0, 1, 2, 3))
        agreed, is_right = ours.step(rows, mode)
        steps.append([[agreed.mode.name, *agreed[1:]], is_right])
    return steps


def functional_collectives(rank: int, world: int) -> Any:
    """Functional collectives inside the graph, waited for by what uses them or explicitly: answers and hits."""
    ops, group = torch.ops._c10d_functional, dist.group.WORLD
    fns: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "reduced": lambda x: functional.all_reduce(x * 2, "sum", group) + 1,
        "waited": lambda x: functional.wait_tensor(functional.all_reduce(x * 2, "sum", group)).view(-1),
        "several": lambda x: torch.add(*functional.all_reduce_coalesced([x, x * 3], "sum", group)),
        "gathered": lambda x: ops.wait_tensor(ops.all_gather_into_tensor(x + 1, world, group.group_name)) * 2,
        "in_place": lambda x: ops.wait_tensor(ops.all_reduce_(y := x * 2, "sum", group.group_name)) + y,
    }
    found = {}
    for name, fn in fns.items():
        wrapper = CUDAGraphWrapper(fn)
        answers = []
        for step in range(5):
            x = torch.arange(8.0).view(4, 2) + 10 * step + rank
            answer = wrapper(x, batch_descriptor=BatchDescriptor(4), cudagraph_runtime_mode=CUDAGraphMode.FULL)
            answers.append(torch.equal(answer, fn(x)))
        found[name] = [answers, wrapper.get_stats().hits >= 2]
    return found


class Tally(torch.nn.Module):
    """A module with collectives before and behind what one rank does alone."""

    def __init__(self, is_odd: bool) -> None:
        super().__init__()
        self.is_odd = is_odd
        self.calls = 0
        self.weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """The sum over ranks of twice the weighted input."""
        y = x * self.weight
        dist.all_reduce(y)
        if self.is_odd:
            y = y + self.alone(y, what)
        z = y + y
        dist.all_reduce(z)
        return z

    def alone(self, y: torch.Tensor, what: str) -> float:
        """Nothing, in a way that no graph can hold, or that a graph would freeze."""
        if what == "counts":
            self.calls += 1
        elif what == "reads":
            y.sum().item()
        elif what == "shows":
            y.numpy()
        elif what == "lies":
            return 1.0 if get_backend("cpu").is_capturing() else 0.0
        elif what == "draws":
            return 0.0 * random.random()
        return 0.0


def refusals(rank: int, world: int) -> Any:
    """The last rank does what no graph can hold: reasons, graphs and answers of each kind of it, in both modes."""
    consensus, found = RankConsensus(sizes=SIZES, timeout_s=LONG_S), {}
    for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
        for what in ("nothing", "counts", "reads", "shows", "lies", "draws"):
            wrapper = CUDAGraphWrapper(Tally(rank == world - 1), mode, agree=consensus.least)
            answers = []
            for step in range(4):
                x = torch.full((3, 2), step + 1.0)
                got = wrapper(x, what, batch_descriptor=BatchDescriptor(3), cudagraph_runtime_mode=mode)
                answers.append(bool((got == 2 * world**2 * (step + 1)).all()))
            found[f"{mode.name} {what}"] = [answers, dict(wrapper.get_stats().reasons), wrapper.get_stats().hits]
    return found


def losses(rank: int, world: int) -> Any:
    """The last rank alone loses a graph, has to compare one, or has no room for one: what each call did."""
    consensus, is_odd = RankConsensus(sizes=SIZES, timeout_s=LONG_S), rank == world - 1
    found = {}

    def serve(wrapper: CUDAGraphWrapper, steps: int) -> list[Any]:
        done = []
        for step in range(steps):
            x = torch.full((3, 2), step + 1.0)
            got = wrapper(x, "nothing", batch_descriptor=BatchDescriptor(3), cudagraph_runtime_mode=CUDAGraphMode.FULL)
            decision = wrapper._server.decision
            done.append(decision.reason.value if bool((got == 2 * world**2 * (step + 1)).all()) else "wrong")
        return done

    def wrap(model: Tally, **options: Any) -> CUDAGraphWrapper:
        return CUDAGraphWrapper(model, options=CUDAGraphOptions(**options), agree=consensus.least)

    model = Tally(is_odd)
    wrapper = wrap(model)
    found["first"] = serve(wrapper, 3)
    if is_odd:
        wrapper.clear_cache()
    found["cleared"] = serve(wrapper, 3)
    if is_odd:
        model.weight.data = model.weight.data.clone()
    found["moved"] = serve(wrapper, 3)
    wrapper.freeze()
    found["frozen"] = serve(wrapper, 2)
    if is_odd:
        model.weight.data = model.weight.data.clone()
    found["moved while frozen"] = serve(wrapper, 2)
    wrapper.unfreeze()
    found["unfrozen"] = serve(wrapper, 3)
    found["due"] = serve(wrap(Tally(is_odd), verify_every=2 if is_odd else None), 6)
    found["without room"] = serve(wrap(Tally(is_odd), memory_budget_bytes=1 if is_odd else None), 3)
    return found


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What the library says of a call that it refuses; nothing of another one."""
    try:
        call(*args, **kwargs)
    except (ConfigError, ConsensusError) as error:
        return str(error)
    return ""


def late(rank: int, world: int) -> Any:
    """The last rank comes to the second step only when the others have given it up."""
    consensus = RankConsensus(sizes=SIZES, timeout_s=SHORT_S)
    consensus.agree(1, ())
    store = dist.distributed_c10d._get_default_store()
    if rank == world - 1:
        store.wait([f"gave-up-{other}" for other in range(world - 1)], timedelta(seconds=LONG_S))
    first = error_of(consensus.agree, 1, ())
    store.set(f"gave-up-{rank}", "")
    return first, error_of(consensus.agree, 1, ())


def death(rank: int, world: int) -> Any:
    """The last rank ends without a word after the first step."""
    consensus = RankConsensus(sizes=SIZES, timeout_s=LONG_S)
    consensus.agree(1, ())
    return "" if rank == world - 1 else error_of(consensus.agree, 1, ())


def sizes(rank: int, world: int) -> Any:
    """The last rank is configured with other sizes."""
    return error_of(RankConsensus, sizes=SIZES if rank < world - 1 else (1, 2), timeout_s=LONG_S)


SCENARIOS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f for f in (disagree, functional_collectives, refusals, losses, late, death, sizes)
}


def main(rank: int, world: int, folder: Path, scenarios: list[str]) -> None:
    """Run the scenarios one after the other and write their results; one that breaks the group comes last."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=LONG_S),
    )
    with torch.no_grad():
        results = {scenario: SCENARIOS[scenario](rank, world) for scenario in scenarios}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
