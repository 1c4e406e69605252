"""``python -m graphdispatch.native``: compiles the CPU tape if it must, and says which native parts are in use."""

from .tape import TAPE, wait

if __name__ == "__main__":
    wait()
    print(TAPE)
