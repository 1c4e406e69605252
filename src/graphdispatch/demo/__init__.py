"""The main job: a decoder driven by a batch trace, eager and graphed side by side."""

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
