"""Runs the README's command with a small Llama until its first token, and prints what that took.

    python -m tests.server 1G 4G        with caches of these sizes in the place of the README's

Seconds are of the wall and of the processor, from the start of the command until the token has come. Memory is the peak
of the engine's process.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from examples.vllm_cpu import MODEL, SETTINGS

README = Path(__file__).parents[1] / "README.md"
SAMPLED = Path(__file__).with_name("sampled.py")


class Started(NamedTuple):
    """What the command did until its first token."""

    tokens: int
    wall: float
    processor: float
    gibibytes: float
    lines: list[str]
    """What graphdispatch said in vLLM's log."""


def make_model(place: Path) -> str:
    """A folder with a Llama of random weights and a tokenizer."""
    (place / "config.json").write_text(json.dumps(MODEL))
    subprocess.run([sys.executable, str(SAMPLED), "make", str(place)], check=True, capture_output=True)
    return str(place)


def command(model: str, cache: str | None = None) -> tuple[list[str], dict[str, str]]:
    """The README's command and the variables before it, for a model in a folder."""
    found = re.search(r"^(GRAPHDISPATCH_VLLM=graphs python (?:.*\\\n)+.*)$", README.read_text(), re.MULTILINE)
    assert found is not None
    switch, python, *words = shlex.split(found[1].replace("\\\n", " ").replace("MODEL", model))
    assert python == "python"
    if cache is not None:
        words[words.index("--kv-cache-memory-bytes") + 1] = cache
    return [sys.executable, *words], dict([switch.split("=")])


def first_token(model: str, cache: str | None = None, **variables: str) -> Started:
    """Run the command until a request has its first token. Raises ``RuntimeError`` if the server ends before that."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words, switch = command(model, cache)
    own = SETTINGS | {"VLLM_LOGGING_LEVEL": "INFO"} | switch | variables
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        server = subprocess.Popen(
            [*words, "--host", "127.0.0.1", "--port", str(port)], env={**os.environ, **own}, stdout=log, stderr=log
        )
        try:
            while (tokens := _answer(port, model)) is None:
                if server.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(log.read()[-6000:])
                time.sleep(0.1)
            wall = time.perf_counter() - began
            every = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
            processor = sum(sum(each.cpu_times()[:4]) for each in every)
            peak = max(_peak(each.pid) for each in every)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
        log.seek(0)
        return Started(tokens, wall, processor, peak, re.findall(r"\] (graphdispatch.*)", log.read()))


def _answer(port: int, model: str) -> int | None:
    """How many tokens came after a prompt, of one; None while the server does not answer."""
    body: dict[str, Any] = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])
    except ConnectionError:
        return None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionError):
            return None
        raise


def _peak(process: int) -> float:
    """The most memory that a process had, in GiB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / (1 << 20)


def main() -> None:
    """Start a server for each size of the cache."""
    with tempfile.TemporaryDirectory() as place:
        model = make_model(Path(place))
        for cache in sys.argv[1:]:
            got = first_token(model, cache)
            print(f"{cache}: {got.wall:.1f} s, {got.processor:.1f} s of the processor, {got.gibibytes:.2f} GiB")
            print(*got.lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
