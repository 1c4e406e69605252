"""The demo's decoders as models for ``graphdispatch calibrate``: a callable, an example, and options."""

from typing import Any

import torch

from ..backends import get_backend
from ..call.breaks import eager_break
from ..call.padding import Pad
from ..config import CUDAGraphOptions
from .decoder import PRESETS, Decoder

__all__ = ["Model", "llama_1b", "small", "tiny"]

_ROWS = 128

Model = tuple[Decoder, dict[str, torch.Tensor], dict[str, Any]]
"""The decoder, one call's keyword arguments, and options for ``graphed``."""


def tiny() -> Model:
    """The demo's default decoder."""
    return _model("tiny")


def small() -> Model:
    """A decoder that keeps a CPU busy."""
    return _model("small")


def llama_1b() -> Model:
    """A decoder with the dimensions of a 1B Llama. It needs a GPU."""
    return _model("1b")


def _model(preset: str) -> Model:
    """A decode step in which each request has its own cache slot. In piecewise graphs, attention is a break."""
    backend, config = get_backend("auto"), PRESETS[preset]
    dtype = torch.bfloat16 if backend.device_type == "cuda" and preset == "1b" else torch.float32
    decoder = Decoder(config, _ROWS, device=backend.device, dtype=dtype)
    for layer in decoder.layers:
        eager_break(layer.get_submodule("attention"))
    rows = torch.arange(_ROWS, device=backend.device)
    example = {"token_ids": rows % config.vocab, "slots": rows, "positions": rows % config.window}
    options = {
        "pad": {"slots": Pad.value(decoder.scratch_slot)},
        "options": CUDAGraphOptions(padding_writes="allow"),
    }
    return decoder, example, options
