"""Questions about Python objects: what they hold, whose code they are, and whether two of them are the same.

Nothing here calls code of the user: no comparison, no attribute hook, no ``__len__`` or ``__iter__`` of a subclass.
"""

import builtins
import ctypes
import decimal
import gc
import io
import logging
import mmap
import os
import pickle
import random
import sys
import sysconfig
import threading
import types
import weakref
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import _GeneratorContextManagerBase
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial
from multiprocessing.context import BaseContext
from operator import attrgetter, is_, is_not, methodcaller
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ...backends.code_events import is_own_code, is_torch_code
from ...runtime.attributes import attribute_table, content
from ..watch.bytecode import READ_WHOLE, TELLS_IDENTITY, per_code, stored_by

ABSENT = object()
"""Stands for an attribute or variable that is not there."""
CONSTANTS = (bool, int, float, complex, str, bytes, torch.device, type(None), type(...), type(NotImplemented))
"""Types whose values are compared by what they are, and not by identity."""
_CONSTANT_TYPES = frozenset(CONSTANTS)
CONTAINERS = (dict, list, set, deque)
"""Containers that can change. Their own methods read them, so that a subclass cannot hide what it holds."""

_EQUAL_BY_CONTENT = (tuple, list, dict, set, frozenset)
"""Containers that ``equal_content`` compares entry by entry."""
_COMPILED_MEMBERS = {defaultdict: "default_factory", BaseException: "args"}
_DEEPEST = 4
"""So many containers within each other are compared by what they hold; deeper ones by identity."""

CACHES = (type(lru_cache(id)),)
"""Caches of results in compiled code."""

GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_backward_hooks,
    nn.modules.module._global_backward_pre_hooks,
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
)
"""The hooks that torch calls for every module and every optimizer."""

_LEAF_CLASSES = (
    types.CodeType,
    types.FrameType,
    types.TracebackType,
    types.MemberDescriptorType,
    type(vars(Hashable)["_abc_impl"]),  # which caches what isinstance() found; registrations are compared elsewhere
    OpOverload,
    OpOverloadPacket,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.UntypedStorage,
)
_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")
_SITE = (os.path.join(_STDLIB, "site-packages", ""), os.path.join(_STDLIB, "dist-packages", ""))
_PACKAGE = str(__package__).partition(".")[0]
_TORCH_STATE = (
    *("torch.nn", "torch.distributions", "torch.optim", "torch.jit", "torch.utils.data", "torch.return_types"),
    "torch.ao",
)
"""Where torch keeps classes of objects that belong to a model, besides modules. Its other objects are machinery."""
_COMPILERS_OWN = ("sympy", "mpmath", "fsspec", "filelock")
_TORCH_NEEDS = (*_COMPILERS_OWN, "networkx", "jinja2")
"""Packages that torch's compiler is made of; of the first nobody keeps objects as state."""
_MACHINES = ("threading", "asyncio", "multiprocessing", "subprocess")
_MACHINERY = (*_COMPILERS_OWN, "tqdm", "triton", *_MACHINES, "importlib", "inspect", "logging")
_LAZY = ("transformers.utils.import_utils", "diffusers.utils.import_utils")
_LOGGERS = (logging.Filterer, logging.LoggerAdapter)
_CTYPES = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._Pointer)
_OPAQUE = (
    array,
    bytearray,
    io.BytesIO,
    io.StringIO,
    mmap.mmap,
    *_CTYPES,
    np.ndarray,
    np.void,
    decimal.Context,
    random.SystemRandom,
    threading.local,
    attrgetter,
    methodcaller,
)
"""Compiled classes whose objects code reads and writes without calling a method of theirs, or that read others under
names that stand in no code. Arrays of NumPy's own two classes are compared; those of others may hide what they hold."""


DESCRIBES = frozenset(
    (
        *("__annotations__", "__orig_bases__", "__parameters__", "__type_params__", "__signature__"),
        *("__dataclass_fields__", "__dataclass_params__"),
    )
)
"""Attributes of classes in which nobody looks for state: code of the user with one of these names runs eagerly."""
_NOTHING_IN = (*CONSTANTS, *_LEAF_CLASSES)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_STATES = frozenset(("getstate", "setstate", "get_state", "set_state", "bit_generator", "state"))
"""By what their state is read and put back; a class of the user that has its own may give none."""


def is_leaf(kind: type) -> bool:
    """Whether nothing is looked for in objects of a class: constants, parts of the interpreter or of torch. A class of
    the user that inherits from one of these may hold more."""
    return issubclass(kind, _NOTHING_IN) and not user_classes(kind)


def home_of(kind: type) -> str:
    """The name of the module of a class; empty where the class has another attribute under that name."""
    return kind.__module__ if isinstance(kind.__module__, str) else ""


def is_followed(kind: type) -> bool:
    """Whether the objects of a class are a part of the callable's state: not those of this package (but for its demo),
    no machinery of torch, Triton or the standard library, and no kinds of loggers. Modules of torch are, and contexts
    of ``multiprocessing``, which hold plain attributes."""
    module = home_of(kind)
    root = module.partition(".")[0] if not module.startswith(f"{_PACKAGE}.demo") else "demo"
    if issubclass(kind, BaseContext) or (issubclass(kind, nn.Module) and root != _PACKAGE):
        return True
    if root in (_PACKAGE, *_MACHINERY) or issubclass(kind, _LOGGERS):
        return False
    return root != "torch" or module.startswith(_TORCH_STATE) or module.endswith(".amp.grad_scaler")


def finds_by_name(frame: types.FrameType) -> bool:
    """Whether code is that of the lazy modules of transformers and diffusers, which finds what the package has under a
    name: each time the same, as long as nobody puts anything else into the module."""
    code = frame.f_code
    if code.co_name != "__getattr__" or not code.co_argcount:
        return False
    return is_lazy_module(frame.f_locals.get(code.co_varnames[0]))


def is_lazy_module(value: Any) -> bool:
    """Whether it is a lazy module of transformers or diffusers, which notes what thousands of files define."""
    kind = type(value)
    return kind.__name__ == "_LazyModule" and home_of(kind) in _LAZY and issubclass(kind, types.ModuleType)


def is_machine(kind: type) -> bool:
    """Whether a class is one of threads, or of the standard library's whose objects threads and processes share: nobody
    puts them back, since others may have changed them. A context of ``multiprocessing`` makes such objects, and is
    none."""
    is_theirs = home_of(kind).partition(".")[0] in _MACHINES and not issubclass(kind, BaseContext)
    return is_theirs or issubclass(kind, threading.Thread)


@lru_cache(maxsize=8192)
def is_library_code(path: str) -> bool:
    """Whether a file of code belongs to torch, Triton, the standard library or this package (but for its demo)."""
    is_stdlib = path.startswith((_STDLIB, "<frozen")) and not path.startswith(_SITE)
    is_needed = any(_is_code_of(name, path) for name in (*_TORCH_NEEDS, "triton"))
    return is_stdlib or is_needed or is_torch_code(path) or is_own_code(path)


def _is_code_of(package: str, path: str) -> bool:
    """Whether it belongs to a package, if that is loaded. Code of others lies in folders of that name, too."""
    home = getattr(sys.modules.get(package), "__file__", None)
    return bool(home) and path.startswith(os.path.join(os.path.dirname(str(home)), ""))


def user_classes(kind: type) -> list[type]:
    """The class and those that it inherits from, without the library's and the interpreter's."""
    return [base for base in written_classes(kind) if not _is_library_class(base)]


def written_classes(kind: type) -> list[type]:
    """The class and those that it inherits from, without the interpreter's."""
    return [base for base in type.mro(kind) if base.__flags__ & _HEAP]


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement


def _is_library_class(kind: type) -> bool:
    if home_of(kind) == "builtins":
        return getattr(builtins, kind.__name__, None) is kind  # else exec() has made it
    if home_of(kind) in sys.builtin_module_names:
        return True
    module = sys.modules.get(home_of(kind))
    return is_library_code(getattr(module, "__file__", None) or "") or not is_followed(kind)


def own_attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object by name, but for notes of torch's compiler."""
    return {name: held for name, held in (attribute_table(value) or {}).items() if not is_compiler_note(name)}


def is_compiler_note(name: str) -> bool:
    """Whether torch's compiler leaves an attribute of this name, for itself: at a tensor, or at a function that it has
    met."""
    return f"{name}".startswith(("_dynamo_", "_torchdynamo_", "__dynamo_"))


def referents(value: Any) -> list[Any]:
    """What an object of compiled code holds (a cache, an iterator, a bound built-in), but for classes and modules;
    nothing for one that holds it in attributes. Of a cache also what its own table holds, which nobody else may write.
    """
    attributes = attribute_table(value)
    held = [one for one in gc.get_referents(value) if not issubclass(type(one), (type, types.ModuleType))]
    if not issubclass(type(value), CACHES):
        return held if attributes is None else []
    own = results_of(value)
    return [inner for one in held for inner in (content(one) if one is own or one is attributes else [one])]


def results_of(cache: Any) -> dict[Any, Any]:
    """The table in which a ``functools.lru_cache`` keeps its results, by what it was called with."""
    attributes = attribute_table(cache)
    # Its results, which may be dicts, come before it.
    return [one for one in gc.get_referents(cache) if type(one) is dict and one is not attributes][-1]


def cell_value(cell: types.CellType) -> Any:
    """What a closure's variable holds; ``ABSENT`` if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def slot_value(member: Any, value: Any) -> Any:
    """What a slot of an object holds; ``ABSENT`` if it is not assigned. ``member`` is the slot's descriptor."""
    try:
        return member.__get__(value)
    except AttributeError:
        return ABSENT


@per_code
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names of variables, attributes and imported modules in code and the code nested in it."""
    return frozenset(name for nested in _nested_codes(code) for name in nested.co_names)


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested_codes(constant)


def describes(name: str) -> bool:
    """Whether a class attribute of this name describes the class to ``typing``, ``dataclasses`` or pydantic. It may be
    rebound, but what it holds is no state."""
    return name in DESCRIBES or name.startswith("__pydantic_")


def functions_in(value: Any) -> list[types.FunctionType]:
    """The functions in a method, property or partial; a function itself."""
    parts = stands_for(value) if issubclass(type(value), _MADE_OF_FUNCTIONS) else [value]
    return [part for part in parts if isinstance(part, types.FunctionType)]


def wrapped_by(fn: types.FunctionType) -> list[Any]:
    """What a decorator of the library's holds of others, tables of that too: not containers of its own. A context that
    a generator makes is made again for each call."""
    found = [held for held in fn.__dict__.values() if issubclass(type(held), types.MappingProxyType)]
    for held in map(cell_value, fn.__closure__ or ()):
        if issubclass(type(held), _GeneratorContextManagerBase):
            found += (held.func, held.args, held.kwds)
        elif user_classes(type(held)) or not issubclass(type(held), _KEPT):
            found.append(held)
    return found


_KEPT = (*CONTAINERS, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
"""Containers in which a decorator keeps what it has found."""
_ROLES: dict[str, tuple[Any, ...]] = {
    "tensor": (torch.Tensor,),
    "function": (types.FunctionType,),
    "class": (type,),
    "method": (types.MethodType, partial, property, staticmethod, classmethod),
    "module": (types.ModuleType,),
    "cell": (types.CellType,),
    "compiled": (
        *(types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType),
        *(types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType),
    ),
    "reference": (weakref.ref, ContextVar),
}


_MADE_OF_FUNCTIONS = (cached_property, *_ROLES["method"])
ROLES = (*_ROLES, "array", "opaque", "generator", "instance", "front_end", "trusted")
"""All but "leaf": see ``role_of``."""


def role_of(kind: type) -> str:
    """What the objects of a class are to whoever goes through a callable's state: the first that fits.

    Besides those of ``_ROLES``: "leaf", in which nothing is looked for; "array", one of NumPy's own classes; "opaque",
    which nobody can compare, so that no graph may depend on one: iterators, memory of compiled code, what each thread
    sees otherwise, what threads and processes share; "generator" of random numbers; "instance", a container or another
    object with entries, attributes and slots; "front_end", a callable with graphs; and "trusted", an object of the
    libraries' own.
    """
    if is_leaf(kind):
        return "leaf"
    if kind in (np.ndarray, np.memmap):
        return "array"
    for role, classes in _ROLES.items():
        if issubclass(kind, classes):
            return role
    is_hidden = _is_element(kind) or any(map(_is_compiled, type.mro(kind)))
    if is_machine(kind) or issubclass(kind, _OPAQUE) or _iterates(kind) or is_hidden:
        return "opaque"
    if issubclass(kind, _GENERATORS):
        return "generator" if all(map(_STATES.isdisjoint, map(vars, user_classes(kind)))) else "opaque"
    if is_followed(kind):
        return "instance"
    is_ours = home_of(kind).partition(".")[0] == _PACKAGE and "unwrap" in dir(kind)
    return "front_end" if is_ours else "trusted"


_SHOWING = frozenset((getattr, hasattr, setattr, delattr, vars, dir, attrgetter, methodcaller, id, hash, is_, is_not))
_HIDING = _SHOWING.union((globals, locals, __import__, pickle.dump, pickle.dumps, pickle.Pickler))


def hides(value: Any) -> bool:
    """Whether a compiled function or class comes to attributes or variables under names that stand in no code, or tells
    objects from one another."""
    if type(value) is type:
        return value in _HIDING
    if not issubclass(type(value), _ROLES["compiled"]):
        return False
    of_object = value.__name__ in TELLS_IDENTITY and getattr(value, "__objclass__", None) is object
    return value in _HIDING or value.__name__ in READ_WHOLE or of_object


def shows(value: Any, name: str) -> bool:
    """Whether code that uses such a function under this name, its own, shows what it does with that."""
    return hides(value) and value not in _HIDING - _SHOWING and value.__name__ == name


def stands_for(value: Any) -> list[Any]:
    """The functions and objects in a method, a partial, a property or a callable with graphs."""
    kind = type(value)
    if issubclass(kind, cached_property):
        return [value.func]
    if issubclass(kind, partial):
        return [value.func, value.args, value.keywords]
    if issubclass(kind, property):
        return [vars(property)[name].__get__(value) for name in ("fget", "fset", "fdel")]
    if issubclass(kind, types.MethodType):
        return [value.__self__, value.__func__]
    return [value.__func__] if issubclass(kind, (staticmethod, classmethod)) else [value.unwrap()]


class Kind(NamedTuple):
    """What a class tells of its objects."""

    role: str
    """See ``role_of``."""
    users: tuple[type, ...]
    """See ``user_classes``."""
    slots: dict[str, Any]
    """See ``slots_of``."""


class Kinds(dict[type, Kind]):
    """Classes, each looked at when it is first met. Classes may change, so make another one for each look."""

    def __missing__(self, kind: type) -> Kind:
        role, users = _classified(_mro(kind))
        made = self[kind] = Kind(role, users, {} if role == "leaf" else slots_of(kind))
        return made


_mro: Callable[[type], tuple[type, ...]] = vars(type)["__mro__"].__get__


@lru_cache(maxsize=8192)
def _classified(mro: tuple[type, ...]) -> tuple[str, tuple[type, ...]]:
    """The role of a class, and the classes of the user in it; by all of them, since its bases may be set anew."""
    return role_of(mro[0]), tuple(user_classes(mro[0]))


_KNOWN = frozenset(
    (*sys.stdlib_module_names, "numpy", "torch", "pydantic_core", "pybind11_builtins", "_regex", _PACKAGE)
)


def _is_compiled(base: type) -> bool:
    """Whether a class is compiled code of somebody else's, whose objects hold what nobody sees: of Cython and C, which
    make no class statements, or of pybind11 and nanobind, by their metaclasses."""
    if base.__name__.startswith("Imaging"):  # Pillow's, which say that they are at home among the builtins
        return not base.__flags__ & _HEAP
    is_bound = home_of(type(base)).startswith(("pybind11", "nanobind"))
    return (is_bound or not base.__flags__ & _HEAP) and home_of(base).partition(".")[0] not in _KNOWN


def _is_element(kind: type) -> bool:
    """Whether objects of a class are elements of XML: functions of compiled code write to them, too."""
    return any(home_of(base) == "xml.etree.ElementTree" and base.__name__ == "Element" for base in type.mro(kind))


def _iterates(kind: type) -> bool:
    """Whether they are generators or iterators of compiled code, whose progress cannot be compared or put back."""
    if issubclass(kind, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        return True
    if issubclass(kind, io.IOBase):  # a file is outside of Python's state
        return False
    step = next((vars(base)["__next__"] for base in type.mro(kind) if "__next__" in vars(base)), None)
    return step is not None and not isinstance(step, types.FunctionType)


def same_objects(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects. Equal constants of one type count as the same."""
    return len(before) == len(after) and all(
        a is b
        or (type(a) is type(b) and issubclass(type(a), CONSTANTS) and is_leaf(type(a)) and is_same_constant(a, b))
        for a, b in zip(before, after, strict=True)
    )


def is_same_constant(a: Any, b: Any) -> bool:
    """Whether two constants of one type are equal, and zeros of one sign."""
    return bool(a == b) if type(a) is bytes else repr(a) == repr(b)  # an array's bytes may be many


def equal_content(new: Any, old: Any, moved: MutableMapping[int, Any] | None = None, depth: int = _DEEPEST) -> bool:
    """Whether an object is another one or holds the same: equal constants or containers. What a container held
    earlier is not known here.

    Args:
        new: The object in the place of ``old``.
        old: The object that was there.
        moved: Gets the new object for the identity of each old one, those within them included; two for one are not
            the same.
        depth: How deep containers are looked into.
    """
    if same_objects([new], [old]):
        return True
    kind = type(new)
    if kind is not type(old) or not depth:
        return False
    if kind not in _EQUAL_BY_CONTENT and (not issubclass(kind, tuple) or kind.__dictoffset__):
        return False
    if moved is not None and moved.setdefault(id(old), new) is not new:
        return False
    held, former = content(new), content(old)
    pairs = zip(held, former, strict=False)
    return len(held) == len(former) and all(equal_content(a, b, moved, depth - 1) for a, b in pairs)


def same_callable(a: Any, b: Any) -> bool:
    """Whether two callables do the same: they are one object, or the same code over the same objects.

    So a lambda that is made again in a loop counts as the same callable, unless it captured something else.
    """
    one, other = _parts_of(a), _parts_of(b)
    return len(one) == len(other) and all(map(is_, one, other))


def _parts_of(fn: Any) -> list[Any]:
    """What a callable is made of, object by object; a mark stands between those of two kinds."""
    kind = type(fn)
    if issubclass(kind, partial):
        return [partial, *_parts_of(fn.func), ABSENT, *fn.args, ABSENT, *fn.keywords, *fn.keywords.values()]
    if issubclass(kind, types.MethodType):
        return [types.MethodType, fn.__self__, fn.__func__]
    if not issubclass(kind, types.FunctionType):
        return [fn]
    # A variable that the code assigns must be the same one, else a run would assign that of the other function.
    cells = fn.__closure__ or ()
    held = cells if _assigns_outer(fn.__code__) else map(cell_value, cells)
    defaults, named = fn.__defaults__ or (), fn.__kwdefaults__ or {}
    own = (*defaults, ABSENT, *named, *named.values(), ABSENT, *fn.__dict__, *fn.__dict__.values())
    return [fn.__code__, fn.__globals__, *held, *own]


@per_code
def _assigns_outer(code: types.CodeType) -> bool:
    """Whether code assigns variables of the functions around it."""
    return any(not stored_by(nested).isdisjoint(nested.co_freevars) for nested in _nested_codes(code))


def referent(reference: Any) -> Any:
    """What a weak reference points to, or a context variable holds here; ``ABSENT`` if that is nothing."""
    return reference.get(ABSENT) if type(reference) is ContextVar else weakref.ref.__call__(reference)


def name_of(value: Any) -> str:
    """What to call a callable or an object in a message."""
    if issubclass(type(value), types.MethodType):
        value = value.__self__
    named = (types.FunctionType, types.BuiltinFunctionType, type)
    return value.__qualname__ if issubclass(type(value), named) else type(value).__name__


_NOBODYS = sys.stdlib_module_names | {"numpy"}


def is_whole(module: types.ModuleType) -> bool:
    """Whether all variables of a module count where code reads names that do not stand in it: of one of the user's."""
    is_users = is_user_module(module) and str(module.__name__).partition(".")[0] not in _NOBODYS
    return is_users and not is_lazy_module(module)


def setting_names(module: types.ModuleType) -> list[str]:
    """The variables of a module of the user that may be settings: constants, containers of these, tensors, and other
    modules of the same package."""
    package = str(module.__name__).partition(".")[0]
    return [n for n, held in vars(module).copy().items() if not n.startswith("__") and _is_setting(held, package)]


def _is_setting(held: Any, package: str) -> bool:
    if type(held) in (list, tuple, dict, set, frozenset):
        return are_constant(content(held))
    if issubclass(type(held), types.ModuleType):
        return str(held.__name__).partition(".")[0] == package
    return type(held) in _CONSTANT_TYPES or issubclass(type(held), torch.Tensor)


def are_constant(values: Iterable[Any]) -> bool:
    """Whether all values are constants."""
    return _CONSTANT_TYPES.issuperset(map(type, values))


def is_module_table(table: dict[str, Any]) -> bool:
    """Whether variables are those of a module: not of a text that ``exec`` or ``runpy`` ran."""
    module = sys.modules.get(str(table.get("__name__")))
    return module is not None and getattr(module, "__dict__", None) is table


def holds_modules(table: Mapping[str, Any], name: str) -> bool:
    """Whether a variable is ``sys.modules``, of which other things are read than of any dict."""
    return table is vars(sys) and name == "modules"


def is_user_module(value: Any) -> bool:
    """Whether it is a Python module of the user, which may be a place for settings."""
    table = attribute_table(value) if issubclass(type(value), types.ModuleType) else None
    return table is not None and not is_library_code(table.get("__file__") or "")


def slots_of(kind: type) -> dict[str, Any]:
    """The descriptors of the slots of a class by each attribute name that gives one, and of what its compiled classes
    keep like that."""
    found: dict[str, Any] = {}
    if not any("__slots__" in vars(base) or base in _COMPILED_MEMBERS for base in type.mro(kind)):
        return found
    for base in reversed(type.mro(kind)):
        table = vars(base)
        for name, held in table.items():
            if type(held) is types.MemberDescriptorType and "__slots__" in vars(held.__objclass__):
                found[name] = held
        if base in _COMPILED_MEMBERS:
            found[_COMPILED_MEMBERS[base]] = table[_COMPILED_MEMBERS[base]]
    return found
