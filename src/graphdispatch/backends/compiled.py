"""Code that torch's inductor compiled, as one operator that modes see.

Compiled code reserves memory and calls its kernels past torch's dispatcher, so no mode sees them. The call of a
compiled graph can be seen instead: its arguments are all that it reads, it says which of them it writes, and what it
returns is new. So it stands in a recording as one call, and a replay runs the compiled kernels.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from .tracing import UntracedMode

__all__ = ["CompiledRegion", "PythonCalls", "reveal_compiled"]

_revealed: list[type] = []
"""The class of compiled graphs, once its calls are shown to modes. There is one, as torch has one compiler."""
_lock = threading.Lock()


@dataclass(frozen=True)
class CompiledRegion:
    """Looks like an operator to those that watch: ``region(graph, *inputs)`` runs a compiled graph.

    ``mutated`` are the inputs, by position, that it writes.
    """

    size: int
    mutated: tuple[int, ...]
    namespace = "inductor_compiled"
    tags: tuple[torch.Tag, ...] = ()

    @property
    def _schema(self) -> Any:
        writes = [None, *(SimpleNamespace(is_write=True) if i in self.mutated else None for i in range(self.size))]
        arguments = [SimpleNamespace(name=f"input_{i}", alias_info=info) for i, info in enumerate(writes)]
        return SimpleNamespace(name=f"{self.namespace}::region", arguments=arguments, returns=())

    def __call__(self, graph: Any, *inputs: Any) -> Any:
        """Run the graph, which empties the list that it is given."""
        return graph(list(inputs))

    def __str__(self) -> str:
        return "compiled code"


class PythonCalls(UntracedMode):
    """Notes the operators in Python that compiled code calls; ``names`` has them."""

    def __init__(self, is_python: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_python = is_python
        self.names: list[str] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note one operator and run it."""
        kwargs = kwargs or {}
        if self._is_python(func, args, kwargs) is not None:
            self.names.append(func._schema.name)
        return func(*args, **kwargs)


def reveal_compiled(compiler: ModuleType, mode: type[TorchDispatchMode]) -> None:
    """Show calls of compiled graphs to entered modes of this class, by ``watch_region``. Costs such calls 0.1 us.

    ``compiler`` is the module that has their class. Does nothing if it is not the one known here: the memory of
    compiled code is then of unknown origin, and a capture refuses it.
    """
    graphs = getattr(compiler, "CompiledFxGraph", None)
    with _lock:
        if not _revealed and "mutated_input_idxs" in getattr(graphs, "__annotations__", {}):
            _reveal(graphs, mode)


def _reveal(graphs: Any, watching: type[TorchDispatchMode]) -> None:
    plain = graphs.__call__
    depth = torch._C._len_torch_dispatch_stack

    def call(self: Any, inputs: Sequence[Any]) -> Any:
        if not any(isinstance(torch._C._get_dispatch_stack_at(i), watching) for i in range(depth())):
            return plain(self, inputs)
        with _pop_mode_temporarily() as mode:
            if not isinstance(mode, watching):
                return call(self, inputs)
            region = CompiledRegion(len(inputs), tuple(sorted(self.mutated_input_idxs)))
            return mode.watch_region(region, (self, *inputs))  # type: ignore[attr-defined]

    graphs.__call__ = call
    _revealed.append(graphs)
