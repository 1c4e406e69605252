"""A decoder of the Llama architecture in plain torch. Each batch row is one token.

Note [rows]
    A step is a flat list of tokens, as in the serving engines. Row ``i`` is token ``token_ids[i]`` at position
    ``positions[i]`` of the sequence in cache slot ``slots[i]``. First all rows write their keys and values; then each
    row attends over its slot up to its own position. Decode rows and prompt rows are therefore treated alike, and a
    row depends on the other rows of its step only through the cache. This requires that the pairs (slot, position) of
    one step are distinct, except in the scratch slot, where padding rows may collide.
"""

import copy
from dataclasses import dataclass
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class DecoderConfig:
    """The dimensions of a decoder. Frozen.

    Args:
        layers: The number of decoder layers.
        hidden: The width of a row between layers.
        heads: The number of query heads.
        kv_heads: The number of key-value heads, a divisor of ``heads``.
        head_dim: The width of a head, even.
        ffn: The width inside the feed-forward part.
        vocab: The number of tokens in the vocabulary.
        window: The longest sequence that a cache slot holds, in tokens.
        rope_theta: The base of the rotary frequencies.
        norm_eps: The epsilon of the norms.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    window: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5


PRESETS: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=192, vocab=256, window=64),
    "small": DecoderConfig(layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=768, vocab=2048, window=128),
    # The dimensions of Llama 3.2 1B (its config.json), with an untied output layer and a short window.
    "1b": DecoderConfig(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128_256, window=256),
}


class _Rows(NamedTuple):
    """What all layers know about the rows of one step: see Note [rows]."""

    slots: Tensor  # [N]
    positions: Tensor  # [N]
    turns: Tensor  # [N, 1, head_dim / 2], complex: the rotation of each pair of dimensions at the row's position
    bias: Tensor  # [N, kv_heads, window]: 0 up to the row's own position, -inf after it


class _Attention(nn.Module):
    """Grouped-query attention of each row over its own cache slot."""

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        heads = config.heads + 2 * config.kv_heads
        self.qkv = _linear(config.hidden, heads * config.head_dim, device, dtype)
        self.out = _linear(config.heads * config.head_dim, config.hidden, device, dtype)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, rows: _Rows) -> Tensor:
        """[N, hidden] -> [N, hidden]. Writes the rows' keys and values into this layer's cache in place."""
        c, n = self.config, x.shape[0]
        qkv = self.qkv(x).view(n, c.heads + 2 * c.kv_heads, c.head_dim)
        rotated = _rotate(qkv[:, : c.heads + c.kv_heads], rows.turns)
        keys[rows.slots, :, rows.positions] = rotated[:, c.heads :]
        values[rows.slots, :, rows.positions] = qkv[:, c.heads + c.kv_heads :]
        queries = rotated[:, : c.heads].view(n, c.kv_heads, c.heads // c.kv_heads, c.head_dim)
        projected: Tensor = self.out(_attend(queries, keys, values, rows.slots, rows.bias))
        return projected


class _FeedForward(nn.Module):
    """SwiGLU with its gate and up projections in one matrix product."""

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = _linear(config.hidden, 2 * config.ffn, device, dtype)
        self.down = _linear(config.ffn, config.hidden, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        projected: Tensor = self.down(functional.silu(gate) * up)
        return projected


class _Layer(nn.Module):
    """One decoder layer: attention and feed-forward, each with a norm before it and a residual around it."""

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, config.norm_eps, device=device, dtype=dtype)
        self.attention = _Attention(config, device, dtype)
        self.ffn_norm = nn.RMSNorm(config.hidden, config.norm_eps, device=device, dtype=dtype)
        self.ffn = _FeedForward(config, device, dtype)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, rows: _Rows) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        attended: Tensor = x + self.attention(self.attention_norm(x), keys, values, rows)
        return attended + cast(Tensor, self.ffn(self.ffn_norm(attended)))


class Decoder(nn.Module):
    """A decoder with cache slots, one scratch slot, and seeded random weights.

    The cache is two buffers ``[layers, slots + 1, kv_heads, window, head_dim]``. ``forward`` writes them in place and
    changes nothing else. It reads no value back to the host, and its shapes depend only on the number of rows, so it
    can be captured at every size. Make one call at a time, since calls share the cache.

    Args:
        config: The dimensions.
        slots: The number of cache slots, besides the scratch slot.
        seed: The seed of the weights.
        device: Where weights and cache lie.
        dtype: The dtype of weights, cache and logits.
    """

    cache_keys: Tensor
    cache_values: Tensor
    turns: Tensor
    causal: Tensor

    def __init__(
        self,
        config: DecoderConfig,
        slots: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config = config
        self.slots = slots
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.hidden, device=device, dtype=dtype))
        self.layers = nn.ModuleList(_Layer(config, device, dtype) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps, device=device, dtype=dtype)
        self.head = _linear(config.hidden, config.vocab, device, dtype)
        shape = (config.layers, slots + 1, config.kv_heads, config.window, config.head_dim)
        self.register_buffer("cache_keys", torch.zeros(shape, device=device, dtype=dtype))
        self.register_buffer("cache_values", torch.zeros(shape, device=device, dtype=dtype))
        self.register_buffer("turns", _rotary_table(config).to(device))
        self.register_buffer("causal", _causal_table(config).to(device, dtype))
        self._draw_weights(seed)
        self.requires_grad_(False).eval()

    @property
    def scratch_slot(self) -> int:
        """The slot where padding rows write. No request may hold it."""
        return self.slots

    def forward(self, token_ids: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """The logits of each token's successor, one row for each token: see Note [rows].

        Args:
            token_ids: The tokens, int64 ``[N]``.
            slots: The cache slot of each token's sequence, int64 ``[N]``.
            positions: The position of each token in its sequence, int64 ``[N]``.

        Returns:
            The logits ``[N, vocab]``.
        """
        rows = _Rows(
            slots,
            positions,
            self.turns.index_select(0, positions).unsqueeze(1),
            self.causal.index_select(0, positions),
        )
        x = self.embedding.index_select(0, token_ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, self.cache_keys[i], self.cache_values[i], rows)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def twin(self) -> Self:
        """A decoder that shares the weights with this one but has a cache of its own."""
        return copy.deepcopy(self, {id(p): p for p in self.parameters()})

    def _draw_weights(self, seed: int) -> None:
        # Every activation has a scale near one, so that a wrong row or slot visibly changes the logits.
        generator = torch.Generator(self.embedding.device).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    scale = 1.0 if name == "embedding" else parameter.shape[1] ** -0.5
                    parameter.normal_(0.0, scale, generator=generator)


def _linear(inputs: int, outputs: int, device: torch.device, dtype: torch.dtype) -> nn.Linear:
    # Made on the meta device first, since torch's own initialisation would use the process's random state.
    return nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype).to_empty(device=device)


def _rotary_table(config: DecoderConfig) -> Tensor:
    frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angles = torch.outer(torch.arange(config.window, dtype=torch.float64), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _causal_table(config: DecoderConfig) -> Tensor:
    # The bias is the same for every kv head. The table repeats it, so that the steps need not.
    causal = torch.full((config.window, config.window), float("-inf")).triu(1)
    return causal.unsqueeze(1).expand(-1, config.kv_heads, -1).contiguous()


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    # Two neighbouring dimensions form a complex number. torch has no narrow complex type, hence the float32.
    n, heads, head_dim = x.shape
    pairs = torch.view_as_complex(x.float().view(n, heads, head_dim // 2, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, slots: Tensor, bias: Tensor) -> Tensor:
    # The query heads of one kv head become its query rows, so that keys and values are not repeated.
    n, kv_heads, group, head_dim = queries.shape
    keys = keys.index_select(0, slots).flatten(0, 1)
    values = values.index_select(0, slots).flatten(0, 1)
    scores = torch.baddbmm(
        bias.view(n * kv_heads, 1, -1), queries.flatten(0, 1), keys.transpose(1, 2), alpha=head_dim**-0.5
    )
    return torch.bmm(scores.softmax(-1), values).view(n, kv_heads * group * head_dim)
