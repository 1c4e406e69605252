"""A backend for ``torch.compile`` that splits the traced FX graph and serves it by piecewise graphs.

The compiler only finds the graph of a model and its dynamic dimension; it generates no code. torch's own
``split_module`` cuts the FX graph at the split operators. These operators run eagerly. The whole is served like any
callable: padded to the next size, captured in pieces, checked, replayed.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from ..api.graphed import Graphed, graphed
from ..call.breaks import eager_break
from ..config import CUDAGraphOptions
from ..errors import ConfigError, shown

__all__ = ["PiecewiseBackend", "piecewise_backend"]


def piecewise_backend(
    split_ops: Iterable[Any] = (),
    *,
    max_size: int = 256,
    sizes: str | Sequence[int] = "auto",
    strict: bool = False,
    options: CUDAGraphOptions | None = None,
) -> "PiecewiseBackend":
    """Make a backend: ``torch.compile(model, backend=piecewise_backend([...]), dynamic=True)``.

    ``split_ops`` are the operators that run eagerly: functions (``F.scaled_dot_product_attention``), operators
    (``torch.ops.mylib.attention``), or names (``"scaled_dot_product_attention"``). If the FX graph has one dynamic
    dimension, batches are padded to the capture sizes. If it has several, each exact shape gets graphs of its own. The
    other options are those of ``graphed``. Call the compiled model under ``torch.no_grad()``: a call that needs
    gradients runs eagerly.
    """
    if isinstance(split_ops, str) or not isinstance(split_ops, Iterable):
        raise ConfigError(
            f"split_ops must be several functions, operators or names, as ['aten::nonzero'], got {shown(split_ops)}; "
            "leave it out for none"
        )
    ops = tuple(split_ops)
    for op in ops:
        if not isinstance(op, str) and not callable(op):
            raise ConfigError(f"split_ops must be functions, operators or names, got {shown(op)}")
    settings = {"max_size": max_size, "sizes": sizes, "strict": strict, "options": options}
    return PiecewiseBackend(ops, settings)


class PiecewiseBackend:
    """``torch.compile`` calls it with each FX graph. ``graphs`` are the callables made so far."""

    def __init__(self, split_ops: tuple[Any, ...], settings: Mapping[str, Any]) -> None:
        self._names = {_name_of(op) for op in split_ops}
        self._targets = {op for op in split_ops if not isinstance(op, str)}
        self._settings = settings
        self.graphs: list[Graphed[..., Any]] = []

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **_generation: Any) -> Callable[..., Any]:
        """Make the callable that serves one FX graph. What ``torch.compile`` was given as ``mode=`` and ``options=``
        says how code is generated; no code is generated here."""
        shape = _GraphShape(module)
        parts, broken = self._split(module)
        for name in broken:
            # The mark goes around the part, because torch replaces a GraphModule's own forward when it first runs.
            parts.add_module(name, eager_break(_Part(parts.get_submodule(name))))
        served = graphed(
            shape.without_sizes(parts),
            dynamic=shape.dynamic,
            static=shape.static,
            mode="PIECEWISE",
            **self._settings,
        )
        self.graphs.append(served)
        return shape.with_sizes(served)

    def _split(self, module: fx.GraphModule) -> tuple[fx.GraphModule, list[str]]:
        """The module split into submodules, and the names of those that run eagerly."""
        part, broken, previous = 0, [], False
        parts: dict[fx.Node, int] = {}
        for node in module.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                continue
            splits = node.target in self._targets or _name_of(node.target) in self._names
            if parts and (splits or previous):
                part += 1
            parts[node] = part
            if splits:
                broken.append(f"submod_{part}")
            previous = splits
        if not broken:
            return module, []
        return split_module(module, module, lambda node: parts[node], keep_original_order=True), broken


class _Part(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *values: Any) -> Any:
        return self.part(*values)


class _GraphShape:
    """The roles of an FX graph's arguments: which are sizes, which are parameters, and which have batch rows."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._sources: dict[str, tuple[int, int]] = {}
        found: dict[str, list[int]] = {}
        for position, node in enumerate(self._inputs):
            value = node.meta.get("example_value")
            for dim, extent in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                symbol = _symbol(extent)
                if symbol is not None:
                    self._sources.setdefault(symbol, (position, dim))
                    found.setdefault(node.name, []).append(dim)
        one = len(self._sources) == 1 and all(len(dims) == 1 for dims in found.values())
        self.dynamic = {name: dims[0] for name, dims in found.items()} if one else {}
        """The batch dimension of each argument that has one. Empty if the graph has several dynamic dimensions."""
        self.static = [node.name for node in self._inputs if _is_static(node)]
        """Parameters and buffers: their addresses do not change."""
        self._sizes = [self._size_of(node) for node in self._inputs]
        output = next(node for node in module.graph.nodes if node.op == "output")
        self._output_sizes = [self._size_of(node) if isinstance(node, fx.Node) else None for node in output.args[0]]

    def without_sizes(self, module: fx.GraphModule) -> Callable[..., Any]:
        """The graph as a callable that takes only tensors. It reads the sizes from their shapes, so padding counts."""
        names = [node.name for node, size in zip(self._inputs, self._sizes, strict=True) if size is None]

        def call(*tensors: Any) -> list[Any]:
            given = iter(tensors)
            values = [None if size is not None else next(given) for size in self._sizes]
            results = module(
                *[v if s is None else self._read(s, values) for v, s in zip(values, self._sizes, strict=True)]
            )
            return [None if size is not None else r for r, size in zip(results, self._output_sizes, strict=True)]

        kind = inspect.Parameter.POSITIONAL_ONLY
        call.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
        return call

    def with_sizes(self, served: Callable[..., Any]) -> Callable[..., Any]:
        """The reverse: a callable with the graph's own arguments and results, sizes included."""

        def call(*values: Any) -> list[Any]:
            results = served(*[v for v, size in zip(values, self._sizes, strict=True) if size is None])
            pairs = zip(results, self._output_sizes, strict=True)
            return [r if size is None else self._read(size, values) for r, size in pairs]

        return call

    def _size_of(self, node: fx.Node) -> str | None:
        """The symbol of a value that a tensor's shape contains, or None. Any other number is a constant of the call."""
        symbol = _symbol(node.meta.get("example_value"))
        return symbol if symbol in self._sources else None

    def _read(self, size: str, values: Sequence[Any]) -> int:
        position, dim = self._sources[size]
        extent: int = values[position].shape[dim]
        return extent


def _symbol(value: Any) -> str | None:
    """The symbol of a dynamic extent. None for a plain number, or if the compiler found that it is constant."""
    text = str(value)
    return text if isinstance(value, torch.SymInt) and not text.isdigit() else None


def _is_static(node: fx.Node) -> bool:
    return "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


def _name_of(target: Any) -> str:
    """The bare name of an operator, function or method: ``scaled_dot_product_attention``."""
    if isinstance(target, torch._ops.OpOverload):
        target = target._schema.name
    elif isinstance(target, torch._ops.OpOverloadPacket):
        target = str(target)
    name = target if isinstance(target, str) else getattr(target, "__name__", repr(target))
    return name.rsplit("::", 1)[-1].rsplit(".", 1)[-1]
