"""Lints a plan of graphs before it serves: graphs that serve no batch, batches without a graph, cliffs."""

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from ..decide.decision import Decision
from ..decide.keys import CudagraphKeyDispatcher
from ..decide.table import KeyTable, query_len_of, request_limit
from ..descriptors import BatchDescriptor
from ..errors import ConfigError
from ..modes import CUDAGraphMode
from ..reasons import Reason

__all__ = ["LintCode", "LintFinding", "lint"]

NONE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.FULL
_Key = tuple[CUDAGraphMode, BatchDescriptor]


class LintCode(StrEnum):
    """What is wrong with a plan."""

    UNREACHABLE_GRAPH = "unreachable_graph"
    SHADOWED_GRAPH = "shadowed_graph"
    DUPLICATE_GRAPH = "duplicate_graph"
    NOT_DIVISIBLE = "not_divisible"
    UNSERVED_SIZES = "unserved_sizes"
    LARGEST_BELOW_LIMIT = "largest_below_limit"


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One finding: a sentence with the remedy, and the numbers of tokens concerned, in increasing order."""

    code: LintCode
    message: str
    sizes: tuple[int, ...]


def lint(
    plan: KeyTable | CudagraphKeyDispatcher, *, max_num_tokens: int, max_num_reqs: int, query_len: int = 1
) -> list[LintFinding]:
    """What is wrong with the graphs of ``plan`` for a scheduler with these limits; empty if nothing is.

    The scheduler sends mixed batches of up to ``max_num_tokens`` tokens, and uniform decode batches of up to
    ``max_num_reqs`` requests. Each of these has ``query_len`` tokens, or a query length that has graphs of its own. The
    lint asks for a decision at each captured size and variant, and with a cost model at each number of tokens. A decode
    batch that runs eagerly is a finding. A large *mixed* batch that does is none, since engines choose that. A plan
    without graphs has no findings.
    """
    for name, value in (("max_num_tokens", max_num_tokens), ("max_num_reqs", max_num_reqs), ("query_len", query_len)):
        if value < 1:
            raise ConfigError(f"{name} must be >= 1, got {value}")
    table = plan if isinstance(plan, KeyTable) else plan.table
    keys = {(mode, key) for mode, group in table.keys.items() for key in group}
    if not keys or table.mode is None:
        return []
    scheduler = _Scheduler(table, max_num_tokens, max_num_reqs, query_len)
    broken = {key for key in keys if _is_broken(key, table)}
    repeated = _repeated(keys - broken)
    reached = scheduler.reached(())
    behind_full = scheduler.reached((FULL,)) - reached
    unreached = keys - broken - repeated - reached
    return [
        *_about(LintCode.NOT_DIVISIBLE, broken, _BROKEN),
        *_about(LintCode.DUPLICATE_GRAPH, repeated, _REPEATED),
        *_about(LintCode.SHADOWED_GRAPH, unreached & behind_full, _SHADOWED),
        *_about(LintCode.UNREACHABLE_GRAPH, unreached - behind_full, _UNREACHED),
        *_uncovered(scheduler),
    ]


_BROKEN = "are no multiple of the query length, so that no batch can be padded to them; name the query_lens instead"
_REPEATED = "serve the same batches as another key; keep one key of each"
_SHADOWED = "serve only calls that exclude FULL; drop them unless there are such calls"
_UNREACHED = "serve no batch that the scheduler sends; drop them to free memory, or raise the scheduler's limits"


class _DecidedRange(NamedTuple):
    """Batches of these numbers of tokens, which all get the same mode, and the decision for the largest of them."""

    decision: Decision
    sizes: range


class _Scheduler:
    """All batches that the scheduler can send, and what the table decides for them."""

    def __init__(self, table: KeyTable, max_num_tokens: int, max_num_reqs: int, query_len: int) -> None:
        self.table = table
        self.max_num_tokens = max_num_tokens
        self.max_num_reqs = max_num_reqs
        self.query_len = query_len
        self._sizes = {key.num_tokens for group in table.keys.values() for key in group}

    def decode(
        self, variant: Hashable, query_len: int, excluded: Collection[CUDAGraphMode] = ()
    ) -> Iterator[_DecidedRange]:
        """The decisions for uniform decode."""
        most = min(self.max_num_reqs, self.max_num_tokens // query_len)
        for low, reqs in self._steps((size // query_len for size in self._sizes), most):
            sizes = range(low * query_len, reqs * query_len + 1, query_len)
            yield _DecidedRange(
                self.table.decide(
                    reqs * query_len, reqs, query_len=query_len, variant=variant, excluded_modes=excluded
                ),
                sizes,
            )

    def mixed(self, variant: Hashable, excluded: Collection[CUDAGraphMode] = ()) -> Iterator[_DecidedRange]:
        """The decisions for mixed batches, with every number of requests that can make a difference."""
        for low, tokens in self._steps(self._sizes, self.max_num_tokens):
            for reqs in {min(limit, tokens, self.max_num_reqs) for limit in (*self.table.limits, self.max_num_reqs)}:
                decision = self.table.decide(tokens, reqs, variant=variant, excluded_modes=excluded)
                yield _DecidedRange(decision, range(low, tokens + 1))

    def reached(self, excluded: Collection[CUDAGraphMode]) -> set[_Key]:
        """The graphs that serve at least one batch when the calls exclude these modes."""
        found: set[_Key] = set()
        for variant in self.table.variants:
            batches = [self.mixed(variant, excluded)]
            batches += [self.decode(variant, length, excluded) for length in {*self.table.query_lens, self.query_len}]
            found.update(
                (decision.mode, decision.descriptor)
                for decision, _ in chain.from_iterable(batches)
                if decision.descriptor is not None
            )
        return found

    def _steps(self, sizes: Iterable[int], most: int) -> Iterator[tuple[int, int]]:
        """The counts from 1 to ``most`` as ranges (first, last), within which no size and no request limit lies."""
        ends = range(1, most + 1) if self.table.has_cost else {*sizes, *self.table.limits, self.max_num_reqs, most}
        first = 1
        for end in sorted(end for end in ends if 1 <= end <= most):
            yield first, end
            first = end + 1


def _is_broken(key: _Key, table: KeyTable) -> bool:
    mode, descriptor = key
    return mode is FULL and descriptor.is_uniform_decode and query_len_of(descriptor, table.query_len) is None


def _repeated(keys: Iterable[_Key]) -> set[_Key]:
    """All but the first key of those that serve exactly the same batches."""
    groups: dict[object, list[_Key]] = {}
    for mode, key in keys:
        room = key.num_reqs if key.is_uniform_decode else request_limit(key)
        groups.setdefault((mode, key.num_tokens, key.is_uniform_decode, key.variant, room), []).append((mode, key))
    return {key for group in groups.values() for key in sorted(group, key=lambda key: key[1].num_reqs or 0)[1:]}


def _about(code: LintCode, keys: Iterable[_Key], text: str) -> Iterator[LintFinding]:
    """A finding for each mode among the keys."""
    sizes: dict[CUDAGraphMode, set[int]] = {}
    for mode, key in keys:
        sizes.setdefault(mode, set()).add(key.num_tokens)
    for mode in sorted(sizes):
        concerned = tuple(sorted(sizes[mode]))
        yield LintFinding(code, f"{mode.name} graphs of {_ranges(concerned)} tokens {text}", concerned)


def _uncovered(scheduler: _Scheduler) -> list[LintFinding]:
    """Findings about batches, one for all variants that share it."""
    shared: dict[tuple[LintCode, str, tuple[int, ...]], list[Hashable]] = {}
    for variant in scheduler.table.variants:
        decode = list(scheduler.decode(variant, scheduler.query_len))
        for found in (*_holes(decode, list(scheduler.mixed(variant))), *_cliff(decode)):
            shared.setdefault(found, []).append(variant)
    findings = []
    for (code, text, sizes), variants in shared.items():
        named = "" if variants == [None] else f" (variants: {', '.join(map(str, variants))})"
        findings.append(LintFinding(code, text + named, sizes))
    return findings


def _holes(decode: list[_DecidedRange], mixed: list[_DecidedRange]) -> Iterator[tuple[LintCode, str, tuple[int, ...]]]:
    """Batches without a graph, though larger ones have one; also all decode batches, if none of them has one."""
    for kind, batches in (("decode", decode), ("mixed", mixed)):
        largest = max((found.rows for found, _ in batches if found.mode is not NONE), default=0)
        if not largest and kind == "decode":
            largest = max((found.rows for found, _ in batches), default=0)
        unserved = [covered for found, covered in batches if found.rows <= largest and _is_unserved(found)]
        sizes = tuple(sorted(set(chain.from_iterable(unserved))))
        if sizes:
            text = f"no graph serves {kind} batches of {_ranges(sizes)} tokens; capture a graph that does"
            yield LintCode.UNSERVED_SIZES, text, sizes


def _cliff(decode: list[_DecidedRange]) -> Iterator[tuple[LintCode, str, tuple[int, ...]]]:
    """Decode batches above the largest graph of the best mode, which a loaded scheduler keeps sending."""
    best = max((found.mode for found, _ in decode), default=NONE)
    largest = max((found.rows for found, _ in decode if found.mode is best), default=0)
    beyond = [
        (found, covered)
        for found, covered in decode
        if found.rows > largest and (found.mode is not NONE or _is_unserved(found))
    ]
    if best is not NONE and beyond:
        sizes = tuple(chain.from_iterable(covered for _, covered in beyond))
        instead = {"eagerly" if found.mode is NONE else f"in {found.mode.name} graphs" for found, _ in beyond}
        text = (
            f"the largest {best.name} graph for decode serves {largest} tokens, and the scheduler sends up to "
            f"{sizes[-1]}: batches of {_ranges(sizes)} tokens run {' and '.join(sorted(instead))}; "
            f"capture size {sizes[-1]} too"
        )
        yield LintCode.LARGEST_BELOW_LIMIT, text, sizes


def _is_unserved(decision: Decision) -> bool:
    # If the cost model prefers eager, nothing is missing.
    return decision.mode is NONE and decision.reason is not Reason.POLICY


def _ranges(sizes: tuple[int, ...]) -> str:
    """The text ``1-3, 8`` for 1, 2, 3, 8. It leaves out the middle of a long list."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1][1:] = [size]
        else:
            runs.append([size])
    words = ["-".join(map(str, run)) for run in runs]
    return ", ".join(words if len(words) <= 8 else [*words[:4], "...", *words[-3:]])
