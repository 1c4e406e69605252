"""Serves every case of ``families`` by ``graphed``, compares answers with eager, and says what was not served, and why.

``python -m benchmarks.real_models.sweep`` prints a line for each case; with ``--write`` it also writes the summary
in ``docs/models.md`` and all cases in ``build/models.csv``.
"""

import argparse
import json
import statistics
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from graphdispatch import CUDAGraphOptions, CUDAGraphStats, graphed
from graphdispatch.proof.check.compare import difference, tolerance_for

from .families import Case, build_cases, cases_of

__all__ = ["Outcome", "run_case", "sweep"]

ROWS = (2, 4, 2, 4, 4, 2, 3, 3)
"""The rows of successive batches, again and again; batches of 3 are padded to 4."""
ROUNDS = 3


@dataclass
class Outcome:
    """What became of one case. ``served`` is full if every call of the last round was a hit."""

    family: str
    style: str
    served: str
    reason: str = ""
    detail: str = ""
    difference: float = 0.0
    ratio: float = 0.0
    wrong: str = ""
    kind: str = ""


def _tensors(answer: Any) -> list[torch.Tensor]:
    answer = answer.to_tuple() if hasattr(answer, "to_tuple") else answer
    return [leaf for leaf in tree_leaves(answer) if isinstance(leaf, torch.Tensor)]


def run_case(case: Case, *, times: bool = True) -> Outcome:
    """Serve a case for three rounds of batches. Never raises for what the model does."""
    generator = torch.Generator().manual_seed(0)
    served = graphed(case.model, dynamic=case.dynamic, sizes=[2, 4], options=CUDAGraphOptions(capture_share=None))
    served._graphs.clock = (
        float  # it stands still: what a graph can serve must not depend on what else the machine does
    )
    outcome = Outcome(case.family, case.style, "full")
    hits = 0
    with torch.no_grad():
        for turn in range(ROUNDS):
            hits = served.stats.hits
            for rows in ROWS:
                arguments = case.arguments(rows, generator)
                expected = _answer(case.model, arguments)
                got = _answer(served, arguments)
                _compare(outcome, expected, got, f"round {turn}, {rows} rows")
        hits = served.stats.hits - hits
        outcome.served = "full" if hits == len(ROWS) else f"{hits} of {len(ROWS)}" if hits else "never"
        if hits < len(ROWS):
            _explain(outcome, served, case, generator)
        if times:
            outcome.ratio = _ratio(case, served, generator)
    return outcome


def _answer(fn: Any, arguments: dict[str, Any]) -> Any:
    torch.manual_seed(7)  # some models draw
    try:
        return fn(**arguments)
    except Exception as error:
        return error


def _compare(outcome: Outcome, expected: Any, got: Any, where: str) -> None:
    if isinstance(expected, Exception) or isinstance(got, Exception):
        if type(expected) is not type(got):
            error = got if isinstance(got, Exception) else expected
            outcome.wrong = outcome.wrong or f"{where}: {type(error).__name__}: {error}"
        return
    if type(expected) is not type(got):
        outcome.wrong = outcome.wrong or f"{where}: {type(got)} instead of {type(expected)}"
    wanted, answers = _tensors(expected), _tensors(got)
    if len(wanted) != len(answers):
        outcome.wrong = outcome.wrong or f"{where}: {len(answers)} tensors instead of {len(wanted)}"
    for want, answer in zip(wanted, answers, strict=False):
        if want.shape != answer.shape:
            outcome.wrong = outcome.wrong or f"{where}: shape {tuple(answer.shape)} instead of {tuple(want.shape)}"
            continue
        gap = difference(want, answer, tolerance_for(want.dtype, exact=False))
        if gap is not None:
            outcome.wrong = outcome.wrong or f"{where}: {gap}"
        if want.is_floating_point() and want.numel():
            off = (want - answer).abs().nan_to_num(0.0, 0.0, 0.0).max().item()
            outcome.difference = max(outcome.difference, off)


def _explain(outcome: Outcome, served: Any, case: Case, generator: torch.Generator) -> None:
    stats: CUDAGraphStats = served.stats
    passing = ("first_sighting", "captured_now", "verified_now", "exact", "padded")
    reasons = Counter({str(reason): count for reason, count in stats.reasons.items() if str(reason) not in passing})
    for rows in (4, 2, 3):
        text = str(served.explain(**case.arguments(rows, generator)))
        if "graph" not in text.split(",")[0]:
            outcome.detail = outcome.detail or text
    outcome.reason = reasons.most_common(1)[0][0] if reasons else "on the way"


def _ratio(case: Case, served: Any, generator: torch.Generator, calls: int = 7) -> float:
    arguments = case.arguments(4, generator)
    times: dict[Any, list[float]] = {case.model: [], served: []}
    for _ in range(calls):
        for fn, found in times.items():
            started = time.perf_counter()
            _answer(fn, arguments)
            found.append(time.perf_counter() - started)
    return statistics.median(times[case.model]) / statistics.median(times[served])


def sweep(kinds: set[str], names: set[str]) -> tuple[list[Outcome], dict[str, str]]:
    """The outcomes of the cases of some kinds and names (none: all), and the families that could not be built."""
    outcomes, unbuilt = [], {}
    for kind, name in cases_of():
        if (kinds and kind not in kinds) or (names and name not in names):
            continue
        try:
            for case in build_cases(kind, name):
                with torch.no_grad():
                    case.model(**case.arguments(2, torch.Generator().manual_seed(1)))
                outcome = run_case(case)
                outcome.kind = kind
                outcomes.append(outcome)
                print(_line(outcomes[-1]), flush=True)
        except Exception as error:
            unbuilt[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"# {name}: {unbuilt[name][:150]} ({Path(where.filename).name}:{where.lineno})", flush=True)
    return outcomes, unbuilt


def _line(outcome: Outcome) -> str:
    what = f"{outcome.family:24} {outcome.style:16} {outcome.served:8} {outcome.ratio:5.2f} {outcome.difference:.1e}"
    return f"{what} {outcome.reason} {outcome.detail[:230]} {'WRONG ' + outcome.wrong if outcome.wrong else ''}"


def main() -> None:
    """Run the sweep from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outcomes, unbuilt = sweep(set(options.kind), set(options.names))
    served = Counter(outcome.served if outcome.served in ("full", "never") else "partly" for outcome in outcomes)
    print(dict(served), f"{sum(bool(o.wrong) for o in outcomes)} wrong, {len(unbuilt)} families not built")
    print(Counter(outcome.reason for outcome in outcomes if outcome.reason))
    if options.json:
        options.json.write_text(json.dumps({"outcomes": [asdict(o) for o in outcomes], "unbuilt": unbuilt}, indent=1))
    if options.write:
        from .document import write

        write(outcomes, unbuilt)


if __name__ == "__main__":
    main()
