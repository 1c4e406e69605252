"""The run: labels each tensor that the operators of one call make.

Note [memory and labels]
    A label lies on a tensor, and holds for its memory. Memory that was made to hold rows is known: a tensor that has
    no label and lies there is one that nobody saw made. A write in place must agree with what the memory was made for;
    one that does not makes the whole memory faulty. What a tag promises ends with a write to the memory.

Note [a tensor from nowhere]
    Memory that the callable reached before, or that an operator of the run made, is known. All other memory comes from
    a thread, or from code outside of torch's dispatcher, so nobody knows what it follows. The run holds a weak
    reference to what its operators made, so that no other memory comes in its place.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.overrides
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from ...backends.operator_mode import OperatorMode, run_kernel
from ...backends.operators import (
    OperatorKind,
    changes_view,
    draws,
    is_seeded,
    is_strided,
    keeps_elements,
    kind_of,
    per_operator,
    short_user_line,
    storage_key,
    tensors_in,
    written_tensors,
)
from .batches import BatchSpace, SizeNumber
from .calls import Call, View, is_whole, torch_shape, view_of
from .custom import has_rule
from .elementwise import Rule
from .functions import Caller, Functions
from .labels import (
    ROWS_AXIS,
    Atom,
    Fault,
    Label,
    MixError,
    Sizes,
    UnknownError,
    axes_of,
    fault_here,
    first_fault,
    has_rows,
    is_dynamic,
    lies_along_rows,
    plain_dim,
    plain_dims,
    shape_of,
)
from .rules import keeps_places, makes_alike, may_name_places, names_of_places, reads_all, rule_of, takes_sizes
from .scripts import eager_compiler, watched_scripts
from .slots import ALL_PLACES, Slots
from .verdict import Step, Verdict

_Seen = tuple[Label | None, tuple[int, ...]]
"""What is known of a tensor, and its shape in the run."""
_UNKNOWN = Label((), is_lost=True)
_PLAIN_TYPES: set[type] = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
_RULE_FAILS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    StopIteration,
    TypeError,
    ValueError,
)


class _Traits(NamedTuple):
    """What the run has to know of each operator."""

    changes_view: bool
    keeps_elements: bool
    is_seeded: bool
    writes: bool


@per_operator
def _traits_of(func: OpOverload) -> _Traits:
    return _Traits(changes_view(func), keeps_elements(func), is_seeded(func), kind_of(func) is OperatorKind.WRITE)


class _Calling:
    """The block in which a function of torch runs. Its code is traced, so it uses none of the standard library."""

    def __init__(self, run: "RowRun", caller: Caller) -> None:
        self._run, self._caller = run, caller

    def __enter__(self) -> Caller:
        self._outer = self._run.replace_caller(self._caller)
        return self._caller

    def __exit__(self, *_: object) -> None:
        self._run.replace_caller(self._outer)


class _Watch(OperatorMode):
    """Shows a run its operators, where no other mode does."""

    def __init__(self, run: "RowRun") -> None:
        super().__init__()
        self._run = run

    def look_inside(self, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have the run look inside."""
        return self._run.look_inside(self, func, key, args, kwargs)

    def give_up(self, error: Exception) -> None:
        """Note that an operator takes functions of which nobody sees what they do; the run goes on."""
        self._run.doubt(str(error))

    def watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have the run run it."""
        return self._run.run(func, args, kwargs, tensors_in(args, kwargs))


class RowRun:
    """Follows the rows of one run through its operators, which it runs for the mode that sees them.

    Args:
        space: All batches that may come. The run's own has at least two rows.
        reached: The storages (``storage_key``) of all tensors that the callable reaches, its arguments included.
    """

    def __init__(self, space: BatchSpace, reached: Collection[int]) -> None:
        self.space, self.sizes, self.reached = space, Sizes(space), frozenset(reached)
        self._token = object()
        self._functions = Functions(self)
        self._caller: Caller | None = None
        self._is_muted = False
        """Whether parts of an operator run whose rule somebody gave: nothing follows from them."""
        self._serial = 0
        self._made: dict[int, StorageWeakRef] = {}
        self._rows_in: set[int] = set()
        """Memory that was made to hold rows."""
        self._slots = Slots()
        self._faulty: dict[int, Fault] = {}
        self._changed: dict[int, int] = {}
        """When memory was written last, and when it got rows in another order; see Note [memory and labels]."""
        self._rearranged: dict[int, int] = {}
        self._labelled: list[weakref.ref[Tensor]] = []
        self._steps: list[tuple[Any, list[_Seen], list[_Seen]]] = []
        self._kept: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        """The labels, once they have left the tensors."""
        self._mixed: set[int] = set()
        self._doubts: list[Fault] = []
        self._state: list[Fault] = []
        self._writes_state = False
        self._by_place = ""
        if any(own < 2 for own in space.own):
            self._doubts.append(Fault(False, "a run on one row, or one element of a length, tells nothing of more"))

    # -- before and after

    def follow(self, tensor: Tensor, dims: Mapping[int, int]) -> None:
        """Say which dimensions of an argument follow which axes. Call it before the run.

        Args:
            tensor: A tensor of the run's batch.
            dims: The axis (its place in the space) that a dimension follows, by dimension.
        """
        label = Label(
            tuple((self.sizes.axes[dims[d]],) if d in dims else plain_dim(size) for d, size in enumerate(tensor.shape))
        )
        if torch_shape(label) != tuple(tensor.shape):
            self._doubts.append(
                Fault(False, f"an argument of shape {tuple(tensor.shape)} is not of the batch {self.space.own}")
            )
        if not is_strided(tensor):
            self._doubts.append(Fault(False, f"an argument of layout {tensor.layout}"))
            return
        self._rows_in.add(storage_key(tensor))
        self.put(tensor, label)

    @contextmanager
    def watching(self, mode: OperatorMode | None = None) -> Iterator[None]:
        """The block in which the callable runs once. Whatever it changes of torch is as before on every way out.

        Args:
            mode: The mode that sees the operators and has the run ``run`` them; None: there is no other.
        """
        with ExitStack() as stack:
            stack.callback(self._remove_labels)
            stack.enter_context(torch.no_grad())
            stack.enter_context(eager_compiler())
            stack.enter_context(watched_scripts(self))
            stack.enter_context(mode or _Watch(self))
            stack.enter_context(self._functions)
            yield

    def _remove_labels(self) -> None:
        """Labels stay in the run, for its verdict, and leave the tensors."""
        for ref in self._labelled:
            tensor = ref()
            if tensor is not None and (found := tensor.__dict__.pop("_rows", None)) is not None:
                self._kept[id(tensor)] = ref, found
        self._labelled.clear()

    def verdict(self, outputs: Sequence[Tensor]) -> Verdict:
        """What the run says.

        Args:
            outputs: The tensors that the callable returned, in order.
        """
        faults, followed, uncut = [*self._doubts, *self._state], [], dict[int, str]()
        if self.space.stray:
            faults.append(
                Fault(False, f"a number made of sizes came to code that takes plain numbers, {self.space.stray}")
            )
        for number, tensor in enumerate(outputs):
            label = self._label_of_output(tensor)
            fault = label.fault or (label.tag and label.tag.fault) or _fault_of_output(number, label)
            faults += [fault] if fault else []
            why_not = {} if label.is_lost or fault else _why_uncut(number, label, len(self.sizes.axes))
            uncut |= why_not
            followed.append(
                None if label.is_lost or fault or why_not else tuple(_axes_in_order(dim) for dim in label.dims)
            )
        return Verdict(
            mixes=next((fault.text for fault in faults if fault.is_mix), ""),
            unknown=next((fault.text for fault in faults if not fault.is_mix), ""),
            mixed_axes=frozenset(self._mixed - {ROWS_AXIS}),
            by_place=self._by_place,
            outputs=tuple(followed),
            uncut=uncut,
            steps=tuple(
                Step(func, tuple(_dims_of(*one) for one in (*taken, *results))) for func, taken, results in self._steps
            ),
            writes_state=self._writes_state,
            slots=self._slots,
            space=self.space,
            sizes=self.sizes,
        )

    def plain_output(self, leaf: Any) -> Any:
        """An output as eager gives it. The graph returns the same number for each batch, so that a run with a number of
        sizes among its outputs speaks for batches with that number alone."""
        if not isinstance(leaf, SizeNumber):
            return leaf
        self.space.restrict(leaf.values, f"an output is a number made of {leaf.of_what} ({leaf.text})", at_line=False)
        return leaf.own

    def _label_of_output(self, tensor: Tensor) -> Label:
        label = self.label(tensor)
        if label is None and self._is_from_nowhere(tensor):
            return Label(plain_dims(tensor.shape), Fault(False, "an output that no operator made"))
        return label if label is not None else Label(plain_dims(tensor.shape))

    # -- labels

    def label(self, tensor: Tensor) -> Label | None:
        """The label of a tensor; None if nothing in it follows the batch."""
        if not is_strided(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None
        return self._label_at(tensor, storage_key(tensor))

    def _label_at(self, tensor: Tensor, key: int) -> Label | None:
        """The label of a tensor in this storage."""
        found = tensor.__dict__.get("_rows")
        if found is None and self._kept:
            found = self._kept_for(tensor)
        label: Label | None = None
        if found is not None and found[0] is self._token:
            _, serial, label = found
            if len(label.dims) != tensor.dim() or self._rearranged.get(key, 0) > serial:
                return Label(
                    plain_dims(tensor.shape), Fault(False, f"a tensor that changed, {short_user_line()}"), is_lost=True
                )
            if label.tag is not None and self._changed.get(key, 0) > serial:
                label = label._replace(tag=None, fault=label.fault or label.tag.fault)
        if self._faulty and (fault := self._faulty.get(key)) is not None:
            return (label or Label(plain_dims(tensor.shape)))._replace(fault=fault)
        if label is None and key in self._rows_in:
            return Label(
                plain_dims(tensor.shape), Fault(False, f"memory of rows that nobody saw shared, {short_user_line()}")
            )
        return label

    def _kept_for(self, tensor: Tensor) -> Any:
        kept = self._kept.get(id(tensor))
        return kept[1] if kept is not None and kept[0]() is tensor else None

    def label_of_size(self, tensor: Tensor) -> Label | None:
        """The label of a tensor whose size Python reads."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            self.doubt("a transform of torch.func hides sizes")
        return self.label(tensor)

    def put(self, tensor: Tensor, label: Label) -> Label:
        """Label a tensor; returns the label, which may have got a fault."""
        seen, several = set[int](), set[int]()
        for dim in label.dims:
            for atom in dim:
                if type(atom) is Atom:
                    several.update(seen.intersection(atom.axes))
                    seen.update(atom.axes)
        if several:
            if ROWS_AXIS in several and label.fault is None:
                label = label._replace(fault=Fault(True, f"rows beside rows, {short_user_line()}"))
            self._mixed.update(several - {ROWS_AXIS})
        attributes = tensor.__dict__
        if "_rows" not in attributes:
            self._labelled.append(weakref.ref(tensor))
        attributes["_rows"] = self._token, self._serial, label
        return label

    def follows(self, tensor: Tensor) -> bool:
        """Whether a tensor follows the batch, or may."""
        if not is_strided(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return True
        label = self.label(tensor)
        if label is None:
            return False
        return label.fault is not None or label.tag is not None or any(map(is_dynamic, label.dims))

    def _has_rows(self, tensor: Tensor) -> bool:
        label = self.label(tensor)
        return label is not None and any(map(has_rows, label.dims))

    def any_follows(self, *trees: Any) -> bool:
        """Whether some tensor in these nests follows the batch."""
        return any(map(self.follows, tensors_in(*trees)))

    def doubt(self, what: str, remedy: str = "") -> None:
        """Something happens that nobody follows."""
        self._doubts.append(Fault(False, f"{what}, {short_user_line()}{remedy}"))

    # -- functions

    def calling(
        self, function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[Caller]:
        """The block in which a function of torch runs that Python called."""
        return _Calling(self, Caller(self, function, args, kwargs))

    def replace_caller(self, caller: Caller | None) -> Caller | None:
        """Have another function of torch run from now on, or none; returns the one that ran."""
        before, self._caller = self._caller, caller
        return before

    def note_script(self, args: Any, kwargs: Any) -> None:
        """A script of TorchScript runs: no mode sees what it reads of sizes."""
        with torch._C.DisableTorchFunction():
            if self.any_follows(args, kwargs):
                self.doubt("a script of torch.jit runs")

    def length(self, tensor: Tensor) -> Any:
        """What ``len`` gives of a tensor that follows the batch; None of another one."""
        label = self.label_of_size(tensor) if is_strided(tensor) and tensor.dim() else None
        return None if label is None else shape_of(label, self.sizes)[0]

    def unseen(self) -> AbstractContextManager[Any]:
        """The block in which the mode for functions is not on, if it is the innermost one."""
        count = torch._C._len_torch_function_stack()
        is_on = count > 0 and torch._C._get_function_stack_at(count - 1) is self._functions
        return torch.overrides._pop_mode_temporarily() if is_on else nullcontext()

    # -- operators

    def look_inside(
        self, mode: OperatorMode, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator's Python kernel within both modes, unless somebody gave a rule for the operator."""
        outer_caller, outer_muted = self._caller, self._is_muted
        is_ruled = has_rule(func._schema.name)
        self._caller, self._is_muted = None, outer_muted or is_ruled
        try:
            with mode, self._functions:
                out = run_kernel(func, key, args, kwargs)
        finally:
            self._caller, self._is_muted = outer_caller, outer_muted
        if is_ruled and not outer_muted:
            self._label_results(func, args, kwargs, tensors_in(args, kwargs), out)
        return out

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Run one operator and label its results; ``tensors`` are those among its arguments."""
        self._serial += 1
        if type(func) is not OpOverload:
            return self._run_region(func, args)
        before = view_of(tensors[0]) if _traits_of(func).changes_view and tensors and is_strided(tensors[0]) else None
        out = func(*args, **kwargs)
        self._label_results(func, args, kwargs, tensors, out, is_step=True, before=before)
        return out

    def _run_region(self, region: Any, args: tuple[Any, ...]) -> Any:
        """Run compiled code, whose rows nobody can follow."""
        out = region(*args)
        tensors = tensors_in(args, out)
        self._steps.append((region, [], [(_UNKNOWN, ()) for _ in tensors]))
        if any(map(self.follows, tensors)):
            fault = fault_here(False, str(region))
            self._doubts.append(fault)
            for tensor in tensors:
                self._faulty[storage_key(tensor)] = fault
        self._note_made(tensors_in(out))
        return out

    def _label_results(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
        out: Any,
        is_step: bool = False,
        before: View | None = None,
    ) -> None:
        traits = _traits_of(func)
        outs = [out] if type(out) is Tensor else tensors_in(out)
        unseen = _UNKNOWN if self._is_muted or traits.changes_view else None  # or the shape is that of afterwards
        taken: list[_Seen] = [(unseen, _shape_of(t)) for t in given]
        results: list[_Seen] = [(None, _shape_of(o)) for o in outs]
        if is_step and not traits.keeps_elements:
            self._steps.append((func, taken, results))
        if self._is_muted:  # parts of an operator with a rule of its own
            results[:] = [(Label(plain_dims(shape), is_lost=True), shape) for _, shape in results]
            self._note_made(outs)
            return
        labels, read = self._labels_of(func, given)
        if labels and unseen is None:
            taken[:] = [(labels.get(id(t)), shape) for t, (_, shape) in zip(given, taken, strict=True)]
        rule = rule_of(func)
        written = written_tensors(func, args, kwargs) if traits.writes else []
        if reads_all(func) and not (labels and may_name_places(rule)):
            labels |= self._slots_read(func, rule, given, outs or written, written)
        caller = self._caller
        if caller is None and labels:
            self.doubt(f"{func._schema.name} is called by code that is not Python")
        if not labels and not (caller is not None and (caller.numbers or takes_sizes(func))):
            self._note_plain(func, outs, written)
            return
        call = Call(func, args, kwargs, given, labels, self.sizes)
        call.outs = outs or written
        call.made, call.writes, call.slots, call.before = self._made, bool(written), self._slots, before
        call.caller = caller or Caller(self, "?", (), {})
        made = self._ruled(call, rule)
        if not makes_alike(rule):
            self._note_places(call, made)
        if traits.is_seeded:
            self._check_random(call, func, args, kwargs, made)
        put = self._put_results(call, read, written, made)
        if outs:
            results[: len(put)] = [(label, shape) for label, (_, shape) in zip(put, results, strict=False)]
        self._mixed |= call.mixed

    def _slots_read(
        self,
        func: OpOverload,
        rule: Rule | None,
        given: Iterable[Tensor],
        outs: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> dict[int, Label]:
        """Labels of state that rows wrote at places, where an operator reads all of it; see Note [slots] in
        ``slots.py``. What keeps each element at its place makes places of the same kind."""
        keeps, labels = keeps_places(func, rule), {}
        for tensor in given:
            if self._slots and tensor in self._slots:
                if not (keeps and self._slots.keep(tensor, outs)):
                    label = self.label(tensor) or Label(plain_dims(tensor.shape))
                    labels[id(tensor)] = label._replace(fault=fault_here(True, func._schema.name, ALL_PLACES))
                continue
            is_state = is_strided(tensor) and storage_key(tensor) not in self._made
            if is_state and not (keeps and any(tensor is one for one in written)):
                self._slots.note_read(func._schema.name, tensor)
        return labels

    def _labels_of(self, func: OpOverload, given: Iterable[Tensor]) -> tuple[dict[int, Label], set[int]]:
        """The labels of an operator's tensors, and their storages; what is no tensor of memory that is known is a
        doubt."""
        labels: dict[int, Label] = {}
        keys: set[int] = set()
        for tensor in given:
            kind = type(tensor)
            if kind not in _PLAIN_TYPES and not _is_plain(kind):
                self.doubt(f"{func._schema.name} takes a {kind.__name__}, a class with operators of its own")
            if not is_strided(tensor):
                self.doubt(f"{func._schema.name} takes a tensor of layout {tensor.layout}")
                continue
            key = storage_key(tensor)
            keys.add(key)
            label = self._label_at(tensor, key)
            if label is not None:
                labels[id(tensor)] = label
            elif (
                key not in self._made
                and key not in self.reached
                and not func._schema.name.startswith("aten::lift_fresh")
            ):
                self.doubt(f"{func._schema.name} reads a tensor from nowhere")
        return labels, keys

    def _is_from_nowhere(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return key not in self._made and key not in self.reached

    def _note_made(self, outs: Iterable[Tensor], but: Collection[int] = ()) -> None:
        for out in outs:
            if (
                is_strided(out)
                and (key := storage_key(out)) not in self._made
                and key not in self.reached
                and key not in but
            ):
                self._made[key] = StorageWeakRef(out.untyped_storage())

    def _note_plain(self, func: OpOverload, outs: list[Tensor], written: list[Tensor]) -> None:
        """An operator whose results follow no batch."""
        self._note_made(outs)
        for tensor in written:
            self._note_write(tensor)

    def _note_write(self, tensor: Tensor) -> bool:
        """Note a write in place; returns whether the memory is that of arguments or of state."""
        key = storage_key(tensor)
        self._changed[key] = self._serial
        is_outside = key not in self._made
        self._writes_state |= is_outside
        return is_outside

    def _ruled(self, call: Call, rule: Rule | None) -> list[Label]:
        """The labels of the results, by the operator's rule."""
        fault = first_fault(call.labels)
        if fault is None:
            fault = call.fault_of_data(names_of_places(rule))
        is_mix, why = False, ""
        if rule is not None:
            try:
                made = rule(call)
                call.blend_unread()
                for more in call.outs[len(made) :]:
                    unruled = fault_here(False, call.func._schema.name, "a further result")
                    made = [*made, Label(plain_dims(_shape_of(more)), unruled, is_lost=True)]
                return made if fault is None else [one._replace(fault=one.fault or fault) for one in made]
            except MixError as error:
                is_mix, why = True, str(error)
            except UnknownError as error:
                why = str(error)
            except _RULE_FAILS as error:
                why = f"its rule fails, {type(error).__name__}: {error}"
        return self._without_rule(call, fault, is_mix, why)

    def _without_rule(self, call: Call, fault: Fault | None, is_mix: bool, why: str) -> list[Label]:
        """What is known of the results of an operator that mixes, or of which no rule tells."""
        axes = set().union(*(axes_of(dim) for label in call.labels.values() for dim in label.dims))
        follows_rows = ROWS_AXIS in axes or any(label.is_lost for label in call.labels.values())
        fault = fault or call.fault_of_data(())
        if (follows_rows or fault is not None) and not call.outs:
            self.doubt(f"{call.func._schema.name} takes data to the host")
        self._mixed |= axes - {ROWS_AXIS}
        if ROWS_AXIS in axes:
            self.space.restrict_to_own([ROWS_AXIS], f"{call.func._schema.name} may raise for other numbers of rows")
        if fault is None and (follows_rows or is_mix):
            fault = fault_here(is_mix, call.func._schema.name, why, is_unruled=rule_of(call.func) is None)
        return [Label(plain_dims(_shape_of(o)), fault, is_lost=True) for o in call.outs]

    def _note_places(self, call: Call, made: Sequence[Label]) -> None:
        """Note an operator that makes rows of none, which need not be alike, or gives them something by their place."""
        is_new = any(map(lies_along_rows, made)) and not any(map(lies_along_rows, call.labels.values()))
        if is_new or call.is_by_place:
            self._by_place = self._by_place or f"{call.func._schema.name}, {short_user_line()}"

    def _check_random(
        self, call: Call, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Label]
    ) -> None:
        if not draws(func, args, kwargs) or _is_still(call):
            return
        if call.labels or any(is_dynamic(dim) for label in made for dim in label.dims):
            remedy = "; draw them outside of the callable, or have a size for each batch (sizes=)"
            self.doubt(f"{func._schema.name} draws random numbers", remedy)

    def _put_results(self, call: Call, read: set[int], written: list[Tensor], made: list[Label]) -> list[Label]:
        """Label the results, and note what was written, of an operator that was given tensors of the storages ``read``.
        Returns the labels as they are then."""
        written_keys = {storage_key(t) for t in written if is_strided(t)}
        put: list[Label] = []
        for out, label in zip(call.outs, made, strict=False):
            if not is_strided(out):
                self.doubt(f"{call.func._schema.name} makes a tensor of layout {out.layout}")
                put.append(label)
                continue
            if torch_shape(label) != out.shape:
                fault = label.fault or fault_here(False, call.func._schema.name, "a shape that its rule does not tell")
                label = Label(plain_dims(out.shape), fault if call.labels else None, is_lost=True)
            key = storage_key(out)
            if key in written_keys and not changes_view(call.func):
                self._write(call, out, label)
            elif label.fault or label.is_lost or label.tag or any(map(is_dynamic, label.dims)):
                label = self.put(out, label)
            if key not in read:
                self._note_made([out])
                if lies_along_rows(label):
                    self._rows_in.add(key)
            put.append(label)
        state_fault = next((label.fault for label in made if label.fault), None)
        outs, name = {id(t) for t in call.outs}, call.func._schema.name
        for tensor in written:
            is_outside = self._note_write(tensor)
            if is_outside and (state_fault is not None or has_rule(name)) and not self._has_rows(tensor):
                self._slots.note_write(name, tensor, (), range(len(self.sizes.axes)), adds=True)
            if state_fault is not None:
                self._faulty[storage_key(tensor)] = state_fault
            elif id(tensor) not in outs and any(map(lies_along_rows, call.labels.values())):
                self._write(call, tensor, self.label(tensor) or Label(plain_dims(tensor.shape)))
            if is_outside and (bad := self._faulty.get(storage_key(tensor))) is not None:
                self._state.append(bad)
        if not (written or self._faulty):
            return put
        return [self.label(out) or label for out, label in zip(call.outs, put, strict=False)]

    def _write(self, call: Call, tensor: Tensor, label: Label) -> None:
        """A write in place: it must agree with what the memory was made for."""
        key, name = storage_key(tensor), call.func._schema.name
        if not is_whole(tensor):  # other tensors there have the length as a part of a longer one, and no label says so
            self._mixed.update(*map(axes_of, label.dims))
        before = self.label(tensor)
        mine = before.dims if before is not None else plain_dims(tensor.shape)
        if label.fault is None and lies_along_rows(label):
            if label.dims != mine and call.rearranges:
                self._rearranged[key] = self._serial
                self.put(tensor, label)
                return
            if label.dims != mine or key not in self._rows_in:
                label = label._replace(fault=fault_here(False, name, "rows are written into other memory"))
        if label.fault is not None or label.is_lost:
            self._faulty[key] = label.fault or fault_here(False, name, "a shape that is not known")


def _is_plain(kind: type) -> bool:
    """Whether a class of tensors leaves all functions and operators to torch."""
    functions = kind.__dict__.get("__torch_function__") or getattr(kind, "__torch_function__", None)
    is_plain = (
        getattr(functions, "__func__", functions)
        in (
            getattr(Tensor.__torch_function__, "__func__", Tensor.__torch_function__),
            torch._C._disabled_torch_function_impl,
        )
        and getattr(kind, "__torch_dispatch__", None) is Tensor.__torch_dispatch__
    )
    if is_plain:
        _PLAIN_TYPES.add(kind)
    return is_plain


def _shape_of(tensor: Tensor) -> tuple[int, ...]:
    return () if tensor.is_nested else tensor.shape  # of which torch tells none


def _is_still(call: Call) -> bool:
    """Whether a random operator draws nothing as it is called here."""
    a = call.a
    if "dropout" in a or "rnn" in call.name:
        return not a.get("dropout") or not a.get("train")
    return a.get("train") is False


def _axes_in_order(dim: Any) -> tuple[int, ...]:
    return tuple(axis for atom in dim if isinstance(atom, Atom) for axis in atom.axes)


def _fault_of_output(number: int, label: Label) -> Fault | None:
    """What keeps anybody from cutting the real rows out of an output."""
    for dim in label.dims:
        if any(isinstance(atom, Atom) and atom.is_arranged for atom in dim):
            return Fault(True, f"output {number} has its rows in an order that depends on all of them")
        if has_rows(dim) and type(dim[0]) is int:
            return Fault(False, f"output {number} has each row in several places")
    return None


def _why_uncut(number: int, label: Label, axes: int) -> dict[int, str]:
    """The lengths along which an output without a fault cannot be cut by its end, and why."""
    found: dict[int, str] = {}
    for place_, dim in enumerate(label.dims):
        where = f"dimension {place_} of output {number}"
        if len(dim) > 1 and type(dim[0]) is int:
            found |= dict.fromkeys(axes_of(dim), f"{where} holds each length in several places")
        if any(isinstance(atom, Atom) and atom.key >= axes for atom in dim):
            found |= dict.fromkeys(axes_of(dim), f"the size of {where} is no multiple of the length")
    return found


def _dims_of(label: Label | None, shape: tuple[int, ...]) -> Any:
    if label is None:
        return plain_dims(shape)
    return None if label.is_lost else label.dims
