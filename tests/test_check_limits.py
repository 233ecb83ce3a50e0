"""What cannot be compared or only in part: data that are not finite, losses that raise, too little memory."""

import ast
import importlib
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snugfit
from checked_jobs import found, regression, sgd
from models import WIDTH, LinearStack, Transformer, regression_batch, squared_error, token_batch, token_loss
from snugfit import (
    BatchError,
    DeviceMemoryError,
    Job,
    Loss,
    Plan,
    PlanError,
    UnsupportedError,
    check,
    checkpointing,
    tokens,
)
from tolerances import FLOAT64

KINDS = importlib.import_module("snugfit.training.checking.check").KINDS


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_in_the_data_that_are_not_finite_are_a_hazard(value):
    batch = regression_batch(4)
    batch["x"][1, 2] = value
    report = check(*regression(LinearStack, batch=batch), "cpu")
    kind = "non-finite-data" if math.isnan(value) else "infinite-data"
    assert [hazard.kind for hazard in report.hazards] == [kind]
    assert "batch['x'] holds 1 of 24" in report.hazards[0].message
    assert math.isnan(report.gradient_error)


def test_an_infinite_mask_in_the_data_is_no_hazard():
    def loss(model, batch):
        return (model(batch["x"]) + batch["mask"]).softmax(-1)[:, 0].mean()

    mask = torch.zeros(4, WIDTH)
    mask[:, 3:] = -math.inf
    assert found(*regression(LinearStack, loss, batch={**regression_batch(4), "mask": mask})) == []


def test_an_infinite_mask_in_the_data_that_leaves_nothing_of_a_row_is_named_where_it_hurts():
    def loss(model, batch):
        return (model(batch["x"]) + batch["mask"]).softmax(-1)[:, 0].mean()

    mask = torch.zeros(4, WIDTH)
    mask[2] = -math.inf
    assert found(*regression(LinearStack, loss, batch={**regression_batch(4), "mask": mask})) == ["fully-masked-row"]


def test_micro_batches_that_report_a_count_of_zero_are_no_hazard():
    def loss(model, batch):
        total = ((model(batch["x"]) - batch["y"]).square().mean(1) * batch["weight"]).sum()
        return Loss(total, float(batch["weight"].sum()))

    weight = torch.tensor([0.0] * 6 + [1.0, 2.0])
    job, plan = regression(LinearStack, loss, 8, 1, batch={**regression_batch(8), "weight": weight})
    assert found(job, plan) == []


@pytest.mark.parametrize("count", ["samples", tokens(), tokens(shift=True)])
def test_labels_that_are_all_ignored_are_a_hazard(count):
    batch = token_batch(4)
    batch["labels"][:] = -100
    job = Job(Transformer, token_loss, sgd, batch, count=count)
    assert found(job, Plan(batch_size=4, micro_batch_size=2)) == ["nothing-counted"]


def test_a_loss_that_raises_is_a_named_error():
    def loss(model, batch):
        raise KeyError("missing")

    with pytest.raises(PlanError, match="raised KeyError") as caught:
        check(*regression(LinearStack, loss), "cpu")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_loss_that_raises_for_micro_batches_only_says_so():
    def loss(model, batch):
        assert len(batch["x"]) == 4
        return squared_error(model, batch)

    with pytest.raises(PlanError, match="micro_batch_size=2, though not with the whole batch"):
        check(*regression(LinearStack, loss), "cpu")


@pytest.mark.parametrize("loss", [lambda m, b: m(b["x"]), lambda m, b: None, lambda m, b: squared_error(m, b).detach()])
def test_a_loss_that_is_no_scalar_is_refused_as_in_training(loss):
    with pytest.raises(PlanError, match="not a scalar"):
        check(*regression(LinearStack, loss), "cpu")


def test_an_empty_batch_is_a_named_error():
    with pytest.raises(BatchError, match="no sample"):
        check(*regression(LinearStack, batch=regression_batch(0)), "cpu")


def test_what_is_no_plan_is_refused():
    job, _ = regression(LinearStack)
    with pytest.raises(PlanError, match="check needs a plan"):
        check(job, None, "cpu")


def test_a_model_that_cannot_be_copied_is_a_named_error():
    class Uncopied(LinearStack):
        def __deepcopy__(self, memo):
            raise RuntimeError("no")

    with pytest.raises(UnsupportedError, match="cannot be copied"):
        check(*regression(Uncopied()), "cpu")


def limited(most, only_in_float64=False):
    """A loss that runs out of memory for more than some samples."""

    def loss(model, batch):
        wide = batch["x"].dtype == torch.float64
        if len(batch["x"]) > most and (wide or not only_in_float64):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return squared_error(model, batch)

    return loss


def test_a_full_batch_that_does_not_fit_is_replaced_by_the_largest_that_does():
    report = check(*regression(LinearStack, limited(4), 8, 2), "cpu")
    assert report.ok
    assert report.gradient_error <= report.gradient_tolerance
    assert any("micro-batches of 4 samples" in line for line in report.assumptions)
    report = check(*regression(LinearStack, limited(2), 8, 2), "cpu")
    assert report.ok
    assert any("nothing larger than micro_batch_size=2 fits" in line for line in report.assumptions)


class Spectral(nn.Module):
    """Everything it has is complex: data, a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.register_buffer("shift", torch.randn(WIDTH, dtype=torch.complex64), persistent=False)

    def forward(self, x):
        return x * self.weight + self.shift


class Gain(nn.Module):
    """A weight that stays as wide as it is."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=dtype))

    def _apply(self, fn, recurse=True):
        return self

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("seed", range(5))
def test_complex_numbers_are_compared_in_double_precision_as_others_are(seed):
    torch.manual_seed(seed)
    batch = {"x": torch.randn(8, WIDTH, dtype=torch.complex64), "y": torch.randn(8, WIDTH, dtype=torch.complex64)}

    def loss(model, batch):
        return (model(batch["x"]) - batch["y"]).abs().square().mean()

    report = check(*regression(Spectral, loss, 8, 3, batch), "cpu")
    assert report.ok
    assert report.gradient_error <= FLOAT64
    assert report.gradient_tolerance == 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # gradients of both are summed in float32
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.filterwarnings("ignore:.*rounded away")
def test_a_weight_that_stays_narrow_is_compared_as_its_gradient_is_summed(dtype, seed):
    torch.manual_seed(seed)
    report = check(*regression(lambda: Gain(dtype), size=8, micro_batch_size=3), "cpu")
    assert report.ok
    assert report.gradient_tolerance == 1e-5


def test_a_full_batch_that_only_fits_in_float32_is_compared_in_float32():
    report = check(*regression(LinearStack, limited(4, only_in_float64=True), 8, 2), "cpu")
    assert report.ok
    assert any("in float32" in line for line in report.assumptions)
    assert not any("does not fit" in line for line in report.assumptions)


@pytest.mark.parametrize("most", [8, 4])
def test_what_only_fits_with_recomputation_is_compared_with_it(most):
    def loss(model, batch):
        recomputes = "forward" in vars(model.layers[0])
        if len(batch["x"]) > (most if recomputes else 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return squared_error(model, batch)

    report = check(*regression(LinearStack, loss, 8, 2, recompute=checkpointing.blocks(LinearStack())), "cpu")
    assert report.ok
    assert any("in float32, with recomputation" in line for line in report.assumptions)
    assert any("only 1 samples fit" in line for line in report.assumptions)
    assert any("micro-batches of 4 samples" in line for line in report.assumptions) == (most == 4)


def test_single_samples_alone_are_not_compared():
    report = check(*regression(LinearStack, limited(1), 4, 1), "cpu")
    assert not report.ok
    assert [hazard.kind for hazard in report.hazards] == ["not-compared"]


def test_a_micro_batch_that_does_not_fit_is_a_named_error():
    with pytest.raises(DeviceMemoryError, match="does not fit"):
        check(*regression(LinearStack, limited(1), 4, 2), "cpu")


def test_a_model_that_only_runs_in_float32_is_compared_in_float32():
    def loss(model, batch):
        return F.mse_loss(model(batch["x"].float()), batch["y"].float())

    report = check(*regression(LinearStack, loss, 8, 3), "cpu")
    assert report.ok
    assert any("compared in float32" in line for line in report.assumptions)
    assert report.gradient_tolerance > FLOAT64


def test_parameters_in_no_optimizer_are_a_remark_and_no_hazard():
    job = Job(
        LinearStack, squared_error, lambda m: torch.optim.SGD(m.layers[2].parameters(), lr=1.0), regression_batch(4)
    )
    report = check(job, Plan(batch_size=4, micro_batch_size=2), "cpu")
    assert report.ok
    assert list(report.by_module) == ["layers.2"]
    assert any("4 trainable parameters are in no optimizer" in line for line in report.assumptions)


def test_every_kind_of_hazard_in_the_source_is_listed():
    """A kind is the first argument of a Hazard, and its way out is in the message."""
    source = Path(snugfit.__file__).parent / "training"
    made = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            if name in ("Hazard", "_add") and isinstance(node.args[0], ast.Constant):
                made.add(node.args[0].value)
    assert made == set(KINDS)


def test_what_is_no_job_is_refused():
    with pytest.raises(PlanError, match="check needs a job"):
        check(None, Plan(batch_size=4, micro_batch_size=2), "cpu")


def meta_model():
    with torch.device("meta"):
        return LinearStack()


@pytest.mark.parametrize(
    ("model", "what"), [(meta_model, "meta device"), (lambda: torch.jit.script(LinearStack()), "torch.jit")]
)
def test_a_model_that_no_copy_can_be_run_of_is_refused(model, what):
    with pytest.raises(UnsupportedError, match="cannot be run on a copy") as caught:
        check(*regression(model), "cpu")
    assert what in caught.value.got


@pytest.mark.parametrize("returned", [None, 3, {"x": 1}])
def test_a_split_that_is_no_list_is_a_named_error(returned):
    job = Job(LinearStack, squared_error, sgd, regression_batch(4), split=lambda batch, size: returned)
    with pytest.raises(BatchError, match="split did not return a list"):
        check(job, Plan(batch_size=4, micro_batch_size=2), "cpu")


def test_trained_parameters_that_the_loss_does_not_reach_are_a_remark():
    def loss(model, batch):
        return F.mse_loss(model.layers[0](batch["x"]), batch["y"])

    report = check(*regression(LinearStack, loss), "cpu")
    assert report.ok
    assert any("4 trained parameters not at all (first: layers.1.weight)" in line for line in report.assumptions)
