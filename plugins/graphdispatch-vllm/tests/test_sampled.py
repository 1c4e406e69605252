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


def run(*words: str) -> str:
    """What the script prints; its engine has the plug-in switched on."""
    own = {"GRAPHDISPATCH_VLLM": "graphs", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, str(Path(__file__).with_name("sampled.py")), *words]
    done = subprocess.run(command, env={**os.environ, **SETTINGS, **own}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def hits_of(found: dict[str, Any]) -> list[int]:
    """Replays of FULL graphs, after each way."""
    return [each["totals"]["FULL"]["hits"] for each in found.values()]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(LLAMA, "float32"), (LLAMA, "bfloat16"), (MISTRAL, "float32")],
    ids=["llama", "bfloat16", "a sliding window"],
)
def test_graphs_serve_on_however_requests_sample(tmp_path: Path, model: dict[str, Any], dtype: str) -> None:
    """The tokens are eager's, and after penalties, logprobs, top-p and grammars no step of any request runs eagerly.

    Requests with a grammar wait until it is compiled, and may so take some steps more.
    """
    (tmp_path / "config.json").write_text(json.dumps(model))
    run("make", str(tmp_path))
    eager, graphs = (json.loads(run(kind, str(tmp_path), dtype).splitlines()[-1]) for kind in ("eager", "FULL"))
    assert [each["tokens"] for each in graphs.values()] == [each["tokens"] for each in eager.values()]
    totals = [each["totals"]["FULL"] for each in graphs.values()]
    assert all(total["eager"] == totals[0]["eager"] for total in totals)
    assert all(total["graphs"] == 2 for total in totals)
    more = {
        way: after - before for way, (before, after) in zip(list(graphs)[1:], pairwise(hits_of(graphs)), strict=True)
    }
    assert more.pop("structured") >= COUNT
    assert set(more.values()) == {COUNT}
