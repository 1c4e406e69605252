"""``graphdispatch audit``: what graphs would do with a model, found out on any machine."""

from typing import Annotated

import typer
from rich.console import Console

import graphdispatch as gd

from .inputs import read_numbers, runtime_mode
from .options import JsonFile, ModeOption
from .outputs import print_text, require_writable, write_json
from .targets import TargetName, load_target, naming

__all__ = ["audit"]


def audit(
    model: TargetName,
    sizes: Annotated[
        str | None,
        typer.Option(help="Rows to capture: 1,8,64. Default: powers of two, at most 16.", metavar="SIZES"),
    ] = None,
    mode: ModeOption = None,
    json_file: JsonFile = None,
) -> None:
    """Say whether graphs can hold your model, and everything that stands against: operators, state, rows, constants.

    Exits with 1 if the model cannot be captured. No GPU is needed.
    """
    require_writable(json=json_file)
    rows = read_numbers("--sizes", sizes) if sizes is not None else None
    fn, example, options = load_target(model)
    with naming(f"MODEL {model!r}: calling it", "; call it with its example"):
        found = gd.audit(fn, example, sizes=rows, mode=runtime_mode(mode), **options)
    console = Console()
    for line in str(found).splitlines():
        is_verdict = line.removeprefix("NOT ").startswith("capturable")
        print_text(console, line, ("green" if found.capturable else "red") if is_verdict else "")
    write_json(json_file, found.to_dict())
    if not found.capturable:
        raise typer.Exit(1)
