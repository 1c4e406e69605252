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
from typing import Any

import torch
import torch.overrides
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from ...backends.host_reads import Listening
from ...backends.operator_mode import OperatorMode, run_kernel
from ...backends.operators import draws, is_strided, short_user_line, storage_key, tensors_in, written_tensors
from .batches import BatchSpace, SizeNumber
from .calls import Call, Operator, View, is_whole, view_of
from .custom import word_for
from .functions import Caller, Functions, is_plain
from .labels import (
    ROWS_AXIS,
    Atom,
    Dim,
    Fault,
    Label,
    MixError,
    Sizes,
    UnknownError,
    axes_of,
    fault_here,
    first_fault,
    has_rows,
    holds_rows,
    is_dynamic,
    lies_along_rows,
    numbers_places,
    own_size,
    plain_dim,
    plain_dims,
    shape_of,
)
from .rules import operator_of, rule_of
from .scripts import SCRIPTS, eager_compiler
from .slots import ALL_PLACES, Slots
from .verdict import Step, Verdict

_Known = tuple[list[tuple[Tensor, int]], dict[int, Label]]
"""The storages of an operator's tensors, and their labels."""
_OF_DROPOUT = ("aten::bernoulli_", "aten::native_dropout")
_RULE_FAILS = (ArithmeticError, AssertionError, AttributeError, LookupError, StopIteration, TypeError, ValueError)


class RowRun:
    """Follows the rows of one run through its operators, which it runs for the mode that sees them.

    Args:
        space: All batches that may come. The run's own has at least two rows.
        reached: The storages (``storage_key``) of all tensors that the callable reaches, its arguments included.
    """

    def __init__(self, space: BatchSpace, reached: Collection[int]) -> None:
        self.space, self.sizes, self.reached = space, Sizes(space), frozenset(reached)
        self.caller: Caller | None = None
        """The function of torch that Python called, within which operators run; None: other code calls them."""
        self.mixed: set[int] = set()
        """The lengths along which elements go into each other."""
        self.made: dict[int, StorageWeakRef] = {}
        """The storages that its operators made."""
        self.slots = Slots()
        """State that rows wrote at places which they named, so far."""
        self._functions = Functions(self)
        self._is_muted = False
        """Whether parts of an operator run whose rule somebody gave: nothing follows from them."""
        self._serial = 0
        self._labels: dict[int, tuple[weakref.ref[Tensor], int, Label]] = {}
        """The label of each tensor (by ``id``), and the number of the operator after which it got it."""
        self._followed: set[int] = set()
        """Memory that was made to follow the batch: all that an operator makes of it has a label."""
        self._not_alike: set[int] = set()
        """Memory of rows that were made alike, and that need not be since something was written there."""
        self._faulty: dict[int, Fault] = {}
        self._changed: dict[int, int] = {}
        """The number of the operator that wrote to some memory last: tags that are older say nothing any more. See Note
        [memory and labels]."""
        self._rearranged: dict[int, int] = {}
        """The number of the operator that put rows there in another order: labels that are older are wrong."""
        self._steps: list[Step] = []
        self._doubts: list[Fault] = []
        self._state: list[Fault] = []
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
        assert tuple(map(own_size, label.dims)) == tuple(tensor.shape), f"{tensor.shape} for {self.space.own}"
        if not is_strided(tensor):
            self._doubts.append(Fault(False, f"an argument of layout {tensor.layout}"))
            return
        self._followed.add(storage_key(tensor))
        self.put(tensor, label)

    @contextmanager
    def watching(self, mode: OperatorMode) -> Iterator[None]:
        """The block in which the callable runs once. Whatever it changes of torch is as before on every way out.

        Args:
            mode: The mode that sees the operators and has the run ``run`` them.
        """
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(eager_compiler())
            stack.enter_context(Listening(self, SCRIPTS))
            stack.enter_context(mode)
            stack.enter_context(self._functions)
            yield

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
            if numbers_places(label):
                self._by_place = self._by_place or f"output {number}"
        return Verdict(
            mixes=next((fault.text for fault in faults if fault.is_mix), ""),
            unknown=next((fault.text for fault in faults if not fault.is_mix), ""),
            mixed_axes=frozenset(self.mixed - {ROWS_AXIS}),
            by_place=self._by_place,
            outputs=tuple(followed),
            uncut=uncut,
            steps=tuple(self._steps),
            slots=self.slots,
            space=self.space,
            sizes=self.sizes,
        )

    def plain_output(self, leaf: Any) -> Any:
        """An output as eager gives it. The graph returns the same number for each batch, so that a run with a number of
        sizes among its outputs speaks for batches with that number alone."""
        if not isinstance(leaf, SizeNumber):
            return leaf
        what = (
            f"an output is a number made of {leaf.of_what} ({leaf.text}), which its caller could take from the argument"
        )
        self.space.restrict(leaf.values, what, at_line=False)
        return leaf.own

    def _label_of_output(self, tensor: Tensor) -> Label:
        label = self.label(tensor)
        if label is None:
            is_seen = self._is_seen(storage_key(tensor))
            label = Label(
                plain_dims(tensor.shape), None if is_seen else Fault(False, "an output that no operator made")
            )
        return label

    # -- labels

    def label(self, tensor: Tensor) -> Label | None:
        """The label of a tensor; None if nothing in it follows the batch."""
        if not is_strided(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None
        return self._label_at(tensor, storage_key(tensor))

    def _label_at(self, tensor: Tensor, key: int) -> Label | None:
        """The label of a tensor in this storage."""
        found = self._labels.get(id(tensor))
        label: Label | None = None
        if found is not None and found[0]() is tensor:
            _, serial, label = found
            if len(label.dims) != tensor.dim() or self._rearranged.get(key, 0) > serial:
                fault = Fault(False, f"a tensor that changed, {short_user_line()}")
                return Label(plain_dims(tensor.shape), fault, is_lost=True)
            if label.tag is not None and self._changed.get(key, 0) > serial:
                label = label._replace(tag=None, fault=label.fault or label.tag.fault)
            if label.is_alike and key in self._not_alike:
                label = label._replace(is_alike=False)
        if self._faulty and (fault_of_memory := self._faulty.get(key)) is not None:
            return (label or Label(plain_dims(tensor.shape)))._replace(fault=fault_of_memory)
        if label is None and key in self._followed:
            fault = Fault(False, f"memory of the batch that nobody saw shared, {short_user_line()}")
            return Label(plain_dims(tensor.shape), fault, is_lost=True)
        return label

    def label_of_size(self, tensor: Tensor) -> Label | None:
        """The label of a tensor whose size Python reads. One that no rule tells may follow data, as that of
        ``unique``."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            self.doubt("a transform of torch.func hides sizes")
        label = self.label(tensor)
        if label is not None and label.is_lost:
            self.sizes.lose(label, "a shape that no rule tells")
            if label.fault is not None:
                self._doubts.append(Fault(False, f"Python reads a size that may follow data: {label.fault.text}"))
        return label

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
                label = label._replace(
                    fault=Fault(True, f"a tensor has the rows along two dimensions, {short_user_line()}")
                )
            self.mixed.update(several - {ROWS_AXIS})
        self._labels[id(tensor)] = weakref.ref(tensor), self._serial, label
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
        outer_caller, outer_muted = self.caller, self._is_muted
        is_ruled = word_for(func._schema.name) is not None
        self.caller, self._is_muted = None, outer_muted or is_ruled
        try:
            with mode, self._functions:
                out = run_kernel(func, key, args, kwargs)
        finally:
            self.caller, self._is_muted = outer_caller, outer_muted
        if is_ruled and not outer_muted:
            self._label_results(func, args, kwargs, tensors_in(args, kwargs), tensors_in(out), None)
        return out

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Run one operator and label its results; ``tensors`` are those among its arguments."""
        self._serial += 1
        if type(func) is not OpOverload:
            return self._run_region(func, args)
        operator, before, known = operator_of(func), None, None
        if operator.changes_view and tensors and is_strided(tensors[0]):
            before, known = view_of(tensors[0]), self._labels_of(operator, tensors)
        out = func(*args, **kwargs)
        outs = [out] if type(out) is Tensor else tensors_in(out)
        if self._is_muted:
            self._note_all_made(outs)
            seen: list[Any] = [None] * (len(tensors) + len(outs))
        else:
            seen = self._label_results(func, args, kwargs, tensors, outs, before, known)
        if not operator.keeps_elements:
            self._steps.append(Step(func, tuple(seen)))
        return out

    def _run_region(self, region: Any, args: tuple[Any, ...]) -> Any:
        """Run compiled code, whose rows nobody can follow."""
        out = region(*args)
        tensors = tensors_in(args, out)
        for tensor in filter(is_strided, written_tensors(region, args, {})):
            if storage_key(tensor) not in self.made and not self._has_rows(tensor):  # nobody sees at which places
                self.slots.note_write(str(region), tensor, (), range(len(self.sizes.axes)), adds=True)
        self._steps.append(Step(region, (None,) * len(tensors)))
        if any(map(self.follows, tensors)):
            fault = fault_here(False, str(region))
            self._doubts.append(fault)
            for tensor in tensors:
                self._faulty[storage_key(tensor)] = fault
        self._note_all_made(tensors_in(out))
        return out

    def _label_results(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
        outs: list[Tensor],
        before: View | None,
        known: _Known | None = None,
    ) -> list[Any]:
        """Label what an operator gave; of one that has changed a view, as it lay ``before`` with the labels ``known``
        then. Returns the dimensions of what it took and gave, as a ``Step`` has them."""
        operator = operator_of(func)
        keys, labels = known or self._labels_of(operator, given)
        dims: list[Any] = [None if operator.changes_view else _dims_of(labels.get(id(t)), t) for t in given]
        written = written_tensors(func, args, kwargs) if operator.writes else []
        reads_all = not operator.is_view and word_for(operator.name) is None
        if reads_all and not (labels and operator.names_places):
            labels |= self._slots_read(operator, keys, written)
        caller = self.caller
        if caller is None and labels:
            self.doubt(f"{operator.name} is called by code that is not Python")
        if not labels and not (caller is not None and (caller.numbers or operator.takes_sizes)):  # it follows no batch
            self._note_all_made(outs)
            for tensor in written:
                self._note_write(tensor)
            return dims + [_shape_of(out) for out in outs]
        call = Call(self, operator, args, kwargs, given, labels, outs or written)
        call.writes, call.before, call.caller = bool(written), before, caller or Caller(self, "?", (), {})
        made = self._with_origin(call, self._ruled(call))
        if operator.is_seeded and draws(func, args, kwargs) and not _is_still(call):
            self._check_random(call, made)
        put = self._put_results(call, {key for _, key in keys}, written, made)
        return dims + [_dims_of(label, out) for label, out in zip(put, outs, strict=False)]

    def _labels_of(self, operator: Operator, given: Iterable[Tensor]) -> _Known:
        """The storages of an operator's tensors, and their labels; what is no tensor of memory that is known is a
        doubt."""
        labels: dict[int, Label] = {}
        keys: list[tuple[Tensor, int]] = []
        for tensor in given:
            kind = type(tensor)
            if not is_plain(kind):
                self.doubt(f"{operator.name} takes a {kind.__name__}, a class with operators of its own")
            if not is_strided(tensor):
                self.doubt(f"{operator.name} takes a tensor of layout {tensor.layout}")
                continue
            key = storage_key(tensor)
            keys.append((tensor, key))
            label = self._label_at(tensor, key)
            if label is not None:
                labels[id(tensor)] = label
            elif not self._is_seen(key) and not operator.name.startswith("aten::lift_fresh"):
                self.doubt(f"{operator.name} reads a tensor from nowhere")
        return keys, labels

    def _slots_read(
        self, operator: Operator, keys: Iterable[tuple[Tensor, int]], written: Sequence[Tensor]
    ) -> dict[int, Label]:
        """Labels of state that rows wrote at places, where an operator reads all of it; see Note [slots] in
        ``slots.py``. A write in place that makes each element of that at its own place reads nothing else."""
        labels = {}
        for tensor, key in keys:
            if operator.keeps_places and any(tensor is one for one in written):
                continue
            if self.slots and tensor in self.slots:
                label = self.label(tensor) or Label(plain_dims(tensor.shape))
                labels[id(tensor)] = label._replace(fault=fault_here(True, operator.name, ALL_PLACES))
            elif key not in self.made:
                self.slots.note_read(operator.name, tensor)
        return labels

    def _is_seen(self, key: int) -> bool:
        """Whether the run knows where a storage comes from; see Note [a tensor from nowhere]."""
        return key in self.made or key in self.reached

    def _note_all_made(self, outs: Iterable[Tensor]) -> None:
        for out in outs:
            if is_strided(out):
                self._note_made(storage_key(out), out)

    def _note_made(self, key: int, out: Tensor) -> None:
        if not self._is_seen(key):
            self.made[key] = StorageWeakRef(out.untyped_storage())

    def _note_write(self, tensor: Tensor) -> bool:
        """Note a write in place; returns whether the memory is that of arguments or of state."""
        key = storage_key(tensor)
        self._changed[key] = self._serial
        return key not in self.made

    def _ruled(self, call: Call) -> list[Label]:
        """The labels of the results, by the operator's rule."""
        fault = first_fault(call.labels)
        is_mix, why, rule = False, "", rule_of(call.operator)
        if rule is not None:
            try:
                made = rule(call)
                call.blend_unread()
                fault = fault or call.fault_of_data()
                for more in call.outs[len(made) :]:
                    unruled = fault_here(False, call.operator.name, "a further result")
                    made.append(Label(plain_dims(_shape_of(more)), unruled, is_lost=True))
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
        fault, name = fault or call.fault_of_data(is_all=True), call.operator.name
        if (follows_rows or fault is not None) and not call.outs:
            self.doubt(f"{call.caller.function}() takes data to the host")
        self.mixed |= axes - {ROWS_AXIS}
        if ROWS_AXIS in axes:
            self.space.restrict_to_own([ROWS_AXIS], f"{name} may raise for other numbers of rows")
        if fault is None and (follows_rows or is_mix):
            fault = fault_here(is_mix, name, why, is_unruled=rule_of(call.operator) is None)
        return [Label(plain_dims(_shape_of(out)), fault, is_lost=True) for out in call.outs]

    def _with_origin(self, call: Call, made: list[Label]) -> list[Label]:
        """The labels of results, with whether their rows are alike. An operator that makes rows of none which need not
        be alike, or gives them something by their place, is noted; one that numbers them, where they are used."""
        operator, given = call.operator, call.labels.values()
        is_new = any(map(lies_along_rows, made)) and not (operator.makes_alike or any(map(lies_along_rows, given)))
        if call.is_by_place or (is_new and not any(map(numbers_places, made))):
            self._by_place = self._by_place or f"{operator.name}, {short_user_line()}"
            return made
        if operator.fills or not any(map(holds_rows, given)):
            return [one._replace(is_alike=lies_along_rows(one) and not numbers_places(one)) for one in made]
        return made

    def _check_random(self, call: Call, made: list[Label]) -> None:
        if call.labels or any(is_dynamic(dim) for label in made for dim in label.dims):
            dropout = "for dropout call eval(); else " if call.operator.name in _OF_DROPOUT else ""
            remedy = f"; {dropout}draw them outside of the callable, or have a size for each batch (sizes=)"
            self.doubt(f"{call.operator.name} draws random numbers", remedy)

    def _put_results(self, call: Call, read: set[int], written: list[Tensor], made: list[Label]) -> list[Label]:
        """Label the results, and note what was written, of an operator that was given tensors of the storages ``read``.
        Returns the labels as they are then."""
        operator = call.operator
        written_keys = {storage_key(t) for t in written if is_strided(t)}
        put: list[Label] = []
        for out, label in zip(call.outs, made, strict=False):
            if not is_strided(out):
                self.doubt(f"{operator.name} makes a tensor of layout {out.layout}")
                put.append(label)
                continue
            if tuple(map(own_size, label.dims)) != out.shape:
                fault = label.fault or fault_here(False, operator.name, "a shape that its rule does not tell")
                label = Label(plain_dims(out.shape), fault if call.labels else None, is_lost=True)
            key = storage_key(out)
            if key in written_keys and not operator.changes_view:
                self._write(call, out, label)
            else:
                is_followed = label.fault or label.is_lost or label.tag or any(map(is_dynamic, label.dims))
                if is_followed or key in self._followed:
                    label = self.put(out, label)
                if is_followed and key not in read:
                    self._followed.add(key)
            if key not in read:
                self._note_made(key, out)
            put.append(label)
        if written:
            self._note_writes(call, written, next((label.fault for label in made if label.fault), None))
        elif not self._faulty:
            return put
        return [self.label(out) or label for out, label in zip(call.outs, put, strict=False)]

    def _note_writes(self, call: Call, written: list[Tensor], fault: Fault | None) -> None:
        """Note what an operator has written in place, with this fault of its results."""
        outs, name = {id(t) for t in call.outs}, call.operator.name
        for tensor in written:
            is_outside = self._note_write(tensor)
            if is_outside and (fault is not None or word_for(name) is not None) and not self._has_rows(tensor):
                self.slots.note_write(name, tensor, (), range(len(self.sizes.axes)), adds=True)
            if fault is not None:
                self._faulty[storage_key(tensor)] = fault
            elif id(tensor) not in outs and any(map(lies_along_rows, call.labels.values())):
                self._write(call, tensor, self.label(tensor) or Label(plain_dims(tensor.shape)))
            if is_outside and (bad := self._faulty.get(storage_key(tensor))) is not None:
                self._state.append(bad)

    def _write(self, call: Call, tensor: Tensor, label: Label) -> None:
        """A write in place: it must agree with what the memory was made for."""
        key, name = storage_key(tensor), call.operator.name
        if not is_whole(tensor):  # other tensors there have the length as a part of a longer one, and no label says so
            self.mixed.update(*map(axes_of, label.dims))
        before = self.label(tensor)
        mine = before.dims if before is not None else plain_dims(tensor.shape)
        if label.fault is None and lies_along_rows(label):
            if not label.is_alike:
                self._not_alike.add(key)
            if label.dims != mine and call.rearranges:
                self._rearranged[key] = self._serial
                self.put(tensor, label)
                return
            if label.dims != mine or key not in self._followed:
                label = label._replace(fault=fault_here(False, name, "rows are written into other memory"))
        if label.fault is not None or label.is_lost:
            self._faulty[key] = label.fault or fault_here(False, name, "a shape that is not known")


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
            remedy = "return each part by itself, or have a size for it (sizes=)"
            return Fault(False, f"output {number} has each row in several places; {remedy}")
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


def _dims_of(label: Label | None, tensor: Tensor) -> tuple[Dim | int, ...] | None:
    """The dimensions of a tensor; None where no rule tells them."""
    if label is None:
        return _shape_of(tensor)
    return None if label.is_lost else label.dims
