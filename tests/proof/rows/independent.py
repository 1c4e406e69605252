"""Programs whose rows are independent, as models have them: a run proves it for all numbers of rows.

``INDEPENDENT`` maps names to a callable and what makes its batch.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .runs import Batch, D, by_rows, floats, ids, of_batches, put, rows, rows_and_ids, rows_and_mask, sequences

F = nn.functional

K = 2
"""How many experts a row chooses."""
_GENERATOR = torch.Generator().manual_seed(0)
W, V, TABLE, EXPERTS, ROUTER = (
    torch.randn(shape, generator=_GENERATOR) for shape in ((D, D), (D,), (200, D), (4, D, D), (D, 4))
)
FIXED, ONE = torch.tensor([0, 2, 4]), torch.tensor(2)

# Mixtures of experts: rows are sorted by expert, multiplied in groups, and put back.


def chosen_of(x: Tensor) -> Tensor:
    """The experts of all rows, one behind the other."""
    return (x @ ROUTER).topk(K, -1).indices.reshape(-1)


def bounds_of(chosen: Tensor, bins: int = len(EXPERTS), *, low: int = 0) -> Tensor:
    """Where the group of each expert ends."""
    return torch.histc(chosen.float(), bins, low, low + bins - 1).cumsum(0, dtype=torch.int32)


def mixture(
    x: Tensor,
    *,
    scores: Callable[[Tensor], Tensor] = lambda x: x @ ROUTER,
    order: Callable[[Tensor], Tensor] = torch.argsort,
    row_of: Callable[[Tensor], Tensor] = lambda order: order // K,
    bounds: Callable[[Tensor, Tensor], Tensor] = lambda chosen, _: bounds_of(chosen),
    back: Callable[[Tensor, Tensor], Tensor] = lambda y, order: y[order.argsort()],
) -> Tensor:
    """A sum of experts for each row; each of its parts may be another one."""
    chosen = scores(x).topk(K, -1).indices.reshape(-1)
    sorted_by = order(chosen)
    y = F.grouped_mm(x[row_of(sorted_by)].bfloat16(), EXPERTS.bfloat16(), offs=bounds(chosen, sorted_by)).float()
    return back(y, sorted_by).view(x.shape[0], K, D).sum(1)


def written_places(y: Tensor, order: Tensor) -> Tensor:
    """Put back as transformers does: the places are written by the order."""
    places = torch.empty_like(order)
    places[order] = torch.arange(order.size(0))
    return y[places]


def added_experts(x: Tensor) -> Tensor:
    """Each product is added to its row."""
    chosen = chosen_of(x)
    order = chosen.argsort(stable=True)
    row = torch.arange(x.shape[0])[:, None].expand(-1, K).reshape(-1)[order]
    y = F.grouped_mm(x[row].bfloat16(), EXPERTS.bfloat16(), offs=bounds_of(chosen)).float()
    return torch.zeros_like(x).index_add_(0, row, y)


MIXTURES: dict[str, Any] = {
    "put back by a second sort": mixture,
    "put back by written places": lambda x: mixture(x, back=written_places),
    "added": added_experts,
}

# Other models, and parts of them.


class Branches(nn.Module):
    """Checks that pass for all numbers of rows."""

    def forward(self, x: Tensor) -> Tensor:
        b, d = x.shape
        if b <= 0 or x.dim() != 2:
            raise ValueError
        assert x.numel() == b * d
        return x + (1 if b > 1 else 2)


def top_p(x: Tensor) -> Tensor:
    """The most probable elements of each row."""
    values, order = x.sort(-1, descending=True)
    is_beyond = values.softmax(-1).cumsum(-1) > 0.9
    return x.masked_fill(torch.zeros_like(x, dtype=torch.bool).scatter(1, order, is_beyond), -1e9)


def columns_set(x: Tensor) -> Tensor:
    """Columns of new memory are written."""
    y = torch.zeros(x.shape[0], D)
    y[:, 0] = x[:, 1]
    y[:, 1:3] += x[:, :2]
    return y


def product_into(x: Tensor) -> Tensor:
    """A result in memory that was made for it."""
    y = torch.empty_like(x)
    torch.mul(x, 2, out=y)
    return y + 1


def in_autocast(x: Tensor) -> Tensor:
    """A product in another type."""
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, W)


ROWS: dict[str, Any] = {
    "linear": lambda x: (x @ W).relu(),
    "mlp": nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(), nn.Linear(8, 2)).eval(),
    "checks": Branches(),
    "broadcast shapes": lambda x: x + torch.zeros(torch.broadcast_shapes(x.shape[:-1], (1,)))[:, None],
    "ones of n": lambda x: x * torch.ones(len(x), 1),
    "table of n rows": lambda x: x + TABLE[: x.shape[0]],
    "top-p": top_p,
    "topk": lambda x: x.topk(2, -1),
    "argmax": lambda x: x.argmax(-1),
    "cosine": lambda x: F.cosine_similarity(x, V[None]),
    "quantile of each row": lambda x: x.clamp(max=torch.quantile(x.abs(), 0.9, dim=1, keepdim=True)),
    "variance": lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5),
    "spectrum": lambda x: torch.fft.rfft(x, dim=-1).abs(),
    "spectra of windows": lambda x: torch.stft(x.repeat(1, 8), 8, 4, window=torch.ones(8), return_complex=True).abs(),
    "minimum of a constant": lambda x: torch.minimum(x, V),
    "guidance by slices": lambda x: (lambda y: y[: len(x)] - 2 * y[len(x) :])(torch.cat([x, x * 2]) @ W),
    "guidance by a split": lambda x: operator.sub(*(torch.cat([x, x * 2]) @ W).split(x.shape[0])),
    "guidance by sizes": lambda x: operator.sub(*torch.cat([x, x * 2, -x]).split([2 * len(x), len(x)])[0].chunk(2)),
    "guidance of three": lambda x: torch.cat([torch.cat([x, x * 2]) @ W, -x]).view(3, -1, D).sum(0),
    "guidance set by slices": lambda x: put(torch.cat([x, x * 2]), slice(0, len(x)), x).view(2, -1, D).sum(0),
    "guidance by repeat": lambda x: (x.repeat(2, 1) @ W).view(2, x.shape[0], D).sum(0),
    "beams": lambda x: (x.repeat_interleave(3, 0) @ W).view(x.shape[0], 3, D).amax(1),
    "numbers of rows in a narrow type": lambda x: x + torch.arange(x.shape[0]).to(torch.bfloat16)[:, None],
    "errors of each element": lambda x: F.mse_loss(x, x * 2, reduction="none").mean(1),
    "losses of each element": lambda x: F.huber_loss(x.sigmoid(), x * 0 + 1, reduction="none") * x,
    "as many zeros as ranks": lambda x: x + torch.zeros_like(x[:, 0].argsort().argsort())[:, None],
    "beside nothing": lambda x: torch.cat([torch.empty(0), x], 1),
    "among boundaries": lambda x: torch.searchsorted(TABLE[0].sort().values, x),
    "among its own": lambda x: torch.searchsorted(x.sort(-1).values, x),
    "numbers of rows of one part": lambda x: x[torch.arange(x.shape[0]) // 1],
    "dict": lambda x: {"a": x @ W, "b": (x + 1, x[:, 0])},
    "out=": product_into,
    "autocast": in_autocast,
    "columns set": columns_set,
    "columns selected": lambda x: x.index_select(1, FIXED),
    "columns copied": lambda x: x.index_copy(1, FIXED, x[:, :3]),
    "own rows selected": lambda x: x.index_select(0, torch.arange(x.shape[0])),
}


def with_next(i: Tensor) -> Tensor:
    """Two numbers for each row."""
    return torch.stack([i, i + 1], 1)


def starts_of(i: Tensor) -> Tensor:
    """Where each row's two numbers begin."""
    return torch.arange(0, 2 * len(i), 2)


WITH_IDS: dict[str, Any] = {
    "one-hot": lambda x, i: x * (i[:, None] == torch.arange(D)),
    "flags of rows set": lambda x, i: put(x, x[:, 0] > 0, 1.0),
    "columns set by a list": lambda x, i: put(x, (slice(None), FIXED), 1.0),
    "one column of each row set": lambda x, i: put(x, (torch.arange(x.shape[0]), i), x[:, 0]),
    "a loss for each row": lambda x, i: F.cross_entropy(x, i, reduction="none"),
    "columns gathered": lambda x, i: x.gather(1, i[:, None]),
    "columns scattered": lambda x, i: x.scatter(1, i[:, None], x[:, :1]),
    "bags": lambda x, i: x + F.embedding_bag(with_next(i).reshape(-1), TABLE, starts_of(i)),
}


def heads(x: Tensor) -> Tensor:
    """Attention whose heads lie beside the rows."""
    b, t, _ = x.shape
    q = (x @ W).view(b, t, 2, 4).transpose(1, 2).reshape(b * 2, t, 4)
    return (q @ q.mT).softmax(-1).view(b, 2, t, t).mean(1)


def rotated(x: Tensor) -> Tensor:
    """Positions by rotations."""
    angles = torch.arange(x.shape[1])[:, None] * torch.arange(4.0)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


SEQUENCES: dict[str, Any] = {
    "heads": heads,
    "causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "causal by a mask of its size": lambda x: (x @ x.mT).masked_fill(
        torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1e9
    ),
    "rotated": rotated,
    "a first token": lambda x: torch.cat([V.expand(x.shape[0], 1, -1), x], 1),
    "positions": lambda x: x + TABLE[torch.arange(x.shape[1])],
    "positions of rows": lambda x: x + F.embedding(torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1), TABLE),
    "tokens in one batch": lambda x: (x.flatten(0, 1) @ W).view(x.shape[0], -1, D),
    "experts of tokens": lambda x: mixture(x.flatten(0, 1)).view_as(x),
    "einsum": lambda x: torch.einsum("btd,de,e->bt", x, W, V),
    "lstm": nn.LSTM(D, 4, 2, batch_first=True).eval(),
    "lstm from zeros": lambda x: LSTM(x, (x.new_zeros(1, x.shape[0], 4), torch.zeros(1, x.shape[0], 4)))[0],
    "gru": nn.GRU(D, 4, batch_first=True).eval(),
    "transformer": nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 8, batch_first=True), 2).eval(),
    "attention": lambda x: ATTENTION(x, x, x)[0],
}
LSTM, ATTENTION = nn.LSTM(D, 4, batch_first=True).eval(), nn.MultiheadAttention(D, 2, batch_first=True).eval()


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """Attention with a mask."""
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask[:, None, None])[:, 0]


MASKED: dict[str, Any] = {
    "attention": lambda x, m: masked(x, (1.0 - m.float()) * torch.finfo(torch.float32).min),
    "last token": lambda x, m: x[torch.arange(x.shape[0]), m.sum(1) - 1],
    "positions": lambda x, m: x + TABLE[(m.cumsum(1) - 1).clamp(min=0)],
}


IMAGES: dict[str, Any] = {
    "convolution": nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)
    ).eval(),
    "instance norm": nn.InstanceNorm2d(3).eval(),
    "larger": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "channels moved": lambda x: F.channel_shuffle(x, 3),
    "patches": lambda x: x.reshape(x.shape[0], 3, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(x.shape[0], 4, 48),
}
LINES: dict[str, Any] = {
    "convolution": nn.Conv1d(D, 4, 3, padding=1).eval(),
    "group norm": nn.GroupNorm(2, D).eval(),
}

# State.


def cached(n: int) -> Batch:
    """Rows, a cache with rows of its own, and a place."""
    x, cache = torch.randn(n, D), torch.randn(n, 8, D)
    return by_rows(x, cache, others=[torch.tensor([3])])


def attends_cache(x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    """A cache, written at one position, and read by its own row."""
    cache.index_copy_(1, at, (x @ W)[:, None])
    return torch.softmax((cache @ x[:, :, None])[..., 0], -1)[:, None] @ cache


def paged(n: int) -> Batch:
    """Rows, the slot of each, and the slots that it reads."""
    x, slots, table = torch.randn(n, D), torch.arange(n), torch.randint(100, 200, (n, 4))
    return by_rows(x, slots, table)


class Paged(nn.Module):
    """A cache in pages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(200, D))

    def forward(self, x: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        self.keys.index_copy_(0, slots, x)
        return torch.softmax((self.keys[table] @ x[:, :, None])[..., 0], -1)


INDEPENDENT = {
    **of_batches(rows, rows=ROWS, mixture=MIXTURES),
    **of_batches(rows_and_ids, ids=WITH_IDS),
    **of_batches(sequences, sequences=SEQUENCES),
    **of_batches(rows_and_mask, masked=MASKED),
    **of_batches(floats(3, 8, 8), images=IMAGES),
    **of_batches(floats(D, 9), lines=LINES),
    **of_batches(
        ids, ids={"embedding": lambda i: F.embedding(i, TABLE).sum(1), "an end": lambda i: torch.isin(i, FIXED).any(1)}
    ),
    **of_batches(cached, cache={"with rows of its own": attends_cache}),
    **of_batches(paged, cache={"in pages": Paged()}),
}
