"""Records the steps of a running vLLM, for ``graphdispatch plan``."""

import fcntl
import functools
import os
from pathlib import Path
from typing import Any

__all__ = ["TRACE", "record_steps"]

TRACE = "GRAPHDISPATCH_VLLM_TRACE"
"""The environment variable that names the file to which an engine's steps go."""
_HEADER = "num_tokens,num_reqs,uniform_decode\n"


def record_steps(scheduler: type[Any], path: str | Path) -> None:
    """Have every step that ``scheduler``, a scheduler's class, schedules from now on written to a CSV file.

    A line has the number of tokens, the number of requests, and whether every request has as many tokens as a decode
    step schedules. Lines are appended whole, so that several engines may share a file. Only the first call for a class
    counts. Costs some microseconds a step, in the engine's process. Raises ``OSError`` if the file cannot be written.
    """
    plain = scheduler.schedule
    if getattr(plain, "records_steps", False):
        return
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    fcntl.flock(file, fcntl.LOCK_EX)  # engines that start together would each find it empty
    if os.fstat(file).st_size == 0:
        os.write(file, _HEADER.encode())
    fcntl.flock(file, fcntl.LOCK_UN)

    @functools.wraps(plain)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        tokens, scheduled = output.total_num_scheduled_tokens, output.num_scheduled_tokens
        if tokens:
            length = 1 + self.num_spec_tokens
            uniform = all(count == length for count in scheduled.values())
            os.write(file, f"{tokens},{len(scheduled)},{uniform:d}\n".encode())
        return output

    schedule.records_steps = True  # type: ignore[attr-defined]
    scheduler.schedule = schedule
