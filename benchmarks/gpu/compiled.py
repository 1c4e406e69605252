"""A decoder that ``torch.compile`` has compiled, behind ``graphed()``: is every step served, and what is it worth?"""

from typing import TYPE_CHECKING, cast

import torch

from .bench import Bench, Row
from .decode import Makers, batches, emit_steps, make_decoder, prewarmed, sizes_and_example
from .peers import compiled

if TYPE_CHECKING:
    from graphdispatch.demo import Decoder

__all__ = ["TITLE", "run"]

TITLE = "Decode steps of a compiled model, batch sizes from a trace (difference: from the compiled model)"
_REDUCE_SECONDS = 30.0
_COMPILED = "compiled"


def run(bench: Bench) -> None:
    """The compiled model alone and behind graphs; then with ``reduce-overhead``. By dynamo alone without Inductor."""
    name = "tiny" if bench.quick or bench.device.type == "cpu" else "0.1B"
    decoder = make_decoder(bench, name)
    backend = "inductor" if bench.compiles else "eager"
    steps = batches(bench, decoder.config, bench.requests(12 if bench.quick else 100))
    sizes, example = sizes_and_example(steps)
    torch._dynamo.reset()
    step = cast("Decoder", torch.compile(decoder, backend=backend))  # it passes attributes on
    case = f"{name}, {backend}"
    graphs = f"graphed(), {_COMPILED}"
    sides: Makers = {_COMPILED: (lambda: step, step), graphs: (lambda: prewarmed(step, sizes, example), step)}
    speeds = emit_steps(bench, case, steps, sides)
    if {_COMPILED, graphs} <= speeds.keys():
        ratio = speeds[graphs] / speeds[_COMPILED]
        bench.emit(Row(case, f"{graphs} over {_COMPILED}", {"tokens_per_s_ratio": ratio}))
    if bench.compiles and bench.has_time(_REDUCE_SECONDS, f"{case}, reduce-overhead"):
        emit_steps(bench, case, steps, {"reduce-overhead": (lambda: compiled(decoder, dynamic=True), decoder)})
    torch._dynamo.reset()
