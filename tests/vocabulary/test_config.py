"""Configuration: what it accepts, how each bad value is refused, and what it resolves to."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode, CUDAGraphOptions
from graphdispatch.engines import CUDAGraphConfig, named_sizes
from graphdispatch.errors import ConfigError

NAMED_SIZES = ("vllm", "vllm-interactivity", "sglang", "trtllm", "megatron", "pow2", "dense")
BAD_CONFIG: list[tuple[str, Any, str]] = [
    ("mode", "HALF", r"one of NONE \(0\), .*FULL_AND_PIECEWISE \(4\), got 'HALF'"),
    ("mode", 5, r"one of NONE \(0\), .*, got 5"),
    ("backend", 3, r"a valid string, got 3"),
    ("capture_sizes", "tgi", r"one of 'auto', 'vllm', .*, or increasing sizes, got 'tgi'"),
    ("capture_sizes", 8, r"increasing sizes, .*got 8; max_batch_size=8"),
    ("capture_sizes", {4: 1}, r"increasing sizes, as .* got \{4: 1\}"),
    ("capture_sizes", (), r"hold at least one size, got none; use mode NONE"),
    ("capture_sizes", (1, 4, 4, 2), r"strictly increasing, got 4 before 4 at index 1"),
    ("max_batch_size", 0, r"greater than or equal to 1, got 0"),
    ("max_batch_size", 2**40, r"less than or equal to 1048576, got 1099511627776"),
    ("max_seq_len", -1, r"greater than or equal to 1, got -1"),
    ("pad_batches", "yes", r"a valid boolean, got 'yes'"),
    ("options", 3, r"a valid dictionary or instance of CUDAGraphOptions, got 3"),
]

BAD_OPTIONS: list[tuple[str, Any, str]] = [
    ("inputs", "borrow", r"'copy' or 'static', got 'borrow'"),
    ("outputs", "copy", r"'clone', 'view' or 'static', got 'copy'"),
    ("outputs", 3, r"'clone', 'view' or 'static', got 3"),
    ("warmup_iterations", 0, r"greater than or equal to 1, got 0"),
    ("verify", None, r"True, False or the name of a policy, got None"),
    ("verify", "", r"True, False or the name of a policy, got ''"),
    ("rtol", -0.1, r"greater than or equal to 0, got -0.1"),
    ("atol", float("nan"), r"a finite number, got nan"),
    ("state_limit_bytes", -1, r"greater than or equal to 0, got -1"),
    ("padding_writes", True, r"'refuse' or 'allow', got True"),
    ("max_failures", 0, r"greater than or equal to 1, got 0"),
    ("max_cached_graphs", 1.5, r"a valid integer, got 1.5"),
    ("memory_budget_bytes", 0, r"greater than or equal to 1, got 0"),
    ("memory_budget_bytes", "2GiB", r"a valid integer, got '2GiB'"),
    ("capture_after", 0, r"greater than or equal to 1, got 0"),
    ("max_signatures", True, r"a valid integer, got True"),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD_CONFIG + BAD_OPTIONS)
def test_a_bad_value_is_one_error(name: str, value: Any, expected: str) -> None:
    """The error names the option, what was expected and what was given."""
    kind = CUDAGraphConfig if (name, value, expected) in BAD_CONFIG else CUDAGraphOptions
    with pytest.raises(ConfigError, match=rf"^{name} must {'be ' * (value != ())}{expected}"):
        kind(**{name: value})


LOADED: dict[str, tuple[Callable[[], Any], str]] = {
    "plain data": (lambda: CUDAGraphConfig.from_dict({"max_seq_len": 0}), "^max_seq_len must be greater than or eq"),
    "nested": (lambda: CUDAGraphConfig.from_dict({"options": {"rtol": -1}}), "^options: rtol must be .*, got -1"),
    "several": (lambda: CUDAGraphConfig(max_seq_len=0, max_batch_size=0), "max_batch_size must .*; max_seq_len must "),
    "unknown": (lambda: CUDAGraphConfig.from_dict({"max_graphs": 3}), "'max_graphs' is unknown .* one of mode"),
    "no mapping": (lambda: CUDAGraphConfig.from_dict([1]), r"d must be a mapping of the options .*, got \[1\]"),
    "too large": (lambda: CUDAGraphConfig(capture_sizes=(1, 512), max_batch_size=256), "at most max_batch_size=256"),
    "weak and handed out": (
        lambda: CUDAGraphOptions(weak_ref_output=True, outputs="view"),
        "weak_ref_output=True .* outputs='clone', got outputs='view'",
    ),
    "replaced": (lambda: CUDAGraphConfig(capture_sizes=(1, 8)).replace(max_batch_size=4), "at most max_batch_size=4"),
    "assigned": (lambda: setattr(CUDAGraphConfig(), "max_seq_len", 3), "frozen"),
}


@pytest.mark.parametrize("name", LOADED)
def test_whichever_way_it_is_made_it_is_checked(name: str) -> None:
    """All that is wrong is named in one error, with its place and what belongs there; nothing is assigned later."""
    make, message = LOADED[name]
    with pytest.raises(ValueError if name == "assigned" else ConfigError, match=message):
        make()


@pytest.mark.parametrize("value", [CUDAGraphMode.FULL_DECODE_ONLY, "full_decode_only", "FULL_DECODE_ONLY", 3])
def test_a_mode_is_known_by_name_and_value(value: object) -> None:
    """The enum, its name in any case and its value mean the same mode."""
    assert CUDAGraphConfig(mode=value).mode is CUDAGraphMode.FULL_DECODE_ONLY


configs = st.builds(
    CUDAGraphConfig,
    mode=st.sampled_from(CUDAGraphMode),
    capture_sizes=st.one_of(
        st.sampled_from(["auto", *NAMED_SIZES]), st.sets(st.integers(1, 90), min_size=1, max_size=5).map(sorted)
    ),
    max_batch_size=st.integers(90, 400),
    max_seq_len=st.integers(1, 100),
    pad_batches=st.booleans(),
    options=st.builds(
        CUDAGraphOptions,
        rtol=st.none() | st.floats(0, 1),
        outputs=st.sampled_from(["clone", "view"]),
        memory_budget_bytes=st.none() | st.integers(1, 2**40),
    ),
)


@given(configs)
def test_a_config_survives_json(config: CUDAGraphConfig) -> None:
    """``from_dict`` reads back, through JSON, exactly what ``to_dict`` wrote."""
    assert CUDAGraphConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(configs, st.integers(-2, 420), st.integers(-2, 110))
@example(CUDAGraphConfig(), 256, 8192)
@example(CUDAGraphConfig(), 257, 1)
@example(CUDAGraphConfig(), 1, 8193)
def test_a_batch_is_served_when_a_size_holds_it(config: CUDAGraphConfig, batch_size: int, seq_len: int) -> None:
    """The quick lookup says what a search through the sizes says."""
    sizes = config.sizes
    fits = [size for size in sizes if size >= batch_size]
    exact = batch_size in sizes
    expected = batch_size >= 1 and 0 <= seq_len <= config.max_seq_len and (bool(fits) if config.pad_batches else exact)
    assert config.should_use_cudagraph(batch_size, seq_len) == expected
    padded = fits[0] if fits and batch_size >= 1 and config.pad_batches else batch_size
    assert config.get_padded_batch_size(batch_size) == padded
    assert config.replace(strict=True).replace(strict=config.strict) == config


@pytest.mark.parametrize("name", ["auto", *NAMED_SIZES])
def test_named_sizes_always_contain_the_largest_batch(name: str) -> None:
    """Every batch up to ``max_batch_size`` is served, also where the named sizes have no step there."""
    assert CUDAGraphConfig(capture_sizes=name, max_batch_size=301).sizes[-1] == 301
    assert CUDAGraphConfig(capture_sizes=(2, 700)).sizes == (2, 700)  # explicit ones stay as given
    assert CUDAGraphConfig(max_batch_size=512).sizes == named_sizes("vllm", 512)
    first, second = CUDAGraphConfig(strict=True), CUDAGraphConfig()
    assert first.sizes is second.sizes


def test_disabled_serves_nothing() -> None:
    """The disabled configuration has no sizes, serves no batch and pads none."""
    config = CUDAGraphConfig.disabled()
    assert config.sizes == ()
    assert not config.should_use_cudagraph(1, 1)
    assert config.get_padded_batch_size(3) == 3
