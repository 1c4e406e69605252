"""What a capture saves of the cache of keys and values."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")

from vllm import _custom_ops as ops

import graphdispatch_vllm.attention  # noqa: F401 (says where the operator writes)
from graphdispatch.backends.operator_mode import reveal_operators
from graphdispatch.proof.watch.effects import EffectRecorder, undo

HEADS, SIZE, BLOCK, BLOCKS = 2, 32, 32, 64


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("slots", [[3 * BLOCK, 5 * BLOCK + 7, -1], [BLOCKS * BLOCK - 1, 0, 1], [-1, -1, -1]])
def test_a_write_to_the_cache_saves_the_blocks_of_its_slots(slots: list[int], isa: str) -> None:
    """Put back, the cache has the bits from before, and no other block was saved. Slots of padding write nowhere."""
    torch.manual_seed(0)
    cache = torch.randn(BLOCKS, HEADS, 2 * BLOCK, SIZE)
    before = cache.clone()
    keys, values = cache.chunk(2, dim=2)
    reveal_operators(cache.device)  # as each capture does
    effects = EffectRecorder(1 << 30, strict=True)
    with effects.watching():
        key, value = torch.randn(2, len(slots), HEADS, SIZE).unbind()
        ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.tensor(slots), isa)
    changed = (cache != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == sorted({slot // BLOCK for slot in slots if slot >= 0})
    assert sum(region.before.nbytes for region in effects.regions) == cache[0].nbytes * len(changed)
    undo(effects.regions)
    assert torch.equal(cache, before)
