"""Models that are named on the command line: a callable, the keyword arguments of one call, options for ``graphed``."""

import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError

MODEL_HELP = (
    "my_package.model:build, a function that takes nothing and returns the callable, the keyword arguments of one call "
    "and, if wanted, options for graphed. graphdispatch.demo:build is the demo's decoder."
)


def load_model(name: str, argument: str) -> tuple[Callable[..., Any], Mapping[str, Any], Mapping[str, Any]]:
    """Import the function, from the current folder or as installed, and call it: what it returned.

    Args:
        name: The function, as ``module:function``.
        argument: What errors call it.

    Raises:
        ConfigError: The function cannot be imported, raises, or returns something else.
    """
    sys.path.insert(0, os.getcwd())  # a console script, unlike python -m, does not look there
    try:
        built = pkgutil.resolve_name(name)()
    except Exception as error:  # of the user's own code
        raise ConfigError(
            f"{argument} {name!r} cannot be loaded: {type(error).__name__}: {error}; expected a function without "
            "parameters, as my_package.model:build"
        ) from error
    parts = built if isinstance(built, tuple) else (built,)
    if len(parts) not in (2, 3) or not callable(parts[0]) or not all(isinstance(part, Mapping) for part in parts[1:]):
        raise ConfigError(
            f"{argument} {name!r} must return a callable, the keyword arguments of one call as a dict and, if wanted, "
            f"options for graphed as a dict, got {', '.join(type(part).__name__ for part in parts)}"
        )
    fn, example, options = (*parts, {})[:3]
    return fn, example, options
