"""Jobs, plans and batches that cannot be trained: refused by name where they are planned, predicted or built."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import snugfit
from snugfit import BatchError, Plan, PlanError, UnsupportedError

PLAN = Plan(batch_size=8, micro_batch_size=4)


def job(**changes):
    given = {
        "model": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)),
        "loss": lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters()),
        "batch": lambda n: {"x": torch.randn(n, 8), "y": torch.zeros(n, dtype=torch.long)},
    }
    return snugfit.Job(**{**given, **changes})


def planned(given):
    return snugfit.plan(given, "cpu", 8)


def estimated(given):
    return snugfit.estimate(given, PLAN, "cpu")


def built(given):
    return snugfit.build(given, PLAN, "cpu")


ALL_IGNORED = job(
    model=lambda: nn.Linear(8, 3),
    loss=lambda model, batch: F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten()),
    batch=lambda n: {"x": torch.randn(n, 4, 8), "labels": torch.full((n, 4), -100)},
    count=snugfit.tokens(),
)
COUNTS_NOTHING = {
    "a count of 0": job(count=lambda batch: 0),
    "labels that are all ignored": ALL_IGNORED,
    "a Loss over nothing": job(loss=lambda model, batch: snugfit.Loss(model(batch["x"]).sum(), 0)),
}


@pytest.mark.parametrize("asked", [planned, estimated])
@pytest.mark.parametrize("given", COUNTS_NOTHING.values(), ids=COUNTS_NOTHING)
def test_an_example_batch_that_counts_nothing_is_refused(asked, given):
    with pytest.raises(BatchError, match="the example batch counts nothing"):
        asked(given)


def measured(given, plan=PLAN, device="cpu"):
    return snugfit.measure(given, plan, device)


def trained(given, plan=PLAN, device="cpu"):
    return snugfit.train(given, plan, steps=1, run_dir="never-made", device=device)


@pytest.mark.parametrize("asked", [planned, estimated, built, measured, trained])
@pytest.mark.parametrize(
    "given", [None, nn.Linear(8, 3), job, {"model": 3}], ids=["none", "module", "function", "dict"]
)
def test_what_is_no_job_is_refused(asked, given):
    with pytest.raises(PlanError, match="this is not a job") as caught:
        asked(given)
    assert type(given).__name__ in caught.value.got


def test_a_function_that_makes_a_job_is_to_be_called():
    with pytest.raises(PlanError) as caught:
        planned(job)
    assert "call the function" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "way"), [(None, "plan(...).plan"), (PLAN.to_dict(), "Plan.from_dict"), ("plan.json", "Plan.load")]
)
@pytest.mark.parametrize("asked", [snugfit.build, snugfit.estimate, measured, trained])
def test_what_is_no_plan_is_refused_with_the_way_to_one(asked, given, way):
    with pytest.raises(PlanError, match="this is not a plan") as caught:
        asked(job(), given, "cpu")
    assert way in caught.value.hint


def test_a_lazy_module_is_refused_by_its_first_parameter():
    with pytest.raises(PlanError, match="lazy parameters") as caught:
        planned(job(model=nn.LazyLinear(3)))
    assert "weight" in caught.value.got


@pytest.mark.parametrize("asked", [planned, estimated, built])
def test_a_module_on_meta_is_refused(asked):
    with pytest.raises(PlanError, match="the model lies on the device meta"):
        asked(job(model=nn.Linear(8, 3, device="meta")))


@pytest.mark.parametrize("asked", [planned, estimated, built])
def test_a_function_that_builds_on_meta_is_refused(asked):
    with pytest.raises(PlanError, match="the model lies on the device meta") as caught:
        asked(job(model=lambda: nn.Linear(8, 3, device="meta")))
    assert "Job.model" in caught.value.hint


def test_an_engine_over_a_model_on_meta_is_refused_before_the_first_window():
    model = nn.Linear(8, 3, device="meta")
    with pytest.raises(PlanError, match="the model lies on the device meta") as caught:
        snugfit.Engine(model, torch.optim.SGD(model.parameters()), PLAN, loss=job().loss)
    assert "to_empty" in caught.value.hint


TWO_TYPES = {
    "float64 inputs": job(batch=lambda n: {"x": torch.randn(n, 8).double(), "y": torch.zeros(n, dtype=torch.long)}),
    "double weights": job(model=lambda: nn.Linear(8, 3).double()),
    "a convolution": job(
        model=lambda: nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 3, 8, bias=False).double(), nn.Flatten()),
    ),
    "batched products": job(
        loss=lambda model, batch: torch.bmm(batch["x"][:, None], torch.ones(len(batch["x"]), 8, 1).double()).sum()
    ),
}


@pytest.mark.parametrize("given", TWO_TYPES.values(), ids=TWO_TYPES)
def test_a_product_of_two_types_is_refused_as_torch_refuses_it(given):
    model, batch = given.model(), given.batch(4)
    with pytest.raises(RuntimeError, match=r"dtype|type"):
        given.loss(model, batch)
    with pytest.raises(UnsupportedError, match="a product of tensors of two types") as caught:
        planned(given)
    assert "test_refused_jobs.py" in caught.value.line


@pytest.mark.filterwarnings("ignore:precision=")
def test_autocast_may_multiply_what_it_casts():
    given = job(model=lambda: nn.Linear(8, 3).bfloat16())
    mixed = {"precision": "bf16-mixed"}
    assert snugfit.plan(given, "cpu", 8, fixed=mixed).plan.precision == "bf16-mixed"
    assert snugfit.plan(given, "rtx-4090", 8, fixed=mixed).plan.precision == "bf16-mixed"


@pytest.mark.parametrize("asked", [planned, estimated, built])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizer": lambda model: []}, "Job.optimizer returned no optimizer"),
        ({"optimizer": lambda model: None}, "Job.optimizer returned nothing"),
        ({"scheduler": lambda optimizer: None}, "Job.scheduler returned nothing"),
        ({"optimizer": lambda: 0}, "Job.optimizer raised TypeError"),
        ({"optimizer": lambda model: torch.optim.SGD([])}, "Job.optimizer raised ValueError"),
        ({"scheduler": lambda: 0}, "Job.scheduler raised TypeError"),
    ],
)
def test_a_function_of_the_job_that_makes_nothing_of_use_is_named(asked, changes, named):
    with pytest.raises(PlanError, match=named):
        asked(job(**changes))


@pytest.mark.parametrize("asked", [planned, estimated, lambda given: built(given).step(given.batch(8))])
def test_a_loss_that_takes_other_arguments_is_named(asked):
    with pytest.raises(PlanError, match=r"Job\.loss cannot be called") as caught:
        asked(job(loss=lambda model: 0))
    assert "1 positional argument" in caught.value.got


def test_an_exception_of_the_user_s_own_stays_theirs():
    def own(_):
        raise ValueError("mine")

    for changes in ({"optimizer": own}, {"scheduler": own}, {"loss": lambda model, batch: own(batch)}):
        with pytest.raises(ValueError, match="mine"):
            planned(job(**changes))


def test_an_operation_that_fails_is_put_down_to_the_function_that_ran_it():
    narrow = job(loss=lambda model, batch: model(batch["x"][:, :3]).sum())
    with pytest.raises(UnsupportedError, match=r"an operation of Job\.loss raised RuntimeError"):
        planned(narrow)
    product = job(optimizer=lambda model: torch.zeros(3) @ torch.zeros(4))
    with pytest.raises(UnsupportedError, match=r"an operation of Job\.optimizer raised RuntimeError"):
        planned(product)


@pytest.mark.parametrize("asked", [planned, estimated])
def test_a_loss_that_reaches_no_parameter_is_refused(asked):
    with pytest.raises(PlanError, match="the loss reaches no parameter"):
        asked(job(loss=lambda model, batch: torch.tensor(1.0, requires_grad=True)))


def test_one_card_shares_a_model_with_nobody():
    with pytest.raises(PlanError, match="one card has nobody to share a model with"):
        snugfit.plan(job(), "cpu", 8, fixed={"shard": "ddp"})


def test_the_way_to_shares_that_are_uneven_is_one_that_works():
    with pytest.raises(PlanError) as caught:
        snugfit.plan(job(), "cpu", 8, world_size=3)
    assert 'fixed={"uneven": True}' in caught.value.hint
    assert "batch_size=9" in caught.value.hint
    assert snugfit.plan(job(), "cpu", 8, world_size=3, fixed={"uneven": True}).plan.samples_per_rank == 3
