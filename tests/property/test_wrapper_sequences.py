"""Random models under random sequences of calls: ``CUDAGraphWrapper`` gives eager's answer, effects and errors."""

import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode, CUDAGraphOptions
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper

from .calls import Plan, plans, sound_plans
from .compare import assert_same_outcome, assert_same_state, perform
from .models import AWKWARD, PLAIN, STATEFUL, Spec, specs


@given(
    spec=specs(PLAIN, STATEFUL, AWKWARD),
    sequence=st.lists(
        st.tuples(st.one_of(sound_plans(), plans()), st.sampled_from([1, 2, 4]), st.integers(1, 5)),
        min_size=2,
        max_size=6,
    ),
    inputs=st.sampled_from(["copy", "copy", "static"]),
    outputs=st.sampled_from(["clone", "view", "static"]),
    mode=st.sampled_from([CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE]),
    max_graphs=st.integers(1, 3),
)
def test_every_call_is_eagers(
    spec: Spec,
    sequence: list[tuple[Plan, int, int]],
    inputs: Any,
    outputs: Any,
    mode: CUDAGraphMode,
    max_graphs: int,
) -> None:
    """Whatever descriptor a call carries: the answer, the state and the errors are eager's, and with dense arguments
    its very bits, since nothing is padded."""
    model, twin = spec.build(), spec.build()
    options = CUDAGraphOptions(inputs=inputs, outputs=outputs)
    wrapper = CUDAGraphWrapper(model, mode, options, max_graphs)
    exact = True

    for plan, rows, times in sequence:

        def step(*args: Any, _rows: int = rows, **kwargs: Any) -> Any:
            descriptor = BatchDescriptor(_rows)
            return wrapper(*args, batch_descriptor=descriptor, cudagraph_runtime_mode=mode, **kwargs)

        for shift in range(times):
            other = dataclasses.replace(plan, seed=plan.seed + 41 * shift)
            exact &= plan.is_dense
            assert_same_outcome(perform(twin, twin, other), perform(step, model, other), exact=exact)
            assert_same_state(twin, model, exact=exact)
            wrapper.check_integrity()
