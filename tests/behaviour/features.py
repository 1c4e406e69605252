"""What a case may need of a front end, and the one table of what each front end cannot express.

Beyond tensors and a callable, a case may need

- ``padding``: a graph that serves smaller batches
- ``constants``: arguments that are no tensors, and nests of tensors
- ``pad_rules``: a pad rule of one's own
- ``static_objects``: objects that are declared unchanging
- ``static_inputs``: the caller's tensors as the graph's buffers
- ``pieces``: PIECEWISE graphs
- ``comparisons``: a callable to compare the graph with again
- ``freezing``: ``freeze()``
"""

from collections.abc import Callable, Sequence

__all__ = ["LACKS", "able", "needs"]

# Its graphs have one number of rows each; padding is the caller's.
_WRAPPER = {"padding", "pad_rules", "static_objects"}
# They take tensors by name, while constants, objects and nests are bound to the callable; they pad with zeros.
_ENTRIES = {"constants", "pad_rules", "static_objects"}
# It always copies its inputs, and captures FULL graphs only.
_MANAGER = _ENTRIES | {"static_inputs", "pieces"}
# The owner of its graphs has ``freeze()``.
_DISPATCHER = _ENTRIES | {"freezing"}
LACKS: dict[str, set[str]] = {
    "graphed": {"static_inputs"},  # it copies its inputs; ``static=`` names single tensors that never move
    "wrapper": _WRAPPER,
    "adaptive_wrapper": _WRAPPER,
    "execute_or_capture": _MANAGER,
    "replay_graph": _MANAGER,
    "entry": _DISPATCHER | {"comparisons"},  # a graph without the callable, to compare it with
    "dispatcher": _DISPATCHER,
    "streams": {"freezing", "padding", "pad_rules", "static_objects", "static_inputs", "pieces"},
    "streams_entry": _DISPATCHER,
    "composite": _DISPATCHER,
}
"""For each front end what it cannot express. A case that needs it is not run through that front end."""


def needs(*features: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare what a test needs of a front end; front ends that lack it are left out."""
    assert set(features) <= set().union(*LACKS.values()), features

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test.needs = features  # type: ignore[attr-defined]
        return test

    return mark


def able(features: Sequence[str]) -> list[str]:
    """The names of the front ends that can express a case with these needs."""
    return [name for name, lacks in LACKS.items() if not set(features) & lacks]
