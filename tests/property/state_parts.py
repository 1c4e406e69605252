"""Reads the parts of random programs with Python state (``state_parts.txt``), and makes the choices that they leave."""

import random
import re
from dataclasses import dataclass
from pathlib import Path

_CONFIG = """class P_Cfg:
    limit = 0.25
    def __init__(self, mean=0.5, mode="a"):
        self.mean, self.mode, self.bias, self.w = mean, mode, T(3), [0.5, 1.0]
    def scaled(self, h):
        return h * self.mean
"""
_CONFIG_CHANGES = (
    ".mean = $f",
    ".mode = '<<a|b>>'",
    ".bias = $t",
    ".bias.mul_(0.5)",
    ".w[<<0|1>>] = $f",
    ".limit = $f",
)

NEEDS_SLOTS = frozenset({"slot_cache", "row_state", "rows", "unused_results", "argument_attribute"})
"""Parts that read ``ids`` or ``slots``; a hook has none."""

PADDING_WRITES = frozenset({"row_state", "counts_rows", "in_place_chain", "resized"})
"""Parts that padding rows would make write what is read: ``padding_writes="allow"`` is not for them."""

NEEDS_PROOF = PADDING_WRITES | {"host_read", "rows", "slot_cache", "try_finally"}
"""Parts whose padding only a comparison tests: they are left out with ``verify=False``."""

EXACT_ONLY = frozenset({"drawn"})
"""Parts that pad to other results than eager's by design (footgun row ``dropout``): their batches are not padded."""

KEEPS_TENSORS = frozenset(
    {
        "class_attribute",
        "dynamic_cache",
        "globals",
        "grad",
        "hooks",
        "kept",
        "previous",
        "row_state",
        "same_again",
        "slot_cache",
        "slots",
    }
)
"""Parts that keep what they compute: by design (footgun row ``gradients_on_by_default``) it requires no gradient."""

OF_THREAD = frozenset({"thread_local", "surroundings"})
"""Parts whose state is a thread's."""

MAKES_AT_FIRST = frozenset(
    {
        "lazy",
        "cached",
        "containers",
        "dynamic_cache",
        "same_again",
        "counts_rows",
        "context_manager",
        "grad",
        "machinery",
    }
)
"""Parts that make something when they first run, or take what other threads use, too (footgun row ``lock_left``), which
a capture ahead of traffic leaves behind by design."""


@dataclass(frozen=True)
class Part:
    """One part of a program, its choices made: source by section. Only the prefix is still open."""

    name: str
    top: str
    members: str
    init: str
    run: str
    mutations: tuple[str, ...]


class Choose:
    """Makes the choices that a text leaves open, with a random generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def __call__(self, text: str) -> str:
        """The text with every ``<<a|b>>`` and every ``$`` replaced."""
        innermost = re.compile(r"<<((?:(?!<<|>>).)*)>>", re.S)
        while innermost.search(text):
            text = innermost.sub(lambda found: self.rng.choice(found[1].split("|")).strip(), text, count=1)
        text = re.sub(r"\$f", lambda _: self.rng.choice(("0.25", "0.5", "2.0", "3.0")), text)
        text = re.sub(r"\$t", lambda _: f"T({self.rng.randrange(4)})", text)
        return re.sub(r"\$i", lambda _: str(self.rng.randrange(4)), text)


def _read() -> dict[str, dict[str, str]]:
    """The sections of every part."""
    parts: dict[str, dict[str, str]] = {}
    text = Path(__file__).with_suffix(".txt").read_text()
    for chunk in re.split(r"^== ", text, flags=re.M)[1:]:
        name, _, body = chunk.partition("\n")
        parts[name] = dict.fromkeys(("top", "members", "init", "run", "mutate"), "")
        for section in re.split(r"^\[(?=\w+\]$)", body, flags=re.M)[1:]:
            heading, _, source = section.partition("]\n")
            parts[name][heading] += source.rstrip("\n") + "\n"
    return parts


SECTIONS = _read()
"""The parts by name, with their choices open."""


def parse(name: str, choose: Choose) -> Part:
    """A part by its name, with every choice of its code made; those of its mutations stay open."""
    sections = SECTIONS[name]
    mutations: list[str] = []
    for line in sections["mutate"].splitlines():
        owner = line.removeprefix("CONFIG ")
        mutations += [line] if owner == line else [owner + change for change in _CONFIG_CHANGES]
    top, members, init, run = (choose(sections[key]) for key in ("top", "members", "init", "run"))
    return Part(name, re.sub("^CONFIG$", _CONFIG, top, flags=re.M), members, init, run, tuple(mutations))
