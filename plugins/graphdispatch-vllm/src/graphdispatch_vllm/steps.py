"""What a step reads besides its arguments, at fixed addresses: vLLM's forward context with its attention metadata.

Note [metadata at fixed addresses]
    vLLM makes a new forward context for each step, and on the CPU new attention metadata too. A graph holds addresses,
    and a guard compares what code reads, so both want the same objects and the same memory at each step. Each graph
    therefore has one context of its own. Before a step its tensors are filled from vLLM's, and everything else is
    assigned. So what changes between steps comes in through memory, as arguments do; and if vLLM's code reads a value
    that changed (another number of tokens, another kind of mask), the guard sees it, and the step runs eagerly.

    Code that torch compiled counts as reading everything. A full graph records the model's own Python instead, which
    runs the same operators (``skip_compiled``).

    Two values of the CPU's metadata change at every step, and no kernel reads them: the longest query and the longest
    sequence. Some code counts as reading everything (that of collectives does), and would be refused for them. In
    their place stands an object that raises when it is used.

    The CPU's schedule (``scheduler_metadata``) is a C++ structure in a tensor, with pointers into itself. They are the
    words that in every step point into the tensor; a copy has them moved by as much as the tensor. Each attention group
    has a schedule of its own, since layers with a window have other work to share out than layers without one.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

__all__ = ["FixedStep", "Schedule", "Schedules", "uncompiled", "vary_slots"]

_SCHEDULE = "scheduler_metadata"


class Schedule:
    """Memory for the CPU's schedules of one attention group, which every graph of a model reads. Not thread-safe."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self._words = np.zeros(nbytes // 8, dtype=np.int64)
        self.tensor = torch.from_numpy(self._words)
        """The memory, as a graph sees it."""
        self._bytes = self._words.view(np.uint8)
        self._pointers: np.ndarray[Any, Any] | None = None
        self._address = self.tensor.data_ptr()

    def load(self, schedule: torch.Tensor) -> bool:
        """Copy a schedule here, with its pointers into itself. False if there is no room."""
        source = schedule.detach().view(-1).view(torch.uint8).numpy()
        if source.nbytes > self._bytes.nbytes:
            return False
        self._bytes[: source.nbytes] = source
        begin = schedule.data_ptr()
        words = self._words[: source.nbytes // 8]
        if self._pointers is None:
            self._pointers = np.flatnonzero((words >= begin) & (words <= begin + source.nbytes))
        else:
            self._pointers = self._pointers[self._pointers < len(words)]  # garbage behind a structure may look like one
            found = words[self._pointers]
            inside = (found >= begin) & (found <= begin + source.nbytes)
            if not inside.all():
                self._pointers = self._pointers[inside]
        words[self._pointers] += self._address - begin
        return True


class Schedules(dict[str, Schedule]):
    """The memory for schedules, one for each attention group, by the name of the group's first layer."""

    def __missing__(self, layer: str) -> Schedule:
        self[layer] = Schedule()
        return self[layer]


class FixedStep:
    """The forward context of one graph: an object that stays, with memory that stays. Not thread-safe.

    ``schedules`` are those of all graphs of a model.
    """

    def __init__(self, given: ForwardContext, schedules: Schedules) -> None:
        self._schedules = dict[int, Schedule]()
        """By the ``id`` of each object with metadata, which stays, the memory of its schedule."""
        self._metadata: dict[int, Any] = {}
        """By the ``id`` of what vLLM gave for the first step, the objects that stay; layers share them."""
        self.context = dataclasses.replace(given, skip_compiled=True)
        metadata = given.attn_metadata
        if isinstance(metadata, dict):
            self.context.attn_metadata = {layer: self._own(each) for layer, each in metadata.items()}
            for layer, each in metadata.items():
                self._give_schedule(self.context.attn_metadata[layer], each, schedules, layer)
        if isinstance(given.slot_mapping, dict):
            self.context.slot_mapping = {layer: self._own(each) for layer, each in given.slot_mapping.items()}
        if given.is_padding is not None:
            self.context.is_padding = self._own(given.is_padding)
        self.context.additional_kwargs = dict(given.additional_kwargs)
        self._metadata.clear()  # the ids are good for one step alone

    def _own(self, given: Any) -> Any:
        if id(given) not in self._metadata:
            self._metadata[id(given)] = self._made(given)
        return self._metadata[id(given)]

    def _made(self, given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return given.clone(memory_format=torch.contiguous_format)
        if not dataclasses.is_dataclass(given) or isinstance(given, type):
            return given
        tensors = {
            field.name: self._own(value)
            for field in dataclasses.fields(given)
            if isinstance(value := getattr(given, field.name), torch.Tensor) and field.name != _SCHEDULE
        }
        unread = _UNREAD_NAMES if type(given) is CPUAttentionMetadata else ()
        return dataclasses.replace(given, **tensors, **dict.fromkeys(unread, _UNREAD))

    def _give_schedule(self, own: Any, given: Any, schedules: Schedules, layer: str) -> None:
        """Have metadata that holds a schedule read it in the memory of its group, of which ``layer`` is one."""
        if id(own) not in self._schedules and isinstance(getattr(given, _SCHEDULE, None), torch.Tensor):
            self._schedules[id(own)] = schedules[layer]
            setattr(own, _SCHEDULE, schedules[layer].tensor)

    def load(self, given: ForwardContext) -> bool:
        """Fill the context from vLLM's for this step. False if it has another form, so that the graph cannot serve."""
        mine, seen = self.context, set[int]()
        if type(given.attn_metadata) is not type(mine.attn_metadata):
            return False
        for field in _FIELDS:
            setattr(mine, field, getattr(given, field))
        if mine.additional_kwargs or given.additional_kwargs:
            mine.additional_kwargs.clear()
            mine.additional_kwargs.update(given.additional_kwargs)
        pairs: list[tuple[Any, Any]] = [(mine.is_padding, given.is_padding)]
        for ours, theirs in ((mine.attn_metadata, given.attn_metadata), (mine.slot_mapping, given.slot_mapping)):
            if isinstance(ours, dict) and isinstance(theirs, dict):
                if ours.keys() != theirs.keys():
                    return False
                pairs += zip(ours.values(), theirs.values(), strict=True)
        for ours, theirs in pairs:
            if id(ours) not in seen:
                seen.add(id(ours))
                if not self._fill(ours, theirs):
                    return False
        return True

    def _fill(self, ours: Any, theirs: Any) -> bool:
        if type(ours) is not type(theirs):
            return False
        if isinstance(ours, torch.Tensor):
            return _copied(ours, theirs)
        if not dataclasses.is_dataclass(ours):
            return ours is theirs
        for name, value in vars(theirs).items():
            own = getattr(ours, name, None)
            if name == _SCHEDULE and isinstance(value, torch.Tensor):
                schedule = self._schedules.get(id(ours))
                if schedule is None or not schedule.load(value):
                    return False
            elif isinstance(own, torch.Tensor):
                if not isinstance(value, torch.Tensor) or not _copied(own, value):
                    return False
            elif isinstance(value, torch.Tensor):
                return False
            elif own is not _UNREAD:
                setattr(ours, name, value)
        return True

    def entered(self) -> Any:
        """A block in which vLLM's code finds this context."""
        return override_forward_context(self.context)


def uncompiled(given: ForwardContext) -> Any:
    """A block in which vLLM's code finds vLLM's own context and metadata, and runs the model's own Python."""
    return override_forward_context(dataclasses.replace(given, skip_compiled=True))


def vary_slots(given: ForwardContext, block_size: int, round_: int) -> None:
    """Have a step of the warm-up, which has no slots of its own, write into the null block, which no request has.

    ``round_`` numbers the steps of one graph. No two tokens write the same slot. A step of requests stays as it is:
    whether captures are allowed holds for the whole process, in which another engine may serve meanwhile.
    """
    mappings = given.slot_mapping
    for slots in {id(each): each for each in mappings.values()}.values() if isinstance(mappings, dict) else ():
        count = min(block_size, slots.numel())
        if bool((slots < 0).all()):
            slots[:count] = (torch.arange(count) + round_) % block_size


_KEPT = ("attn_metadata", "slot_mapping", "is_padding", "additional_kwargs", "batch_descriptor", "skip_compiled")
_FIELDS = tuple(field.name for field in dataclasses.fields(ForwardContext) if field.name not in _KEPT)
"""What is assigned at each step. The descriptor is the one that the graph was captured for."""


class _Unread:
    """Stands for a value that nobody reads."""

    def __bool__(self) -> bool:
        raise TypeError("graphs do not have this value of the attention metadata")


_UNREAD: Any = _Unread()
_UNREAD_NAMES = ("max_query_len", "max_seq_len")


def _copied(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    ours.copy_(theirs)
    return True
