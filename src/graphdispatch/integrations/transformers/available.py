"""Whether transformers is there, in a version that was tried, with everything that is hooked here."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

try:
    import transformers
    from transformers import GenerationMixin
    from transformers.cache_utils import StaticCache, StaticSlidingWindowLayer
except ImportError as error:
    raise ImportError(
        "graphdispatch.integrations.transformers needs transformers; pip install '.[transformers]'"
    ) from error

FIRST_VERSION = (5, 10)
"""The first version with which the tests pass."""
LAST_VERSION = (5, 24)
"""The latest version that was tried."""


def check_version(version: str) -> None:
    """Raise ``ImportError`` for a version that is too old, and warn of one that is newer than what was tried."""
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    first, last = (".".join(map(str, limit)) for limit in (FIRST_VERSION, LAST_VERSION))
    if numbers < FIRST_VERSION:
        raise ImportError(f"this integration needs transformers {first} or newer, found {version}")
    if numbers > LAST_VERSION:
        warnings.warn(
            f"this integration was tried with transformers {first} to {last}; {version} may differ", stacklevel=2
        )


SEAMS: Mapping[type, Mapping[str, tuple[str, ...]]] = {
    GenerationMixin: {
        "generate": (),
        "_prepare_cache_for_generation": (
            *("generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length"),
        ),
        "_prepare_static_cache": (),
        "_valid_auto_compile_criteria": ("model_kwargs", "generation_config"),
    },
    StaticCache: {"__init__": ("config", "max_cache_len"), "reset": ()},
    StaticSlidingWindowLayer: {"update": ("key_states", "value_states"), "get_seq_length": ()},
}
"""The methods of transformers that are replaced or relied on, with the parameters that are read by name."""


def check_seams(seams: Mapping[type, Mapping[str, tuple[str, ...]]] = SEAMS) -> None:
    """Raise ``ImportError`` if a method that is hooked is not there, or takes other parameters."""
    for owner, methods in seams.items():
        for name, needed in methods.items():
            method: Any = getattr(owner, name, None)
            missing = [name for name in needed if method and name not in inspect.signature(method).parameters]
            if method is None or missing:
                lack = f"has no parameter {missing[0]!r}" if missing else "is not there"
                first, last = (".".join(map(str, limit)) for limit in (FIRST_VERSION, LAST_VERSION))
                raise ImportError(
                    f"transformers {transformers.__version__} differs from {first} to {last} where this integration "
                    f"hooks in: {owner.__name__}.{name} {lack}; install transformers {last}"
                )


check_version(transformers.__version__)
check_seams()
