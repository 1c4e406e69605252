"""``docs/audit.md``: the text is written by hand, the outputs by ``python -m tests.audit.document``."""

import re
from pathlib import Path

from graphdispatch.auditing.audit import audit
from graphdispatch.demo import build

from . import examples

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "audit.md"
OUTPUT = re.compile(r"(<!-- audit: (\w+) -->\n```text\n)(.*?)(```\n)", re.S)


def document(text: str) -> str:
    """The document with the outputs of now."""
    return OUTPUT.sub(lambda found: f"{found[1]}{output(found[2])}{found[4]}", text)


def output(name: str) -> str:
    """What the audit of an example prints. Lines of other packages move with their versions, and have no number."""
    model, example, options = build() if name == "demo" else getattr(examples, name)()
    text = str(audit(model, example, **options))
    return re.sub(r"(transformers/\S+):\d+:", r"\1:", text) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text("utf-8")), "utf-8")
