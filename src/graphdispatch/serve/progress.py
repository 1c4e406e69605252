"""A progress bar for batches of captures, where tqdm is installed."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ..errors import ConfigError

__all__ = ["progress_bar"]

T = TypeVar("T")


def progress_bar(
    items: Iterable[T], description: str, *, enabled: bool, total: int, status: Callable[[], str]
) -> Iterator[T]:
    """``items`` one by one, behind a bar on standard error if ``enabled``, which shows ``status()`` after each.

    Needs the extra ``progress``. Items that are left out of ``total`` leave the bar short.
    """
    if not enabled:
        yield from items
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError("progress=True needs tqdm: pip install 'graphdispatch[progress]'") from error
    with tqdm(desc=description, unit="graph", total=total) as bar:
        for item in items:
            yield item
            bar.set_postfix_str(status(), refresh=False)
            bar.update()
