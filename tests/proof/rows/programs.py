"""Programs that mix rows or follow their number (``BAD``), and independent ones (``GOOD``).

Both map names to a callable and what makes its batch.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from .runs import Batch

F = nn.functional

torch.manual_seed(0)
D = 6
W, V, TABLE, BIG = (torch.randn(D, D), torch.randn(D), torch.randn(200, D), torch.randn(10, D))


def _floats(*shape: int) -> Callable[[int], Batch]:

    def make(n: int) -> Batch:
        x = torch.randn(n, *shape)
        return ((x,), {}, [(x, 0)])

    return make


def _with_ints(n: int) -> Batch:
    x, i = (torch.randn(n, D), torch.randint(0, D, (n,)))
    return ((x, i), {}, [(x, 0), (i, 0)])


def _seq_mask(n: int) -> Batch:
    x, m = (torch.randn(n, 5, D), (torch.rand(n, 5) > 0.3).long())
    m[:, 0] = 1
    return ((x, m), {}, [(x, 0), (m, 0)])


def _ids(n: int) -> Batch:
    i = torch.randint(0, 50, (n, 5))
    return ((i,), {}, [(i, 0)])


X, S = (_floats(D), _floats(5, D))


class Stateful(nn.Module):
    """Keeps the latest batch, and uses its first rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(100, D))

    def forward(self, x: Any) -> Any:
        self.kept[: x.shape[0]].copy_(x)
        return x + self.kept[:3].sum(0)


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Any) -> Any:
        self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class Lookup(nn.Module):
    """Picks a layer by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"3": nn.Linear(D, D), "other": nn.Linear(D, D)})

    def forward(self, x: Any) -> Any:
        key = str(x.shape[0])
        return self.layers[key if key in self.layers else "other"](x)


class Capacity(nn.Module):
    """Experts with a capacity, first come first served."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Linear(D, 2)
        self.w = nn.Parameter(torch.randn(2, D, D))

    def forward(self, x: Any) -> Any:
        e = F.softmax(self.r(x), -1)
        e = (e == e.amax(-1, keepdim=True)).float()
        place = (e.cumsum(0) - 1) * e
        return x + torch.einsum("ne,nd,edk->nk", e * (place < 3), x, self.w)


class Checks:
    def __init__(self) -> None:
        self.seen = 3

    def __eq__(self, other: Any) -> Any:
        return other == self.seen

    __hash__ = object.__hash__


_KNOWN: dict[int, float] = {}


def _memo(x: Any) -> Any:
    return x * _KNOWN.setdefault(x.shape[0], float(len(_KNOWN) + 1))


def _match(x: Any) -> Any:
    match x.shape:
        case [3, _]:
            return x + 1
        case _:
            return x


def _tried(x: Any) -> Any:
    try:
        x.view(4, 2, D)
    except RuntimeError:
        return x
    return x + 1


def _caught(x: Any) -> Any:
    try:
        (7, 6, 5, 4)[x.shape[0] - 2]
    except IndexError:
        return x
    return x + 1


@torch.library.custom_op("graphdispatch_programs::mix", mutates_args=())
def _custom_mix(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


@torch.jit.script
def _scripted(x: torch.Tensor) -> torch.Tensor:
    if x.size(0) == 3:
        return x + 1.0
    return x


class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x - x.mean(0)


class FnBranch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x + 1 if x.shape[0] == 3 else x * 1


def _hidden_alias(x: Any) -> Any:
    y = x * 1
    y.data.sub_(y.data.mean(0))
    return y


def _set_rows(x: Any) -> Any:
    y = torch.zeros_like(x)
    y[0] = x[-1]
    return x + y


def _resized(x: Any) -> Any:
    y = torch.empty(0)
    torch.sum(x, 0, out=y)
    return x + y


def _listed(x: Any) -> Any:
    return torch.stack([r * (i + 1) for i, r in enumerate(reversed(x.unbind(0)))])


def _iterated(x: Any) -> Any:
    total = torch.zeros(D)
    for _ in x:
        total = total + V
    return x + total


def _nested(x: Any) -> Any:
    return torch.func.vmap(lambda r: r - r.max())(x.T.contiguous()).T


def _late(x: Any) -> Any:
    return (lambda s: x + 1 if all((a == b for a, b in zip(s, (3, D), strict=True))) else x)(x.shape)


BAD = {
    "if n == 3": (lambda x: x + 1 if x.shape[0] == 3 else x, X),
    "if size(0) > 20": (lambda x: x + 1 if x.size(0) > 20 else x, X),
    "shape == tuple": (lambda x: x + 1 if x.shape == (3, D) else x, X),
    "late shape compare": (_late, X),
    "n in set": (lambda x: x + 1 if x.shape[0] in {3, 9} else x, X),
    "n in tuple": (lambda x: x * 2 if x.shape[0] in (3, 9) else x, X),
    "dict of n": (lambda x: x * {3: 2.0}.get(x.shape[0], 1.0), X),
    "memo by n": (_memo, X),
    "match": (_match, X),
    "text of n": (Lookup(), X),
    "f-string": (lambda x: x + 1 if f"{x.shape[0]}" == "3" else x, X),
    "n % 2": (lambda x: x if x.shape[0] % 2 else x + 1, X),
    "bool(n - 3)": (lambda x: x if x.shape[0] - 3 else x + 1, X),
    "numel": (lambda x: x + 1 if x.numel() == 18 else x, X),
    "len": (lambda x: x + 1 if len(x) == 3 else x, X),
    "stride of a transpose": (lambda x: x + 1 if x.t().contiguous().stride(0) == 3 else x, X),
    "shape of a product": (lambda x: x + 1 if (x.mT @ x).shape[0] == 3 or (x @ x.mT).shape[0] == 3 else x, X),
    "shape of a mean": (lambda x: x + 1 if x.mean(1).shape == torch.Size([3]) else x, X),
    "shape of an expanded mean": (lambda x: x + 1 if x.sum(1, keepdim=True).expand(-1, 4).shape[0] == 3 else x, X),
    "nonlinear": (lambda x: x * 2 if (x.shape[0] - 3) * (x.shape[0] - 9) == 0 else x, X),
    "max(n, 5)": (lambda x: x / max(x.shape[0], 5), X),
    "sqrt(n)": (lambda x: x / math.sqrt(x.shape[0]), X),
    "x / n": (lambda x: x / x.shape[0], X),
    "1 / n": (lambda x: x * (1.0 / x.shape[0]), X),
    "full of n": (lambda x: x + torch.full((1,), x.shape[0]), X),
    "tensor of n": (lambda x: x + torch.tensor(x.shape[0]), X),
    "tensor of [n]": (lambda x: x + torch.tensor([x.shape[0]] * D), X),
    "pow n": (lambda x: x.sigmoid() ** x.shape[0], X),
    "add alpha n": (lambda x: torch.add(x, x, alpha=x.shape[0]), X),
    "fill n": (lambda x: x + torch.zeros(1).fill_(x.shape[0]), X),
    "linspace": (lambda x: x + torch.linspace(0, 1, x.shape[0])[:, None], X),
    "arange(n - 1)": (lambda x: x + torch.arange(x.shape[0] - 1, -1, -1)[:, None], X),
    "ones(n).sum": (lambda x: x + torch.ones(x.shape[0]).sum(), X),
    "TABLE[:n].mean": (lambda x: x + TABLE[: x.shape[0]].mean(0), X),
    "TABLE[n]": (lambda x: x + TABLE[x.shape[0]], X),
    "TABLE[-n:]": (lambda x: x + TABLE[-x.shape[0] :], X),
    "columns by n": (lambda x: x + x.repeat(1, 40)[:, : x.shape[0]].sum(1, keepdim=True), X),
    "loop over n": (lambda x: sum((V for _ in range(x.shape[0])), x), X),
    "[..] * n": (lambda x: x + torch.stack([V] * x.shape[0]).sum(0), X),
    "loop over rows": (_iterated, X),
    "reversed rows": (_listed, X),
    "try view": (_tried, X),
    "caught index": (_caught, X),
    "np.full": (lambda x: x + torch.from_numpy(np.full(D, x.shape[0], np.float32)), X),
    "operator.index": (lambda x: x * operator.index(x.shape[0]), X),
    "object ==": (lambda x: x + 1 if Checks() == x.shape[0] else x, X),
    "divmod": (lambda x: x * (1 + divmod(x.shape[0], 3)[1]), X),
    "round(n / 8)": (lambda x: x * round(x.shape[0] / 8), X),
    "ceil(n / 8)": (lambda x: x + TABLE[math.ceil(x.shape[0] / 8)], X),
    "shift n": (lambda x: x * (x.shape[0] >> 3), X),
    "mean": (lambda x: x - x.mean(0), X),
    "hidden alias": (_hidden_alias, X),
    "kept rows": (Stateful(), X),
    "running mean": (Running(), X),
    "capacity": (Capacity(), X),
    "batch norm": (nn.BatchNorm1d(D), X),
    "custom op": (lambda x: _custom_mix(x), X),
    "script": (_scripted, X),
    "autograd.Function": (Fn.apply, X),
    "branch in a Function": (FnBranch.apply, X),
    "vmap over columns": (_nested, X),
    "broadcast to seven": (lambda x: x + torch.zeros(torch.broadcast_shapes(x.shape, (7, D))), X),
    "wrong reshape": (lambda x: x.T.reshape(x.shape), X),
    "literal view": (lambda x: (x.view(7, -1) if x.numel() % 7 == 0 else x).reshape(x.shape), X),
    "view -1 of columns": (lambda x: x.reshape(2, -1).flip(0).reshape(x.shape), X),
    "roll": (lambda x: x.roll(1, 0), X),
    "sorted": (lambda x: x[x[:, 0].argsort()], X),
    "numpy": (lambda x: x + torch.from_numpy(x.numpy().mean(0)), X),
    "numpy in place": (lambda x: (lambda y: (y.numpy().__isub__(x.numpy().mean(0)), y)[1])(x * 1), X),
    "item": (lambda x: x * x.sum().item(), X),
    "out=": (_resized, X),
    "set rows": (_set_rows, X),
    "triu @ x": (lambda x: torch.ones(x.shape[0], x.shape[0]).triu() @ x, X),
    "eye.sum": (lambda x: x + torch.eye(x.shape[0]).flip(0)[:, :1], X),
    "conv over rows": (lambda x: F.conv1d(x.T[None], torch.ones(D, D, 3), padding=1)[0].T, X),
    "attention over rows": (
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0],
        X,
    ),
    "in-batch scores": (lambda x: F.softmax(x @ x.T, -1) @ x, X),
    "one scale": (lambda x: (x / x.abs().amax() * 127).round(), X),
    "pad rows": (lambda x: F.pad(x[:-1], (0, 0, 0, 1)), X),
    "all but the last": (lambda x: torch.cat([x[:-1] * 2, x[-1:]]), X),
    "mask any": (lambda x, m: x * m.any(), _seq_mask),
    "row of lengths": (lambda x, m: x * (torch.arange(5) < m.sum(1).max())[:, None], _seq_mask),
    "gather across": (lambda x, i: x + x.gather(0, i[:, None].clamp(max=1).expand(-1, D)), _with_ints),
    "index by ints": (lambda x, i: x + x[i % 2], _with_ints),
    "scatter across": (lambda x, i: x + torch.zeros(D, D).index_add(0, i, x)[0], _with_ints),
    "index_reduce": (lambda x, i: x + torch.zeros(D, D).index_reduce(0, i, x, "amax")[i], _with_ints),
    "foreach": (lambda x: torch._foreach_add([x], [x.mean(0).expand_as(x)])[0], X),
    "tensor_split": (lambda x: torch.cat([p - p.amax(0) for p in x.tensor_split(2)]), X),
    "blocks of 32": (lambda x: torch.cat([p - p.amax(0) for p in x.split(32)]), X),
}


class Cached(nn.Module):
    """A static cache with rows of its own, written at one position."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D, D)

    def forward(self, x: Any, cache: Any, at: Any) -> Any:
        cache.index_copy_(1, at, self.q(x)[:, None])
        return torch.softmax((cache @ x[:, :, None])[..., 0], -1)[:, None] @ cache


def _cached(n: int) -> Batch:
    x, c = (torch.randn(n, D), torch.randn(n, 8, D))
    return ((x, c, torch.tensor([3])), {}, [(x, 0), (c, 0)])


class Paged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(200, D))

    def forward(self, x: Any, slot: Any, table: Any) -> Any:
        self.k.index_copy_(0, slot, x)
        return torch.softmax((self.k[table] @ x[:, :, None])[..., 0], -1)


def _paged(n: int) -> Batch:
    x, s, t = (torch.randn(n, D), torch.arange(n), torch.randint(0, 100, (n, 4)))
    return ((x, s, t), {}, [(x, 0), (s, 0), (t, 0)])


class Branches(nn.Module):
    """Checks that pass for all numbers of rows."""

    def forward(self, x: Any) -> Any:
        b, d = x.shape
        if b <= 0 or x.dim() != 2:
            raise ValueError
        assert x.numel() == b * d
        return x + (1 if b > 1 else 2)


def _head_split(x: Any) -> Any:
    b, t, _ = x.shape
    q = (x @ W).view(b, t, 2, 3).transpose(1, 2)
    return (q.reshape(b * 2, t, 3) @ q.reshape(b * 2, t, 3).transpose(1, 2)).softmax(-1).view(b, 2, t, t).mean(1)


def _top_p(x: Any) -> Any:
    s, i = x.sort(-1, descending=True)
    return x.masked_fill(
        torch.zeros_like(x, dtype=torch.bool).scatter(1, i, s.softmax(-1).cumsum(-1) > 0.9), -1000000000.0
    )


def _additive(x: Any, m: Any) -> Any:
    return F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], attn_mask=(1.0 - m[:, None, None].float()) * torch.finfo(torch.float32).min
    )[:, 0]


def _causal(x: Any) -> Any:
    t = x.shape[1]
    a = x @ x.mT + torch.full((t, t), -1000000000.0).triu(1)
    return a.softmax(-1) @ x


def _columns(x: Any) -> Any:
    y = torch.zeros(x.shape[0], D)
    y[:, 0] = x[:, 1]
    y[:, 1:3] += x[:, :2]
    return y


def _loop_moe(x: Any) -> Any:
    v, i = (x @ W).softmax(-1).topk(2, -1)
    return sum(x @ W * ((i == e) * v).sum(-1, keepdim=True) for e in range(D))


def _eval(module: nn.Module) -> nn.Module:
    return module.eval()


def _rope(x: Any) -> Any:
    t = torch.arange(x.shape[1])[:, None] * torch.arange(3.0)
    c, s = (t.cos(), t.sin())
    a, b = x.chunk(2, -1)
    return torch.cat([a * c - b * s, a * s + b * c], -1)


GOOD = {
    "linear": (lambda x: (x @ W).relu(), X),
    "slice to the end": (lambda x: x.unflatten(1, (2, -1)).flatten(0, 1)[(slice(0, 2 * x.shape[0]),)], X),
    "broadcast shapes": (lambda x: x + torch.zeros(torch.broadcast_shapes(x.shape[:-1], (1,)))[:, None], X),
    "mlp": (_eval(nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(), nn.Linear(8, 2))), X),
    "checks": (Branches(), X),
    "heads": (_head_split, S),
    "masked attention": (_additive, _seq_mask),
    "boolean mask": (
        lambda x, m: F.scaled_dot_product_attention(
            x[:, None], x[:, None], x[:, None], attn_mask=m[:, None, None].bool()
        )[:, 0],
        _seq_mask,
    ),
    "causal": (_causal, S),
    "sdpa causal": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), S),
    "rope": (_rope, S),
    "top-p": (_top_p, X),
    "embedding": (lambda i: F.embedding(i, BIG.repeat(5, 1)).sum(1), _ids),
    "cls token": (lambda x: torch.cat([V.expand(x.shape[0], 1, -1), x], 1), S),
    "positions": (lambda x: x + TABLE[torch.arange(x.shape[1])], S),
    "position _ids of rows": (
        lambda x: x + F.embedding(torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1), TABLE),
        S,
    ),
    "last token": (lambda x, m: x[torch.arange(x.shape[0]), m.sum(1) - 1], _seq_mask),
    "gather last": (lambda x, m: x.gather(1, (m.sum(1) - 1)[:, None, None].expand(-1, 1, D)), _seq_mask),
    "mean pool": (lambda x, m: (x * m[..., None]).sum(1) / m.sum(1, keepdim=True), _seq_mask),
    "positions of a mask": (lambda x, m: x + TABLE[(m.cumsum(1) - 1).clamp(min=0)], _seq_mask),
    "l2": (lambda x: F.normalize(x, dim=-1), X),
    "cosine": (lambda x: F.cosine_similarity(x, V[None]), X),
    "conv": (
        _eval(
            nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)
            )
        ),
        _floats(3, 8, 8),
    ),
    "conv1d": (_eval(nn.Conv1d(D, 4, 3, padding=1)), _floats(D, 9)),
    "group norm": (_eval(nn.GroupNorm(2, D)), _floats(D, 4)),
    "instance norm": (_eval(nn.InstanceNorm2d(3)), _floats(3, 5, 5)),
    "adaptive pool": (_eval(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())), _floats(3, 8, 8)),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), _floats(3, 4, 4)),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), _floats(4, 4, 4)),
    "patches": (
        lambda x: x.reshape(x.shape[0], 3, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(x.shape[0], 4, 48),
        _floats(3, 8, 8),
    ),
    "lstm": (_eval(nn.LSTM(D, 4, 2, batch_first=True)), S),
    "lstm, zeros of n": (lambda x: LSTM(x, (x.new_zeros(1, x.shape[0], 4), torch.zeros(1, x.shape[0], 4)))[0], S),
    "gru": (_eval(nn.GRU(D, 4, batch_first=True)), S),
    "transformer": (_eval(nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 8, batch_first=True), 2)), S),
    "mha": (lambda x: MHA(x, x, x)[0], S),
    "static cache": (Cached(), _cached),
    "paged cache": (Paged(), _paged),
    "columns set": (_columns, X),
    "guidance by slices": (lambda x: (lambda y: y[: len(x)] - 2 * y[len(x) :])(torch.cat([x, x * 2]) @ W), X),
    "guidance by a split": (lambda x: operator.sub(*(torch.cat([x, x * 2]) @ W).split(x.shape[0])), X),
    "guidance by half the size": (
        lambda x: (lambda y: operator.sub(*torch.split(y, len(y) // 2, dim=0)))(torch.cat([x, x * 2])),
        X,
    ),
    "guidance by sizes": (
        lambda x: operator.sub(*torch.cat([x, x * 2, -x]).split([2 * len(x), len(x)])[0].chunk(2)),
        X,
    ),
    "quantile of each row": (lambda x: x.clamp(max=torch.quantile(x.abs(), 0.9, dim=1, keepdim=True)), X),
    "guidance": (lambda x: (lambda a, b: a + 2 * (b - a))(*(torch.cat([x, x]) @ W).chunk(2)), X),
    "guidance by repeat": (lambda x: (x.repeat(2, 1) @ W).view(2, x.shape[0], D).sum(0), X),
    "beams": (lambda x: (x.repeat_interleave(3, 0) @ W).view(x.shape[0], 3, D).amax(1), X),
    "one-hot": (lambda x, i: x * (i[:, None] == torch.arange(D)), _with_ints),
    "argmax": (lambda x: x.argmax(-1), X),
    "topk": (lambda x: x.topk(2, -1), X),
    "loop of experts": (_loop_moe, X),
    "numbers of rows of one part": (lambda x: x[torch.arange(x.shape[0]) // 1], X),
    "einsum": (lambda x: torch.einsum("btd,de,e->bt", x, W, V), S),
    "flatten tokens": (lambda x: (x.flatten(0, 1) @ W).unflatten(0, (x.shape[0], -1)), S),
    "view as": (lambda x: (x.reshape(-1, D) @ W).view_as(x), S),
    "table of n rows": (lambda x: x + TABLE[: x.shape[0]], X),
    "number in a range": (lambda x: x * (1 if x.shape[0] <= 64 else 2), X),
    "tri mask of s": (
        lambda x: (
            (x @ x.mT)
            .masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1000000000.0)
            .softmax(-1)
        ),
        S,
    ),
    "window": (lambda x: x.unfold(1, 2, 1).mean(-1), S),
    "fft": (lambda x: torch.fft.rfft(x, dim=-1).abs(), X),
    "var": (lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-05), X),
    "where": (lambda x: torch.where(x > 0, x, torch.zeros(1)), X),
    "ones of n": (lambda x: x * torch.ones(x.shape[0], 1), X),
    "dict out": (lambda x: {"a": x @ W, "b": (x + 1, x[:, 0])}, X),
    "out=": (lambda x: (lambda y: (torch.mul(x, 2, out=y), y + 1)[1])(torch.empty_like(x)), X),
    "clamp to a state": (lambda x: torch.minimum(x, V), X),
    "autocast": (lambda x: _auto(x), X),
    "len": (lambda x: x * torch.ones(len(x), 1), X),
    "set by arange": (
        lambda x, i: (lambda y: (y.__setitem__((torch.arange(x.shape[0]), i), x[:, 0]), y)[1])(
            torch.zeros(x.shape[0], D)
        ),
        _with_ints,
    ),
    "scatter": (lambda x, i: torch.zeros(x.shape[0], D).scatter_(1, i[:, None], 1.0) * x, _with_ints),
}
LSTM, MHA = (_eval(nn.LSTM(D, 4, batch_first=True)), _eval(nn.MultiheadAttention(D, 2, batch_first=True)))


def _auto(x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, W)
