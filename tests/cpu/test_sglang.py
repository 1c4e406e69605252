"""SGLang's seam: a runner like theirs captures and replays through our backend, beside a forward without graphs.

SGLang itself is not installed. Its interface is read from its sources where ``python tests/vllm/sources.py`` has
fetched them, and stand-ins of the same names take its place besides.
"""

import abc
import contextlib
import dataclasses
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphdispatch.integrations.engine import on_all_ranks

from ..spy import Spy
from ..vllm.sources import SGLANG, kept

PLACE = "sglang.srt.model_executor"
SIZES = (1, 2, 4, 8)
METHODS = ("capture_session", "capture_one", "can_run", "replay_session", "replay", "cleanup")


def stand_ins() -> dict[str, ModuleType]:
    """Modules with what the backend imports of SGLang, and what a runner of theirs uses."""
    context, key, base = (
        ModuleType(f"{PLACE}.{name}")
        for name in ("forward_context", "runner.shape_key", "runner_backend.base_cuda_graph_backend")
    )
    exec(
        "_current = None\n"
        "def set_forward_context(new):\n    global _current\n    old, _current = _current, new\n    return old\n"
        "def has_forward_context():\n    return _current is not None\n"
        "def get_forward_context():\n    return _current\n",
        vars(context),
    )
    context.ForwardContext = dataclasses.make_dataclass("ForwardContext", ["attn_backend"], frozen=True)
    key.ShapeKey = dataclasses.make_dataclass("ShapeKey", ["size"], frozen=True)
    base.BaseCudaGraphBackend = abc.ABCMeta(
        "BaseCudaGraphBackend", (), {name: abc.abstractmethod(lambda self: None) for name in METHODS}
    )
    return {module.__name__: module for module in (context, key, base)}


@pytest.fixture(params=["stand-ins", "sources"])
def sglang(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of SGLang, and our backend made for them."""
    if request.param == "stand-ins":
        for name, module in stand_ins().items():
            monkeypatch.setitem(sys.modules, name, module)
        for name in ("sglang", "sglang.srt", PLACE, f"{PLACE}.runner", f"{PLACE}.runner_backend"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for name in stand_ins():
            parent, _, child = name.rpartition(".")
            monkeypatch.setattr(sys.modules[parent], child, sys.modules[name], raising=False)
    elif (folder := kept(SGLANG)) is None:
        pytest.skip(f"needs the sources of {SGLANG.requirement}; python tests/vllm/sources.py fetches them")
    else:
        monkeypatch.syspath_prepend(str(folder))
    # Of all that this module of theirs imports, nothing else is needed.
    parallel = SimpleNamespace(tp_group=SimpleNamespace(cpu_group=None))
    runtime = ModuleType("sglang.srt.runtime_context")
    vars(runtime)["get_parallel"] = lambda: parallel
    monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
    ours = "graphdispatch.integrations.sglang"
    yield SimpleNamespace(
        parallel=parallel,
        context=importlib.import_module(f"{PLACE}.forward_context"),
        key=importlib.import_module(f"{PLACE}.runner.shape_key").ShapeKey,
        base=importlib.import_module(f"{PLACE}.runner_backend.base_cuda_graph_backend").BaseCudaGraphBackend,
        backend=importlib.import_module(ours).GraphBackend,
    )
    for name in [each for each in sys.modules if each == ours or each.partition(".")[0] == "sglang"]:
        del sys.modules[name]


@dataclasses.dataclass
class Output:
    """As ``LogitsProcessorOutput``: tensors, and fields that are filled later."""

    next_token_logits: torch.Tensor | None
    hidden_states: Any = None
    next_token_logprobs: torch.Tensor | None = None


class Model(torch.nn.Module):
    """Writes a cache at the batch's slots, and reads a number from the attention backend of the forward context."""

    def __init__(self, sglang: SimpleNamespace) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)
        self.cache = torch.zeros(64, 16)
        self.context = sglang.context
        self.extra: Callable[[torch.Tensor], Any] = lambda hidden: None

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> Output:
        scale = self.context.get_forward_context().attn_backend.scale
        hidden = self.embed(ids) * scale + positions[:, None]
        self.cache.index_copy_(0, slots, hidden)
        mixed = hidden + self.cache[slots]
        return Output(self.head(mixed), [hidden.sum(1), self.extra(mixed)])


class Runner:
    """Does what SGLang's ``DecodeCudaGraphRunner`` does with its backend, in its order."""

    def __init__(self, sglang: SimpleNamespace) -> None:
        self.sglang = sglang
        self.model_runner = SimpleNamespace(device="cpu")
        self.model = Model(sglang)
        self.attention = SimpleNamespace(scale=torch.tensor(2.0))
        self.buffers = SimpleNamespace(
            input_ids=torch.zeros(8, dtype=torch.int64),
            positions=torch.zeros(8, dtype=torch.int64),
            out_cache_loc=torch.arange(8),
        )
        self.warmed = 0
        self.backend = sglang.backend(self, enable_memory_saver=False)

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Published anew for each forward, as theirs."""
        before = self.sglang.context.set_forward_context(self.sglang.context.ForwardContext(self.attention))
        try:
            yield
        finally:
            self.sglang.context.set_forward_context(before)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> Any:
        with self.forward_context(), torch.no_grad():
            return self.model(ids, positions, slots)

    def hook(self) -> None:
        self.warmed += 1

    def capture(self) -> None:
        rows = self.buffers
        with self.backend.capture_session(None):
            for size in reversed(SIZES):

                def run_once(size: int = size) -> Any:
                    return self.forward(rows.input_ids[:size], rows.positions[:size], rows.out_cache_loc[:size])

                with self.forward_context():
                    self.backend.capture_one(self.sglang.key(size), run_once, None, self.hook)

    def execute(self, ids: torch.Tensor, positions: torch.Tensor) -> Output:
        """Pad, replay, slice; eagerly, on the batch as it is, if the backend has no graph."""
        real = len(ids)
        size = next(size for size in SIZES if size >= real)
        key = self.sglang.key(size)
        if not self.backend.can_run(None, key):
            output: Output = self.forward(ids, positions, torch.arange(real))
            return output
        with torch.no_grad(), self.backend.replay_session():
            self.buffers.input_ids[:real], self.buffers.positions[:real] = ids, positions
            self.buffers.input_ids[real:] = self.buffers.positions[real:] = 0
            output = self.backend.replay(key, None)
        logits, (sums, _) = output.next_token_logits, output.hidden_states
        assert logits is not None
        cut = dataclasses.replace(output, next_token_logits=logits[:real], hidden_states=[sums[:real], None])
        output.next_token_logprobs = logits  # as their sampler does; the next replay's output has none again
        return cut


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and positions of batches of all sizes."""
    generator = torch.Generator().manual_seed(1)
    for real in (8, 3, 1, 4, 7, 2, 8, 5, 1, 6):
        yield (
            torch.randint(50, (real,), generator=generator),
            torch.randint(9, (real,), generator=generator),
        )


def check(runner: Runner) -> None:
    """Each batch gets what a forward without graphs gives for it, bit for bit on whole batches."""
    for ids, positions in batches():
        got = runner.execute(ids, positions)
        want = runner.forward(ids, positions, torch.arange(len(ids)))
        torch.testing.assert_close(got.next_token_logits, want.next_token_logits)
        torch.testing.assert_close(got.hidden_states[0], want.hidden_states[0])
        assert type(got) is Output
        assert got.next_token_logprobs is None


def test_graphs_serve_every_batch(sglang: SimpleNamespace) -> None:
    """Each shape is captured and compared, each batch is replayed, and the buffers are as they were."""
    runner = Runner(sglang)
    runner.buffers.input_ids.fill_(7)
    runner.capture()
    assert runner.buffers.input_ids.tolist() == [7] * 8
    assert runner.warmed == len(SIZES)
    before = {key: stats.hits for key, stats in runner.backend.get_stats().items()}
    assert set(before) == {sglang.key(size) for size in SIZES}
    check(runner)
    assert sum(stats.hits for stats in runner.backend.get_stats().values()) == sum(before.values()) + 10
    assert not runner.backend.eager
    assert sglang.context.has_forward_context() is False
    runner.backend.cleanup()
    assert not runner.backend.can_run(None, sglang.key(1))


def test_a_guard_that_fails_runs_the_forward(sglang: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """A weight that has moved: the answer is eager's, and the log says why, once."""
    runner = Runner(sglang)
    runner.capture()
    runner.model.head = torch.nn.Linear(16, 50)
    with caplog.at_level(logging.WARNING):
        check(runner)
    assert sum(runner.backend.eager.values()) == 10
    told = [message for message in caplog.messages if message.startswith("a forward ran eagerly: ")]
    assert len(told) == len(runner.backend.eager) == 1


class Unseen(Spy):
    """A number of Python that follows the runner's first token, and that no guard looks into."""

    __module__ = Spy.__module__

    def __getitem__(self, index: Any) -> Any:
        return float(super().__getitem__(0)[0])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda tokens: lambda hidden: float(hidden.sum()), "capture_unsafe"),
        (lambda tokens: lambda hidden: iter(hidden), "output_unsupported"),
        (lambda tokens: (lambda held: lambda hidden: hidden * held[0])(Unseen([tokens])), "verification_failed"),
        (lambda tokens: lambda hidden: hidden * float(tokens[0]), "state_unseen"),
    ],
    ids=["a read by the host", "an iterator", "a value that is frozen", "a value that changes"],
)
def test_what_cannot_be_captured_has_no_graph(sglang: SimpleNamespace, make: Any, reason: str) -> None:
    """``can_run`` says no, and the runner runs the batch eagerly."""
    runner = Runner(sglang)
    runner.model.extra = make(memoryview(runner.buffers.input_ids.numpy()))
    runner.capture()
    assert not any(runner.backend.can_run(None, sglang.key(size)) for size in SIZES)
    assert {each.value for each in runner.backend.eager} == {reason}
    check(runner)


def test_a_graph_that_another_rank_lacks_is_not_kept(sglang: SimpleNamespace) -> None:
    """All ranks run the shape eagerly: SGLang pads a step that graphs serve, and collectives must fit."""

    def refuse(votes: list[torch.Tensor], op: Any) -> SimpleNamespace:
        votes[0].zero_()
        return SimpleNamespace(wait=lambda: None)

    sglang.parallel.tp_group.cpu_group = SimpleNamespace(size=lambda: 2, allreduce=refuse)
    runner = Runner(sglang)
    runner.capture()
    assert not any(runner.backend.can_run(None, sglang.key(size)) for size in SIZES)
    check(runner)


def test_the_backend_has_their_methods(sglang: SimpleNamespace, request: pytest.FixtureRequest) -> None:
    """Every abstract method of theirs, with their parameters."""
    assert set(METHODS) == sglang.base.__abstractmethods__
    for name in METHODS:
        ours = inspect.signature(getattr(sglang.backend, name)).parameters
        if "sources" in request.node.callspec.id:
            theirs = inspect.signature(getattr(sglang.base, name)).parameters
            assert [(each.name, each.kind, each.default) for each in ours.values()] == [
                (each.name, each.kind, each.default) for each in theirs.values()
            ]


def test_all_ranks_must_agree() -> None:
    """One rank that says no is heard by both."""
    store, answers = dist.HashStore(), {}

    def ask(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, 2)
        answers[rank] = [on_all_ranks(True, group), on_all_ranks(rank == 0, group)]

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {0: [True, False], 1: [True, False]}
    assert on_all_ranks(True, None)
    assert not on_all_ranks(False, None)
