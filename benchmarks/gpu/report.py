"""Where a run was made, and its figures as JSON and as Markdown tables."""

import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from graphdispatch.native.bound import GUARD

from .bars import Row

__all__ = ["earlier", "save", "table", "where"]


def where(device: torch.device, commit: str | None) -> dict[str, str]:
    """The machine and the software: what must stand beside every figure."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"{device.type} on {platform.machine()}",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else "none",
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "native core": "no" if GUARD is None else "yes",
        "commit": commit or _output("git", "describe", "--always", "--dirty"),
    }


def earlier(folder: Path, place: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The sections that lie in ``folder`` from the same place and software, so that a run may be made in parts."""
    path = folder / "gpu.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    sections: dict[str, dict[str, Any]] = content.get("sections", {}) if content.get("where") == place else {}
    return sections


def save(folder: Path, place: dict[str, str], sections: dict[str, dict[str, Any]]) -> None:
    """Write ``gpu.json`` and ``gpu.md``; called after each section, so that what is measured is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"where": place, "sections": sections}
    (folder / "gpu.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    head = ", ".join(f"{name} {value}" for name, value in place.items())
    parts = [f"# Measured on a GPU\n\n{head}. Medians of one run; all sides of a table took turns in it."]
    for name, section in sections.items():
        parts.append(f"## {name}: {section['title']}\n\n{section['status']}, {section['seconds']:.0f} s.")
        rows = [Row(*row) for row in section["rows"]]
        if rows:
            parts.append(table(rows))
        parts.append("\n".join(f"- {line}" for line in section["bars"]))
    (folder / "gpu.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with a column for each figure that any row has."""
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    lines = [["case", "side", *names], ["---", "---", *("---:" for _ in names)]]
    lines += [[row.case, row.side, *(_cell(row.figures.get(name)) for name in names)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"
