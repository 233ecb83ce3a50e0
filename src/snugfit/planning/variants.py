"""What changes in a chain with another implementation of the optimizer, or with a loss in chunks.

Entry points: ``Updates`` and ``Heads``. Both are measured by small traces of their own and put in the place of the part
of the chain that they change: the update behind the micro-batches, and the last piece of the model with the loss.
"""

from dataclasses import dataclass, field, replace

from snugfit.errors import PlanError, UnsupportedError
from snugfit.hardware import Device
from snugfit.jobs import Job
from snugfit.planning.chain import NOTHING, Option
from snugfit.planning.cutting import Measures, cut
from snugfit.planning.errands import Errand, errand
from snugfit.planning.families import Chain, measured, update
from snugfit.planning.scaling import NotAffineError, ScaledTrace
from snugfit.plans import Plan

_WHOLE_OF_ONE = ((0,), (0,))
_ONE_MICRO_BATCH = ((0,),)


@dataclass(slots=True)
class Updates:
    """Updates by other implementations of the optimizer."""

    job: Job
    device: Device
    _known: dict[tuple[str, str], tuple[int, int] | None] = field(default_factory=dict)
    _begun: dict[tuple[str, str], Errand[tuple[int, int] | None]] = field(default_factory=dict)

    def begin(self, plan: Plan) -> None:
        """Begin to measure what ``of`` will be asked for, beside other traces."""
        self._begun[plan.precision, plan.optimizer_impl] = errand(lambda: self._measured(plan))

    def of(self, plan: Plan) -> tuple[int, int] | None:
        """Most bytes alive during the update of a plan and its nanoseconds; None where its optimizer has no such form.

        Measured at the first micro-batch size that is asked for: neither depends on it.
        """
        key = plan.precision, plan.optimizer_impl
        if key not in self._known:
            begun = self._begun.pop(key, None)
            self._known[key] = self._measured(plan) if begun is None else begun.result()
        return self._known[key]

    def _measured(self, plan: Plan) -> tuple[int, int] | None:
        size = plan.micro_batch_size
        plain = replace(plan, recompute=(), loss_chunks=1)
        try:
            trace = ScaledTrace.record(self.job, plain, self.device, (size, size), _WHOLE_OF_ONE)
        except (PlanError, UnsupportedError):
            return None
        return update(trace, size)

    def put_in(self, chain: Chain, plan: Plan) -> Chain:
        """The chain with the update of a plan whose optimizer has that form."""
        found = self.of(plan)
        assert found is not None, "asked for before it is planned with"
        floor, update_ns = found
        return replace(chain, floor_bytes=floor, update_ns=update_ns)


@dataclass(slots=True)
class Heads:
    """The last piece of the model, loss included, by the number of chunks of the loss."""

    job: Job
    device: Device
    names: tuple[str, ...]
    pair: tuple[int, int]
    "Micro-batch sizes of its traces."
    _known: dict[tuple[str, int], ScaledTrace | None] = field(default_factory=dict)

    def of(self, plan: Plan) -> Measures | None:
        """The head under a plan at its micro-batch size; None where the loss is not computed in chunks."""
        key = plan.precision, plan.loss_chunks
        if key not in self._known:
            plain = replace(plan, micro_batch_size=self.pair[0], recompute=())
            try:
                self._known[key] = ScaledTrace.record(self.job, plain, self.device, self.pair, _ONE_MICRO_BATCH)
            except (PlanError, UnsupportedError, NotAffineError):
                self._known[key] = None
        trace = self._known[key]
        if trace is None:
            return None
        elements = cut(trace.base.recording, trace.steps[-1], self.names)
        return measured(trace, elements, plan.micro_batch_size)[-1]

    def put_in(self, chain: Chain, plan: Plan, whole: Measures) -> Chain:
        """The chain with the head of a plan whose loss is in chunks.

        Args:
            chain: With the loss as a whole.
            plan: With its number of chunks.
            whole: The head of the same traces with the loss as a whole.
        """
        found = self.of(plan)
        assert found is not None, "asked for before it is planned with"
        last = chain.units[-1]
        plain = last.options[0]
        head = Option(
            name=NOTHING,
            kept_bytes=found.kept_bytes,
            forward_bytes=found.forward_bytes,
            # Gradients of its weights that are there already from the second micro-batch on are left out as there.
            backward_bytes=max(plain.backward_bytes + found.backward_bytes - whole.backward_bytes, found.kept_bytes),
            extra_ns=0,
        )
        more_ns = found.forward_ns + found.backward_ns - whole.forward_ns - whole.backward_ns
        return replace(
            chain,
            units=(*chain.units[:-1], replace(last, options=(head,))),
            plain_ns=max(chain.plain_ns + more_ns, 1),
        )
