"""Validated configuration: what to capture (``CUDAGraphConfig``), how, and within which limits (``CUDAGraphOptions``).

A configuration is frozen and never written back to: what ``"auto"`` stands for is ``CUDAGraphConfig.sizes``. Every bad
value is a ``ConfigError`` that names the option, what was expected and what was given.
"""

import reprlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import index
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_serializer, model_validator
from pydantic_core import ErrorDetails

from .errors import ConfigError, check_type, did_you_mean, shown
from .modes import CUDAGraphMode
from .sizes import NAMED_SIZES, check_sizes, resolve_sizes

# The lookup table has an entry for each batch size, so that a mistyped limit would otherwise fill the memory.
_LARGEST_BATCH = 2**20
_MOST_GRAPHS = 64

_Count = Annotated[int, Field(ge=1)]
_Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)] | None


def parse_mode(value: object) -> CUDAGraphMode:
    """The mode that a value means.

    Args:
        value: A ``CUDAGraphMode``, its name in any case, or its integer value.

    Returns:
        The mode.

    Raises:
        ConfigError: It is something else. The message lists the modes.
    """
    if isinstance(value, CUDAGraphMode):
        return value
    if isinstance(value, str) and value.upper() in CUDAGraphMode.__members__:
        return CUDAGraphMode[value.upper()]
    if type(value) is int and value in set(CUDAGraphMode):
        return CUDAGraphMode(value)
    known = ", ".join(f"{mode.name} ({mode.value})" for mode in CUDAGraphMode)
    meant = did_you_mean(value, CUDAGraphMode.__members__)
    raise ConfigError(f"mode must be one of {known}, got {shown(value)}{meant}")


def _parse_verify(value: Any) -> bool | str:
    if not (isinstance(value, bool) or (isinstance(value, str) and value)):
        raise ConfigError(f"verify must be True, False or the name of a policy, got {shown(value)}")
    return value


def _parse_capture_sizes(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        if value != "auto" and value not in NAMED_SIZES:
            names = ("auto", *NAMED_SIZES)
            raise ConfigError(
                f"capture_sizes must be one of {', '.join(map(repr, names))}, or increasing sizes, got {shown(value)}"
                f"{did_you_mean(value, names)}"
            )
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        raise ConfigError(
            f"capture_sizes must be increasing sizes, as (1, 2, 4, 8), or the name of some, got {shown(value)}; "
            f"max_batch_size={value} sets the largest alone"
        )
    return check_sizes(value)


class _Settings(BaseModel):
    """A frozen set of options, given by keyword, whose every bad value is a ``ConfigError``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self._config_error(error) from None

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        """The object that ``to_dict`` described.

        Args:
            d: The options by name; missing ones take their defaults.

        Returns:
            The object.

        Raises:
            ConfigError: An option is unknown, or its value is wrong.
        """
        check_type("d", d, Mapping, f"a mapping of the options of {cls.__name__}")
        return cls(**d)

    @classmethod
    def or_default(cls, given: Self | None, name: str) -> Self:
        """``given``, or the defaults for None.

        Args:
            given: An instance, or None.
            name: The name of the argument, for the message.

        Returns:
            The instance.

        Raises:
            ConfigError: ``given`` is something else.
        """
        if given is not None and not isinstance(given, cls):
            raise ConfigError(
                f"{name} must be a {cls.__name__} or None, got {reprlib.repr(given)}; {cls.__name__}.from_dict() makes "
                "one of a mapping"
            )
        return given or cls()

    def to_dict(self) -> dict[str, Any]:
        """All options as plain data that JSON can hold; ``from_dict`` reads it back."""
        return self.model_dump(mode="json")

    def replace(self, **changes: Any) -> Self:
        """A copy with some options changed, validated like a new one.

        Args:
            **changes: The new values by name.

        Returns:
            The copy.

        Raises:
            ConfigError: An option is unknown, or its value is wrong.
        """
        kept = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(kept | changes))

    @classmethod
    def _config_error(cls, error: ValidationError) -> ConfigError:
        problems = dict.fromkeys(cls._describe(details) for details in error.errors(include_url=False))
        return ConfigError("; ".join(problems))

    @classmethod
    def _describe(cls, details: ErrorDetails) -> str:
        where = ".".join(map(str, details["loc"]))
        if details["type"] == "extra_forbidden":
            meant = did_you_mean(where, cls.model_fields) or f"; expected one of {', '.join(cls.model_fields)}"
            return f"option {where!r} is unknown to {cls.__name__}{meant}"
        cause = details.get("ctx", {}).get("error")
        if cause is not None:
            # Raised by a validator of ours, which names the option, or by the options nested in this one.
            text = str(cause)
            return text if text.startswith(where) else f"{where}: {text}"
        expected = details["msg"].removeprefix("Input should be ")
        return f"{where or cls.__name__} must be {expected}, got {reprlib.repr(details['input'])}"


class CUDAGraphOptions(_Settings):
    """How a front end captures, checks, replays and keeps graphs, and within which limits.

    Frozen, hashable, given by keyword. A front end refuses an option that it cannot honour with ``ConfigError``.

    Args:
        debug_log_enable: Log each replay at DEBUG level. Captures, evictions and the first eager call for each reason
            are lines at INFO in any case.
        gc_disable: Freeze the garbage collector around captures, since a collection inside one can free what it
            records.
        weak_ref_output: Let all graphs of a pool use the same memory for their outputs, which are copied out at once.
            None does so wherever they are copied, that is unless ``outputs`` is ``"view"`` or ``"static"``.
        validate_addresses: Compare the addresses of static inputs on each call.
        inputs: ``"copy"`` copies the arguments into buffers of the graph on each call; ``"static"`` uses the caller's
            tensors as the buffers: fill those in place before each call.
        outputs: What a replay returns: ``"clone"``, a copy that the caller owns; ``"view"``, a handle on graph memory,
            which raises ``StaleOutputError`` once a later replay overwrote it; ``"static"``, the graph's own tensors,
            unguarded.
        warmup_iterations: Runs before a capture, so that lazy initialisation does not end up in the graph.
        rows: Whether the rows of a batch are independent, so that padding is harmless: ``"proven"`` pads where the
            operators show it; ``"independent"`` is your word where an operator has no rule, and padded batches are then
            compared with eager at both ends of each size. Rows that an operator mixes are never padded.
        verify: Compare a new graph with eager on its first replay; the first one of a signature also on the next,
            different batch, and on the first padded one. ``graphed`` also compares their times, without ``strict``: a
            batch that eager runs clearly faster than its graph, as padding can make it, runs eagerly (``no_gain``). A
            text names a policy of your own, which compares other batches
            (a subclass of ``graphdispatch.proof.check.licence.Verification`` with a ``name``).
        verify_every: Compare a graph with eager again once in so many of its replays: what no guard can see (a counter
            or a global of Python that the capture froze) is found then. None never does.
        rtol: Relative tolerance of that comparison. None chooses by dtype.
        atol: Absolute tolerance of that comparison. None chooses by dtype.
        state_limit_bytes: The most bytes of state that are saved and put back around a capture; more means no capture.
        padding_writes: Whether padding rows may change state that the real rows leave alone (scratch rows):
            ``"refuse"`` or ``"allow"``.
        guard_weights: Compare at each hit what a graph read of the callable's state: where its weights and buffers lie,
            attributes, variables, hooks, settings. False compares none of it; whoever changes anything of it clears the
            graphs. With ``verify=False``, too, ``graphdispatch.record`` makes the graphs of mode FULL: then nothing is
            watched, proven or put back, and the user vouches for what that module lists.
        max_failures: Failed captures of one key after which it stays eager; one that rebinds its state is tried ever
            more rarely.
        capture_after: Sightings of a size, within 4,096 uses (replays in the process, and calls that are looked at),
            before it is captured; 1 captures at once. None: 2, and 1 in ``CUDAGraphWrapper``.
        capture_share: The largest share of the time of calls that captures and comparisons may take, beside what graphs
            have saved. A graph is made once the calls of its size would have saved what that takes. The first capture
            may take longer than the share, and is made at once if it is expected to take no longer than sixty calls,
            which two calls show. A call whose graph has to wait runs eagerly. None, or ``capture_after=1``: no limit.
        max_signatures: The most different kinds of argument lists (dtypes, trailing shapes, constants) that are kept at
            a time, and one more that waits for its second call. The least recently used one gives way to a new one that
            comes twice; one without a graph goes first. None: 32 in ``graphed``, 1024 elsewhere.
        max_cached_graphs: The most graphs kept at once; when there is no room, the least recently used goes. None: 64,
            and one for each capture size if those are more.
        memory_budget_bytes: The most bytes that graphs may hold: their pool, static inputs, outputs and what is their
            own. None: no limit.
    """

    debug_log_enable: bool = False
    gc_disable: bool = True
    weak_ref_output: bool | None = None
    validate_addresses: bool = True
    inputs: Literal["copy", "static"] = "copy"
    outputs: Literal["clone", "view", "static"] = "clone"
    warmup_iterations: _Count = 1
    rows: Literal["proven", "independent"] = "proven"
    verify: Annotated[bool | str, BeforeValidator(_parse_verify)] = True
    verify_every: _Count | None = None
    rtol: _Tolerance = None
    atol: _Tolerance = None
    state_limit_bytes: Annotated[int, Field(ge=0)] = 2**28
    padding_writes: Literal["refuse", "allow"] = "refuse"
    guard_weights: bool = True
    max_failures: _Count = 3
    capture_after: _Count | None = None
    capture_share: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 0.1
    max_signatures: _Count | None = None
    max_cached_graphs: _Count | None = None
    memory_budget_bytes: _Count | None = None

    @model_validator(mode="after")
    def _weak_outputs_are_cloned(self) -> Self:
        if self.weak_ref_output and self.outputs in ("view", "static"):
            raise ConfigError(
                f"weak_ref_output=True must come with outputs='clone', got outputs={self.outputs!r}: "
                "nothing would keep the returned memory alive"
            )
        return self

    def refuse(self, names: Sequence[str], front_end: str, remedy: str) -> None:
        """Refuse options that a front end cannot honour.

        Args:
            names: The names of these options.
            front_end: The name of the front end, for the message.
            remedy: What to do instead, for the message.

        Raises:
            ConfigError: One of them is set.
        """
        for name in names:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ConfigError(f"options.{name} must be left out for {front_end}, got {shown(value)}; {remedy}")

    @property
    def shares_outputs(self) -> bool:
        """Whether the outputs of all graphs of a pool may lie in the same memory."""
        return self.outputs not in ("view", "static") if self.weak_ref_output is None else self.weak_ref_output


class CUDAGraphConfig(_Settings):
    """Which batches are served by graphs, and in which mode. Frozen, hashable, given by keyword.

    Sizes count rows of the batch.

    Args:
        mode: How batches are served, as a mode, its name in any case, or its value; ``NONE`` switches graphs off.
        backend: The name of a backend; ``"auto"`` follows the device of the arguments.
        capture_sizes: ``"auto"`` (vLLM's sizes) or a name of ``named_sizes``, which both end at ``max_batch_size``; a
            ``Plan``, of which those of uniform decode are taken; or the sizes themselves, strictly increasing.
        max_batch_size: The largest batch that a graph may serve, in rows. By default the largest of sizes that are
            given one by one, and else 256.
        max_seq_len: The longest sequence that a graph may serve, in tokens.
        pad_batches: Serve a batch by the next larger size; False serves only exact sizes.
        strict: Raise ``FallbackError`` where a call would otherwise run eagerly.
        options: How graphs are captured, replayed and kept.
    """

    mode: Annotated[CUDAGraphMode, BeforeValidator(parse_mode)] = CUDAGraphMode.FULL
    backend: str = "auto"
    capture_sizes: str | tuple[int, ...] = "auto"
    max_batch_size: Annotated[int, Field(ge=1, le=_LARGEST_BATCH)] = 256
    max_seq_len: _Count = 8192
    pad_batches: bool = True
    strict: bool = False
    options: CUDAGraphOptions = CUDAGraphOptions()

    @field_serializer("mode", when_used="json")
    def _mode_by_name(self, mode: CUDAGraphMode) -> str:
        return mode.name

    @model_validator(mode="before")
    @classmethod
    def _read_sizes(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "capture_sizes" not in values:
            return values
        sizes = values["capture_sizes"]
        if hasattr(sizes, "sizes_of"):  # a plan
            mode = parse_mode(values.get("mode", CUDAGraphMode.FULL))
            sizes = sizes.sizes_of(mode.decode_mode()) or sizes.sizes
        sizes = _parse_capture_sizes(sizes)
        largest = {} if isinstance(sizes, str) else {"max_batch_size": sizes[-1]}
        return largest | values | {"capture_sizes": sizes}

    @model_validator(mode="after")
    def _sizes_are_reachable(self) -> Self:
        sizes = self.capture_sizes
        if isinstance(sizes, tuple) and sizes[-1] > self.max_batch_size:
            raise ConfigError(
                f"capture_sizes must be at most max_batch_size={self.max_batch_size}, got {sizes[-1]}; "
                "raise max_batch_size or drop the size"
            )
        return self

    @property
    def max_cached_graphs(self) -> int:
        """The most graphs kept at once: ``options.max_cached_graphs``, or enough for every capture size and mode."""
        most = len(self.sizes) * (1 + self.mode.separate_routine())
        return self.options.max_cached_graphs or max(_MOST_GRAPHS, most)

    @classmethod
    def disabled(cls) -> Self:
        """A configuration under which everything runs eagerly."""
        return cls(mode=CUDAGraphMode.NONE)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The concrete sizes that this configuration stands for, strictly increasing; none in mode ``NONE``. Computed
        once for equal settings."""
        return resolve_sizes(self.capture_sizes, self.max_batch_size) if self.mode.has_graphs() else ()

    def should_use_cudagraph(self, batch_size: int, seq_len: int) -> bool:
        """Whether a graph may serve a batch.

        Args:
            batch_size: The number of rows.
            seq_len: The longest sequence, in tokens.

        Raises:
            ConfigError: An argument is no integer.
        """
        size = self._size_of(_whole("batch_size", batch_size))
        return 0 <= _whole("seq_len", seq_len) <= self.max_seq_len and size > 0

    def get_padded_batch_size(self, batch_size: int) -> int:
        """The number of rows with which a batch runs.

        A batch that no larger graph serves is not padded: below one row, above the largest size, with
        ``pad_batches=False``, and in mode ``NONE``.

        Args:
            batch_size: The number of real rows.

        Returns:
            The padded number of rows, or ``batch_size``.

        Raises:
            ConfigError: ``batch_size`` is no integer.
        """
        batch_size = _whole("batch_size", batch_size)
        return self._size_of(batch_size) or batch_size

    def _size_of(self, rows: int) -> int:
        """The size of the graph that serves a batch of ``rows`` rows; 0 if none does."""
        sizes = self.sizes
        index = bisect_left(sizes, rows)
        if rows < 1 or index == len(sizes):
            return 0
        return sizes[index] if rows == sizes[index] or self.pad_batches else 0


def _whole(name: str, value: int) -> int:
    try:
        return index(value)
    except TypeError:
        raise ConfigError(f"{name} must be an integer, got {shown(value)}") from None
