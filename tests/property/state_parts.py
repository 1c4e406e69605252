"""Reads what random programs with Python state are made of, and makes the choices that it leaves.

The parts stand in ``state_parts.txt``, the places where they live in ``state_places.txt``, and the callables around
their models in ``state_forms.txt``; each file says how it is written.
"""

import random
import re
from collections import defaultdict
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


@dataclass(frozen=True)
class Text:
    """One entry of a file: its flags, and source by section, whose choices are open."""

    flags: frozenset[str]
    sections: dict[str, str]

    def __getitem__(self, section: str) -> str:
        return self.sections.get(section, "")

    def lines(self, section: str) -> tuple[str, ...]:
        """The lines of a section, each a text of its own."""
        return tuple(self[section].splitlines())


def _read(file: str) -> dict[str, Text]:
    """The entries of a file by name."""
    entries: dict[str, Text] = {}
    for chunk in re.split(r"^== ", Path(__file__).with_name(file).read_text(), flags=re.M)[1:]:
        heading, _, body = chunk.partition("\n")
        name, *flags = heading.split()
        sections: defaultdict[str, str] = defaultdict(str)
        for section in re.split(r"^\[(?=\w+\]$)", body, flags=re.M)[1:]:
            title, _, source = section.partition("]\n")
            sections[title] += source.rstrip("\n") + "\n"
        entries[name] = Text(frozenset(flags), sections)
    return entries


PARTS, PLACES, FORMS = (_read(f"state_{kind}.txt") for kind in ("parts", "places", "forms"))
OF_ALL_PLACES, OF_ALL_FORMS = PLACES.pop("any"), FORMS.pop("any")


def having(*flags: str) -> frozenset[str]:
    """The names of the parts with one of these flags."""
    return frozenset(name for name, part in PARTS.items() if part.flags & {*flags})


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


def parse(name: str, choose: Choose) -> Part:
    """A part by its name, with every choice of its code made; those of its mutations stay open."""
    mutations: list[str] = []
    for line in PARTS[name].lines("mutate"):
        owner = line.removeprefix("CONFIG ")
        mutations += [line] if owner == line else [owner + change for change in _CONFIG_CHANGES]
    top, members, init, run = (choose(PARTS[name][key]) for key in ("top", "members", "init", "run"))
    return Part(name, re.sub("^CONFIG$", _CONFIG, top, flags=re.M), members, init, run, tuple(mutations))
