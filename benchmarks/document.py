"""The tables of ``docs/performance.md``, from the committed results: ``python -m benchmarks.document`` writes them.

A table stands between two comments, the first of which names it. The prose around the tables is written by hand. So is
the table of recorded traces, whose results are not committed.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

__all__ = ["DOCUMENT", "written"]

DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
_RESULTS = Path(__file__).parent / "results"
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
_BATCHES = (1, 8, 64)
_SECONDS = ", seconds before it"
_PEERS = (
    "graphed()",
    "torch.jit.trace and freeze",
    "torch.compile",
    "torch.compile, dynamic",
    "tensordict CudaGraphModule",
)
_MODELS = ("tiny decoder", "MLP", "Llama step")


_OVERHEADS = (
    "tiny decoder step at batch 1, 8, 64 in inference mode, `graphed()` against eager",
    "the same as people call it by default, with gradients on",
    "the same in inference mode and PIECEWISE, with attention as the break",
    "an MLP of three layers at batch 1, 8, 64, in inference mode",
    "the same with gradients on",
    "`graphed()` over bare replay, with 1, 4, 16 inputs",
    "the same with gradients on, for a model of 40 parameters",
    "`CUDAGraphWrapper` over bare replay, static and default inputs and outputs",
    "one check of the guard, with 20, 200, 2000 parameters",
    "a decision, beside Model Runner V2's rules in plain Python",
    "one more break, with the graph after it",
)


class _Part:
    """The cases of one part of a run, in their order and by name."""

    def __init__(self, run: str, part: str) -> None:
        self.rows = json.loads((_RESULTS / f"{run}.json").read_text())["parts"][part]
        self.cases = {re.sub(" +", " ", one["case"]).strip(): one for one in self.rows}

    def speed(self, case: str) -> str:
        """How many times as fast as what it is compared with."""
        return f"{self.cases[case]['base_us'] / self.cases[case]['us']:.2f}"

    def more(self, case: str) -> str:
        """How many microseconds more than what it is compared with."""
        return _amount(self.cases[case]["us"] - self.cases[case]["base_us"])


def written(text: str) -> str:
    """The document with its tables as the results have them."""
    return _PLACE.sub(lambda place: f"{place[1]}{_TABLES[place[2]]()}\n{place[3]}", text)


def _overheads() -> str:
    decoder, front, guard, piecewise = (_Part("native", name) for name in ("decoder", "graphed", "guard", "piecewise"))
    wrapper, decision = _Part("native", "wrapper"), _Part("native", "decisions").cases["decide, decode (V2)"]

    def speeds(form: str, part: _Part = decoder) -> str:
        return ", ".join(part.speed(form.format(batch)) for batch in _BATCHES) + " times"

    def extras(form: str) -> str:
        return ", ".join(front.more(form.format(inputs)) for inputs in (1, 4, 16)) + " µs more"

    def checks(figure: str) -> str:
        forms = (f"{count} parameters: one check, native over Python" for count in (20, 200, 2000))
        return ", ".join(_amount(guard.cases[form][figure]) for form in forms) + " µs"

    bare, loop = "inference, batch {}, bare replay", "inference, batch {}, bare replay, Python's loop"
    plain, trained = "{} inputs, exact, gradients off: ", "{} inputs, exact, gradients on, 40 parameters: "
    passed, fresh = (_amount(one["us"]) for one in piecewise.rows if one["case"].strip().startswith("each of 16"))
    native = (
        f"{speeds('inference, batch {}, graphed()')} as fast (bare replay: {speeds(bare)})",
        f"{speeds('default, batch {}, graphed()')} as fast",
        f"{speeds('decoder, batch {}, PIECEWISE', piecewise)} as fast",
        f"{speeds('MLP, inference, batch {}, graphed()')} as fast (bare replay: {speeds(f'MLP, {bare}')})",
        f"{speeds('MLP, default, batch {}, graphed()')} as fast",
        extras(f"{plain}native"),
        extras(f"{trained}native"),
        ", ".join(wrapper.more(f"{kind} inputs and outputs") for kind in ("static", "default")) + " µs more",
        checks("us"),
        f"{_amount(decision['us'])} against {_amount(decision['base_us'])} µs",
        f"{passed} µs if it returns its argument, {fresh} µs if it returns a fresh tensor",
    )
    loops = f"bare replay: {speeds(loop)}", "", "", f"bare replay: {speeds(f'MLP, {loop}')}", ""
    python = *loops, extras(f"{plain}Python"), extras(f"{trained}Python"), "", checks("base_us"), "", ""
    return _table(("what", "native", "in Python"), zip(_OVERHEADS, native, python, strict=True))


def _peers() -> str:
    peers = _Part("native", "peers")

    def cell(case: str, peer: str) -> str:
        case = f"{case}: {peer}"
        if case not in peers.cases:
            return ""
        seconds = f" ({peers.cases[case + _SECONDS]['s']:.{2 if peer == _PEERS[0] else 1}f})"
        return peers.speed(case) + (seconds if peer == _PEERS[0] or "compile" in peer else "")

    cases = [
        f"{model}, {mode}, batch {batch}"
        for mode in ("inference", "no_grad", "default")
        for model in _MODELS
        for batch in _BATCHES
    ]
    rows = [
        (case.replace("batch ", ""), *(cell(case, peer) for peer in _PEERS))
        for case in cases
        if f"{case}: {_PEERS[0]}" in peers.cases
    ]
    head = (
        "model, mode, batch",
        "`graphed()`",
        "`torch.jit.trace`, frozen",
        "`torch.compile`",
        "the same, dynamic",
        "tensordict",
    )
    return _table(head, rows)


def _lengths() -> str:
    runs = _Part("lengths", "lengths")
    sizes = ("two graphs", "four graphs", "batch alone")

    def line(what: str, told: Callable[[str], str]) -> tuple[str, ...]:
        return (what, *(told(f"{size}: {what}") for size in sizes))

    return _table(
        ("", "dimensions `batch` and `seq`, two graphs", "four graphs", "`batch` alone"),
        [
            line("calls that a graph served", lambda case: f"{runs.cases[case]['%']:.1f} %"),
            line("captures", lambda case: f"{runs.cases[case]['']:.0f}"),
            line("whole run, captures and comparisons included", lambda case: f"{runs.speed(case)} times as fast"),
            line("its last 500 calls", lambda case: f"{runs.speed(case)} times as fast"),
        ],
    )


def _amount(number: float) -> str:
    return f"{number:.{2 if number < 1 else 1 if number < 20 else 0}f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |".replace("|  |", "| |") for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


_TABLES: dict[str, Callable[[], str]] = {"overheads": _overheads, "peers": _peers, "lengths": _lengths}


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
