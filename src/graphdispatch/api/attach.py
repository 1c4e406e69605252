"""``attach``: serves the calls of a module in place, as ``module.compile()`` compiles it in place."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import ConfigError, shown
from .graphed import Graphed, graphed

__all__ = ["attach"]


def attach(module: nn.Module, *, dynamic: Mapping[str, Any], **settings: Any) -> Graphed[..., Any]:
    """Serve the calls of a module by graphs, wherever the module is held: in a pipeline, a parent, a trainer.

    The module stays what it is: its class, its attributes, hooks and state dict, ``to``, saving, and copies, which are
    not attached. Weights that move or change their type end the graphs, as with ``graphed``.

    Args:
        module: The module. It may not be compiled or attached already.
        dynamic: The batch dimension of each argument of its ``forward`` that has one, as ``graphed`` takes it.
        **settings: Everything else that ``graphed`` takes.

    Returns:
        What ``graphed`` returns: ``stats``, ``explain``, ``prewarm``; and ``detach()``, which undoes this.

    Raises:
        ConfigError: An argument cannot be.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module must be a torch.nn.Module, got {shown(module)}; graphed() wraps any callable")
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
