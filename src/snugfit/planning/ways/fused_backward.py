"""The optimizer's step inside of backward: each gradient is used and dropped as soon as it is there.

Entry point: ``row``. It takes windows of one micro-batch, and neither clips the norm of all gradients nor skips an
update that is not finite. snugfit's engine refuses such hooks; the lines for a loop of one's own are ``CODE``.
"""

from collections.abc import Iterator
from dataclasses import replace

from snugfit.memory.traces import Trace
from snugfit.planning.ways import rows
from snugfit.planning.ways.recorded_step import RecordedStep, made
from snugfit.planning.ways.rewriting import Rewriting
from snugfit.planning.ways.rows import Case, WayOut
from snugfit.plans import Plan

CODE = """\
optimizers = {{p: torch.optim.{name}([p], lr=...) for p in model.parameters() if p.requires_grad}}
def update(p):
    optimizers[p].step()
    p.grad = None
for p in optimizers:
    p.register_post_accumulate_grad_hook(update)
# one loss.backward() per batch makes the update: no optimizer.step(), no accumulation, no clipping"""

_TEMPORARIES = 2
"Tensors of a parameter's size beside its gradient, while Adam updates it."


def row(case: Case) -> WayOut:
    """The row of this way."""
    step, trace = case.changed(lambda _: 8, needs)
    plan = step.plan
    notes = ["one micro-batch per update", "no clipping by the norm of all gradients, no skipping of a bad update"]
    is_least = plan.accumulation_steps > 1
    if plan.accumulation_steps > 1 and not case.holds(step, trace):
        notes.insert(0, f"already with {plan.micro_batch_size} of the {plan.samples_per_rank} samples at once")
    elif plan.accumulation_steps > 1:
        whole = replace(plan, micro_batch_size=plan.samples_per_rank)
        trace = _with_activations_of(step, trace, whole)
        if case.holds(step, trace):
            step, is_least = case.step(whole), False
            trace = needs(step)
        else:
            notes.insert(0, "of the whole batch only what is saved for backward is counted")
        plan = whole
    return rows.row(
        case,
        "fused-backward",
        trace,
        change=f"each gradient is used as soon as it is there, and never all are alive{rows.and_bfloat16(case, step)}",
        code=CODE.format(name=rows.optimizer_of(step)),
        seconds=sum(step.seconds().values()),
        plan=plan,
        is_least=is_least,
        notes=tuple(notes),
    )


def needs(step: RecordedStep) -> Trace:
    """The step with its updates made in backward; its windows are of one micro-batch.

    A gradient lives until the next one is there. While it is used, two more tensors of its size are (the square root
    that Adam divides by, before and after its correction).
    """
    changed = Rewriting(step.trace.recording)
    for index, birth in [*changed.born(phase="optimizer")]:
        if birth.category != "optimizer":
            changed.remove(index)
    for index, until in gradients_used_at_once(step, changed):
        num_bytes = step.trace.recording.births[index].num_bytes
        for _ in range(_TEMPORARIES):
            changed.add(made(num_bytes, "temporary", "backward", "update"), changed.position_of(index) + 1, until)
    return step.with_recording(changed.done(), "each gradient is dropped when the next one is there")


def _with_activations_of(step: RecordedStep, trace: Trace, whole: Plan) -> Trace:
    """The least that a changed step needs for the whole batch at once: what is saved for backward grows with it."""
    changed = Rewriting(trace.recording)
    for index, birth in [*changed.born(category="saved", phase="forward")]:
        changed.resize(index, birth.num_bytes * whole.micro_batch_size // step.plan.micro_batch_size)
    return step.with_recording(changed.done())


def gradients_used_at_once(step: RecordedStep, changed: Rewriting) -> Iterator[tuple[int, int]]:
    """Let each gradient die when the next one is there, or its micro-step is over; yields gradients and these ends."""
    gradients = [index for index, _ in changed.born(category="gradient", phase="backward")]
    for index, following in zip(gradients, [*gradients[1:], None], strict=True):
        until = step.end_of_micro_step(changed.position_of(index))
        if following is not None:
            until = min(until, changed.position_of(following) + 1)
        changed.end_at(index, until)
        yield index, until
