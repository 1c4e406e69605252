"""Which capturer serves a front end: the one that proves, or the plain one where every check is switched off."""

from ..config import CUDAGraphOptions
from ..modes import CUDAGraphMode
from ..proof.capturer import ProvingCapturer
from ..record import PlainCapturer
from ..runtime.protocols import Capturer


def capturer_for(options: CUDAGraphOptions, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> Capturer:
    """The capturer for these options.

    Args:
        options: The options of the front end.
        mode: The mode of its graphs.
    """
    is_plain = not (options.verify or options.guard_weights or options.verify_every) and mode is CUDAGraphMode.FULL
    return PlainCapturer() if is_plain else ProvingCapturer()
