"""``Memo``: a dictionary that computes a missing value and keeps it."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Memo"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(dict[K, V], Generic[K, V]):
    """``memo[question]`` is ``answer(question)``, computed once. When ``most`` answers are kept, all are dropped.

    A kept answer costs one lookup. Thread-safe: two threads that ask the same at once may both compute the answer. What
    ``answer`` raises passes through, and nothing is kept.
    """

    __slots__ = ("_answer", "_most")

    def __init__(self, answer: Callable[[K], V], most: int = 65536) -> None:
        super().__init__()
        self._answer = answer
        self._most = most

    def __missing__(self, question: K) -> V:
        answer = self._answer(question)
        if len(self) >= self._most:
            self.clear()
        self[question] = answer
        return answer
