"""``Memo``: the answers of a pure function, each made when it is first asked for."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Memo"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(dict[K, V], Generic[K, V]):
    """``memo[question]`` is ``answer(question)``, kept for the next time; at ``most`` answers all are made anew.

    A kept answer costs one lookup. Thread-safe: threads that ask at once may make an answer twice, and get equal ones.
    What ``answer`` raises passes through, and nothing is kept.
    """

    __slots__ = ("_answer", "_most")

    def __init__(self, answer: Callable[[K], V], most: int) -> None:
        super().__init__()
        self._answer = answer
        self._most = most

    def __missing__(self, question: K) -> V:
        answer = self._answer(question)
        if len(self) >= self._most:
            self.clear()
        self[question] = answer
        return answer
