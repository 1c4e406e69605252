"""What a case may need of a front end, and the one table of what each front end cannot express."""

from collections.abc import Callable, Sequence

__all__ = ["FEATURES", "LACKS", "OUTCOMES", "able", "needs"]

_PADDED = "its graphs have one number of rows each; padding is the caller's"
_TENSORS = "it takes tensors by name; constants, objects and nests are bound to the callable"
_NO_RULE = "it pads with zeros"
_NO_STATIC = "it has no `static=`"
_COPIES = "it always copies its inputs"
_FULL_ONLY = "it captures FULL graphs only"
_NO_POLICY = "it has no dispatch policy"
_NO_FREEZE = "it has no `freeze()`; the owner of its graphs has"
_GRAPH_ALONE = "it is a graph without the callable, so that there is nothing to compare it with"

FEATURES = {
    "padding": "a graph that serves smaller batches",
    "constants": "arguments that are no tensors, and nests of tensors",
    "pad_rules": "a pad rule of one's own",
    "static_objects": "objects that are declared unchanging",
    "static_inputs": "the caller's tensors as the graph's buffers",
    "pieces": "PIECEWISE graphs",
    "policy": "a dispatch policy",
    "comparisons": "a callable to compare the graph with again",
    "freezing": "`freeze()`",
}
"""What a case may need beyond tensors and a callable, by the word that ``needs`` takes."""

_WRAPPER = {"padding": _PADDED, "pad_rules": _PADDED, "static_objects": _NO_STATIC, "policy": _NO_POLICY}
_ENTRIES = {"constants": _TENSORS, "pad_rules": _NO_RULE, "static_objects": _NO_STATIC}
_MANAGER = _ENTRIES | {"static_inputs": _COPIES, "pieces": _FULL_ONLY, "policy": _NO_POLICY}
_DISPATCHER = _ENTRIES | {"freezing": _NO_FREEZE}
LACKS: dict[str, dict[str, str]] = {
    "graphed": {
        "static_inputs": "it copies its inputs; `static=` names single tensors that never move",
        "policy": _NO_POLICY,
    },
    "wrapper": _WRAPPER,
    "adaptive_wrapper": _WRAPPER,
    "execute_or_capture": _MANAGER,
    "replay_graph": _MANAGER,
    "entry": _DISPATCHER | {"policy": _NO_POLICY, "comparisons": _GRAPH_ALONE},
    "dispatcher": _DISPATCHER,
    "streams": {
        "freezing": _NO_FREEZE,
        "padding": _PADDED,
        "pad_rules": _PADDED,
        "static_objects": _NO_STATIC,
        "static_inputs": _COPIES,
        "pieces": _FULL_ONLY,
    },
    "streams_entry": _DISPATCHER,
    "composite": _DISPATCHER,
}
"""For each front end what it cannot express, and why. A case that needs it is not run through that front end."""


def needs(*features: str, outcome: str = "right") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare what a test needs of a front end (words of ``FEATURES``); front ends that lack it are left out.

    ``outcome`` is what the table says of the front ends that have it.
    """
    assert outcome in OUTCOMES, outcome
    assert set(features) <= set(FEATURES), features

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test.needs = features  # type: ignore[attr-defined]
        return test

    return mark


OUTCOMES = {
    "right": "the answer and the effects are eager's; a graph serves, or eager does where no graph is for such a call",
    "eager": "no graph serves the call, and the answer is eager's; the reason is counted",
    "error": "an exception, the same behind each front end",
    "limit": "silently frozen, behind each front end",
}
"""What the table says of a case, and what it means."""


def able(features: Sequence[str]) -> list[str]:
    """The names of the front ends that can express a case with these needs."""
    return [name for name, lacks in LACKS.items() if not set(features) & set(lacks)]
