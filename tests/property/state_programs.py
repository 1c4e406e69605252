"""Random programs with Python state, random mutations between their calls, and what a front end makes of them.

A program is data: parts (``state_parts``) in random places, a callable around them, a front end, and steps.
``render`` gives its source, which is executed twice, so that two twins have equal weights, objects, classes and
globals. One twin runs eagerly, the other behind the front end, and after every step all that they hold is compared.

    python -m tests.property.state_runs 17 18     # from the root: runs two seeds, and prints them and what they came to
"""

import dataclasses
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..behaviour.front_ends import FRONT_ENDS as KINDS
from .state_parts import FORMS, OF_ALL_FORMS, OF_ALL_PLACES, PARTS, PLACES, Choose, Part, Text, having, parse

PRELUDE = """
import collections, contextlib, copy, dataclasses, decimal, enum, fractions, functools, hashlib, importlib, itertools
import mmap, operator, queue, random, sys, threading, types, typing, weakref
import HELPER as HELPER_MODULE
import numpy as np
import torch
from torch import nn
from graphdispatch import eager_break
def T(seed, *shape):
    return torch.randn(shape or (4,), generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * 0.5
def gc_find(holder, kind):
    return [holder] if isinstance(holder, kind) else [*(holder.values() if isinstance(holder, dict) else holder)]
"""


FRONT_ENDS = ("graphed",) * 6 + ("lengths",) * 2 + tuple(name for name in KINDS if name != "graphed")
EXACT_FRONT_ENDS = ("wrapper", "adaptive_wrapper", "streams")
MANAGED = (("sleep()", "wake()"), ("wake()",), ("clear()",), ("invalidate('for a test')",), ("sleep()",))
"""What may be said to ``graphed`` between calls."""
GRAPHED_FRONT_ENDS = ("graphed", "lengths")
AHEAD = tuple(name for name, kind in KINDS.items() if kind.captures_ahead)
STREAMS = ("streams", "streams_entry")
"""Front ends that run steps on threads of their own, where a ``threading.local`` is another."""
PIECEWISE_FRONT_ENDS = (*GRAPHED_FRONT_ENDS, "wrapper", "adaptive_wrapper")
ALL_SIZES = (1, 2, 3, 4, 5)
SIZES = ((4,), (2, 4), (1, 2, 4), (3, 5), (5,), ALL_SIZES)


@dataclass(frozen=True)
class Use:
    """One part of a program at its place."""

    part: Part
    place: str
    rows: int = 0
    """The number of rows for which alone the part runs, and without a trace in the output as long as its gate is shut;
    0: it always runs."""


@dataclass(frozen=True)
class Step:
    """One step.

    A ``call``, ``prepare``, ``prewarm`` or ``renew`` with so many rows, a call of the ``other`` callable of the model
    through a front end of its own, a mutation ``do``, or a word to ``manage`` the front end.
    """

    kind: str
    rows: int = 0
    seed: int = 0
    part: int = -1
    code: str = ""


@dataclass(frozen=True)
class Program:
    """A program as data."""

    seed: int
    uses: tuple[Use, ...]
    form: str
    output: str
    front_end: str
    sizes: tuple[int, ...]
    mode: str
    options: tuple[tuple[str, Any], ...]
    more: tuple[tuple[str, Any], ...] = ()
    """Options of ``graphed`` alone."""
    steps: tuple[Step, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether no batch is padded, so that all numbers are eager's very bits."""
        manages = any(step.kind == "manage" for step in self.steps)
        return self.front_end in EXACT_FRONT_ENDS or (
            self.sizes == ALL_SIZES and self.front_end not in AHEAD and not manages
        )

    def has(self, parts: Collection[str]) -> bool:
        """Whether it has one of these parts."""
        return any(use.part.name in parts for use in self.uses)


def draw(seed: int, *, only: tuple[str, ...] = ()) -> Program:
    """The program of a seed, or one of the parts ``only``."""
    rng = random.Random(seed)
    choose = Choose(rng)
    names = [rng.choice(only or tuple(PARTS)) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))]
    front_end = rng.choice(FRONT_ENDS)
    unfit_ahead, unfit_streams = having("makes_at_first", "exact_only") & set(names), having("of_thread") & set(names)
    while (front_end in AHEAD and unfit_ahead) or (front_end in STREAMS and unfit_streams):
        front_end = rng.choice(FRONT_ENDS)
    mode = "PIECEWISE" if front_end in PIECEWISE_FRONT_ENDS and rng.random() < 0.25 else "FULL"
    uses = []
    for name in names:
        places = list(PLACES)
        if "needs_slots" in PARTS[name].flags:
            places = [p for p, place in PLACES.items() if "no_rows" not in place.flags and p != "partial"]
        if mode == "FULL":
            places.remove("break")
        if front_end in STREAMS:
            places.remove("threaded")
        may_hide = front_end != "entry" and "makes_at_first" not in PARTS[name].flags  # captures run other rows
        at = rng.randint(1, 5) if may_hide and rng.random() < 0.1 else 0
        uses.append(Use(parse(name, choose), rng.choice(["inline", "inline", *places]), at))
    sizes = ALL_SIZES if set(names) & having("exact_only") else rng.choice(SIZES)
    options = _options(rng, names)
    if any(use.rows for use in uses):
        options.pop("verify", None)  # nothing else finds such a branch
    if "wrapper" in front_end and rng.random() < 0.2:
        options["inputs"] = "static"
    more: dict[str, Any] = {}
    if front_end == "lengths":
        options.pop("outputs", None)  # views of two outputs at once
    if front_end in GRAPHED_FRONT_ENDS:
        if "slot_cache" in names and not set(names) & having("padding_writes") and rng.random() < 0.7:
            more["pad"] = {"slots": 8}
            options["padding_writes"] = "allow"
        elif rng.random() < 0.3:
            more["pad"] = {"x": rng.choice(("repeat_last", 7.0, "leave"))}
        if rng.random() < 0.2:
            more["max_cached_graphs"] = rng.choice((1, 2))
        if rng.random() < 0.3:
            more["capture_after"] = 2
    program = Program(
        seed,
        tuple(uses),
        rng.choice(("module", *FORMS)),
        rng.choice(("h", *OF_ALL_FORMS.lines("output"))),
        front_end,
        sizes,
        mode,
        tuple(options.items()),
        tuple(more.items()),
    )
    return dataclasses.replace(program, steps=tuple(_steps(rng, choose, program)))


def _options(rng: random.Random, names: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.1 and not set(names) & having("padding_writes", "needs_proof"):
        options["verify"] = False
    if rng.random() < 0.15:
        options["verify_every"] = rng.choice((1, 3))
    if rng.random() < 0.3:
        options["outputs"] = rng.choice(("view", "static"))
    return options


def _steps(rng: random.Random, choose: Choose, program: Program) -> list[Step]:
    steps: list[Step] = []
    rows = rng.choices(range(1, 6), k=rng.choice((1, 1, 2)))
    contexts = ("inference",) if program.has(having("keeps_tensors")) else ("inference", "enable_grad")
    has_other = program.front_end not in (*AHEAD, "lengths") and rng.random() < 0.15

    def calls(count: int) -> None:
        for _ in range(count):
            now = rng.choice(rows) if rng.random() < 0.85 else rng.randint(1, 5)
            context = rng.choice(contexts) if rng.random() < 0.04 else ""
            kind = "other" if has_other and rng.random() < 0.4 else "call"
            steps.append(Step(kind, now, rng.randrange(1000), code=context))

    if program.front_end in AHEAD:
        for n in sorted({*rows, rng.randint(1, 5)}, reverse=True):
            steps.append(Step("prepare", n, rng.randrange(1000)))
    elif program.front_end in GRAPHED_FRONT_ENDS and rng.random() < 0.2 and not program.has(having("makes_at_first")):
        steps.append(Step("prewarm", rng.choice(rows), rng.randrange(1000)))
    calls(rng.randint(2, 5))
    for _ in range(rng.randint(2, 6)):
        for _ in range(rng.choice((1, 1, 1, 2))):
            steps.append(_mutation(rng, choose, program))
        if program.front_end == "graphed" and rng.random() < 0.08 and not program.has(having("exact_only")):
            steps += [Step("manage", code=code) for code in rng.choice(MANAGED)]
        if program.front_end in AHEAD and rng.random() < 0.4:
            steps.append(Step("renew", rng.choice(rows), rng.randrange(1000)))
        calls(rng.randint(1, 5))
    return steps


def _mutation(rng: random.Random, choose: Choose, program: Program) -> Step:
    # The library keeps alive what it captured. So an object that only weak references are left of is not made.
    if rng.random() < 0.15:
        code = choose(rng.choice((*OF_ALL_FORMS.lines("mutate"), *FORMS[program.form].lines("mutate"))))
        is_alive = program.has({"weak"})
        return Step("do", code="pass" if is_alive and "deepcopy" in code else code)
    index = rng.randrange(len(program.uses))
    use = program.uses[index]
    if use.rows and rng.random() < 0.3:
        return Step("do", part=index, code=f"m.P_gate = {rng.randint(0, 1)}")
    if rng.random() < 0.1:
        code = choose(rng.choice(OF_ALL_PLACES.lines("mutate")))
        is_alive = "own" in PLACES[use.place].flags or "weak" in (use.place, use.part.name)
        return Step("do", part=index, code="pass" if is_alive and "deepcopy" in code else code)
    return Step("do", part=index, code=choose(rng.choice(use.part.mutations)))


def _indent(text: str, depth: int) -> str:
    return "".join("    " * depth + line + "\n" for line in text.strip("\n").split("\n")) if text.strip() else ""


def _def(head: str, body: str, tail: str, depth: int) -> str:
    return _indent(head, depth) + _indent(body, depth + 1) + _indent(tail, depth + 1)


def render(program: Program) -> str:
    """The source of a program; ``HELPER`` stands for the module that it imports."""
    top, members, init, run = "", "", "", ""
    for index, use in enumerate(program.uses):
        part, place = use.part, PLACES[use.place]
        pieces = {"top": part.top, "members": part.members, "init": part.init, "run": part.run}
        above = pieces["top"]
        if "own" in place.flags:
            if use.place in ("function", "break"):
                above += _def("def P_run(self, h, ids, slots):", pieces["run"], "return h", 0)
            elif use.place == "method":
                members += _prefixed(_def("def P_run(self, h, ids, slots):", pieces["run"], "return h", 0), index)
            members += _prefixed(pieces["members"], index)
            init += _prefixed(pieces["init"], index)
        else:
            above += _class(place, pieces)
        init += _prefixed(place["init"], index)
        top += _prefixed(above + "\n" + place["top"], index)
        called = place["call"] or pieces["run"]
        if use.rows:
            init += _prefixed("self.P_gate = 0\n", index)
            kept = "if self.P_gate == 0:\n    h = before\nreturn h"
            gated = _def("def P_gated(self, h, ids, slots):", f"before = h\n{called}", kept, 0)
            members += _prefixed(gated, index)
            called = f"if h.shape[0] == {use.rows}:\n    h = self.P_gated(h, ids, slots)"
        run += _prefixed(called, index) + "\n"
    model = "class Model(nn.Module):\n" + _indent(members, 1)
    model += _def(
        "def __init__(self):", "super().__init__()\nself.out_count = 0\n" + init, "self.requires_grad_(False)", 1
    )
    model += _indent("def keep(self, h):\n    return h", 1)
    model += _def("def forward(self, x, ids, slots):", "h = x\n" + run, f"return {program.output}", 1)
    return PRELUDE + top + model + "m = Model().eval()\n" + FORMS[program.form]["top"] + OF_ALL_FORMS["top"]


def _class(place: Text, pieces: dict[str, str]) -> str:
    is_module = "module" in place.flags
    base = "(nn.Module)" if is_module else ""
    head = f"class P_Part{base}:\n" + _indent(pieces["members"], 1) + _indent(place["members"], 1)
    first = "super().__init__()\n" if is_module else ""
    head += _def("def __init__(self):", first + pieces["init"], "self.P_made = True", 1)
    return head + _def(f"def {'forward' if is_module else 'run'}(self, h, ids, slots):", pieces["run"], "return h", 1)


def _prefixed(text: str, index: int) -> str:
    return text.replace("P_", f"p{index}_")


def mutation_source(program: Program, step: Step) -> str:
    """The code of a mutation, its owner and prefix filled in."""
    if step.part < 0:
        return step.code
    owner = PLACES[program.uses[step.part].place]["owner"].strip()
    return _prefixed(step.code.replace("OWNER", owner), step.part)


def listing(program: Program) -> str:
    """The program for people: how it is served, its own source, and its steps."""
    options = {"sizes": program.sizes, "mode": program.mode, **dict(program.options), **dict(program.more)}
    parts = [f"{use.part.name} ({use.place}{f', {use.rows} rows' if use.rows else ''})" for use in program.uses]
    lines = [f"seed {program.seed}: {program.front_end}({options})", f"parts: {', '.join(parts)}"]
    lines.append(render(program).removeprefix(PRELUDE).strip())
    for number, step in enumerate(program.steps):
        called = f"{step.kind}({step.rows} rows, seed {step.seed}) {step.code}".strip()
        lines.append(f"#{number:<3} {mutation_source(program, step) if step.kind == 'do' else called}")
    return "\n".join(lines)
