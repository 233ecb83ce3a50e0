"""Which segments of a model can be recomputed: everything that is wrong with names, overlaps and wrappers.

Entry points: ``listed`` and ``modules_of``, called before anything is changed.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from snugfit.errors import PlanError, UnsupportedError
from snugfit.plans import Segment
from snugfit.training import keeping
from snugfit.training import segments as segments_of


def modules_of(model: nn.Module, segments: Sequence[Segment]) -> tuple[dict[str, nn.Module], list[Segment]]:
    """The modules of all segments by name, and the segments with inner ones before outer ones.

    Raises:
        PlanError: See ``checkpointing.apply``.
        UnsupportedError: See ``checkpointing.apply``.
    """
    if not segments:
        raise PlanError(
            "nothing is recomputed",
            got="no segment",
            expected="at least one snugfit.Segment",
            hint="pass snugfit.checkpointing.blocks(model), or leave recompute out",
        )
    for segment in segments:
        if not isinstance(segment, Segment):
            raise PlanError(
                "this is not a segment",
                got=repr(segment),
                expected="snugfit.Segment",
                hint="pass snugfit.checkpointing.blocks(model), or [snugfit.Segment('encoder.layer.0')]",
            )
        if segment.policy != "offload":
            keeping.operations(segment.policy)
    _refuse_scripted(model, segments)
    known = dict(model.named_modules())
    for name, module in list(known.items()):
        known.setdefault(segments_of.without_wrappers(name), module)
    names = list(dict.fromkeys(name for segment in segments for name in segment.modules))
    missing = [name for name in names if name not in known]
    if missing:
        near = list(dict.fromkeys(close for name in missing[:3] for close in segments_of.similar(name, known)))
        raise PlanError(
            "segments name modules that the model does not have",
            got=", ".join(missing),
            expected=f"names of {type(model).__name__}.named_modules(), such as {list(known)[-1]!r}",
            hint=f"did you mean {' or '.join(near[:3])}?" if near else "take names as named_modules() of it gives them",
            names=tuple(missing),
        )
    modules = {name: known[name] for name in names}
    _refuse_containers(modules)
    _refuse_overlaps(segments, modules)
    _refuse_others(model, modules)
    _refuse_replicas(model, modules)
    sizes = {segment: sum(1 for name in segment.modules for _ in modules[name].modules()) for segment in segments}
    return modules, sorted(segments, key=lambda segment: sizes[segment])


def listed(segments: Any) -> tuple[Segment, ...]:
    """The segments that ``checkpointing.apply`` was given.

    Raises:
        PlanError: They are not several.
    """
    if isinstance(segments, Segment) or not isinstance(segments, Iterable):
        raise PlanError(
            "segments are passed as a list, also where there is one",
            got=repr(segments),
            expected="a sequence of snugfit.Segment",
            hint="pass [snugfit.Segment('encoder.layer.0')], or snugfit.checkpointing.blocks(model)",
        )
    return tuple(segments)


def _refuse_containers(modules: dict[str, nn.Module]) -> None:
    """Refuse modules without a forward."""
    for name, module in modules.items():
        if not segments_of.runs(module):
            inside = [f"{name}.{child}" for child, _ in module.named_children()]
            raise PlanError(
                "a segment names a module that has no forward of its own, so nothing would be recomputed",
                got=f"{name!r}, a {type(module).__name__} of {len(inside)} modules",
                expected="modules that run in the forward",
                hint=f'name its entries: --recompute "match:{name}.*", or Segment({inside[0]!r}) and so on'
                if inside
                else "leave it out",
                names=(name,),
            )


def _refuse_overlaps(segments: Sequence[Segment], modules: dict[str, nn.Module]) -> None:
    own = [[id(modules[name]) for name in segment.modules] for segment in segments]
    inside = [{id(inner) for name in segment.modules for inner in modules[name].modules()} for segment in segments]
    problems = []
    for i, segment in enumerate(segments):
        repeated = [name for k, name in enumerate(segment.modules) if own[i][k] in own[i][:k]]
        nested = [
            f"{name} inside of {other}"
            for name in segment.modules
            for other in segment.modules
            if name != other and id(modules[name]) in {id(inner) for inner in list(modules[other].modules())[1:]}
        ]
        problems += [f"{name} twice" for name in repeated] + nested
        for j in range(i):
            shared = sum(one in inside[j] for one in own[i]), sum(one in inside[i] for one in own[j])
            if set(own[i]) == set(own[j]):
                problems.append(f"{segment.modules[0]} twice")
            elif any(shared) and len(own[i]) != shared[0] and len(own[j]) != shared[1]:
                problems.append(f"{', '.join(segment.modules)} and {', '.join(segments[j].modules)}")
    if problems:
        raise PlanError(
            "segments overlap",
            got="; ".join(problems),
            expected="segments that are apart, or one wholly inside of the other",
            hint="name each module once, and let runs end where others begin",
            names=tuple(problems),
        )


def _refuse_others(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Refuse modules that something else checkpoints already: they would be recomputed twice."""
    wanted = {id(inner): name for name, module in modules.items() for inner in module.modules()}
    around = {id(module): name for name, module in modules.items()}
    for name, module in model.named_modules():
        is_on = getattr(module, "gradient_checkpointing", False) is True
        is_wrapper = hasattr(module, "_checkpoint_wrapped_module")
        if not (is_on or is_wrapper):
            continue
        found = wanted.get(id(module)) or next((around[id(m)] for m in module.modules() if id(m) in around), None)
        if found is not None:
            raise UnsupportedError(
                "modules are checkpointed already, by their own library",
                got=f"{name or 'the model itself'}, a {type(module).__name__} with "
                f"{'gradient_checkpointing=True' if is_on else 'a checkpoint wrapper'}, and a segment of {found}",
                expected="modules that nothing else recomputes",
                hint="call model.gradient_checkpointing_disable() (or disable_gradient_checkpointing()) first"
                if is_on
                else "do not wrap the blocks, or leave recompute out",
                names=(found,),
            )


def _refuse_replicas(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Refuse modules that ``nn.DataParallel`` copies: what stands in for a forward is of one module."""
    wanted = {id(module): name for name, module in modules.items()}
    for name, module in model.named_modules():
        found = [wanted[id(inner)] for inner in module.modules() if id(inner) in wanted]
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1 and found:
            raise UnsupportedError(
                "modules inside of nn.DataParallel are not recomputed: it runs copies of them",
                got=f"{name or 'the model itself'}, an nn.DataParallel over {len(module.device_ids)} devices, and a "
                f"segment of {found[0]}",
                expected="one model on each device",
                hint="use torch.nn.parallel.DistributedDataParallel, or leave recompute out",
                names=tuple(found),
            )


def _refuse_scripted(model: nn.Module, segments: Sequence[Segment]) -> None:
    """Refuse modules that are TorchScript, or lie inside of it: it does not call Python forwards."""
    wanted = {name for segment in segments for name in segment.modules}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        inside = sorted(one for one in wanted if not name or one == name or one.startswith(f"{name}."))
        if inside:
            raise UnsupportedError(
                "modules of TorchScript are not recomputed: what stands in for a forward would not be called",
                got=f"{name or 'the model itself'}, a {type(module).__name__}, and segments of {inside[0]}"
                + (f" and {len(inside) - 1} more" if len(inside) > 1 else ""),
                expected="segments of modules that are neither scripted nor inside of a scripted one",
                hint="script the model after training, or leave recompute out",
                names=tuple(inside),
            )
