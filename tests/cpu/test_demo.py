"""The main job: the decoder is a Llama whose rows are independent, and the two sides of a run are compared."""

import dataclasses
import gc
import io
import json
import math
import statistics
import weakref
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console
from torch import Tensor

from graphdispatch import CUDAGraphMode, Reason
from graphdispatch.call.breaks import is_marked
from graphdispatch.capture.piecewise import BreakFigures
from graphdispatch.cli.demo import print_result
from graphdispatch.demo import (
    PRESETS,
    Decoder,
    DecoderConfig,
    DemoResult,
    DemoSettings,
    SideBySide,
    Step,
    StepMaker,
    generate_trace,
    slots_needed,
)
from graphdispatch.demo.result import Pieces, StepRecord
from graphdispatch.demo.run import largest_size
from graphdispatch.errors import BackendError, ConfigError

CONFIG = DecoderConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=50, window=12)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    """The demo is inference."""
    with torch.inference_mode():
        yield


def rows(*places: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of a step from (token, slot, position) of each row."""
    return tuple(torch.tensor(column) for column in zip(*places, strict=True))  # type: ignore[return-value]


def prompt(tokens: list[int], slot: int) -> list[tuple[int, int, int]]:
    """The rows of a prompt from position 0."""
    return [(token, slot, position) for position, token in enumerate(tokens)]


def test_the_decoder_is_a_llama() -> None:
    """With the same weights, Hugging Face's LlamaForCausalLM gives the same logits for a prompt."""
    transformers = pytest.importorskip("transformers")
    ours = Decoder(CONFIG, slots=1)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=CONFIG.vocab, hidden_size=CONFIG.hidden, intermediate_size=CONFIG.ffn,
            num_hidden_layers=CONFIG.layers, num_attention_heads=CONFIG.heads,
            num_key_value_heads=CONFIG.kv_heads, head_dim=CONFIG.head_dim, rms_norm_eps=CONFIG.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta}, tie_word_embeddings=False,
        )
    )  # fmt: skip
    theirs.load_state_dict(llama_weights(ours))
    tokens = [7, 3, 3, 41, 0, 49, 12]
    torch.testing.assert_close(ours(*rows(*prompt(tokens, 0))), theirs(torch.tensor([tokens])).logits[0])


def llama_weights(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's weights under the names of Hugging Face's model."""
    config, d = decoder.config, decoder.config.head_dim
    weights = {
        "model.embed_tokens.weight": decoder.embedding,
        "model.norm.weight": decoder.norm.weight,
        "lm_head.weight": decoder.head.weight,
    }
    for i in range(config.layers):
        ours, name = decoder.layers[i].state_dict(), f"model.layers.{i}"
        q, k, v = ours["attention.qkv.weight"].split([config.heads * d, config.kv_heads * d, config.kv_heads * d])
        gate, up = ours["ffn.gate_up.weight"].chunk(2)
        weights |= {f"{name}.self_attn.{n}_proj.weight": halves(w, d) for n, w in (("q", q), ("k", k))}
        weights[f"{name}.self_attn.v_proj.weight"] = v
        weights |= {f"{name}.mlp.gate_proj.weight": gate, f"{name}.mlp.up_proj.weight": up}
        weights[f"{name}.self_attn.o_proj.weight"] = ours["attention.out.weight"]
        weights[f"{name}.mlp.down_proj.weight"] = ours["ffn.down.weight"]
        weights[f"{name}.input_layernorm.weight"] = ours["attention_norm.weight"]
        weights[f"{name}.post_attention_layernorm.weight"] = ours["ffn_norm.weight"]
    return weights


def halves(weight: Tensor, head_dim: int) -> Tensor:
    """Reorders each head, from pairs of neighbours to pairs of one half with the other, which theirs rotates."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def test_a_prompt_equals_its_tokens_one_by_one() -> None:
    """Rows of one step see each other through the cache exactly as those of successive steps do."""
    decoder = Decoder(CONFIG, slots=2)
    places = prompt([4, 8, 15, 16, 23, 42], slot=1)
    together = decoder(*rows(*places))
    fresh = Decoder(CONFIG, slots=2)
    one_by_one = torch.cat([fresh(*rows(place)) for place in places])
    torch.testing.assert_close(together, one_by_one)


def test_sequences_do_not_see_each_other() -> None:
    """A sequence's logits do not depend on the others of its step, nor on what is in other slots."""
    first, second = prompt([1, 2, 3], slot=0), prompt([9, 9, 9, 9], slot=2)
    alone = Decoder(CONFIG, slots=3)(*rows(*first))
    decoder = Decoder(CONFIG, slots=3)
    decoder(*rows(*prompt([5] * 12, slot=1)))
    torch.testing.assert_close(decoder(*rows(*second, *first))[4:], alone)


def test_context_matters() -> None:
    """Another token in the past changes the logits by far more than the tolerance of a run."""
    a = Decoder(CONFIG, slots=1)(*rows(*prompt([1, 2, 3, 4], 0)))[-1]
    b = Decoder(CONFIG, slots=1)(*rows(*prompt([7, 2, 3, 4], 0)))[-1]
    assert (a - b).abs().max() > 0.05


def test_padding_rows_write_to_the_scratch_slot_only() -> None:
    """Rows on the scratch slot leave the cache of every request as it was, and the logits of the others too."""
    decoder = Decoder(CONFIG, slots=2)
    expected = decoder(*rows((3, 0, 0)))
    cache = decoder.cache_keys[:, :2].clone()
    padded = decoder(*rows((3, 0, 0), (0, decoder.scratch_slot, 0), (0, decoder.scratch_slot, 0)))
    torch.testing.assert_close(padded[:1], expected)
    torch.testing.assert_close(decoder.cache_keys[:, :2], cache)


def test_a_long_step_is_the_sum_of_short_ones() -> None:
    """A step of more rows than are attended at a time gives the same logits as its sequences one by one."""
    config = dataclasses.replace(CONFIG, layers=1)
    sequences = [prompt([slot % 50] * 12, slot) for slot in range(100)]
    whole = Decoder(config, slots=100)(*rows(*(place for sequence in sequences for place in sequence)))
    decoder = Decoder(config, slots=100)
    torch.testing.assert_close(whole, torch.cat([decoder(*rows(*sequence)) for sequence in sequences]))


def test_a_twin_shares_weights_and_not_the_cache() -> None:
    """Twins have one set of parameters in memory and a cache each."""
    decoder = Decoder(CONFIG, slots=1)
    twin = decoder.twin()
    assert all(a is b for a, b in zip(decoder.parameters(), twin.parameters(), strict=True))
    twin(*rows((3, 0, 0)))
    assert twin.cache_keys.any()
    assert not decoder.cache_keys.any()


def test_weights_come_from_the_seed_alone() -> None:
    """A seed decides the weights, and drawing them leaves torch's own random state alone."""
    state = torch.get_rng_state()
    a, b, c = (Decoder(CONFIG, 1, seed=seed).head.weight for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("mode", "max_size", "expected"),
    [
        (CUDAGraphMode.FULL, 512, 300),
        (CUDAGraphMode.FULL, 64, 64),
        (CUDAGraphMode.FULL_AND_PIECEWISE, 512, 300),
        (CUDAGraphMode.FULL_DECODE_ONLY, 512, 5),
        (CUDAGraphMode.NONE, 512, 1),
    ],
)
def test_the_largest_size_is_the_largest_step_that_may_be_served(
    mode: CUDAGraphMode, max_size: int, expected: int
) -> None:
    """Mixed steps count where the mode has graphs for them, and ``max_size`` is the limit."""
    steps = [Step(5, 5, 1, 1, True, 0), Step(300, 5, 296, 296, False, 1)]
    assert largest_size(steps, DemoSettings(mode=mode, max_size=max_size)) == expected


def test_the_largest_size_is_captured() -> None:
    """Also where vLLM has no such size, so that nothing up to it is missed."""
    side_by_side = SideBySide([Step(13, 2, 12, 12, False, 1), Step(2, 2, 1, 13, True, 0)], DemoSettings())
    result = run(side_by_side)
    assert (result.largest, result.captures, result.missed) == (13, 5, 0)
    assert [r.rows for r in result.records] == [13, 2]


def run(side_by_side: SideBySide) -> DemoResult:
    """Prewarm, run every step, sum up, release."""
    side_by_side.prewarm()
    for _ in side_by_side.run():
        pass
    result = side_by_side.result()
    side_by_side.close()
    return result


def test_every_step_up_to_the_largest_size_is_a_replay() -> None:
    """Pre-warmed, no output differs, no small step misses its graph, and every other one has its reason."""
    result = run(SideBySide(generate_trace(60, 6), DemoSettings(max_size=16)))
    large = sum(r.num_tokens > result.largest for r in result.records)
    assert large > 0
    assert (result.differing, result.missed) == (0, 0)
    assert result.eager_reasons == {Reason.ABOVE_LARGEST_SIZE: large}
    assert all(r.rows >= r.num_tokens for r in result.served)


def test_the_sides_go_through_the_same_trace_with_the_same_cache() -> None:
    """After a run, both caches hold the same keys and values for every slot of a request."""
    side_by_side = SideBySide(generate_trace(30, 4), DemoSettings(seed=5, max_size=16))
    run(side_by_side)
    eager, graphed = side_by_side.decoders
    assert eager.cache_keys.any()
    torch.testing.assert_close(eager.cache_keys[:, :-1], graphed.cache_keys[:, :-1])
    torch.testing.assert_close(eager.cache_values[:, :-1], graphed.cache_values[:, :-1])


def test_a_wrong_cache_is_found() -> None:
    """The comparison fails when the graphed side's cache holds something else than eager's."""
    side_by_side = SideBySide([Step(1, 1, 1, n + 1, True, 0) for n in range(8)], DemoSettings())
    side_by_side.prewarm()
    for number, record in enumerate(side_by_side.run()):
        assert (record.difference > 1e-4) == (number > 4)
        if number == 4:
            side_by_side.decoders[1].cache_values.add_(1.0)
    assert side_by_side.result().differing == 3


def test_closing_releases_the_graphs() -> None:
    """After close, nothing keeps the decoders alive but their owner."""
    side_by_side = SideBySide([Step(1, 1, 1, 1, True, 0)], DemoSettings())
    run(side_by_side)
    decoders = [weakref.ref(decoder) for decoder in side_by_side.decoders]
    del side_by_side
    gc.collect()
    assert [decoder() for decoder in decoders] == [None, None]


def test_an_unknown_preset_is_an_error() -> None:
    """The error lists the presets."""
    with pytest.raises(ConfigError, match="preset must be one of tiny, small, 1b, got 'huge'"):
        SideBySide([Step(1, 1, 1, 1, True, 0)], DemoSettings(preset="huge"))


def test_an_unknown_device_is_an_error() -> None:
    """The error comes before anything is built."""
    with pytest.raises(BackendError, match="'tpu'"):
        SideBySide([Step(1, 1, 1, 1, True, 0)], DemoSettings(device="tpu"))


def test_a_result_without_steps_is_an_error() -> None:
    """There is nothing to sum up before a step has run."""
    with pytest.raises(ConfigError, match="no step was run"):
        SideBySide([Step(1, 1, 1, 1, True, 0)], DemoSettings()).result()


FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_each_mode_serves_the_steps_that_it_should(mode: CUDAGraphMode) -> None:
    """By the trace's flag, decode steps and mixed ones go to the mode's own graphs, and every step equals eager's."""
    steps = generate_trace(40, 6)
    result = run(SideBySide(steps, DemoSettings(mode=mode, max_size=16)))
    assert (result.differing, result.missed) == (0, 0)
    assert any(r.mode.has_graphs() for r in result.records) is mode.has_graphs()
    for record in result.records:
        wanted = mode.decode_mode() if record.uniform_decode else mode.mixed_mode()
        assert record.mode is (NONE if record.num_tokens > result.largest else wanted)


def test_attention_is_a_break_in_each_layer() -> None:
    """A piecewise step of two layers is three graphs with two breaks between them; a full one is one graph."""
    settings = DemoSettings(mode=CUDAGraphMode.FULL_AND_PIECEWISE, max_size=16)
    result = run(SideBySide(generate_trace(40, 6), settings))
    assert result.pieces == {FULL: Pieces(1, 0), PIECEWISE: Pieces(3, 2)}
    (part,) = result.breaks
    assert (part.name, part.place.split(":")[0]) == ("_Attention", "decoder.py")
    assert part.runs >= 2 * result.steps_by_mode[PIECEWISE] > 0
    assert 0 < part.share < 1


def test_the_eager_side_is_not_marked() -> None:
    """The marks are on the graphed decoder alone, so that the other one is what it is compared with."""
    eager, graphed = SideBySide([Step(1, 1, 1, 1, True, 0)], DemoSettings()).decoders
    assert not any(is_marked(layer.attention) for layer in eager.layers)  # type: ignore[arg-type]
    assert all(is_marked(layer.attention) for layer in graphed.layers)  # type: ignore[arg-type]


def result_of(*records: StepRecord, mode: CUDAGraphMode = FULL) -> DemoResult:
    """A result with these records."""
    pieces = {FULL: Pieces(1, 0), PIECEWISE: Pieces(3, 2)}
    breaks = (BreakFigures("Attention", "/model/decoder.py:12: x = self.attention(x)", 4, 3.0, 0.6),)
    return DemoResult(DemoSettings(mode=mode), "cpu", "float32", 1, 4, 3, 5.0, 1e-4, records, pieces, breaks)


HIT = StepRecord(3, True, Reason.PADDED, 4, eager_s=4e-3, graphed_s=1e-3, difference=1e-6, mode=FULL)
LARGE = StepRecord(9, False, Reason.ABOVE_LARGEST_SIZE, 0, eager_s=8e-3, graphed_s=8e-3, difference=0.0, mode=NONE)


def test_the_figures_follow_from_the_records() -> None:
    """Hit rate, padding and times are those of the steps that they speak of."""
    result = result_of(HIT, HIT._replace(num_tokens=1, rows=1, reason=Reason.EXACT), LARGE, LARGE)
    assert (result.hit_rate, result.padding, result.missed) == (0.5, 0.25, 0)
    assert result.times(statistics.fmean, served=True).ratio == pytest.approx(4.0)
    assert result.times(statistics.fmean, served=False) == pytest.approx((6.0, 4.5))
    assert result.eager_reasons == {Reason.ABOVE_LARGEST_SIZE: 2}


def test_a_small_eager_step_is_missed() -> None:
    """A step that fits a graph and ran eagerly is counted, whatever its reason."""
    assert result_of(HIT, HIT._replace(reason=Reason.CAPTURE_FAILED, rows=0, mode=NONE)).missed == 1


def test_a_step_whose_kind_has_no_graphs_is_not_missed() -> None:
    """Where only decode steps have graphs, a mixed step runs eagerly as asked."""
    mixed = HIT._replace(uniform_decode=False, reason=Reason.MODE_MISMATCH, rows=0, mode=NONE)
    assert result_of(HIT, mixed, mode=CUDAGraphMode.FULL_DECODE_ONLY).missed == 0


def test_the_table_counts_each_mode() -> None:
    """A line for each runtime mode that served a step: how many, and what a step of it consists of."""
    console = Console(width=140, file=io.StringIO(), record=True)
    print_result(result_of(HIT, HIT, HIT._replace(mode=PIECEWISE), LARGE), console)
    lines = [line.split("│")[1:5] for line in console.export_text().splitlines() if line.startswith("│ ")]
    cells = {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines}
    assert cells["FULL"] == ["2", "1", "0"]
    assert cells["PIECEWISE"] == ["1", "3", "2"]
    assert cells["eager"] == ["1", "-", "-"]
    assert cells["Attention"] == ["decoder.py:12", "4", "0.750 ms"]


def test_the_figures_tell_the_modes() -> None:
    """The JSON has the configured mode, and for each runtime mode its steps, graphs and breaks."""
    plain = result_of(HIT, HIT._replace(mode=PIECEWISE), LARGE, mode=CUDAGraphMode.FULL_AND_PIECEWISE).to_dict()
    assert plain["mode"] == "FULL_AND_PIECEWISE"
    assert plain["modes"] == {
        "FULL": {"steps": 1, "graphs": 1, "breaks": 0},
        "PIECEWISE": {"steps": 1, "graphs": 3, "breaks": 2},
        "NONE": {"steps": 1, "graphs": 0, "breaks": 0},
    }
    (part,) = plain["breaks"]
    assert (part["name"], part["runs"], part["share"]) == ("Attention", 4, 0.6)


@pytest.mark.parametrize("difference", [2e-4, math.inf, math.nan])
def test_a_difference_beyond_the_tolerance_counts(difference: float) -> None:
    """So does one that is no number, which no comparison with a tolerance would find."""
    result = result_of(HIT, HIT._replace(difference=difference), HIT)
    assert result.differing == 1
    assert result.largest_difference == pytest.approx(difference, nan_ok=True)


def test_the_figures_are_valid_json() -> None:
    """Even a run that no graph served and whose outputs are no numbers is written as standard JSON."""
    plain = result_of(LARGE._replace(difference=math.nan)).to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["step_time_ms"]["served_mean"] == {"eager": 0.0, "graphed": 0.0, "ratio": None}


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_a_preset_keeps_its_activations_near_one(preset: str) -> None:
    """The logits have unit scale, so that the tolerance means something."""
    steps = generate_trace(20, 4)
    slots = slots_needed(steps, PRESETS[preset].window)
    decoder = Decoder(PRESETS[preset], slots)
    maker = StepMaker(slots, decoder.config.window, decoder.config.vocab)
    assert 0.5 < torch.cat([decoder(*maker.make(step)) for step in steps]).std() < 2.0
