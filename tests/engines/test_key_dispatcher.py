"""vLLM's dispatcher contracts, each rule once; tables, their errors, and swaps under readers.

0.11.1: ``vllm/v1/cudagraph_dispatcher.py``, where the caller pads. 0.33: the same file, which pads, counts adapters and
takes modes; its defects are rules here, turned round. MRV2: the candidate table of the second model runner. What holds
for any keys and any batch (an exact match first, the smallest padding, the kind of a batch, enough requests and
adapters, equal micro-batches), ``tests/property/test_tables.py`` compares with a search.
"""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from graphdispatch import CUDAGraphMode as Mode
from graphdispatch import Reason
from graphdispatch.engines import BatchDescriptor, CudagraphKeyDispatcher
from graphdispatch.engines.keys import KeyTable
from graphdispatch.errors import ConfigError, FallbackError

from ..helpers import run_python, switching_often

NONE, PIECEWISE, FULL = Mode.NONE, Mode.PIECEWISE, Mode.FULL
DECODE_ONLY, BOTH = Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE
NO_GRAPH = (NONE, None)
Key = tuple[Mode, BatchDescriptor]


def desc(tokens: int, uniform: bool = False, variant: Any = None, reqs: int | None = None) -> BatchDescriptor:
    """A descriptor, with short names."""
    return BatchDescriptor(tokens, reqs, uniform, variant)


def plan(mode: Mode | None = BOTH, query_len: int = 1, *keys: Key, **options: Any) -> CudagraphKeyDispatcher:
    """A dispatcher over sizes 1, 8, 16, 24 for up to 16 requests and ``keys``, initialised unless ``mode`` is None."""
    made = CudagraphKeyDispatcher(**{"capture_sizes": (1, 8, 16, 24), "max_num_reqs": 16, **options})
    if mode is not None:
        made.initialize_cudagraph_keys(mode, query_len)
    for key in keys:
        made.add_cudagraph_key(*key)
    return made


def full(*keys: BatchDescriptor, **options: Any) -> CudagraphKeyDispatcher:
    """A dispatcher of these FULL keys alone."""
    made = plan(None, **options)
    made.table = KeyTable({FULL: keys, PIECEWISE: ()}, mode=BOTH, query_len=1, max_num_reqs=made.max_num_reqs)
    return made


def padded(made: CudagraphKeyDispatcher, tokens: int, reqs: int | None = None, **batch: Any) -> tuple[Mode, Any]:
    """What ``decide`` gives, as a pair like ``dispatch``'s; the second time it is the very decision of the first."""
    found = made.decide(tokens, reqs, **batch)
    assert made.decide(tokens, reqs, **batch) is found
    assert found.size == (found.descriptor.num_tokens if found.descriptor else tokens)
    return found.mode, found.descriptor


RULES_0_11_1: dict[str, list[tuple[Callable[[], Any], Any]]] = {
    "1 a key without its kind": [(lambda: desc(8, True, 2, 4).non_uniform, desc(8, False, 2, 4))],
    "2 nothing before the keys are initialised": [
        (lambda: plan(None, 1, (FULL, desc(8))).dispatch(desc(8)), NO_GRAPH),
        (lambda: plan(None).keys_initialized, False),
    ],
    "3 exact in FULL, else the general key in FULL": [
        (lambda: plan(FULL).dispatch(desc(8, reqs=5)), (FULL, desc(8))),
        (lambda: plan(query_len=2).dispatch(desc(8, True, reqs=4)), (FULL, desc(8, True))),
        (lambda: plan(query_len=2).dispatch(desc(8, True, reqs=8)), (PIECEWISE, desc(8))),
    ],
    "6 mixed keys for every size, in any order, and adapter case": [
        (lambda: plan(capture_sizes=(24, 8, 16, 1)).cudagraph_keys == plan().cudagraph_keys, True),
        (lambda: len(plan(FULL, variants=(True, False)).cudagraph_keys[FULL]), 8),
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
    ],
    "4 adapters are rounded up to a captured count, an exact one is none": [
        (lambda: padded(plan(FULL, variants=(0, 1, 2, 4, 5)), 7, variant=3), (FULL, desc(8, variant=4))),
        (lambda: padded(plan(FULL, variants=(0, 1, 2, 4, 5)), 7, variant=1), (FULL, desc(8, variant=1))),
        (lambda: padded(plan(FULL, variants=(0, 1, 2, 4, 5)), 7, variant=6), NO_GRAPH),
    ],
    "5 FULL, then PIECEWISE, then none; uniform counts only where decode is apart": [
        (lambda: padded(plan(), 7, 7, query_len=1), (FULL, desc(8, True))),
        (lambda: padded(plan(), 7, 3), (PIECEWISE, desc(8))),
        (lambda: padded(plan(DECODE_ONLY), 7, 3), NO_GRAPH),
        (lambda: padded(plan(FULL), 7, 7, query_len=1), (FULL, desc(8))),
    ],
    "6 defect: a size that the query length does not divide stops the engine": [
        (lambda: padded(plan(query_len=3), 15, 5, query_len=3), (FULL, desc(24, True))),
        (lambda: padded(plan(query_len=5, max_num_reqs=4), 10, 2, query_len=5), (PIECEWISE, desc(16))),
    ],
    "9 limit: only one size is tried": [
        (lambda: padded(plan(PIECEWISE, 1, (FULL, desc(24))), 7), (FULL, desc(24))),
    ],
}  # fmt: skip


RULES_MRV2: dict[str, list[tuple[Callable[[], Any], Any]]] = {
    "an unknown number of requests counts as the most possible": [
        (lambda: padded(full(desc(16, reqs=4), desc(24)), 10), (FULL, desc(24))),
        (lambda: padded(full(desc(16, reqs=4), desc(24), max_num_reqs=4), 10), (FULL, desc(16, reqs=4))),
        (lambda: padded(full(desc(16, reqs=4)), 8, query_len=2), (FULL, desc(16, reqs=4))),
    ],
    "a mixed batch never gets a uniform graph, and still gets one": [
        (lambda: padded(plan(PIECEWISE, 1, (FULL, desc(12, True))), 12, 5), (PIECEWISE, desc(16))),
        *[(lambda batch=batch: padded(plan(query_len=2), *batch, query_len=2), (PIECEWISE, desc(8)))
          for batch in ((7, None), (7, 3), (8, 5), (6, 6))],
    ],
    "uniform decode beyond the sizes falls back": [
        (lambda: padded(plan(), 17, 17, query_len=1), (PIECEWISE, desc(24))),
        (lambda: padded(plan(DECODE_ONLY), 17, 17, query_len=1), NO_GRAPH),
    ],
}  # fmt: skip

ROWS = [
    pytest.param(decide, answer, id=f"{version}: {rule}")
    for version, rules in (("0.11.1", RULES_0_11_1), ("0.33", RULES_0_33), ("MRV2", RULES_MRV2))
    for rule, rows in rules.items()
    for decide, answer in rows
]


@pytest.mark.parametrize(("decide", "answer"), ROWS)
def test_a_rule_of_the_contracts(decide: Callable[[], Any], answer: Any) -> None:
    """Mode and descriptor, or none."""
    assert decide() == answer


def rules_of_0_11_1(keys: Any, batch: BatchDescriptor, cascade: bool) -> tuple[Mode, BatchDescriptor | None]:
    """Rules 3 to 5 as a chain of set look-ups."""
    if not cascade and batch in keys[FULL]:
        return FULL, batch
    if not cascade and batch.non_uniform in keys[FULL]:
        return FULL, batch.non_uniform
    return (PIECEWISE, batch.non_uniform) if batch.non_uniform in keys[PIECEWISE] else NO_GRAPH


@pytest.mark.parametrize(("mode", "query_len"), list(product(Mode, [1, 2, 3])))
def test_dispatch_agrees_with_0_11_1_on_every_descriptor(mode: Mode, query_len: int) -> None:
    """Every size, kind, LoRA case and attention, with keys added by hand besides."""
    others = (FULL, desc(5, variant=True)), (FULL, desc(6, True, False)), (PIECEWISE, desc(7, True, False))
    dispatcher = plan(mode, query_len, *others, max_num_reqs=6, variants=(True, False))
    for tokens, uniform, variant, cascade in product(range(26), (False, True), (None, False, True), (False, True)):
        batch = desc(tokens, uniform, variant)
        assert dispatcher.dispatch(batch, cascade) == rules_of_0_11_1(dispatcher.cudagraph_keys, batch, cascade)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: plan(piecewise=False), "must not need piecewise graphs"),
    (lambda: plan(BOTH, 1, (NONE, desc(8))), "runtime_mode must be PIECEWISE or FULL"),
    (lambda: plan(BOTH, 1, (BOTH, desc(8))), "runtime_mode must be PIECEWISE"),
    (lambda: plan().decide(8, allowed_modes={FULL}, excluded_modes={FULL}), "must leave some of NONE"),
    (lambda: plan().decide(8, allowed_modes=[]), "must leave"),
    (lambda: plan().decide(8, allowed_modes=[BOTH]), "must leave"),
    (lambda: plan().decide(-1), "num_tokens must be >= 0 and query_len >= 1"),
    (lambda: plan().decide(4, query_len=0), "num_tokens must be >= 0 and query_len >= 1"),
    (lambda: plan().dispatch("8"), "batch_descriptor must be a BatchDescriptor"),
    (lambda: plan(BOTH, 0), "uniform_decode_query_len must be"),
    (lambda: plan(max_num_reqs=0), "max_num_reqs must be"),
    (lambda: plan(capture_sizes=[0, 8]), r"capture_sizes\[0\] must be"),
    (lambda: plan(capture_sizes="nobody"), "capture sizes must be one of"),
    (
        lambda: CudagraphKeyDispatcher(engine(is_attention_compiled_piecewise=lambda: False)).initialize_cudagraph_keys(
            BOTH
        ),
        "must not need piecewise graphs",
    ),
    (lambda: CudagraphKeyDispatcher([8, 16]), "vllm_config must have what"),
    (lambda: CudagraphKeyDispatcher(SimpleNamespace(compilation_config=None)), "vllm_config must have"),
]


@pytest.mark.parametrize(("broken", "message"), WRONG)
def test_what_cannot_be_is_an_error_with_a_remedy(broken: Callable[[], Any], message: str) -> None:
    """Each assertion of vLLM's is a typed error here, and no silent eager step; nor do wrong options pass."""
    with pytest.raises(ConfigError, match=message):
        broken()


def test_a_miss_where_eager_is_excluded_is_an_error() -> None:
    """It has the reason of the miss."""
    with pytest.raises(FallbackError, match="allowed_modes must hold NONE") as caught:
        plan().decide(25, excluded_modes={NONE})
    assert caught.value.reason is Reason.ABOVE_LARGEST_SIZE


@pytest.mark.parametrize("kind", [set, frozenset, list])
def test_the_callers_modes_stay_as_they_are(kind: Callable[..., Any]) -> None:
    """0.33: 9, the defect that ``allowed -= excluded`` changes the caller's set."""
    allowed = kind([NONE, PIECEWISE, FULL])
    plan().decide(8, allowed_modes=allowed, excluded_modes=kind([FULL]))
    assert allowed == kind([NONE, PIECEWISE, FULL])


MISSES: list[tuple[Callable[[], CudagraphKeyDispatcher], dict[str, Any], Reason]] = [
    (lambda: full(), {"num_tokens": 8}, Reason.NOT_CAPTURED),
    (lambda: plan(None), {"num_tokens": 8, "variant": 3}, Reason.NOT_INITIALIZED),
    (lambda: plan(NONE), {"num_tokens": 8}, Reason.DISABLED),
    (lambda: plan(), {"num_tokens": 25}, Reason.ABOVE_LARGEST_SIZE),
    (lambda: full(desc(8)), {"num_tokens": 0}, Reason.NO_ROWS),
    (lambda: full(desc(8)), {"num_tokens": 10**6}, Reason.ABOVE_LARGEST_SIZE),
    (lambda: full(desc(8, variant=2)), {"num_tokens": 8, "variant": 3}, Reason.VARIANT_NOT_CAPTURED),
    (lambda: full(desc(8, variant="a")), {"num_tokens": 8, "variant": 1}, Reason.VARIANT_NOT_CAPTURED),
    (lambda: full(desc(8, variant="a")), {"num_tokens": 8}, Reason.VARIANT_NOT_CAPTURED),
    (lambda: full(desc(8, variant=2)), {"num_tokens": 8}, Reason.VARIANT_NOT_CAPTURED),
    (lambda: full(desc(8)), {"num_tokens": 8, "excluded_modes": [FULL]}, Reason.MODE_EXCLUDED),
    (lambda: full(desc(8)), {"num_tokens": 8, "allowed_modes": {NONE}}, Reason.MODE_EXCLUDED),
    (lambda: full(desc(8)), {"num_tokens": 9, "excluded_modes": [FULL]}, Reason.ABOVE_LARGEST_SIZE),
    (lambda: full(desc(8, True)), {"num_tokens": 8}, Reason.MIXED_BATCH),
    (lambda: full(desc(8, True)), {"num_tokens": 8, "query_len": 2}, Reason.QUERY_LEN_NOT_CAPTURED),
    (lambda: full(desc(8, reqs=4)), {"num_tokens": 8, "num_reqs": 5}, Reason.TOO_MANY_REQUESTS),
]  # fmt: skip


@pytest.mark.parametrize(("make", "batch", "reason"), MISSES, ids=[str(miss[2]) for miss in MISSES])
def test_every_miss_has_its_own_reason(
    make: Callable[[], CudagraphKeyDispatcher], batch: dict[str, Any], reason: Reason
) -> None:
    """No graph is an explicit answer: mode NONE, no descriptor, the real size, and why; the second time a lookup."""
    made = make()
    found = made.decide(**batch)
    assert found[:5] == (NONE, None, batch["num_tokens"], reason, batch["num_tokens"])
    assert found.explain().startswith("eager")
    assert made.decide(**batch) is found


def test_the_remedies_of_missing_keys_are_right() -> None:
    """Keys that are initialised, and a key for another query length."""
    made = plan(None)
    assert made.decide(8).reason is Reason.NOT_INITIALIZED
    made.initialize_cudagraph_keys(BOTH)
    assert made.decide(8).reason.is_graph
    made = full(desc(8, True))
    assert made.decide(8, query_len=2).reason is Reason.QUERY_LEN_NOT_CAPTURED
    made.add_cudagraph_key(FULL, desc(8, True, reqs=4))
    assert made.decide(8, 4, query_len=2).reason.is_graph


def test_a_decision_does_not_depend_on_the_order_of_the_keys() -> None:
    """Processes with other hash seeds decide alike, also between keys that serve the same batches."""
    code = (
        "from graphdispatch import CUDAGraphMode as M;"
        "from graphdispatch.engines import BatchDescriptor as B, CudagraphKeyDispatcher as D;"
        "d = D(capture_sizes=[1]); d.initialize_cudagraph_keys(M.FULL, 1);"
        "[d.add_cudagraph_key(M.FULL, k) for k in {B(8, r, False, v) for r in (None, 8, 9) for v in ('a', 'b')}];"
        "print(d.decide(5, variant='a'))"
    )
    assert len({run_python("-c", code, PYTHONHASHSEED=seed) for seed in ("1", "2", "3")}) == 1


def engine(**compilation: Any) -> SimpleNamespace:
    """A configuration of vLLM's shape."""
    found = {"cudagraph_capture_sizes": [24, 16, 8, 1], "cudagraph_mode": BOTH, **compilation}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(**found), scheduler_config=SimpleNamespace(max_num_seqs=6), lora_config=None
    )


@pytest.mark.parametrize(("mode", "query_len"), list(product(Mode, [1, 2])))
def test_a_configuration_of_the_engine_s_makes_the_same_keys(mode: Mode, query_len: int) -> None:
    """As vLLM's own dispatcher is made: by the configuration, by position."""
    dispatcher = CudagraphKeyDispatcher(engine(cudagraph_mode=mode))
    dispatcher.initialize_cudagraph_keys(mode, query_len)
    assert dispatcher.cudagraph_keys == plan(mode, query_len, max_num_reqs=6).cudagraph_keys


def test_an_engine_s_lora_cases_are_variants() -> None:
    """With and without, if graphs are specialised; else one case for all."""
    for specialize, variants in ((True, {True, False}), (False, {True})):
        config = engine(cudagraph_specialize_lora=specialize)
        config.lora_config = object()
        assert set(CudagraphKeyDispatcher(config).variants) == variants


def test_an_option_goes_before_the_engine_s_configuration() -> None:
    """Which need not say everything, and has modes of its own."""

    class Theirs(Enum):
        FULL = 2

    config = engine(cudagraph_capture_sizes=None, cudagraph_mode=Theirs.FULL)
    dispatcher = CudagraphKeyDispatcher(vllm_config=config, capture_sizes=[4], max_num_reqs=4)
    dispatcher.initialize_cudagraph_keys(Theirs.FULL, 1)  # type: ignore[arg-type]
    assert dispatcher.cudagraph_keys == {PIECEWISE: set(), FULL: {desc(4)}}
    assert CudagraphKeyDispatcher(config).capture_sizes == CudagraphKeyDispatcher(max_num_reqs=6).capture_sizes


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_decides_by_its_own_table(copied: Callable[[Any], Any]) -> None:
    """A change of the copy leaves the original, also for what was decided before."""
    first = plan()
    assert first.decide(3, 2).size == 8
    other = copied(first)
    other.add_cudagraph_key(PIECEWISE, desc(3))
    assert (other.decide(3, 2).size, first.decide(3, 2).size) == (3, 8)


def test_threads_that_add_keys_lose_none() -> None:
    """Each swap is made of the table before it; ``test_swaps.py`` shows what decisions see meanwhile."""
    dispatcher, added = plan(), [desc(size) for size in range(30, 130)]
    with switching_often(1e-6), ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: dispatcher.add_cudagraph_key(PIECEWISE, one), added, timeout=120))
    assert set(added) <= dispatcher.cudagraph_keys[PIECEWISE]
