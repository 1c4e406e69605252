"""Measures one program: eager and served in turns, every answer compared."""

import random
import warnings
from collections import Counter
from dataclasses import dataclass, field
from time import thread_time
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from graphdispatch import CUDAGraphOptions, graphed
from graphdispatch.native.tape import TAPE
from graphdispatch.proof.check.compare import difference, tolerance_for

from .programs import PROGRAMS, Program

__all__ = ["Figures", "measure"]

AFTER = (100, 300, 1000)
"""After so many calls the speed so far is noted."""
_PREWARMED_CALLS = 300
_WARM = ("first_sighting", "captured_now", "verified_now")


@dataclass
class Figures:
    """What one program gave. Speeds are eager's time over that of served calls, captures included."""

    name: str
    eager_ms: float = 0.0
    speeds: dict[str, float] = field(default_factory=dict)
    """Over the first calls, with defaults, by their number."""
    share: float = 0.0
    """Of the last quarter of these calls, by graphs."""
    slowest: float = 0.0
    """The slowest of these calls, in eager calls."""
    prewarmed: float = 0.0
    prewarmed_share: float = 0.0
    why: str = ""
    """The commonest reason of eager calls once prewarmed, or of the program as it comes."""
    wrong: str = ""
    failed: str = ""


def measure(name: str, calls: int) -> Figures:
    """Measure the program of this name. Raises what the program raises by itself."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _declare_operators()
    TAPE.wait()
    torch.manual_seed(0)
    program = PROGRAMS[name]()
    figures = Figures(name)
    with torch.no_grad():
        for _ in range(3):
            program.fn(*program.batch(program.max_size))
        _by_calls(program, figures, calls)
        _once_prewarmed(program, figures)
    return figures


def _declare_operators() -> None:
    """Torchvision's compiled operators, which no program here calls, do not load beside a torch of another build."""
    declared = torch.library.Library("torchvision", "FRAGMENT")
    _KEPT.append(declared)
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            declared.define(schema)


_KEPT: list[Any] = []


def _served(program: Program) -> Any:
    settings = dict(program.settings)
    options = CUDAGraphOptions(**settings.pop("options", {}))
    return graphed(program.fn, dynamic=program.dynamic, max_size=program.max_size, options=options, **settings)


def _by_calls(program: Program, figures: Figures, calls: int) -> None:
    """As people begin: no prewarm."""
    served, sizes = _served(program), random.Random(0)
    eager = took = hits = 0
    slowest = 0.0
    reasons: Counter[str] = Counter()
    for number in range(1, calls + 1):
        own, theirs = _turn(program, served, sizes.randint(1, program.max_size), figures)
        eager, took, slowest = eager + own, took + theirs, max(slowest, theirs)
        reasons[str(served.last_decision.reason.value)] += 1
        if number == calls - calls // 4:
            hits = served.stats.hits
        if number in AFTER:
            figures.speeds[str(number)] = eager / took
    figures.eager_ms = 1e3 * eager / calls
    figures.share = (served.stats.hits - hits) / (calls // 4)
    figures.slowest = slowest * calls / eager
    figures.why = _commonest(reasons)


def _once_prewarmed(program: Program, figures: Figures) -> None:
    served, sizes = _served(program), random.Random(1)
    try:
        served.prewarm(*program.batch(program.max_size))
    except Exception as error:
        figures.why = f"prewarm: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        return
    eager = took = 0.0
    hits, reasons = served.stats.hits, Counter[str]()
    for _ in range(_PREWARMED_CALLS):
        own, theirs = _turn(program, served, sizes.randint(1, program.max_size), figures)
        eager, took = eager + own, took + theirs
        reasons[str(served.last_decision.reason.value)] += 1
    figures.prewarmed = eager / took
    figures.prewarmed_share = (served.stats.hits - hits) / _PREWARMED_CALLS
    figures.why = _commonest(reasons)
    if figures.why:
        figures.why = f"{figures.why}: {served.explain(*program.batch(program.max_size - 3))}"


def _commonest(reasons: "Counter[str]") -> str:
    eager = Counter({k: n for k, n in reasons.items() if k not in (*_WARM, "exact", "padded", "in_parts")})
    return eager.most_common(1)[0][0] if eager else ""


def _turn(program: Program, served: Any, rows: int, figures: Figures) -> tuple[float, float]:
    """Seconds of processor time of one call, eager and served; the answers are compared."""
    arguments = program.batch(rows)
    draws = torch.random.get_rng_state()
    start = thread_time()
    want = program.fn(*arguments)
    own = thread_time() - start
    torch.random.set_rng_state(draws)
    start = thread_time()
    got = served(*arguments)
    took = thread_time() - start
    if not figures.wrong:
        figures.wrong = _gap(want, got)
    return own, took


def _gap(want: Any, got: Any) -> str:
    """How an answer differs from eager's; empty if it does not."""
    a, b = (_tensors(answer) for answer in (want, got))
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return f"{[tuple(y.shape) for y in b]} instead of {[tuple(x.shape) for x in a]}"
    gaps = (difference(x, y, tolerance_for(x.dtype, exact=False)) for x, y in zip(a, b, strict=True))
    return next((str(gap) for gap in gaps if gap is not None), "")


def _tensors(answer: Any) -> list[torch.Tensor]:
    answer = answer.to_tuple() if hasattr(answer, "to_tuple") else answer
    return [leaf for leaf in tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
