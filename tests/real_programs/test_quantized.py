"""Models whose weights torchao has quantized."""

import pytest
import torch

import graphdispatch as gd

from ..helpers import check_rows

quantization = pytest.importorskip("torchao.quantization")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_quantized_weights_are_served(config: str) -> None:
    """Eight-bit weights, and activations that are quantized row by row."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).eval()
    quantization.quantize_(net, getattr(quantization, config)())
    step = gd.graphed(net, dynamic={"input": 0}, sizes=(4, 8), options=gd.CUDAGraphOptions(capture_share=None))
    with torch.inference_mode():
        check_rows(step, 4, 3, 8, 5, 3, 3, 5, 5, 4, 4, width=64, atol=1e-5, rtol=1e-4)
    assert step.stats.hits >= 2
