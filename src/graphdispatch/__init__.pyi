"""The public names; ``__init__.py`` reads them from here. Those of ``engines`` are found, but not listed."""

from . import engines as engines
from . import errors as errors
from . import metrics as metrics
from . import plan as plan
from .api.graphed import Graphed as Graphed
from .api.graphed import attach as attach
from .api.graphed import graphed as graphed
from .auditing.audit import audit as audit
from .auditing.result import Audit as Audit
from .config import CUDAGraphOptions as CUDAGraphOptions
from .engines import *  # noqa: F403
from .errors import CaptureError as CaptureError
from .errors import ConfigError as ConfigError
from .errors import FallbackError as FallbackError
from .errors import GraphDispatchError as GraphDispatchError
from .errors import ReplayError as ReplayError
from .errors import StaleOutputError as StaleOutputError
from .modes import CUDAGraphMode as CUDAGraphMode
from .proof.breaks import eager_break as eager_break
from .proof.breaks import remove_eager_break as remove_eager_break
from .proof.rows.custom import row_rule as row_rule
from .reasons import Reason as Reason
from .runtime.decide import Decision as Decision
from .runtime.rules import Dim as Dim
from .runtime.rules import Pad as Pad

__version__: str
