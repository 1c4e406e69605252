"""``make package``: builds the wheel and the sdist, installs each into an empty environment, and uses them there.

It needs no environment of its own: run it with any Python that has venv and pip. torch comes from the constraints.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = str(ROOT / "constraints.txt")

SERVE = """
import torch, graphdispatch as gd
serve = gd.graphed(torch.nn.Linear(4, 2).eval(), dynamic={"input": 0}, max_size=4)
print(serve.prewarm(torch.randn(4, 4)))
with torch.no_grad():
    assert torch.equal(serve(torch.randn(4, 4)[:3]).isfinite().all(), torch.tensor(True))
assert serve.stats.hits == 1, serve.stats
assert "<svg" in serve.report().html()
assert "site-packages" in gd.__file__ and len(gd.__all__) == 25
"""
"""What anyone does first."""

EXTRAS = {
    "cli": "from graphdispatch.cli import main; raise SystemExit(main(['plan', '--max-graphs', '4']))",
    "metrics": SERVE + "assert len(list(gd.metrics.PrometheusCollector(serve).collect())) == 12",
    "otel": SERVE + "from opentelemetry.sdk.metrics import MeterProvider; "
    "from opentelemetry.sdk.metrics.export import InMemoryMetricReader; reader = InMemoryMetricReader(); "
    "metrics = gd.metrics.OpenTelemetryMetrics(serve, meter=MeterProvider([reader]).get_meter('served')); "
    "assert 'graphdispatch.hits' in reader.get_metrics_data().to_json()",
    # No thread of pyarrow is left, since one of them may abort a process that ends.
    "parquet": "import os, pyarrow, pyarrow.parquet as pq; from graphdispatch.plan import Workload; "
    "pq.write_table(pyarrow.table({'num_tokens': [1, 2, 2]}), 'steps.parquet'); "
    "before = set(os.listdir('/proc/self/task')) if os.path.exists('/proc') else set(); "
    "assert Workload.from_trace('steps.parquet').total == 3; "
    "assert not before or before == set(os.listdir('/proc/self/task'))",
}
"""What an extra is for, with nothing installed besides it. The larger ones have tests in environments of their own."""


def run(*command: str, fails: bool = False, **environment: str) -> str:
    """Run a command away from the sources; returns what it printed, and ends the check if it fails, or does not."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        command, env=clean | environment, cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False
    )
    if (done.returncode != 0) != fails:
        sys.exit(f"{' '.join(command)[:200]}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def environment(folder: Path) -> str:
    """An empty environment; returns its Python."""
    run(sys.executable, "-m", "venv", str(folder))
    return str(folder / "bin" / "python")


def main() -> None:
    """Build, install, use; any failure ends it with exit code 1."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = environment(folder / "venv")
        pip = (python, "-m", "pip", "--disable-pip-version-check", "-q")
        run(*pip, "install", "build")
        run(python, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT))
        (wheel,), (sdist,) = folder.glob("dist/*.whl"), folder.glob("dist/*.tar.gz")
        print(f"built {wheel.name} and {sdist.name}")
        # pip asks is_zipfile before it looks at the name, and one build in 65,000 has a zip's four bytes near its end.
        if zipfile.is_zipfile(sdist):
            sys.exit(f"pip takes {sdist.name} for a zip, by chance: change a byte of any file in it, and build again")

        python = environment(folder / "empty")
        pip = (python, "-m", "pip", "--disable-pip-version-check", "-q")
        run(*pip, "install", "--no-deps", str(wheel))
        printed = run(python, "-m", "graphdispatch", "doctor", fails=True)
        assert "wrong: torch: pip install --upgrade 'torch>=2.11'" in printed, printed
        print("without torch, doctor says so")
        run(*pip, "install", "--constraint", CONSTRAINTS, "torch")
        for built in (wheel, sdist):
            run(*pip, "install", "--constraint", CONSTRAINTS, str(built))
            run(python, "-c", SERVE)
            assert run(python, "-m", "graphdispatch", "doctor").endswith("all is well\n")
            print(f"{built.suffix} serves, and doctor is content")
            if built is wheel:
                run(*pip, "uninstall", "--yes", "graphdispatch")
        for extra, use in EXTRAS.items():
            alone = folder / extra
            listed = run(python, "-c", f"{NEEDS}print(*needs('{extra}'))").split()
            run(*pip, "install", "--constraint", CONSTRAINTS, "--target", str(alone), *listed)
            run(python, "-c", use, PYTHONPATH=str(alone))
            print(f"extra {extra} alone ({', '.join(listed)}) does its work")


NEEDS = """
from importlib.metadata import requires
import re
def needs(extra):
    lines = requires("graphdispatch")
    return [re.match(r"[\\w.-]+", line)[0] for line in lines if re.search(f"extra == ['\\"]{extra}['\\"]", line)]
"""

if __name__ == "__main__":
    main()
