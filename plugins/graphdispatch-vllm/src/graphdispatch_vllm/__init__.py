"""vLLM served by graphdispatch: its dispatcher, and on the CPU its graphs.

vLLM finds ``register`` and ``platform`` of ``switch.py`` by their entry points, and loads them in each of its
processes. Both do nothing unless an environment variable says so, and import nothing of vLLM before.
``GRAPHDISPATCH_VLLM`` is one of

    decisions     graphdispatch decides which graph serves a step; whoever captured it replays it
    graphs        the same, and on the CPU graphdispatch's graphs serve the steps

``GRAPHDISPATCH_VLLM_TRACE`` records steps. With any other value, without a value, with a vLLM of a version that was not
tried, and with a model or an option that is not on the list of ``support.py``, vLLM stays as it is.
"""
