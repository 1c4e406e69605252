"""Programs that a run must refuse: each mixes rows, or takes another path for some number of rows.

``REFUSED`` maps names to a callable and what makes its batch. Of an operator on its own, torch's samples in
``test_op_samples.py`` say that no rule is wrong; here is what hides from rules: sizes that become numbers of Python,
memory, places that a tensor names, state, and rows in another order.
"""

import copy
import operator
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from .independent import EXPERTS, FIXED, ONE, TABLE, D, K, V, W, bounds_of, chosen_of, mixture, starts_of, with_next
from .runs import of_batches, put, rows, rows_and_ids, rows_and_mask

F = nn.functional


@torch.library.custom_op("graphdispatch_refused::branch", mutates_args=())
def branch(x: Tensor) -> Tensor:
    """Takes another path for three rows."""
    return x + 1 if x.shape[0] == 3 else x * 1


@torch.library.custom_op("graphdispatch_refused::mix", mutates_args=())
def mix(x: Tensor) -> Tensor:
    """All rows without their mean."""
    return x - x.mean(0)


@torch.library.custom_op("graphdispatch_refused::centre_", mutates_args={"x"})
def centre_(x: Tensor) -> None:
    """The same in place."""
    x.sub_(x.mean(0))


# Numbers of Python that are made of sizes.


def tried(of: Callable[[Any], Any]) -> Any:
    """A program that goes another way where ``of(n)`` raises."""

    def program(x: Tensor) -> Tensor:
        try:
            of(x.shape[0])
        except Exception:
            return x + 1
        return x

    return program


def where(of: Callable[[Any], Any]) -> Any:
    """A program that goes another way where ``of(n)`` is true."""
    return lambda x: x + 1 if of(x.shape[0]) else x


def is_nested_int(n: Any) -> Any:
    """Named as what torch reads of a node."""
    return n.node


def viewed(x: Tensor) -> Tensor:
    """Only some numbers of rows can be seen so."""
    try:
        x.view(4, 2, D)
    except RuntimeError:
        return x
    return x + 1


def handed_over(x: Tensor) -> Tensor:
    """Torch's modes get the function, and see nothing of what it does."""
    if has_torch_function_unary(x):
        return handle_torch_function(handed_over, (x,), x)  # type: ignore[no-any-return]
    return x + 1 if x.shape[0] == 3 else x * 2


class Weight(NamedTuple):
    """Is no tensor, and has a product of its own."""

    of: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, weight = args
        return x @ weight.of + (x.shape[0] == 3)


def kept_by_autograd(x: Tensor) -> Tensor:
    """A node of autograd has the size of what it was made of."""
    with torch.enable_grad():
        rows = V.clone().requires_grad_().expand(x.shape[0], D).sum(1)
    return x + 1 if rows.grad_fn._saved_self_sym_sizes[0] == 3 else x  # type: ignore[union-attr]


def iterated(x: Tensor) -> Tensor:
    """A loop over rows."""
    total = torch.zeros(D)
    for _ in x:
        total = total + V
    return x + total


PATHS: dict[str, Any] = {
    "if n == 3": where(lambda n: n == 3),
    "n in a set": where(lambda n: n in {3, 9}),
    "text of n": where(lambda n: str(n) == "3"),
    "text by a format": where(lambda n: f"{n:03d}" == "003"),
    "deepcopy of n": where(lambda n: copy.deepcopy([n]) == [3]),
    "n beside NumPy's": where(lambda n: np.int64(3) == n),
    "bool(n - 3)": where(lambda n: n - 3),
    "n % 2": where(lambda n: n % 2),
    "divmod": lambda x: x * (1 + divmod(x.shape[0], 3)[1]),
    "negative power": where(lambda n: n**-1 == 1 / 3),
    "cube root": where(lambda n: n ** (1 / 3) == 3.0 or n**0.3 == 27**0.3),
    "powers that overflow": lambda x: x * min(2.0 ** (x.shape[0] * 100 - 600), 3.0),
    "power of minus one": lambda x: x * (-1) ** x.shape[0],
    "a product that overflows": where(lambda n: n * 2**62 == 3 * 2**62),
    "int of a quotient": lambda x: x * int(x.shape[0] / 3),
    "index of n": lambda x: x * operator.index(x.shape[0]),
    "max(n, 5)": lambda x: x / max(x.shape[0], 5),
    "divided by n - 3": tried(lambda n: 1 // (n - 3)),
    "a node": tried(is_nested_int),
    "caught view": viewed,
    "numel": lambda x: x + 1 if x.numel() == 3 * D else x,
    "stride of a transpose": lambda x: x + 1 if x.t().contiguous().stride(0) == 3 else x,
    "storage offset": lambda x: x + x.T[:, x.shape[0] - 1 :].storage_offset(),
    "is_same_size": lambda x: x + 1 if torch.is_same_size(x, torch.empty(3, D)) else x,
    "shape == tuple": lambda x: x + 1 if x.shape == (3, D) else x,
    "unpacked shape": lambda x: (lambda n, d: x + 1 if d * n == 3 * D else x)(*x.shape),
    "count of a shape": lambda x: x * x.shape.count(3),
    "shape of a product": lambda x: x + 1 if (x.mT @ x).shape[0] == 3 or (x @ x.mT).shape[0] == 3 else x,
    "shape of an expanded mean": lambda x: x + 1 if x.sum(1, keepdim=True).expand(-1, 4).shape[0] == 3 else x,
    "cross along the first three": lambda x: torch.cross(x[:, :3], x[:, 3:6]),
    "an operator for the first three": lambda x: torch.ops.aten.cross.default(x[:, :3], x[:, 3:6]),
    "distances of many rows": lambda x: torch.cdist(x, W),
    "number of chunks": lambda x: x * len(x.chunk(4)),
    "parts of 32": lambda x: torch.cat([p + i for i, p in enumerate(x.split(32))]),
    "loop over rows": iterated,
    "a function handed to modes": handed_over,
    "a function of another class": lambda x: torch.matmul(x, Weight(W)),  # type: ignore[arg-type]
    "size that autograd keeps": kept_by_autograd,
    "size of a subclass": lambda x: x + 1 if x.as_subclass(nn.Buffer).shape[0] == 3 else x,
    "size in a custom operator": branch,
    "vmap and a size": lambda x: torch.func.vmap(lambda r: r * r.shape[0], in_dims=1, out_dims=1)(x),
}
"""Programs whose path in Python follows the number of rows."""

NUMBERS: dict[str, Any] = {
    "x / n": lambda x: x / x.shape[0],
    "tensor of n": lambda x: x + torch.tensor(x.shape[0]),
    "_shape_as_tensor": lambda x: x * torch._shape_as_tensor(x)[0].clamp(min=4),
    "new_full of n": lambda x: x + x.new_full((1,), x.shape[0]),
    "alpha of n": lambda x: torch.add(x, x, alpha=x.shape[0]),
    "every second number": lambda x: x + TABLE[torch.arange(0, x.shape[0], 2)].mean(0),
    "numbers down": lambda x: x + torch.arange(x.shape[0] - 1, -1, -1)[:, None],
    "linspace": lambda x: x + torch.linspace(0, 1, x.shape[0])[:, None],
    "literal expand": lambda x: x + V[None].expand(7, -1),
    "a size for a literal": lambda x: x @ W.view(x.shape[0] + 1, -1),
    "literal slice": lambda x: x + TABLE[:7],
    "literal view": lambda x: (x.view(7, -1) if x.numel() % 7 == 0 else x).reshape(x.shape),
    "broadcast to seven": lambda x: x + torch.zeros(torch.broadcast_shapes(x.shape, (7, D))),
    "table[n]": lambda x: x + TABLE[x.shape[0]],
    "a table of n columns": lambda x: x + TABLE.T[:, : x.shape[0]].mean(1),
    "the table's last n": lambda x: x + TABLE[-x.shape[0] :],
    "the table's next n": lambda x: x + TABLE[x.shape[0] : 2 * x.shape[0]],
    "the table after 3": lambda x: x + TABLE[3 : x.shape[0]].mean(0),
    "every nth": lambda x: x + TABLE[:: x.shape[0]].mean(0),
    "a part as long by chance": lambda x: x + torch.cat([x, x]).split([x.shape[0], 14 - x.shape[0]])[0],
    "bmm of n": lambda x: (torch.ones(1, 1, x.shape[0]) @ torch.ones(1, x.shape[0], 1)).view(1, 1) + x,
    "repeated by n": lambda x: x + V.repeat(x.shape[0]).sum(),
    "cumsum of ones": lambda x: x + torch.ones(x.shape[0], 1).cumsum(0),
    "eye": lambda x: x + torch.eye(x.shape[0]).flip(0)[:, :1],
    "lines of a table for rows twice": lambda x: (
        (torch.cat([x, x]) + TABLE.gather(1, torch.cat([x[:, :1], x[:, :1]]).gt(0).long())).view(2, -1, D).sum(0)
    ),
}
"""Programs whose numbers follow the number of rows."""

# What one row gets of another.


def in_place(of: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A program that does something to a copy of its batch."""

    def program(x: Tensor) -> Tensor:
        y = x * 1
        of(y)
        return y

    return program


def numbered(of: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A program that takes rows by the numbers of rows, after something was done to these."""

    def program(x: Tensor) -> Tensor:
        own = torch.arange(x.shape[0])
        of(own)
        return x[own]

    return program


def in_thread(x: Tensor) -> Tensor:
    """A thread computes a mean."""
    with ThreadPoolExecutor(1) as pool:
        return x + pool.submit(lambda: x.mean(0)).result()


class Subclass(Tensor):
    """Looks like a tensor, and does as it likes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Scripted(nn.Module):
    """Takes another path for three rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.size(0) == 3 else x


def traced() -> Any:
    """A trace of TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(lambda x: x - x.mean(0), torch.randn(5, D))


def capacity(x: Tensor) -> Tensor:
    """Experts take three rows at most, those that come first."""
    scores = F.softmax(x @ W[:, :2], -1)
    best = (scores == scores.amax(-1, keepdim=True)).float()
    place = (best.cumsum(0) - 1) * best
    return x + torch.einsum("ne,nd,edk->nk", best * (place < 3), x, EXPERTS[:2])


MIXES: dict[str, Any] = {
    "mean": lambda x: x - x.mean(0),
    "an error of all": lambda x: x + F.mse_loss(x, x * 2),
    "batch norm": nn.BatchNorm1d(D),
    "attention over rows": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0],
    "convolution over rows": lambda x: F.conv1d(x.T[None], torch.ones(D, D, 3), padding=1)[0].T,
    "layers over rows as time": lambda x: GRU(x[:, None])[0][:, 0] + LSTM(x[:, None])[0][:, 0],
    "weights of rows": lambda x: F.linear(x, x[:6]),
    "distances": lambda x: x + torch.cdist(x, x).mean(1, keepdim=True),
    "nonzero": lambda x: x + x.nonzero().sum(),
    "capacity": capacity,
    "wrong reshape": lambda x: x.T.reshape(x.shape),
    "halves turned": lambda x: x.reshape(2, -1).flip(0).reshape(x.shape),
    "parts by tensor_split": lambda x: torch.cat([p - p.amax(0) for p in x.tensor_split(2)]),
    "shifted by padding": lambda x: F.pad(x, (0, 0, 1, 0))[:-1],
    "rows turned round": lambda x: torch.stack([r * (i + 1) for i, r in enumerate(reversed(x.unbind(0)))]),
    "strided": lambda x: x.repeat(2, 1).as_strided(x.shape, (D, 1), D),
    "windows beyond a row": lambda x: torch.cat([x, x]).as_strided((*x.shape, 2), (D, 1, 1)),
    "windows of later rows": lambda x: torch.cat([x, x]).as_strided((x.shape[0], D - 1, 2), (D, 1, 1), D),
    "a slice of interleaved rows": lambda x: x.repeat_interleave(2, 0)[: len(x)] + x,
    "two copies of three": lambda x: torch.cat([x, x * 2, -x])[: 2 * len(x)] * 1,
    "pairs of a doubled batch": lambda x: torch.cat([x, x]).view(x.shape[0], 2, D).sum(1),
    "halves of interleaved rows": lambda x: x.repeat_interleave(2, 0).view(2, x.shape[0], D).sum(0),
    "rows as shared heads": lambda x: F.scaled_dot_product_attention(
        torch.cat([x, x])[None, :, None], x[None, :, None], x[None, :, None], enable_gqa=True
    ).view(2, x.shape[0], D)[0],
    "one line for all": lambda x: x.gather(1, torch.zeros(1, D, dtype=torch.long)) + x,
    "channels moved of rows": lambda x: F.channel_shuffle(x.repeat_interleave(2, 0)[None, :, None, None], 2),
    "slopes of rows": lambda x: F.prelu(x[None], x[:, 0])[0],
    "triu @ x": lambda x: torch.ones(x.shape[0], x.shape[0]).triu() @ x,
    "random rows": lambda x: x * torch.rand(x.shape[0], 1),
    "dropout": F.dropout,
    "thread": in_thread,
    "gradient of a mean": lambda x: x + torch.func.grad(lambda y: y.mean(0).pow(2).sum())(x),
    "vmap over columns": lambda x: torch.func.vmap(lambda r: r - r.max())(x.T.contiguous()).T,
    "custom operator": mix,
    "custom operator that writes": in_place(centre_),
    "a subclass": lambda x: (x.as_subclass(Subclass) - x.as_subclass(Subclass).mean(0)).as_subclass(Tensor),
    "a mean as a parameter": lambda x: x - nn.Parameter(x.mean(0), requires_grad=False),
    "a script": torch.jit.script(Scripted()),
    "a trace": traced(),
    "written row": in_place(lambda y: y[0].copy_(y[-1])),
    "written data": in_place(lambda y: y.data.sub_(y.data.mean(0))),
    "literal data": in_place(lambda y: setattr(y, "data", TABLE[:7] * 1)),
    "data set": in_place(lambda y: setattr(y, "data", y.flip(0))),
    "storage set": in_place(lambda y: y.set_(y.flip(0))),
    "turned in place": lambda x: (x * 1).unsqueeze_(0).mean(1) + x,
    "foreach": lambda x: torch._foreach_add([x], [x.mean(0).expand_as(x)])[0],
    "out=": lambda x: torch.cumsum(x, 0, out=torch.empty_like(x)),
    "out= that grows": lambda x: x + torch.sum(x, 0, out=torch.empty(0)),
    "apply_": in_place(lambda y: y.apply_(lambda number: number if abs(number) < 5 else 0.0)),
    "list": lambda x: x + x.tolist()[0][0],
    "address": lambda x: x * float(x.data_ptr() > 0),
    "storage": lambda x: x + float(x.untyped_storage()[0]),
    "DLPack": lambda x: x + torch.from_dlpack(x.flip(0)),
    "NumPy": lambda x: x + torch.from_numpy(x.numpy().mean(0)),
    "NumPy in place": in_place(lambda y: y.numpy().__isub__(y.numpy().mean(0))),
}
"""Programs in which a row gets something of others."""

# Places that a tensor names.


def ranks(x: Tensor) -> Tensor:
    """Where each row lies among all, which is a place and no data."""
    return x[:, 0].argsort().argsort()


BY_INDEX: dict[str, Any] = {
    "rows by a written index": numbered(lambda own: own.view(-1).mul_(0)),
    "rows by an index written through data": numbered(lambda own: own.data.zero_()),
    "rows by a narrow index": lambda x: x[torch.arange(x.shape[0]).to(torch.int8).long()],
    "rows by flags": lambda x: x[torch.arange(x.shape[0]).bool()],
    "every row twice": lambda x: x[torch.arange(x.shape[0]) // 2],
    "a row for all": lambda x: x + x.index_select(0, ONE),
    "flags of rows on a table": lambda x: put(torch.zeros(7, D), x[:, 0] > 0, 1.0)[:1] + x,
    "added by an order": lambda x: x + torch.zeros(200, D).index_add(0, x[:, 0].argsort(), x)[:1],
    "put by an order": lambda x: x.index_put((x[:, 0].argsort(),), x * 2),
    "columns put in an order": lambda x: put(x, (slice(None), FIXED), x[x[:, 0].argsort()][:, :3]),
    "a table by an order": lambda x: x + TABLE.index_select(0, x[:, 0].argsort()),
    "in order": lambda x: x[x[:, 0].argsort()] * 2,
    "the first in order": lambda x: x + x[x[:, 0].argsort()][:1],
    "ranks as data": lambda x: x[:, 0] // ranks(x),
    "ranks as a capacity": lambda x: x * (ranks(x) < 4)[:, None],
    "ranks in a narrow type": lambda x: x + ranks(x).to(torch.int8)[:, None],
    "ranks in bags": lambda x: F.embedding_bag(
        x.reshape(-1).argsort().argsort(), TABLE, torch.arange(0, x.shape[0] * D, D)
    ),
    "ranks with flags": lambda x: torch.index_put(ranks(x), (x[:, 0] > 99,), torch.tensor(0)),
    "ranks among parts": lambda x: torch.stack([ranks(x), torch.zeros_like(x[:, 0], dtype=torch.int64)], 1),
    "ranks put back": lambda x: (lambda order: places_of(order, ranks(x)[order]))(x[:, 0].argsort()),
    "ranks as values": lambda x: put(x.long(), (slice(None), ONE), ranks(x)),
    "ranks copied": lambda x: x.long().index_copy(1, ONE[None], ranks(x)[:, None]),
    "ranks as columns": lambda x: x[torch.arange(x.shape[0]), ranks(x).clamp(max=D - 1)],
    "a table by ranks": lambda x: TABLE[ranks(x)],
}
"""Programs that take or write rows at places."""

BY_IDS: dict[str, Any] = {
    "gathered": lambda x, i: x + x.gather(0, i[:, None].clamp(max=1).expand(-1, D)),
    "embedding of rows": lambda x, i: F.embedding(i.clamp(max=1), x),
    "index_reduce": lambda x, i: x + torch.zeros(D, D).index_reduce(0, i, x, "amax")[i],
    "added": lambda x, i: x + torch.zeros(D, D).index_add(0, i, x)[0],
    "to one place": lambda x, i: torch.zeros(D).index_put((i,), x[:, 0])[i][:, None] + x,
    "added to one place": lambda x, i: x + torch.zeros(D, D).index_put((i,), x, accumulate=True)[i],
    "the last of each": lambda x, i: put(torch.zeros(D, D), i, x)[i],
    "one loss": lambda x, i: x + F.cross_entropy(x, i),
    "bag": lambda x, i: x + F.embedding_bag(i, TABLE, torch.tensor([0])),
    "bags of others' parts": lambda x, i: x + F.embedding_bag(with_next(i).T.reshape(-1), TABLE, starts_of(i)),
    "bags with a last": lambda x, i: F.embedding_bag(
        with_next(i).reshape(-1), TABLE, torch.cat([starts_of(i), len(i) * ONE[None]]), include_last_offset=True
    ),
    "ranks overwritten": lambda x, i: ranks(x)[:, None].index_copy(1, ONE[None] * 0, i[:, None]),
    "groups by an argument": lambda x, i: F.grouped_mm(
        x[i.argsort()].bfloat16(), torch.ones(D, D, D, dtype=torch.bfloat16), offs=bounds_of(i, D)
    )[i.argsort().argsort()].float(),
}
"""The same by numbers that each row has."""

BY_MASK: dict[str, Any] = {
    "mask of any": lambda x, m: x * m.any(),
    "the longest length": lambda x, m: x * (torch.arange(5) < m.sum(1).max())[:, None],
}
"""Programs of sequences with a mask."""

# Rows that are sorted by expert, and something else that is done with the order.


def places_of(order: Tensor, numbers: Tensor, *, by_alias: bool = False) -> Tensor:
    """Where each element of an order lies, by numbers that say so."""
    places = torch.empty_like(order)
    alias = places.view(-1)
    places[order] = numbers
    return alias if by_alias else places


def counts(x: Tensor) -> Tensor:
    """How often each expert was chosen."""
    return torch.histc(chosen_of(x).float(), len(EXPERTS), 0, len(EXPERTS) - 1)


def twice(order: Tensor, *places: int) -> Tensor:
    """The numbers of each row's elements, each at the place of another one of its row."""
    return torch.arange(len(order)).view(-1, K)[:, list(places)].reshape(-1)


MIXTURES: dict[str, Any] = {
    "a capacity of sorted rows": lambda x: mixture(
        x, back=lambda y, order: (y * (torch.arange(len(order)) < 8)[:, None])[order.argsort()]
    ),
    "groups of another choice": lambda x: mixture(x, bounds=lambda *_: bounds_of(chosen_of(x * W[0]))),
    "groups of a part": lambda x: mixture(x, bounds=lambda chosen, _: bounds_of(chosen.view(-1, K)[:, 0])),
    "groups shifted": lambda x: mixture(x, bounds=lambda chosen, _: (bounds_of(chosen) - 1).clamp(min=0)),
    "groups after a write": lambda x: mixture(x, bounds=lambda chosen, _: bounds_of(chosen.clamp_(max=1))),
    "groups of numbers twice": lambda x: mixture(
        x, bounds=lambda chosen, order: bounds_of(chosen[twice(order, 0, 0)[order]])
    ),
    "groups downwards": lambda x: mixture(x, order=lambda chosen: chosen.argsort(descending=True)),
    "more choices than groups": lambda x: mixture(x, scores=lambda x: torch.cat([x @ W[:, :4], x[:, :2]], -1)),
    "counts of shifted bins": lambda x: mixture(x, bounds=lambda chosen, _: bounds_of(chosen, 4, low=-1)),
    "put back by the order": lambda x: mixture(x, back=lambda y, order: y[order]),
    "put back by another": lambda x: mixture(x, back=lambda y, _: y[chosen_of(x * W[0]).argsort().argsort()]),
    "put back by numbers twice": lambda x: mixture(x, back=lambda y, order: y[places_of(order, twice(order, 1, 0))]),
    "put back by an alias": lambda x: x[places_of(x[:, 0].argsort(), torch.arange(x.shape[0]), by_alias=True)],
    "something added in another order": lambda x: mixture(
        x, back=lambda y, order: (y + x.repeat_interleave(K, 0))[order.argsort()]
    ),
    "a quotient that numbers no rows": lambda x: mixture(x, row_of=lambda order: order // 3),
    "bounds as data": lambda x: x + bounds_of(chosen_of(x))[-2],
    "sums of counts": lambda x: (x * 2, counts(x).cumsum(0)),
    "windows of counts": lambda x: (x * 2, counts(x).unfold(0, 2, 2)),
    "bits of counts": lambda x: (x * 2, counts(x).view(torch.int32)),
    "bits of places": lambda x: (x * 2, ranks(x).view(torch.float64)),
    "diagonal of counts": lambda x: (x * 2, counts(x).view(2, 2).diagonal()),
    "pairs of counts": lambda x: (x * 2, torch.view_as_complex(counts(x).view(2, 2))),
    "one of the counts": lambda x: (x * 2, counts(x).unbind()[0]),
}

# State.


class State(nn.Module):
    """Writes its batch to state, by a function of both."""

    def __init__(self, write: Callable[[Tensor, Tensor], Any], *, reads: bool = False) -> None:
        super().__init__()
        self.write, self.reads = write, reads
        self.register_buffer("kept", torch.zeros(100, D))

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.kept, x)
        return x + self.kept[:3].sum(0) if self.reads else x * 2


STATE: dict[str, Any] = {
    "kept rows": State(lambda kept, x: kept[: x.shape[0]].copy_(x), reads=True),
    "a sum": State(lambda kept, x: kept[0].add_(x.sum(0))),
    "the last row": State(lambda kept, x: kept[0].copy_(x[-1])),
}
"""Programs whose state follows all rows."""

GRU = nn.GRU(D, D).eval()
LSTM = nn.LSTM(D, D).eval().requires_grad_(False)


REFUSED = {
    **of_batches(rows, path=PATHS, number=NUMBERS, mixes=MIXES, index=BY_INDEX, mixture=MIXTURES, state=STATE),
    **of_batches(rows_and_ids, ids=BY_IDS),
    **of_batches(rows_and_mask, mask=BY_MASK),
}
