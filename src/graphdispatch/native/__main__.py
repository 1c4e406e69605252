"""``python -m graphdispatch.native``: compiles the CPU tape if it must, and says which native parts are in use."""

from .bound import DONE_IN_PYTHON, WHY_NO_CORE
from .tape import TAPE

if __name__ == "__main__":
    TAPE.wait()
    besides = f"; Python does {', '.join(DONE_IN_PYTHON)}" if DONE_IN_PYTHON else ""
    print(
        "native core:", f"not in use: {WHY_NO_CORE}; Python serves, more slowly" if WHY_NO_CORE else f"in use{besides}"
    )
    print("graphs on the CPU:", "compiled" if TAPE.module is not None else f"run in Python: {TAPE.why_not}")
