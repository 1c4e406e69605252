"""What is kept out of captures: other threads' writes to the memory that they undo and redo, and Python's collector.

Note [no collection in a capture]
    A finaliser that runs during a CUDA capture can free a graph or unload a module, which invalidates the capture.
    Nothing is collected in place of that: a collection for each capture would make a batch of captures several times
    slower (pytorch#158193, sglang#8577), and what a capture left behind is young, so that the collector finds it once
    it runs.

Note [windows]
    A capture runs the callable several times and puts back what it wrote (Note [exactly once] in
    ``proof/watch/effects.py``). A write that another thread makes to the same memory meanwhile would be lost. So a
    capture opens a window over the storages that its callable reaches. Another thread's eager run of a served
    callable that reaches one of them waits until the window closes, and a replay that writes one is refused before it
    copies anything. The capture first waits for such runs and replays that are under way. All these waits end: a
    capture gives up with a reason, and a run goes on with a warning.

    A served callable may call others, such as an attached module. While a capture waits for the outer run, the inner
    one must not wait for that capture, nor open a window itself: it goes on, as a part of what is waited for.
"""

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from ..backends.base import Pool
from ..copying import make_lock, renew_in_child
from ..errors import ReplayError

if TYPE_CHECKING:
    from .entry import CUDAGraphEntry


_log = logging.getLogger("graphdispatch")
_CAPTURE_WAITS_S, _RUN_WAITS_S, _INNER_WAITS_S = 1.0, 10.0, 0.1
_Reach = Callable[[], set[int]]


class Windows:
    """The open capture windows of the process, and the eager runs under way: one set, as there is one memory."""

    __slots__ = ("__weakref__", "_changed", "_runs", "open", "pools")

    def __init__(self) -> None:
        self.pools: WeakValueDictionary[int, Pool] = WeakValueDictionary()
        """By ``id``, the pools of graphs that write memory of others. Threads may add some while others read them."""
        self.after_fork()
        renew_in_child(self)

    def after_fork(self) -> None:
        """Those of threads that are gone are closed: see Note [after a fork] in ``copying.py``."""
        self.open: list[tuple[int, set[int]]] = []
        """For each window its thread and the addresses of its storages; replays read it without a lock."""
        self._runs: dict[object, tuple[int, _Reach]] = {}
        self._changed = threading.Condition(make_lock())

    def refuse(self, entry: "CUDAGraphEntry") -> None:
        """Raise ``ReplayError`` if a replay writes what another thread's window covers. Call it with the pool's lock
        held, which a capture takes after it has opened its window."""
        if self._covers_writes(entry):
            raise ReplayError("another thread captures a callable that shares state with this graph; call again")

    def wait_for(self, entry: "CUDAGraphEntry") -> None:
        """Wait, for a while, until a replay writes nothing that another thread's window covers."""
        with self._changed:
            self._changed.wait_for(lambda: not self._covers_writes(entry), _RUN_WAITS_S)

    def begin(self, run: object, reach: _Reach) -> None:
        """Begin an eager run of the calling thread, once no window covers what it reaches. Call it in the block that
        ends the run, since a signal may stop it.

        It takes no lock while no window is open. A run is noted before it looks for windows, and a window is opened
        before its capture looks for runs, so that one of the two sees the other.
        """
        self._runs[run] = here = (threading.get_ident(), reach)
        if self.open:
            del self._runs[run]
            with self._changed:
                if not self._changed.wait_for(lambda: not self._covers(reach()), _RUN_WAITS_S):
                    _log.warning(
                        "a call ran during a capture of another thread that shares its state; a write may be lost"
                    )
                self._runs[run] = here

    def end(self, run: object) -> None:
        """End a run, if it has begun, and tell the captures that wait for it."""
        self._runs.pop(run, None)
        if self.open:
            with self._changed:
                self._changed.notify_all()

    @contextmanager
    def capturing(self, storages: set[int], pool: Pool) -> Iterator[bool]:
        """A block with a window over ``storages``; False if others could not be waited for, and there is no window."""
        window = (threading.get_ident(), storages)
        is_open = False
        try:
            with self._changed:
                is_free = not any(awaits for _, awaits in self._others())
                is_open = is_free and self._changed.wait_for(lambda: not self._covers(storages), _CAPTURE_WAITS_S)
                if is_open:
                    self.open.append(window)
            yield is_open and self._drained(window, pool)
        finally:
            with self._changed:
                if is_open:
                    self.open.remove(window)
                self._changed.notify_all()

    def taking(self, lock: Any) -> AbstractContextManager[bool]:
        """A block with a lock that captures are made with; False, and no lock, if the calling thread may not wait long
        for it: a run of it is under way, for which the capture that holds the lock may wait. It waits not at all for
        itself: a finalizer or the handler of a signal has interrupted what it does with the lock."""
        if lock._is_owned():
            return nullcontext(enter_result=False)
        here = threading.get_ident()
        is_inner = bool(self._runs) and any(thread == here for thread, _ in list(self._runs.values()))
        taken: AbstractContextManager[bool] = _Briefly(lock) if is_inner else lock
        return taken

    def _covers_writes(self, entry: "CUDAGraphEntry") -> bool:
        return entry.written is not None and self._covers({begin for begin, _ in entry.written.spans})

    def _covers(self, storages: set[int]) -> bool:
        """Whether another thread's window covers some of these, which does not wait for the calling thread."""
        return any(not (awaits or covered.isdisjoint(storages)) for covered, awaits in self._others())

    def _others(self) -> list[tuple[set[int], bool]]:
        """What the windows of other threads cover, each with whether it waits for a run of the calling thread."""
        here = threading.get_ident()
        windows = [covered for thread, covered in list(self.open) if thread != here]
        runs = (
            list(self._runs.values()) if windows else []
        )  # a replay calls this, and it takes long to find what a run reaches
        reached = [reach() for thread, reach in runs if thread == here]
        return [(covered, not all(map(covered.isdisjoint, reached))) for covered in windows]

    def _drained(self, window: tuple[int, set[int]], own: Pool) -> bool:
        """Wait for the runs and replays of other threads that began before the window; whether all have ended."""
        here, storages = window
        deadline = time.monotonic() + _CAPTURE_WAITS_S

        def is_quiet() -> bool:
            runs = list(self._runs.values())
            return all(thread == here or storages.isdisjoint(reach()) for thread, reach in runs)

        with self._changed:
            if not self._changed.wait_for(is_quiet, _CAPTURE_WAITS_S):
                return False
        for held in self.pools.valuerefs():
            pool = held()
            if pool is not None and pool is not own:
                if not pool.lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
                    return False
                try:
                    pool.order_after_last_use()
                finally:
                    pool.lock.release()
        return True


class _Briefly:
    """A block with a lock, or False after waiting for it for a moment."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._is_taken = lock, False

    def __enter__(self) -> bool:
        self._is_taken = self._lock.acquire(timeout=_INNER_WAITS_S)
        return self._is_taken

    def __exit__(self, *_: object) -> None:
        if self._is_taken:
            self._lock.release()


WINDOWS = Windows()


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The addresses of the storages of some tensors."""
    with torch._C.DisableTorchFunction():
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class _Pauses:
    """The pauses under way in all threads. The first one stops the collector, and the last one starts it again."""

    def __init__(self) -> None:
        self._lock = make_lock()
        self._number = 0
        self._was_enabled = False
        renew_in_child(self)

    def __enter__(self) -> None:
        with self._lock:
            if not self._number:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._number += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._number = max(self._number - 1, 0)
            if not self._number and self._was_enabled:
                gc.enable()

    def after_fork(self) -> None:
        """No pause goes on in a child, which has one thread: see Note [after a fork] in ``copying.py``."""
        if self._number and self._was_enabled:
            gc.enable()
        self._number = 0


_PAUSES = _Pauses()


def paused_collector(enabled: bool = True) -> AbstractContextManager[object]:
    """Pause the collector within the block. Its former state comes back when the last of all threads' blocks ends."""
    return _PAUSES if enabled else nullcontext()
