"""Programs made to fool the run: each mixes rows, or takes another path for some number of rows, in a way hard to see.

``ATTACKS`` maps names to a callable and what makes its batch.
"""

import copy
import ctypes
import itertools
import json
import math
import operator
import pickle
import random
import struct
import warnings
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from .runs import Batch

F = nn.functional

D, E, K = 8, 4, 2
torch.manual_seed(0)
W, V, TABLE, EXPERTS = torch.randn(D, D), torch.randn(D), torch.randn(200, D), torch.randn(E, D, D)
ROUTER = torch.randn(D, E)


def _rows(n: int) -> Batch:
    x = torch.randn(n, D)
    return (x,), {}, [(x, {0: 0})]


def _rows_and_ids(n: int) -> Batch:
    x, i = torch.randn(n, D), torch.randint(0, D, (n,))
    return (x, i), {}, [(x, {0: 0}), (i, {0: 0})]


def _tried(of: Any) -> Any:
    """A program that goes another way where ``of(n)`` raises."""

    def program(x: Tensor) -> Tensor:
        try:
            of(x.shape[0])
        except Exception:
            return x + 1
        return x

    return program


def _if(of: Any) -> Any:
    """A program that goes another way where ``of(n)`` is true."""
    return lambda x: x + 1 if of(x.shape[0]) else x


@lru_cache
def _cached(n: int) -> float:
    return float(n == 3)


def _handed_over(x: Tensor) -> Tensor:
    if has_torch_function_unary(x):
        return handle_torch_function(_handed_over, (x,), x)
    return x + 1 if x.shape[0] == 3 else x * 2


def _applied(x: Tensor) -> Tensor:
    y = x * 1
    return y.apply_(lambda number: number if abs(number) < 5 else 0.0)


def _mapped(x: Tensor) -> Tensor:
    y = x * 1
    return y.map_(x.flip(0), lambda one, other: max(one, other))


PATHS: dict[str, Any] = {
    "divided by n - 3": _tried(lambda n: 1 // (n - 3)),
    "remainder of n - 3": _tried(lambda n: 5 % (n - 3)),
    "shifted by n - 9": _tried(lambda n: 1 << (n - 6)),
    "list of n": _tried(lambda n: [1] * 20 and list(range(20))[n]),
    "packed n": _tried(lambda n: struct.pack("B", n * 5)),
    "bytes of n": _tried(lambda n: n.to_bytes(1, "big") and (n * 6).to_bytes(1, "big")),
    "text by !r": _if(lambda n: f"{n!r}" == "3"),
    "text by %": _if(lambda n: "%d" % n == "3"),  # noqa: UP031
    "text by format": _if(lambda n: "{:03d}".format(n) == "003"),  # noqa: UP032
    "json": _if(lambda n: json.dumps({"n": int(n)}) == '{"n": 3}'),
    "pickle": _if(lambda n: pickle.dumps(n) == pickle.dumps(3)),
    "copy": _if(lambda n: copy.copy(n) == 3),
    "deepcopy": _if(lambda n: copy.deepcopy([n]) == [3]),
    "numpy integer": _if(lambda n: np.int64(3) == n),
    "numpy array": _if(lambda n: bool(np.array([3, 9]).__eq__(n).any())),
    "numpy arange": lambda x: x * float(np.arange(x.shape[0]).sum()),
    "fraction": _if(lambda n: Fraction(n, 3).denominator == 1),
    "decimal": _if(lambda n: Decimal(int(n)) == 3),
    "pow with a modulus": _if(lambda n: pow(n, 2, 5) == 4),
    "negative power": _if(lambda n: n**-1 == 1 / 3),
    "cube root": _if(lambda n: n ** (1 / 3) == 3.0 or n**0.3 == 27**0.3),
    "powers that overflow": lambda x: x * min(2.0 ** (x.shape[0] * 100 - 600), 3.0),
    "root": _if(lambda n: (n**0.5).is_integer()),
    "power of minus one": lambda x: x * (-1) ** x.shape[0],
    "inverted": _if(lambda n: ~n == -4),
    "and": _if(lambda n: n & 1),
    "xor": _if(lambda n: not n ^ 3),
    "a product that overflows": _if(lambda n: n * 2**62 == 3 * 2**62),
    "a shift that overflows": _if(lambda n: n << 64 == 3 << 64),
    "log2": _if(lambda n: math.log2(n).is_integer()),
    "gcd": _if(lambda n: math.gcd(n, 8) == 8),
    "isqrt": lambda x: x * math.isqrt(x.shape[0]),
    "int of a quotient": lambda x: x * int(x.shape[0] / 3),
    "round of a quotient": lambda x: x * round(x.shape[0] / 3),
    "floor of a quotient": lambda x: x * math.floor(x.shape[0] / 3),
    "in a range": _if(lambda n: n in range(5)),
    "last of a range": lambda x: x * range(x.shape[0])[-1],
    "islice": lambda x: x * sum(itertools.islice(itertools.count(), x.shape[0])),
    "sorted": lambda x: x * sorted([x.shape[0], 9])[0],
    "max of a list": lambda x: x * max([x.shape[0], 9]),
    "lru_cache": lambda x: x * _cached(x.shape[0]),
    "operator.eq": _if(lambda n: operator.eq(n, 3)),
    "seed of n": lambda x: x * random.Random(int(x.shape[0])).random(),
    "bit_length": lambda x: x * x.shape[0].bit_length(),
    "bit_count": lambda x: x * x.shape[0].bit_count(),
    "numerator": lambda x: x * x.shape[0].numerator,
    "hash of a shape": lambda x: x * {hash((3, D)): 2.0}.get(hash(x.shape), 1.0),
    "text of a shape": lambda x: x + 1 if str(x.shape) == f"torch.Size([3, {D}])" else x,
    "numel of a shape": lambda x: x + 1 if x.shape.numel() == 3 * D else x,
    "count of a shape": lambda x: x * x.shape.count(3),
    "order of shapes": lambda x: x + 1 if x.shape < torch.Size([5, D]) else x,
    "part of a shape": lambda x: x + 1 if x.shape[:1] == (3,) else x,
    "unpacked shape": lambda x: (lambda n, d: x + 1 if d * n == 3 * D else x)(*x.shape),
    "_shape_as_tensor": lambda x: x * torch._shape_as_tensor(x)[0].clamp(min=4),
    "a function handed to modes": _handed_over,
    "apply_": _applied,
    "read by its address": lambda x: x * (ctypes.c_float * x.numel()).from_address(x.data_ptr())[0],
    "read as an array": lambda x: x * float(x.numpy()[0, 0]),
    "map_": _mapped,
    "is_same_size": lambda x: x + 1 if torch.is_same_size(x, torch.empty(3, D)) else x,
    "storage offset": lambda x: x + x.T[:, x.shape[0] - 1 :].storage_offset(),
    "as_tensor": lambda x: x + torch.as_tensor(x.shape[0]),
    "new_tensor": lambda x: x + x.new_tensor(x.shape[0]),
    "scalar_tensor": lambda x: x + torch.scalar_tensor(x.shape[0]),
    "full of n": lambda x: x + torch.full((x.shape[0], 1), x.shape[0]),
    "new_full of n": lambda x: x + x.new_full((1,), x.shape[0]),
    "add by aten": lambda x: torch.ops.aten.add(x, x, alpha=x.shape[0]),
    "mul by aten": lambda x: torch.ops.aten.mul.Scalar(x, x.shape[0]),
    "clamp to n": lambda x: x.abs().mul(9).clamp(max=x.shape[0]),
    "eps of n": lambda x: F.layer_norm(x, (D,), eps=x.shape[0]),
    "groups of n": lambda x: F.group_norm(x.repeat(1, 7)[:, :, None], x.shape[0] % 2 + 1)[..., 0],
    "every second number": lambda x: x + TABLE[torch.arange(0, x.shape[0], 2)].mean(0),
    "numbers from n on": lambda x: x + torch.arange(x.shape[0], 2 * x.shape[0])[:, None],
    "numbers down": lambda x: x + torch.arange(x.shape[0] - 1, -1, -1)[:, None],
    "parts of 32": lambda x: torch.cat([p + i for i, p in enumerate(x.split(32))]),
    "number of chunks": lambda x: x * len(x.chunk(4)),
    "literal expand": lambda x: x + V[None].expand(7, -1),
    "literal zeros": lambda x: x + torch.zeros(7, D),
    "literal slice": lambda x: x + TABLE[:7],
    "a table of n columns": lambda x: x + TABLE.T[:, : x.shape[0]].mean(1),
    "the table's last n": lambda x: x + TABLE[-x.shape[0] :],
    "the table's next n": lambda x: x + TABLE[x.shape[0] : 2 * x.shape[0]],
    "the table after 3": lambda x: x + TABLE[3 : x.shape[0]].mean(0),
    "every nth": lambda x: x + TABLE[:: x.shape[0]].mean(0),
    "narrow": lambda x: x + TABLE.narrow(0, 3, x.shape[0]).mean(0),
    "linspace": lambda x: x + torch.linspace(0, 1, x.shape[0])[:, None],
    "bmm of n": lambda x: (torch.ones(1, 1, x.shape[0]) @ torch.ones(1, x.shape[0], 1)).view(1, 1) + x,
    "repeated by n": lambda x: x + V.repeat(x.shape[0]).sum(),
    "tiled by n": lambda x: x + V.tile(x.shape[0], 1).sum(0),
    "lines of a table for rows twice": lambda x: (
        (torch.cat([x, x]) + TABLE.gather(1, torch.cat([x[:, :1], x[:, :1]]).gt(0).long())).view(2, -1, D).sum(0)
    ),
    "cumsum of ones": lambda x: x + torch.ones(x.shape[0], 1).cumsum(0),
}
"""Programs whose path, or whose numbers, follow the number of rows."""


def _through_alias(x: Tensor) -> Tensor:
    own = torch.arange(x.shape[0])
    own.view(-1).mul_(0)
    return x[own]


def _through_data(x: Tensor) -> Tensor:
    own = torch.arange(x.shape[0])
    own.data.zero_()
    return x[own]


def _view_written(x: Tensor) -> Tensor:
    y = x * 1
    z = y.view(-1)
    z[0] = z[-1]
    return y


def _data_set(x: Tensor) -> Tensor:
    y = x * 1
    y.data = x.flip(0)
    return y


def _set(x: Tensor) -> Tensor:
    y = x * 1
    y.set_(x.flip(0))
    return y


def _thread(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return x + pool.submit(lambda: x.mean(0)).result()


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x - x.mean(0)


def _backward(x: Tensor) -> Tensor:
    with torch.enable_grad():
        w = V.clone().requires_grad_()
        (x * w).sum().backward()
    assert w.grad is not None
    return x + w.grad


class Subclass(Tensor):
    """Looks like a tensor, and does as it likes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum(0))
        return x * 2


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x[-1])
        return x + 1


class Norm(nn.Module):
    """Its answer does not show what it does to its state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        return x * 2


class Table(nn.Module):
    def __init__(self, *, adds: bool = False) -> None:
        super().__init__()
        self.adds = adds
        self.register_buffer("table", torch.zeros(D, D))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        if self.adds:
            self.table.index_add_(0, i, x)
            return x
        self.table[i] = x
        return self.table[i]


def _last_event(x: Tensor, i: Tensor) -> Tensor:
    table = torch.zeros(D, D)
    table[i] = x
    return table[i]


def _fair_share(x: Tensor) -> Tensor:
    gate, expert = torch.softmax(x @ ROUTER, -1).max(-1)
    chosen = (expert[:, None] == torch.arange(E)).float()
    capacity = (chosen.sum(0).mean() * 1.25).ceil()
    keep = ((chosen.cumsum(0) * chosen).sum(1) <= capacity).float() * gate
    return x + (torch.einsum("nd,edo->neo", x, EXPERTS) * chosen[..., None]).sum(1) * keep[:, None]


@torch.library.custom_op("graphdispatch_attacks::branch", mutates_args=())
def _branch(x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] == 3 else x * 1


@torch.library.custom_op("graphdispatch_attacks::centre_", mutates_args={"x"})
def _centre_(x: Tensor) -> None:
    x.sub_(x.mean(0))


def _centred(x: Tensor) -> Tensor:
    y = x * 1
    _centre_(y)
    return y


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.size(0) == 3 else x


def _trace() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(lambda x: x - x.mean(0), torch.randn(5, D))


MIXES: dict[str, Any] = {
    "rows by a written index": _through_alias,
    "rows by an index written through data": _through_data,
    "rows by a narrow index": lambda x: x[torch.arange(x.shape[0]).to(torch.int8).long() * 0],
    "rows by flags": lambda x: x[torch.arange(x.shape[0]).bool()],
    "every row twice": lambda x: x[torch.arange(x.shape[0]) // 2],
    "the next row": lambda x: x[(torch.arange(x.shape[0]) + 1) % x.shape[0]],
    "rotated": lambda x: torch.rot90(x, 2),
    "last row first": lambda x: torch.cat([x[-1:], x[:-1]]),
    "strided": lambda x: x.repeat(2, 1).as_strided(x.shape, (D, 1), D),
    "flat roll": lambda x: x.view(-1).roll(1).view_as(x),
    "columns for rows": lambda x: x.T.contiguous().view(x.shape[0], -1),
    "a slice from the second row": lambda x: (lambda y: y[1 : 1 + len(x)] + x)(torch.cat([x, x])),
    "a slice of interleaved rows": lambda x: x.repeat_interleave(2, 0)[: len(x)] + x,
    "parts of interleaved rows": lambda x: torch.add(*x.repeat_interleave(2, 0).split(len(x))),
    "quantile over rows": lambda x: x.clamp(max=torch.quantile(x.abs(), 0.9, dim=0)),
    "turned in place": lambda x: (x * 1).unsqueeze_(0).mean(1) + x,
    "two copies of three": lambda x: torch.cat([x, x * 2, -x])[: 2 * len(x)] * 1,
    "halves turned": lambda x: torch.cat(x.chunk(2)[::-1]),
    "pairs of a doubled batch": lambda x: torch.cat([x, x]).view(x.shape[0], 2, D).sum(1),
    "pairs of a repeated batch": lambda x: x.repeat(2, 1).view(x.shape[0], 2, D).sum(1),
    "halves of interleaved rows": lambda x: x.repeat_interleave(2, 0).view(2, x.shape[0], D).sum(0),
    "pairs of a stack": lambda x: torch.stack([x, x * 2]).reshape(x.shape[0], 2, D).sum(1),
    "differences": lambda x: torch.diff(x, dim=0, prepend=x[:1]),
    "windows": lambda x: F.pad(x, (0, 0, 1, 0)).unfold(0, 2, 1).sum(-1),
    "shifted by padding": lambda x: F.pad(x, (0, 0, 1, 0))[:-1],
    "sorted rows": lambda x: x.sort(0).values,
    "taken along": lambda x: torch.take_along_dim(x, x.argsort(0), 0),
    "take": lambda x: x.take(torch.arange(D)),
    "put": lambda x: (x * 1).put_(torch.tensor([0]), x[:1, 0]),
    "masked scatter": lambda x: x.masked_scatter(x > 0, x * 2),
    "masked select": lambda x: x + x.masked_select(x > 0).sum(),
    "nonzero": lambda x: x + x.nonzero().sum(),
    "median": lambda x: x - x.median(0).values,
    "quantile": lambda x: x - x.quantile(0.5, 0),
    "softmax over rows": lambda x: x.T.softmax(-1).T,
    "normalized over rows": lambda x: F.normalize(x, dim=0),
    "layer norm of all": lambda x: F.layer_norm(x, x.shape),
    "instance norm over rows": lambda x: F.instance_norm(x.T[None])[0].T,
    "group norm over rows": lambda x: F.group_norm(x.T[None], 2)[0].T,
    "distances": lambda x: x + torch.cdist(x, x).mean(1, keepdim=True),
    "pairwise distances": lambda x: x + F.pdist(x).mean(),
    "covariance": lambda x: x @ torch.cov(x.T),
    "outer": lambda x: x + torch.outer(x[:, 0], x[:, 0]).mean(1, keepdim=True),
    "tensordot": lambda x: x @ torch.tensordot(x, x, dims=([0], [0])),
    "qr": lambda x: torch.linalg.qr(x)[0],
    "svd": lambda x: torch.linalg.svd(x, full_matrices=False)[0],
    "unique": lambda x: x + torch.unique(x).sum(),
    "bincount": lambda x, i: x + torch.bincount(i, minlength=D)[:D],
    "searchsorted": lambda x: x + torch.searchsorted(x[:, 0].sort().values, x[:, 1].contiguous())[:, None],
    "largest of all": lambda x: x / x.topk(1, 0).values,
    "clamped to the largest": lambda x: x.clamp(max=x.max() - 1),
    "above the mean": lambda x: x * (x > x.mean()),
    "where any": lambda x: torch.where((x > 2).any(), x, x + 1),
    "a loss": lambda x: x + F.mse_loss(x, x * 2),
    "cross entropy": lambda x, i: x + F.cross_entropy(x, i),
    "histogram": lambda x: x + torch.histc(x, 4, -1, 1).mean(),
    "buckets of rows": lambda x: x + torch.bucketize(x, x[:, 0].sort().values),
    "cumsum into memory": lambda x: torch.cumsum(x, 0, out=torch.empty_like(x)),
    "a foreach": lambda x: torch._foreach_mul([x], [x.mean(0)])[0],
    "a view written": _view_written,
    "data set": _data_set,
    "storage set": _set,
    "dlpack": lambda x: x + torch.from_dlpack(x.flip(0)),
    "storage": lambda x: x + float(x.untyped_storage()[0]),
    "a list": lambda x: x + x.tolist()[0][0],
    "thread": _thread,
    "inference mode": _inference,
    "backward": _backward,
    "a subclass": lambda x: (x.as_subclass(Subclass) - x.as_subclass(Subclass).mean(0)).as_subclass(Tensor),
    "vmap and a size": lambda x: torch.func.vmap(lambda r: r * r.shape[0], in_dims=1, out_dims=1)(x),
    "gradient of a mean": lambda x: x + torch.func.grad(lambda y: y.mean(0).pow(2).sum())(x),
    "sparse": lambda x: torch.sparse.mm(x.T.to_sparse(), x)[:1] + x,
    "dynamic quantization": lambda x: torch.quantize_per_tensor_dynamic(x, torch.quint8, False).dequantize(),
    "random rows": lambda x: x * torch.rand(x.shape[0], 1),
    "dropout": lambda x: F.dropout(x),
    "permutation": lambda x: x[torch.randperm(x.shape[0])],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "a script": torch.jit.script(Scripted()),
    "a trace": _trace(),
    "a size in a custom operator": _branch,
    "a custom operator that writes": _centred,
    "rows as a sequence": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "rows as time": lambda x: GRU(x[:, None])[0][:, 0],
    "rows as channels": lambda x: F.conv1d(x[None], torch.ones(x.shape[0], x.shape[0], 1))[0],
    "state of a sum": Count(),
    "state of the last row": Last(),
    "state of a norm": Norm(),
    "state by name": Table(),
    "state by name, added": Table(adds=True),
    "the last event of each": _last_event,
    "a fair share": _fair_share,
    "rows to one place": lambda x, i: torch.zeros(D).index_put((i,), x[:, 0])[i][:, None] + x,
    "scattered to one place": lambda x, i: x + torch.zeros(D).scatter_add(0, i, x[:, 0])[i][:, None],
    "added to one place": lambda x, i: x + torch.zeros(D, D).index_put((i,), x, accumulate=True)[i],
    "embedding of rows": lambda x, i: F.embedding(i.clamp(max=1), x),
    "bag": lambda x, i: x + F.embedding_bag(i, TABLE, torch.tensor([0])),
    "bags of others' parts": lambda x, i: x + F.embedding_bag(_pairs(i).T.reshape(-1), TABLE, _starts(i)),
    "bags with a last": lambda x, i: F.embedding_bag(
        _pairs(i).reshape(-1),
        TABLE,
        torch.cat([_starts(i), 2 * len(i) * torch.ones(1, dtype=torch.long)]),
        include_last_offset=True,
    ),
    "sizes of bags": lambda x, i: torch.ops.aten._embedding_bag(TABLE, _pairs(i).reshape(-1), _starts(i))[1],
    "rows as shared heads": lambda x: F.scaled_dot_product_attention(
        torch.cat([x, x])[None, :, None], x[None, :, None], x[None, :, None], enable_gqa=True
    ).view(2, x.shape[0], D)[0],
    "rows as time of a layer": lambda x: LSTM(x[:, None])[0][:, 0],
    "one line for all": lambda x: x.gather(1, torch.zeros(1, D, dtype=torch.long)) + x,
    "slopes of rows": lambda x: F.prelu(x[None], x[:, 0])[0],
    "added by an order": lambda x: x + torch.zeros(200, D).index_add(0, x[:, 0].argsort(), x)[:1],
    "put by an order": lambda x: x.index_put((x[:, 0].argsort(),), x * 2),
    "a table by an order": lambda x: x + TABLE.index_select(0, x[:, 0].argsort()),
    "parts put together again": lambda x: torch.stack(x.unbind(0)[::-1]),
    "weights of rows": lambda x: F.linear(x, x[:6]),
    "an output transposed and sized": lambda x: (x.T.contiguous() * 1).view(-1)[: x.numel()].view(x.shape),
}
"""Programs that mix rows."""

GRU = nn.GRU(D, D).eval()
LSTM = nn.LSTM(D, D).eval().requires_grad_(False)


def _pairs(i: Tensor) -> Tensor:
    """Two numbers for each row."""
    return torch.stack([i, i + 1], 1)


def _starts(i: Tensor) -> Tensor:
    """Where each row's two numbers begin."""
    return torch.arange(len(i)) * 2


def _routed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Flat choices, and the order that sorts them."""
    chosen = (x @ ROUTER).topk(K, -1).indices.reshape(-1)
    return chosen, chosen.argsort()


def _bounds(chosen: Tensor) -> Tensor:
    return torch.histc(chosen.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)


def _grouped(x: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
    """Expert products of sorted rows; what follows is up to the program."""
    return F.grouped_mm(x[order // K].bfloat16(), EXPERTS.bfloat16(), offs=bounds).float()


def _back(x: Tensor, y: Tensor, order: Tensor) -> Tensor:
    return y[order.argsort()].view(x.shape[0], K, D).sum(1)


def _capacity_of_places(x: Tensor) -> Tensor:
    _, order = _routed(x)
    return x * (order.argsort().view(-1, K)[:, :1] < 4)


def _capacity_of_sorted(x: Tensor) -> Tensor:
    chosen, order = _routed(x)
    kept = torch.arange(order.shape[0]) < 8
    return _back(x, _grouped(x, order, _bounds(chosen)) * kept[:, None], order)


def _load_as_data(x: Tensor) -> Tensor:
    chosen, _ = _routed(x)
    return x * torch.histc(chosen.float(), E, 0, E - 1)[0]


def _bounds_as_data(x: Tensor) -> Tensor:
    chosen, _ = _routed(x)
    return x + _bounds(chosen)[-2]


def _groups_of_another_choice(x: Tensor) -> Tensor:
    _, order = _routed(x)
    other, _ = _routed(x * W[0])
    return _back(x, _grouped(x, order, _bounds(other)), order)


def _groups_of_a_part(x: Tensor) -> Tensor:
    both = (x @ ROUTER).topk(K, -1).indices
    order = both.reshape(-1).argsort()
    return _back(x, _grouped(x, order, _bounds(both[:, :1].reshape(-1))), order)


def _groups_shifted(x: Tensor) -> Tensor:
    chosen, order = _routed(x)
    return _back(x, _grouped(x, order, (_bounds(chosen) - 1).clamp(min=0)), order)


def _groups_after_a_write(x: Tensor) -> Tensor:
    chosen, order = _routed(x)
    chosen.clamp_(max=1)
    return _back(x, _grouped(x, order, _bounds(chosen)), order)


def _groups_downwards(x: Tensor) -> Tensor:
    chosen, _ = _routed(x)
    order = chosen.argsort(descending=True)
    return _back(x, _grouped(x, order, _bounds(chosen)), order)


def _groups_unsorted(x: Tensor) -> Tensor:
    chosen, _ = _routed(x)
    own = torch.arange(chosen.shape[0])
    return _grouped(x, own, _bounds(chosen)).view(x.shape[0], K, D).sum(1)


def _never_put_back(x: Tensor) -> Tensor:
    chosen, order = _routed(x)
    return _grouped(x, order, _bounds(chosen)).view(x.shape[0], K, D).sum(1)


def _put_back_by_the_order(x: Tensor) -> Tensor:
    chosen, order = _routed(x)
    return _grouped(x, order, _bounds(chosen))[order].view(x.shape[0], K, D).sum(1)


def _put_back_by_another(x: Tensor) -> Tensor:
    chosen, order = _routed(x)
    other = _routed(x * W[0])[1]
    return _grouped(x, order, _bounds(chosen))[other.argsort()].view(x.shape[0], K, D).sum(1)


def _added_in_another_order(x: Tensor) -> Tensor:
    chosen, order = _routed(x)
    return _back(x, _grouped(x, order, _bounds(chosen)) + x.repeat_interleave(K, 0), order)


def _answer_in_order(x: Tensor) -> Tensor:
    return x[x[:, 0].argsort()] * 2


def _smallest_in_order(x: Tensor) -> Tensor:
    return x + x[x[:, 0].argsort()][:1]


def _alias_of_the_places(x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    places = torch.empty_like(order)
    alias = places.view(-1)
    places[order] = torch.arange(x.shape[0])
    return x[alias]


def _groups_by_an_argument(x: Tensor, i: Tensor) -> Tensor:
    order = i.argsort()
    bounds = torch.histc(i.float(), D, 0, D - 1).cumsum(0, dtype=torch.int32)
    weights = torch.ones(D, D, D, dtype=torch.bfloat16)
    return F.grouped_mm(x[order].bfloat16(), weights, offs=bounds)[order.argsort()].float()


def _ranks(x: Tensor) -> Tensor:
    """Where each row lies among all, as data."""
    return x[:, 0].argsort().argsort()


def _ranks_as_divisor(x: Tensor) -> Tensor:
    return x[:, 0] // _ranks(x)


def _ranks_in_bags(x: Tensor) -> Tensor:
    return F.embedding_bag(x.reshape(-1).argsort().argsort(), TABLE, torch.arange(0, x.shape[0] * D, D))


def _ranks_with_flags(x: Tensor) -> Tensor:
    return torch.index_put(_ranks(x), (x[:, 0] > 99,), torch.tensor(0))


def _ranks_put_back(x: Tensor) -> Tensor:
    order, out = x[:, 0].argsort(), torch.empty(x.shape[0], dtype=torch.int64)
    out[order] = _ranks(x)[order]
    return out


def _ranks_among_parts(x: Tensor) -> Tensor:
    return torch.stack([_ranks(x), torch.zeros_like(x[:, 0], dtype=torch.int64)], 1)


def _groups_of_numbers_twice(x: Tensor) -> Tensor:
    """Each row's first place stands for all of its places, so that the bounds are those of other rows."""
    n, chosen = x.shape[0], (x @ ROUTER).topk(K, -1).indices.reshape(-1)
    order = chosen.argsort()
    twice = torch.arange(n * K).view(n, K)[:, :1].expand(n, K).reshape(-1)[order]
    bounds = torch.histc(chosen[twice].float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
    y = F.grouped_mm(x[order // K].bfloat16(), EXPERTS.bfloat16(), offs=bounds).float()
    return y[order.argsort()].view(n, K, D).sum(1)


def _put_back_by_numbers_twice(x: Tensor) -> Tensor:
    """The places are said to be those of each row's first element."""
    n, chosen = x.shape[0], (x @ ROUTER).topk(K, -1).indices.reshape(-1)
    order, places = chosen.argsort(), torch.empty(n * K, dtype=torch.int64)
    places[order] = torch.arange(n * K).view(n, K)[:, [1, 0]].reshape(-1)
    return x[order // K][places].view(n, K, D).sum(1)


SORTED: dict[str, Any] = {
    fn.__name__[1:].replace("_", " "): fn
    for fn in (
        *(_capacity_of_places, _capacity_of_sorted, _load_as_data, _bounds_as_data, _groups_of_another_choice),
        *(
            _groups_of_a_part,
            _groups_shifted,
            _groups_after_a_write,
            _groups_downwards,
            _groups_unsorted,
            _never_put_back,
        ),
        *(_put_back_by_the_order, _put_back_by_another, _added_in_another_order, _answer_in_order, _smallest_in_order),
        *(_alias_of_the_places, _groups_by_an_argument),
        *(_ranks_as_divisor, _ranks_in_bags, _ranks_with_flags, _ranks_put_back, _ranks_among_parts),
        *(_groups_of_numbers_twice, _put_back_by_numbers_twice),
    )
}
"""Programs that sort rows by expert, and do something else with the order."""

_IDS = frozenset(
    {
        "bincount",
        "cross entropy",
        "state by name",
        "state by name, added",
        "the last event of each",
        "rows to one place",
    }
    | {"scattered to one place", "added to one place", "embedding of rows", "bag", "groups by an argument"}
    | {"bags of others' parts", "bags with a last", "sizes of bags"}
)

ATTACKS: dict[str, tuple[Any, Any]] = {
    name: (program, _rows_and_ids if name in _IDS else _rows) for name, program in (PATHS | MIXES | SORTED).items()
}
