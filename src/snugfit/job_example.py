"""A function ``job()`` to copy into a training file that has none, made of what the file holds.

Entry point: ``example``. The model's class, the optimizer, the loss and the limit of gradients are found by their names
in the source, nothing is run; shapes of a batch are left to the reader.
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
_OF_TRANSFORMERS = (
    "model(**batch).loss",
    'dict.fromkeys(("input_ids", "labels"), torch.zeros(n, 128).long())',
)
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
        lambda model: {optimizer},
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
    limit = next(_limits(calls), None)
    return _EXAMPLE.format(
        model=_model(module, calls),
        loss=loss,
        optimizer=next(_optimizers(calls), _OPTIMIZER),
        batch=batch,
        more="" if limit is None else f"\n        max_grad_norm={limit!r},",
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


def _optimizers(calls: list[ast.Call]) -> Iterator[str]:
    for call in calls:
        kind = getattr(torch.optim, _name(call), None)
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer):
            known = [
                f"{one.arg}={ast.unparse(one.value)}" for one in call.keywords if one.arg and _is_literal(one.value)
            ]
            yield f"torch.optim.{_name(call)}({', '.join(('model.parameters()', *known))})"


def _loss_and_batch(calls: list[ast.Call], source: str) -> tuple[str, str]:
    if "input_ids" in source:
        return _OF_TRANSFORMERS
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
