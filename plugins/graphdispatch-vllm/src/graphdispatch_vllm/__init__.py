"""vLLM served by this library: its dispatcher, and on the CPU its graphs.

vLLM finds ``register`` and ``platform`` by their entry points, and loads them in each of its processes. Both do nothing
unless an environment variable says so, and import nothing of vLLM before. ``GRAPHDISPATCH_VLLM`` is one of

    decisions     this library decides which graph serves a step; whoever captured it replays it
    graphs        the same, and on the CPU this library's graphs serve the steps

``GRAPHDISPATCH_VLLM_TRACE`` records steps, and ``GRAPHDISPATCH_VLLM_PLAN`` takes the capture sizes from a plan.
With any other value, without a value, and with a vLLM of a version that was not tried, vLLM stays as it is.
"""

from .switch import FIRST_VERSION, LAST_VERSION, PLAN, SWITCH, platform, register
from .trace import TRACE, record_steps

__all__ = ["FIRST_VERSION", "LAST_VERSION", "PLAN", "SWITCH", "TRACE", "platform", "record_steps", "register"]
