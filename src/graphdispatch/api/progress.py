"""How far a prewarm is: shown as a bar, or given to a function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import ConfigError, shown

Progress = Callable[[int, int, float], object]
"""A function of the number of finished captures, of how many there are, and of the seconds left."""


@contextmanager
def reporter(progress: bool | Progress) -> Iterator[Progress | None]:
    """The function that a prewarm calls after each capture, by its argument ``progress``. None: nobody wants to know.

    Raises ``ConfigError`` if it is neither a flag nor a function, and if there is no rich to show a bar.
    """
    if not isinstance(progress, bool):
        if not callable(progress):
            raise ConfigError(
                "progress must be True for a bar, or a function (done, total, seconds_left) -> None, got "
                f"{shown(progress)}"
            )
        yield progress
    elif progress:
        with bar() as show:
            yield show
    else:
        yield None


@contextmanager
def bar() -> Iterator[Progress]:
    """A bar on stderr."""
    try:
        from rich import progress  # here, since the core works without rich
        from rich.console import Console
    except ImportError:
        raise ConfigError(
            "progress=True shows a bar with rich, which is not installed: pip install rich, or give a function "
            "(done, total, seconds_left) -> None"
        ) from None
    columns = (*progress.Progress.get_default_columns(), progress.MofNCompleteColumn())
    with progress.Progress(*columns, console=Console(stderr=True)) as shown_bar:
        task = shown_bar.add_task("capturing graphs", total=None)
        yield lambda done, total, _: shown_bar.update(task, completed=done, total=total)
