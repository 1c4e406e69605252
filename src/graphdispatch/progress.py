"""A progress bar for batches of captures, where tqdm is installed."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from .errors import ConfigError

__all__ = ["progress_bar"]

T = TypeVar("T")


def progress_bar(items: Iterable[T], description: str, *, enabled: bool) -> Iterator[T]:
    """``items`` one by one, behind a bar on standard error if ``enabled``. Needs the extra ``progress``."""
    if not enabled:
        yield from items
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError("progress=True needs tqdm: pip install 'graphdispatch[progress]'") from error
    yield from tqdm(items, desc=description, unit="graph")
