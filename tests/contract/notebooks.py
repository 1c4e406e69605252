"""Runs the notebooks of the documentation without Jupyter. ``python -m tests.contract.notebooks`` writes their outputs.

A cell's output is what it prints, and its last expression as text and, where it has tables, as HTML.
"""

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

__all__ = ["NOTEBOOKS", "executed"]

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def executed(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of its cells, run in order in one namespace."""
    notebook = json.loads(path.read_text())
    names: dict[str, Any] = {"__name__": "notebook"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell["execution_count"] = number
            cell["outputs"] = _outputs("".join(cell["source"]), names, number)
    return notebook


def _outputs(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(True)
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


if __name__ == "__main__":
    for one in NOTEBOOKS:
        one.write_text(json.dumps(executed(one), indent=1) + "\n")
