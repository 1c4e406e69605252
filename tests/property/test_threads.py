"""Several threads call one graphed object: each gets eager's answer for its own arguments."""

from collections.abc import Callable
from functools import partial
from threading import Barrier
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphOptions, graphed

from ..helpers import in_threads
from .calls import Plan
from .compare import assert_same_outcome, perform
from .models import PLAIN, RandomModel, Spec, specs

THREADS = 4
_OUTPUTS = ("tensor", "nest", "transposed", "pieces", "rows_doubled", "integers")
_STATELESS = specs(PLAIN, outputs=_OUTPUTS).filter(lambda spec: not spec.writes_argument)
_SEQUENCE = st.lists(
    st.builds(
        Plan,
        rows=st.integers(1, 6),
        seed=st.integers(0, 1000),
        layout=st.sampled_from(["plain", "plain", "transposed"]),
        scale=st.sampled_from([None, None, 0.5]),
        context=st.sampled_from(["no_grad", "no_grad", "inference"]),
    ),
    min_size=5,
    max_size=10,
)
_SEQUENCES = st.lists(_SEQUENCE, min_size=THREADS, max_size=THREADS)
Call = Callable[..., Any]


def run_together(model: RandomModel, call: Call, plans: list[Plan], gate: Barrier) -> None:
    """One thread's calls, each compared with eager."""
    gate.wait()
    for plan in plans:
        assert_same_outcome(perform(model, model, plan), perform(call, model, plan), exact=False)


@given(spec=_STATELESS, sequences=_SEQUENCES, max_graphs=st.sampled_from([1, 2, 8]), clears=st.booleans())
def test_threads_share_one_graphed(spec: Spec, sequences: list[list[Plan]], max_graphs: int, clears: bool) -> None:
    """Captures, replays, evictions, ``clear()`` and eager steps of other threads never show in an answer."""
    model = spec.build()
    step = graphed(
        model,
        dynamic={"x": spec.batch_dim, "ids": 0, "slots": 0},
        sizes=(1, 2, 4),
        options=CUDAGraphOptions(max_cached_graphs=max_graphs, capture_after=1 if clears else 2),
    )

    def cleared(*args: Any, **kwargs: Any) -> Any:
        step.clear()
        return step(*args, **kwargs)

    calls = [step] * (THREADS - 1) + [cleared if clears else step]
    gate = Barrier(THREADS)
    in_threads(*(partial(run_together, model, *work, gate) for work in zip(calls, sequences, strict=True)))
    step.check_integrity()
    assert step.stats.calls == sum(map(len, sequences))
