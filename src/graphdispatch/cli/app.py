"""The command line ``graphdispatch``: the commands are registered here, and their mistakes become one line."""

import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

from ..errors import GraphDispatchError
from .doctor import doctor

if TYPE_CHECKING:
    import typer

__all__ = ["build_app", "main"]

_USAGE_ERROR = 2


def main(arguments: list[str] | None = None) -> int:
    """Run the command line (default: the process's arguments) and return its exit code: the entry point.

    A bad value, or an error that this library raises, is one line on stderr and exit code 2. ``doctor`` runs on a
    broken installation, too.
    """
    if (sys.argv[1:] if arguments is None else arguments) == ["doctor"]:
        return doctor()
    try:
        app = build_app()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        return _fail("the command line needs typer and rich: pip install 'graphdispatch[cli]'")
    import typer

    try:
        code = app(arguments, prog_name="graphdispatch", standalone_mode=False)
    except typer.Abort:
        return _fail("interrupted", 130)
    except GraphDispatchError as error:
        return _fail(str(error))
    except Exception as error:
        # typer's usage errors: its versions disagree about where their base class lives.
        if not hasattr(error, "format_message"):
            raise
        return _fail(error.format_message())
    return code if isinstance(code, int) else 0


def build_app() -> "typer.Typer":
    """The application with all its commands; raises ``ModuleNotFoundError`` without typer and rich."""
    import typer

    from .audit import audit
    from .calibrate import calibrate
    from .demo import demo
    from .lint import lint
    from .plan import plan

    app = typer.Typer(
        name="graphdispatch",
        help="CUDA graphs for PyTorch inference: pad, dispatch, replay, slice.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    for command in (demo, audit, plan, lint, calibrate):
        app.command()(command)
    app.command(name="doctor", help=doctor.__doc__)(lambda: doctor())

    @app.callback()
    def _options(
        show_version: Annotated[
            bool,
            typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
        ] = False,
    ) -> None:
        """Options that stand before the command."""

    return app


def _print_version(wanted: bool) -> None:
    import typer

    if wanted:
        print(f"graphdispatch {version('graphdispatch')}")
        raise typer.Exit


def _fail(message: str, code: int = _USAGE_ERROR) -> int:
    if message:  # typer says nothing where it has printed the help instead
        print(f"graphdispatch: error: {' '.join(message.split())}", file=sys.stderr)
    return code
