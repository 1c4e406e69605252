"""Tells whether a run took the branch that a graph holds: by the memory that it uses, and by draws and checks of data.

For some numbers of rows code may take another branch whose outputs are alike, by chance or as long as a buffer is zero.
"""

from collections.abc import Iterable

import torch

from ..backends.operators import is_strided, storage_key
from ..errors import VerificationError
from ..memory.entry import CUDAGraphEntry
from .effects import EffectRecorder

__all__ = ["Branch"]


class Branch:
    """The branch that the graph of ``entry`` holds. ``within_reach`` are the tensors that the callable reaches, and
    ``arguments`` those that it is given."""

    def __init__(
        self, entry: CUDAGraphEntry, within_reach: Iterable[torch.Tensor], arguments: Iterable[torch.Tensor]
    ) -> None:
        given = set(map(storage_key, arguments))
        reach = {storage_key(tensor): tensor for tensor in within_reach if is_strided(tensor)}
        self._reach = {key: tensor for key, tensor in reach.items() if key not in given}
        self._reads = entry.reads
        self._uses_rng, self._checks_data, self._size = entry.uses_rng, entry.checks_data, entry.size

    def check(self, effects: EffectRecorder, rows: int) -> None:
        """Raise ``VerificationError`` if the watched run on ``rows`` rows took another branch.

        As many rows as the graph has take its branch; what they use beside it may be an engine's, other for each step.
        """
        if rows == self._size:
            return
        graph, what = f"the graph of {self._size}", ""
        if self._reads is not None:
            used, read = effects.used & self._reach.keys(), self._reads & self._reach.keys()
            # Under autocast eager may use copies of weights that it keeps, where the graph reads the weights.
            apart = used - read if torch._C._is_any_autocast_enabled() else used ^ read
            other = next((self._reach[key] for key in apart), None)
            if other is not None:
                verbs = ("does not use", "does") if storage_key(other) in read else ("uses", "does not")
                what = f"{verbs[0]} a tensor of shape {tuple(other.shape)}, and {graph} {verbs[1]}"
        if not what and self._uses_rng is not effects.uses_rng:
            what = f"{'draws' if effects.uses_rng else 'does not draw'} random numbers, unlike {graph}"
        if not what and self._checks_data is not effects.checks_data:
            what = f"{'checks' if effects.checks_data else 'does not check'} its data, unlike {graph}"
        if what:
            raise VerificationError(f"for {rows} rows the call {what}: it takes another branch")
