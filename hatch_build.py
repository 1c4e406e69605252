"""The build hook of the package: it compiles the native core if it can, and makes a pure wheel otherwise.

``GRAPHDISPATCH_NATIVE`` in the environment: 0 leaves the core out, 1 fails the build without it.
"""

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeCore(BuildHookInterface[Any]):
    """Compiles ``graphdispatch.native._core``; the wheel is then one of this Python version and platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel, or the editable installation, is put together."""
        wish = os.environ.get("GRAPHDISPATCH_NATIVE")
        if wish == "0":
            return
        build = runpy.run_path(str(Path(self.root) / "src/graphdispatch/native/build.py"))
        try:
            core: Path = build["compile_core"]()
        except build["CompileError"] as error:
            if wish == "1":
                raise
            self.app.display_warning(f"graphdispatch is built without its native core: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(str(core.relative_to(self.root)))
