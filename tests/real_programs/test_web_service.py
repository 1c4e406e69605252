"""FastAPI under uvicorn with two workers: each process has its own graphs, and threads share them."""

import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@pytest.fixture
def url() -> Iterator[str]:
    """Where the service answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "uvicorn", "tests.real_programs.web_service:app", "--workers", "2", "--log-level", "error"]
    service = subprocess.Popen([sys.executable, *command, "--port", str(port)])
    try:
        yield f"http://127.0.0.1:{port}/answer"
    finally:
        service.terminate()
        service.wait(30)


def ask(url: str, rows: int) -> dict[str, object]:
    """One request; waits for the service to start."""
    batch = [[float(row + column) for column in range(8)] for row in range(rows)]
    request = Request(url, json.dumps(batch).encode(), {"Content-Type": "application/json"})
    for _ in range(120):
        try:
            with urlopen(request, timeout=60) as answer:
                return json.load(answer)  # type: ignore[no-any-return]
        except (URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError("the service did not start")


def test_two_workers_answer_as_eager_does(url: str) -> None:
    """From eight clients at once."""
    ask(url, 1)
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda rows: ask(url, rows), [1, 2, 3, 4] * 30))
    for answer in answers:
        torch.testing.assert_close(torch.tensor(answer["served"]), torch.tensor(answer["eager"]))
    reasons = Counter(str(answer["reason"]) for answer in answers)
    assert reasons["EXACT"] + reasons["PADDED"] > len(answers) // 2, reasons
