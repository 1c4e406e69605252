"""What the arguments of ``graphed`` say: options, sizes, and rules for one dynamic dimension or several."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

from ..call.rules import ArgumentRules, Dim, make_rules
from ..config import CUDAGraphConfig, CUDAGraphOptions, parse_mode, roomy_config
from ..decide.decision import SizeTable
from ..errors import ConfigError
from ..modes import CUDAGraphMode
from ..sizes import ROWS

__all__ = ["make_table", "read_mode", "read_options", "read_rules", "read_sizes"]


def read_options(options: CUDAGraphOptions | None, outputs: str | None) -> CUDAGraphOptions:
    """The options with ``outputs``. Raises ``ConfigError`` where the two contradict each other."""
    chosen = CUDAGraphOptions.or_default(options, "options")
    if chosen.inputs != "copy":
        raise ConfigError(
            f"options.inputs must be 'copy' for graphed, got {chosen.inputs!r}; name the tensors whose address never "
            "changes in static=, or use CUDAGraphWrapper"
        )
    if outputs is None or outputs == chosen.outputs:
        return chosen
    if chosen.outputs != CUDAGraphOptions().outputs:
        raise ConfigError(f"outputs={outputs!r} contradicts options.outputs={chosen.outputs!r}; give one of them")
    return chosen.replace(outputs=outputs)


def read_mode(mode: str | CUDAGraphMode) -> CUDAGraphMode:
    """The runtime mode. Raises ``ConfigError`` for a mode that tells uniform decode batches from others."""
    chosen = parse_mode(mode)
    if chosen.separate_routine():
        raise ConfigError(
            f"mode must be FULL, PIECEWISE or NONE for graphed, got {chosen.name}; make one for each kind of batch, or "
            "use CUDAGraphManager"
        )
    return chosen


def read_sizes(sizes: Any) -> Any:
    """``sizes``, or the plan that was saved to a path."""
    if not isinstance(sizes, PathLike) and not (isinstance(sizes, str) and sizes.endswith(".json")):
        return sizes
    from ..plan.plan import Plan  # here, since serving must not load planning

    return Plan.load(sizes)


def read_rules(
    fn: Callable[..., Any], arguments: tuple[Any, Any, Any], sizes: tuple[Any, int | None], settings: Mapping[str, Any]
) -> tuple[CUDAGraphConfig, ArgumentRules]:
    """The configuration and the rules that follow from the arguments of ``graphed``."""
    try:
        rules = make_rules(fn, *arguments)
        if rules.dims:
            return _named_config(rules, sizes, settings)
        return roomy_config(*sizes, settings), rules
    except ConfigError as error:
        raise _in_short_names(error) from None


def _named_config(
    rules: ArgumentRules, sizes: tuple[Any, int | None], settings: Mapping[str, Any]
) -> tuple[CUDAGraphConfig, ArgumentRules]:
    """The configuration and the rules for dimensions with names, from ``(sizes, max_size)``.

    A single dimension, one of each argument, is what its number would be. Raises ``ConfigError``.
    """
    chosen, max_size = sizes
    if _are_points(chosen):
        rules = rules._replace(chosen=tuple(rules.checked_points(chosen)))
        chosen, max_size = sorted({point[0] for point in rules.chosen}), None
    else:
        chosen, max_size = _of_first(rules.dims[0], chosen, max_size)
    config = roomy_config(chosen, max_size, settings)
    if len(rules.axes) == 1 and all(len(places) == 1 for places in rules.dynamic.values()):
        given = {name: rules.rule_along(rules.axes[0], name, name) for name in rules.dynamic}
        pads = {name: rule for name, rule in given.items() if rule is not None}
        rows = {name: dict.fromkeys(places, ROWS) for name, places in rules.dynamic.items()}
        return config, ArgumentRules(rows, {**rules.pad, **pads}, rules.static)
    if config.options.max_cached_graphs is None:
        most = max(config.max_cached_graphs, len(make_table(config, rules).sizes))
        config = config.replace(options=config.options.replace(max_cached_graphs=most))
    return config, rules


def _in_short_names(error: ConfigError) -> ConfigError:
    """The error in the words of ``graphed``, whose arguments ``sizes`` and ``max_size`` have longer names elsewhere."""
    return type(error)(str(error).replace("capture_sizes", "sizes").replace("max_batch_size", "max_size"))


def make_table(config: CUDAGraphConfig, rules: ArgumentRules) -> SizeTable:
    """The sizes of a configuration; with several dynamic dimensions, combinations of them."""
    table = SizeTable.of(config, config.mode)
    if not rules.dims:
        return table
    points = (rules.chosen or rules.points(table.sizes)) if table.sizes else ()
    return SizeTable(points, config.mode, axes=rules.axes, pad_batches=table.pads)


def _are_points(sizes: Any) -> bool:
    """Whether sizes are given as combinations: a plan for several dimensions, or tuples."""
    sizes = getattr(sizes, "sizes", sizes)
    return isinstance(sizes, Sequence) and any(isinstance(one, (tuple, list)) for one in sizes)


def _of_first(first: Dim, sizes: Any, max_size: int | None) -> tuple[Any, int | None]:
    """The sizes of the first dimension, from its ``Dim`` or from the options of ``graphed``."""
    if first.sizes is None and first.max_size is None:
        return sizes, max_size
    if not (isinstance(sizes, str) and sizes == "auto" and max_size is None):
        raise ConfigError(f"sizes and max_size are those of Dim({first.name!r}) already; give them once")
    return ("auto", first.max_size) if first.sizes is None else (first.sizes, None)
