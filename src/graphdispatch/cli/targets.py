"""Models that the commands are given by name: a callable, the arguments of one call, and options for ``graphed``."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer

import graphdispatch as gd

from ..errors import ConfigError, GraphDispatchError

__all__ = ["Target", "TargetName", "load_target", "naming"]

_DEMO = "graphdispatch.demo.models:tiny"
_RESERVED = ("sizes", "max_size", "mode")

TargetName = Annotated[
    str,
    typer.Argument(
        help="module:function. The function takes nothing and returns the callable, the keyword arguments of one call, "
        "and, if wanted, options for graphed as a third. Or demo, the built-in decoder.",
        metavar="MODEL",
    ),
]


class Target(NamedTuple):
    """A callable, the keyword arguments of one call, and options for ``graphed``."""

    fn: Callable[..., Any]
    example: Mapping[str, Any]
    options: Mapping[str, Any]


def load_target(model: str) -> Target:
    """What ``module:function`` returns, checked, or the demo's decoder. Raises ``ConfigError`` for anything else."""
    model = _DEMO if model == "demo" else model
    module, _, name = model.partition(":")
    if not module or not name:
        raise ConfigError(f"MODEL must be module:function, or demo, got {model!r}")
    if module.endswith(".py"):
        raise ConfigError(f"MODEL {model!r} must name a module, not its file: {module[:-3].replace('/', '.')}:{name}")
    sys.path.insert(0, os.getcwd())  # a console script, unlike python -m, does not look there
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"MODEL {model!r}: there is no module {error.name}, here or installed") from error
    build = getattr(found, name, None)
    if not callable(build):
        raise ConfigError(f"MODEL {model!r}: {module} has no function {name}")
    if _is_incomplete(build):
        raise ConfigError(f"MODEL {model!r} must be a function without parameters that returns the model, got {name}")
    with naming(f"MODEL {model!r}: {name}()"):
        built = build()
    fn, example, options = (*built, {})[:3] if isinstance(built, tuple) and len(built) in (2, 3) else (None, None, None)
    if not callable(fn) or not isinstance(example, Mapping) or not isinstance(options, Mapping):
        raise ConfigError(
            f"MODEL {model!r} must return (callable, keyword arguments of a call) or (callable, keyword arguments, "
            f"options for graphed), both as dicts, got {_types(built)}"
        )
    known = inspect.signature(gd.graphed).parameters.keys() - {"fn", *_RESERVED}
    unknown = [str(key) for key in options if key not in known]
    if unknown:
        raise ConfigError(f"MODEL {model!r}: options must be of graphed, without {_RESERVED}; got {', '.join(unknown)}")
    return Target(fn, example, options)


def _is_incomplete(build: Callable[..., Any]) -> bool:
    """Whether it cannot be called without arguments, as far as its signature says."""
    try:
        inspect.signature(build).bind()
    except TypeError:
        return True
    except ValueError:  # it has none
        return False
    return False


def _types(built: Any) -> str:
    if not isinstance(built, tuple):
        return type(built).__name__
    return f"({', '.join(type(one).__name__ for one in built)})"


@contextmanager
def naming(what: str, remedy: str = "") -> Iterator[None]:
    """Within the block the user's own code runs; an error of it is named as that, in one line."""
    try:
        yield
    except GraphDispatchError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} raised {type(error).__name__}: {error}{remedy}") from error
