"""A running vLLM on the CPU: tokens, hits and reasons in every mode, in processes of its own; and recorded steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphdispatch.plan import Workload

pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")

from .server import first_token, make_model

ROOT = Path(__file__).resolve().parents[1]
MODES = ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY")
REQUESTS = os.environ.get("GRAPHDISPATCH_VLLM_REQUESTS", "500")


def serve(place: Path, *options: str, **variables: str) -> dict[str, Any]:
    """What the example measures; it fails by itself if a token is not eager's."""
    file = place / "served.json"
    command = [sys.executable, str(ROOT / "examples" / "vllm_cpu.py"), "--no-inductor", "--repeats", "0"]
    done = subprocess.run(
        [*command, "--json", str(file), *options],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads(file.read_text())["float32"])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every mode and eager, with the same requests of mixed lengths."""
    return serve(tmp_path_factory.mktemp("served"), "--requests", REQUESTS, "--modes", *MODES)


def check(got: dict[str, Any], *, tries: int = 0) -> None:
    """Every graph was compared before it served, and after the warm-up only graphs ran.

    So many captures of the warm-up may fail: the first collective has torch set a variable of the environment, and a
    capture in which that happens is refused and made again.
    """
    for warm, total in zip(got["warm"], got["totals"], strict=True):
        assert len(total) > 1
        for mode in total.keys() - {"NONE"}:
            before, after = warm[mode], total[mode]
            assert before["graphs"] == before["captures"] == after["captures"] > 0
            passing = {"state_rebound": before["failures"]} if before["failures"] else {}
            assert before["eager"] == {"captured_now": before["captures"], "verified_now": before["captures"]} | passing
            assert after["eager"] == before["eager"]
            assert after["failures"] == before["failures"] <= tries
            assert after["hits"] > before["hits"]


def sent_to_no_graph(got: dict[str, Any]) -> dict[str, int]:
    """Steps after the warm-up for which the dispatcher found no graph, by reason."""
    before, after = (got[when][0]["NONE"]["eager"] for when in ("warm", "totals"))
    return {reason: more for reason, count in after.items() if (more := count - before.get(reason, 0))}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_the_tokens_of_eager(found: dict[str, Any], mode: str) -> None:
    """With comparisons and guards on; nothing is captured or compared after the warm-up, and the only eager steps are
    those for which the mode has no graphs."""
    got = found[mode]
    assert got["tokens"] == found["eager"]["tokens"]
    check(got)
    mixed = got["steps"] - got["graph_steps"]
    assert (mixed > 0) == (mode == "FULL_DECODE_ONLY")
    assert sent_to_no_graph(got) == ({"mixed_batch": mixed} if mixed else {})


def test_two_threads_have_the_tokens_of_eager(tmp_path: Path) -> None:
    """In every mode, as one thread does."""
    found = serve(tmp_path, "--requests", REQUESTS, "--threads", "2", "--modes", *MODES)
    for mode in MODES:
        check(found[mode])


def test_a_spawned_engine_has_the_tokens_of_eager(tmp_path: Path) -> None:
    """The engine's core, and its worker, are processes that vLLM spawns."""
    got = serve(tmp_path, "--requests", REQUESTS, "--spawn", "--modes", "FULL_AND_PIECEWISE")
    check(got["FULL_AND_PIECEWISE"])


def test_tensor_parallel_workers_have_the_tokens_of_eager(tmp_path: Path) -> None:
    """Both ranks serve the same steps by the same graphs, with gloo's collectives inside: whole, and in pieces."""
    found = serve(tmp_path, "--requests", REQUESTS, "--tensor-parallel", "2", "--modes", "FULL", "PIECEWISE")
    for mode in ("FULL", "PIECEWISE"):
        got = found[mode]
        check(got, tries=1)
        assert len(got["totals"]) == 2
        assert got["totals"][0] == got["totals"][1]


def test_the_command_of_the_readme_serves(tmp_path: Path) -> None:
    """The server answers with a token, and its log says that graphs serve both kinds of steps and that none ran
    eagerly."""
    got = first_token(make_model(tmp_path))
    assert got.tokens == 1
    (line,) = got.lines
    assert re.match(r"graphdispatch serves steps by graphs, .*: PIECEWISE at \d+ sizes .*, FULL at \d+ sizes", line)


def test_recorded_steps_are_what_a_plan_reads(tmp_path: Path) -> None:
    """Every step of both engines is a line, and graphdispatch reads as many steps."""
    trace = tmp_path / "steps.csv"
    got = serve(tmp_path, "--requests", "40", "--modes", "FULL", GRAPHDISPATCH_VLLM_TRACE=str(trace))
    lines = trace.read_text().splitlines()
    assert lines[0] == "num_tokens,num_reqs,uniform_decode"
    assert len(lines) - 1 == got["eager"]["steps"] + got["FULL"]["steps"] == Workload.from_trace(trace).total
