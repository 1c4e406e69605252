"""The named sizes against their engines' figures, explicit sizes, and the lookup table."""

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode
from graphdispatch.engines import get_cudagraph_sizes, named_sizes
from graphdispatch.errors import ConfigError
from graphdispatch.sizes import NAMED_SIZES, check_sizes

FULL = CUDAGraphMode.FULL
size_lists = st.sets(st.integers(1, 600), min_size=1, max_size=20).map(lambda sizes: tuple(sorted(sizes)))


def waste(name: str, max_size: int, rows: int) -> float:
    """The share of padded rows in percent, the mean over batches of 1 to ``rows`` rows."""
    sizes = named_sizes(name, max_size)
    return 100 * sum(1 - n / sizes[bisect_left(sizes, n)] for n in range(1, rows + 1)) / rows


@pytest.mark.parametrize(
    ("name", "max_size", "count"),
    [
        ("vllm", 512, 51),
        ("vllm", 1024, 83),
        ("vllm-interactivity", 512, 76),
        ("sglang", 256, 36),
        ("sglang", 512, 52),
        ("trtllm", 2048, 49),
        ("trtllm", 512, 25),
        ("megatron", 512, 10),
        ("pow2", 512, 10),
        ("dense", 512, 512),
    ],
)
def test_as_many_sizes_as_the_engine_captures(name: str, max_size: int, count: int) -> None:
    """There are as many sizes as the engine captures."""
    assert len(named_sizes(name, max_size)) == count


@pytest.mark.parametrize(
    ("name", "max_size", "percent"),
    [
        ("vllm", 512, 3.28),
        ("vllm", 1024, 2.14),
        ("vllm-interactivity", 512, 2.34),
        ("sglang", 256, 4.23),
        ("sglang", 512, 3.11),
        ("trtllm", 2048, 4.39),
        ("trtllm", 512, 9.32),
        ("megatron", 512, 24.5),
        ("dense", 512, 0.0),
    ],
)
def test_sizes_pad_as_much_as_the_engine(name: str, max_size: int, percent: float) -> None:
    """The mean padding under a uniform load is the figure known of the engine."""
    assert waste(name, max_size, max_size) == pytest.approx(percent, abs=0.02)


@pytest.mark.parametrize(
    ("name", "percent"), [("vllm", 14.97), ("vllm-interactivity", 0.0), ("sglang", 12.24), ("megatron", 20.3)]
)
def test_sizes_pad_small_batches_as_much_as_the_engine(name: str, percent: float) -> None:
    """The mean padding of batches of at most 32 rows is the figure known of the engine."""
    assert waste(name, 512, 32) == pytest.approx(percent, abs=0.02)


def test_vllm_sizes_are_exact() -> None:
    """vLLM's list up to 288 is reproduced size by size."""
    assert named_sizes("vllm", 300) == (1, 2, 4, *range(8, 256, 8), 256, 272, 288)


def test_sglang_sizes_are_exact() -> None:
    """SGLang's list crosses its three step widths, and ends at the limit itself."""
    assert named_sizes("sglang", 600) == (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), 512, 544, 576, 600)


def test_trtllm_sizes_end_at_the_limit() -> None:
    """TensorRT-LLM adds a limit that is not on its steps of 64."""
    assert named_sizes("trtllm", 300)[-4:] == (128, 192, 256, 300)


def test_megatron_sizes_halve() -> None:
    """Megatron's list is the limit halved, rounded down, to 1."""
    assert named_sizes("megatron", 48) == (1, 3, 6, 12, 24, 48)


def test_pow2_sizes_end_at_the_limit() -> None:
    """The powers of two are completed by a limit that is none."""
    assert named_sizes("pow2", 12) == (1, 2, 4, 8, 12)


@given(st.sampled_from(sorted(NAMED_SIZES)), st.integers(1, 3000))
def test_named_sizes_are_increasing_and_within_their_limit(name: str, max_size: int) -> None:
    """Named sizes are strictly increasing, start at 1 and never pass their limit."""
    sizes = named_sizes(name, max_size)
    assert check_sizes(sizes) == sizes
    assert sizes[0] == 1
    assert sizes[-1] <= max_size


@given(st.sampled_from(sorted(set(NAMED_SIZES) - {"vllm", "vllm-interactivity"})), st.integers(1, 3000))
def test_sizes_other_than_vllms_contain_their_limit(name: str, max_size: int) -> None:
    """No batch up to the limit is without a size."""
    assert named_sizes(name, max_size)[-1] == max_size


def test_an_unknown_name_is_refused() -> None:
    """The error lists the names that exist."""
    with pytest.raises(ConfigError, match=r"one of 'vllm', .*'dense', got 'tgi'"):
        named_sizes("tgi", 8)


@pytest.mark.parametrize("bad", [0, -1, True, 8.0, "8"])
def test_a_limit_that_is_no_positive_integer_is_refused(bad: int) -> None:
    """The error names the argument and what was given."""
    with pytest.raises(ConfigError, match=r"max_size must be an integer >= 1, got"):
        named_sizes("vllm", bad)


def test_explicit_sizes_must_increase() -> None:
    """The error names the first pair out of order and where it stands."""
    with pytest.raises(ConfigError, match=r"capture_sizes must be strictly increasing, got 4 before 4 at index 1"):
        check_sizes([1, 4, 4, 2])


def test_no_sizes_are_refused() -> None:
    """An empty list is an error that says how to switch graphs off."""
    with pytest.raises(ConfigError, match=r"sizes must hold at least one size, got none; use mode NONE"):
        check_sizes((), name="sizes")


@pytest.mark.parametrize("bad", [0, -4, True, 2.5, None])
def test_explicit_sizes_must_be_positive_integers(bad: int) -> None:
    """The error names the entry at fault by its index."""
    with pytest.raises(ConfigError, match=r"capture_sizes\[1\] must be an integer >= 1, got"):
        check_sizes([1, bad])


def test_auto_sizes_end_at_twice_the_requests() -> None:
    """``auto`` is vLLM's capture sizes up to twice the number of requests, with that number itself."""
    assert get_cudagraph_sizes("auto", 13, 8192, FULL) == [1, 2, 4, 8, 13, 16, 24]


def test_auto_sizes_end_at_512() -> None:
    """``auto`` never captures more than vLLM's 512 tokens, whatever the limits are."""
    assert get_cudagraph_sizes("auto", 1024, 8192, FULL) == list(named_sizes("vllm", 512))


def test_auto_sizes_end_at_the_most_tokens() -> None:
    """A token limit below the other limits joins the sizes as the largest."""
    assert get_cudagraph_sizes("auto", 64, 43, FULL) == [1, 2, 4, 8, 16, 24, 32, 40, 43]


def test_a_name_takes_autos_limits() -> None:
    """Named sizes end where ``auto`` does and have the limits as sizes."""
    assert get_cudagraph_sizes("pow2", 6, 100, FULL) == [1, 2, 4, 6, 8, 12]


@given(st.integers(1, 700), st.integers(1, 700))
def test_auto_sizes_serve_every_decode_batch_within_the_limits(max_num_reqs: int, max_num_tokens: int) -> None:
    """Each number of requests up to the limits has a size, so that no decode batch falls off the end."""
    sizes = get_cudagraph_sizes("auto", max_num_reqs, max_num_tokens, FULL)
    assert sizes[-1] >= min(max_num_reqs, max_num_tokens, 512)
    assert list(check_sizes(sizes)) == sizes


def test_explicit_sizes_are_kept() -> None:
    """Sizes given by hand are taken as they are."""
    assert get_cudagraph_sizes([3, 5, 100], 4, 100, FULL) == [3, 5, 100]


def test_explicit_sizes_come_in_any_order() -> None:
    """Repeats count once."""
    assert get_cudagraph_sizes([8, 2, 4, 2], 8, 8, FULL) == [2, 4, 8]
    assert get_cudagraph_sizes({4, 1}, 8, 8, FULL) == [1, 4]


def test_no_sizes_means_the_default() -> None:
    """None is what ``auto`` is."""
    assert get_cudagraph_sizes(None, 13, 8192, FULL) == get_cudagraph_sizes("auto", 13, 8192, FULL)


@pytest.mark.parametrize("given", [[1, 8, 16, 32], None, "dense"])
def test_sizes_of_decode_end_at_the_most_requests(given: list[int] | str | None) -> None:
    """Where graphs serve decode alone, no batch has more tokens than requests, or than their query length allows."""
    decode = CUDAGraphMode.FULL_DECODE_ONLY
    assert get_cudagraph_sizes(given, 8, 8192, decode)[-1] == 8
    assert get_cudagraph_sizes(given, 8, 8192, decode, query_len=2)[-1] == 16
    assert get_cudagraph_sizes(given, 8, 8192, CUDAGraphMode.FULL_AND_PIECEWISE)[-1] >= 16


@pytest.mark.parametrize("wrong", [8, "nothing", [4, "8"], [0, 4], {4: 1}, []])
def test_what_is_no_size_is_named(wrong: object) -> None:
    """An error of this library, never one of Python's."""
    with pytest.raises(ConfigError, match=r"capture.sizes"):
        get_cudagraph_sizes(wrong, 8, 8, FULL)  # type: ignore[arg-type]


def test_unreachable_sizes_are_dropped_with_a_warning() -> None:
    """Sizes above the token limit are named in a warning and not captured."""
    with pytest.warns(UserWarning, match=r"capture_sizes 16, 32 are above max_num_tokens=8 and were dropped"):
        assert get_cudagraph_sizes([4, 8, 16, 32], 8, 8, FULL) == [4, 8]


def test_sizes_that_are_all_unreachable_are_refused() -> None:
    """An explicit list of which nothing is left is an error, not a silent way to switch graphs off."""
    with pytest.raises(ConfigError, match=r"at most 8 tokens reaches, got 16 as the smallest"):
        get_cudagraph_sizes([16, 32], 8, 8, FULL)


def test_mode_none_has_no_sizes() -> None:
    """Without graphs there is nothing to capture."""
    assert get_cudagraph_sizes("auto", 8, 8, CUDAGraphMode.NONE) == []


def test_a_mode_by_name_is_refused_here() -> None:
    """A string, which would compare unequal to every mode, is an error."""
    with pytest.raises(ConfigError, match=r"mode must be a CUDAGraphMode, got 'NONE'"):
        get_cudagraph_sizes("auto", 8, 8, "NONE")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_num_reqs", "max_num_tokens"])
def test_engine_limits_must_be_positive(name: str) -> None:
    """The error names the limit at fault."""
    limits = {"max_num_reqs": 8, "max_num_tokens": 8, name: 0}
    with pytest.raises(ConfigError, match=rf"{name} must be an integer >= 1, got 0"):
        get_cudagraph_sizes("auto", mode=FULL, **limits)
