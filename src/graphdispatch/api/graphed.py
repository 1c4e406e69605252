"""``graphed()``: any callable with a changing batch size, served by captured graphs, right every time.

``attach`` serves the calls of a module in place, as ``module.compile()`` compiles it in place.

The front end for every callable. It makes a route, and the server does the rest.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from os import PathLike
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn

from ..backends import get_backend
from ..backends.tracing import compiler_at_work, untraced
from ..config import CUDAGraphConfig, CUDAGraphOptions, parse_mode
from ..copying import make_lock
from ..errors import ConfigError, shown
from ..modes import CUDAGraphMode
from ..native.bound import called_in_core
from ..reasons import Reason
from ..runtime.attributes import wants_gradient
from ..runtime.cache import make_cache
from ..runtime.decide import Decision, SizeTable
from ..runtime.entry import CUDAGraphEntry
from ..runtime.flatten import leaves_of
from ..runtime.group import Route
from ..runtime.health import Health
from ..runtime.prewarm import PrewarmReport, captured_sizes, prewarm
from ..runtime.protocols import Guard
from ..runtime.rules import ArgumentRules, Dim, callable_name, make_rules
from ..runtime.server import Server
from ..sizes import ROWS
from ..stats import EvictionReason
from .checked_call import check_names, checked_call
from .gradients import Gradients, differentiating
from .lifecycle import Lifecycle, capturer_for
from .progress import Progress, reporter

if TYPE_CHECKING:
    from ..plan.plan import Plan

P = ParamSpec("P")
R = TypeVar("R")

_MOST_SIGNATURES = 32


@checked_call
def graphed(
    fn: Callable[P, R],
    *,
    dynamic: Mapping[str, Any],
    pad: Mapping[str, Any] | None = None,
    static: Iterable[str] = (),
    max_size: int | None = None,
    sizes: "str | Sequence[int] | Plan | PathLike[str]" = "auto",
    mode: str | CUDAGraphMode = "FULL",
    outputs: str | None = None,
    gradients: str = "eager",
    strict: bool = False,
    backend: str = "auto",
    options: CUDAGraphOptions | None = None,
) -> "Graphed[P, R]":
    """Serve ``fn`` by graphs of a few sizes, padding each batch to the next; what cannot be served runs eagerly.

    Rows of the model must be independent of each other; whether they are is checked when a graph is captured, and a
    model that mixes rows stays eager. A size is captured when it comes the second time (``options.capture_after``), or
    by ``prewarm``. Constants among the arguments select the graph, and tensors without a batch dimension are copied
    whole.

    Graphs are for inference. A call that needs gradients (gradients are on, and an input or a captured tensor requires
    one, or a module that does is in training mode) runs eagerly; every other call runs under ``torch.no_grad()``.
    A whole training step is served with ``gradients="inside"``.

    Args:
        fn: A module or any other callable; where no graph serves, it is called as it is.
        dynamic: The batch dimension of each argument that has one, ``{"input_ids": 0}``. An argument in a nest is named
            by its path, ``"batch['ids']"``; ``{}`` is for a callable that works on what it holds. Several dimensions
            have names, ``{"ids": {0: "batch", 1: Dim("seq", [32, 64])}}``, and each name is one length in a call.
        pad: The rule for padding rows of an argument: a ``Pad``, a number, the name of a rule without arguments
            (``"zero"``, the default, ``"repeat_last"`` or ``"leave"``), or a function ``(padding, real)``.
        static: Names of tensors whose address never changes, and of objects that are the same each time.
        max_size: The largest batch that a graph serves, in rows. None: the largest of ``sizes``, or 256.
        sizes: The sizes to capture, a name (``"vllm"``), a plan, or the path of a saved plan. With several dimensions,
            those of the first, or combinations such as ``(8, 64)``.
        mode: ``"FULL"`` (one graph for the call), ``"PIECEWISE"`` (graphs between the parts that ``eager_break``
            marks), or ``"NONE"``.
        outputs: ``"clone"`` returns copies that the caller owns; ``"view"`` a handle (``.get()``) that raises
            ``StaleOutputError`` after the next replay; ``"static"`` the graph's own tensors. None: as in ``options``.
        gradients: ``"eager"`` runs calls that need gradients eagerly. ``"inside"`` is for a training step, which calls
            ``backward()`` and the optimizer itself and gives its caller no gradients. It runs with gradients on, its
            outputs are detached, and ``.grad`` of a parameter is one tensor, which each step overwrites.
        strict: Raise ``FallbackError`` instead of an eager step.
        backend: The name of a backend; ``"auto"`` follows the device of the arguments.
        options: How graphs are captured, checked and kept: when a size is captured, how many graphs and bytes there may
            be, which graph goes.

    Returns:
        A callable with the signature of ``fn``, thread-safe, whose attributes are those of ``fn``.

    Raises:
        ConfigError: An argument cannot be; raised here where that can be known, and else at the first call.
    """
    _refuse_served(fn)
    chosen = _read_options(options, outputs)
    rules, sizes = make_rules(fn, dynamic, {} if pad is None else pad, static), _read_sizes(sizes)
    if rules.dims:
        rules, sizes, max_size = _read_dims(rules, sizes, max_size)
    settings: dict[str, Any] = {"capture_sizes": sizes, "mode": _read_mode(mode), "options": chosen}
    if max_size is not None:
        settings["max_batch_size"] = max_size
    try:
        config = CUDAGraphConfig(backend=backend, strict=strict, **settings)
    except ConfigError as error:  # in the words of this function
        short = str(error).replace("capture_sizes", "sizes").replace("max_batch_size", "max_size")
        raise ConfigError(short) from None
    return (Graphed if gradients == "eager" else GraphedStep)(fn, _for_gradients(fn, config, gradients), rules)


def _refuse_served(fn: Any) -> None:
    """Raise ``ConfigError`` for what graphs serve already: around them no other graph could serve."""
    served = fn._compiled_call_impl if issubclass(type(fn), nn.Module) else fn
    if issubclass(type(served), Graphed):
        remedy = "give what it wraps, fn.unwrap()" if served is fn else "detach() what attach() returned"
        raise ConfigError(f"fn must not be served by graphs already, got {shown(served)}; {remedy}")


def _read_options(options: CUDAGraphOptions | None, outputs: str | None) -> CUDAGraphOptions:
    """The options with ``outputs``, if these are given besides. Raises ``ConfigError`` for static inputs."""
    chosen = CUDAGraphOptions.or_default(options, "options")
    if chosen.inputs != "copy":
        raise ConfigError(
            f"options.inputs must be 'copy' for graphed, got {chosen.inputs!r}; name the tensors whose address never "
            "changes in static=, or use CUDAGraphWrapper"
        )
    return chosen if outputs is None else chosen.replace(outputs=outputs)


def _read_mode(mode: str | CUDAGraphMode) -> CUDAGraphMode:
    """The runtime mode. Raises ``ConfigError`` for a mode that tells uniform decode batches from others."""
    chosen = parse_mode(mode)
    if chosen.separate_routine():
        raise ConfigError(
            f"mode must be FULL, PIECEWISE or NONE for graphed, got {chosen.name}; make one for each kind of batch, or "
            "use CUDAGraphManager"
        )
    return chosen


def _for_gradients(fn: Any, config: CUDAGraphConfig, gradients: str) -> CUDAGraphConfig:
    """The configuration. Raises ``ConfigError`` where it does not fit ``gradients``."""
    if gradients not in ("eager", "inside"):
        raise ConfigError(f"gradients must be 'eager' or 'inside', got {shown(gradients)}")
    if gradients == "inside" and (isinstance(fn, nn.Module) or getattr(fn, "__func__", None) is nn.Module._call_impl):
        raise ConfigError(
            "fn must be a whole training step with gradients='inside', got the call of a module, whose caller "
            "differentiates; give the function that calls it, backward() and the optimizer"
        )
    if gradients == "inside" and config.options.outputs != "clone":
        raise ConfigError(
            f"outputs must be 'clone' with gradients='inside', got {config.options.outputs!r}; leave it out, since a "
            "step returns detached copies"
        )
    if gradients == "inside" and config.mode is CUDAGraphMode.PIECEWISE:
        raise ConfigError(
            "mode must be FULL or NONE with gradients='inside', got PIECEWISE; backward() passes breaks by"
        )
    return config


def _read_sizes(sizes: Any) -> Any:
    """``sizes``, or the plan that was saved to a path."""
    if not isinstance(sizes, PathLike) and not (isinstance(sizes, str) and sizes.endswith(".json")):
        return sizes
    from ..plan.plan import Plan  # here, since serving must not load planning

    return Plan.load(sizes)


def _read_dims(rules: ArgumentRules, sizes: Any, max_size: int | None) -> tuple[ArgumentRules, Any, int | None]:
    """The rules, and the sizes of the first dimension, for dimensions with names.

    A single dimension, one of each argument, is what its number would be. Raises ``ConfigError``.
    """
    if _are_points(sizes):
        rules = rules._replace(chosen=tuple(rules.checked_points(sizes)))
        sizes, max_size = sorted({point[0] for point in rules.chosen}), None
    else:
        sizes, max_size = _of_first(rules.dims[0], sizes, max_size)
    if len(rules.axes) == 1 and all(len(places) == 1 for places in rules.dynamic.values()):
        given = {name: rules.rule_along(rules.axes[0], name, name) for name in rules.dynamic}
        pads = {name: rule for name, rule in given.items() if rule is not None}
        rows = {name: dict.fromkeys(places, ROWS) for name, places in rules.dynamic.items()}
        rules = ArgumentRules(rows, {**rules.pad, **pads}, rules.static)
    return rules, sizes, max_size


def _make_table(config: CUDAGraphConfig, rules: ArgumentRules) -> SizeTable:
    """The sizes of a configuration; with several dynamic dimensions, combinations of them."""
    points = (rules.chosen or rules.points(config.sizes)) if rules.dims and config.sizes else config.sizes
    return SizeTable(points, config.mode, axes=rules.axes, pad_batches=config.pad_batches)


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


@called_in_core(compiler_at_work)
class Graphed(Lifecycle, Generic[P, R]):
    """A callable served by graphs; made by ``graphed()``.

    It is called as the wrapped callable is. Attributes of that are reachable on it, but are set on the callable itself.
    ``stats`` counts what happened so far: hits, captures, padding, and the reason for every eager step. Thread-safe.
    """

    __slots__ = ("__weakref__", "_graph_cache", "_graphs", "_made_with", "_route", "_server", "_undo", "stats")

    def __init__(self, fn: Callable[P, R], config: CUDAGraphConfig, rules: ArgumentRules) -> None:
        options = config.options
        backend = get_backend(config.backend) if config.backend != "auto" else None
        table = _make_table(config, rules)
        most = options.max_cached_graphs or max(config.max_cached_graphs, len(table.sizes))
        self._graph_cache = make_cache(options, most, backend=backend)
        capturer = capturer_for(options, table.mode)
        self._server = Server(
            fn, options, self._graph_cache, capturer, strict=config.strict, max_groups=_MOST_SIGNATURES
        )
        self._graphs = self._server.graphs
        self._graphs.judges_gain = bool(options.verify) and not config.strict
        self._route = Route(0, table, rules)
        self._undo: Callable[[], None] | None = None
        """Gives a module back what ``attach`` replaced; None if that did not make this."""
        self.stats = self._server.stats

    @untraced
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Serve one call, by a graph where one fits and eagerly elsewhere. Raises what the callable raises."""
        answer: R = self._server.serve(self._route, args, kwargs)
        return answer

    @property
    def last_decision(self) -> Decision | None:
        """The decision of the calling thread's latest call, or None before the first."""
        return self._server.decision

    @untraced
    def explain(self, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """How such a call would be served now. Nothing is run or counted.

        Args:
            *args: The positional arguments of the call.
            **kwargs: The keyword arguments of the call.

        Returns:
            One line for people.
        """
        return self._server.explain(self._route, args, kwargs)

    @untraced
    def prewarm(
        self,
        *args: Any,
        sizes: Sequence[int] | None = None,
        max_seconds: float | None = None,
        progress: bool | Progress = False,
        **kwargs: Any,
    ) -> PrewarmReport:
        """Capture ``sizes`` (default: all) now, largest first, from an example call of any number of rows.

        The example's rows are repeated to fill each size; whatever the runs write is put back, so that the call leaves
        no effect. A callable whose first run makes Python state, such as a table or a scale, must have run once before:
        call it with real data. What it raises passes through, as where it takes no batch of the largest size: give
        ``sizes`` that it takes.

        Afterwards every batch that a graph can serve is a hit. One run of a few rows shows whether rows are independent
        and for which batches Python takes the same path; each graph is compared with eager on a full batch, the first
        one on a second and on a padded batch, too. A size that cannot be captured stays eager, with its reason in
        ``explain``.

        Args:
            *args: The positional arguments of the example call.
            sizes: The sizes to capture. None: all.
            max_seconds: After so many seconds no further capture begins. The largest size, its half, and so on come
                first then, so that a few graphs serve every batch. None: no limit.
            progress: True shows a bar, where rich is installed. A function is called after each size with the number of
                finished sizes, of all of them, and of the seconds left.
            **kwargs: The keyword arguments of the example call.

        Returns:
            What was captured, and which sizes were left out and why. Those are captured later, as they come.

        Raises:
            ConfigError: A size or another argument cannot be.
            CaptureError: Nothing may be captured now, as between ``sleep()`` and ``wake()``.
            FallbackError: A size cannot be captured, and the callable is ``strict``.
        """
        with reporter(progress) as report:
            return prewarm(self._server, self._route, args, kwargs, sizes, max_seconds, report)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The capture sizes that calls are padded to."""
        return self._route.table.points

    def clear(self) -> None:
        """Release all graphs and their memory; calls capture anew. The statistics stay."""
        self._graphs.clear()

    @property
    def entries(self) -> list[CUDAGraphEntry]:
        """The captured graphs, by size."""
        return sorted(self._graph_cache, key=lambda entry: entry.size)

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """The sizes that have a graph for every signature seen so far, increasing."""
        return captured_sizes(self._server, self._route)

    def detach(self) -> None:
        """Undo ``attach``: the module is called as before, and the graphs are released. Harmless when done twice.

        Raises:
            ConfigError: This was made by ``graphed``; call what it wraps.
        """
        if self._undo is None:
            raise ConfigError("detach() undoes attach(), and this was made by graphed(); call unwrap()")
        self._undo()
        self.clear()

    def unwrap(self) -> Callable[P, R]:
        """The wrapped callable."""
        return self._server.fn

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.unwrap())

    def __getattr__(self, name: str) -> Any:
        # Protocols (copying, tensors, arrays) read an object itself; and half-made there is no callable.
        is_protocol = name.startswith("__") and name.endswith("__") and name not in ("__name__", "__qualname__")
        if is_protocol or name in Graphed.__slots__ or name in GraphedStep.__slots__:
            raise AttributeError(name)
        return getattr(self.unwrap(), name)

    def health(self) -> Health:
        """As of every front end; of a module that is attached, and that nobody has called, it says what may be why."""
        return super().health()._replace(why_idle=self._why_idle)

    @property
    def _why_idle(self) -> str:
        """Why no call comes to a module that is attached; else empty."""
        if self._undo is None or self.stats.calls:
            return ""
        name = getattr(self._server.fn, "__name__", "")
        if name != "_call_impl":
            return f"nobody has called its {name}() yet"
        return "nobody has called it yet; if its owner calls a method of it, attach that: attach(..., method='forward')"

    def __repr__(self) -> str:
        served = f"{100 * self.stats.graph_ratio:.1f} % of {self.stats.calls} calls served"
        return (
            f"<Graphed {callable_name(self._server.fn)}: {len(self._graph_cache)} graphs of at most "
            f"{self._route.table.largest} rows, {self._why_idle or served}>"
        )


class GraphedStep(Graphed[P, R]):
    """A training step served by graphs; made by ``graphed(step, gradients="inside")``.

    One call runs at a time: others wait. See Note [gradients of a step] in ``gradients.py``.
    """

    __slots__ = ("_fn", "_gradients", "_is_parallel", "_reached", "_turn")

    def __init__(self, fn: Callable[P, R], config: CUDAGraphConfig, rules: ArgumentRules) -> None:
        self._fn = fn
        self._gradients = Gradients()
        self._reached: Guard | None = None
        """Of whose tensors the gradients are looked after."""
        self._is_parallel = False
        """Whether it reaches a module that exchanges gradients with other processes."""
        self._turn = make_lock()
        super().__init__(differentiating(fn, self._gradients), config, rules)

    @untraced
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Serve one step, by a graph where one fits and eagerly elsewhere. Raises what the callable raises."""
        answer: R
        with self._ready():
            objection = self._objection(args, kwargs)
            if objection is None:
                answer, given = self._server.serve(self._route, args, kwargs)
            else:
                answer, given = self._server.run_eagerly(objection, args, kwargs)
            self._gradients.bind(given)
        return answer

    def _objection(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Decision | None:
        """The decision to run a step eagerly, whatever graphs there are; or None."""
        if self._is_parallel:
            why = "it reaches a module of data parallel training, whose processes might capture at different steps"
            return Decision.eager(Reason.CAPTURE_UNSAFE, detail=f"{why}; serve a step of one process")
        if any(map(wants_gradient, leaves_of((*args, *kwargs.values())))):
            why = "an argument requires a gradient, and a step with gradients='inside' gives its caller none"
            return Decision.eager(Reason.NEEDS_GRADIENTS, detail=f"{why}; pass its detach()")
        return None

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """A block in which steps may run: gradients are off, and ``.grad`` of what is trained is what runs expect."""
        graphs, gradients = self._graphs, self._gradients
        with self._turn, torch.no_grad():
            is_new = False
            if self._reached is None or self._reached is not graphs._guards.get(False):
                self._reached, found = graphs.present_guard(), graphs.present_guard(by_names=True)
                self._is_parallel = any(map(_is_parallel, found.modules))
                is_new = gradients.take(found.tensors)
            if (gradients.begin() or is_new) and graphs.entries():
                graphs.rearm(EvictionReason.STALE)
            try:
                yield
            finally:
                gradients.give_back()

    def explain(self, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """As ``Graphed.explain``."""
        with self._ready():
            objection = self._objection(args, kwargs)
            return super().explain(*args, **kwargs) if objection is None else objection.explain()

    def prewarm(self, *args: Any, **kwargs: Any) -> PrewarmReport:
        """As ``Graphed.prewarm``; nothing is trained. Call the step once before."""
        with self._ready():
            return super().prewarm(*args, **kwargs)

    def unwrap(self) -> Callable[P, R]:
        """The wrapped callable."""
        return self._fn


def _is_parallel(module: nn.Module) -> bool:
    """Whether a module belongs to data parallel training of several processes or devices."""
    return any(base.__module__.startswith(("torch.nn.parallel", "torch.distributed")) for base in type(module).__mro__)


_SETTINGS = (*inspect.signature(graphed).parameters, "method")[1:]


@checked_call
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
    check_names("attach()", settings, _SETTINGS)
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
    handle._undo = partial(_take_back, module, "_compiled_call_impl", handle)
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

    bound = MethodType(served, module)  # a method, so that a deep copy calls the copy
    setattr(module, method, bound)
    handle._undo = partial(_take_back, module, method, bound)
    return handle


def _take_back(module: nn.Module, name: str, attached: Any) -> None:
    """Let go of what ``attach`` has put into a module, unless somebody else has replaced it: its class has the same."""
    if vars(module).get(name) is attached:
        delattr(module, name)
