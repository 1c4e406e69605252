"""``attach``: serves the calls of a module in place, as ``module.compile()`` compiles it in place."""

from collections.abc import Callable, Mapping
from functools import partial, wraps
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

    The module stays what it is: its class, its attributes, hooks and state dict, ``to``, saving, and deep copies, which
    are not attached. Weights that move or change their type end the graphs, as with ``graphed``. A shallow copy
    (``copy.copy``, a replica of ``nn.DataParallel``) holds what serves the original, and calls that: detach first.

    Args:
        module: The module. It may not be compiled or attached already.
        dynamic: The batch dimension of each argument of its ``forward`` that has one, as ``graphed`` takes it.
        method: The method to serve instead, as ``"decode"``, for owners that do not call the module itself. With
            ``"forward"``, direct calls of that are served as well as those of the module, whose hooks then run eagerly
            around the graph.
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
    handle._undo = partial(_uncompile, module, handle)
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
    if not isinstance(plain, MethodType) or plain.__self__ is not module or method in vars(module):
        raise ConfigError(
            f"method must name a method of the module's class that nobody has replaced, got {shown(method)}, which is "
            f"{shown(plain)} there; without method=, attach() serves the calls of the module itself"
        )
    function = plain.__func__
    handle = graphed(plain, dynamic=dynamic, **settings)

    @wraps(function)
    def served(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return handle(*args, **kwargs) if self is module else function(self, *args, **kwargs)

    setattr(module, method, MethodType(served, module))  # a method, so that a deep copy calls the copy
    handle._undo = partial(_take_back, module, method, served)
    return handle


def _uncompile(module: nn.Module, handle: Graphed[..., Any]) -> None:
    if module._compiled_call_impl is handle:
        module._compiled_call_impl = None


def _take_back(module: nn.Module, method: str, served: Callable[..., Any]) -> None:
    if getattr(vars(module).get(method), "__func__", None) is served:
        delattr(module, method)
