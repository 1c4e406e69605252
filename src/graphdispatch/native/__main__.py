"""``python -m graphdispatch.native``: compiles the CPU tape if it must, and says which native parts are in use."""

from .bound import ASKED, WHY_NO_CORE
from .tape import TAPE

if __name__ == "__main__":
    TAPE.wait()
    asked = f"; it asks Python for: {', '.join(ASKED)}" if ASKED else ""
    print(f"<core {WHY_NO_CORE or 'in use'}{asked}>")
    print(TAPE)
