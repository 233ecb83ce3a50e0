"""snugfit: does a PyTorch training job fit, what is the fastest way that does, and running it exactly so."""

from snugfit.errors import BatchError as BatchError
from snugfit.errors import DeviceMemoryError as DeviceMemoryError
from snugfit.errors import InfeasibleError as InfeasibleError
from snugfit.errors import NonFiniteError as NonFiniteError
from snugfit.errors import PlanError as PlanError
from snugfit.errors import SnugfitError as SnugfitError
from snugfit.errors import UnsupportedError as UnsupportedError
from snugfit.hardware import devices as devices
from snugfit.jobs import Job as Job
from snugfit.jobs import Loss as Loss
from snugfit.jobs import LossScale as LossScale
from snugfit.jobs import Shared as Shared
from snugfit.memory.measuring import measure as measure
from snugfit.memory.reports import MemoryReport as MemoryReport
from snugfit.memory.tracing import estimate as estimate
from snugfit.memory.tracing import trace as trace
from snugfit.planning.search import PlanReport as PlanReport
from snugfit.planning.search import plan as plan
from snugfit.plans import Plan as Plan
from snugfit.plans import Segment as Segment
from snugfit.runs import train as train
from snugfit.training import checkpointing as checkpointing
from snugfit.training import precision as precision
from snugfit.training.build import build as build
from snugfit.training.counting import tokens as tokens
from snugfit.training.engine import Engine as Engine
from snugfit.training.recomputation import is_recomputing as is_recomputing
from snugfit.training.splitting import split as split
from snugfit.training.windows import StepResult as StepResult

__version__ = "0.1.0"
