"""``python -m graphdispatch.native``: compiles the CPU tape if it must, and says which native parts are in use."""

from .bound import ASKED, WHY_NO_CORE
from .tape import TAPE

if __name__ == "__main__":
    TAPE.wait()
    asked = f"; it asks Python for {', '.join(ASKED)}" if ASKED else ""
    print("native core:", f"not in use, Python serves, more slowly: {WHY_NO_CORE}" if WHY_NO_CORE else f"in use{asked}")
    print("graphs on the CPU:", "compiled" if TAPE.module is not None else f"run in Python: {TAPE.why_not}")
