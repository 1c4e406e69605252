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


def serve(kind: str, place: Path) -> dict[str, Any]:
    """The tokens and totals after each way of sampling."""
    (place / "config.json").write_text(json.dumps(MODEL))
    own = {"GRAPHDISPATCH_VLLM": "graphs", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, str(Path(__file__).with_name("sampled.py")), kind, str(place)]
    done = subprocess.run(command, env={**os.environ, **SETTINGS, **own}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_graphs_serve_on_however_requests_sample(tmp_path: Path) -> None:
    """The tokens are eager's, and after penalties, logprobs and top-p no step of any request runs eagerly."""
    eager, graphs = serve("eager", tmp_path), serve("FULL", tmp_path)
    assert [each["tokens"] for each in graphs.values()] == [each["tokens"] for each in eager.values()]
    totals = [each["totals"]["FULL"] for each in graphs.values()]
    assert all(total["eager"] == totals[0]["eager"] for total in totals)
    assert all(total["graphs"] == 2 for total in totals)
    hits = [total["hits"] for total in totals]
    assert {after - before for before, after in pairwise(hits)} == {8}
