"""The key dispatcher: vLLM 0.11.1's rules exactly, the later contracts through ``decide``, and swaps under readers."""

import inspect
import sys
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from itertools import product
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from graphdispatch import CUDAGraphMode as Mode
from graphdispatch import Reason
from graphdispatch.engines import BatchDescriptor, CudagraphKeyDispatcher
from graphdispatch.errors import ConfigError, FallbackError

NONE, PIECEWISE, FULL = Mode.NONE, Mode.PIECEWISE, Mode.FULL
FULL_DECODE_ONLY, FULL_AND_PIECEWISE = Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE
NO_GRAPH = (NONE, None)
SIZES = (1, 2, 4, 8, 16, 24)


def desc(tokens: int, uniform: bool = False, variant: Any = None, reqs: int | None = None) -> BatchDescriptor:
    """A descriptor as vLLM 0.11.1 writes it."""
    return BatchDescriptor(tokens, reqs, uniform, variant)


def made(mode: Mode = FULL_AND_PIECEWISE, query_len: int = 1, **options: Any) -> CudagraphKeyDispatcher:
    """An initialised dispatcher."""
    dispatcher = CudagraphKeyDispatcher(**{"capture_sizes": SIZES, "max_num_reqs": 16, **options})
    dispatcher.initialize_cudagraph_keys(mode, query_len)
    return dispatcher


def test_nothing_is_dispatched_before_the_keys_are_initialised() -> None:
    """Keys alone are not enough, and the answer says what is missing."""
    dispatcher = CudagraphKeyDispatcher(capture_sizes=SIZES)
    dispatcher.add_cudagraph_key(FULL, desc(8))
    assert dispatcher.dispatch(desc(8)) == NO_GRAPH
    assert dispatcher.decide(8).reason is Reason.NOT_INITIALIZED
    assert not dispatcher.keys_initialized
    dispatcher.initialize_cudagraph_keys(NONE)
    assert dispatcher.dispatch(desc(8)) == (FULL, desc(8))


UNIFORM_12 = {desc(size, True) for size in (2, 4, 8)}


@pytest.mark.parametrize(
    ("mode", "piecewise", "full"),
    [
        (NONE, set(), set()),
        (PIECEWISE, set(map(desc, SIZES)), set()),
        (FULL, set(), set(map(desc, SIZES))),
        (FULL_DECODE_ONLY, set(), UNIFORM_12),
        (FULL_AND_PIECEWISE, set(map(desc, SIZES)), UNIFORM_12),
    ],
)
def test_initialising_adds_the_keys_of_the_mode(mode: Mode, piecewise: set[Any], full: set[Any]) -> None:
    """Uniform keys reach from the query length to what all requests schedule, and exist only apart from mixed ones."""
    assert made(mode, 2, max_num_reqs=6).cudagraph_keys == {PIECEWISE: piecewise, FULL: full}


@pytest.mark.parametrize(
    ("variants", "count"), [((None,), 2), ((False,), 2), ((True, False), 4), ((0, 1, 2, 4, 5), 10)]
)
def test_each_size_gets_a_key_for_each_variant(variants: tuple[Any, ...], count: int) -> None:
    """No LoRA, one LoRA case, specialised on LoRA, and LoRA counts."""
    dispatcher = made(FULL, capture_sizes=[1, 8], variants=variants)
    assert len(dispatcher.cudagraph_keys[FULL]) == count


def test_capture_sizes_come_in_any_order() -> None:
    """Sizes from largest to smallest, as engines list them, make the same plan."""
    assert made(capture_sizes=SIZES[::-1]).cudagraph_keys == made().cudagraph_keys


@pytest.mark.parametrize(
    ("mode", "asked", "cascade", "answer"),
    [
        (FULL, desc(8), False, (FULL, desc(8))),
        (PIECEWISE, desc(8), False, (PIECEWISE, desc(8))),
        (FULL_DECODE_ONLY, desc(8), False, NO_GRAPH),
        (FULL_AND_PIECEWISE, desc(8), False, (PIECEWISE, desc(8))),
        (FULL, desc(8, True), False, (FULL, desc(8))),
        (PIECEWISE, desc(8, True), False, (PIECEWISE, desc(8))),
        (FULL_DECODE_ONLY, desc(8, True), False, (FULL, desc(8, True))),
        (FULL_AND_PIECEWISE, desc(8, True), False, (FULL, desc(8, True))),
        (FULL_AND_PIECEWISE, desc(24, True), False, (PIECEWISE, desc(24))),
        (FULL_DECODE_ONLY, desc(24, True), False, NO_GRAPH),
        (FULL_AND_PIECEWISE, desc(15), False, NO_GRAPH),
        (NONE, desc(8), False, NO_GRAPH),
        (FULL, desc(8), True, NO_GRAPH),
        (FULL_DECODE_ONLY, desc(8, True), True, NO_GRAPH),
        (FULL_AND_PIECEWISE, desc(8, True), True, (PIECEWISE, desc(8))),
        (PIECEWISE, desc(8), True, (PIECEWISE, desc(8))),
        (FULL_AND_PIECEWISE, desc(8, variant=True), False, NO_GRAPH),
    ],
)
def test_dispatch_by_the_rules_of_0_11_1(mode: Mode, asked: Any, cascade: bool, answer: Any) -> None:
    """Exact full, general full, general piecewise, nothing; cascade attention skips full graphs."""
    assert made(mode).dispatch(asked, use_cascade_attn=cascade) == answer


def rules_of_0_11_1(keys: Any, asked: BatchDescriptor, cascade: bool) -> tuple[Mode, BatchDescriptor | None]:
    """The contract as a chain of set look-ups."""
    if not cascade and asked in keys[FULL]:
        return FULL, asked
    if not cascade and asked.non_uniform in keys[FULL]:
        return FULL, asked.non_uniform
    return (PIECEWISE, asked.non_uniform) if asked.non_uniform in keys[PIECEWISE] else NO_GRAPH


@pytest.mark.parametrize(("mode", "query_len"), list(product(Mode, [1, 2, 3])))
def test_dispatch_agrees_with_0_11_1_on_every_descriptor(mode: Mode, query_len: int) -> None:
    """Every size, kind, LoRA case and attention, with keys added by hand besides."""
    dispatcher = made(mode, query_len, max_num_reqs=6, variants=(True, False))
    dispatcher.add_cudagraph_key(FULL, desc(5, variant=True))
    dispatcher.add_cudagraph_key(FULL, desc(6, True, False))
    dispatcher.add_cudagraph_key(PIECEWISE, desc(7, True, False))
    for tokens, uniform, variant, cascade in product(range(26), (False, True), (None, False, True), (False, True)):
        asked = desc(tokens, uniform, variant)
        assert dispatcher.dispatch(asked, cascade) == rules_of_0_11_1(dispatcher.cudagraph_keys, asked, cascade)


def test_a_key_without_requests_serves_any_number_of_them() -> None:
    """A batch that names its requests finds the graph whose key does not."""
    assert made(FULL).dispatch(desc(8, reqs=5)) == (FULL, desc(8))


@pytest.mark.parametrize(("reqs", "answer"), [(4, (FULL, desc(8, True))), (8, (PIECEWISE, desc(8)))])
def test_requests_that_contradict_the_query_length_make_a_batch_mixed(reqs: int, answer: Any) -> None:
    """Eight requests of one token are not served by the graph for four of two."""
    assert made(query_len=2).dispatch(desc(8, True, reqs=reqs)) == answer


def test_a_staged_key_is_found_without_its_requests() -> None:
    """The exact contract reaches sizes staged at multiples of the query length."""
    dispatcher = made(query_len=3, query_lens=[3])
    assert dispatcher.dispatch(desc(18, True)) == (FULL, desc(18, True, reqs=6))
    assert dispatcher.dispatch(desc(18, True, reqs=6)) == (FULL, desc(18, True, reqs=6))


def test_staged_sizes_are_multiples_and_end_at_the_schedulers_limit() -> None:
    """Each size is rounded up, and the first one too large is lowered to what the scheduler can send."""
    dispatcher = made(FULL_DECODE_ONLY, 3, query_lens=[3], max_num_reqs=7)
    assert {(key.num_tokens, key.num_reqs) for key in dispatcher.cudagraph_keys[FULL]} == {
        (3, 1), (6, 2), (9, 3), (18, 6), (21, 7)
    }  # fmt: skip


def test_staging_changes_nothing_where_the_query_length_divides_the_sizes() -> None:
    """Sizes that are multiples already stay what they are."""
    staged, plain = made(query_len=2, query_lens=[2]), made(query_len=2)
    sizes = [{key.num_tokens for key in found.cudagraph_keys[FULL]} for found in (staged, plain)]
    assert sizes[0] == sizes[1] == {2, 4, 8, 16, 24}


@pytest.mark.parametrize("query_len", [1, 2, 3])
def test_all_query_lengths_of_dynamic_speculation_have_graphs(query_len: int) -> None:
    """Several lengths are served side by side, though their sizes meet."""
    dispatcher = made(FULL_DECODE_ONLY, 1, query_lens=[2, 3])
    found = dispatcher.decide(6, 6 // query_len, query_len=query_len)
    assert (found.mode, found.size % query_len, found.descriptor.num_reqs) == (FULL, 0, found.size // query_len)  # type: ignore[union-attr]


@pytest.mark.parametrize(("tokens", "reqs"), [(7, None), (7, 3), (8, 5), (6, 6)])
def test_a_batch_that_its_counts_show_to_be_mixed_gets_no_uniform_graph(tokens: int, reqs: int | None) -> None:
    """Odd tokens, or requests that do not schedule two each, are not decode of two tokens."""
    assert made(query_len=2, query_lens=[2]).decide(tokens, reqs, query_len=2).descriptor == desc(8)


@pytest.mark.parametrize(("reqs", "size"), [(4, 16), (5, 24), (None, 24)])
def test_a_graph_for_fewer_requests_is_passed_by(reqs: int | None, size: int) -> None:
    """The request limit of a key holds in ``decide``, for a number that is not known too."""
    dispatcher = made(FULL, capture_sizes=[24])
    dispatcher.add_cudagraph_key(FULL, desc(16, reqs=4))
    assert dispatcher.decide(10, reqs).size == size


LORA = (0, 1, 2, 4, 5)


@pytest.mark.parametrize(
    ("mode", "batch", "answer"),
    [
        (FULL, {"num_tokens": 8}, (FULL, 8)),
        (PIECEWISE, {"num_tokens": 8}, (PIECEWISE, 8)),
        (FULL_DECODE_ONLY, {"num_tokens": 8}, (NONE, 8)),
        (FULL_AND_PIECEWISE, {"num_tokens": 8}, (PIECEWISE, 8)),
        (FULL, {"num_tokens": 8, "query_len": 1}, (FULL, 8)),
        (FULL_DECODE_ONLY, {"num_tokens": 8, "query_len": 1}, (FULL, 8)),
        (FULL_AND_PIECEWISE, {"num_tokens": 7, "query_len": 1}, (FULL, 8)),
        (PIECEWISE, {"num_tokens": 7, "query_len": 1}, (PIECEWISE, 8)),
        (FULL_AND_PIECEWISE, {"num_tokens": 17, "query_len": 1}, (PIECEWISE, 24)),
        (FULL_AND_PIECEWISE, {"num_tokens": 25}, (NONE, 25)),
        (NONE, {"num_tokens": 8}, (NONE, 8)),
        (FULL_AND_PIECEWISE, {"num_tokens": 8, "query_len": 1, "excluded_modes": {FULL}}, (PIECEWISE, 8)),
        (FULL, {"num_tokens": 8, "excluded_modes": {FULL}}, (NONE, 8)),
        (FULL_AND_PIECEWISE, {"num_tokens": 8, "allowed_modes": {NONE}}, (NONE, 8)),
    ],
)
def test_decide_by_the_rules_of_0_33(mode: Mode, batch: dict[str, Any], answer: tuple[Mode, int]) -> None:
    """Padding inside, modes allowed and excluded per call, and a real size where there is no graph."""
    found = made(mode).decide(**batch)
    assert (found.mode, found.size) == answer
    assert (found.descriptor is None) == (found.mode is NONE)


@pytest.mark.parametrize(("active", "served"), [(0, 0), (1, 1), (3, 4), (5, 5), (6, None)])
def test_lora_counts_are_rounded_up(active: int, served: int | None) -> None:
    """Specialised counts go to the next captured one, and more adapters than any graph holds to none."""
    found = made(FULL, variants=LORA).decide(8, variant=active)
    assert (found.descriptor.variant if found.descriptor else None) == served
    assert (found.reason is Reason.VARIANT_NOT_CAPTURED) == (served is None)


@pytest.mark.parametrize("active", [0, 1, 4])
def test_unspecialised_lora_serves_every_count_by_its_one_graph(active: int) -> None:
    """With only the largest count captured, batches with fewer adapters or none use it."""
    assert made(FULL, variants=[5]).decide(8, variant=active).descriptor == desc(8, variant=5)


def test_a_size_that_the_query_length_does_not_divide_falls_back() -> None:
    """Where vLLM stops on an assertion, the batch goes to a graph that can hold it."""
    dispatcher = made(query_len=3)
    assert dispatcher.decide(6, 2, query_len=3)[:3] == (FULL, desc(24, True), 24)


def test_eager_that_is_not_allowed_raises() -> None:
    """A miss with NONE excluded is an error of its own type."""
    with pytest.raises(FallbackError, match="must hold NONE"):
        made().decide(25, excluded_modes=[NONE])


def test_capture_goes_from_large_to_small() -> None:
    """Piecewise graphs, then full ones, each sorted by tokens and adapters; nothing before initialising."""
    assert CudagraphKeyDispatcher().get_capture_descs() == []
    (first, piecewise), (second, full) = made(variants=[0, 2], capture_sizes=[1, 8]).get_capture_descs()
    assert (first, second) == (PIECEWISE, FULL)
    assert [(key.num_tokens, key.variant) for key in piecewise] == [(8, 2), (8, 0), (1, 2), (1, 0)]
    assert all(key.is_uniform_decode for key in full)
    assert not any(key.is_uniform_decode for key in piecewise)


def test_a_model_that_is_not_split_has_no_piecewise_graphs() -> None:
    """A mode that needs them is refused when the keys are made."""
    dispatcher = CudagraphKeyDispatcher(piecewise=False)
    with pytest.raises(ConfigError, match="must not need piecewise graphs"):
        dispatcher.initialize_cudagraph_keys(FULL_AND_PIECEWISE)
    assert not dispatcher.keys_initialized


@pytest.mark.parametrize("mode", [NONE, FULL_AND_PIECEWISE])
def test_only_runtime_modes_have_keys(mode: Mode) -> None:
    """A key of a configured mode or of NONE is refused."""
    with pytest.raises(ConfigError, match="runtime_mode must be PIECEWISE or FULL"):
        CudagraphKeyDispatcher().add_cudagraph_key(mode, desc(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_reqs": 0}, "max_num_reqs must be"),
        ({"max_num_tokens": 0}, "max_num_tokens must be"),
        ({"query_lens": [0]}, "query_lens must be"),
        ({"capture_sizes": [0, 8]}, r"capture_sizes\[0\] must be"),
        ({"capture_sizes": "nobody"}, "capture sizes must be one of"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    """The error says which argument is wrong."""
    with pytest.raises(ConfigError, match=message):
        CudagraphKeyDispatcher(**options)


def test_the_keys_are_a_live_view() -> None:
    """What changes in the dispatcher is seen in keys that were read before; what is changed there is a change of it."""
    dispatcher = made(FULL)
    keys = dispatcher.cudagraph_keys
    dispatcher.remove_cudagraph_key(FULL, desc(8))
    assert desc(8) not in keys[FULL]
    keys[FULL].add(desc(9))
    assert dispatcher.dispatch(desc(9)) == (FULL, desc(9))
    assert dispatcher.decide(9).descriptor == desc(9)
    for key in keys[FULL]:  # which goes over the keys as they were
        keys[FULL].discard(key)
    assert dispatcher.dispatch(desc(9)) == NO_GRAPH
    assert keys == {PIECEWISE: set(), FULL: set()}
    assert keys[FULL] | {desc(1)} == {desc(1)}
    with pytest.raises(ConfigError, match="num_tokens >= 1"):
        keys[FULL].add(desc(0))


def engine(**compilation: Any) -> SimpleNamespace:
    """A configuration of vLLM's shape."""
    found = {"cudagraph_capture_sizes": [24, 16, 8, 4, 2, 1], "cudagraph_mode": FULL_AND_PIECEWISE, **compilation}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(**found), scheduler_config=SimpleNamespace(max_num_seqs=6), lora_config=None
    )


@pytest.mark.parametrize(("mode", "query_len"), list(product(Mode, [1, 2])))
def test_a_configuration_of_the_engine_s_makes_the_same_keys(mode: Mode, query_len: int) -> None:
    """As vLLM's own dispatcher is made: by the configuration, by position."""
    dispatcher = CudagraphKeyDispatcher(engine(cudagraph_mode=mode))
    dispatcher.initialize_cudagraph_keys(mode, query_len)
    assert dispatcher.cudagraph_keys == made(mode, query_len, max_num_reqs=6).cudagraph_keys


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


def test_an_engine_s_configuration_is_checked() -> None:
    """A mode that needs a split model, and what is no configuration."""
    with pytest.raises(ConfigError, match="must not need piecewise graphs"):
        CudagraphKeyDispatcher(engine(is_attention_compiled_piecewise=lambda: False))
    for wrong in ({"capture_sizes": [1]}, [8, 16], SimpleNamespace(compilation_config=None)):
        with pytest.raises(ConfigError, match="vllm_config must have compilation_config"):
            CudagraphKeyDispatcher(wrong)


def test_the_repr_is_a_status_line() -> None:
    """Mode and number of keys, for people."""
    assert repr(made()) == "<CudagraphKeyDispatcher FULL_AND_PIECEWISE, 6 PIECEWISE, 5 FULL keys>"
    assert repr(CudagraphKeyDispatcher()) == "<CudagraphKeyDispatcher not initialised, 0 PIECEWISE, 0 FULL keys>"


def test_readers_see_whole_tables_while_keys_change() -> None:
    """Decisions of many threads under swaps are each that of one of the two tables, never a mixture."""
    dispatcher, done, key = made(), Event(), desc(12, True, reqs=12)
    whole = {dispatcher.decide(11, 11, query_len=1)}
    dispatcher.add_cudagraph_key(FULL, key)
    whole.add(dispatcher.decide(11, 11, query_len=1))

    def read() -> set[Any]:
        return {dispatcher.decide(11, 11, query_len=1) for _ in range(2000)}

    def swap() -> int:
        swaps = 0
        while not done.is_set():
            dispatcher.remove_cudagraph_key(FULL, key)
            dispatcher.add_cudagraph_key(FULL, key)
            swaps += 2
        return swaps

    with ThreadPoolExecutor(33) as pool:
        writer = pool.submit(swap)
        readers = [pool.submit(read) for _ in range(32)]
        seen = set().union(*(reader.result(timeout=120) for reader in readers))
        done.set()
        assert writer.result(timeout=120) > 0
    assert len(whole) == 2
    assert seen <= whole


def test_concurrent_changes_lose_no_key() -> None:
    """Writers take turns, so that every key that was added is there."""
    dispatcher = made(NONE)
    keys = [desc(size) for size in range(1, 65)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: dispatcher.add_cudagraph_key(FULL, key), keys))
    finally:
        sys.setswitchinterval(interval)
    assert dispatcher.cudagraph_keys[FULL] == set(keys)


def real_dispatcher(mode: Mode, max_num_reqs: int) -> Any:
    """vLLM's own dispatcher over a configuration that holds what it reads."""
    module = pytest.importorskip(
        "vllm.v1.cudagraph_dispatcher", reason="vLLM is not installed: nothing real to compare with"
    )
    theirs = module.CUDAGraphMode[mode.name]
    compilation = SimpleNamespace(
        cudagraph_mode=theirs,
        cudagraph_capture_sizes=list(SIZES),
        max_cudagraph_capture_size=SIZES[-1],
        is_attention_compiled_piecewise=lambda: True,
        cudagraph_specialize_lora=False,
        compile_sizes=None,
    )
    scheduler = SimpleNamespace(max_num_seqs=max_num_reqs)
    config = SimpleNamespace(
        compilation_config=compilation, scheduler_config=scheduler, lora_config=None, speculative_config=None
    )
    dispatcher = module.CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(theirs, 1)
    return dispatcher


@pytest.mark.parametrize(("mode", "max_num_reqs"), list(product(Mode, [6, 16])))
def test_the_answers_are_those_of_the_installed_vllm(mode: Mode, max_num_reqs: int) -> None:
    """Equal to 0.11.x; at least as good as later versions, which look at one size only."""
    theirs, ours = real_dispatcher(mode, max_num_reqs), made(mode, max_num_reqs=max_num_reqs)
    padded = "batch_descriptor" in inspect.signature(theirs.dispatch).parameters
    for tokens, uniform in product(range(1, 26), (False, True)):
        if padded:
            asked = inspect.getmodule(type(theirs)).BatchDescriptor(tokens, uniform)  # type: ignore[union-attr]
            their_mode, key = theirs.dispatch(asked)
            answer = ours.dispatch(desc(tokens, uniform))
            assert (answer[0], answer[1] and answer[1][0]) == (their_mode.value, key and key.num_tokens)
        else:
            their_mode, key = theirs.dispatch(tokens, uniform_decode=uniform)
            found = ours.decide(tokens, query_len=1 if uniform else None)
            assert found.mode >= their_mode.value
            assert found.mode > their_mode.value or found.size == key.num_tokens
