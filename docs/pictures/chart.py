"""Draws the bar charts of README and of the page on performance from committed results.

``python docs/pictures/chart.py`` reads ``benchmarks/results`` and writes ``gpu.svg`` and ``speed.svg`` beside itself.
A bar's length is how many times as fast as eager its way is, in the same run. It also prints the table of README, and
that of models on a CPU.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from draw import document, text

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
WIDTH, LEFT, BAR, GAP = 420, 104, 15, 12
_LOOKS = {
    "plain": 'fill="#888888" fill-opacity="0.4"',
    "other": 'fill="#d9822b" fill-opacity="0.6"',
    "ours": 'fill="#2a78d6"',
}
CARDS = (("gpu", "NVIDIA H100"), ("gpu_h200", "NVIDIA H200"))
DECODES = (
    ("0.1B, trace", "0.1B, 200 steps"),
    ("1B, trace", "1B, 200 steps"),
    ("8B, batch 1", "8B, batch 1, 60 steps"),
    ("8B, trace", "8B, 60 steps"),
)
TRACES = DECODES[1], DECODES[3]
"""Those of README's table."""
ON_GPU = (("graphs by hand", "raw graphs by hand", "other"), ("graphdispatch", "graphed() FULL", "ours"))
ON_CPU = (("eager", None, "plain"), ("torch.compile", "torch.compile", "other"), ("graphdispatch", "graphed()", "ours"))
STEPS = (
    ("small Llama, batch 1", "Llama step, inference, batch  1"),
    ("small Llama, batch 8", "Llama step, inference, batch  8"),
    ("small Llama, batch 64", "Llama step, inference, batch 64"),
    ("tiny decoder, batch 1", "tiny decoder, inference, batch  1"),
    ("MLP, batch 1", "MLP, inference, batch  1"),
)


class Bars(NamedTuple):
    """What stands beside each other: a title in two parts, and each way's speed over eager with a remark."""

    title: str
    speeds: list[tuple[float, str]]


def rates(run: str, section: str) -> dict[tuple[str, str], dict[str, float]]:
    """The rows of one section of a run on a GPU, by case and way."""
    found = _read(run)["sections"][section]["rows"]
    return {(case, way): figures for case, way, figures in found}


def cases(run: str, part: str) -> dict[str, dict[str, float]]:
    """The rows of one part of a run on a CPU, by name."""
    return {row["case"]: row for row in _read(run)["parts"][part]}


def _read(run: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{run}.json").read_text("utf-8"))
    return document


def gpu_table() -> str:
    """The rows of README's table of GPUs: decode steps, ``generate()``, and what the captures take."""
    lines = []
    for run, card in CARDS:
        measured = rates(run, "decode")
        for title, case in TRACES:
            figures = [measured[case, way] for way in ("eager", *(way for _, way, _ in ON_GPU))]
            cells = " | ".join(f"{one['tokens_per_s']:,.0f}" for one in figures)
            lines.append(f"| {card.removeprefix('NVIDIA ')}, {title} | {cells}{_remark(figures[-1])} |")
    made = rates("gpu_h200", "generate")
    eager, ours = (made["batch 1", way]["tokens_per_s"] for way in ("default cache", "graphed_generation()"))
    lines.append(f"| H200, 1B, `generate()` | {eager:,.0f} | | {ours:,.0f} |")
    taken = rates("gpu", "capture")
    hand, whole = (
        taken["1B, 51 sizes to 512", way]["seconds"] for way in ("torch's graphs in a loop", "graphed().prewarm")
    )
    lines.append(f"| H100, 1B: seconds to capture 51 sizes | | {hand:.1f} | {whole:.1f} |")
    return "\n".join(lines)


def _remark(figures: dict[str, float]) -> str:
    eager = 1 - figures.get("by_graphs", 1.0)
    return f"; {100 * eager:.0f} % of steps eager" if eager else ""


def cpu_table() -> str:
    """The rows of the table of models on a CPU."""
    return "\n".join(
        f"| {name} | {row['base_us'] / 1000:.2g} → {row['us'] / 1000:.2g} | {row['base_us'] / row['us']:.2f}x |"
        for name, row in cases("models", "models").items()
    )


def gpu() -> str:
    """The chart of decode steps on both GPUs. A line stands where eager is."""
    scale = (WIDTH - LEFT - 40) / max(speed for run, _ in CARDS for bars in _decodes(run) for speed, _ in bars.speeds)
    parts, y = _legend([(name, kind) for name, _, kind in ON_GPU], (0, 130)), 34.0
    parts.append(text(LEFT + scale, 36, "eager", "note"))
    for run, card in CARDS:
        parts.append(text(8, y + 12, card, "left"))
        top, y = y + 6, y + 22
        drawn, y = _bars(_decodes(run), [kind for _, _, kind in ON_GPU], y, scale)
        x = LEFT + scale
        rule = f'<path class="line" d="M{x:g} {top:g} L{x:g} {y - GAP:g}" fill="none" stroke="#57606a"'
        parts += [*drawn, f'{rule} stroke-dasharray="3 3"/>']
    title = "Decode steps of Llama models on NVIDIA H100 and H200, times as fast as eager"
    return document(title, WIDTH, round(y) - 4, parts, 'class="picture wide" width="560"')


def _decodes(run: str) -> list[Bars]:
    measured = rates(run, "decode")
    return [
        Bars(
            title,
            [
                (
                    measured[case, way]["tokens_per_s"] / measured[case, "eager"]["tokens_per_s"],
                    _remark(measured[case, way]),
                )
                for _, way, _ in ON_GPU
            ],
        )
        for title, case in DECODES
    ]


def cpu() -> str:
    """The chart of small models on one CPU core."""
    rows = cases("native", "peers")
    measured = [Bars(title, [(_speed(rows, case, way), "") for _, way, _ in ON_CPU]) for title, case in STEPS]
    scale = (WIDTH - LEFT - 40) / max(speed for bars in measured for speed, _ in bars.speeds)
    parts = _legend([(name, kind) for name, _, kind in ON_CPU], (0, 68, 182))
    drawn, y = _bars(measured, [kind for _, _, kind in ON_CPU], 34, scale)
    title = "Speed of eager, torch.compile and graphdispatch on one CPU core; eager is 1"
    return document(title, WIDTH, round(y) - 4, [*parts, *drawn], 'class="picture wide" width="560"')


def _speed(rows: dict[str, dict[str, float]], case: str, way: str | None) -> float:
    row = rows.get(f"{case}: {way}")
    return row["base_us"] / row["us"] if row else 1.0


def _legend(ways: list[tuple[str, str]], places: tuple[float, ...]) -> list[str]:
    parts = []
    for (name, kind), place in zip(ways, places, strict=True):
        parts += [f'<rect x="{LEFT + place:g}" y="6" width="12" height="12" rx="1.5" {_LOOKS[kind]}/>']
        parts += [text(LEFT + place + 18, 16.5, name, "left")]
    return parts


def _bars(measured: list[Bars], kinds: list[str], y: float, scale: float) -> tuple[list[str], float]:
    """Bars below each other from ``y`` on, and where they end."""
    parts = []
    for title, speeds in measured:
        name, _, rest = title.partition(", ")
        middle = y + len(speeds) * BAR / 2
        parts += [text(LEFT - 8, middle - 2, name, "right"), text(LEFT - 8, middle + 12, rest, "right note")]
        for kind, (speed, remark) in zip(kinds, speeds, strict=True):
            width = speed * scale
            place = f'x="{LEFT}" y="{y:g}" width="{width:.1f}" height="{BAR - 3}" rx="1.5"'
            parts += [f"<rect {place} {_LOOKS[kind]}/>"]
            parts += [text(LEFT + width + 5, y + 10, f"{speed:.1f}x{remark}", "left note")]
            y += BAR
        y += GAP
    return parts, y


PICTURES = {"gpu": gpu, "speed": cpu}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (HERE / f"{name}.svg").write_text(picture(), encoding="utf-8")
    print(gpu_table(), cpu_table(), sep="\n\n")
