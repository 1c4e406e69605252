"""The demo: a batch trace drives a decoder, eagerly and through graphs side by side."""

from .decoder import PRESETS, Decoder, DecoderConfig
from .result import DemoResult, DemoSettings
from .run import SideBySide
from .steps import StepInputs, StepMaker, chunk_lengths, slots_needed
from .trace import Step, generate_trace, read_trace

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderConfig",
    "DemoResult",
    "DemoSettings",
    "SideBySide",
    "Step",
    "StepInputs",
    "StepMaker",
    "chunk_lengths",
    "generate_trace",
    "read_trace",
    "slots_needed",
]
