"""Every error that the package raises has its four parts: what, got, expected, hint."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import snugfit
from snugfit import Job, LossScale, Plan, PlanError, Segment, SnugfitError, errors, sizes

SOURCE = Path(snugfit.__file__).parent
LEAVES = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, SnugfitError)}
PARTS = ("got", "expected", "hint")
SMALL = {"batch_size": 8, "micro_batch_size": 2}
WRITTEN = Plan(**SMALL).to_dict()


def missing_parts(source):
    """(line, part) of every error of the package that is made without one of its parts."""
    found = []
    for node in ast.walk(ast.parse(source)):
        name = getattr(node.func, "id", getattr(node.func, "attr", None)) if isinstance(node, ast.Call) else None
        if name in LEAVES:
            given = {keyword.arg for keyword in node.keywords}
            found += [(node.lineno, part) for part in PARTS if part not in given and None not in given]
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_error_in_the_source_is_made_with_all_parts(path):
    assert missing_parts(path.read_text(encoding="utf-8")) == []


def test_an_error_without_a_hint_is_found():
    assert missing_parts('raise PlanError("x", got="1", expected="2")') == [(1, "hint")]
    assert missing_parts('raise errors.BatchError("x")') == [(1, "got"), (1, "expected"), (1, "hint")]
    assert missing_parts('raise PlanError("x", **parts)\nraise ValueError("x")') == []


def job(**values):
    given = {"model": nn.Identity, "loss": print, "optimizer": torch.optim.SGD, "batch": None}
    return Job(**{**given, **values})


RAISED = {
    "a size of no form": lambda: sizes.parse("much"),
    "a unit": lambda: sizes.parse("24G"),
    "an unknown unit": lambda: sizes.parse("24 parsecs"),
    "a size of zero": lambda: sizes.parse(0),
    "a batch size": lambda: Plan(batch_size=0, micro_batch_size=1),
    "a precision": lambda: Plan(**SMALL, precision="fp16"),
    "ranks that do not share": lambda: Plan(batch_size=9, micro_batch_size=1, world_size=2),
    "recompute": lambda: Plan(**SMALL, recompute=("a",)),
    "a type": lambda: Plan(**SMALL, uneven="yes"),
    "a segment": lambda: Segment(()),
    "a policy": lambda: Segment("a", policy="half"),
    "no JSON": lambda: Plan.from_json("{"),
    "no object": lambda: Plan.from_json("[]"),
    "an unknown key": lambda: Plan.from_dict({**WRITTEN, "extra": 1}),
    "a missing key": lambda: Plan.from_dict({}),
    "a version": lambda: Plan.from_dict({**WRITTEN, "version": 99}),
    "modules of a segment": lambda: Plan.from_dict({**WRITTEN, "recompute": [{"modules": "a"}]}),
    "a missing file": lambda: Plan.load("no/such/plan.json"),
    "a model": lambda: job(model=5),
    "an optimizer": lambda: job(optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)])),
    "a count": lambda: job(count="words"),
    "a norm": lambda: job(max_grad_norm=-1),
    "skipped windows": lambda: job(max_skipped_windows=0),
    "a policy for non-finite gradients": lambda: job(nonfinite="hope"),
    "a loss scale": lambda: LossScale(growth_factor=0.5),
}


@pytest.mark.parametrize("name", RAISED)
def test_a_raised_error_of_the_hall_shows_four_parts(name):
    with pytest.raises(PlanError) as caught:
        RAISED[name]()
    lines = str(caught.value).splitlines()
    assert lines[0] == caught.value.what
    assert lines[0].strip()
    for start in ("  got:      ", "  expected: ", "hint: "):
        assert [line for line in lines if line.startswith(start) and line != start], f"no line {start!r}"
