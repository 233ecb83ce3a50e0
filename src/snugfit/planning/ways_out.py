"""When nothing fits: five ways to change the job or to spread it, each with its own memory and time.

Entry points: ``ways_out``, ``sentences`` and ``check_names``. All numbers are modelled. Which way is taken is the
user's choice: each changes more than a plan does, what is trained, how its state is rounded, or what machines it takes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from torch import nn

from snugfit import hardware, sizes
from snugfit.errors import InfeasibleError, PlanError, SnugfitError
from snugfit.jobs import Job
from snugfit.memory import tracing
from snugfit.planning.errands import errand
from snugfit.planning.ways import eight_bit, fsdp, fused_backward, host_offload, lora, rows
from snugfit.planning.ways.rows import Case
from snugfit.planning.ways.rows import WayOut as WayOut
from snugfit.plans import Plan, nearest

_WAYS: dict[str, Callable[[Case], WayOut]] = {
    "8bit-optimizer": eight_bit.row,
    "fused-backward": fused_backward.row,
    "host-offload": host_offload.row,
    "lora": lora.row,
    "fsdp": fsdp.row,
}
_LONGEST_REASON = 160
NAMES = tuple(_WAYS)
"The ways, those that change least first."
RUN = ("8bit-optimizer", "lora")
"Those that snugfit plans and runs itself; of the others it prints the lines."
OFFER = (
    f"A change of the job, if nothing fits. snugfit plans and runs {' and '.join(RUN)} itself; of "
    f"{', '.join(name for name in NAMES if name not in RUN)} it prints the lines to do by hand."
)
"What allowing one means, for the help of a command."


def ways_out(
    job: Job,
    plan: Plan,
    device: hardware.Device,
    budget_bytes: int,
    *,
    allow: Collection[str] | None = None,
    seconds: Callable[[], float] | None = None,
    model: nn.Module | None = None,
    is_planned_next: bool = False,
    runs_in_half: bool = True,
    is_precision_given: bool = False,
) -> tuple[WayOut, ...]:
    """Work out what each way out would need and cost, and return the rows: what fits first, then the cheapest.

    Cheap is what takes least time on all its cards together; among equals, what changes least. The micro-batch size
    and what is recomputed stay those of the plan. Where weights and gradients alone exceed the budget, a way is worked
    out with both in bf16, if the device is fast at it.

    Args:
        job: What is trained.
        plan: The smallest plan that did not fit.
        device: What it is planned for.
        budget_bytes: What peak, context and margin of one card may take together.
        allow: Names of the ways that are wanted; None means all.
        seconds: Gives the modelled seconds of an update under that plan, and is called when all ways are worked out;
            None: those of the job as it is traced here.
        model: The job's model, data or not; None: it is built without data.
        is_planned_next: Whether a changed job is planned next, which tells whether it can be.
        runs_in_half: Whether the job's step runs in 16-bit types, as far as is known.
        is_precision_given: Whether the user has said in which precision it is to run.

    Raises:
        PlanError: An unknown name.
    """
    check_names(allow or ())
    model = tracing.skeleton(job) if model is None else model
    case = Case(
        job,
        plan,
        device,
        budget_bytes,
        model,
        is_planned_next=is_planned_next,
        runs_in_half=runs_in_half,
        is_precision_given=is_precision_given,
    )
    wanted = [name for name in NAMES if allow is None or name in allow]
    # Beside the others what holds no job, which would not come back; here all of it if its traces are to tell the time.
    apart = [name for name in wanted if name not in RUN and seconds is not None]
    with tracing.collector_off():
        beside = errand(lambda: [_worked_out(case, name) for name in apart]) if apart else None
        found = [_worked_out(case, name) for name in wanted if name not in apart]
        found += [] if beside is None else beside.result()
    own = case.seconds() if seconds is None else seconds()
    timed = [
        row if row.step_time_s is None or not own else replace(row, relative_time=row.step_time_s / own)
        for row in found
    ]
    return tuple(sorted(timed, key=_by_cost))


def check_names(allow: Iterable[str]) -> None:
    """Check the names of changes that may be made.

    Raises:
        PlanError: An unknown name, with the one that was probably meant.
    """
    for name in allow:
        if name not in NAMES:
            raise PlanError(
                "unknown change of the job",
                got=f"allow={name!r}",
                expected=" | ".join(map(repr, NAMES)),
                hint=f"choose for example {nearest(str(name), NAMES)!r}",
            )


def sentences(ways: Iterable[WayOut]) -> list[str]:
    """A line for each way, with its numbers, for a message; first what their times are relative to.

    Of all ways, more cards have none where even the most of them do not do.
    """
    ways, lines = tuple(ways), []
    if len(ways) == len(NAMES):
        ways = tuple(way for way in ways if way.name != "fsdp" or way.fits or way.memory is None)
    if any(way.relative_time is not None for way in ways):
        lines.append("other ways, with times relative to the smallest candidate, which does not fit:")
    for way in ways:
        if way.memory is None:
            lines.append(f"{way.name}: {_short(way.notes[0])}")
            continue
        verdict = "fits" if way.fits else "does not fit"
        why = f", {way.notes[0]}" if way.is_least else ""
        lines.append(f"{way.name}: {verdict}, {numbers(way)}{why}: {way.change}{_to_type(way)}")
    return lines


def refusal(error: InfeasibleError, allow: Collection[str]) -> InfeasibleError:
    """The error where changes are allowed that would do, and none of them is one that snugfit makes here.

    Args:
        error: That nothing fits, with the ways that are allowed.
        allow: Their names.
    """
    fitting = [way for way in error.ways if way.name in allow and way.fits]  # type: ignore[attr-defined]
    if not fitting:
        return error
    facts = {name: value for name, value in vars(error).items() if name not in ("what", "got", "expected", "hint")}
    names = " or ".join(way.name for way in fitting)
    libraries = " and ".join(sorted({way.missing for way in fitting if way.missing}))
    because = f"snugfit runs {names} only with {libraries}, which is not installed"
    by_itself = " | ".join(name for name in RUN if name not in allow)
    needed = sizes.text(error.smallest.needed_bytes)  # type: ignore[attr-defined]
    return InfeasibleError(
        f"{error.what}, and {because if libraries else f'snugfit does not run {names} itself'}",
        got="; ".join(f"{way.name} would fit: {numbers(way)} of the smallest candidate ({needed})" for way in fitting),
        expected=f"a change that snugfit runs: {by_itself or 'one whose library is there'}",
        hint="\n      ".join(line for way in fitting for line in _what_to_do(way)),
        **facts,
    )


def _what_to_do(way: WayOut) -> Iterator[str]:
    """How to go a way that snugfit does not."""
    if way.missing:
        yield f'{way.name}: pip install "snugfit[{way.missing}]", then the same command again'
        return
    yield f"by hand, {way.change}: the numbers rest on all of these lines"
    yield from (f"    {line}" for line in way.by_hand)
    yield from (f"note: {note}" for note in way.notes)


def numbers(way: WayOut) -> str:
    """What a way needs and costs, in a few words."""
    assert way.memory is not None, "it was worked out"
    time = "" if way.relative_time is None else f", {way.relative_time:.2f} x the time"
    cards = f" on each of {way.world_size} cards" if way.world_size > 1 else ""
    least = "at least " if way.is_least else ""
    return f"{least}{sizes.text(way.memory.needed_bytes)}{cards}{time}"


def _short(reason: str) -> str:
    """The first line of a reason; what the job's own code raises may be long."""
    first = reason.strip().splitlines()[0]
    return first if len(first) <= _LONGEST_REASON else f"{first[:_LONGEST_REASON]} ..."


def _to_type(way: WayOut) -> str:
    """What to do to go this way."""
    if not way.fits:
        return ""
    if way.missing:
        return f'; pip install "snugfit[{way.missing}]", then type --allow {way.name}'
    return (
        f"; type --allow {way.name}" if way.executed_by_snugfit else f"; by hand, --allow {way.name} prints the lines"
    )


def _worked_out(case: Case, name: str) -> WayOut:
    try:
        return _WAYS[name](case)
    except SnugfitError as error:
        return rows.unknown(case, name, f"not worked out: {error.what}" + (f"; {error.hint}" if error.hint else ""))
    except Exception as error:  # whatever the job's own code or a library raises for a changed job
        return rows.unknown(case, name, f"not worked out: {type(error).__name__}: {error}")


def _by_cost(way: WayOut) -> tuple[bool, float, int]:
    """What fits first; then the least time on all cards together, to a hundredth; then the least change."""
    time = float("inf") if way.relative_time is None else round(way.relative_time * way.world_size, 2)
    return not way.fits, time, NAMES.index(way.name)
