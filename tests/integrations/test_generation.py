"""``model.generate(...)`` with its decode steps served by graphs: the same tokens, however it generates."""

import copy
import operator
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from graphdispatch import CUDAGraphOptions, Reason, graphed
from graphdispatch.errors import ConfigError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about its own arguments

from graphdispatch.integrations.transformers import GraphedGeneration, NotServed, graphed_generation  # noqa: E402
from graphdispatch.integrations.transformers.available import check_seams, check_version  # noqa: E402
from graphdispatch.integrations.transformers.caches import KeptCache  # noqa: E402
from graphdispatch.integrations.transformers.slots import CACHE_NAMES, Slot  # noqa: E402

from ..helpers import in_threads  # noqa: E402
from .families import CACHE, GREEDY, MODES, Requests, answers, make_model, prompts  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    """A decoder with a sliding window of 8 in every other layer."""
    return make_model("gemma2")


@pytest.fixture(scope="module")
def served() -> GraphedGeneration:
    """The same model once more, served for the whole module."""
    return graphed_generation(make_model("gemma2"), cache_lengths=(32,), max_batch_size=4)


def check_same(model: Any, requests: Requests, **settings: Any) -> GraphedGeneration:
    """Make the requests without graphs and with them, twice; the tokens must be equal."""
    expected = answers(model, requests)
    with GraphedGeneration(model, **settings) as generation:
        for _ in range(2):
            for got, wanted in zip(answers(model, requests), expected, strict=True):
                assert torch.equal(got, wanted)
    return generation


@pytest.mark.parametrize("family", ["llama", "bloom", "lfm2", "mamba"])
def test_families_give_the_same_tokens(family: str) -> None:
    """Plain, alibi, convolution and state-space decoders: padded or not, short or long, one capture for each shape."""
    requests = [(prompts(2, length, pads=pads), GREEDY) for length, pads in ((5, False), (9, True), (7, False))]
    stats = check_same(make_model(family), requests, cache_lengths=(32,)).stats
    assert (stats.served, stats.captures, stats.capture_failures) == (6, 1, 0)
    assert stats.hit_rate > 0.95


@pytest.mark.parametrize("mode", MODES)
def test_modes_give_the_same_tokens(model: Any, served: GraphedGeneration, mode: str) -> None:
    """Each way to generate, with a sliding window that fills on the way."""
    requests = [(prompts(2, 5), MODES[mode]), (prompts(1, 7), MODES[mode])]
    before = served.stats.served
    assert all(map(torch.equal, answers(served.model, requests), answers(model, requests)))
    assert served.stats.served == before + 2


def test_what_graphs_do_not_serve_runs_as_before(model: Any) -> None:
    """Each has its reason, and eager's tokens; nothing of them stays in the caches of others."""
    assistant = make_model("gemma2")
    batch, single = prompts(2, 7), prompts(1, 6, pads=False)
    own = {CACHE: transformers.DynamicCache(config=model.config)}
    others = {
        NotServed.MODE: (single, GREEDY | {"assistant_model": assistant}),
        NotServed.NO_CACHE: (batch, GREEDY | {"use_cache": False}),
        NotServed.OTHER_CACHE: (batch, GREEDY | {"cache_implementation": "dynamic"}),
        NotServed.BATCH_TOO_LARGE: (prompts(3, 7), GREEDY),
        NotServed.TOO_LONG: (batch, GREEDY | {"max_new_tokens": 40}),
        NotServed.OWN_CACHE: (batch, GREEDY | own),
    }
    expected = [answers(model, [(b, copy.deepcopy(settings))])[0] for b, settings in others.values()]
    with GraphedGeneration(model, cache_lengths=(32,), max_batch_size=2) as generation:
        assert answers(model, [(batch, GREEDY)])[0].shape == (2, 19)
        got = [answers(model, [(b, copy.deepcopy(settings))])[0] for b, settings in others.values()]
        with torch.autocast("cpu", torch.bfloat16):
            model.generate(**batch, **GREEDY)
        model.train()
        model.generate(**batch, **GREEDY)
        model.eval()
        stats, explained = generation.stats, generation.explain()
    assert all(map(torch.equal, got, expected))
    assert stats.not_served == dict.fromkeys((*others, NotServed.AUTOCAST, NotServed.TRAINING), 1)
    assert (stats.requests, stats.served) == (9, 1)
    assert all(reason.text in explained for reason in others)


def test_an_encoder_decoder_runs_as_before() -> None:
    """It is named as the reason."""
    config = transformers.T5Config(
        d_model=32, d_ff=64, d_kv=8, num_layers=1, num_heads=4, vocab_size=99, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    generation = check_same(model, [(prompts(2, 7), GREEDY)])
    assert generation.stats.not_served == {NotServed.MODEL: 2}


@pytest.mark.parametrize("family", ["llama", "gemma2", "lfm2", "mamba"])
def test_returned_caches_are_the_callers(family: str) -> None:
    """A cache that is returned is the one without graphs, whatever the next request does. Generation goes on from it,
    beyond the length of the kept one."""
    model, batch = make_model(family), prompts(2, 7, pads=False)

    def talk() -> tuple[Any, torch.Tensor]:
        first = model.generate(**batch, **GREEDY, return_dict_in_generate=True)
        kept = next(first[name] for name in CACHE_NAMES if name in first)
        model.generate(**prompts(2, 7), **GREEDY)
        held = copy.deepcopy(kept)
        ids = torch.cat([first.sequences, first.sequences[:, -1:]], 1)
        cache = {"cache_params" if family == "mamba" else CACHE: kept}
        return held, model.generate(ids, **cache, max_new_tokens=40, do_sample=False)

    expected, tokens = talk()
    with GraphedGeneration(model, cache_lengths=(32, 64)) as generation:
        got, others = talk()
    assert generation.stats.hits > 0
    assert torch.equal(others, tokens)
    for layer, wanted in zip(got.layers, expected.layers, strict=True):
        assert vars(layer).keys() == vars(wanted).keys()
        for name, value in vars(wanted).items():
            for mine, other in zip(tree_leaves(getattr(layer, name)), tree_leaves(value), strict=True):
                is_close = partial(torch.allclose, rtol=1e-4, atol=1e-5) if torch.is_tensor(other) else operator.eq
                assert is_close(mine, other), f"{layer}.{name}"


def test_attentions_are_those_without_graphs() -> None:
    """A static cache has attentions for all of its length, and so such a request is not served."""
    model = make_model("llama")
    model.set_attn_implementation("eager")
    request = prompts(2, 7) | GREEDY | {"return_dict_in_generate": True, "output_attentions": True}
    wanted = model.generate(**request).attentions
    with GraphedGeneration(model, cache_lengths=(32,)) as generation:
        got = model.generate(**request).attentions
    assert generation.stats.not_served == {NotServed.ATTENTIONS: 1}
    assert [[each.shape for each in step] for step in got] == [[each.shape for each in step] for step in wanted]


@pytest.mark.parametrize("outputs", ["static", "view"])
def test_outputs_that_the_next_step_overwrites_are_refused(outputs: str) -> None:
    """``generate`` keeps those of all steps: hidden states would all be the last ones."""
    with pytest.raises(ConfigError, match="outputs must be left out for GraphedGeneration"):
        GraphedGeneration(make_model("llama"), options=CUDAGraphOptions(outputs=outputs))


def test_surroundings_have_caches_of_their_own(served: GraphedGeneration) -> None:
    """Inference mode and another type of weights do not meet the caches that others left."""
    model = served.model
    batch = prompts(2, 7)
    expected = model.generate(**batch, **GREEDY, use_cache=False)
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(model.generate(**batch, **GREEDY), expected)
        assert torch.equal(model.generate(**batch, **GREEDY), expected)
        model.to(torch.float64).generate(**batch, **GREEDY)
        model.to(torch.float32)


def test_another_window_has_a_cache_of_its_own() -> None:
    """The kept one has the length of the window that the model had when it was made."""
    model, batch = make_model("gemma2"), prompts(2, 7)
    expected = {}
    generation = GraphedGeneration(model, cache_lengths=(32,))
    for window in (8, 4, 16, 8, 4):
        model.config.sliding_window = model.model.layers[0].self_attn.sliding_window = window
        expected[window] = model.generate(**batch, **GREEDY)
        with generation:
            assert torch.equal(model.generate(**batch, **GREEDY), expected[window]), window
    assert not torch.equal(expected[4], expected[16])


def test_threads_do_not_share_a_cache(served: GraphedGeneration) -> None:
    """Requests of one shape at the same time all have their own tokens."""
    model = served.model
    batches = [prompts(2, length) for length in (5, 6, 7, 8)]
    expected = [model.generate(**batch, **GREEDY, use_cache=False) for batch in batches]
    got = in_threads(*(partial(model.generate, **batch, **GREEDY) for batch in batches))
    assert all(map(torch.equal, got, expected))


def test_other_threads_end_no_captures(served: GraphedGeneration) -> None:
    """A step that other threads kept from being captured is captured later; another failure is for good."""
    key: Any = None
    for reason, is_hopeless in ((Reason.STATE_SHARED, False), (Reason.CAPTURE_UNSAFE, True)):
        failed = Slot(key, KeptCache(served.model.config, 8), graphed(torch.relu, dynamic={}))
        failed.step.stats.record_capture_failure()
        failed.step.stats.record_eager(reason)
        assert failed.is_hopeless is is_hopeless


class Ends(transformers.StoppingCriteria):  # type: ignore[misc]
    """Ends the service of a model at some token of a request."""

    def __init__(self, generation: GraphedGeneration) -> None:
        self.generation = generation

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """No token ends the request."""
        if input_ids.shape[1] == 12:
            self.generation.unpatch()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_request_under_way_finishes_by_graphs() -> None:
    """The model has its class back meanwhile, and at the end of the request its graphs are released."""
    model, batch = make_model("llama"), prompts(2, 7)
    expected = model.generate(**batch, **GREEDY)
    generation = graphed_generation(model)
    got = model.generate(**batch, **GREEDY, stopping_criteria=transformers.StoppingCriteriaList([Ends(generation)]))
    assert type(model) is transformers.LlamaForCausalLM
    assert torch.equal(got, expected)
    assert (generation.stats.served, generation.stats.steps) == (1, 11)
    assert generation.memory_report().graphs == ()


def test_few_caches_make_room(model: Any) -> None:
    """With room for one cache, each other shape takes the place of the last; figures of those that went stay."""
    requests = [(prompts(rows, 5), GREEDY) for rows in (1, 2)]
    generation = check_same(model, requests, cache_lengths=(32,), max_caches=1)
    assert generation.stats.captures == 4, generation.explain()


def test_a_failed_first_step_is_made_again_without_a_kept_cache() -> None:
    """Where the model raises with a static cache alone, requests run as before, and the reason shows the error."""
    model = make_model("llama")
    expected = answers(model, [(prompts(2, 5), GREEDY)])[0]

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        if isinstance(kwargs.get(CACHE), transformers.StaticCache):
            raise RuntimeError("no static caches here")

    with model.register_forward_pre_hook(refuse, with_kwargs=True), GraphedGeneration(model) as generation:
        for _ in range(2):
            assert torch.equal(answers(model, [(prompts(2, 5), GREEDY)])[0], expected)
        stats, explained = generation.stats, generation.explain()
    assert (stats.requests, stats.served, stats.not_served) == (2, 0, {NotServed.RAISED: 2})
    assert "RuntimeError: no static caches here" in explained


class ReadsTheWindow(transformers.Gemma2ForCausalLM):  # type: ignore[misc]
    """Its steps depend on how full the window is, in Python."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        window = kwargs[CACHE].layers[0]
        seen = getattr(window, "cumulative_length_int", None)  # the name in a static layer
        out.logits = out.logits * (1 if (window.cumulative_length if seen is None else seen) % 3 else -1)
        return out


def test_a_model_that_reads_the_window_in_python_runs_as_before() -> None:
    """A graph would keep what it read; the first step shows it, and no graph serves."""
    model = make_model("gemma2")
    model.__class__ = ReadsTheWindow
    generation = check_same(model, [(prompts(2, 5), GREEDY)] * 2, cache_lengths=(32,))
    assert generation.stats.hits == 0
    assert generation.stats.not_served == {NotServed.NO_GRAPH: 3}


def test_a_request_that_passes_the_kept_cache_by_is_not_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a transformers that gives the model its cache under another name: it is counted, also one that raises,
    and logged once."""
    monkeypatch.setattr("graphdispatch.integrations.transformers.generation.CACHE_NAMES", ("renamed",))
    generation = check_same(make_model("llama"), [(prompts(2, 5), GREEDY)] * 2, cache_lengths=(32,))
    with generation, pytest.raises(IndexError, match="out of range"):
        generation.model.generate(torch.tensor([[5, 1000]]), **GREEDY)
    assert (generation.stats.served, generation.stats.steps) == (0, 0)
    assert generation.stats.not_served == {NotServed.PASSED_BY: generation.stats.requests}
    assert "did not pass the kept cache to the model" in generation.explain()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert transformers.__version__ in caplog.text


def test_an_error_of_the_request_comes_through(served: GraphedGeneration) -> None:
    """What raises without graphs raises with them, and the next request is served."""
    model = served.model
    bad = {"input_ids": torch.tensor([[5, 1000]])}
    requests = served.stats.requests
    with pytest.raises(IndexError, match="out of range"):
        model.generate(**bad, **GREEDY)
    assert served.stats.requests == requests + 1
    before = served.stats.served
    model.generate(**prompts(1, 5), **GREEDY)
    assert served.stats.served == before + 1


def test_the_end_of_the_block_restores_everything() -> None:
    """The class, the attributes and the configuration are as before; copies and pickles are of the original class."""
    model = make_model("llama")
    kind, attributes, config = type(model), dict(vars(model)), model.generation_config.to_dict()
    with GraphedGeneration(model, cache_lengths=(32,)) as generation:
        expected = answers(model, [(prompts(2, 5), GREEDY)])[0]
        assert isinstance(model, kind)
        assert type(model) is not kind
        assert type(model).__name__ == kind.__name__
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other) is kind
            assert torch.equal(answers(other, [(prompts(2, 5), GREEDY)])[0], expected)
        with pytest.raises(ConfigError, match="is served already; unpatch"):
            GraphedGeneration(model)
        requests = generation.stats.requests
    assert requests == 1
    assert type(model) is kind
    assert vars(model) == attributes
    assert model.generation_config.to_dict() == config
    answers(model, [(prompts(2, 5), GREEDY)])
    assert generation.stats.requests == 1


def test_a_block_that_is_entered_again_has_its_graphs() -> None:
    """They are captured once; ``unpatch`` releases them."""
    model = make_model("llama")
    requests = [(prompts(2, 5), GREEDY)]
    expected = answers(model, requests)
    generation = GraphedGeneration(model, cache_lengths=(32,))
    for _ in range(3):
        with generation:
            assert all(map(torch.equal, answers(model, requests), expected))
        assert type(model).__mro__[1] is not type(generation)
    assert (generation.stats.served, generation.stats.captures) == (3, 1)
    assert generation.memory_report().total > 0
    generation.unpatch()
    assert generation.memory_report().total == 0


def test_prewarm_captures_before_the_first_request() -> None:
    """For each number of rows and each length; all steps are hits then. So for a model that would end at once."""
    model = make_model("llama")
    expected = answers(model, [(prompts(2, 5), GREEDY)])
    generation, said = GraphedGeneration(model, cache_lengths=(32, 64), max_batch_size=2), list[int]()
    wanted = ((2, 64), (1, 64), (2, 32), (1, 32))
    assert generation.prewarm((1, 2), progress=lambda done, total, left: said.append(done)) == wanted
    assert said == [1, 2, 3, 4]
    assert type(model) is transformers.LlamaForCausalLM
    before = generation.stats
    with generation:
        assert all(map(torch.equal, answers(model, [(prompts(2, 5), GREEDY)]), expected))
    after = generation.stats
    assert (before.captures, after.captures) == (4, 4)
    assert after.hits - before.hits == after.steps - before.steps == 11
    model.generation_config.eos_token_id = list(range(99))
    assert GraphedGeneration(model, cache_lengths=(32,)).prewarm() == ((1, 32),)


def test_prewarm_says_what_it_cannot_capture() -> None:
    """Each argument by its name; and a model that graphs do not serve has none afterwards."""
    generation = GraphedGeneration(make_model("llama"), cache_lengths=(32, 64), max_batch_size=2, max_caches=3)
    for bad, error in (
        ({"rows": (3,)}, r"rows must be some of \(1, 2\), got \(3,\)"),
        ({"rows": 2}, r"rows must be some of \(1, 2\), got 2"),
        ({"cache_lengths": (16,)}, r"cache_lengths must be some of \(32, 64\), got \(16,\)"),
        ({"rows": (1, 2)}, "prewarm of 4 caches needs max_caches >= 4, got 3"),
    ):
        with pytest.raises(ConfigError, match=error):
            generation.prewarm(**bad)
    generation.model.generation_config.use_cache = False
    assert generation.prewarm((1,), (32,)) == ()
    assert NotServed.NO_CACHE.text in generation.explain()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"cache_lengths": ()}, "cache_lengths must be numbers of tokens"),
        ({"cache_lengths": (0,)}, "cache_lengths must be numbers of tokens"),
        ({"max_batch_size": 0}, "max_batch_size must be an integer >= 1"),
        ({"max_caches": True}, "max_caches must be an integer >= 1"),
    ],
)
def test_bad_settings_are_errors(model: Any, settings: dict[str, Any], error: str) -> None:
    """They name the argument."""
    with pytest.raises(ConfigError, match=error):
        GraphedGeneration(model, **settings)


@pytest.mark.parametrize("version", ["5.10.4", "5.16.1.dev0", "5.24.0"])
def test_versions_that_were_not_tried_are_named(version: str) -> None:
    """An older one is an error, a newer one a warning; those that were tried, and their patches, are silent."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version(version)
    with pytest.raises(ImportError, match=r"needs transformers 5\.10 or newer, found 4\.57\.6"):
        check_version("4.57.6")
    with pytest.warns(UserWarning, match=r"5\.10 to 5\.24; 6\.0\.0 may differ"):
        check_version("6.0.0")


@pytest.mark.parametrize(
    ("seam", "lack"),
    [({"generate": ("inputs", "gone")}, r"generate has no parameter 'gone'"), ({"go": ()}, "go is not there")],
)
def test_a_seam_that_is_another_is_an_error(seam: dict[str, tuple[str, ...]], lack: str) -> None:
    """It names the version and the method."""
    with pytest.raises(ImportError, match=rf"transformers 5.* differs from 5\.10 .*: GenerationMixin\.{lack}"):
        check_seams({transformers.GenerationMixin: seam})


def test_a_model_that_cannot_generate_is_an_error() -> None:
    """It must have ``generate``."""
    with pytest.raises(ConfigError, match=r"model must have transformers' generate"):
        GraphedGeneration(torch.nn.Linear(2, 2))
