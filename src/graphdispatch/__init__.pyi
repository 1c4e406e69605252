"""The public names, for type checkers; ``__init__.py`` finds them at run time."""

from .adaptive_wrapper import AdaptiveCUDAGraphWrapper as AdaptiveCUDAGraphWrapper
from .autoplan import AutoPlan as AutoPlan
from .autoplan import IdleAction as IdleAction
from .autoplan import IdleReport as IdleReport
from .backends import (
    available_backends as available_backends,
)
from .backends import (
    get_backend as get_backend,
)
from .backends import (
    register_backend as register_backend,
)
from .cache.budget import MemoryBudget as MemoryBudget
from .cache.eviction import EvictionPolicy as EvictionPolicy
from .cache.registry import CUDAGraphRegistry as CUDAGraphRegistry
from .calibration import Calibration as Calibration
from .calibration import calibrate as calibrate
from .capture.breaks import eager_break as eager_break
from .capture.breaks import remove_eager_break as remove_eager_break
from .capture.context import cudagraph_context as cudagraph_context
from .capture.entry import CUDAGraphEntry as CUDAGraphEntry
from .capture.entry import GraphEntry as GraphEntry
from .capture.outputs import OutputView as OutputView
from .capture.padding import Pad as Pad
from .capture.piecewise import BreakFigures as BreakFigures
from .capture.piecewise import break_figures as break_figures
from .config import CUDAGraphConfig as CUDAGraphConfig
from .config import CUDAGraphOptions as CUDAGraphOptions
from .descriptors import (
    BatchDescriptor as BatchDescriptor,
)
from .descriptors import (
    DispatchKey as DispatchKey,
)
from .descriptors import (
    create_dispatch_key as create_dispatch_key,
)
from .descriptors import (
    get_padded_key as get_padded_key,
)
from .dispatch.adaptive import AdaptiveDispatchPolicy as AdaptiveDispatchPolicy
from .dispatch.composite import CompositeDispatcher as CompositeDispatcher
from .dispatch.decision import Decision as Decision
from .dispatch.dispatcher import CudagraphDispatcher as CudagraphDispatcher
from .dispatch.keys import CudagraphKeyDispatcher as CudagraphKeyDispatcher
from .dispatch.lanes import LaneResult as LaneResult
from .dispatch.lint import LintCode as LintCode
from .dispatch.lint import LintFinding as LintFinding
from .dispatch.lint import lint as lint
from .dispatch.planned import planned_dispatcher as planned_dispatcher
from .dispatch.policies import DefaultDispatchPolicy as DefaultDispatchPolicy
from .dispatch.policies import DispatchPolicy as DispatchPolicy
from .dispatch.prediction import Prewarmer as Prewarmer
from .dispatch.prediction import SizePredictor as SizePredictor
from .dispatch.ranks import Agreement as Agreement
from .dispatch.ranks import RankConsensus as RankConsensus
from .dispatch.ranks import RankVote as RankVote
from .dispatch.streams import StreamDispatcher as StreamDispatcher
from .dispatch.support import AttentionSupport as AttentionSupport
from .dispatch.support import resolve_cudagraph_mode as resolve_cudagraph_mode
from .errors import (
    BackendError as BackendError,
)
from .errors import (
    CaptureError as CaptureError,
)
from .errors import (
    ConfigError as ConfigError,
)
from .errors import ConsensusError as ConsensusError
from .errors import DeviceLostError as DeviceLostError
from .errors import (
    FallbackError as FallbackError,
)
from .errors import (
    GraphDispatchError as GraphDispatchError,
)
from .errors import (
    GuardError as GuardError,
)
from .errors import (
    IntegrityError as IntegrityError,
)
from .errors import (
    ReplayError as ReplayError,
)
from .errors import (
    StaleOutputError as StaleOutputError,
)
from .errors import (
    VerificationError as VerificationError,
)
from .graphed_callable import Graphed as Graphed
from .graphed_callable import graphed as graphed
from .integrations.compile import piecewise_backend as piecewise_backend
from .manager import CUDAGraphManager as CUDAGraphManager
from .modes import CUDAGraphMode as CUDAGraphMode
from .modes import DispatchMode as DispatchMode
from .modes import EntryState as EntryState
from .plan.compare import Comparison as Comparison
from .plan.compare import compare as compare
from .plan.cost import CostModel as CostModel
from .plan.plan import Evaluation as Evaluation
from .plan.plan import Plan as Plan
from .plan.planner import plan_capture_sizes as plan_capture_sizes
from .plan.prior import Prior as Prior
from .plan.profile import Profile as Profile
from .plan.scheduler import SchedulerModel as SchedulerModel
from .plan.workload import Workload as Workload
from .reasons import Reason as Reason
from .report import Report as Report
from .report import callable_report as callable_report
from .report import plan_report as plan_report
from .simulator import SimulationResult as SimulationResult
from .simulator import simulate as simulate
from .sizes import get_cudagraph_sizes as get_cudagraph_sizes
from .sizes import ladder as ladder
from .stats import CUDAGraphStats as CUDAGraphStats
from .stats import DispatchStats as DispatchStats
from .testing.mock import MockCUDAGraph as MockCUDAGraph
from .wrapper import CUDAGraphWrapper as CUDAGraphWrapper

__version__: str
