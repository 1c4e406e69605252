"""Finds the names of the attributes, variables and imports that a piece of code reads or assigns, from its bytecode.

What is assigned counts as read: a replay does not assign it again once somebody else has. Which object an attribute is
read of does not matter: the guard compares every object that has an attribute of that name.

In code that ``torch.compile`` put in the place of a function's all is constant that the compiler has read, in the
function and in others that it put inline. The compiler compares what it read before each run, and compiles anew where
something differs. So a run depends on what the code in place reads itself, and on what these guards name.
"""

import builtins
import dis
import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import wraps
from itertools import chain
from types import CodeType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

T = TypeVar("T")
_MOST_KEPT = 8192
_ATTRIBUTES = frozenset(
    (
        *("STORE_ATTR", "DELETE_ATTR", "LOAD_ATTR", "LOAD_METHOD"),
        *("LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD", "IMPORT_FROM"),
    )
)
_VARIABLES = frozenset(
    (
        *("STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"),
        *("STORE_NAME", "DELETE_NAME", "LOAD_NAME"),
    )
)
_NAMING = _ATTRIBUTES | _VARIABLES
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
WRITE_ANY = frozenset(("__setattr__", "__delattr__", "__set__", "__delete__", "__setstate__"))
"""Methods that write attributes whose names are given, or stand nowhere."""
_WHOLE = frozenset(
    (
        *("vars", "dir", "__dir__", "__dict__", "__getattribute__", "__get__", "__getstate__", "__reduce__"),
        *("__reduce_ex__", "__pydantic_serializer__", "attrgetter", "methodcaller"),
    )
)
_TEMPLATES = frozenset(("format", "format_map"))
"""Methods of texts that read attributes whose names stand in the text. Whoever listens hears of plain calls."""
READ_WHOLE = _WHOLE | _TEMPLATES | WRITE_ANY
"""Methods by which code gets at any attributes of an object, or all."""


TELLS_IDENTITY = frozenset(("is_", "is_not", "__eq__", "__ne__", "__hash__", "__repr__"))
"""Functions and methods of every object that tell it from others."""
_ACCESS = ("__getattr__", "__getattribute__")
_ANY = READ_WHOLE.union(BY_NAME)


_STORED = ("ATTR", "GLOBAL", "NAME", "DEREF", "SUBSCR", "SLICE")
CHANGES = frozenset(
    (
        *("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR", "append", "appendleft", "add", "clear", "discard", "extend"),
        *("insert", "pop", "popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update"),
        *("extendleft", "rotate", "move_to_end", "difference_update", "intersection_update"),
        *("symmetric_difference_update", "setitem", "delitem", "iadd", "iconcat", "ior", "iand", "ixor", "isub"),
        *("__setitem__", "__delitem__", "__iadd__", "__ior__", "__iand__", "__isub__", "__ixor__", "__imul__"),
        *("heappush", "heappop", "heapify", "heapreplace", "heappushpop", "insort", "insort_left", "insort_right"),
        *("fill", "put", "place", "putmask", "copyto", "partition", "resize", "setflags", "byteswap"),
    )
)
"""Instructions, methods and functions that change containers and arrays."""
_FORM = frozenset(("shape", "dtype", "strides", "writeable"))
"""What code may set of an array."""
_SETTERS = frozenset(("setattr", "delattr"))
_TYPES = ("dtype", "device", "layout", "__class__")


class CodeReads(NamedTuple):
    """What one code object reads, without the code that it calls or contains."""

    attributes: frozenset[str]
    """Names of attributes, and constants that could be names (``getattr(x, "scale")``)."""
    variables: frozenset[str]
    """Names of globals and builtins."""
    imports: frozenset[str]
    """Names of the modules that it imports when it runs."""
    texts: frozenset[str]
    """Constants that could be names of modules (``importlib.import_module("settings")``)."""
    compared: frozenset[str]
    """What it compares objects with by identity, as it is written: ``a is b``, ``a is self.b``, ``id(a)``. Constants
    and builtins are left out."""
    reads_whole: bool
    """Whether it reads objects under names that do not stand in it: ``vars(x)``, ``getattr(x, name)``."""
    whole_variables: bool
    """Whether it may do so with a variable: not with its parameters and their attributes alone."""
    finds_modules: bool
    """Whether it may find any module in an attribute ``modules``, which may be that of ``sys``: under a name that is no
    constant and not its own, or it passes the dict on. Not where it only looks whether a module is loaded whose name an
    attribute holds."""
    number_compared: str
    """What it does with numbers that a size in a run of all batches is not: it compares one by ``is``, or
    may ask for the type of one (``type(n) in (int, float)``, ``isinstance(n, torch.SymInt)``); with its first
    line. Empty if it does neither."""


class Instruction(NamedTuple):
    """An instruction of code, as ``dis`` tells it, in a twentieth of the time."""

    offset: int
    opcode: int
    arg: int | None
    opname: str
    argval: Any
    """The name, the constant or the variable that it loads or stores; two variables where it loads two; else ``arg``.
    """

    def effect(self) -> int:
        """How much it adds to the stack, where it does not jump."""
        return dis.stack_effect(self.opcode, self.arg, jump=False)


_SHIFTS = {"LOAD_GLOBAL": 1} | ({"LOAD_ATTR": 1, "LOAD_SUPER_ATTR": 2} if sys.version_info >= (3, 12) else {})
"""Of how many flags the arguments of instructions with names have."""
_NAMES, _CONSTS, _VARIABLES_OF_CODE = frozenset(dis.hasname), frozenset(dis.hasconst), {*dis.haslocal, *dis.hasfree}
_PAIRS = frozenset(op for name, op in dis.opmap.items() if name.count("_FAST_") + name.endswith("_FAST") > 1)
"""Those that load or store two variables, from 3.13 on."""
_HAVE_ARGUMENT: Container[int] = getattr(dis, "hasarg", range(dis.HAVE_ARGUMENT, 256))
_CACHE, _EXTENDED = 0, dis.EXTENDED_ARG


def instructions_of(code: CodeType, among: Container[int] = range(1, 256)) -> Iterator[Instruction]:
    """The instructions of code; with ``among``, those with one of these numbers."""
    names, consts, shifts = code.co_names, code.co_consts, _SHIFTS
    variable: Callable[[int], str] = code._varname_from_oparg  # type: ignore[attr-defined]
    high, raw = 0, code.co_code
    for offset, op, low in zip(range(0, len(raw), 2), raw[::2], raw[1::2], strict=True):
        if op == _EXTENDED:
            high = (high | low) << 8
            continue
        arg, high = high | low, 0
        if op == _CACHE or op not in among:
            continue
        kind = dis.opname[op]
        value: Any = arg
        if op not in _HAVE_ARGUMENT:
            value = None
        elif op in _NAMES:
            value = names[arg >> shifts.get(kind, 0)]
        elif op in _CONSTS:
            value = consts[arg]
        elif op in _PAIRS:
            value = variable(arg >> 4), variable(arg & 15)
        elif op in _VARIABLES_OF_CODE:
            value = variable(arg)
        yield Instruction(offset, op, arg if op in _HAVE_ARGUMENT else None, kind, value)


_NAMING_OPS = {dis.opmap[name] for name in (*_NAMING, "IMPORT_NAME") if name in dis.opmap}
_SYMBOLS = frozenset({"SymInt", "IntLikeType", "py_sym_types"})
"""Names of torch for the types that a size has in a run of all batches."""
_NUMBERS = frozenset(("int", "float"))
_LOOKED_AT = {*_ANY, "modules"}
_STORING_OPS = {op for name, op in dis.opmap.items() if name.startswith(("STORE_", "DELETE_"))}
_BINARY_OPS = {dis.opmap["BINARY_OP"]}
_LOOKED_AT_OPS = {dis.opmap["IS_OP"], dis.opmap["MATCH_CLASS"]}
"""Of code without one of these, and of the names above, the names alone count."""


def per_code(fn: Callable[[CodeType], T]) -> Callable[[CodeType], T]:
    """``fn``, called once for each code object, and again for those that come after very many others. It goes by the
    object: the hash of code takes longer, and some has none."""
    values: dict[int, tuple[CodeType, T]] = {}

    @wraps(fn)
    def look_up(code: CodeType) -> T:
        found = values.get(id(code))
        if found is None:
            if len(values) >= _MOST_KEPT:
                values.clear()
            found = values[id(code)] = code, fn(code)
        return found[1]

    return look_up


@per_code
def code_reads(code: CodeType) -> CodeReads:
    """What ``code`` reads, from its instructions and constants alone."""
    attributes, variables, imports, compared = (set[str]() for _ in range(4))
    takes_type = "type" in code.co_names and not _NUMBERS.isdisjoint(code.co_names)
    is_plain = not takes_type and _LOOKED_AT.isdisjoint(code.co_names) and _LOOKED_AT_OPS.isdisjoint(code.co_code[::2])
    instructions = list(instructions_of(code, _NAMING_OPS) if is_plain else instructions_of(code))
    given = _parameters(code, instructions)
    passed_on = given[1] if code.co_name in _ACCESS and given[1:] else None  # the name that it looks up
    reads_whole = of_variables = False
    for index, instruction in enumerate(instructions):
        kind, name = instruction.opname, instruction.argval
        if kind in _ATTRIBUTES:
            attributes.add(name)
        elif kind in _VARIABLES:
            variables.add(name)
        elif kind == "IMPORT_NAME":
            imports.add(name)
        elif kind == "IS_OP":
            compared.update(_compared_with(instructions[index - 1]))
        if kind not in _NAMING or name not in _ANY:
            continue
        following = instructions[index + 1 :]
        if name == "__getattribute__" and code.co_name in _ACCESS:  # of the object itself, all of which is compared
            continue
        is_kept = name in _TEMPLATES and kind in _ATTRIBUTES and not _is_method(instruction)
        is_made = name in BY_NAME and not _names_a_constant(following, passed_on)
        if is_kept or is_made or name in _WHOLE:
            loaded = next(iter(_arguments(following)), ()) if kind in _VARIABLES else instructions[:index]
            root = next((one for one in reversed(loaded) if one.opname != "LOAD_ATTR"), None)
            reads_whole = True
            of_variables = of_variables or root is None or not any(_loads(root, one, at=-1) for one in given)
    texts = frozenset(text for text in code.co_consts if isinstance(text, str) and len(text) < 200)
    attributes.update(_named_by_texts(texts))
    telling = (
        TELLS_IDENTITY & (attributes | variables) | {"id", "hash"} & variables
    )  # an attribute ``id`` may be anything
    matches = any(instruction.opname == "MATCH_CLASS" for instruction in instructions)
    return CodeReads(
        frozenset(attributes),
        frozenset(variables),
        frozenset(imports),
        texts,
        frozenset(compared - {code.co_name}) | telling,  # itself is a function
        reads_whole or matches,  # the class says which attributes stand in which place
        of_variables,
        "modules" in texts or ("modules" in code.co_names and _finds_modules(code, instructions)),
        _number_compared(code, instructions),
    )


def _named_by_texts(texts: Iterable[str]) -> Iterator[str]:
    """The names that texts can be, dotted ones too: ``operator.attrgetter("config.scale")``."""
    dotted = (text.split(".") for text in texts)
    return (part for parts in dotted if all(map(str.isidentifier, parts)) for part in parts)


def _finds_modules(code: CodeType, instructions: Sequence[Instruction]) -> bool:
    """See ``CodeReads.finds_modules``."""
    for index, one in enumerate(instructions):
        if one.argval != "modules" or one.opname not in _ATTRIBUTES or _is_method(one):
            continue
        use, *following = instructions[index + 1 : index + _LONGEST_CALL]
        key: Sequence[Instruction] = ()
        if use.opname == "CONTAINS_OP":
            targets = dis.findlabels(code.co_code)  # type: ignore[arg-type]
            is_joined = instructions[index - 1].offset in targets  # (a or "b") in sys.modules
            key = () if is_joined else instructions[max(index - 2, 0) : index - 1]
        elif use.argval == "get" and _is_method(use):
            key = next(iter(_arguments(following)), ())
        elif following and (following[0].opname, following[0].arg) in _SUBSCRIPTS:
            key = [use]
        is_named = len(key) == 1 and (key[0].opname == "LOAD_CONST" or key[0].argval == "__name__")
        is_held = use.opname == "CONTAINS_OP" and len(key) == 1 and key[0].opname == "LOAD_ATTR"
        if not (is_named or is_held):
            return True
    return False


_LONGEST_CALL = 12
_OPERATIONS = dis._nb_ops  # type: ignore[attr-defined]
_SUBSCRIPTS = (
    ("BINARY_SUBSCR", None),
    *(("BINARY_OP", op) for op, (_, sign) in enumerate(_OPERATIONS) if sign == "[]"),
)


def _is_method(instruction: Instruction) -> bool:
    """Whether it loads an attribute in order to call it: by an instruction of its own, or from 3.12 on by a flag."""
    is_flagged = sys.version_info >= (3, 12) and instruction.opname == "LOAD_ATTR" and bool((instruction.arg or 0) & 1)
    return instruction.opname == "LOAD_METHOD" or is_flagged


def _parameters(code: CodeType, instructions: Iterable[Instruction]) -> Sequence[str]:
    """The parameters that code does not assign."""
    stores = (i.argval for i in instructions if i.opname.startswith(("STORE_FAST", "DELETE_FAST")))
    stored = {name for one in stores for name in (one if type(one) is tuple else (one,))}
    return [one for one in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if one not in stored]


@per_code
def changes_containers(code: CodeType) -> bool:
    """Whether code may change what a container or an array holds, by an instruction or a function of this name."""
    names = code_reads(code).attributes | code_reads(code).variables
    is_in_place = any(_OPERATIONS[i.arg or 0][1].endswith("=") for i in instructions_of(code, _BINARY_OPS))
    has_out = any("out" in names for names in code.co_consts if isinstance(names, tuple))
    assigned = assigned_by(code)
    return is_in_place or has_out or not (CHANGES.isdisjoint(names | assigned) and _FORM.isdisjoint(assigned))


@per_code
def assigned_by(code: CodeType) -> frozenset[str]:
    """The names of attributes and variables that code assigns or deletes, also by ``setattr`` with a constant."""
    reads = code_reads(code)
    return stored_by(code) | (reads.attributes if reads.variables & _SETTERS else frozenset())


@per_code
def assigns_made_names(code: CodeType) -> bool:
    """Whether code may assign attributes whose names do not stand in it."""
    reads = code_reads(code)
    return (bool(reads.variables & _SETTERS) and reads.reads_whole) or not WRITE_ANY.isdisjoint(reads.attributes)


@per_code
def stored_by(code: CodeType) -> frozenset[str]:
    """What code assigns or deletes besides its own variables, by name; what it does with entries by the instruction."""
    by_kind = ((i.opname.partition("_")[2], i) for i in instructions_of(code, _STORING_OPS))
    return frozenset(i.opname if kind in ("SUBSCR", "SLICE") else i.argval for kind, i in by_kind if kind in _STORED)


_COMPARISONS = ("IS_OP", "CONTAINS_OP", "COMPARE_OP")
_LONGEST_COMPARISON = 12
"""Instructions that make the operands of ``type(x.shape[0]) in (int, float)``, at most."""


def _number_compared(code: CodeType, instructions: Sequence[Instruction]) -> str:
    """See ``CodeReads.number_compared``."""
    what = "" if _SYMBOLS.isdisjoint(code.co_names) else "may ask for the type of a number"
    for place, one in enumerate(instructions):
        if one.opname in _COMPARISONS:
            before = instructions[max(place - _LONGEST_COMPARISON, 0) : place]
            loaded = {str(each.argval) for each in before}
            if "type" in loaded and not _NUMBERS.isdisjoint(loaded):
                what = "may ask for the type of a number"
            elif one.opname == "IS_OP" and type(before[-1].argval) in (int, float):
                what = "compares a number by identity (is)"
    return what and f"{what}, {os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _compared_with(last: Instruction) -> tuple[str, ...]:
    """How code writes the second operand of ``is``, which ends with ``last``; nothing if that cannot be a tensor: a
    constant, a builtin, a type."""
    if type(last.argval) is tuple:  # both operands are variables, from 3.13 on
        return last.argval[-1:]
    is_builtin = last.opname in _VARIABLES and hasattr(builtins, str(last.argval))
    if last.opname in ("LOAD_CONST", "LOAD_SMALL_INT") or is_builtin or last.argval in _TYPES:
        return ()
    return (last.argval if type(last.argval) is str else last.opname,)


def _loads(instruction: Instruction, variable: str | None, at: int = 0) -> bool:
    """Whether an instruction loads the variable: alone, or in place ``at`` of two, which 3.13 loads at once."""
    if variable is None or not instruction.opname.startswith("LOAD_FAST"):
        return False
    loaded = instruction.argval
    return bool((loaded[at] if type(loaded) is tuple else loaded) == variable)


def _arguments(following: Sequence[Instruction]) -> list[Sequence[Instruction]]:
    """What makes each argument of the call whose arguments ``following`` loads; nothing where there is no such call,
    or none can be found: where the arguments branch, and for ``f(*args)``."""
    begins = list[int]()  # for each value on the stack, where the code begins that makes it
    for place, instruction in enumerate(following):
        kind = instruction.opname
        if kind in ("PRECALL", "CALL") and len(begins) == instruction.arg:
            ends = (*begins[1:], place)
            return [following[one : max(end, one + 1)] for one, end in zip(begins, ends, strict=False)]
        if instruction.opcode in dis.hasjrel:
            break
        if kind == "PUSH_NULL" and not place:  # from 3.13 on a part of loading the function
            continue
        effect = instruction.effect()
        if len(begins) + effect < 0:  # what was loaded is no function that is called here
            break
        begins = [*begins, *[place] * effect] if effect > 0 else begins[: len(begins) + effect]
    return []


def _names_a_constant(following: Sequence[Instruction], variable: str | None) -> bool:
    """Whether the second argument of the call that ``following`` makes is ``variable``, or a constant that names one
    attribute; False if unsure."""
    given = _arguments(following)
    second: Sequence[Instruction] = given[1] if len(given) > 1 else ()
    return len(second) == 1 and (_is_one_name(second[0]) or _loads(second[0], variable, at=-1))


def _is_one_name(instruction: Instruction) -> bool:
    """Whether it loads a constant that names attributes one by one, and none that gives others (``"__dict__"``)."""
    return instruction.opname == "LOAD_CONST" and _ANY.isdisjoint(str(instruction.argval).split("."))


_MADE = "__compiled_fn"
"""How the names of compiled graphs begin."""
_GUARDED_VARIABLES = re.compile(r"(?:\bG|\['__builtins_dict\w*'\])\['(\w+)'\]")
_GUARDED_NAMES = re.compile(r"(?<!\WL\[)(?<!\(key=)[.']([^\W\d]\w*)")
"""Not those of local variables, of which a script often has one of the same name."""
_GUARDED_CLASSES = re.compile(r"<class '[^']*'>")
_HASATTR = re.compile(r"hasattr\(.*, '(\w+)'\)")
_OF_COMPILER = ("_dynamo_", "__builtins_dict", _MADE)
"""How names begin that the compiler gives. What a compiled graph keeps for itself is torch's."""
_seen: WeakKeyDictionary[Any, tuple[frozenset[str], ...]] = WeakKeyDictionary()
"""What guards name: those of a large model take some tenths of a second to print."""


def original_of(code: CodeType) -> CodeType | None:
    """The code in whose place the compiler put this one; None for code that it did not make, or does not know."""
    utils = sys.modules.get("torch._dynamo.utils")
    original: CodeType | None = getattr(utils, "orig_code_map", {}).get(code)
    return original


def with_guards(code: CodeType) -> tuple[CodeReads, frozenset[str] | None]:
    """What code reads: if the compiler made it, also all that guards name. And which attributes these need not find.

    All that was compiled of the same function counts: which of it runs is found by these guards. The second is None
    where nobody can tell, as of compiled code that was loaded from a file.
    """
    reads, original = code_reads(code), original_of(code)
    if original is None:
        is_made = any(name.startswith(_MADE) for name in code.co_names)
        return reads, None if is_made else frozenset()
    try:
        entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(original)
        named = [_named_by(entry.guard_manager) for entry in entries]
    except AttributeError:  # another torch
        return reads, None
    found = zip((reads.attributes, reads.variables, ()), *named, strict=True)
    attributes, variables, optional = (
        frozenset(name for name in chain(*each) if not name.startswith(_OF_COMPILER)) for each in found
    )
    reads = reads._replace(attributes=attributes, variables=variables, finds_modules="modules" in attributes)
    return reads, optional if named else None


def _named_by(guards: Any) -> tuple[frozenset[str], ...]:
    """Attributes, variables, and attributes that need not be there."""
    if guards not in _seen:
        text = _GUARDED_CLASSES.sub("", str(guards))  # guards of dicts stand nowhere else
        patterns = (_GUARDED_NAMES, _GUARDED_VARIABLES, _HASATTR)
        _seen[guards] = tuple(frozenset(pattern.findall(text)) for pattern in patterns)
    return _seen[guards]
