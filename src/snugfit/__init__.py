"""snugfit: does a PyTorch training job fit, what is the fastest way that does, and running it exactly so."""

from snugfit.errors import (
    BatchError,
    DeviceMemoryError,
    InfeasibleError,
    NonFiniteError,
    PlanError,
    SnugfitError,
    UnsupportedError,
)
from snugfit.hardware import devices
from snugfit.jobs import Job, Loss, LossScale, Shared
from snugfit.memory.measuring import measure
from snugfit.memory.reports import MemoryReport
from snugfit.memory.steps.opaque import opaque
from snugfit.memory.tracing import estimate, trace
from snugfit.planning.plan_report import PlanReport
from snugfit.planning.search import plan
from snugfit.plans import Plan, Segment
from snugfit.runs import train
from snugfit.training import checkpointing, gradient_noise, learning_rate, norms, precision
from snugfit.training.build import build
from snugfit.training.checking.check import CheckReport, Hazard, check
from snugfit.training.chunked_loss import chunked_cross_entropy
from snugfit.training.counting import tokens
from snugfit.training.diagnosing.diagnose import diagnose
from snugfit.training.diagnosing.diagnosis import Diagnosis
from snugfit.training.engine import Engine
from snugfit.training.recomputation import is_recomputing
from snugfit.training.splitting import split
from snugfit.training.windows import StepResult

__all__ = [
    "BatchError",
    "CheckReport",
    "DeviceMemoryError",
    "Diagnosis",
    "Engine",
    "Hazard",
    "InfeasibleError",
    "Job",
    "Loss",
    "LossScale",
    "MemoryReport",
    "NonFiniteError",
    "Plan",
    "PlanError",
    "PlanReport",
    "Segment",
    "Shared",
    "SnugfitError",
    "StepResult",
    "UnsupportedError",
    "build",
    "check",
    "checkpointing",
    "chunked_cross_entropy",
    "devices",
    "diagnose",
    "estimate",
    "gradient_noise",
    "is_recomputing",
    "learning_rate",
    "measure",
    "norms",
    "opaque",
    "plan",
    "precision",
    "split",
    "tokens",
    "trace",
    "train",
]
__version__ = "0.1.0"
