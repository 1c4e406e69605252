"""Calls of a front end with a wrong, missing or unnamed argument: an error of this library that says what was meant."""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from ..errors import ConfigError, did_you_mean
from ..runtime.flatten import declared_names

F = TypeVar("F", bound=Callable[..., Any])


def checked_call(front_end: F) -> F:
    """Make a call with other arguments than ``front_end`` has a ``ConfigError``, where Python has a ``TypeError``.

    Args:
        front_end: A function of one positional argument, what is served, with ``dynamic`` among its keywords.
    """
    parameters = inspect.signature(front_end).parameters
    subject, *names = parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    @wraps(front_end)
    def checked(*args: Any, **kwargs: Any) -> Any:
        called = f"{front_end.__name__}()"
        served = args[0] if args else kwargs.get(subject)
        if len(args) > 1:
            raise ConfigError(
                f"{called} takes one argument without a name, {subject}, got {len(args)}; {_as_dynamic(served)}"
            )
        if not takes_any:
            check_names(called, kwargs, (subject, *names))
        if not args and subject not in kwargs:
            raise ConfigError(f"{called} needs {subject}, which it serves, as {called[:-1]}model, dynamic={{...}})")
        if "dynamic" not in kwargs:
            raise ConfigError(f"{called} needs dynamic=, the batch dimension of each argument; {_as_dynamic(served)}")
        return front_end(*args, **kwargs)

    return cast(F, checked)


def check_names(called: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ``ConfigError`` for the first of the keywords ``given`` that is not ``known`` to what is ``called``."""
    for name in given:
        if name not in known:
            meant = did_you_mean(name, known) or f"; it takes {', '.join(known)}"
            raise ConfigError(f"{called} has no argument {name!r}{meant}")


def _as_dynamic(served: Any) -> str:
    """How to give ``dynamic`` for what is served, by the name of its first argument."""
    example = repr(declared_names(served)[0]) if declared_names(served) else "'x'"
    return f"give it by name, as dynamic={{{example}: 0}}; dynamic={{}} is for calls without a batch"
