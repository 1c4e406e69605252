"""``graphdispatch audit``: whether graphs can hold a model, found out on any machine."""

from typing import Annotated

import typer

from .models import MODEL_HELP, load_model
from .waiting import waiting


def audit(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")],
    sizes: Annotated[
        str | None,
        typer.Option(help="Rows to capture: 1,8,64. Default: powers of two, at most 16.", metavar="SIZES"),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="FULL, or PIECEWISE, with graphs between eager_break parts. Default: as of MODEL, or FULL."),
    ] = None,
) -> None:
    """Say whether graphs can hold your model, and name all that prevents it: operators, state, rows, constants.

    No GPU is needed. Exits with 1 if the model cannot be captured.
    """
    from .. import audit as run_audit  # here, since it loads torch, which help and completion need not

    chosen = {"sizes": None if sizes is None else _parse_sizes(sizes), "mode": mode}
    options = {name: value for name, value in chosen.items() if value is not None}
    fn, example, given = load_model(model, "MODEL")
    with waiting("running the model, and capturing it"):
        found = run_audit(fn, example, **{**given, **options})
    typer.echo(found)
    if not found.capturable:
        raise typer.Exit(1)


def _parse_sizes(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected sizes such as 1,8,64, got {text!r}", param_hint="--sizes") from None
