"""PEFT and accelerate: adapters that are set before each request, merged, unloaded; hooks that move tensors."""

from typing import Any

import pytest
import torch

import graphdispatch as gd

from ..helpers import check_rows

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
hooks = pytest.importorskip("accelerate.hooks")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def model() -> Any:
    """A Llama of one layer with two adapters."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=100
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    made = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora, adapter_name="first")
    made.add_adapter("second", lora)
    return made.eval()


def served(model: Any) -> tuple[Any, Any]:
    """What gives logits, and the same by graphs."""

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]

    return logits, gd.graphed(logits, dynamic={"ids": 0}, sizes=(2, 4))


def check(logits: Any, step: Any) -> None:
    """One call answers as eager does."""
    ids = torch.randint(1, 100, (2, 6))
    torch.testing.assert_close(step(ids), logits(ids))


@pytest.mark.parametrize("names", [["first"], ["first", "second"]], ids=["one adapter", "two in turns"])
def test_adapters_that_are_set_before_each_request_keep_their_graphs(model: Any, names: list[str]) -> None:
    """Three calls for each, and hits from then on."""
    logits, step = served(model)
    for request in range(24):
        model.set_adapter(names[request % len(names)])
        check(logits, step)
    assert step.stats.hits == 24 - 3 * len(names)


def test_a_merged_or_unloaded_adapter_is_noticed(model: Any) -> None:
    """The next answers are those of the new weights."""
    logits, step = served(model)
    model.set_adapter("first")
    for change in (lambda: None, model.merge_adapter, model.unmerge_adapter, lambda: model.delete_adapter("second")):
        change()
        for _ in range(4):
            check(logits, step)
        assert step.last_decision.reason.is_graph or step.last_decision.reason.leads_to_graph


def served_net(net: Any) -> Any:
    """What serves a network, after six calls that answered as eager does."""
    step = gd.graphed(net, dynamic={"input": 0}, sizes=(2,))
    check_rows(step, *[2] * 6, width=8, rtol=1.3e-6, atol=1e-5)
    return step


def test_a_hook_that_moves_tensors_is_served() -> None:
    """It notes the device of its input at each call, which is always an equal one."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()).eval()
    hooks.add_hook_to_module(net, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    assert served_net(net).stats.hits == 3


def test_weights_that_are_offloaded_run_as_before() -> None:
    """Each call rebinds them, which no replay does."""
    accelerate = pytest.importorskip("accelerate")
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()).eval()
    accelerate.cpu_offload(net, execution_device="cpu")
    assert served_net(net).stats.reasons[gd.Reason.STATE_REBOUND]
