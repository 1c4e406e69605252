"""The command line ``graphdispatch``."""

import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, NoReturn

from ..errors import GraphDispatchError
from .doctor import doctor

if TYPE_CHECKING:
    import typer


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit.

    The exit code is 0, 1 if the command found something wrong, or 2 for a bad argument and any other error of this
    library, which is one line on stderr. ``doctor`` also runs where typer or torch is missing.

    Args:
        arguments: The words after ``graphdispatch``, by default the process's own.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["doctor"]:
        sys.exit(doctor())
    try:
        _app()(arguments, prog_name="graphdispatch")
    except GraphDispatchError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        _fail("this command needs typer and rich; in the folder of the sources: pip install '.[cli]'")
    sys.exit()


def _fail(message: str) -> NoReturn:
    print(f"graphdispatch: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _app() -> "typer.Typer":
    import typer  # here, since doctor also runs without it

    from .audit import audit
    from .demo import demo
    from .plan import plan

    app = typer.Typer(
        help="CUDA graphs for PyTorch models whose batch size changes.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    for command in (demo, audit, plan):
        app.command()(command)

    @app.command("doctor", help=doctor.__doc__)
    def _doctor() -> None:
        raise typer.Exit(doctor())

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"graphdispatch {version('graphdispatch')}")
            raise typer.Exit

    @app.callback()
    def _options(
        _: Annotated[
            bool, typer.Option("--version", help="Show the version.", callback=show_version, is_eager=True)
        ] = False,
    ) -> None:
        """Options before the command."""

    return app
