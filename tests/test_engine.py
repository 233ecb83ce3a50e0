import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from models import (
    ConvBatchNorm,
    LinearStack,
    Transformer,
    Weight,
    WithDropout,
    mean_product,
    regression_batch,
    same_bits,
    squared_error,
    state_of,
    token_batch,
    token_loss,
)
from snugfit import LossScale, NonFiniteError, Plan, PlanError, Segment, Shared, UnsupportedError
from snugfit.training.counting import tokens
from snugfit.training.engine import Engine
from tolerances import EXACT_VALUE, FP16_SMALL_GRADIENT


def make(model=None, loss=mean_product, optimizer=None, rate=1.0, **settings):
    model = Weight(0.0) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=rate) if optimizer is None else optimizer
    return Engine(model, optimizer, loss=loss, **settings)


def values(*numbers):
    return [torch.tensor([float(x)]) for x in numbers]


def decay(optimizer, updates):
    """Linear from 1 to 0 over a number of updates."""
    return LambdaLR(optimizer, lambda step: 1 - step / updates)


# loss scale and non-finite windows


def overflowing(model, micro_batch):
    """Infinite for samples below 0."""
    x = micro_batch
    return torch.where(x < 0, math.inf, 1.0).mean() * model(x.abs()).mean()


def test_c028_one_unscale_per_window_and_a_refused_update_leaves_the_scale_and_no_gradient():
    engine = make(precision="16-mixed", max_grad_norm=1.0)
    with engine.window(values(9, 9)) as window:
        for micro_batch in window:
            window.backward(mean_product(engine.model, micro_batch))
        window.skip("norm spike")
    assert (window.result.skipped, window.result.reason) == (True, "refused")
    assert float(window.result.grad_norm) == 9.0
    assert engine.model.w.grad is None
    assert (engine.model.w.item(), engine.step_count) == (0.0, 0)
    result = engine.step_window(values(0.5, 0.5))
    assert (result.skipped, result.loss_scale, float(result.grad_norm)) == (False, 65536.0, 0.5)
    assert engine.model.w.item() == -0.5


def test_c031_an_overflow_backs_off_once_and_moves_nothing_else():
    model = LinearStack()
    before = state_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)

    def loss(model, batch):
        return squared_error(model, batch) * batch["factor"].mean()

    parts = [{**regression_batch(2), "factor": torch.full((2,), f)} for f in (1.0, math.inf, math.inf, 1.0)]
    engine = make(model, loss, optimizer, precision="16-mixed", scheduler=decay(optimizer, 4))
    result = engine.step_window(parts)
    assert (result.skipped, result.reason, result.loss_scale) == (True, "non-finite gradient", 65536.0)
    assert same_bits(state_of(model), before)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert (engine.step_count, engine.micro_step_count, engine.sample_count) == (0, 0, 0)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert engine.state_dict()["scaler"] == {"scale": 32768.0, "clean_windows": 0}


def test_c041_a_skipped_window_leaves_nothing_to_the_next():
    engine = make(loss=overflowing, precision="16-mixed", loss_scale=LossScale(init_scale=8.0))
    assert engine.step_window(values(-1)).reason == "non-finite gradient"
    result = engine.step_window(values(2))
    assert (result.skipped, result.loss_scale) == (False, 4.0)
    assert engine.model.w.item() == -2.0
    assert engine.step_window(values(2)).loss_scale == 4.0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_non_finite_window_is_skipped_under_every_precision(precision):
    engine = make(loss=overflowing, precision=precision)
    result = engine.step_window(values(1, -1))
    assert (result.skipped, result.reason, engine.model.w.item()) == (True, "non-finite gradient", 0.0)


def test_a_non_finite_window_may_raise_and_then_nothing_has_moved():
    engine = make(loss=overflowing, nonfinite="raise")
    with pytest.raises(NonFiniteError, match="nonfinite"):
        engine.step_window(values(-1))
    assert engine.model.w.item() == 0.0
    assert engine.model.w.grad is None
    assert not engine.step_window(values(1)).skipped


def test_a_non_finite_window_may_be_ignored():
    engine = make(loss=overflowing, nonfinite="ignore")
    assert not engine.step_window(values(-1)).skipped
    assert not math.isfinite(engine.model.w.item())


def test_too_many_windows_skipped_in_a_row_are_an_error_with_the_numbers():
    engine = make(loss=overflowing, max_skipped_windows=3, precision="16-mixed")
    for numbers in ((-1,), (-1,), (1,), (-1,), (-1,)):
        engine.step_window(values(*numbers))
    with pytest.raises(NonFiniteError) as caught:
        engine.step_window(values(-1))
    assert (caught.value.windows, caught.value.step) == (3, 1)
    assert caught.value.loss_scale == 65536.0 / 2**4


def test_c032_an_optimizer_without_gradients_is_left_out_and_the_scale_lives_on():
    model = nn.ModuleList([Weight(1.0), Weight(1.0)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model]
    engine = make(model, lambda m, x: m[0](x).mean(), optimizers, precision="16-mixed")
    for step in (1, 2):
        assert engine.step_window(values(2)).step == step
    assert (model[0].w.item(), model[1].w.item()) == (-3.0, 1.0)


def test_c034_half_precision_trainable_weights_are_refused_before_training_by_name():
    model = LinearStack()
    model.layers[1].half()
    with pytest.raises(PlanError) as caught:
        make(model, squared_error, precision="16-mixed")
    assert caught.value.parameters == ("layers.1.weight", "layers.1.bias")


@pytest.mark.parametrize(("precision", "scale"), [("bf16-mixed", None), ("16-mixed", 65536.0)])
def test_c035_fp16_has_a_loss_scale_and_bf16_none_and_small_gradients_survive(precision, scale):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = make(model, lambda m, x: m(x).float().mean() * 1e-4, precision=precision)
    result = engine.step(torch.full((1, 1), 1e-4))
    assert result.loss_scale == scale
    tolerance = FP16_SMALL_GRADIENT if precision == "16-mixed" else 2**-7
    assert -model.weight.item() == pytest.approx(1e-8, rel=tolerance)


def test_fp16_that_ignores_overflows_is_refused():
    with pytest.raises(PlanError, match="fp16"):
        make(precision="16-mixed", nonfinite="ignore")


# schedulers and counters


def test_c022_the_scheduler_moves_once_per_update():
    model = Weight(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = make(model, optimizer=optimizer, scheduler=decay(optimizer, 4))
    results = [engine.step_window(window) for window in engine.windows(values(*range(8)), 2)]
    assert [result.lr for result in results] == [(1.0,), (0.75,), (0.5,), (0.25,)]
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_c025_updates_and_micro_steps_are_counted_apart_also_with_two_optimizers():
    model = nn.ModuleList([Weight(1.0), Weight(1.0)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model]
    engine = make(model, lambda m, x: (m[0](x) + m[1](x)).mean(), optimizers)
    acted = []
    for window in engine.windows(values(*[1] * 16), 4):
        result = engine.step_window(window)
        if result.step % 2 == 0:
            acted.append(result.step)
    assert acted == [2, 4]
    assert (engine.step_count, engine.micro_step_count, engine.sample_count) == (4, 16, 16)


def test_the_result_repeats_what_was_used():
    model = nn.ModuleList([Weight(1.0), Weight(1.0)])
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.2}]
    engine = make(model, lambda m, x: (m[0](x) + m[1](x)).mean(), torch.optim.SGD(groups), micro_batch_size=2)
    result = engine.step(torch.ones(5))
    assert (result.lr, result.count, result.num_micro_batches) == ((0.1, 0.2), 5.0, 3)
    assert (result.num_dropped, result.metrics, result.loss_scale, result.step) == (0, {}, None, 1)


# windows by hand, evaluation, state


def test_c120_two_optimizers_and_losses_that_need_each_other_by_hand():
    model = nn.ModuleDict({"d": Weight(1.0), "g": Weight(1.0)})
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=1.0) for name in "dg"]
    engine = make(model, optimizer=optimizers)
    with engine.window(values(1, 1)) as window:
        for x in window:
            d, g = model["d"].w, model["g"].w
            window.backward(2 * d * x.sum())
            window.backward(5 * d * g * x.sum(), only=model["g"])
    assert (model["d"].w.item(), model["g"].w.item()) == (1.0 - 2.0, 1.0 - 5.0)
    assert float(window.result.loss) == 7.0
    assert window.result.step == 1


def test_a_window_by_hand_cuts_a_batch_weights_it_and_sets_the_precision():
    model = LinearStack()
    twin = copy.deepcopy(model)
    batch = regression_batch(5)
    engine = make(model, squared_error, rate=0.1, micro_batch_size=2, precision="bf16-mixed")
    with engine.window(batch) as window:
        for micro_batch in window:
            assert torch.is_autocast_enabled("cpu")
            window.backward(squared_error(model, micro_batch))
    assert not torch.is_autocast_enabled("cpu")
    other = make(twin, squared_error, rate=0.1, micro_batch_size=2, precision="bf16-mixed")
    other.step(batch)
    assert same_bits(state_of(model), state_of(twin))


def test_a_loss_by_hand_may_be_a_mean_over_a_count_of_its_own():
    engine = make()
    with engine.window([torch.tensor([6.0]), torch.ones(3)]) as window:
        for x in window:
            window.backward(engine.model(x).mean(), count=2 * len(x))
    assert window.result.count == 8
    assert engine.model.w.item() == pytest.approx(-2.25, abs=EXACT_VALUE)


def test_a_window_left_early_raises_and_updates_nothing():
    engine = make()

    def leave():
        with engine.window(values(1, 2)) as window:
            for x in window:
                window.backward(engine.model(x).mean())
                break

    with pytest.raises(PlanError, match="1 of 2 micro-batches"):
        leave()
    assert engine.model.w.item() == 0.0
    assert engine.model.w.grad is None
    assert not engine.step_window(values(1)).skipped


def test_backward_outside_of_the_loop_is_refused():
    engine = make()
    with pytest.raises(PlanError, match="outside of the loop"), engine.window(values(1)) as window:
        window.backward(engine.model(torch.ones(1)).mean())


def test_the_result_of_an_open_window_cannot_be_read():
    engine = make()
    with pytest.raises(PlanError, match="before the window's end"), engine.window(values(1)) as window:
        _ = window.result


def test_nothing_is_saved_loaded_or_begun_inside_of_a_window():
    engine = make()
    state = engine.state_dict()
    with engine.window(values(1)) as window:
        for x in window:
            for call in (engine.state_dict, lambda: engine.load_state_dict(state), lambda: engine.step(torch.ones(1))):
                with pytest.raises(PlanError, match="inside of a window"):
                    call()
            window.backward(engine.model(x).mean())
    assert engine.step_count == 1


def test_evaluating_sets_modes_and_precision_and_restores_every_module_s_own_mode():
    model = WithDropout()
    model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    engine = make(model, squared_error, precision="bf16-mixed")
    with engine.evaluating() as evaluated:
        output = evaluated(torch.ones(2, 6))
        assert output.dtype == torch.bfloat16
        assert not output.requires_grad
        assert torch.equal(output, evaluated(torch.ones(2, 6)))
    assert [module.training for module in model.modules()] == modes


def test_a_saved_state_goes_on_bit_for_bit_and_loads_with_weights_only():
    def engine_with_everything():
        model = WithDropout()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return make(
            model,
            squared_error,
            optimizer,
            micro_batch_size=2,
            precision="16-mixed",
            scheduler=decay(optimizer, 10),
            loss_scale=LossScale(init_scale=256.0, growth_interval=2),
        )

    batches = [regression_batch(5) for _ in range(4)]
    whole = engine_with_everything()
    for batch in batches[:2]:
        whole.step(batch)
    saved = io.BytesIO()
    torch.save(whole.state_dict(), saved)
    wanted = [whole.step(batch).loss for batch in batches[2:]]
    resumed = engine_with_everything()
    saved.seek(0)
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    found = [resumed.step(batch).loss for batch in batches[2:]]
    assert same_bits(found, wanted)
    assert same_bits(state_of(resumed.model, *resumed.optimizers), state_of(whole.model, *whole.optimizers))
    assert (resumed.step_count, resumed.micro_step_count, resumed.sample_count) == (4, 12, 20)
    assert resumed.state_dict()["scaler"] == whole.state_dict()["scaler"]


def test_a_saved_state_may_leave_the_weights_out_and_must_fit():
    engine = make()
    assert "model" not in engine.state_dict(model=False)
    with pytest.raises(PlanError, match="schedulers"):
        engine.load_state_dict({**engine.state_dict(), "schedulers": [{}]})


def test_closing_gives_the_plain_module_back():
    model = Transformer()
    engine = make(model, token_loss, plan=Plan(batch_size=4, micro_batch_size=2, recompute=(Segment("blocks.0"),)))
    assert "forward" in model.blocks[0].__dict__
    assert engine.close() is model
    assert "forward" not in model.blocks[0].__dict__
    assert engine.close() is model


# arguments


def test_the_plan_sets_micro_batch_size_precision_and_recompute():
    plan = Plan(batch_size=4, micro_batch_size=2, precision="bf16-mixed", recompute=(Segment("blocks.1"),))
    engine = make(Transformer(), token_loss, plan=plan, count=tokens())
    assert engine.step(token_batch(4)).num_micro_batches == 2
    assert (engine.plan, engine.precision, engine.micro_batch_size) == (plan, "bf16-mixed", 2)


@pytest.mark.parametrize("given", [{"micro_batch_size": 3}, {"precision": "16-mixed"}])
def test_an_argument_that_contradicts_the_plan_is_refused(given):
    with pytest.raises(PlanError, match="contradicts the plan"):
        make(plan=Plan(batch_size=4, micro_batch_size=2), **given)


@pytest.mark.parametrize(
    "field",
    [{"precision": "bf16-true"}, {"shard": "fsdp"}, {"shard": "ddp"}],
)
def test_what_a_plan_asks_for_and_nothing_carries_out_is_refused_by_name(field):
    with pytest.raises(UnsupportedError) as caught:
        make(plan=Plan(batch_size=4, micro_batch_size=2, **field))
    (value,) = field.values()
    assert str(value) in str(caught.value)
    assert caught.value.hint


def test_optimizers_schedulers_and_models_that_cannot_be_driven_are_refused_by_name():
    model = Weight()
    with pytest.raises(UnsupportedError, match="LBFGS"):
        make(model, optimizer=torch.optim.LBFGS(model.parameters()), precision="16-mixed")
    with pytest.raises(UnsupportedError, match="ReduceLROnPlateau"):
        make(scheduler=ReduceLROnPlateau(torch.optim.SGD(model.parameters(), lr=1.0)))
    with pytest.raises(PlanError, match="no parameter of the model"):
        make(optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(PlanError, match="no parameters"):
        make(nn.ReLU(), optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    model.w.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UnsupportedError, match="during backward"):
        make(model)


@pytest.mark.parametrize("size", [0, -2, 1.5])
def test_a_micro_batch_size_that_is_no_count_is_refused(size):
    with pytest.raises(PlanError, match="micro_batch_size"):
        make(micro_batch_size=size)


def test_ignored_labels_counted_as_samples_are_warned_of_once():
    engine = make(Transformer(), token_loss, micro_batch_size=2)
    with pytest.warns(UserWarning, match="-100") as caught:
        engine.step(token_batch(4))
    assert len(caught) == 1
    engine.step(token_batch(4))


def test_a_batch_that_snugfit_cannot_cut_is_cut_by_the_user_s_function():
    class Odd:
        def __init__(self, x):
            self.x = x

    engine = make(
        loss=lambda model, odd: model(odd.x).mean(),
        count=lambda odd: len(odd.x),
        split=lambda odd, size: [Odd(part) for part in odd.x.split(size)],
        micro_batch_size=2,
    )
    result = engine.step(Odd(torch.tensor([1.0, 1.0, 4.0])))
    assert (result.num_micro_batches, result.count) == (2, 3.0)
    assert engine.model.w.item() == pytest.approx(-2.0, abs=EXACT_VALUE)


def test_a_shared_value_does_not_disturb_the_count_of_samples():
    engine = make(loss=lambda model, batch: (model(batch["x"]) * batch["factor"].sum()).mean(), micro_batch_size=2)
    result = engine.step({"x": torch.tensor([1.0, 1.0, 4.0]), "factor": Shared(torch.ones(7))})
    assert (result.count, engine.sample_count) == (3.0, 3)
    assert float(result.grad_norm) == pytest.approx(14.0)
    engine.step_window([{"x": torch.ones(2), "factor": Shared(torch.ones(7))}])
    assert engine.sample_count == 5
    with engine.window({"x": torch.ones(3), "factor": Shared(torch.ones(7))}) as window:
        for batch in window:
            window.backward(engine.model(batch["x"]).mean() * batch["factor"].sum())
    assert (window.result.count, engine.sample_count) == (3.0, 8)


def test_without_a_micro_batch_size_the_batch_stays_whole():
    assert make().step(torch.ones(7)).num_micro_batches == 1


@pytest.mark.filterwarnings("ignore:BatchNorm makes:UserWarning")
def test_batchnorm_sees_every_micro_batch_once():
    model = ConvBatchNorm()
    engine = make(model, squared_error, micro_batch_size=2)
    engine.step({"x": torch.randn(6, 3, 6, 6), "y": torch.randn(6, 2)})
    assert model.features[0][1].num_batches_tracked == 3


def test_a_forward_without_gradients_in_the_same_region_loses_no_gradient():
    """Case C048: a cast that is cached without a graph."""
    model = nn.Linear(4, 1)

    def loss(model, x):
        with torch.no_grad():
            model(x)
        return model(x).float().mean()

    engine = make(model, loss, precision="bf16-mixed")
    assert float(engine.step(torch.ones(2, 4)).grad_norm) > 0


# --- optimizers over weights that the model no longer has ---


def with_head():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def mean_square(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential])
def test_an_optimizer_made_before_a_part_was_replaced_is_warned_of_at_set_up(wrap):
    model = with_head()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = nn.Linear(4, 1)
    with pytest.warns(UserWarning, match=r"2 parameters of the optimizer are not the model's.*1\.weight"):
        Engine(wrap(model), optimizer, loss=mean_square)


def test_parameters_of_a_loss_alone_and_weights_in_no_optimizer_alone_are_allowed():
    model, temperature = with_head(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    engine = Engine(model, optimizer, loss=lambda m, x: mean_square(m, x) * temperature)
    engine.step(torch.ones(2, 4))
    assert temperature.item() != 1
    Engine(model, torch.optim.SGD(model[1].parameters(), lr=0.1), loss=mean_square).step(torch.ones(2, 4))
    model[0].requires_grad_(False)
    Engine(model, torch.optim.SGD([*model[1].parameters(), temperature], lr=0.1), loss=mean_square)


@pytest.mark.parametrize("replace", ["a module", "a weight"])
def test_a_part_that_is_replaced_later_is_refused_by_name_before_the_window(replace):
    model = with_head()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_square)
    engine.step(torch.ones(2, 4))
    if replace == "a module":
        model[1] = nn.Linear(4, 1)
    else:
        model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    before = state_of(model)
    for _ in range(2):
        with pytest.raises(PlanError, match=r"the parameter 1\.weight was replaced"):
            engine.step(torch.ones(2, 4))
    assert same_bits(before, state_of(model))
    engine.optimizers[0].param_groups[0]["params"] = list(model.parameters())
    assert not engine.step(torch.ones(2, 4)).skipped


def test_layers_that_are_frozen_unfrozen_or_added_with_an_optimizer_of_theirs_are_fine():
    model = with_head()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_square)
    for trains in (False, True):
        model[0].requires_grad_(trains)
        engine.step(torch.ones(2, 4))
    model.append(nn.Linear(1, 1))
    engine.optimizers[0].add_param_group({"params": list(model[2].parameters())})
    engine.step(torch.ones(2, 4))
    torch.nn.utils.parametrizations.weight_norm(model[0])


@pytest.mark.parametrize("limit", [True, False, 0, -1.0, float("nan"), "1"])
def test_a_limit_of_the_norm_that_is_no_positive_number_is_refused(limit):
    model = with_head()
    with pytest.raises(PlanError, match="max_grad_norm must be positive"):
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_square, max_grad_norm=limit)


def test_an_infinite_limit_of_the_norm_clips_nothing():
    found = []
    for limit in (None, float("inf")):
        torch.manual_seed(0)
        model = with_head()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Engine(model, optimizer, loss=mean_square, max_grad_norm=limit).step(torch.ones(2, 4))
        found.append(state_of(model))
    assert same_bits(*found)


def test_a_micro_batch_size_that_is_a_truth_value_is_refused():
    model = with_head()
    with pytest.raises(PlanError, match="micro_batch_size must be a whole number"):
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_square, micro_batch_size=True)
