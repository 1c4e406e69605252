"""``attach``: serves the calls of a module in place, as ``module.compile()`` compiles it in place."""

from collections.abc import Mapping
from types import MethodType
from typing import Any

from torch import nn

from ..errors import ConfigError, shown
from .graphed import Graphed, graphed

__all__ = ["attach"]


def attach(
    module: nn.Module, *, dynamic: Mapping[str, Any], method: str | None = None, **settings: Any
) -> Graphed[..., Any]:
    """Serve the calls of a module by graphs, wherever the module is held: in a pipeline, a parent, a trainer.

    The module stays what it is: its class, its attributes, hooks and state dict, ``to``, and saving. Weights that move
    or change their type end the graphs, as with ``graphed``.

    Args:
        module: The module. It may not be compiled or attached already.
        dynamic: The batch dimension of each argument of its ``forward`` that has one, as ``graphed`` takes it.
        method: The method to serve instead, as ``"decode"``, for owners that do not call the module itself. With
            ``"forward"``, direct calls of that are served as well as those of the module, whose hooks then run eagerly
            around the graph. A copy of the module is served by graphs of its own; without ``method``, it is not
            attached.
        **settings: Everything else that ``graphed`` takes.

    Returns:
        What ``graphed`` returns: ``stats``, ``explain``, ``prewarm``; and ``detach()``, which undoes this.

    Raises:
        ConfigError: An argument cannot be.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module must be a torch.nn.Module, got {shown(module)}; graphed() wraps any callable")
    if method is not None:
        return _attach_method(module, method, dynamic, settings)
    if module._compiled_call_impl is not None:
        raise ConfigError(
            f"module must be neither compiled nor attached, got a {type(module).__name__} that is; detach() what "
            "attach() returned, or attach to a part that is not compiled"
        )
    handle = graphed(module._call_impl, dynamic=dynamic, **settings)
    module._compiled_call_impl = handle
    if module._compiled_call_impl is not handle:  # a traced module keeps no attribute of its own
        raise ConfigError(
            f"module must be served in place, which a {type(module).__name__} does not allow; use graphed()"
        )
    return handle


def _attach_method(
    module: nn.Module, method: str, dynamic: Mapping[str, Any], settings: Mapping[str, Any]
) -> Graphed[..., Any]:
    plain = getattr(module, method, None) if isinstance(method, str) else None
    if not isinstance(plain, MethodType) or plain.__self__ is not module or plain.__name__ != method:
        raise ConfigError(
            f"method must name a method of the module, got {shown(method)}, which is {shown(plain)} there; without "
            "method=, attach() serves the calls of the module itself"
        )
    handle = graphed(plain, dynamic=dynamic, **settings)
    setattr(module, method, handle)
    return handle
