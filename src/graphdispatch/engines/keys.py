"""How a dispatcher serves a call, and checked and padded keys of batches."""

from enum import Enum

from ..descriptors import DispatchKey
from ..errors import ConfigError, check_count

__all__ = ["DispatchMode", "create_dispatch_key", "get_padded_key"]


class DispatchMode(Enum):
    """What a dispatcher did with one call.

    Attributes:
        EAGER: It ran the eager runner.
        CUDAGRAPH: A full graph served it.
        PIECEWISE: Graphs between eager breaks served it.
        HYBRID: No call's mode; while it is enabled, the policy chooses at each call.
    """

    EAGER = "eager"
    CUDAGRAPH = "cudagraph"
    PIECEWISE = "piecewise"
    HYBRID = "hybrid"

    # Members are compared by identity. Enum's own hash would cost a Python call at every look-up.
    __hash__ = object.__hash__


def create_dispatch_key(num_tokens: int, num_reqs: int, max_seq_len: int = 0, is_prefill: bool = False) -> DispatchKey:
    """A checked ``DispatchKey``.

    Args:
        num_tokens: The number of tokens, at least 1.
        num_reqs: The number of requests, from 1 to ``num_tokens``, since each schedules at least one token.
        max_seq_len: The longest sequence in tokens; 0 if unknown.
        is_prefill: Whether the batch is a prefill.

    Returns:
        The key.

    Raises:
        ConfigError: No batch can have such a count.
    """
    check_count("num_tokens", num_tokens)
    check_count("num_reqs", num_reqs)
    check_count("max_seq_len", max_seq_len, 0)
    if num_reqs > num_tokens:
        raise ConfigError(
            f"num_reqs must be at most num_tokens={num_tokens}, got {num_reqs}; "
            "each request schedules at least one token"
        )
    return DispatchKey(num_tokens, num_reqs, max_seq_len, bool(is_prefill))


def get_padded_key(key: DispatchKey, pad_to: int = 8) -> DispatchKey:
    """``key`` with its tokens and its longest sequence rounded up to multiples of ``pad_to``.

    An unknown longest sequence (0) stays unknown. A decode key with one token for each request keeps ``num_reqs ==
    num_tokens``, so the padded batch is still uniform decode.

    Args:
        key: The key of the batch.
        pad_to: The multiple, at least 1.

    Returns:
        The padded key.

    Raises:
        ConfigError: ``pad_to`` is no positive integer.
    """
    check_count("pad_to", pad_to)
    tokens = -(-key.num_tokens // pad_to) * pad_to
    seq_len = -(-key.max_seq_len // pad_to) * pad_to
    reqs = tokens if not key.is_prefill and key.num_reqs == key.num_tokens else key.num_reqs
    return DispatchKey(tokens, reqs, seq_len, key.is_prefill)
