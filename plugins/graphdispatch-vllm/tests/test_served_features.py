"""Requests that sample in several ways, in pieces too and in bfloat16."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")

from .test_sampled import COUNT, LLAMA, run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_modes_with_pieces_serve_on_however_requests_sample(tmp_path: Path, mode: str, dtype: str) -> None:
    """The tokens are eager's; nothing is captured late, and after the warm-up no step runs eagerly."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    run("make", str(tmp_path))
    eager, graphs = (json.loads(run(kind, str(tmp_path), dtype).splitlines()[-1]) for kind in ("eager", mode))
    assert [each["tokens"] for each in graphs.values()] == [each["tokens"] for each in eager.values()]
    totals = [each["totals"] for each in graphs.values()]
    for kind in totals[0]:
        assert all(total[kind]["eager"] == totals[0][kind]["eager"] for total in totals)
    assert all(total["NONE"]["eager"] == {} for total in totals)
    hits = [sum(total[kind]["hits"] for kind in total) for total in totals]
    assert hits[-1] - hits[0] >= COUNT * (len(hits) - 1)
