"""A way out in plain PyTorch: its own lines within those of the plan that its numbers rest on.

Entry points: ``lines``, and ``options`` and ``optimizer`` for what the job's own optimizer is called with. What a plan
comes to in code is ``script``'s; what a way adds or replaces is in its own file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from snugfit.planning.script import script
from snugfit.planning.ways.rows import Case
from snugfit.plans import Plan

_LOOP = "# for each batch"
"How the line begins that ends what is done once."
_LOADED = "plan = snugfit.Plan.load("
_NO_FILE = "# the file:"
HALF_WEIGHTS = """\
norms = (torch.nn.LayerNorm, torch.nn.GroupNorm)
for layer in model.modules():  # weights only: buffers and norms need their bits
    if not (isinstance(layer, norms) or hasattr(layer, "running_mean")):
        for p in layer.parameters(recurse=False):
            p.data = p.data.to(torch.{dtype})
"""
"A model whose weights have 16 bits, for autocast of that type, which casts its inputs."
_OF_AUTOCAST = "# autocast keeps what norms are given in fp32; snugfit's bf16-true, and the number, in bf16"
_INEXACT = "# its update rounds to the nearest bf16 number: what is below 2^-9 of a weight is lost"


def lines(
    case: Case,
    plan: Plan,
    once: Iterable[str],
    *,
    replaced: Mapping[str, Iterable[str]] | None = None,
    parameters: str = "",
    clips: bool = True,
    is_exact: bool = False,
) -> tuple[str, ...]:
    """The lines of a script.

    Args:
        case: The job that does not fit.
        plan: That the way's numbers rest on.
        once: The way's own lines, where model and optimizer are made.
        replaced: Lines of the plan's script that are others here.
        parameters: Whose gradients are clipped, where it is not the model.
        clips: Whether the norm of all gradients can be clipped.
        is_exact: Whether the way's own lines round the update of bf16 weights so that nothing is lost.
    """
    loop = case.loop if clips else replace(case.loop, max_grad_norm=None)
    is_low = plan.precision == "bf16-true"
    of_plan = script(_under_autocast(plan), case.device.kind, loop).pytorch
    weights = [*HALF_WEIGHTS.format(dtype="bfloat16").splitlines(), _OF_AUTOCAST] if is_low else []
    weights += [_INEXACT] if is_low and not is_exact else []
    found: list[str] = []
    for line in of_plan:
        if line.startswith(_LOOP):
            found += [*weights, *once]
        if line.startswith(_NO_FILE):
            continue
        if line.startswith(_LOADED):  # no plan was written
            line = _written(plan)
        if parameters:
            line = line.replace("clip_grad_norm_(model.parameters()", f"clip_grad_norm_({parameters}")
        found += (replaced or {}).get(line, (line,))
    return tuple(found)


def _under_autocast(plan: Plan) -> Plan:
    """The plan as its lines are: bf16 weights are converted by lines of their own."""
    plan = replace(plan, optimizer_impl="as-given")
    if plan.precision != "bf16-true":
        return plan
    return replace(plan, precision="bf16-mixed", gradient_dtype="float32", bf16_update="master-weights")


def options(case: Case) -> str:
    """What the job's optimizer is called with beside its parameters, behind a comma; dots where it is not known."""
    if not case.loop.optimizer:
        return ", lr=..."
    given = case.loop.arguments.partition(", ")[2]
    return f", {given}" if given else ""


def groups(case: Case) -> list[str]:
    """A line where one group of parameters stands for several."""
    several = case.loop.arguments.startswith("groups")
    return ["# your parameter groups become one here: give each parameter its group's options"] if several else []


def _written(plan: Plan) -> str:
    """A plan as code: what it recomputes is all that is read of it."""
    segments = ", ".join(f"snugfit.Segment({list(one.modules)}, {one.policy!r})" for one in plan.recompute)
    sizes = f"batch_size={plan.batch_size}, micro_batch_size={plan.micro_batch_size}"
    return f"plan = snugfit.Plan({sizes}, recompute=({segments},))"
