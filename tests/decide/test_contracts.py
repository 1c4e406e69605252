"""vLLM's dispatcher contracts, rule by rule: each rule of each version has a row, and every row is asked.

0.11.1: ``vllm/v1/cudagraph_dispatcher.py``, where the caller pads. 0.33: the same file, which pads, counts adapters and
takes modes; its defects are rules here, turned round. MRV2: the candidate table of the second model runner.
"""

from collections.abc import Callable
from typing import Any

import pytest

from graphdispatch import CUDAGraphMode as Mode
from graphdispatch.engines import BatchDescriptor, CudagraphKeyDispatcher
from graphdispatch.errors import ConfigError, FallbackError

NONE, PIECEWISE, FULL = Mode.NONE, Mode.PIECEWISE, Mode.FULL
DECODE_ONLY, BOTH = Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE
NO_GRAPH = (NONE, None)


def desc(tokens: int, uniform: bool = False, variant: Any = None, reqs: int | None = None) -> BatchDescriptor:
    """A descriptor, with short names."""
    return BatchDescriptor(tokens, reqs, uniform, variant)


def plan(mode: Mode | None = BOTH, query_len: int = 1, **options: Any) -> CudagraphKeyDispatcher:
    """A dispatcher over sizes 1, 8, 16, 24 for up to 16 requests, initialised unless ``mode`` is None."""
    made = CudagraphKeyDispatcher(**{"capture_sizes": (1, 8, 16, 24), "max_num_reqs": 16, **options})
    if mode is not None:
        made.initialize_cudagraph_keys(mode, query_len)
    return made


def added(made: CudagraphKeyDispatcher, *keys: tuple[Mode, BatchDescriptor]) -> CudagraphKeyDispatcher:
    """The same with more keys."""
    for key in keys:
        made.add_cudagraph_key(*key)
    return made


def padded(made: CudagraphKeyDispatcher, tokens: int, reqs: int | None = None, **batch: Any) -> tuple[Mode, Any]:
    """What ``decide`` gives, as a pair like ``dispatch``'s."""
    found = made.decide(tokens, reqs, **batch)
    assert found.size == (found.descriptor.num_tokens if found.descriptor else tokens)
    return found.mode, found.descriptor


RULES_0_11_1: dict[str, list[tuple[Callable[[], Any], Any]]] = {
    "1 a key without its kind": [(lambda: desc(8, True, 2, 4).non_uniform, desc(8, False, 2, 4))],
    "2 nothing before the keys are initialised": [
        (lambda: added(plan(None), (FULL, desc(8))).dispatch(desc(8)), NO_GRAPH),
        (lambda: plan(None).get_capture_descs(), []),
    ],
    "3 exact in FULL, else the general key in FULL": [
        (lambda: plan(DECODE_ONLY).dispatch(desc(8, True)), (FULL, desc(8, True))),
        (lambda: plan(FULL).dispatch(desc(8, True)), (FULL, desc(8))),
        (lambda: plan(FULL).dispatch(desc(8)), (FULL, desc(8))),
    ],
    "3 cascade attention takes no full graph": [
        (lambda: plan(FULL).dispatch(desc(8), True), NO_GRAPH),
        (lambda: plan(DECODE_ONLY).dispatch(desc(8, True), use_cascade_attn=True), NO_GRAPH),
    ],
    "4 the general key in PIECEWISE, cascade or not": [
        (lambda: plan().dispatch(desc(24, True)), (PIECEWISE, desc(24))),
        (lambda: plan().dispatch(desc(8, True), use_cascade_attn=True), (PIECEWISE, desc(8))),
        (lambda: added(plan(NONE), (PIECEWISE, desc(8, True))).dispatch(desc(8, True)), NO_GRAPH),
    ],
    "5 else none": [
        (lambda: plan().dispatch(desc(15)), NO_GRAPH),
        (lambda: plan(NONE).dispatch(desc(8)), NO_GRAPH),
        (lambda: plan(DECODE_ONLY).dispatch(desc(8)), NO_GRAPH),
    ],
    "6 mixed keys for every size and adapter case": [
        (lambda: plan(PIECEWISE, variants=(True, False)).dispatch(desc(24, variant=True)),
         (PIECEWISE, desc(24, variant=True))),
        (lambda: len(plan(FULL, variants=(True, False)).cudagraph_keys[FULL]), 8),
        (lambda: plan(FULL, variants=(True,)).dispatch(desc(8, variant=False)), NO_GRAPH),
    ],
    "6 uniform keys from the query length to what all requests schedule, where decode is apart": [
        (lambda: {key.num_tokens for key in plan(DECODE_ONLY, 2, max_num_reqs=8).cudagraph_keys[FULL]}, {8, 16}),
        (lambda: any(key.is_uniform_decode for key in plan(FULL).cudagraph_keys[FULL]), False),
    ],
}  # fmt: skip


RULES_0_33: dict[str, list[tuple[Callable[[], Any], Any]]] = {
    "1 piecewise keys name neither requests nor kind": [
        (lambda: padded(plan(PIECEWISE), 7, 7, query_len=1), (PIECEWISE, desc(8))),
    ],
    "2 the modes allowed less those excluded": [
        (lambda: padded(plan(), 8, 8, query_len=1, excluded_modes={FULL}), (PIECEWISE, desc(8))),
        (lambda: padded(plan(), 8, 8, query_len=1, allowed_modes={NONE, PIECEWISE}), (PIECEWISE, desc(8))),
        (lambda: padded(plan(FULL), 8, excluded_modes={FULL}), NO_GRAPH),
    ],
    "3 none at once": [
        (lambda: padded(plan(None), 8), NO_GRAPH),
        (lambda: padded(plan(NONE), 8), NO_GRAPH),
        (lambda: padded(plan(), 25), NO_GRAPH),
        (lambda: padded(plan(), 8, allowed_modes={NONE}), NO_GRAPH),
    ],
    "4 adapters are rounded up to a captured count": [
        (lambda: padded(plan(FULL, variants=(0, 1, 2, 4, 5)), 7, variant=3), (FULL, desc(8, variant=4))),
        (lambda: padded(plan(FULL, variants=(5,)), 7, variant=0), (FULL, desc(8, variant=5))),
    ],
    "5 FULL, then PIECEWISE, then none; uniform counts only where decode is apart": [
        (lambda: padded(plan(), 7, 7, query_len=1), (FULL, desc(8, True))),
        (lambda: padded(plan(), 7, 3), (PIECEWISE, desc(8))),
        (lambda: padded(plan(DECODE_ONLY), 7, 3), NO_GRAPH),
        (lambda: padded(plan(FULL), 7, 7, query_len=1), (FULL, desc(8))),
    ],
    "6 a uniform graph has its tokens over the query length as requests": [
        (lambda: padded(plan(DECODE_ONLY, 4, query_lens=[4]), 12, 3, query_len=4), (FULL, desc(16, True, reqs=4))),
    ],
    "6 defect: a size that the query length does not divide stops the engine": [
        (lambda: padded(plan(query_len=3), 15, 5, query_len=3), (FULL, desc(24, True))),
        (lambda: padded(plan(query_len=5, max_num_reqs=4), 10, 2, query_len=5), (PIECEWISE, desc(16))),
    ],
    "7 capture goes from large to small, PIECEWISE first": [
        (lambda: [(mode, [key.num_tokens for key in keys]) for mode, keys in plan().get_capture_descs()],
         [(PIECEWISE, [24, 16, 8, 1]), (FULL, [16, 8, 1])]),
        (lambda: [key.variant for key in plan(FULL, capture_sizes=[8], variants=(0, 2, 1)).get_capture_descs()[0][1]],
         [2, 1, 0]),
    ],
    "9 limit: only one size is tried": [
        (lambda: padded(added(plan(PIECEWISE), (FULL, desc(24))), 7), (FULL, desc(24))),
    ],
}  # fmt: skip


RULES_MRV2: dict[str, list[tuple[Callable[[], Any], Any]]] = {
    "uniform decode pads up to a full graph": [
        (lambda: padded(added(plan(PIECEWISE, 6), (FULL, desc(18, True, reqs=3))), 12, 2, query_len=6),
         (FULL, desc(18, True, reqs=3))),
    ],
    "an exact match is not padded further": [
        (lambda: padded(plan(DECODE_ONLY, 6, query_lens=[6]), 12, 2, query_len=6), (FULL, desc(12, True, reqs=2))),
    ],
    "a mixed batch never gets a uniform graph, and still gets one": [
        (lambda: padded(added(plan(PIECEWISE), (FULL, desc(12, True))), 12, 5), (PIECEWISE, desc(16))),
    ],
    "uniform decode beyond the sizes falls back": [
        (lambda: padded(plan(), 17, 17, query_len=1), (PIECEWISE, desc(24))),
        (lambda: padded(plan(DECODE_ONLY), 17, 17, query_len=1), NO_GRAPH),
    ],
    "query lengths that share a token count keep their graphs": [
        (lambda: padded(plan(DECODE_ONLY, 2, query_lens=[4]), 8, 2, query_len=4), (FULL, desc(8, True, reqs=2))),
        (lambda: padded(plan(DECODE_ONLY, 2, query_lens=[4]), 8, 4, query_len=2), (FULL, desc(8, True, reqs=4))),
    ],
    "a query length that divides the sizes changes nothing": [
        (lambda: padded(plan(DECODE_ONLY, 2, query_lens=[2]), 16, 8, query_len=2), (FULL, desc(16, True, reqs=8))),
    ],
    "enough requests": [
        (lambda: padded(added(plan(PIECEWISE), (FULL, desc(8, reqs=4))), 6, 4), (FULL, desc(8, reqs=4))),
        (lambda: padded(added(plan(PIECEWISE), (FULL, desc(8, reqs=4))), 6, 5), (PIECEWISE, desc(8))),
    ],
    "a bound on the query length is a count like any other, and none is known without it": [
        (lambda: padded(plan(FULL, variants=(2, 4)), 7, 3, variant=3), (FULL, desc(8, variant=4))),
        (lambda: padded(plan(FULL, variants=(2, 4)), 7, 3, variant=5), NO_GRAPH),
        (lambda: padded(plan(FULL, variants=(2, 4)), 7, 3), NO_GRAPH),
    ],
    "micro-batches are equal or no graph": [
        (lambda: padded(plan(FULL, variants=(None, "2 ubatches")), 7, variant="2 ubatches"),
         (FULL, desc(8, variant="2 ubatches"))),
        (lambda: padded(plan(FULL, variants=(None, "2 ubatches")), 7, variant="3 ubatches"), NO_GRAPH),
    ],
}  # fmt: skip

ROWS = [
    pytest.param(ask, answer, id=f"{version}: {rule}")
    for version, rules in (("0.11.1", RULES_0_11_1), ("0.33", RULES_0_33), ("MRV2", RULES_MRV2))
    for rule, rows in rules.items()
    for ask, answer in rows
]


@pytest.mark.parametrize(("ask", "answer"), ROWS)
def test_a_rule_of_the_contracts(ask: Callable[[], Any], answer: Any) -> None:
    """Mode and descriptor, or none."""
    assert ask() == answer


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (lambda: plan(piecewise=False), ConfigError, "must not need piecewise graphs"),
        (lambda: added(plan(), (NONE, desc(8))), ConfigError, "runtime_mode must be PIECEWISE or FULL"),
        (lambda: plan().decide(8, allowed_modes={FULL}, excluded_modes={FULL}), ConfigError, "must leave some of NONE"),
        (lambda: plan().decide(25, excluded_modes={NONE}), FallbackError, "allowed_modes must hold NONE"),
        (lambda: plan(compile_sizes=[8, 12, 40]), ConfigError, r"compile_sizes must be among .* got \[12\]"),
    ],
    ids=[
        "0.11.1: 7 unsplit model",
        "0.11.1: 7 mode of a key",
        "0.33: 2 no mode",
        "0.33: 5 NONE",
        "0.33: 8 compile_sizes",
    ],
)
def test_what_the_contracts_assert_is_an_error_with_a_remedy(
    broken: Callable[[], Any], error: type[Exception], message: str
) -> None:
    """Each assertion of theirs is a typed error here."""
    with pytest.raises(error, match=message):
        broken()


@pytest.mark.parametrize("kind", [set, frozenset, list])
def test_the_callers_modes_stay_as_they_are(kind: Callable[..., Any]) -> None:
    """0.33: 9, the defect that ``allowed -= excluded`` changes the caller's set."""
    allowed = kind([NONE, PIECEWISE, FULL])
    plan().decide(8, allowed_modes=allowed, excluded_modes=kind([FULL]))
    assert allowed == kind([NONE, PIECEWISE, FULL])


def test_a_compiled_size_beyond_the_graphs_is_no_fault() -> None:
    """0.33: 8, sizes above the largest graph are never padded."""
    assert padded(plan(compile_sizes=[8, 40]), 8, 3) == (PIECEWISE, desc(8))
