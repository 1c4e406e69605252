"""Sizes of ``graphed`` for several dynamic dimensions, and sizes that are changed later."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..call.dims import Grid, read_grid
from ..call.padding import as_pad
from ..call.rules import ArgumentRules, make_rules
from ..config import CUDAGraphConfig, resized, roomy_config
from ..decide.size_table import SizeTable
from ..errors import ConfigError
from ..serve.group import Route

__all__ = ["grid_config", "grid_route", "in_short_names", "other_sizes"]


def grid_config(
    fn: Callable[..., Any],
    arguments: tuple[Mapping[str, Any], Mapping[str, Any], Iterable[str]],
    sizes: tuple[Any, int | None],
    settings: Mapping[str, Any],
) -> tuple[CUDAGraphConfig, ArgumentRules]:
    """The configuration and the rules from ``(dynamic, pad, static)`` and ``(sizes, max_size)``.

    A single dimension, one of each argument, is what its number would be. Raises ``ConfigError``.
    """
    dynamic, pad, static = arguments
    grid = read_grid(dynamic)
    rules = make_rules(fn, grid.first, pad, static)
    chosen, max_size = sizes
    if _are_points(chosen):
        grid = grid._replace(chosen=tuple(grid.checked_points(chosen)))
        chosen, max_size = sorted({point[0] for point in grid.chosen}), None
    else:
        chosen, max_size = _of_first(grid, chosen, max_size)
    config = roomy_config(chosen, max_size, settings)
    if len(grid.axes) == 1 and all(len(places) == 1 for places in grid.places.values()):
        given = {name: grid.rule_of(grid.axes[0], name, name) for name in grid.places}
        pads = {name: rule for name, rule in given.items() if rule is not None}
        return config, rules._replace(pad={**rules.pad, **pads})
    rules = rules._replace(grid=grid, pad={name: as_pad(name, rule) for name, rule in pad.items()})
    if config.options.max_cached_graphs is None:
        most = max(config.max_cached_graphs, len(_table(SizeTable.of(config.resolve(), config.mode), grid).sizes))
        config = config.replace(options=config.options.replace(max_cached_graphs=most))
    return config, rules


def in_short_names(error: ConfigError) -> ConfigError:
    """The error in the words of ``graphed``, whose arguments ``sizes`` and ``max_size`` have longer names elsewhere."""
    return type(error)(str(error).replace("capture_sizes", "sizes").replace("max_batch_size", "max_size"))


def grid_route(key: int, table: SizeTable, rules: ArgumentRules, **more: Any) -> Route:
    """A route for calls with several dynamic dimensions; ``table`` has the sizes of the first one."""
    assert rules.grid is not None
    return Route(key, _table(table, rules.grid), rules, **more)


def other_sizes(
    config: CUDAGraphConfig, rules: ArgumentRules, sizes: Any, routes: Mapping[Route, bool]
) -> tuple[CUDAGraphConfig, ArgumentRules, Mapping[Route, SizeTable]]:
    """What changes when calls are padded to other sizes: combinations of them, or sizes of the first dimension.

    ``routes`` tells of each whether its calls are mixed ones. Raises ``ConfigError``.
    """
    points = tuple(rules.grid.checked_points(sizes)) if rules.grid is not None and _are_points(sizes) else ()
    try:
        config = resized(config, sorted({point[0] for point in points}) if points else sizes)
    except ConfigError as error:
        raise in_short_names(error) from None
    tables = {route: SizeTable.of(config.resolve(mixed=mixed), route.table.mode) for route, mixed in routes.items()}
    if rules.grid is None:
        return config, rules, tables
    grid = rules.grid._replace(chosen=points)
    return config, rules._replace(grid=grid), {route: _table(table, grid) for route, table in tables.items()}


def _table(first: SizeTable, grid: Grid) -> SizeTable:
    points = (grid.chosen or grid.points(first.sizes)) if first.sizes else ()
    return SizeTable(points, first.mode, axes=grid.axes, pad_batches=first.pads)


def _are_points(sizes: Any) -> bool:
    """Whether sizes are given as combinations: a plan for several dimensions, or tuples."""
    sizes = getattr(sizes, "sizes", sizes)
    return isinstance(sizes, Sequence) and any(isinstance(one, (tuple, list)) for one in sizes)


def _of_first(grid: Grid, sizes: Any, max_size: int | None) -> tuple[Any, int | None]:
    """The sizes of the first dimension, from its ``Dim`` or from the options of ``graphed``."""
    first = grid.dims[0]
    if first.sizes is None and first.max_size is None:
        return sizes, max_size
    if not (isinstance(sizes, str) and sizes == "auto" and max_size is None):
        raise ConfigError(f"sizes and max_size are those of Dim({first.name!r}) already; give them once")
    return ("auto", first.max_size) if first.sizes is None else (first.sizes, None)
