"""The named sizes against their engines' figures, explicit sizes, and what limits make of them."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode
from graphdispatch.engines import CUDAGraphConfig, get_cudagraph_sizes, named_sizes
from graphdispatch.errors import ConfigError

from .test_config import NAMED_SIZES

FULL = CUDAGraphMode.FULL


@pytest.mark.parametrize(
    ("name", "max_size", "count", "percent"),
    [
        ("vllm", 512, 51, 3.28),
        ("vllm-interactivity", 512, 76, 2.34),
        ("sglang", 512, 52, 3.11),
        ("trtllm", 2048, 49, 4.39),
        ("megatron", 512, 10, 24.5),
        ("dense", 512, 512, 0.0),
    ],
)
def test_sizes_are_those_of_the_engine(name: str, max_size: int, count: int, percent: float) -> None:
    """As many as it captures, and the mean padding under a uniform load is the figure known of it."""
    sizes = named_sizes(name, max_size)
    assert len(sizes) == count
    padded = sum(1 - n / sizes[bisect_left(sizes, n)] for n in range(1, max_size + 1))
    assert 100 * padded / max_size == pytest.approx(percent, abs=0.02)


@pytest.mark.parametrize(
    ("name", "max_size", "sizes"),
    [
        ("vllm", 300, (1, 2, 4, *range(8, 256, 8), 256, 272, 288)),
        ("vllm-interactivity", 40, (*range(1, 33), 40)),
        ("sglang", 600, (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), 512, 544, 576, 600)),
        ("megatron", 48, (1, 3, 6, 12, 24, 48)),
        ("pow2", 12, (1, 2, 4, 8, 12)),
    ],
)
def test_lists_are_exact(name: str, max_size: int, sizes: tuple[int, ...]) -> None:
    """Size by size, across step widths, and up to the limit."""
    assert named_sizes(name, max_size) == sizes


@given(st.sampled_from(NAMED_SIZES), st.integers(1, 3000))
def test_named_sizes_are_increasing_and_within_their_limit(name: str, max_size: int) -> None:
    """Named sizes are strictly increasing from 1, never pass their limit, and all but vLLM's contain it."""
    sizes = named_sizes(name, max_size)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] <= max_size
    assert sizes[-1] == max_size or name.startswith("vllm")


WITHIN: list[tuple[Any, ...]] = [
    ("auto", 13, 8192, [1, 2, 4, 8, 13, 16, 24]),  # up to twice the requests, with their number itself
    (None, 13, 8192, [1, 2, 4, 8, 13, 16, 24]),
    ("auto", 1024, 8192, list(named_sizes("vllm", 512))),
    ("auto", 64, 43, [1, 2, 4, 8, 16, 24, 32, 40, 43]),
    ("pow2", 6, 100, [1, 2, 4, 6, 8, 12]),
    ([3, 5, 100], 4, 100, [3, 5, 100]),
    ([8, 2, 4, 2], 8, 8, [2, 4, 8]),
    ({4, 1}, 8, 8, [1, 4]),
]


@pytest.mark.parametrize(("given", "reqs", "tokens", "sizes"), WITHIN)
def test_sizes_within_the_limits_of_an_engine(given: Any, reqs: int, tokens: int, sizes: list[int]) -> None:
    """Named ones end at the limits and contain them; explicit ones are kept, in any order."""
    assert get_cudagraph_sizes(given, reqs, tokens, FULL) == sizes


@given(st.integers(1, 700), st.integers(1, 700))
def test_auto_sizes_serve_every_decode_batch_within_the_limits(max_num_reqs: int, max_num_tokens: int) -> None:
    """Each number of requests up to the limits has a size, so that no decode batch falls off the end."""
    sizes = get_cudagraph_sizes("auto", max_num_reqs, max_num_tokens, FULL)
    assert sizes[-1] >= min(max_num_reqs, max_num_tokens, 512)
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("given", [[1, 8, 16, 32], None, "dense"])
def test_modes_end_the_sizes(given: list[int] | str | None) -> None:
    """Where graphs serve decode alone, at the most requests, or what their query length allows; NONE has none."""
    decode = CUDAGraphMode.FULL_DECODE_ONLY
    assert get_cudagraph_sizes(given, 8, 8192, decode)[-1] == 8
    assert get_cudagraph_sizes(given, 8, 8192, decode, query_len=2)[-1] == 16
    assert get_cudagraph_sizes(given, 8, 8192, CUDAGraphMode.FULL_AND_PIECEWISE)[-1] >= 16
    assert get_cudagraph_sizes(given, 8, 8192, CUDAGraphMode.NONE) == []


def test_unreachable_sizes_are_dropped_with_a_warning() -> None:
    """Sizes above the token limit are named in a warning and not captured."""
    with pytest.warns(UserWarning, match=r"capture_sizes 16, 32 are above max_num_tokens=8 and were dropped"):
        assert get_cudagraph_sizes([4, 8, 16, 32], 8, 8, FULL) == [4, 8]


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: named_sizes("tgi", 8), "one of 'vllm', .*'dense', got 'tgi'"),
    (lambda: named_sizes("vllm", 0), "max_size must be an integer >= 1, got 0"),
    (lambda: CUDAGraphConfig(capture_sizes=(1, -4)), r"capture_sizes\[1\] must be an integer >= 1, got -4"),
    (lambda: CUDAGraphConfig(capture_sizes=(1, 2.5)), r"capture_sizes\[1\] must be an integer >= 1, got 2.5"),  # type: ignore[arg-type]
    (lambda: get_cudagraph_sizes([16, 32], 8, 8, FULL), "at most 8 tokens reaches, got 16 as the smallest"),
    (lambda: get_cudagraph_sizes("auto", 8, 8, "NONE"), "mode must be a CUDAGraphMode, .* got 'NONE'"),
    (lambda: get_cudagraph_sizes("auto", 0, 8, FULL), "max_num_reqs must be an integer >= 1, got 0"),
    (lambda: get_cudagraph_sizes("auto", 8, 0, FULL), "max_num_tokens must be an integer >= 1, got 0"),
    *[
        (lambda wrong=wrong: get_cudagraph_sizes(wrong, 8, 8, FULL), "capture.sizes")  # type: ignore[misc]
        for wrong in (8, "nothing", [4, "8"], [0, 4], {4: 1}, [])
    ],
]


@pytest.mark.parametrize(("make", "named"), WRONG)
def test_what_is_no_size_is_named(make: Callable[[], Any], named: str) -> None:
    """An error of this library, never one of Python's, which names the argument and the entry at fault."""
    with pytest.raises(ConfigError, match=named):
        make()
