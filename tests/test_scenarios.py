"""The scenarios: their small jobs train, and the plans that are kept belong to the jobs as they are."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from snugfit import Plan, build
from snugfit.memory import tracing
from snugfit.targets import load_target
from snugfit.training import fingerprint

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
pytest.importorskip("transformers", reason="the extra transformers is not installed")
pytest.importorskip("diffusers", reason="the extra diffusers is not installed")


def _scenarios():
    path = ROOT / "benchmarks" / "planning" / "scenarios.py"
    spec = importlib.util.spec_from_file_location("scenarios", path)
    module = sys.modules["scenarios"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SCENARIOS


SCENARIOS = _scenarios()
PLANS = {one.name: EXAMPLES / "plans" / f"{one.name}.json" for one in SCENARIOS}


@pytest.mark.parametrize("name", ["llama2_7b", "vit_l", "gpt2_large_vocabulary", "sd_unet"])
def test_a_small_job_has_the_loss_of_the_whole_batch_in_two_micro_batches(name):
    losses = []
    for micro in (4, 2):
        job = load_target(f"{EXAMPLES / name}.py:small_job")
        torch.manual_seed(0)
        engine = build(job, Plan(batch_size=4, micro_batch_size=micro), device="cpu")
        engine.model.eval()  # dropout draws other masks in other cuts
        losses.append(engine.step(job.batch(4)).loss)
    torch.testing.assert_close(losses[0], losses[1])


def test_the_rate_of_the_unet_is_scaled_by_the_square_root_of_the_batch_sizes():
    job = load_target(f"{EXAMPLES / 'sd_unet.py'}:small_job")
    optimizer = job.optimizer(torch.nn.Linear(1, 1))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5 * (32 / 8) ** 0.5)


def test_the_resnet_couples_samples_and_its_other_form_does_not():
    from snugfit import norms

    coupled, free = (load_target(f"{EXAMPLES / 'resnet50.py'}:{name}").model() for name in ("job", "group_norm_job"))
    assert len(norms.batch_coupled(coupled)) == 53
    assert not norms.batch_coupled(free)


def test_every_scenario_that_fits_keeps_its_plan_and_no_other_plan_is_kept():
    kept = {path.name for path in (EXAMPLES / "plans").glob("*.json")}
    assert kept == {PLANS[one.name].name for one in SCENARIOS if one.fits}


@pytest.mark.parametrize("scenario", [one for one in SCENARIOS if one.fits], ids=lambda one: one.name)
def test_a_kept_plan_is_for_the_batch_size_and_the_model_of_its_job(scenario):
    plan = Plan.load(PLANS[scenario.name])
    assert plan.batch_size == scenario.batch_size
    assert all(getattr(plan, name) == value for name, value in scenario.fixed.items())
    if "lora" in scenario.allow:  # the changed job's model has adapters
        return
    model = tracing.skeleton(load_target(f"{EXAMPLES / scenario.job}"))
    optimizer = "AdamW8bit" if "8bit-optimizer" in scenario.allow else ""
    assert fingerprint.of(model, optimizer) == plan.fingerprint
    known = {name for name, _ in model.named_modules()}
    assert {name for segment in plan.recompute for name in segment.modules} <= known
