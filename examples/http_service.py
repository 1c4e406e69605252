"""An HTTP service with dynamic batching: requests that wait together are one batch, which a graph serves.

It asks itself, eagerly and by graphs. `uvicorn http_service:app` in examples/ serves on port 8000.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated

import httpx
import prometheus_client
import torch
from fastapi import Body, FastAPI
from torch import Tensor, nn

import graphdispatch as gd

WIDTH, MOST = 64, 16


def make_app(model: Callable[[Tensor], Tensor]) -> FastAPI:
    """The service around ``model``. It runs in a thread, so that the next requests come in meanwhile."""
    waiting = asyncio.Queue[tuple[Tensor, asyncio.Future[Tensor]]]()

    async def batches() -> None:
        while True:
            batch = [await waiting.get(), *(waiting.get_nowait() for _ in range(min(waiting.qsize(), MOST - 1)))]
            answers = await asyncio.to_thread(model, torch.stack([row for row, _ in batch]))
            for answer, (_, future) in zip(answers, batch, strict=True):
                if not future.done():  # else the client has gone
                    future.set_result(answer)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batches())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)
    app.mount("/metrics", prometheus_client.make_asgi_app())

    @app.post("/score")
    async def score(row: Annotated[list[float], Body(min_length=WIDTH, max_length=WIDTH)]) -> list[float]:
        await waiting.put((torch.tensor(row), future := asyncio.Future[Tensor]()))
        return (await future).tolist()

    return app


blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(8))
model = nn.Sequential(*blocks).eval().requires_grad_(False)
serve = gd.graphed(model, dynamic={"input": 0}, max_size=MOST)
serve.prewarm(torch.randn(MOST, WIDTH))
prometheus_client.REGISTRY.register(gd.metrics.PrometheusCollector(serve, name="scorer"))
app = make_app(serve)


async def load(name: str, app: FastAPI, clients: int = 8, requests: int = 40) -> None:
    """Ask from several clients at once, check the answers, and print the latencies and the metric of hits."""
    http, taken = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service"), list[float]()

    async def client() -> None:
        for row in torch.randn(requests, WIDTH):
            answer = await http.post("/score", json=row.tolist())
            taken.append(1e3 * answer.elapsed.total_seconds())
            torch.testing.assert_close(torch.tensor(answer.json()), model(row[None])[0], atol=1e-4, rtol=1e-4)

    async with app.router.lifespan_context(app), http:
        await asyncio.gather(*(client() for _ in range(clients)))
        hits = [line for line in (await http.get("/metrics/")).text.splitlines() if "hits_total{" in line]
    p50, p99 = (sorted(taken)[len(taken) * share // 100] for share in (50, 99))
    print(f"{name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms of {len(taken)} requests;", *hits)


if __name__ == "__main__":
    for name, one in (("eager", model), ("graphs", serve)) * 2:  # the first round is a warm-up
        asyncio.run(load(name, make_app(one)))
