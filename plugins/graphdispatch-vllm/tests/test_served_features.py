"""Requests that sample in several ways and prompts beyond a window, in pieces too, in bfloat16, and by two threads."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")

from .test_sampled import COUNT, LLAMA, MISTRAL, check_full, check_windows, run, served, windows


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_modes_with_pieces_serve_on_however_requests_sample(
    tmp_path: Path, mode: str, dtype: str, threads: int
) -> None:
    """The tokens are eager's; nothing is captured late, and after the warm-up no step runs eagerly."""
    eager, graphs = served(tmp_path, LLAMA, dtype, mode, threads)
    assert [each["tokens"] for each in graphs.values()] == [each["tokens"] for each in eager.values()]
    totals = [each["totals"] for each in graphs.values()]
    for kind in totals[0]:
        assert all(total[kind]["eager"] == totals[0][kind]["eager"] for total in totals)
    assert all(total["NONE"]["eager"] == {} for total in totals)
    hits = [sum(total[kind]["hits"] for kind in total) for total in totals]
    assert hits[-1] - hits[0] >= COUNT * (len(hits) - 1)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(LLAMA, "float32"), (LLAMA, "bfloat16"), (MISTRAL, "float32")],
    ids=["llama", "bfloat16", "a sliding window"],
)
def test_two_threads_serve_on_however_requests_sample(tmp_path: Path, model: dict[str, Any], dtype: str) -> None:
    """As one does."""
    check_full(*served(tmp_path, model, dtype, "FULL", 2))


@pytest.mark.parametrize(
    ("layers", "modes"),
    [
        (["sliding_attention", "full_attention"], ["FULL", "FULL_AND_PIECEWISE"]),
        (["full_attention", "sliding_attention"], ["PIECEWISE", "FULL_AND_PIECEWISE"]),
    ],
    ids=["full last", "full first"],
)
def test_windows_are_kept_in_every_mode_and_order_of_layers(
    tmp_path: Path, layers: list[str], modes: list[str]
) -> None:
    """Tokens and logprobs are eager's to the last bit, and graphs serve every step."""
    check_windows(*windows(tmp_path, layers, *modes))


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_graphs_serve_on_after_the_weights_were_reloaded(tmp_path: Path, mode: str) -> None:
    """Tokens are eager's before and behind it, those of requests in the middle, too. Each graph is captured once more,
    and no step runs eagerly."""
    places = [str(tmp_path / name) for name in ("first", "second")]
    for seed, place in enumerate(places):
        Path(place).mkdir()
        Path(place, "config.json").write_text(json.dumps(LLAMA))
        run("make", place, str(seed))
    count = os.environ.get("GRAPHDISPATCH_VLLM_REQUESTS", "500")
    eager, graphs = (
        json.loads(run(kind, *places, count, script="reloaded.py").splitlines()[-1]) for kind in ("eager", mode)
    )
    assert graphs["tokens"] == eager["tokens"]
    warm, reloaded, last = graphs["totals"]
    for kind in warm.keys() - {"NONE"}:
        assert last[kind]["graphs"] == warm[kind]["graphs"] > 0
        assert reloaded[kind]["captures"] == last[kind]["captures"] == 2 * warm[kind]["captures"]
        assert reloaded[kind]["eager"] == last[kind]["eager"] == {why: 2 * n for why, n in warm[kind]["eager"].items()}
        assert last[kind]["hits"] > reloaded[kind]["hits"] > 2 * warm[kind]["hits"]
    assert last["NONE"]["eager"] == {}
