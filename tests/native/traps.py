"""A pytest plugin: where a reference too many is given back, or a freed object is written to, the run ends.

``traps.cpp`` says how. Run it as ``PYTHONPATH=tests/native python -m pytest -p traps``.
"""

import importlib.util
import sysconfig
import tempfile
from pathlib import Path

from graphdispatch.native.build import compile_extension

with tempfile.TemporaryDirectory() as folder:
    target = Path(folder) / f"_traps{sysconfig.get_config_var('EXT_SUFFIX')}"
    compile_extension([Path(__file__).with_suffix(".cpp")], target)
    spec = importlib.util.spec_from_file_location("_traps", target)
    assert spec is not None
    assert spec.loader is not None
    traps = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(traps)
    traps.set()
