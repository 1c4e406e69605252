"""Random models under random sequences of calls: ``graphed`` and a wrapper give eager's answer, effects and errors.

Behind ``graphed`` the core and Python serve equal models side by side; they decide alike and keep equal accounts.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Graphed, Reason, eager_break, graphed
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper, OutputView
from graphdispatch.errors import CaptureError, ConfigError, StaleOutputError
from graphdispatch.stats import COUNTED_BY_HITS

from .calls import (
    Done,
    Plan,
    assert_same,
    assert_same_outcome,
    assert_same_state,
    perform,
    plans,
    snapshot,
    sound_plans,
    twists,
)
from .models import AWKWARD, PLAIN, SLOTS, STATEFUL, RandomModel, Spec, specs

_HOW = st.fixed_dictionaries(
    {
        "sizes": st.sampled_from([(4,), (4,), (2, 4), (1, 2, 4)]),
        "mode": st.sampled_from(["FULL", "FULL", "PIECEWISE"]),
        "pad": st.sampled_from([{"slots": SLOTS, "x": "repeat_last"}, {"slots": SLOTS, "x": "zero"}]),
    }
)
_OPTIONS = st.builds(
    CUDAGraphOptions,
    outputs=st.sampled_from(["clone", "view", "static"]),
    padding_writes=st.just("allow"),
    verify_every=st.sampled_from([None, None, None, 1, 2]),
    capture_after=st.sampled_from([1, 1, 2]),
    max_cached_graphs=st.sampled_from([8, 8, 2, 1]),
)
_ROWS = st.lists(st.sampled_from([3, 4, 3, 4, 2, 1]), min_size=4, max_size=10)


class Sequences(RuleBasedStateMachine):
    """One model graphed, its twin run eagerly, and another one graphed whose calls Python serves; every rule does the
    same to all."""

    model: RandomModel
    twin: RandomModel
    other: RandomModel
    step: Graphed[..., Any]
    reference: Graphed[..., Any]

    @initialize(spec=specs(PLAIN, STATEFUL, AWKWARD), how=_HOW, options=_OPTIONS, plan=sound_plans(), rows=_ROWS)
    def start(self, spec: Spec, how: dict[str, Any], options: CUDAGraphOptions, plan: Plan, rows: list[int]) -> None:
        """Make the models, and serve some calls."""
        self.model, self.twin, self.other = spec.build(), spec.build(), spec.build()
        if how["mode"] == "PIECEWISE":
            for model in (self.model, self.other):
                eager_break(model.parts[0])
        self.outputs = options.outputs
        self.drifted = False
        self.kept: list[tuple[Any, Any]] = []
        self.max_graphs = options.max_cached_graphs
        dynamic = {"x": spec.batch_dim, "ids": 0, "slots": 0}
        self.step, self.reference = (
            graphed(model, dynamic=dynamic, options=options, **how) for model in (self.model, self.other)
        )
        self._serve(plan, rows, None)

    @rule(plan=plans())
    def call(self, plan: Plan) -> None:
        """Any call."""
        self._call_all(plan)

    @property
    def served(self) -> tuple[tuple[Graphed[..., Any], RandomModel], ...]:
        """The callables with graphs, and the model of each."""
        return (self.step, self.model), (self.reference, self.other)

    @rule(plan=sound_plans(), rows=_ROWS, twist=st.one_of(st.none(), twists()))
    def serve(self, plan: Plan, rows: list[int], twist: dict[str, Any] | None) -> None:
        """Calls of one kind, then one that differs, and one more of the kind."""
        self._serve(plan, rows, twist)

    def _serve(self, plan: Plan, rows: list[int], twist: dict[str, Any] | None) -> None:
        # Each call has rows and numbers of its own: enough to capture, compare and replay.
        alike = [dataclasses.replace(plan, rows=count, seed=plan.seed + 41 * shift) for shift, count in enumerate(rows)]
        for one in alike[:-1]:
            self._call_all(one)
        if twist is not None:
            self._call_all(dataclasses.replace(alike[-1], **twist))
        self._call_all(alike[-1])

    @rule(data=st.data(), how=st.sampled_from(["data", "replaced", "in_place", "loaded"]))
    def move_weight(self, data: st.DataObject, how: str) -> None:
        """A parameter gets other values, at the same address or elsewhere."""
        names = [name for name, _ in self.model.named_parameters()]
        if names:
            name = data.draw(st.sampled_from(names))
            for model in (self.model, self.twin, self.other):
                _change(model, name, how)

    @rule(how=st.sampled_from(["flip_training", "clear", "reload", "invalidate", "sleep", "wake"]))
    def disturb(self, how: str) -> None:
        """Another training mode; all graphs released, once or until woken; or the eager model's state loaded, which
        ends all rounding."""
        if how == "flip_training":
            for model in (self.model, self.twin, self.other):
                model.train(not model.training)
        elif how == "reload":
            if "rebinds" not in self.model.spec.parts:  # its buffer may have been made in inference mode
                for model in (self.model, self.other):
                    model.load_state_dict(self.twin.state_dict())
                self.drifted = False
        else:
            for step in (self.step, self.reference):
                getattr(step, how)(*([how] if how in ("invalidate", "sleep") else []))
                assert how == "wake" or step.entries == []

    @precondition(lambda self: "rebinds" not in self.model.spec.parts)
    @rule(
        rows=st.sampled_from([1, 2, 3, 4]),
        layout=st.sampled_from(["plain", "transposed", "strided"]),
        place=st.sampled_from([None, None, None, 0, 1, 2]),
    )
    def prewarm(self, rows: int, layout: str, place: int | None) -> None:
        """All sizes are captured, or one: that leaves no trace in arguments or state."""
        plan = Plan(rows, seed=99, layout=layout)
        for step, model in self.served:
            args, kwargs = plan.make(model)
            # A model may raise at one of the sizes, and a cache may be too small for all sizes: both are reported.
            with contextlib.suppress(CaptureError, ConfigError, IndexError):
                one = None if place is None else [step.sizes[place % len(step.sizes)]]
                step.prewarm(*args, sizes=one, **kwargs)
            assert_same(plan.make(self.twin), (args, kwargs), exact=True)

    @rule(plan=plans())
    def explain(self, plan: Plan) -> None:
        """A question counts nothing."""
        for step, model in self.served:
            args, kwargs = plan.make(model)
            calls = step.stats.calls
            with contextlib.suppress(ConfigError):
                assert step.explain(*args, **kwargs)
            assert step.stats.calls == calls

    @invariant()
    def is_sound(self) -> None:
        """The accounts agree, the state is eager's, and what was returned before is as it was, or known stale."""
        for step, model in self.served:
            step.check_integrity()
            assert len(step.entries) <= self.max_graphs
            assert_same_state(self.twin, model, exact=not self.drifted)
        assert _accounts(self.step) == _accounts(self.reference)
        for held, then in self.kept:
            with contextlib.suppress(StaleOutputError):
                assert_same(then, held.get() if isinstance(held, OutputView) else held, exact=True)

    def _call_all(self, plan: Plan) -> None:
        got = perform(self.step, self.model, plan)
        other = perform(_in_python(self.reference), self.other, plan)
        if isinstance(got.error, ConfigError) and plan.fault == "no_dims":
            return
        assert _said(self.step) == _said(self.reference)
        want = perform(self.twin, self.twin, plan)
        decision = self.step.last_decision
        if decision is not None and decision.reason.is_graph:
            self.drifted |= decision.reason is Reason.PADDED or not plan.is_dense
        for done in (got, other):
            assert_same_outcome(want, done, exact=not self.drifted)
        self._keep(got)

    def _keep(self, got: Done) -> None:
        if got.error is None and self.outputs != "static" and not self.model.spec.hands_out_shared:
            self.kept = [*self.kept[-2:], (got.handed_out, snapshot(got.result))]


def _in_python(step: Graphed[..., Any]) -> Callable[..., Any]:
    """What calls ``step`` as if there were no core."""
    return lambda *args, **kwargs: step._server.serve_in_python(step._route, args, kwargs)


def _said(step: Graphed[..., Any]) -> Any:
    """What the latest decision says of the call."""
    decision = step.last_decision
    return None if decision is None else decision._replace(detail="")


def _accounts(step: Graphed[..., Any]) -> dict[str, Any]:
    """What was counted, without times and bytes."""
    names = (*COUNTED_BY_HITS, "reasons", "rows", "captures", "capture_failures", "evictions")
    return {name: getattr(step.stats, name) for name in names} | {"sizes": step.captured_sizes}


def _change(model: RandomModel, name: str, how: str) -> None:
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, attribute)
    new = old.detach() * 0.5 + 0.125
    if how == "data":
        old.data = new
    elif how == "replaced":
        setattr(module, attribute, torch.nn.Parameter(new, requires_grad=False))
    elif how == "in_place":
        with torch.no_grad():
            old.copy_(new)
    else:
        model.load_state_dict({name: new}, strict=False)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(
    settings.default, max_examples=settings.default.max_examples // 2, stateful_step_count=12
)


@given(
    spec=specs(PLAIN, STATEFUL, AWKWARD),
    sequence=st.lists(
        st.tuples(st.one_of(sound_plans(), plans()), st.sampled_from([1, 2, 4]), st.integers(1, 5)),
        min_size=2,
        max_size=6,
    ),
    options=st.builds(
        CUDAGraphOptions,
        inputs=st.sampled_from(["copy", "copy", "static"]),
        outputs=st.sampled_from(["clone", "view", "static"]),
    ),
    mode=st.sampled_from([CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE]),
    max_graphs=st.integers(1, 3),
)
def test_every_call_of_a_wrapper_is_eagers(
    spec: Spec, sequence: list[tuple[Plan, int, int]], options: CUDAGraphOptions, mode: CUDAGraphMode, max_graphs: int
) -> None:
    """Whatever descriptor a call carries: the answer, the state and the errors are eager's, and with dense arguments
    its very bits, since nothing is padded."""
    model, twin = spec.build(), spec.build()
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
