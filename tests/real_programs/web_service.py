"""A web service with a served model, as ``uvicorn --workers 2 tests.real_programs.web_service:app`` runs it."""

import os

import torch
from fastapi import FastAPI

import graphdispatch as gd

app = FastAPI()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
step = gd.graphed(net, dynamic={"input": 0}, sizes=(2, 4))
with torch.inference_mode():  # as the service calls it
    step.prewarm(torch.randn(4, 8))


@app.post("/answer")
def answer(batch: list[list[float]]) -> dict[str, object]:
    """The model's answer, eager's answer, what served it, and by which worker; in a thread of the service."""
    x = torch.tensor(batch)
    with torch.inference_mode():
        given = step(x)
        reason = step.last_decision.reason
        return {"served": given.tolist(), "eager": net(x).tolist(), "reason": reason.name, "worker": os.getpid()}
