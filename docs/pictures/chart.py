"""Draws the bar chart of README and of the page on performance from committed results.

``python docs/pictures/chart.py`` reads ``benchmarks/results/native.json`` and writes ``speed.svg`` beside this file. A
bar's length is how many times as fast as eager its way is, in the same turns. It also prints README's table of models,
from ``benchmarks/results/models.json``.
"""

import json
from pathlib import Path

from draw import STYLE, styled, text

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
TARGET = HERE / "speed.svg"
WIDTH, LEFT, BAR, GAP = 420, 96, 15, 14
MORE = """
.right { text-anchor: end; }
.bar { rx: 1.5px; stroke: none; }
.plain { fill: #8886; }
.other { fill: #d9822b99; }
.ours { fill: #2a78d6; }
"""
WAYS = (("eager", None, "plain"), ("torch.compile", "torch.compile", "other"), ("graphdispatch", "graphed()", "ours"))
CASES = (
    ("small Llama, batch 1", "Llama step, inference, batch  1"),
    ("small Llama, batch 8", "Llama step, inference, batch  8"),
    ("small Llama, batch 64", "Llama step, inference, batch 64"),
    ("tiny decoder, batch 1", "tiny decoder, inference, batch  1"),
    ("MLP, batch 1", "MLP, inference, batch  1"),
)


def cases(run: str, part: str) -> dict[str, dict[str, float]]:
    """The rows of one part of a committed run, by name."""
    return {row["case"]: row for row in json.loads((RESULTS / f"{run}.json").read_text("utf-8"))["parts"][part]}


def table() -> str:
    """The rows of README's table of models."""
    return "\n".join(
        f"| {name} | {row['base_us'] / 1000:.2g} → {row['us'] / 1000:.2g} | {row['base_us'] / row['us']:.2f}x |"
        for name, row in cases("models", "models").items()
    )


def speeds() -> list[tuple[str, list[float]]]:
    """For each case, how many times as fast as eager each way is."""
    rows = cases("native", "peers")
    return [(title, [_speed(rows, f"{case}: {way}") if way else 1.0 for _, way, _ in WAYS]) for title, case in CASES]


def _speed(rows: dict[str, dict[str, float]], case: str) -> float:
    return rows[case]["base_us"] / rows[case]["us"]


def svg() -> str:
    """The chart."""
    measured = speeds()
    longest = max(max(values) for _, values in measured)
    scale = (WIDTH - LEFT - 44) / longest
    lines, y = [], 34
    for index, (name, _, kind) in enumerate(WAYS):
        x = LEFT + (0, 72, 190)[index]
        lines += [f'<rect x="{x}" y="6" width="12" height="12" class="bar {kind}"/>', text(x + 18, 16.5, name, "left")]
    for title, values in measured:
        lines.append(text(LEFT - 8, y + 1.5 * BAR + 4, title.partition(",")[0], "right"))
        lines.append(text(LEFT - 8, y + 2.5 * BAR + 4, title.partition(", ")[2], "right note"))
        for index, value in enumerate(values):
            top, width = y + index * BAR, value * scale
            kind = WAYS[index][2]
            lines.append(f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR - 3}" class="bar {kind}"/>')
            lines.append(text(LEFT + width + 5, top + 10, f"{value:.1f}x", "left note"))
        y += len(values) * BAR + GAP
    title = "Speed of eager, torch.compile and graphdispatch on one CPU core; eager is 1"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="picture wide" width="560" '
        f'viewBox="0 0 {WIDTH} {y - 8}" role="img">\n'
        f"<title>{title}</title>\n{styled(STYLE + MORE)}\n" + "\n".join(lines) + "\n</svg>\n"
    )


if __name__ == "__main__":
    TARGET.write_text(svg(), encoding="utf-8")
    print(TARGET, table(), sep="\n")
