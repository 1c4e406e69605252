"""What the run takes whose rows are followed, beside one eager run of the same batch: once for a signature.

Ten encoders take from about 1 ms to 1 s for seven rows. The run speaks for batches of up to 256 rows, and for all
lengths up to the model's; operators and what they write are noted, as in a capture.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graphdispatch.backends.operators import storage_key, tensors_in
from graphdispatch.proof.rows.batches import BatchSpace
from graphdispatch.proof.rows.run import RowRun
from graphdispatch.proof.rows.verdict import Verdict
from graphdispatch.proof.watch.effects import EffectRecorder
from graphdispatch.proof.watch.operator_trace import TensorNames

from .price import Encoder
from .timing import Effort, Row, compared, interleaved

__all__ = ["TITLE", "rows"]

TITLE = "the run whose rows are followed, beside one eager run of its batch"
_ROWS, _MOST_ROWS = 7, 256
_TURNS, _WIDE_TURNS, _WIDE = 9, 3, 512
_SIZES = (  # width, length
    *((16, 5), (32, 11), (64, 17), (64, 43), (128, 43)),
    *((256, 43), (256, 97), (512, 97), (512, 197), (1024, 197)),
)


def followed(model: Encoder, x: Tensor, mask: Tensor) -> Verdict:
    """What a run of the model on this batch shows of its rows."""
    space = BatchSpace([range(2, _MOST_ROWS + 1), range(2, x.shape[1] + 1)], [x.shape[0], x.shape[1]])
    run = RowRun(space, set(map(storage_key, [*model.parameters(), x, mask])))
    for argument in (x, mask):
        run.follow(argument, {0: 0, 1: 1})
    effects = EffectRecorder(1 << 30, strict=True, tensor_names=TensorNames.of_arguments((x, mask), (None, None)))
    with effects.watching(run):
        answer = model(x, mask)
    effects.note_outputs(answer)
    return run.verdict(tensors_in(answer))


def _case(width: int, length: int, turns: int) -> Row:
    model = Encoder(width).eval().requires_grad_(False)
    x, mask = torch.randn(_ROWS, length, width), torch.ones(_ROWS, length, dtype=torch.bool)
    verdict = followed(model, x, mask)
    if not verdict.independent:
        raise AssertionError(verdict.mixes or verdict.unknown)
    sides: Sequence[Callable[[], object]] = (lambda: followed(model, x, mask), lambda: model(x, mask))
    return compared(f"width {width}, {_ROWS} x {length} tokens", *interleaved(sides, turns))


def rows(effort: Effort) -> list[Row]:
    """A line for each model."""
    return [
        _case(width, length, min(effort.turns, _TURNS if width < _WIDE else _WIDE_TURNS)) for width, length in _SIZES
    ]
