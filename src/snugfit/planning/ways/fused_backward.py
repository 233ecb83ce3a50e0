"""The optimizer's step inside of backward: each gradient is used and dropped as soon as it is there.

Entry point: ``row``. It takes windows of one micro-batch, and neither clips the norm of all gradients nor skips an
update that is not finite. snugfit's engine refuses such hooks; the lines for a loop of one's own are ``CODE``.
"""

from collections.abc import Iterator
from dataclasses import replace

from snugfit.memory.traces import Trace
from snugfit.planning.ways import by_hand, rows
from snugfit.planning.ways.recorded_step import RecordedStep, made
from snugfit.planning.ways.rewriting import Rewriting
from snugfit.planning.ways.rows import Case, WayOut
from snugfit.plans import Plan

CODE = """\
# loss.backward() makes the update: no optimizer.step(), no accumulation, no clipping
trained = [p for p in model.parameters() if p.requires_grad]
optimizers = {{p: {name}([p]{options}) for p in trained}}
def update(p):
    optimizers[p].step()
    p.grad = None
for p in trained:
    p.register_post_accumulate_grad_hook(update)"""

CODE_BFLOAT16 = """\
# loss.backward() makes the update: no optimizer.step(), no accumulation, no clipping
def rounded(wide):  # to bf16, up or down at random: to the nearest, small updates would be lost
    bits = wide.view(torch.int32)
    bits = (bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)
    return bits.view(torch.float32).bfloat16()
trained = [p for p in model.parameters() if p.requires_grad]
wide = {{p: torch.empty(0, device=p.device) for p in trained}}  # fp32, while p is updated
optimizers = {{p: {name}([wide[p]]{options}) for p in trained}}
def update(p):
    wide[p].data = p.detach().float()
    wide[p].grad, p.grad = p.grad.float(), None
    optimizers[p].step()
    p.data.copy_(rounded(wide[p]))
    wide[p].grad, wide[p].data = None, torch.empty(0, device=p.device)
for p in trained:
    p.register_post_accumulate_grad_hook(update)"""

_TEMPORARIES = 2
"Tensors of a parameter's size beside its gradient, while Adam updates it."
_TEMPORARIES_OF_BFLOAT16 = 4 * 2
"The same and fp32 forms of weight and gradient, each twice as large as the bf16 gradient."


_SCHEDULERS = ("for scheduler in schedulers:  # one for each of the optimizers", "    scheduler.step()")


def row(case: Case) -> WayOut:
    """The row of this way."""
    if case.plan.precision == "16-mixed":
        return rows.unknown(case, "fused-backward", "fp16 takes a loss scale, and a bad update could not be skipped")
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
    of_bfloat16 = plan.precision == "bf16-true"
    code = (CODE_BFLOAT16 if of_bfloat16 else CODE).format(
        name=case.loop.optimizer or rows.optimizer_of(step), options=by_hand.options(case)
    )
    return rows.row(
        case,
        "fused-backward",
        trace,
        change=f"each gradient is used as soon as it is there, and never all are alive{rows.and_bfloat16(case, step)}",
        code=code,
        by_hand=by_hand.lines(
            case,
            plan,
            [*by_hand.groups(case), *code.splitlines()],
            replaced={"optimizer.step()": (), "optimizer.zero_grad()": (), "scheduler.step()": _SCHEDULERS},
            clips=False,
            is_exact=of_bfloat16,
        ),
        seconds=sum(step.seconds().values()),
        plan=plan,
        is_least=is_least,
        notes=tuple(notes),
    )


def needs(step: RecordedStep) -> Trace:
    """The step with its updates made in backward; its windows are of one micro-batch.

    A gradient lives until the next one is there. While it is used, two more tensors of its size are (the square root
    that Adam divides by, before and after its correction); of bf16 weights the update is made in fp32.
    """
    is_low = step.plan.precision == "bf16-true" and step.gradient_itemsize == 2
    changed = Rewriting(step.trace.recording)
    for index, birth in [*changed.born(phase="optimizer")]:
        if birth.category != "optimizer":
            changed.remove(index)
    for index, until in gradients_used_at_once(step, changed):
        num_bytes = step.trace.recording.births[index].num_bytes
        for _ in range(_TEMPORARIES_OF_BFLOAT16 if is_low else _TEMPORARIES):
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
