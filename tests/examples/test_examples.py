"""The examples run as they are, compare with eager themselves, and say what they did.

Which calls a graph serves is no promise here: a batch for which eager is faster on this machine stays eager.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUN_HERE = {
    "huggingface_generation": ("transformers", "6 requests, the same tokens; "),
    "http_service": ("fastapi", 'graphdispatch_hits_total{callable="scorer"} '),
    "image_classification": ("", "120 calls, "),
    "recommender": ("", "400 calls, "),
    "diffusion": ("", "4 samples: eager"),
    "policy": ("", "26 calls, "),
    "own_engine": ("", "tokens, equal; the proof was not loaded"),
    "sac": ("rich", "4746 updates, 9"),
}
RUN_ELSEWHERE = {"tensor_parallel": "tests/engines/test_ranks.py"}


def test_every_example_is_known() -> None:
    """A new one is run here, or it is said where it is run."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == RUN_HERE.keys() | RUN_ELSEWHERE.keys()


@pytest.mark.parametrize("name", RUN_HERE)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """In a process of its own, where warnings are errors and the folder is another one; a wrong answer is an error."""
    needs, promise = RUN_HERE[name]
    all_needed = (needs, *["prometheus_client", "httpx"] * (needs == "fastapi"))
    missing = [one for one in all_needed if one and find_spec(one) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, which is not installed here: pip install '.[examples]'")
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert promise in done.stdout
