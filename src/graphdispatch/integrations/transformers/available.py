"""Whether transformers is there, in a version that was tried."""

import warnings

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "graphdispatch.integrations.transformers needs transformers; install graphdispatch[transformers]"
    ) from error

__all__ = ["FIRST_VERSION", "LAST_VERSION", "check_version"]

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


check_version(transformers.__version__)
