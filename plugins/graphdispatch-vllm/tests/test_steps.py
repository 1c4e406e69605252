"""Metadata at fixed addresses: what is copied, what is assigned, and what no graph can have."""

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")

from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, ForwardContext, get_forward_context

from graphdispatch_vllm.steps import FixedStep, Schedule, Schedules, vary_slots


@dataclasses.dataclass
class Metadata:
    num_actual_tokens: int
    seq_lens: torch.Tensor
    scheduler_metadata: torch.Tensor
    mask: torch.Tensor | None = None


def schedule(*numbers: int) -> torch.Tensor:
    """A structure of two numbers and two pointers: to its last word, and behind its end."""
    words = torch.tensor([*numbers, 0, 0])
    words[2], words[3] = words.data_ptr() + 24, words.data_ptr() + 32
    return words.view(torch.int8)


def context(
    tokens: int, lengths: list[int], *numbers: tuple[int, int], layers: tuple[str, ...] = ("ab",), **extra: Any
) -> ForwardContext:
    """What vLLM makes for a step: new objects and new tensors for each group of layers; those of one share them."""
    metadata, mappings = {}, {}
    for group, own in zip(layers, numbers or [(1, 2)], strict=True):
        made = Metadata(tokens, torch.tensor(lengths), schedule(*own), **extra)
        metadata |= dict.fromkeys(group, made)
        mappings |= dict.fromkeys(group, torch.arange(len(lengths)))
    return ForwardContext(
        no_compile_layers={},
        attn_metadata=metadata,
        slot_mapping=mappings,
        cudagraph_runtime_mode=CUDAGraphMode.FULL,
        batch_descriptor=BatchDescriptor(len(lengths)),
    )


def test_each_step_fills_the_same_objects() -> None:
    """Tensors at the same addresses with new values; numbers are assigned; layers go on sharing."""
    step = FixedStep(context(2, [5, 6]), Schedules())
    own = step.context.attn_metadata["a"]
    assert own is step.context.attn_metadata["b"]
    places = [own.seq_lens.data_ptr(), step.context.slot_mapping["a"].data_ptr()]
    for lengths in ([7, 8], [9, 1]):
        assert step.load(context(2, lengths))
        assert own.seq_lens.tolist() == lengths
        assert [own.seq_lens.data_ptr(), step.context.slot_mapping["a"].data_ptr()] == places
        assert step.context.attn_metadata["a"] is own
    with step.entered():
        assert get_forward_context() is step.context
    assert step.load(context(1, [7, 8]))
    assert own.num_actual_tokens == 1


def test_each_group_of_layers_has_a_schedule_of_its_own() -> None:
    """Whatever the order in which they come: none reads that of another, and the layers of one group share theirs. The
    graphs of a model share the memory."""
    schedules = Schedules()
    for layers in (("ab", "c"), ("ab", "c")):
        step = FixedStep(context(2, [5, 6], (1, 2), (3, 4), layers=layers), schedules)
        for first, second in (((5, 6), (7, 8)), ((9, 1), (2, 3))):
            assert step.load(context(2, [5, 6], first, second, layers=layers))
            found = {layer: own.scheduler_metadata for layer, own in step.context.attn_metadata.items()}
            assert {layer: tuple(own[:2].tolist()) for layer, own in found.items()} == dict.fromkeys("ab", first) | {
                "c": second
            }
            assert found["a"] is found["b"]
    assert schedules.keys() == {"a", "c"}


def test_a_schedule_keeps_its_pointers_into_itself() -> None:
    """They move with it, also the one behind its end; numbers stay, even one that looks like an address."""
    memory = Schedule()
    for numbers in ((1, 2), (3, 4)):
        given = schedule(*numbers)
        assert memory.load(given)
        words, place = memory.tensor[:4].tolist(), memory.tensor.data_ptr()
        assert words == [*numbers, place + 24, place + 32]
    like = schedule(0, 0)
    like.view(torch.int64)[1] = like.data_ptr() + 8
    assert memory.load(like)
    assert memory.tensor[1] == like.data_ptr() + 8


def test_garbage_behind_a_schedule_is_no_pointer() -> None:
    """vLLM does not clear the memory, so a word there may look like one; a later schedule may be shorter."""
    memory, long = Schedule(), torch.zeros(8, dtype=torch.int64)
    long[:4], long[7] = schedule(1, 2).view(torch.int64), long.data_ptr()
    long[2], long[3] = long.data_ptr() + 24, long.data_ptr() + 32
    assert memory.load(long)
    assert memory.load(schedule(3, 4))
    place = memory.tensor.data_ptr()
    assert memory.tensor[:4].tolist() == [3, 4, place + 24, place + 32]


def test_a_schedule_without_room_is_refused() -> None:
    """The step then runs eagerly, on vLLM's own schedule."""
    assert not Schedule(nbytes=16).load(schedule(1, 2))


@pytest.mark.parametrize(
    "other",
    [
        context(2, [5, 6, 7]),
        context(2, [5, 6], mask=torch.zeros(2)),
        dataclasses.replace(context(2, [5, 6]), attn_metadata=None),
        dataclasses.replace(context(2, [5, 6]), attn_metadata={"a": None}),
    ],
    ids=["shape", "another tensor", "no metadata", "other layers"],
)
def test_another_form_is_refused(other: ForwardContext) -> None:
    """No graph can have it; the step runs eagerly."""
    assert not FixedStep(context(2, [5, 6]), Schedules()).load(other)


def test_the_warm_up_writes_slots_of_the_null_block_once_each() -> None:
    """Tokens beyond one block write nowhere."""
    given = context(3, [1, 1, 1])
    given.slot_mapping["a"].fill_(-1)
    vary_slots(given, 2, 1)
    assert given.slot_mapping["b"].tolist() == [1, 0, -1]


def test_a_step_of_requests_keeps_its_slots() -> None:
    """Another engine of the process may serve while captures are allowed."""
    given = context(3, [1, 1, 1])
    given.slot_mapping["a"].copy_(torch.tensor([9, 17, -1]))
    vary_slots(given, 4, 1)
    assert given.slot_mapping["b"].tolist() == [9, 17, -1]
