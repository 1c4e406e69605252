"""Finds which dimensions of the outputs follow the batch, from runs at two different numbers of rows."""

from collections.abc import Callable
from typing import Any

import torch

from ..errors import CaptureError
from ..memory.outputs import OutputRule, fixed_rule, learn_output_rule
from ..reasons import Reason
from .eager_run import EagerRun, undo_run
from .effects import EffectRecorder
from .request import CaptureRequest

__all__ = ["find_output_rule"]


def find_output_rule(
    request: CaptureRequest, eager: EagerRun, output: Any, start_over: Callable[[str], None]
) -> OutputRule:
    """The rule of ``output``, which a run of ``request.size`` rows gave.

    A padded capture has run at two numbers of rows already. Otherwise the rule of an earlier size is taken, and only
    the first size of a signature costs another run. ``start_over`` is called before such a run with what is being done,
    and puts everything back to where the eager run began.

    Raises ``CaptureError`` if the outputs cannot be cut to the real rows, or follow the batch differently than in other
    sizes.
    """
    if request.is_padded:
        rule = learn_output_rule(eager.answer, request.rows, output, request.size)
    elif request.rule is not None:
        rule = request.rule
    elif all(spec.dim is None for spec in request.inputs.specs):
        rule = fixed_rule(output)
    else:
        rule = _probe(request, eager, output, start_over)
    if request.rule is not None and rule != request.rule:
        raise CaptureError(
            f"outputs follow the batch differently than in other sizes: {rule} instead of {request.rule}",
            Reason.OUTPUT_ROWS_UNKNOWN,
        )
    return rule


def _probe(request: CaptureRequest, eager: EagerRun, output: Any, start_over: Callable[[str], None]) -> OutputRule:
    """Run at another number of rows and compare the shapes.

    The run uses real tensors. Fake ones would stay behind in whatever caches the model keeps.
    """
    rows = request.size - 1 if request.size > 1 else 2
    start_over(f"probing the outputs with {rows} rows")
    values = list(request.values)
    for spec in request.inputs.specs:
        if spec.dim is not None:
            real = request.values[spec.position]
            index = torch.arange(rows, device=real.device) % request.rows
            values[spec.position] = real.index_select(spec.dim, index)
    effects = EffectRecorder(request.options.state_limit_bytes, strict=True)
    try:
        with effects:
            probed = request.call(values)
    except Exception as error:
        raise CaptureError(
            f"the call fails for {rows} rows, so it cannot be seen which dimensions of its outputs follow the batch: "
            f"{error}; if it takes one size alone, declare no batch dimension (dynamic={{}})",
            Reason.OUTPUT_ROWS_UNKNOWN,
        ) from error
    finally:
        undo_run(request, effects, eager.rng_before)
    return learn_output_rule(output, request.size, probed, rows)
