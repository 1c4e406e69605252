"""The demo: a trace of batch shapes drives a decoder, eagerly and through graphs side by side."""

from .decoder import PRESETS, Decoder, DecoderConfig
from .run import DemoResult, SideBySide, Step, build, generate_trace

__all__ = ["PRESETS", "Decoder", "DecoderConfig", "DemoResult", "SideBySide", "Step", "build", "generate_trace"]
