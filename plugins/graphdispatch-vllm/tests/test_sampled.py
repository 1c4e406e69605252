"""Requests that sample in several ways: vLLM compiles functions when it first needs them, and graphs go on serving."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")

from examples.vllm_cpu import MODEL, SETTINGS

COUNT = 48
"""Tokens of each request, as in the script; more than the sliding window has."""


LLAMA = MODEL | {"num_hidden_layers": 2, "initializer_range": 0.25}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}


def run(*words: str, threads: int = 1, script: str = "sampled.py") -> str:
    """What the script prints; its engine has the plug-in switched on."""
    own = {"GRAPHDISPATCH_VLLM": "graphs", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(Path(__file__).with_name(script)), *words]
    done = subprocess.run(command, env={**os.environ, **SETTINGS, **own}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def hits_of(found: dict[str, Any]) -> list[int]:
    """Replays of FULL graphs, after each way."""
    return [each["totals"]["FULL"]["hits"] for each in found.values()]


def served(place: Path, model: dict[str, Any], dtype: str, mode: str, threads: int) -> tuple[dict[str, Any], ...]:
    """What eager and graphs of a mode gave, by the ways to sample."""
    (place / "config.json").write_text(json.dumps(model))
    run("make", str(place))
    eager, graphs = (run(kind, str(place), dtype, threads=threads) for kind in ("eager", mode))
    return json.loads(eager.splitlines()[-1]), json.loads(graphs.splitlines()[-1])


def check_full(eager: dict[str, Any], graphs: dict[str, Any]) -> None:
    """Tokens and logprobs are eager's, and after the first way no step of any request ran eagerly."""
    assert [each["tokens"] for each in graphs.values()] == [each["tokens"] for each in eager.values()]
    totals = [each["totals"]["FULL"] for each in graphs.values()]
    assert all(total["eager"] == totals[0]["eager"] for total in totals)
    assert all(total["graphs"] == 2 for total in totals)
    more = {
        way: after - before for way, (before, after) in zip(list(graphs)[1:], pairwise(hits_of(graphs)), strict=True)
    }
    assert more.pop("structured") >= COUNT
    assert set(more.values()) == {COUNT}


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(LLAMA, "float32"), (LLAMA, "bfloat16"), (MISTRAL, "float32")],
    ids=["llama", "bfloat16", "a sliding window"],
)
def test_graphs_serve_on_however_requests_sample(tmp_path: Path, model: dict[str, Any], dtype: str) -> None:
    """The tokens are eager's, and after penalties, logprobs, top-p and grammars no step of any request runs eagerly.

    Logprobs have the same bits. Requests with a grammar wait until it is compiled, and may so take some steps more.
    """
    check_full(*served(tmp_path, model, dtype, "FULL", 1))


def test_layers_with_and_without_a_window_each_read_their_own_schedule(tmp_path: Path) -> None:
    """By two threads, with the layers without a window first, and prompts beyond it: tokens and logprobs are eager's to
    the last bit, and graphs serve every step."""
    check_windows(*windows(tmp_path, ["full_attention", "sliding_attention"], "FULL"))


def windows(place: Path, layers: list[str], *modes: str) -> tuple[dict[str, Any], ...]:
    """What eager and graphs of each mode gave for a model of such layers, by two threads."""
    model = MISTRAL | {"sliding_window": 128, "layer_types": layers}
    (place / "config.json").write_text(json.dumps(model))
    run("make", str(place))
    (place / "config.json").write_text(json.dumps(model))  # which transformers keeps without the kinds of layers
    found = (run(kind, str(place), threads=2, script="windows.py") for kind in ("eager", *modes))
    return tuple(json.loads(each.splitlines()[-1]) for each in found)


def check_windows(eager: dict[str, Any], *found: dict[str, Any]) -> None:
    """Tokens and logprobs are eager's, and after the warm-up no step ran eagerly."""
    assert len({token for tokens, _ in eager["found"] for token in tokens}) > 20
    for graphs in found:
        assert graphs["found"] == eager["found"]
        for mode, after in graphs["after"].items():
            assert after["eager"] == graphs["before"][mode]["eager"]
        before, after = (sum(total["hits"] for total in graphs[when].values()) for when in ("before", "after"))
        assert after - before >= graphs["steps"]
