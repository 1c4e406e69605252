"""Padding of plans on traffic that they have not seen, beside vLLM's sizes: ``python -m benchmarks.plan FOLDER``.

Each trace in the folder, NAME.csv or NAME.csv.gz, has a line for each step, as ``Workload.from_trace`` reads them. A
plan of the first half of the steps is judged on the other half, with as many graphs as vLLM captures and with half as
many. Sizes go up to vLLM's limit: 512, or twice the most requests if the name has them, as in ``chat_64``.
"""

import argparse
import re
from pathlib import Path

from graphdispatch.plan import Evaluation, Plan, Workload, plan_sizes

_LIMIT = 512


def _row(name: str, sizes: str, result: Evaluation, vllm: Evaluation) -> str:
    padding = f"{100 * (result.padding / vllm.padding - 1):+.0f} %" if vllm.padding else ""
    step = f"{100 * (result.step_ms / vllm.step_ms - 1):+.2f} %"
    cells = (
        name,
        sizes,
        f"{result.graphs}",
        f"{100 * result.padding:.2f} %",
        padding,
        f"{result.step_ms:.3f} ms",
        step,
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print a table of all traces."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("folder", type=Path)
    print("| steps | sizes | graphs | padding | to vLLM's | mean step | to vLLM's |\n|---|---|---|---|---|---|---|")
    for path in sorted(parser.parse_args().folder.glob("*.csv*")):
        name = path.name.partition(".")[0]
        requests = re.search(r"_(\d+)(?:_|$)", name)
        limit = min(_LIMIT, 2 * int(requests[1])) if requests else _LIMIT
        seen, unseen = Workload.from_trace(path).split()
        fixed = Plan.from_sizes("vllm", limit)
        vllm = fixed.evaluate(unseen)
        print(_row(f"{name}, {unseen.total:,.0f}", "vLLM's", vllm, vllm))
        for graphs in (len(fixed.sizes), (len(fixed.sizes) + 1) // 2):
            plan = plan_sizes(seen, max_graphs=graphs, max_size=limit)
            print(_row("", "plan", plan.evaluate(unseen), vllm))


if __name__ == "__main__":
    main()
