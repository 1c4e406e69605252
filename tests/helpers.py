"""What tests of all front ends share."""

from collections.abc import Mapping
from typing import Any

from graphdispatch import CUDAGraphOptions

AT_ONCE = CUDAGraphOptions(capture_after=1)
"""A size is captured when it first comes."""


def with_options(settings: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """``settings`` as a front end takes them: those that are options, but ``outputs``, are put into ``options``.

    ``defaults`` are options that hold where ``settings`` say nothing else.
    """
    given = settings.get("options") or CUDAGraphOptions()
    fields = CUDAGraphOptions.model_fields
    chosen = {name: value for name, value in defaults.items() if getattr(given, name) == fields[name].default}
    chosen |= {name: value for name, value in settings.items() if name in fields and name != "outputs"}
    others = {name: value for name, value in settings.items() if name == "outputs" or name not in fields}
    return others | {"options": given.replace(**chosen)}
