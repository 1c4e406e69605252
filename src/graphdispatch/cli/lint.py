"""``graphdispatch lint``: what is wrong with a plan's graphs for a scheduler, before they serve."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..plan.dispatcher import planned_dispatcher
from ..plan.lint import LintFinding
from ..plan.lint import lint as find_faults
from ..plan.plan import Plan
from .inputs import read_plan
from .options import JsonFile, MaxSize, ModeOption, SizesOption
from .outputs import print_text, require_writable, write_json

__all__ = ["lint", "lint_plan", "print_findings"]


def lint(
    max_num_seqs: Annotated[int, typer.Option(help="The scheduler's limit of requests.", min=1)],
    max_num_batched_tokens: Annotated[int, typer.Option(help="The scheduler's limit of tokens in a step.", min=1)],
    plan: Annotated[
        Path | None, typer.Argument(help="A plan, as the command plan wrote it.", metavar="PLAN", show_default=False)
    ] = None,
    sizes: SizesOption = None,
    max_size: MaxSize = None,
    mode: ModeOption = None,
    json_file: JsonFile = None,
) -> None:
    """Find graphs that no batch reaches, batches that no graph serves, and cliffs.

    Exits with 1 if there are any.
    """
    require_writable(json=json_file)
    linted = read_plan(plan, sizes, mode, max_size)
    findings = lint_plan(linted, max_num_reqs=max_num_seqs, max_num_tokens=max_num_batched_tokens)
    console = Console()
    print_text(console, repr(linted))
    print_findings(findings, console)
    write_json(json_file, list(map(asdict, findings)))
    if findings:
        raise typer.Exit(1)


def lint_plan(plan: Plan, *, max_num_reqs: int, max_num_tokens: int) -> list[LintFinding]:
    """The findings about a plan for a scheduler with these limits; none for a plan without graphs."""
    if not plan.graphs:
        return []
    dispatcher = planned_dispatcher(plan, max_num_reqs=max_num_reqs)
    return find_faults(dispatcher, max_num_tokens=max_num_tokens, max_num_reqs=max_num_reqs)


def print_findings(findings: Sequence[LintFinding], console: Console) -> None:
    """One line for each finding, or that there are none."""
    if not findings:
        print_text(console, "lint: nothing found", "green")
    for finding in findings:
        print_text(console, f"lint, {finding.code.value}: {finding.message}", "yellow")
