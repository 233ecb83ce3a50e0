"""snugfit: does a PyTorch training job fit, what is the fastest way that does, and running it exactly so."""

from snugfit.errors import BatchError as BatchError
from snugfit.errors import DeviceMemoryError as DeviceMemoryError
from snugfit.errors import InfeasibleError as InfeasibleError
from snugfit.errors import NonFiniteError as NonFiniteError
from snugfit.errors import PlanError as PlanError
from snugfit.errors import SnugfitError as SnugfitError
from snugfit.errors import UnsupportedError as UnsupportedError
from snugfit.jobs import Job as Job
from snugfit.jobs import Loss as Loss
from snugfit.jobs import LossScale as LossScale
from snugfit.jobs import Shared as Shared
from snugfit.plans import Plan as Plan
from snugfit.plans import Segment as Segment

__version__ = "0.1.0"
