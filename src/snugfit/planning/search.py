"""Finds the fastest plan that fits: precision, micro-batch and recomputation together, at the exact batch size.

Entry point: ``plan``. ``choosing`` does the search; here are its arguments, and what happens when nothing fits: the job
itself may be changed as far as ``allow`` says. The batch size is never changed.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from snugfit import hardware
from snugfit.errors import InfeasibleError, PlanError, SnugfitError
from snugfit.jobs import Job
from snugfit.memory import tracing
from snugfit.memory.reporting import offload_gain
from snugfit.planning import ways_out
from snugfit.planning.choosing import Search
from snugfit.planning.plan_report import PlanReport as PlanReport
from snugfit.planning.ways_out import WayOut
from snugfit.plans import Plan, nearest
from snugfit.training import admission


def plan(
    job: Job,
    device: str | hardware.Device = "auto",
    batch_size: int = 32,
    budget: str | int | None = None,
    world_size: int = 1,
    fixed: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
    *,
    progress: Callable[[str], None] | None = None,
) -> PlanReport:
    """Find the fastest plan whose memory fits.

    The batch size is never changed. Memory is modelled (label of the reports), time is a model of the device.

    Args:
        job: What is trained.
        device: Name from the catalogue, ``"auto"``, ``"cpu"`` or a size such as ``"24GiB"``.
        batch_size: Samples per update over all ranks.
        budget: Size or bytes that peak, context and margin together may take; None means the device's memory.
        world_size: Number of ranks.
        fixed: Fields of ``Plan`` that are given, such as ``{"precision": "bf16-mixed"}``.
        allow: Changes of the job itself that may be made if nothing fits without: of ``"8bit-optimizer"
            "host-offload" "fused-backward" "lora" "fsdp"``. The cheapest one that fits and that snugfit runs is
            taken (8-bit state or LoRA); ``PlanReport.changes`` names it and ``PlanReport.job`` is the changed job.
            Where only one fits that snugfit does not run, the error has the lines to do it by hand.
        progress: Called with a few words before each part of the search.

    Raises:
        InfeasibleError: Nothing fits; ``.smallest`` is the report of the closest plan, ``.budget_bytes`` the budget,
            ``.ways`` what changes of the job would need.
        PlanError: An argument outside of its range, an unknown field or device, a fixed ``recompute`` whose offloaded
            segments do not lower the peak, or a fixed field that an allowed change needs otherwise.
        UnsupportedError: An operation that cannot be traced.
    """
    admission.check_job(job)
    _check_names(fixed or {}, allow)
    _check_cards(batch_size, world_size, (fixed or {}).get("shard", "none"))
    say = progress or (lambda _: None)
    search = Search(job, device, batch_size, budget, world_size, fixed or {}, allow, say)
    with tracing.collector_off():
        try:
            found = search.run()
        except InfeasibleError as error:
            refused: SnugfitError | None = None
            for way in getattr(error, "ways", ()):
                if way.name in allow and way.fits and way.executed_by_snugfit:
                    try:
                        return _changed(search, way, batch_size, fixed or {}, say)
                    except SnugfitError as its:
                        refused = refused or _of_changed(way, its)
            if not allow:
                raise
            raise refused or ways_out.refusal(error, allow) from None
        if "recompute" in search.fixed:
            offload_gain.refuse_useless(found.memory, found.plan, search.memory_of)
    return found


def _changed(
    search: Search, way: WayOut, batch_size: int, fixed: Mapping[str, Any], progress: Callable[[str], None]
) -> PlanReport:
    """The plan of a job that is changed in an allowed way."""
    progress(way.change)
    decided = {name: getattr(way.plan, name) for name in way.decides}
    _check_agreement(way, decided, fixed)
    given = {**fixed, **decided}
    assert way.job is not None, "what snugfit runs is a job"
    budget, cards = search.budget_bytes, way.plan.world_size
    again = Search(way.job, search.device, batch_size, budget, cards, given, (), progress, optimizer=way.optimizer)
    found = again.run()
    reasons = {name: reason for name, reason in _reasons(way, decided, fixed).items() if name in found.reasons}
    return replace(
        found,
        changes=(way,),
        job=way.job,
        notes=(*way.notes, *found.notes),
        reasons={**found.reasons, **reasons},
    )


def _of_changed(way: WayOut, refused: SnugfitError) -> SnugfitError:
    """An error of a changed job, which says so."""
    facts = {name: value for name, value in vars(refused).items() if name not in ("what", "got", "expected", "hint")}
    said = f"{way.name} is allowed, but with it: {refused.what}"
    return type(refused)(said, got=refused.got, expected=refused.expected, hint=refused.hint, **facts)


def _reasons(way: WayOut, decided: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, str]:
    """Why fields are as they are that a change decides: nobody gave them."""
    return {name: f"{way.name} decides it: {way.change}" for name in decided if name not in fixed}


def _check_agreement(way: WayOut, decided: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    for name, value in decided.items():
        if fixed.get(name, value) != value:
            raise PlanError(
                f"its {name} must be another than the one that is given",
                got=f"{name}={fixed[name]!r}",
                expected=f"{name}={value!r}: {way.change}",
                hint=f"leave {name} out",
            )


def _check_cards(batch_size: object, world_size: object, shard: object) -> None:
    if world_size == 1 and shard in ("ddp", "fsdp"):
        raise PlanError(
            "one card has nobody to share a model with",
            got=f"shard={shard!r}, world_size=1",
            expected='shard="none" for one card',
            hint="leave shard out, or pass world_size=2 or more",
        )
    if isinstance(batch_size, int) and isinstance(world_size, int) and 0 < batch_size < world_size:
        raise PlanError(
            "there are more cards than samples: some would have nothing to train on",
            got=f"batch_size={batch_size}, world_size={world_size}",
            expected="at least one sample per card",
            hint=f"use world_size={batch_size} or fewer, or a larger batch",
        )


def _check_names(fixed: Mapping[str, Any], allow: Collection[str]) -> None:
    if not isinstance(fixed, Mapping):
        raise PlanError(
            "fixed is not a mapping",
            got=repr(fixed),
            expected="names of Plan's fields to values",
            hint='write fixed={"precision": "bf16-mixed"}',
        )
    known = {field.name for field in fields(Plan)} - _ARGUMENTS
    unknown = sorted(map(str, set(fixed) - known))
    if unknown:
        raise PlanError(
            f"not a field that can be fixed: {', '.join(unknown)}",
            got=repr(dict(fixed)),
            expected=f"fields of Plan: {', '.join(sorted(known))}",
            hint=f"pass {unknown[0]} to plan itself"
            if unknown[0] in _ARGUMENTS
            else f"write for example fixed={{{nearest(unknown[0], tuple(sorted(known)))!r}: ...}}",
        )
    if isinstance(allow, str) or not isinstance(allow, Collection):
        raise PlanError(
            "allow is not a sequence of names",
            got=repr(allow),
            expected=f"names of {', '.join(ways_out.NAMES)}",
            hint='write allow=("lora",)',
        )
    ways_out.check_names(allow)


_ARGUMENTS = {"batch_size", "world_size"}
"Fields of a plan that ``plan`` takes by themselves."
