"""Sixteen threads call one served module while its graphs are thrown away now and then.

``make native-check`` runs it with a core that the thread sanitizer watches. It exits with 1 if an answer is wrong.
"""

import sys
import threading

import torch

import graphdispatch as gd
from graphdispatch.native.bound import CORE, WHY_NO_CORE

THREADS, CALLS, CLEARED = 16, 1000, 50


def main() -> int:
    """How many answers were wrong, at most 1; prints what the graphs served."""
    assert CORE is not None, WHY_NO_CORE
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval().requires_grad_(False)
    serve = gd.graphed(model, dynamic={"input": 0}, sizes=(2, 4, 8))
    wrong: list[int] = []

    def call(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        with torch.inference_mode():
            for step in range(CALLS):
                x = torch.randn(step * number % 9 + 1, 8, generator=generator)
                if not torch.allclose(serve(x), model(x), atol=1e-5):
                    wrong.append(number)
                if number == 1 and step % CLEARED == 0:
                    serve.clear()

    workers = [threading.Thread(target=call, args=(number,)) for number in range(1, THREADS + 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{serve.stats!r}, {len(wrong)} wrong answers")
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main())
