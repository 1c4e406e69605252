"""A simulated device: steps, replays and captures only take time on it, and graphs only hold bytes."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from ..backends.base import Graph
from ..call.signature import Signature
from ..capture.request import CaptureRequest, CaptureResult
from ..memory.entry import CUDAGraphEntry
from ..memory.foreign import ForeignPool
from ..memory.outputs import OutputRule, Outputs
from ..memory.proof import RowProof
from ..modes import EntryState
from ..plan.cost import CostModel
from ..plan.workload import Workload
from ..reasons import Reason

__all__ = ["SimulatedDevice", "TokenCount"]


class SimulatedDevice:
    """Runs, captures and compares steps as ``cost`` says. ``run`` is the callable for a ``Server``, and ``capture`` and
    ``verify`` are for its ``Capturer``. Not thread-safe."""

    def __init__(self, workload: Workload, cost: CostModel) -> None:
        self.now = 0.0
        """The time spent in steps, in milliseconds."""
        self.pool = _SimulatedPool()
        """The memory that all graphs share."""
        self._cost = cost
        self._eager_ms = dict(zip(workload.sizes.tolist(), cost.eager_ms.at(workload.sizes).tolist(), strict=True))
        self._outputs = Outputs(None, OutputRule(()), [], "static", self.pool)

    def run(self, tokens: int) -> None:
        """One eager step."""
        self.now += self._eager_ms[tokens]

    def capture(self, request: CaptureRequest) -> CaptureResult:
        """A graph, whose padding agrees with eager. The step itself runs only if the request keeps its effects.

        Raises ``ConfigError`` for a mode that the cost model does not know.
        """
        costs = self._cost.graphs(request.mode)
        curves = (costs.step_ms, costs.capture_ms, costs.graph_bytes, costs.pool_bytes)
        step_ms, capture_ms, graph_bytes, pool_bytes = (float(curve.at(request.size)) for curve in curves)
        entry = CUDAGraphEntry(
            descriptor=request.descriptor,
            mode=request.mode,
            key=request.key,
            size=request.size,
            graph=_SimulatedGraph(self, step_ms, round(graph_bytes), round(pool_bytes)),
            pool=request.pool,
            backend=request.backend,
            inputs=request.inputs,
            outputs=self._outputs,
            capture_time_ms=capture_ms,
        )
        entry.proof = RowProof(True)
        entry.compared.note(request.rows, request.size)
        self.pool.graphs.add(entry.graph)
        if request.keep_effects:
            request.call(request.values)
        return CaptureResult(None, entry, Reason.CAPTURED_NOW)

    def verify(self, request: CaptureRequest, entry: CUDAGraphEntry) -> CaptureResult:
        """A comparison with eager, which always agrees. It takes the time of both if the request keeps its effects."""
        if request.keep_effects:
            request.call(request.values)
            entry.graph.replay()
        entry.compared.note(request.rows, request.size)
        entry.state = EntryState.VERIFIED
        return CaptureResult(None, entry, Reason.VERIFIED_NOW)


class TokenCount(Signature):
    """The signature of simulated calls: the only argument is the number of tokens, which are the rows."""

    def __init__(self) -> None:
        self.inputs = []
        self.rows = 1
        self.native = None

    def match(self, values: Sequence[Any]) -> int:
        """The number of tokens; every call fits."""
        tokens: int = values[0]
        return tokens


class _SimulatedGraph(Graph):
    """A graph whose replay only takes time."""

    def __init__(self, device: SimulatedDevice, replay_ms: float, nbytes: int, pool_bytes: int) -> None:
        self._device = device
        self._replay_ms = replay_ms
        self._nbytes = nbytes
        self.pool_bytes = pool_bytes

    def replay(self) -> None:
        self._device.now += self._replay_ms

    def reset(self) -> None:
        self._nbytes = self.pool_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes


class _SimulatedPool(ForeignPool):
    """Memory as large as the largest of its graphs needs."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: WeakSet[Graph] = WeakSet()

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(list(self.graphs))

    def nbytes_of(self, graphs: Sequence[Graph]) -> int:
        return max((graph.pool_bytes for graph in graphs if isinstance(graph, _SimulatedGraph)), default=0)
