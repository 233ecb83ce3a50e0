"""Optimizer state on the host, and gradients too: the card keeps weights and activations, PCIe and the host pay.

Entry point: ``row``. The lines are torchao's optimizer where that is enough: it copies gradients before they are
clipped, overwrites them on the host if they leave the card, and updates weights in their own type. Else they are hooks
that sum on the host, where the weights are kept in fp32.
"""

from snugfit import sizes
from snugfit.memory.traces import Trace
from snugfit.planning import links
from snugfit.planning.ways import by_hand, rows
from snugfit.planning.ways.fused_backward import gradients_used_at_once
from snugfit.planning.ways.recorded_step import RecordedStep
from snugfit.planning.ways.rewriting import Rewriting
from snugfit.planning.ways.rows import Case, WayOut

CODE = """\
from torchao.optim import CPUOffloadOptimizer
optimizer = CPUOffloadOptimizer({parameters}, {name}{options})"""

CODE_SUMS = """\
host = {{p: p.detach().float().cpu() for p in model.parameters() if p.requires_grad}}
def leave(p):
    gradient, p.grad = p.grad.to("cpu", torch.float32), None
    host[p].grad = gradient if host[p].grad is None else host[p].grad.add_(gradient)
for p in host:
    p.register_post_accumulate_grad_hook(leave)
optimizer = {name}(host.values(){options})"""

_BACK = ("for p, updated in host.items():", "    p.data.copy_(updated)")
"Behind the update on the host."

_WAITING = "its time is that of copies that run beside backward; in these lines backward waits for them"


_LEAST = 4096
"Elements below which torchao leaves a parameter's update on the card."

_UPDATE_BYTES = 28
"Read and written on the host per element by fp32 Adam: gradient, weight and two moments."


def row(case: Case) -> WayOut:
    """The row of this way."""
    if case.device.kind == "cpu":
        return rows.unknown(case, "host-offload", "the device is the host: there is nowhere else to keep state")
    step, trace = case.changed(lambda _: 0, lambda step: needs(step, gradients=True))
    kept = needs(step, gradients=False)  # where there is room, gradients stay: it is simpler, and sums on the card
    gradients = not case.holds(step, kept)
    trace = trace if gradients else kept
    total, added = seconds(step)
    sums = gradients or case.loop.max_grad_norm is not None or step.plan.precision == "bf16-true"
    code = _code(case, step, sums=sums)
    what = "optimizer state and gradients" if gradients else "optimizer state"
    lacking = () if sums else rows.installed("torchao")[1]
    return rows.row(
        case,
        "host-offload",
        trace,
        change=f"{what} on the host{rows.and_bfloat16(case, step)}",
        code="\n".join(code),
        by_hand=by_hand.lines(
            case,
            step.plan,
            [*(by_hand.groups(case) if sums else ()), *code],
            replaced=_updates(*_BACK) if sums else {},
            parameters="host.values()" if sums else "",
            is_exact=sums,
        ),
        seconds=total,
        plan=step.plan,
        notes=(
            *lacking,
            f"the host holds {sizes.text(host_bytes(step))} for it",
            f"{links.to_host(case.device).name} and the host's update add {added:.2f} s to each update",
            *((_WAITING,) if sums else ()),
        ),
    )


def _code(case: Case, step: RecordedStep, *, sums: bool) -> list[str]:
    """The lines that make the optimizer."""
    text = CODE_SUMS if sums else CODE
    return text.format(
        name=case.loop.optimizer or rows.optimizer_of(step),
        parameters="groups" if case.loop.arguments.startswith("groups") else "model.parameters()",
        options=by_hand.options(case),
    ).splitlines()


def _updates(*behind: str) -> dict[str, tuple[str, ...]]:
    """The lines of an update with more behind them, scaled or not."""
    return {line: (line, *behind) for line in ("optimizer.step()", "scaler.step(optimizer)")}


def needs(step: RecordedStep, *, gradients: bool) -> Trace:
    """The step with its optimizer's state on the host.

    Args:
        step: As it is.
        gradients: Whether gradients leave the card too, each when the next one is there.
    """
    changed = Rewriting(step.trace.recording)
    for index, birth in [*changed.born(phase="optimizer")]:
        if birth.category != "optimizer" or birth.num_bytes >= _LEAST * step.weight_itemsize:
            changed.remove(index)
    sentence = "the update needs nothing on the card: it is made on the host, a copy brings the weights back"
    if not gradients:
        return step.with_recording(changed.done(), sentence)
    for _ in gradients_used_at_once(step, changed):
        pass
    return step.with_recording(changed.done(), sentence, "a gradient leaves the card when the next one is there")


def host_bytes(step: RecordedStep) -> int:
    """What the host holds: fp32 weights, gradients and two moments."""
    return 16 * _num_trained(step)


def seconds(step: RecordedStep) -> tuple[float, float]:
    """Modelled time of an update, and how much of it PCIe and the host add to forward and backward.

    Gradients leave during backward, in every micro-step; only what takes longer than backward is added. The host
    updates a weight while others travel back.
    """
    phases = step.seconds()
    link, num_trained = links.to_host(step.device), _num_trained(step)
    leaving = link.seconds(step.gradient_itemsize * num_trained) * step.plan.accumulation_steps
    returning = link.seconds(step.weight_itemsize * num_trained)
    updating = _UPDATE_BYTES * num_trained / links.HOST_BANDWIDTH
    added = max(leaving - phases.get("backward", 0.0), 0.0) + max(updating, returning)
    return sum(phases.values()) - phases.get("optimizer", 0.0) + added, added


def _num_trained(step: RecordedStep) -> int:
    return sum(weight.numel for weight in step.trained)
