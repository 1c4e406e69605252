"""Traces which Python code a call runs, and what that code reads: names of attributes, variables, whole objects.

Only what was run counts. Code that takes the same path again reads the same, and whatever decides the path is read.
"""

import _thread
import builtins
import functools
import gc
import importlib._bootstrap
import logging
import os
import re
import sys
import threading
import types
from _lsprof import Profiler as _Profiler
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import Context
from inspect import CO_OPTIMIZED
from itertools import accumulate
from typing import Any

import torch

from ...backends.code_events import AROUND_OPERATORS, CodeListener, is_code_of_proof, is_own_code, is_torch_code
from ...errors import CaptureError
from ...reasons import Reason
from ..breaks import BREAK_CODE
from ..state import objects
from ..state.reads import HELD, TABLES, CodeNotes, StateReads
from ..state.snapshot import Changes
from ..state.walk import StateWalk
from .bytecode import (
    BY_NAME,
    CodeReads,
    assigned_by,
    assigns_made_names,
    changes_containers,
    code_reads,
    original_of,
    with_guards,
)

_log = logging.getLogger("graphdispatch")
_SEEDING_METHODS = ("manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset")
_IMPORT_CODE = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]
"""The code around every first import. What runs inside of it runs once in the process."""
_IMPORT_MODULE = importlib.import_module.__code__
_GUARD_OF_COMPILER = "___make_guard_fn.<locals>.guard"
"""A guard of torch's compiler. It imports torch's modules, under names that stand there."""
_UPDATE_WRAPPER = functools.update_wrapper.__code__
"""It reads whole functions, but gives what it finds to functions alone: whoever uses that names it."""
_OF_GENERICS = {"__parameters__", "__orig_bases__", "__type_params__"}
"""What typing, and typing_extensions in its place, read of a class where code has ``Pair[int]``."""

_COMPILER = os.path.join("torch", "_dynamo", "convert_frame.py")
"""Where torch compiles a function before its first run. What that reads is no part of the run."""
_SEEN_THROUGH = frozenset(
    (
        *("builtins", "collections", "_collections", "operator", "_operator", "itertools", "re", "struct", "_struct"),
        *("datetime", "_contextvars", "contextvars", "_weakref", "weakref", "_abc", "_random", "random", "numpy"),
        *("torch", "decimal", "typing", "time", "functools"),
    )
)
"""Where compiled classes are at home whose objects never change, or whose state a walk compares."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_COMPILED = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_UNHEARD = {
    **dict.fromkeys(("start_new_thread", "start_new", "start_joinable_thread"), _thread),
    **({"setprofile": sys} if sys.version_info < (3, 12) else {}),
}
"""Functions after which code runs that nobody hears of, with their modules: on another thread, or with a profiler of
its own, which takes the place of what listens before Python 3.12."""
_WATCHED = (torch.Generator, _Profiler) if sys.version_info < (3, 12) else (torch.Generator,)
"""Classes of which each method counts, whoever holds the object."""
_HIDES = frozenset(("DisableTorchFunction", "_disable_current_modes", "_pop_mode_temporarily"))
"""What switches off the modes of torch that watch a run."""
_CALL_OF_MODULE = torch.nn.Module._call_impl.__qualname__
_HOOKING = {id(fn.__code__) for fn in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)}
"""What registers a hook of a tensor, by ``id``: read at each call, as it depends on the tensor."""
_START = threading.Thread.start.__code__
"""A run has to end before it: it notes the thread as one that lives, until it has begun."""
_IN_BLOCKS = ("__enter__", "__exit__")  # of a block, which gives back what it takes; the first of them is not seen


class _SparedError(BaseException):
    """Ends a run before code that may change what cannot be put back; ``except Exception`` of the user must not catch
    it."""


class CodeTrace(CodeNotes, CodeListener):
    """Enter it around runs of a callable, on the thread that makes them; several runs add up.

    What code is about to use of its module's variables goes to ``walk`` before the code runs. Code of torch and of the
    standard library is trusted to keep no state of its own, and reads attributes of their classes alone. With
    ``skips_breaks`` what runs inside ``eager_break`` is left out: it runs again at each replay. ``within`` is the code
    around the callable; what runs outside of it (a backend of somebody else's) is left out. A profiler that was
    written in Python goes on; under any other, ``is_deaf`` says that nothing was heard.

    With ``spares`` a run ends before code that did not run before where the code so far comes to something that nobody
    could put back. Leaving the trace raises ``CaptureError`` then.
    """

    def __init__(
        self,
        walk: StateWalk,
        *,
        skips_breaks: bool = False,
        within: types.CodeType | None = None,
        spares: bool = False,
    ) -> None:
        CodeNotes.__init__(self)
        CodeListener.__init__(self)
        self.walk = walk
        self.of_breaks = CodeNotes()
        """What the code reads that runs inside of breaks, at each replay."""
        self.spares = spares
        """Whether runs are made only for the graph, so that they must not change what cannot be put back."""
        self.spared: str | None = None
        """That before which a run ended, or must not begin."""
        self.on_unseen: Callable[[str], None] | None = None
        """Hears of what nobody can compare or put back, in words, before the code does it."""
        self.is_deaf = False
        """Whether a run was not heard of: Python tells of no code inside of somebody's trace or profile function, or
        beside a profiler in compiled code."""
        self.ran_torch_random = False
        """Whether it ran a function of torch's modules for random numbers (``manual_seed``, ``get_rng_state``)."""
        # The code around the callable, around breaks, and around what runs beside the callable.
        around = (_IMPORT_CODE, *([BREAK_CODE] if skips_breaks else []), *([within] if within else []))
        self.followed |= {id(code): code for code in around}
        self.seeded_generator: str | None = None
        """Which random generator the callable set, in words."""
        self._within = within
        self._unseen_call: str | None = None
        self._used = set[str]()
        """The names that code of the user has used so far."""
        self._run_beside: dict[int, types.CodeType] = {}
        """Code that ran in first imports, compilations and hooks of the collector: once in the process, as a rule."""
        self._heard_of: dict[tuple[int, bool], types.CodeType] = {}
        """The code that ran, in breaks and outside, by ``id``: that of two copies of a file is equal."""
        self._nested = set[int]()
        """Code that is defined inside code that was read, by ``id``."""

    @property
    def changes(self) -> Changes:
        """What the code so far can have changed, in breaks and outside of them."""
        both = (self, self.of_breaks)
        codes = [*self.codes.values(), *self.of_breaks.codes.values(), *self._run_beside.values()]
        changers = [code for code in codes if changes_containers(code) and not _changes_its_own(code)]
        reads_whole = self.is_deaf or any(notes.reads_whole for notes in both)
        used: set[str] | None = None if reads_whole or self.walk.has_changer else set()
        if changers and used is not None:
            used.update(*(notes.used | (notes.library_names - TABLES) for notes in both))
            used.update(*(code_reads(code).attributes for code in changers))
        assigns_any = (changers and reads_whole) or self.is_deaf or any(map(assigns_made_names, codes))
        return Changes(None if assigns_any else frozenset[str]().union(*map(assigned_by, codes)), used)

    def shares_with_breaks(self) -> bool:
        """Whether the user's code in breaks may change what the other code reads: it has a name in common with that."""
        breaks = self.of_breaks
        users = [code for code in breaks.codes.values() if not objects.is_library_code(code.co_filename)]
        changed = breaks.used if any(map(changes_containers, users)) else set[str]().union(*map(assigned_by, users))
        return not changed.isdisjoint(self.used)

    def __enter__(self) -> "CodeTrace":
        self._depth = self._beside = 0
        self._is_heard = self._within is None
        self._inside = int(self._within is None)
        hooks = (hook.__code__ for hook in gc.callbacks if isinstance(hook, types.FunctionType))
        self.followed |= {id(code): code for code in hooks}
        for key in self.followed:
            self.plain.pop(key, None)
        self.is_deaf |= not self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.end()
        self.is_deaf |= not self._is_heard
        refusal = self.refusal()
        if refusal is not None and (error is None or isinstance(error, (Exception, _SparedError))):
            raise refusal from None

    @contextmanager
    def of_another_batch(self) -> Iterator[None]:
        """A run that no call made: what it may not do refuses this run alone, and ends it before it is done."""
        before = self.spares, self.spared, self._unseen_call, self.is_deaf
        self.spares = True
        try:
            yield
        except Exception:
            _, self.spared, self._unseen_call, self.is_deaf = before
            raise
        finally:
            self.spares = before[0]

    def is_in_break(self) -> bool:
        """Whether what runs now is inside of a break, or of a first import."""
        return self._depth > 0

    def refusal(self) -> CaptureError | None:
        """The error of a run that must not change what is ``spared``; None if there is none."""
        if self.spared is None:
            return None
        return CaptureError(
            f"a run for the graph's sake would change for good what nobody can put back: {self.spared}; call it once "
            "before, in case its first call does that alone, or pass what it gives as an argument",
            Reason.STATE_UNSEEN,
        )

    def on_return(self, code: types.CodeType) -> None:
        """The end of the callable, of a break, or of what runs beside it."""
        if code is self._within:
            self._inside -= 1
        elif self._depth and self._inside:
            self._depth -= 1
            self._beside -= code is not BREAK_CODE

    def on_c_call(self, frame: types.FrameType, owner: Any, name: str) -> None:
        """A method of compiled code may read or change what no guard would see."""
        if not self._inside:
            return
        if type(owner) is str:
            if name in ("format", "format_map"):  # "{0.scale}".format(config)
                self.names |= set(_FIELDS.findall(owner))
        elif owner is builtins and name in BY_NAME:
            reads = code_reads(frame.f_code)
            if not self.reads_whole and name not in reads.variables and name not in reads.attributes:
                self.reads_whole = True
                self._spare()
        elif name == "__subclasses__" and not _is_library(frame):
            self._note_unseen("__subclasses__() of a class")
        elif _UNHEARD.get(name, self) is owner:
            if not self._depth and not is_own_code(frame.f_code.co_filename):
                self._note_unseen(f"{name}(), which runs code unheard")
        elif self.walk.has_met(owner) or issubclass(type(owner), _WATCHED):
            self._note_method(frame, owner, name)

    def _note_method(self, frame: types.FrameType, owner: Any, method: str) -> None:
        """A method of compiled code is about to run; in a break, too, which a capture runs more than once."""
        if issubclass(type(owner), torch.Generator):
            if not self._depth and method in _SEEDING_METHODS and not _is_library(frame):
                self.seeded_generator = f"{method}() of a torch.Generator"
            return
        kind = type(owner)
        is_profiler = method == "enable" and issubclass(kind, _WATCHED)
        if is_profiler or (self.walk.has_met(owner) and not self._sees_through(owner, method)):
            self._note_unseen(f"{method}() of a {kind.__module__}.{kind.__qualname__}")

    def _note_unseen(self, what: str) -> None:
        """The code is about to do what nobody can compare or put back."""
        self._unseen_call = self._unseen_call or what
        if self.spares:
            self.spared = what
            raise _SparedError
        if self.on_unseen is not None:
            self.on_unseen(what)

    def _sees_through(self, owner: Any, method: str) -> bool:
        """Whether the walk sees what a compiled method of an object that was there before may change or read, and can
        put it back."""
        kind = type(owner)
        if method in ("__setstate__", "cache_info"):  # the only way to change a partial; it counts calls
            return False
        if issubclass(kind, _LOCKS) and method in _IN_BLOCKS:
            return True
        home = next((base for base in type.mro(kind) if isinstance(vars(base).get(method), _COMPILED)), None)
        # Without one it is a function that keeps data of its own there, as those of pybind11 do.
        return home is None or (objects.home_of(home).partition(".")[0] in _SEEN_THROUGH and home is not Context)

    def unseen(self) -> str | None:
        """What the runs may have changed or read that nobody can compare or put back, in words; or None."""
        if self._unseen_call is not None or not self.walk.reaches_opaque():
            return self._unseen_call
        notes = CodeNotes()
        notes.absorb(self)
        notes.absorb(self.of_breaks)
        with torch._C.DisableTorchFunction():
            return StateReads(self.walk.roots, notes).unguarded or None

    def on_call(self, frame: types.FrameType) -> None:
        """Note what a function reads, unless it runs outside of the callable, or beside it."""
        code = frame.f_code
        if code is self._within:
            self._inside += 1
            self._is_heard = True
        elif self._inside and (id(code) in self.followed or code.co_filename.endswith(_COMPILER)):
            self.followed[id(code)] = code
            self._depth += 1
            self._beside += code is not BREAK_CODE
        elif self._inside and self._beside:
            if id(code) not in self._run_beside:
                self._run_beside[id(code)] = code
                self.of_breaks.names |= code_reads(code).attributes
        elif self._inside and (is_code_of_proof(code.co_filename) or objects.finds_by_name(frame)):
            self.plain[id(code)] = code
        elif self._inside:
            notes = self.of_breaks if self._depth else self
            place = id(code), notes is self
            is_new = place not in self._heard_of
            self._heard_of[place] = code
            if is_new or id(code) in _HOOKING:
                notes.codes[id(code)] = code
                try:
                    with (
                        torch._C._DisableTorchDispatch()
                    ):  # which would take what is looked at for operators of the run
                        self._read(notes, code, frame)
                except Exception as error:  # which would end the user's call
                    self.is_deaf = True
                    _log.debug("cannot tell what %s reads: %r", code.co_name, error)
            if not self._depth and id(code) not in _HOOKING:
                self.plain[id(code)] = code
            # A method of a lock, event or thread that somebody else holds: nothing could put back what it does.
            first = frame.f_locals.get(code.co_varnames[0]) if is_new and self.spares and code.co_argcount else None
            if objects.is_machine(type(first)) and self.walk.has_met(first):
                self._note_unseen(f"a {type(first).__module__}.{type(first).__qualname__}")
            if is_new and not _is_library(frame):
                self._spare()

    def _spare(self) -> None:
        """End the run if it is made only for the graph, and the code that has run and is about to run comes to what
        nobody could put back."""
        if self.spares and self.walk.has_unrestorable and (spared := self.unseen()) is not None:
            self._note_unseen(spared)

    def _read(self, notes: CodeNotes, code: types.CodeType, frame: types.FrameType) -> None:
        (reads, optional), path, original = with_guards(code), code.co_filename, original_of(code)
        self._note_compiled(notes, code, original, optional)
        if code is _START and notes is self:
            self._note_unseen("start() of a thread, which runs code unheard")
        names = reads.attributes | reads.variables
        if original is None and not _is_library(frame):
            self._note_hiding(code, reads)
        if not names.isdisjoint(("environ", "getenv")) and not is_torch_code(path):
            self._use(notes, vars(os), ["environ"], "os")
        if original is None and _is_library(frame):
            self._read_library(notes, code, frame)
            return
        notes.names |= reads.attributes
        if "__dict__" in reads.attributes or not reads.variables.isdisjoint(("getattr", "hasattr", "vars")):
            self.optional |= {text for text in reads.texts if text.isidentifier()}
        notes.reads_whole |= reads.reads_whole
        self._note_variables(notes, code, frame.f_globals, reads)
        spared = _OF_GENERICS if path.endswith(("typing.py", "typing_extensions.py")) else set[str]()
        described = sorted(code_reads(code).attributes & (objects.DESCRIBES | {"__globals__"}) - spared)
        if described:
            self._note_unseen(f"{described[0]} of a class or function")
        is_written = not path.startswith("<")  # else a class was given it, which the walk follows
        if is_written and id(code) not in self._nested and id(code) not in self.walk.codes:
            # Nobody within reach holds the function: a hook of the whole process, a registered operator.
            for fn in [*_methods_of(frame), *(gc.get_referrers(code) if code.co_freevars else ())]:
                if isinstance(fn, types.MethodType) or (
                    isinstance(fn, types.FunctionType) and fn.__globals__ is frame.f_globals
                ):
                    notes.unreached_functions.add(fn)
                    self.walk.visit(fn, ((), fn.__qualname__))
        self._nested.update(id(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))
        self._note_settings(reads.attributes)

    def _note_compiled(
        self, notes: CodeNotes, code: types.CodeType, original: types.CodeType | None, optional: frozenset[str] | None
    ) -> None:
        """If torch's compiler made the code that is about to run, in the place of ``original``: note what it is."""
        self.optional |= optional or set()
        if original is not None:
            notes.codes[id(original)] = original
            notes.reads_whole = True
        if any(issubclass(type(one), objects.CONTAINERS) for one in code.co_consts):
            self._note_unseen(f"{code.co_name}(), which torch.compile made with objects among its constants")
        if optional is None:
            self._note_unseen(f"{code.co_name}(), which torch.compile made and tells nothing of")

    def _note_hiding(self, code: types.CodeType, reads: CodeReads) -> None:
        """Code of the user is about to run that may find any variable, or hide what it does."""
        # In code of a module, a class or a text, locals are variables.
        finders = {"globals"} if code.co_flags & CO_OPTIMIZED else {"globals", "locals", "vars", "dir"}
        if code.co_qualname != _GUARD_OF_COMPILER:
            finders.add("__import__")
        if found := finders & reads.variables:
            self._note_unseen(f"{min(found)}(), by which it may find anything")
        if hides := _HIDES & (reads.attributes | reads.variables):
            self._note_unseen(f"{min(hides)}, which hides from torch's modes what it does")

    def _read_library(self, notes: CodeNotes, code: types.CodeType, frame: types.FrameType) -> None:
        """A function of a library is about to run."""
        notes.library_names |= code_reads(code).attributes
        if is_torch_code(code.co_filename) and code.co_filename.endswith(f"{os.sep}random.py"):  # for its generators
            self.ran_torch_random = True
            if notes is self and code.co_name.startswith(("set_rng_state", *_SEEDING_METHODS)):
                self.seeded_generator = f"torch's own, by {code.co_name}()"
        if id(code) in _HOOKING and self.walk.has_met(frame.f_locals.get("self")):
            self._note_unseen(f"{code.co_name}() of a tensor that was there before")
        caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        if code is _IMPORT_MODULE and not (is_torch_code(caller) or is_own_code(caller)):
            self._note_unseen("import_module(), which may find any module")
        reads = code_reads(code)
        # An import takes names that stand in the code that imports.
        is_named = code is _UPDATE_WRAPPER or code.co_filename.startswith("<frozen importlib")
        if reads.reads_whole and not is_named and _is_for_user(frame):
            notes.reads_whole = True

    def _note_settings(self, used: Collection[str]) -> None:
        """Code that is about to run uses these names, and may use under them any module of the user's that somebody
        holds. One that came since may be used by code that began before, too."""
        self._used.update(used)
        for held in self.walk.user_namespaces:  # which may grow meanwhile
            table = held if type(held) is dict else vars(held)
            self.walk.visit_variables(table, self._used, str(table.get("__name__", "")))

    def _note_variables(self, notes: CodeNotes, code: types.CodeType, table: dict[str, Any], reads: CodeReads) -> None:
        """The variables that code is about to use: of its own module, and of the modules of the user that it names."""
        built_in, used = vars(builtins), set(reads.variables)
        notes.note_variables(built_in, [name for name in used if name not in table and name in built_in])
        self._use(notes, table, used, table.get("__name__", ""))
        package = table.get("__package__") or ""
        texts = reads.texts | {table.get("__name__", "")} if "modules" in reads.attributes else reads.texts
        parents = ["", *accumulate(package.split("."), "{}.{}".format)]  # of which one is where ``from ..a`` begins
        imports = [f"{parent}.{name}".strip(".") for parent in parents for name in reads.imports]
        paths = {path for name in imports for path in accumulate(name.split("."), "{}.{}".format)}
        notes.note_variables(sys.modules, paths)
        modules: list[Any] = [*map(table.get, reads.variables), *map(sys.modules.get, paths | texts)]
        seen = set[int]()
        while modules:
            module = modules.pop()
            is_module = issubclass(type(module), types.ModuleType)
            # Or variables of functions that belong to no module, as a compiler names them.
            table = vars(module) if is_module else module
            if id(table) not in seen and (is_module or (type(table) is dict and "__builtins__" in table)):
                seen.add(id(table))
                names, where = [name for name in reads.attributes if name in table], str(table.get("__name__", ""))
                if reads.whole_variables and is_module and objects.is_whole(module):
                    self._note_unseen(f"variables of {where} under names that it makes up")
                self._use(notes, table, names, where)
                if table is vars(sys) and "modules" in names:
                    notes.note_variables(sys.modules, [HELD, *texts])
                    if reads.finds_modules:
                        self._note_unseen("sys.modules, in which it may find any module")
                if objects.is_user_module(module):  # of a library, whether somebody replaced what the code calls
                    notes.note_variables(table, reads.attributes)
                modules += map(table.get, names)

    def _use(self, notes: CodeNotes, table: dict[str, Any], names: Collection[str], where: str) -> None:
        notes.note_variables(table, names)
        self.walk.visit_variables(table, names, where)


def _changes_its_own(code: types.CodeType) -> bool:
    """Whether code of torch or of this package changes no containers but its own: around each operator or module."""
    is_around = code.co_filename in AROUND_OPERATORS or code.co_qualname.startswith(_CALL_OF_MODULE)
    return is_around or is_own_code(code.co_filename)


def _methods_of(frame: types.FrameType) -> Iterator[types.MethodType]:
    """The method that is about to run, if a class of the user has it."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    held = (one for base in objects.user_classes(type(owner)) for one in vars(base).values())
    return (types.MethodType(fn, owner) for one in held for fn in objects.functions_in(one) if fn.__code__ is code)


_PYTREE = os.path.join("torch", "utils", "_pytree.py")


def _is_for_user(frame: types.FrameType) -> bool:
    """Whether code of the standard library, or of torch's pytrees, works for code of the user, and not for torch's or
    this package's."""
    caller: types.FrameType | None = frame
    while caller is not None:
        path = caller.f_code.co_filename
        if is_own_code(path) or (is_torch_code(path) and not path.endswith(_PYTREE)):
            return False
        if not _is_library(caller):
            return True
        caller = caller.f_back
    return False


_FIELDS = re.compile(r"\.([^\W\d]\w*)")


def _is_library(frame: types.FrameType) -> bool:
    path = frame.f_code.co_filename
    return objects.is_library_code(frame.f_globals.get("__file__", "") if path.startswith("<") else path)
