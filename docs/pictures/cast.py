"""Draws the terminal of README: ``python docs/pictures/cast.py`` runs the demo and writes ``demo.svg`` beside it.

The text is what the command prints; arguments go to the command, as in ``cast.py --steps 500``. ``cast.py - < FILE``
takes the text of an earlier run.
"""

import os
import re
import subprocess
import sys
from html import escape, unescape
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

COLUMNS = 64  # narrow enough to be read on a telephone
TARGET = Path(__file__).with_name("demo.svg")
COMMAND = "graphdispatch demo"
TERMINAL = {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TTY_INTERACTIVE": "0"}
PROGRESS = re.compile(r"^.*\d+%.*\d:\d\d.*\n?|\x1b\[\?\d+[hl]\n?", re.M)
CHARACTER = 12.2  # the width of one, where rich draws it
RUN = re.compile(
    r'<text class="(?P<kind>demo-r\d+)" x="(?P<x>[\d.]+)" y="(?P<y>[\d.]+)" textLength="[\d.]+" '
    r'clip-path="url\(#demo-line-(?P<line>\d+)\)">(?P<text>[^<]*)</text>'
)
FONT = "ui-monospace, Menlo, Consolas, monospace"
REVEAL = """
    @media (prefers-reduced-motion: no-preference) {
        @keyframes reveal { from { opacity: 0 } }
        .later { animation: reveal 0.3s both }
    }
"""


def output(arguments: list[str]) -> str:
    """What the demo prints to a terminal of this width, with its colours."""
    command = [sys.executable, "-m", *COMMAND.split(), *arguments]
    run = subprocess.run(command, env=os.environ | TERMINAL, stdout=subprocess.PIPE, text=True, check=True)
    return run.stdout


def drawn(printed: str, command: str) -> str:
    """The terminal as SVG, which loads nothing from elsewhere; its lines appear from top to bottom."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    console.print(Text.from_ansi(PROGRESS.sub("", printed).strip("\n")))
    plain = CONSOLE_SVG_FORMAT.replace("Fira Code, monospace", FONT)
    plain = plain.replace(
        'class="{unique_id}-matrix"', f'class="{{unique_id}}-matrix" font-family="{FONT}" font-size="20"'
    )
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", plain, flags=re.S)
    plain = plain.replace("</style>", REVEAL.replace("{", "{{").replace("}", "}}") + "</style>")
    svg = console.export_svg(title=command, code_format=plain, unique_id="demo")
    svg = svg.replace("<svg ", '<svg width="720" ', 1)
    svg = re.sub(r'<clipPath id="demo-line-.*?</clipPath>\s*', "", svg, flags=re.S)  # lines need none
    rules = dict(re.findall(r"\.(demo-r\d+) \{ (.*?) \}", svg))
    looks = {kind: _as_attributes(rule) for kind, rule in rules.items()}
    return RUN.sub(lambda found: _placed(found, looks[found["kind"]]), svg)


def _as_attributes(rule: str) -> str:
    """A rule of the style sheet as attributes, for viewers without style sheets."""
    return re.sub(r"([\w-]+): ([^;]+);?", r'\1="\2" ', rule).strip()


def _placed(found: re.Match[str], look: str) -> str:
    """A run of text as a text for each word, so that columns keep their places in any font; each line comes later."""
    later = f'class="{found["kind"]} later" style="animation-delay: {0.08 * int(found["line"]):.2f}s"'
    run, at = unescape(found["text"]).replace("\N{NO-BREAK SPACE}", " "), float(found["x"])
    return "".join(
        f'<text {later} x="{at + CHARACTER * word.start():g}" y="{found["y"]}" {look}>{escape(word[0])}</text>'
        for word in re.finditer(r"\S+", run)
    )


if __name__ == "__main__":
    arguments = sys.argv[1:]
    text = sys.stdin.read() if arguments == ["-"] else output(arguments)
    shown = COMMAND if arguments == ["-"] else " ".join([COMMAND, *arguments])
    TARGET.write_text(drawn(text, shown), encoding="utf-8")
    print(TARGET)
