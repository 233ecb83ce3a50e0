"""What a remedy says as code makes the window finite when it is pasted in, in each type that it is said for."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snugfit
from diagnosed_jobs import Around, found_in, plan_of
from snugfit import LossScale

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# The operation as it was written; what x (and y) are, made of the module's input; what its remedy begins with.
SPREAD = torch.tensor([-2.0, 0.0, 0.5, 3.0])
CASES = {
    "log of 0": ("torch.log(x)", lambda x: x - x, None),
    "log of a negative value": ("torch.log(x)", lambda x: x - x - 1, "its smallest input is -1"),
    "log2": ("torch.log2(x)", lambda x: x - x, None),
    "log10": ("torch.log10(x)", lambda x: x * SPREAD.to(x.dtype), "its smallest input is -"),
    "log1p": ("torch.log1p(x)", lambda x: x * SPREAD.to(x.dtype), None),
    "root of 0": ("torch.sqrt(x)", lambda x: x - x, "keep its input away from 0"),
    "root of a negative value": ("torch.sqrt(x)", lambda x: x - x - 1, "its smallest input is -1"),
    "root of both": ("torch.sqrt(x)", lambda x: x * SPREAD.to(x.dtype), "its smallest input is -"),
    "inverse root of 0": ("torch.rsqrt(x)", lambda x: x - x, None),
    "inverse root of a negative value": ("torch.rsqrt(x)", lambda x: x - x - 1, "its smallest input is -1"),
    "division by 0": ("x / y", lambda x: x - x, None),
    "division by 0 and by negative values": ("x / y", lambda x: x * SPREAD.to(x.dtype), None),
    "reciprocal": ("torch.reciprocal(x)", lambda x: x - x, None),
    "exp": ("torch.exp(x)", lambda x: x * 1000, None),
    "expm1": ("torch.expm1(x)", lambda x: x * 1000, None),
    "exp2": ("torch.exp2(x)", lambda x: x * 2000, None),
    "sinh": ("torch.sinh(x)", lambda x: x * -1000, None),
    "cosh": ("torch.cosh(x)", lambda x: x * -1000, None),
    "power 0.5 of 0": ("x.pow(0.5)", lambda x: x - x, None),
    "power -1 of 0": ("x.pow(-1)", lambda x: x - x, None),
    "power -2 of 0": ("x.pow(-2)", lambda x: x - x, None),
    "power 1.5 of a negative value": ("x.pow(1.5)", lambda x: x - x - 1, "its smallest input is -1"),
    "acos": ("torch.acos(x)", lambda x: x / x, None),
    "asin": ("torch.asin(x)", lambda x: -x / x, None),
    "atanh": ("torch.atanh(x)", lambda x: x / x, None),
    "acosh": ("torch.acosh(x)", lambda x: x / x, None),
    "erfinv": ("torch.erfinv(x)", lambda x: x / x, None),
    "logit": ("torch.logit(x)", lambda x: x / x, None),
}


def written(code, made, kind):
    """A layer that casts its input and computes what is written."""

    def function(x):
        values = (x + 1).to(kind)
        given = made(values)
        names = {"x": values, "y": given} if " / y" in code or "y." in code else {"x": given}
        return eval(code, {"torch": torch, **names}).to(x.dtype)

    return Around(function)


def diagnosed(code, made, kind):
    model = written(code, made, kind)
    return found_in(model, batch=torch.rand(4, 4) + 0.5, loss=lambda m, x: m(x).square().mean() * 1e-3)


def code_of(remedy):
    """The code of a remedy, which stands behind its last colon."""
    return re.sub(r"; if it worked before, a lower learning rate$", "", remedy).rpartition(": ")[2]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: str(kind).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_the_code_of_a_remedy_makes_the_window_finite(name, kind):
    code, made, begins = CASES[name]
    found = diagnosed(code, made, kind)
    assert found.module == "inner", found.cause
    assert begins is None or found.remedy.startswith(begins), found.remedy
    remedy = code_of(found.remedy)
    assert remedy != code
    assert "x" in remedy
    after = diagnosed(remedy, made, kind)
    assert after.cause == "none", (remedy, after.cause)


@pytest.mark.parametrize("name", ["log of 0", "root of 0", "division by 0", "exp", "power -1 of 0"])
def test_the_code_of_a_remedy_works_in_float16_under_a_loss_scale_too(name):
    code, made, _ = CASES[name]
    options = {
        "plan": plan_of(precision="16-mixed"),
        "loss": lambda model, x: model(x).float().square().mean() * 1e-3,
        "batch": torch.rand(4, 4) + 0.5,
        "loss_scale": LossScale(init_scale=1.0),
    }
    found = found_in(written(code, made, torch.float16), **options)
    assert found.module == "inner"
    if "in fp32" in found.remedy or "precision=" in found.remedy:
        found = found_in(written(code, made, torch.float16), **{**options, "plan": plan_of()})
    assert found_in(written(code_of(found.remedy), made, torch.float16), **options).cause == "none"


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (lambda x: x + torch.logdet(x.T @ x - x.T @ x), "singular"),
        (lambda x: F.log_softmax(x.masked_fill(x < 100, -torch.inf), -1), "unmasked"),
        (lambda x: torch.logit(x + 2), "(0, 1)"),
        (lambda x: F.normalize(x * 0, dim=-1, eps=0.0), "pass an eps"),
    ],
    ids=["logdet", "log_softmax", "logit", "normalize"],
)
def test_advice_goes_by_the_exact_name_of_the_operation(function, advice):
    found = found_in(Around(function))
    assert advice in found.remedy
    assert "torch.log(" not in found.remedy


# ---- a mean over nothing


def labelled(num_ignored, ignored=-100, shape=(6,)):
    labels = torch.arange(6 * (shape[1] if len(shape) > 1 else 1)).reshape(shape) % 4
    labels[2:4][..., -num_ignored:] = ignored
    return {"x": torch.rand(*shape, 4), "target": labels}


def cross_entropy(ignored=-100):
    return lambda model, b: F.cross_entropy(model(b["x"]).flatten(0, -2), b["target"].flatten(), ignore_index=ignored)


def shifted(model, b):
    return F.cross_entropy(model(b["x"])[:, :-1].flatten(0, 1), b["target"][:, 1:].flatten())


@pytest.mark.parametrize(
    ("loss", "batch", "count"),
    [
        (cross_entropy(), labelled(6), 'snugfit.tokens(key="target")'),
        (cross_entropy(0), labelled(6, 0), 'snugfit.tokens(ignore_index=0, key="target")'),
        (cross_entropy(), labelled(3, shape=(6, 3)), 'snugfit.tokens(key="target")'),
        (shifted, labelled(2, shape=(6, 3)), 'snugfit.tokens(shift=True, key="target")'),
    ],
    ids=["ignored", "another index", "sequences", "shifted"],
)
def test_a_micro_batch_whose_labels_are_all_ignored_gets_the_count_that_leaves_it_out(loss, batch, count):
    plan = plan_of(2, 6)
    found = found_in(nn.Linear(4, 4), loss, batch, plan)
    assert (found.op, found.phase, found.micro_batch) == ("cross_entropy", "forward", 1)
    assert "a mean over no label" in found.cause
    assert f"count={count}" in found.remedy
    counted = eval(count, {"snugfit": snugfit})
    assert found_in(nn.Linear(4, 4), loss, batch, plan, count=counted).cause == "none"


def test_a_mean_over_an_empty_selection_is_said_to_be_one():
    found = found_in(nn.Linear(4, 4), loss=lambda model, x: model(x)[x > 5].mean())
    assert "a mean over no value" in found.cause
    assert "nothing is counted" in found.remedy


def test_a_sum_divided_by_a_mask_of_nothing_is_said_to_be_a_mean_over_nothing():
    def loss(model, x):
        mask = (x > 5).float()
        return (model(x) * mask).sum() / mask.sum()

    found = found_in(nn.Linear(4, 4), loss)
    assert (found.op, "a mean over nothing" in found.cause) == ("div", True)


# ---- a statistic of one value


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", ["std", "var"])
def test_a_spread_over_one_sample_is_said_to_be_one_and_its_remedy_works(name):
    def loss(correction):
        return lambda model, x: getattr(torch, name)(model(x), 0, correction=correction).mean()

    batch, plan = torch.rand(5, 4), plan_of(2, 5)
    found = found_in(nn.Linear(4, 4), loss(1), batch, plan)
    assert (found.op, found.micro_batch) == (name, 2)
    assert "over 1 value" in found.cause
    assert "correction=0" in found.remedy
    assert found_in(nn.Linear(4, 4), loss(0), batch, plan).cause == "none"
