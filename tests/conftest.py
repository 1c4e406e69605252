"""What all tests share: fixed random examples and seeds, one torch thread, and the skip where there is no GPU."""

import gc
import logging
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, register_random, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals
from torch._inductor.utils import fresh_cache

from graphdispatch.native import tape
from graphdispatch.proof.check import attempt, pipeline

LONGEST_ID = 60
FOUND = Path(__file__).resolve().parents[1] / "build" / "fuzz"
"""Where ``make fuzz`` keeps the examples that failed. It tries them first when it runs again."""

settings.register_profile(
    "default",
    deadline=None,
    max_examples=25,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=500)
settings.register_profile(
    "fuzz",
    settings.get_profile("thorough"),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(FOUND),
)
settings.load_profile("default")

if "GRAPHDISPATCH_TEST_DEVICE" in os.environ:  # as if each test named it where it makes a tensor
    torch.set_default_device(os.environ["GRAPHDISPATCH_TEST_DEVICE"])


class TorchRandom:
    """Torch's random numbers as hypothesis wants them, so that an example draws the same wherever it runs."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()
register_random(TORCH_RANDOM)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Keep results independent of the cores, and leave those to whatever else runs; in child processes too."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Torch's compiler sets it when it is first used, which guards see as a change of the environment.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "torchinductor-tests"))


@pytest.fixture(scope="session", autouse=True)
def settled_tape() -> None:
    """Wait until graphs on the CPU run as they do for the rest of the session: natively, or not at all."""
    tape.TAPE.wait()


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """The collector looks only at what the tests make: a look at all imported modules takes 0.2 s for each batch."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """A test draws the same random numbers whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Tests are inference, as what they test; those of gradients turn them on."""
    with torch.no_grad():
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """``torch.compile`` has compiled nothing before the test, on disk neither, and keeps nothing of it."""
    torch._dynamo.reset()
    torch.utils._python_dispatch._is_in_any_mode_without_ignore_compile_internals = False
    set_is_in_mode_without_ignore_compile_internals(False)  # modes of two threads may have left it on
    with fresh_cache():
        yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    """What a test or a snippet logs, no later one does."""
    logger = logging.getLogger("graphdispatch")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def no_gain_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """No real clock decides whether graphs pay: a tiny callable's may not. Clocks that tests give count."""
    measure = pipeline.seconds_of

    def seconds(request: Any, run: Any) -> float:
        if request.clock not in (perf_counter, thread_time):
            return measure(request, run)
        run()
        return 0.0

    for step in (pipeline, attempt):
        monkeypatch.setattr(step, "seconds_of", seconds)


@pytest.fixture(autouse=True)
def no_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No real clock decides whether a capture has to wait, nor whether a graph serves a batch: none shows any time.
    Clocks that tests give do."""
    for name, value in {"clock": staticmethod(float), "first_capture_s": 0.0}.items():
        monkeypatch.setattr(f"graphdispatch.runtime.admission.CaptureBudget.{name}", value)
    monkeypatch.setattr("graphdispatch.runtime.gain.ENOUGH", 0)
    monkeypatch.setattr("graphdispatch.runtime.gain.EagerTimes.wants", lambda *_: False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which front ends the specification in ``tests/behaviour`` runs through."""
    parser.addoption("--front-ends", default="", help="such as graphed,wrapper; default: all")


def pytest_make_parametrize_id(val: Any, argname: str) -> str | None:
    """Name bytes and long text by their argument: a time in a gzip header would differ between two workers."""
    if isinstance(val, str) and len(val) <= LONGEST_ID and val.isprintable():
        return None
    return argname if isinstance(val, str | bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where torch can use no CUDA device. No name of a test may hold an address, which
    differs between two workers."""
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"a name holds an address; give ids=: {named[0]}")
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
