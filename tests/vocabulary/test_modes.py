"""The modes as tables: what each configured mode does with decode batches and with all others."""

import pytest

from graphdispatch import CUDAGraphMode as Mode
from graphdispatch.engines import DispatchMode, EntryState


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        (Mode.NONE, Mode.NONE, Mode.NONE),
        (Mode.PIECEWISE, Mode.PIECEWISE, Mode.PIECEWISE),
        (Mode.FULL, Mode.FULL, Mode.FULL),
        (Mode.FULL_DECODE_ONLY, Mode.FULL, Mode.NONE),
        (Mode.FULL_AND_PIECEWISE, Mode.FULL, Mode.PIECEWISE),
    ],
)
def test_a_mode_splits_into_runtime_modes(mode: Mode, decode: Mode, mixed: Mode) -> None:
    """Decode batches and other batches run in the modes that vLLM's names stand for."""
    assert (mode.decode_mode(), mode.mixed_mode()) == (decode, mixed)


@pytest.mark.parametrize(
    ("question", "modes"),
    [
        (Mode.has_graphs, {Mode.PIECEWISE, Mode.FULL, Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE}),
        (Mode.has_full_cudagraphs, {Mode.FULL, Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE}),
        (Mode.has_piecewise_cudagraphs, {Mode.PIECEWISE, Mode.FULL_AND_PIECEWISE}),
        (Mode.separate_routine, {Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE}),
    ],
    ids=["graphs", "full", "piecewise", "separate"],
)
def test_a_question_is_true_of_these_modes(question: object, modes: set[Mode]) -> None:
    """Each question is answered with yes by exactly the modes of the table."""
    assert callable(question)
    assert {mode for mode in Mode if question(mode)} == modes


def test_mode_values_are_vllms() -> None:
    """The values that other programs store stay what they are."""
    names = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
    assert [(mode.name, mode.value) for mode in Mode] == list(zip(names, range(5), strict=True))


def test_dispatch_modes_and_states_are_stored_by_their_lower_case_name() -> None:
    """What reports write for a mode or a state is its name."""
    for member in (*DispatchMode, *EntryState):
        assert member.value == member.name.lower()
