"""Which capturer serves a front end: the one that proves, or the plain one where every check is switched off."""

from ..config import CUDAGraphOptions
from ..errors import ConfigError, did_you_mean
from ..modes import CUDAGraphMode
from ..proof.capturer import ProvingCapturer
from ..proof.check.licence import Verification
from ..record import PlainCapturer
from ..runtime.protocols import Capturer


def capturer_for(options: CUDAGraphOptions, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> Capturer:
    """The capturer for these options.

    Args:
        options: The options of the front end.
        mode: The mode of its graphs.

    Raises:
        ConfigError: ``options.verify`` names no policy.
    """
    named = options.verify
    if isinstance(named, str) and named not in Verification.policies:
        known = [str(name) for name in Verification.policies]
        raise ConfigError(
            f"options.verify must be True, False or the name of a policy, one of {known}, got {named!r}"
            f"{did_you_mean(named, known)}; a policy is a subclass of Verification with a name"
        )
    is_plain = not (options.verify or options.guard_weights or options.verify_every) and mode is CUDAGraphMode.FULL
    return PlainCapturer() if is_plain else ProvingCapturer()
