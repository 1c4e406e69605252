"""``python -m graphdispatch.native``: compiles the CPU tape if it must, and says which native parts are in use."""

from .bound import WHY_NO_CORE
from .tape import TAPE

if __name__ == "__main__":
    TAPE.wait()
    print("native core:", f"not in use: {WHY_NO_CORE}; Python serves, more slowly" if WHY_NO_CORE else "in use")
    print("graphs on the CPU:", "compiled" if TAPE.module is not None else f"run in Python: {TAPE.why_not}")
