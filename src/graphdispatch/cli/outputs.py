"""Where the commands write: the terminal, and files. Files are checked before the work starts, and written whole."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..errors import ConfigError

__all__ = ["make_table", "print_text", "require_writable", "write_json", "writing"]


def make_table(title: str, first: str, *others: str) -> Table:
    """A table of which all columns but the first are numbers."""
    table = Table(title=title, box=SIMPLE, title_justify="left", title_style="")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_text(console: Console, text: object, style: str = "") -> None:
    """Print text as it is: without markup, and in lines of any length, so that a script can read them."""
    console.print(str(text), style=style, markup=False, highlight=False, soft_wrap=True)


def require_writable(**paths: Path | None) -> None:
    """Raise ``ConfigError`` that names the option if one of ``paths`` cannot be written, or two of them are one."""
    given = {name: path for name, path in paths.items() if path is not None}
    for name, path in given.items():
        folder = path.absolute().parent
        why = None
        if path.is_dir():
            why = "it is a folder"
        elif not folder.is_dir():
            why = f"there is no folder {folder}"
        elif not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
            why = "permission denied"
        if why is not None:
            raise ConfigError(f"--{name} {path} cannot be written: {why}")
    if len({path.resolve() for path in given.values()}) < len(given):
        raise ConfigError(f"--{' and --'.join(given)} must be different files")


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """The block writes ``path``; a failure becomes one ``ConfigError``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--{option} {path} cannot be written: {error.strerror}") from error


def write_json(path: Path | None, values: Any) -> None:
    """Write ``values`` to the file that ``--json`` names, if it was given."""
    if path is not None:
        with writing("json", path):
            path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
