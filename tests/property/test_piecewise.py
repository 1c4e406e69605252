"""Random module trees with random breaks, many sizes in one pool, in random order: always eager's answer."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, eager_break, graphed

from ..helpers import assert_same
from .models import DEVICE, WIDTH

SIZES = (1, 2, 4, 8)
BY_WORD = CUDAGraphOptions(capture_after=1, rows="independent")
"""Nobody follows rows through a break that reads data."""


class Tree(NamedTuple):
    """A node: its kind, whether it is a break, and its children."""

    kind: str
    is_break: bool
    children: tuple["Tree", ...]


class Node(nn.Module):
    """``[rows, WIDTH]`` -> whatever its kind gives; ``steps`` counts its runs, in place."""

    def __init__(self, tree: Tree, generator: torch.Generator) -> None:
        super().__init__()
        self.kind = tree.kind
        self.children_ = nn.ModuleList(Node(child, generator) for child in tree.children)
        self.register_buffer("weight", torch.randn(WIDTH, WIDTH, generator=generator, device="cpu") * 0.5)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("kept", torch.zeros(WIDTH))
        if tree.is_break:
            eager_break(self)

    def forward(self, h: Tensor) -> Any:
        self.steps.add_(1)
        if self.kind in LEAVES:
            return LEAVES[self.kind](self, h)
        return INNER[self.kind](self, h)


def run(node: Node, h: Tensor) -> Tensor:
    """A node's result as ``[rows, WIDTH]``; parts of it are written to in place."""
    got = node(h)
    if got is None:
        return h
    if isinstance(got, dict):
        return got["a"][0].mul_(0.5) * got["a"][1] + got["b"][0]  # type: ignore[no-any-return]
    if isinstance(got, tuple):
        got[1].add_(0.25)
        return got[0] + got[2]  # type: ignore[no-any-return]
    return torch.cat([got, got], 1) if got.shape[1] < WIDTH else got


def _sequence(node: Node, h: Tensor) -> Tensor:
    for child in node.children_:
        h = run(child, h)  # type: ignore[arg-type]
    return torch.tanh(h)


def _branches(node: Node, h: Tensor) -> Tensor:
    # All children are given the same memory: what one does in place the others see.
    parts = [run(child, h) for child in node.children_]  # type: ignore[arg-type]
    return torch.tanh(torch.stack(parts).mean(0) + h)


def _several(node: Node, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    whole = h * 0.5
    return whole, whole[:, 1:3], h


LEAVES: dict[str, Callable[[Node, Tensor], Any]] = {
    "fresh": lambda node, h: torch.tanh(h @ node.weight),
    "in_place": lambda node, h: h.mul_(0.5).add_(node.weight[0]),
    "view": lambda node, h: h.t()[:2].t(),
    "nothing": lambda node, h: (h.sub_(node.weight[1]), None)[1],
    "several": _several,
    "nest": lambda node, h: {"a": [h + node.weight[2], 2], "b": (h.sin(), None)},
    "overlap": lambda node, h: h.sum(1, keepdim=True).expand(-1, 2),
    "own": lambda node, h: h * 0.5 + node.kept.copy_(h[0]),
    # Of the first row, which is never padding. No graph can hold this: unless it is in a break, all is eager.
    "values": lambda node, h: h * (0.5 if float(h[0, 0]) > 0 else -0.25),
    "numpy": lambda node, h: torch.from_numpy(h.cpu().numpy() * 0.5).to(h.device),
}
INNER: dict[str, Callable[[Node, Tensor], Tensor]] = {
    "sequence": _sequence,
    "residual": lambda node, h: h * 0.5 + _sequence(node, h + 1),
    "branches": _branches,
}
NEEDS_A_BREAK = ("values", "numpy")

leaves = st.builds(
    lambda kind, is_break: Tree(kind, is_break or kind in NEEDS_A_BREAK, ()),
    st.sampled_from(list(LEAVES)),
    st.booleans(),
)
trees = st.recursive(
    leaves,
    lambda children: st.builds(
        Tree, st.sampled_from(list(INNER)), st.booleans(), st.lists(children, min_size=1, max_size=4).map(tuple)
    ),
    max_leaves=7,
)
roots = st.builds(lambda children: Tree("sequence", False, tuple(children)), st.lists(trees, min_size=1, max_size=4))


@given(root=roots, rows=st.lists(st.integers(1, 9), min_size=2, max_size=5), seed=st.integers(0, 2**16))
def test_pieces_give_eager_s_answer(root: Tree, rows: list[int], seed: int) -> None:
    """Outputs and state of every call are eager's, whichever sizes came before in the same pool."""
    generator = torch.Generator().manual_seed(seed)
    model = Node(root, generator).to(DEVICE)
    twin = copy.deepcopy(model)
    served = graphed(lambda x: model(x.clone()), dynamic={"x": 0}, sizes=SIZES, mode="PIECEWISE", options=BY_WORD)
    for count in (*rows, 4) * 3:
        x = torch.randn(count, WIDTH, generator=generator, device="cpu").to(DEVICE)
        torch.testing.assert_close(served(x), twin(x.clone()), rtol=1e-5, atol=1e-5)
        assert_same([*model.buffers()], [*twin.buffers()])
    served.check_integrity()
    assert served.stats.hits > 0, served.stats.reasons
