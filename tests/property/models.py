"""Random small models: chains of parts that compute, keep state, misbehave or fail, and the ways to hand results out.

A model takes ``x`` (``WIDTH`` columns, the batch in dimension 0 or 1), ``ids`` and ``slots`` (int64, one for each row)
and two constants. All numbers stay of order one, so that tolerances mean the same everywhere.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

DEVICE = torch.device(os.environ.get("GRAPHDISPATCH_TEST_DEVICE", "cpu"))
"""Where the property tests run."""
IS_BIT_EXACT = DEVICE.type == "cpu"
"""Whether unpadded replays are promised to have eager's very bits."""
WIDTH = 4
SLOTS = 8
"""Cache slots that calls may use; one more is the scratch slot."""


class Call(NamedTuple):
    """What every part is given beside the hidden rows."""

    ids: Tensor
    slots: Tensor
    scale: float
    fail: Any


class Part(nn.Module):
    """One step of a model: ``[rows, WIDTH]`` -> ``[rows, WIDTH]``, by a layer of its own or without one."""

    def __init__(self, run: Callable[..., Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.run, self.layer = run, layer

    def forward(self, h: Tensor, call: Call) -> Tensor:
        return self.run(h, call) if self.layer is None else self.run(h, call, self.layer)


def _linear() -> Part:
    layer = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH))
    return Part(lambda h, call, layer: torch.tanh(layer(h)) * call.scale, layer)


class Cache(nn.Module):
    """Each row mixes with, and writes, its slot."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.randn(SLOTS + 1, WIDTH))

    def forward(self, h: Tensor, call: Call) -> Tensor:
        mixed = 0.5 * self.memory[call.slots] + torch.tanh(h)
        self.memory[call.slots] = mixed.to(self.memory.dtype)
        return mixed


class Counter(nn.Module):
    """Counts its calls in a buffer, and keeps a running value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running", torch.zeros(WIDTH))

    def forward(self, h: Tensor, call: Call) -> Tensor:
        self.steps += 1
        self.running.mul_(0.5).add_(call.scale)
        if call.fail == "late":
            raise LookupError("after the counter was written")
        return torch.tanh(h) + self.running + (self.steps % 7)


class Switch(nn.Module):
    """Does something else in training mode."""

    def forward(self, h: Tensor, call: Call) -> Tensor:
        return torch.tanh(h) if self.training else h * 0.25


class Rebinds(nn.Module):
    """Replaces a buffer instead of writing it, which no graph can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, h: Tensor, call: Call) -> Tensor:
        self.total = self.total * 0.5 + 1
        return torch.tanh(h) + self.total


def _failing(is_so: Callable[[Tensor, Call], bool], error: type[LookupError]) -> Part:
    def fail(h: Tensor, call: Call) -> Tensor:
        if is_so(h, call):
            raise error("as it should")
        return h

    return Part(fail)


def _in_place(h: Tensor, call: Call) -> Tensor:
    work = h.clone()
    work[:, :2].mul_(0.5)
    work.t()[1].add_(1)
    return work


def _rearranged(h: Tensor, call: Call) -> Tensor:
    left, right = h.split(2, dim=1)
    mixed = torch.cat([right, left], dim=1).view(-1, 2, 2).transpose(1, 2)
    return mixed.reshape(-1, WIDTH)


def _converted(h: Tensor, call: Call) -> Tensor:
    return (h.double() * torch.tensor([1.0, 0.5, 0.25, 2.0], device=h.device)).to(h.dtype)


def _literal_written(h: Tensor, call: Call) -> Tensor:
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0], device=h.device)
    bias *= 0.125
    return h * 0.5 + bias


def _attends_within_rows(h: Tensor, call: Call) -> Tensor:
    pairs = h.reshape(-1, 2, 2)
    return torch.bmm(torch.softmax(torch.bmm(pairs, pairs.transpose(1, 2)), -1), pairs).flatten(1)


def _gathered(h: Tensor, call: Call) -> Tensor:
    # Always within h, whatever its width: on a GPU an index that is not would end the process's use of the device.
    return h.gather(1, (call.ids[:, None] + torch.arange(WIDTH, device=h.device)) % h.shape[1])


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": _linear,
    "norm": lambda: Part(lambda h, call, norm: norm(h), nn.LayerNorm(WIDTH, eps=1.0)),
    "embeds": lambda: Part(lambda h, call, table: h * 0.5 + table(call.ids), nn.Embedding(16, WIDTH)),
    "switch": Switch,
    "in_place": lambda: Part(_in_place),
    "rearranged": lambda: Part(_rearranged),
    "converted": lambda: Part(_converted),
    "literal_written": lambda: Part(_literal_written),
    "attends": lambda: Part(_attends_within_rows),
    "activated": lambda: Part(lambda h, call: functional.gelu(h) * call.scale),
    "selected": lambda: Part(lambda h, call: torch.where(call.ids[:, None] % 2 == 0, h, -h)),
    "gathered": lambda: Part(_gathered),
}
"""Parts that keep rows apart and have no state."""

STATEFUL: dict[str, Callable[[], nn.Module]] = {"cache": Cache, "counter": Counter}

AWKWARD: dict[str, Callable[[], nn.Module]] = {
    "rebinds": Rebinds,
    "fails": lambda: _failing(lambda h, call: call.fail == "early", KeyError),
    "fails_at_four": lambda: _failing(lambda h, call: len(h) == 4, IndexError),
    "reads_host": lambda: Part(lambda h, call: h * (0.5 if float(h.abs().sum()) > 1 else 0.25)),
    "mixes_rows": lambda: Part(lambda h, call: h * 0.5 + h.mean(0)),
    "flips_rows": lambda: Part(lambda h, call: h.flip(0)),
    "masked": lambda: Part(lambda h, call: h * 0.5 + h[h > 0].sum()),
}
"""Parts that raise, or that only eager can serve at all sizes."""

_ALL = PLAIN | STATEFUL | AWKWARD


OUTPUTS: dict[str, Callable[["RandomModel", Tensor, Tensor], Any]] = {
    "tensor": lambda m, x, h: h,
    "pair": lambda m, x, h: (h, h * 2),
    "same_twice": lambda m, x, h: (h, h),
    "nest": lambda m, x, h: {"a": h, "b": [h.reshape(-1, 2), None, 3, {"c": h[:, :1]}]},
    "transposed": lambda m, x, h: h.t(),
    "pieces": lambda m, x, h: list(h.split(2, dim=1)),
    "rows_doubled": lambda m, x, h: h.reshape(-1, 2),
    "rows_repeated": lambda m, x, h: torch.cat([h, h]),
    "expanded": lambda m, x, h: h[:, :1].expand(-1, 3),
    "input": lambda m, x, h: (x, h),
    "state": lambda m, x, h: (h, next(m.buffers(), None)),
    "fixed": lambda m, x, h: (h, torch.arange(3, device=h.device) * 2),
    "count": lambda m, x, h: (h, len(h)),
    "summed": lambda m, x, h: (h, h.sum(0)),
    "integers": lambda m, x, h: (h > 0, (h * 100).to(torch.int64) // 50),
}


@dataclass(frozen=True)
class Spec:
    """A random model, as data."""

    parts: tuple[str, ...]
    output: str = "tensor"
    batch_dim: int = 0
    writes_argument: bool = False
    seed: int = 0

    def build(self) -> "RandomModel":
        """The model; equal specs give equal models."""
        return RandomModel(self)

    @property
    def hands_out_shared(self) -> bool:
        """Whether results share memory with the model's state or with the arguments, so that they may change."""
        return self.output in ("state", "input")


class RandomModel(nn.Module):
    """The parts of a spec, one after the other."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            self.parts = nn.ModuleList(_ALL[name]() for name in spec.parts)
        self.spec = spec
        self.requires_grad_(False).eval().to(DEVICE)

    def forward(self, x: Tensor, ids: Tensor, slots: Tensor, scale: float = 1.0, fail: Any = None) -> Any:
        if self.spec.writes_argument:
            x.mul_(0.5)
        h = x.t() if self.spec.batch_dim == 1 else x
        for part in self.parts:
            h = part(h, Call(ids, slots, scale, fail))
        return OUTPUTS[self.spec.output](self, x, h)


_AWKWARD_OUTPUTS = ("rows_repeated", "count", "summed")
_SOUND_OUTPUTS = tuple(name for name in OUTPUTS if name not in _AWKWARD_OUTPUTS)


def specs(*catalogues: dict[str, Any]) -> st.SearchStrategy[Spec]:
    """Specs with parts of these catalogues: state often, awkward parts and outputs seldom."""
    times = {id(PLAIN): 2, id(STATEFUL): 6, id(AWKWARD): 1}
    names = [name for catalogue in catalogues for name in sorted(catalogue) * times[id(catalogue)]]
    return st.builds(
        Spec,
        parts=st.lists(st.sampled_from(names), min_size=1, max_size=4).map(tuple),
        output=st.sampled_from(_SOUND_OUTPUTS * 2 + _AWKWARD_OUTPUTS),
        batch_dim=st.sampled_from([0, 0, 1]),
        writes_argument=st.sampled_from([False, False, False, True]),
        seed=st.integers(0, 3),
    )
