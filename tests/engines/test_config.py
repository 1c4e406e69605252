"""Attention support levels lower the configured mode, say what was lost, and stop where nothing is left."""

import warnings
from typing import Any

import pytest

from graphdispatch import CUDAGraphMode as Mode
from graphdispatch.engines import AttentionSupport as Support
from graphdispatch.engines import resolve_cudagraph_mode
from graphdispatch.errors import ConfigError

NEVER, SINGLE, UNIFORM, ALWAYS = Support


@pytest.mark.parametrize(
    ("mode", "support", "query_len"),
    [
        (Mode.FULL, ALWAYS, 4),
        (Mode.FULL_AND_PIECEWISE, UNIFORM, 4),
        (Mode.FULL_AND_PIECEWISE, SINGLE, 1),
        (Mode.FULL_DECODE_ONLY, SINGLE, 1),
        (Mode.PIECEWISE, NEVER, 4),
        (Mode.NONE, NEVER, 4),
        (Mode.FULL, None, 1),
    ],
)
def test_a_mode_that_attention_supports_stays(mode: Mode, support: Support | None, query_len: int) -> None:
    """No change and no warning where every batch of the mode can be served, or where there is no attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        supports = {} if support is None else {"a": support}
        assert resolve_cudagraph_mode(mode, supports, uniform_decode_query_len=query_len) is mode


@pytest.mark.parametrize(
    ("mode", "support", "query_len", "piecewise", "lowered", "lost"),
    [
        (Mode.FULL, UNIFORM, 1, True, Mode.FULL_AND_PIECEWISE, "mixed batches lose"),
        (Mode.FULL, SINGLE, 1, True, Mode.FULL_AND_PIECEWISE, "mixed batches lose"),
        (Mode.FULL, UNIFORM, 1, False, Mode.FULL_DECODE_ONLY, "mixed batches lose"),
        (Mode.FULL_AND_PIECEWISE, NEVER, 1, True, Mode.PIECEWISE, "query length 1 loses"),
        (Mode.FULL_DECODE_ONLY, NEVER, 1, True, Mode.PIECEWISE, "query length 1 loses"),
        (Mode.FULL_DECODE_ONLY, NEVER, 1, False, Mode.NONE, "nothing is left but eager"),
        (Mode.FULL_AND_PIECEWISE, SINGLE, 3, True, Mode.PIECEWISE, "query length 3 loses"),
        (Mode.FULL_DECODE_ONLY, SINGLE, 3, False, Mode.NONE, "nothing is left but eager"),
    ],
)
def test_a_mode_is_lowered_with_a_warning(
    mode: Mode, support: Support, query_len: int, piecewise: bool, lowered: Mode, lost: str
) -> None:
    """The warning names the backend and what was lost."""
    with pytest.warns(UserWarning, match=f"attention backend 'a' supports {support.name}.*{lost}"):
        found = resolve_cudagraph_mode(mode, {"a": support}, uniform_decode_query_len=query_len, piecewise=piecewise)
    assert found is lowered


def test_a_mode_can_be_lowered_twice() -> None:
    """FULL under speculation with single-token attention ends at PIECEWISE, with a warning for each loss."""
    with pytest.warns(UserWarning, match="lowered to") as caught:
        found = resolve_cudagraph_mode(Mode.FULL, {"a": SINGLE}, uniform_decode_query_len=2)
    assert found is Mode.PIECEWISE
    assert len(caught) == 2


def test_the_least_of_all_backends_decides() -> None:
    """One weak backend in a mixed model limits all of it, and is the one that is named."""
    with pytest.warns(UserWarning, match="'mamba'"):
        found = resolve_cudagraph_mode(Mode.FULL, {"flash": ALWAYS, "mamba": SINGLE})
    assert found is Mode.FULL_AND_PIECEWISE


@pytest.mark.parametrize(
    ("mode", "supports", "more", "message"),
    [
        (Mode.FULL, {"a": NEVER}, {}, "'a', which supports no full graph; use PIECEWISE"),
        (Mode.PIECEWISE, {}, {"piecewise": False}, "must not need piecewise graphs"),
        (Mode.FULL, {}, {"uniform_decode_query_len": 0}, "uniform_decode_query_len must be >= 1"),
    ],
)
def test_what_cannot_be_had_is_an_error(mode: Mode, supports: dict[str, Support], more: Any, message: str) -> None:
    """FULL without any support, pieces of a model that is not split, and a batch without tokens."""
    with pytest.raises(ConfigError, match=message):
        resolve_cudagraph_mode(mode, supports, **more)
