"""vLLM served by this library: its dispatcher, and on the CPU its graphs.

vLLM finds ``register`` and ``platform`` by their entry points, and loads them in each of its processes. Both do nothing
unless the environment variable ``GRAPHDISPATCH_VLLM`` says so, and import nothing of vLLM before.

    decisions     this library decides which graph serves a step; whoever captured it replays it
    graphs        the same, and on the CPU this library's graphs serve the steps

With any other value, without a value, and with a vLLM of a version that was not tried, vLLM stays as it is.
"""

from .switch import FIRST_VERSION, LAST_VERSION, SWITCH, platform, register
from .trace import TRACE, record_steps

__all__ = ["FIRST_VERSION", "LAST_VERSION", "SWITCH", "TRACE", "platform", "record_steps", "register"]
