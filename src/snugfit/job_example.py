"""A function ``job()`` to copy into a training file that has none, made of what the file holds.

Entry point: ``example``. The model's class, the optimizer, its scheduler, the loss and the limit of gradients are found
by their names in the source, nothing is run; shapes of a batch are left to the reader, and so is what only the running
file knows, such as parameter groups.
"""

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import nn

_MODEL = "YourModel()"
_OPTIMIZER = "torch.optim.AdamW(model.parameters(), lr=1e-4)"
_LOSSES = ("cross_entropy", "mse_loss", "binary_cross_entropy_with_logits", "nll_loss", "l1_loss", "smooth_l1_loss")
_OF_TRANSFORMERS = "model(**batch).loss"
_LONG = {"input_ids": "zeros", "attention_mask": "ones", "token_type_ids": "zeros", "labels": "zeros"}
"What models of transformers are given, of those that a file names; ids and labels always."
_GROUPS = "\n        # the file gives it groups of parameters: write them in place of model.parameters()"
_OF_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_EXAMPLE = """\
def job():
    import snugfit
    import torch
    import torch.nn.functional as F

    return snugfit.Job(
        lambda: {model},
        # a mean over the samples or tokens of a batch
        lambda model, batch: {loss},
        lambda model: {optimizer},{groups}
        # an example of n samples: write your own names and shapes
        lambda n: {batch},{more}
    )"""


def example(module: ModuleType, source: str) -> str:
    """The function as code, with a comment on what is the reader's to fill in.

    Args:
        module: The file as it was imported.
        source: Its text.
    """
    calls = list(_calls(ast.parse(source)))
    loss, batch = _loss_and_batch(calls, source)
    optimizer, has_groups = next(_optimizers(calls), (_OPTIMIZER, False))
    more = [f"max_grad_norm={limit!r}," for limit in _limits(calls)][:1] + list(_schedulers(module, calls))[:1]
    return _EXAMPLE.format(
        model=_model(module, calls),
        loss=loss,
        optimizer=optimizer,
        groups=_GROUPS if has_groups else "",
        batch=batch,
        more="".join(f"\n        {line}" for line in more),
    )


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Calls of a file; those inside of its classes make parts of a model."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child
        if not isinstance(child, ast.ClassDef):
            yield from _calls(child)


def _model(module: ModuleType, calls: list[ast.Call]) -> str:
    """A call that makes the model: of the first class of modules that the file calls by its bare name."""
    for call in calls:
        kind = vars(module).get(_name(call)) if isinstance(call.func, ast.Name) else None
        if inspect.isclass(kind) and issubclass(kind, nn.Module):
            parameters = inspect.signature(kind).parameters.values()
            needed = [one for one in parameters if one.default is one.empty and one.kind not in _OF_ANY_NUMBER]
            return f"{_name(call)}({'...' if needed else ''})"
    return _MODEL


def _name(call: ast.Call) -> str:
    """Of what is called, without what stands in front of it."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _optimizers(calls: list[ast.Call]) -> Iterator[tuple[str, bool]]:
    """Calls that make an optimizer, and whether of something else than all parameters of a model."""
    for call in calls:
        kind = getattr(torch.optim, _name(call), None)
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer):
            known = [
                f"{one.arg}={ast.unparse(one.value)}" for one in call.keywords if one.arg and _is_literal(one.value)
            ]
            first = (
                call.args[0] if call.args else next((one.value for one in call.keywords if one.arg == "params"), None)
            )
            is_whole = isinstance(first, ast.Call) and _name(first) == "parameters"
            yield f"torch.optim.{_name(call)}({', '.join(('model.parameters()', *known))})", not is_whole


def _schedulers(module: ModuleType, calls: list[ast.Call]) -> Iterator[str]:
    """Lines with a scheduler; as comments where only the running file knows its arguments."""
    for call in calls:
        name = _name(call)
        kind = getattr(torch.optim.lr_scheduler, name, None)
        if name == "ReduceLROnPlateau":  # which needs a number of each epoch
            continue
        if inspect.isclass(kind) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
            made_by = f"torch.optim.lr_scheduler.{name}"
        elif name.startswith("get_") and "schedule" in name and name in vars(module):  # transformers' and diffusers'
            made_by = name
        else:
            continue
        given = [("", value) for value in call.args]
        given += [(f"{one.arg}=" if one.arg else "**", one.value) for one in call.keywords]
        names = [key for key, _ in given]
        place = names.index("optimizer=") if "optimizer=" in names else 0
        shown = [f"{key}{ast.unparse(value) if _is_literal(value) else '...'}" for key, value in given]
        shown[place : place + 1] = [f"{names[place] if given else ''}optimizer"]
        others = [value for i, (_, value) in enumerate(given) if i != place]
        line = f"scheduler=lambda optimizer: {made_by}({', '.join(shown)}),"
        yield line if all(map(_is_literal, others)) else f"# {line}"


def _loss_and_batch(calls: list[ast.Call], source: str) -> tuple[str, str]:
    if "input_ids" in source:
        names = [name for name in _LONG if name in source or name in ("input_ids", "labels")]
        made = (f'"{name}": torch.{_LONG[name]}(n, 128).long()' for name in names)
        return _OF_TRANSFORMERS, "{\n" + "".join(f"            {one},\n" for one in made) + "        }"
    found = [_name(call) for call in calls if _name(call) in _LOSSES]
    name = found[0] if found else _LOSSES[0]
    target = "torch.zeros(n, dtype=torch.long)" if name in ("cross_entropy", "nll_loss") else "torch.zeros(n, 1)"
    loss = f'F.{name}(model(batch["x"]), batch["y"])'
    return loss, f'{{"x": torch.randn(n, 3, 224, 224), "y": {target}}}'


def _limits(calls: list[ast.Call]) -> Iterator[float]:
    """What gradients are clipped to."""
    for call in calls:
        if _name(call) == "clip_grad_norm_":
            given = [*call.args[1:2], *(one.value for one in call.keywords if one.arg == "max_norm")]
            yield from (ast.literal_eval(value) for value in given if _is_literal(value))


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True
