"""The demo's decoder is a Llama whose rows are independent, so that graphs can serve it."""

import pytest
import torch
from torch import Tensor

from graphdispatch.demo import Decoder, DecoderConfig

CONFIG = DecoderConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=50, window=12)


def rows(*places: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of a step from (token, slot, position) of each row."""
    return tuple(torch.tensor(column) for column in zip(*places, strict=True))  # type: ignore[return-value]


def prompt(tokens: list[int], slot: int) -> list[tuple[int, int, int]]:
    """The rows of a prompt from position 0."""
    return [(token, slot, position) for position, token in enumerate(tokens)]


def test_the_decoder_is_a_llama() -> None:
    """With the same weights, Hugging Face's LlamaForCausalLM gives the same logits for a prompt."""
    transformers = pytest.importorskip("transformers")
    ours = Decoder(CONFIG, slots=1)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=CONFIG.vocab, hidden_size=CONFIG.hidden, intermediate_size=CONFIG.ffn,
            num_hidden_layers=CONFIG.layers, num_attention_heads=CONFIG.heads,
            num_key_value_heads=CONFIG.kv_heads, head_dim=CONFIG.head_dim, rms_norm_eps=CONFIG.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta}, tie_word_embeddings=False,
        )
    )  # fmt: skip
    theirs.load_state_dict(llama_weights(ours))
    tokens = [7, 3, 3, 41, 0, 49, 12]
    torch.testing.assert_close(ours(*rows(*prompt(tokens, 0))), theirs(torch.tensor([tokens])).logits[0])


def llama_weights(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's weights under the names of Hugging Face's model."""
    config, d = decoder.config, decoder.config.head_dim
    weights = {
        "model.embed_tokens.weight": decoder.embedding,
        "model.norm.weight": decoder.norm.weight,
        "lm_head.weight": decoder.head.weight,
    }
    for i in range(config.layers):
        ours, name = decoder.layers[i].state_dict(), f"model.layers.{i}"
        q, k, v = ours["attention.qkv.weight"].split([config.heads * d, config.kv_heads * d, config.kv_heads * d])
        gate, up = ours["ffn.gate_up.weight"].chunk(2)
        weights |= {f"{name}.self_attn.{n}_proj.weight": halves(w, d) for n, w in (("q", q), ("k", k))}
        weights[f"{name}.self_attn.v_proj.weight"] = v
        weights |= {f"{name}.mlp.gate_proj.weight": gate, f"{name}.mlp.up_proj.weight": up}
        weights[f"{name}.self_attn.o_proj.weight"] = ours["attention.out.weight"]
        weights[f"{name}.mlp.down_proj.weight"] = ours["ffn.down.weight"]
        weights[f"{name}.input_layernorm.weight"] = ours["attention_norm.weight"]
        weights[f"{name}.post_attention_layernorm.weight"] = ours["ffn_norm.weight"]
    return weights


def halves(weight: Tensor, head_dim: int) -> Tensor:
    """Reorders each head, from pairs of neighbours to pairs of one half with the other, which theirs rotates."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def test_a_prompt_equals_its_tokens_one_by_one() -> None:
    """Rows of one step see each other through the cache exactly as those of successive steps do."""
    decoder = Decoder(CONFIG, slots=2)
    places = prompt([4, 8, 15, 16, 23, 42], slot=1)
    together = decoder(*rows(*places))
    fresh = Decoder(CONFIG, slots=2)
    one_by_one = torch.cat([fresh(*rows(place)) for place in places])
    torch.testing.assert_close(together, one_by_one)


def test_sequences_do_not_see_each_other() -> None:
    """A sequence's logits do not depend on the others of its step, nor on what is in other slots."""
    first, second = prompt([1, 2, 3], slot=0), prompt([9, 9, 9, 9], slot=2)
    alone = Decoder(CONFIG, slots=3)(*rows(*first))
    decoder = Decoder(CONFIG, slots=3)
    decoder(*rows(*prompt([5] * 12, slot=1)))
    torch.testing.assert_close(decoder(*rows(*second, *first))[4:], alone)


def test_a_twin_shares_weights_and_not_the_cache() -> None:
    """Twins have one set of parameters in memory and a cache each."""
    decoder = Decoder(CONFIG, slots=1)
    twin = decoder.twin()
    assert all(a is b for a, b in zip(decoder.parameters(), twin.parameters(), strict=True))
    twin(*rows((3, 0, 0)))
    assert twin.cache_keys.any()
    assert not decoder.cache_keys.any()


def test_weights_come_from_the_seed_alone() -> None:
    """A seed decides the weights, and drawing them leaves torch's own random state alone."""
    state = torch.get_rng_state()
    a, b, c = (Decoder(CONFIG, 1, seed=seed).head.weight for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), state)
