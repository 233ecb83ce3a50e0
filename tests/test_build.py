import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from models import LinearStack, regression_batch, same_bits, squared_error, state_of
from snugfit import DeviceMemoryError, Job, Plan, PlanError, Segment, UnsupportedError
from snugfit.memory import tracing
from snugfit.training.build import build, construct, prepare, set_implementation
from snugfit.training.counting import tokens
from snugfit.training.example import example_batch


def adamw(model):
    return torch.optim.AdamW(model.parameters())


def make_job(**given):
    return Job(**{"model": LinearStack, "loss": squared_error, "optimizer": adamw, "batch": regression_batch, **given})


PLAN = Plan(batch_size=4, micro_batch_size=2)


def test_build_makes_an_engine_that_steps_as_planned():
    plan = Plan(batch_size=4, micro_batch_size=3, precision="bf16-mixed", recompute=(Segment("layers.1"),))
    engine = build(make_job(max_grad_norm=1.0, scheduler=lambda o: LinearLR(o, 1.0, 0.5, 2)), plan, "cpu")
    result = engine.step(regression_batch(4))
    assert (result.num_micro_batches, result.count, result.lr) == (2, 4.0, (1e-3,))
    assert engine.optimizers[0].param_groups[0]["lr"] < 1e-3
    assert "forward" in engine.model.layers[1].__dict__
    assert "forward" not in engine.close().layers[1].__dict__


def test_a_given_module_is_used_in_place_and_one_that_is_built_is_new_each_time():
    module = LinearStack()
    assert build(make_job(model=module), PLAN, "cpu").model is module
    job = make_job()
    assert build(job, PLAN, "cpu").model is not build(job, PLAN, "cpu").model


def test_the_optimizer_is_made_after_recomputation_is_applied_and_over_the_model_on_its_device():
    seen = []

    class Moved(LinearStack):
        def to(self, device):
            seen.append(("moved", str(device)))
            return super().to(device)

    def optimizer(model):
        seen.append(("optimizer", "forward" in model.layers[0].__dict__))
        return adamw(model)

    plan = Plan(batch_size=4, micro_batch_size=2, recompute=(Segment("layers.0"),))
    construct(make_job(model=Moved, optimizer=optimizer), plan, torch.device("cpu"))
    assert seen == [("moved", "cpu"), ("optimizer", True)]


@pytest.mark.parametrize("model", [LinearStack, LinearStack()], ids=["a function", "a module"])
def test_an_optimizer_that_was_there_before_is_refused_with_the_line_to_write(model):
    there = adamw(model if isinstance(model, torch.nn.Module) else model())
    job = make_job(model=model, optimizer=lambda model: there)
    with pytest.raises(PlanError, match="does not hold the model's parameters") as caught:
        tracing.estimate(job, Plan(batch_size=4, micro_batch_size=2), "cpu")
    assert "lambda model: AdamW(model.parameters()" in caught.value.hint


def test_several_optimizers_get_their_schedulers_as_a_sequence():
    def optimizers(model):
        return [torch.optim.SGD(layer.parameters(), lr=0.1 * (i + 1)) for i, layer in enumerate(model.layers)]

    job = make_job(optimizer=optimizers, scheduler=lambda made: [LinearLR(one, 0.5, 1.0, 4) for one in made])
    engine = build(job, PLAN, "cpu")
    assert len(engine.schedulers) == len(engine.optimizers) == 3
    assert engine.step(regression_batch(4)).lr == pytest.approx((0.05, 0.1, 0.15))


def raises(error):
    def model():
        raise error

    return model


def test_a_model_that_raises_while_it_is_built_is_named_with_its_error():
    with pytest.raises(PlanError, match="KeyError: 'hidden'") as caught:
        build(make_job(model=raises(KeyError("hidden"))), PLAN, "cpu")
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.hint


def test_a_model_function_that_wraps_in_ddp_is_told_to_return_the_plain_model():
    wrapping = make_job(model=lambda: nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))
    with pytest.raises(PlanError, match="wraps it in DistributedDataParallel") as caught:
        build(wrapping, PLAN, "cpu")
    assert "return the plain model" in caught.value.hint
    assert "allocated" not in str(caught.value)


def test_a_model_that_does_not_fit_is_a_memory_error():
    with pytest.raises(DeviceMemoryError, match="while it was built"):
        build(make_job(model=raises(torch.OutOfMemoryError("CUDA out of memory"))), PLAN, "cpu")


def test_errors_of_snugfit_s_own_pass_through_a_building_model():
    with pytest.raises(UnsupportedError, match="inner"):
        build(make_job(model=raises(UnsupportedError("inner"))), PLAN, "cpu")


@pytest.mark.parametrize(("made", "named"), [(lambda: None, "NoneType"), (nn.ReLU, "no parameters"), (dict, "dict")])
def test_what_is_no_module_or_has_no_parameters_is_refused(made, named):
    with pytest.raises(PlanError) as caught:
        build(make_job(model=made), PLAN, "cpu")
    assert named in str(caught.value)


def test_a_plan_for_another_number_of_ranks_is_refused():
    with pytest.raises(PlanError, match="another number of ranks") as caught:
        build(make_job(), Plan(batch_size=4, micro_batch_size=1, world_size=2), "cpu")
    assert "world_size=2" in caught.value.got


def test_segments_that_do_not_exist_are_refused_by_name():
    with pytest.raises(PlanError, match=r"layers\.9"):
        build(make_job(), Plan(batch_size=4, micro_batch_size=2, recompute=(Segment("layers.9"),)), "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_training_on_a_card_that_is_not_there_is_refused():
    with pytest.raises(PlanError, match="no CUDA device"):
        build(make_job(), PLAN, "rtx-3060-12gb")


@pytest.mark.parametrize(
    ("implementation", "foreach", "fused"),
    [("as-given", None, None), ("for-loop", False, False), ("foreach", True, False), ("fused", False, True)],
)
def test_the_implementation_of_the_optimizer_is_set_on_every_group(implementation, foreach, fused):
    def optimizer(model):
        return torch.optim.AdamW([{"params": layer.parameters()} for layer in model.layers])

    engine = build(
        make_job(optimizer=optimizer), Plan(batch_size=4, micro_batch_size=2, optimizer_impl=implementation), "cpu"
    )
    groups = engine.optimizers[0].param_groups
    assert [(group["foreach"], group["fused"]) for group in groups] == [(foreach, fused)] * 3
    assert not engine.step(regression_batch(4)).skipped


def test_all_implementations_give_nearly_the_same_update():
    updated = []
    for implementation in ("for-loop", "foreach", "fused"):
        torch.manual_seed(0)
        plan = Plan(batch_size=4, micro_batch_size=2, optimizer_impl=implementation)
        engine = build(make_job(), plan, "cpu")
        engine.step(regression_batch(4))
        updated.append(torch.cat([p.detach().flatten() for p in engine.model.parameters()]))
    for one in updated[1:]:
        torch.testing.assert_close(one, updated[0])


def test_an_optimizer_without_the_implementation_is_refused_by_name():
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        def step(self, closure=None):
            pass

    optimizer = Plain(LinearStack().parameters())
    set_implementation([optimizer], "for-loop")
    for implementation in ("foreach", "fused"):
        with pytest.raises(PlanError, match=f"Plain has no {implementation}"):
            set_implementation([optimizer], implementation)
    with pytest.raises(PlanError, match="Adafactor has no fused"):
        set_implementation([torch.optim.Adafactor(LinearStack().parameters())], "fused")


def test_prepare_cuts_and_counts_as_the_engine_does():
    batch = {"labels": torch.tensor([[1, -100], [2, 3], [-100, -100]])}
    job = make_job(count=tokens())
    parts, counts = prepare(job, batch, 2)
    assert counts == [3.0, 0.0]
    assert [len(part["labels"]) for part in parts] == [2, 1]
    engine = build(job, PLAN, "cpu")
    assert engine.prepare(batch, 2)[1] == counts


def test_the_example_batch_is_made_cut_or_the_longest_of_a_loader():
    assert example_batch(make_job(), 3)["x"].shape == (3, 6)
    assert example_batch(make_job(batch=regression_batch(4)), 2)["x"].shape == (2, 6)
    rows = [torch.zeros(length) for length in (3, 7, 5)]
    loader = torch.utils.data.DataLoader(rows, batch_size=1)
    assert example_batch(make_job(batch=loader), 2).shape == (2, 7)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_the_same_step_runs_under_fake_tensors_and_leaves_the_job_s_module_alone(precision):
    module = LinearStack()
    before = state_of(module)
    plan = Plan(batch_size=5, micro_batch_size=2, precision=precision, recompute=(Segment(("layers.0", "layers.1")),))
    job = make_job(model=module, max_grad_norm=1.0, scheduler=lambda o: LinearLR(o, 1.0, 0.5, 2))
    report = tracing.estimate(job, plan, "cpu")
    assert report.peak_allocated_bytes > report.static_bytes > 0
    assert same_bits(state_of(module), before)
    assert "forward" not in module.layers[0].__dict__
