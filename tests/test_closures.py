"""Optimizers whose step evaluates the loss: every evaluation is the whole window."""

import copy
import math

import pytest
import torch
from torch import nn

from models import ConvBatchNorm, LinearStack, Weight, WithDropout, regression_batch, same_bits, squared_error, state_of
from snugfit import BatchError, Engine, Job, Loss, NonFiniteError, Plan, PlanError, UnsupportedError, build, estimate
from snugfit.training import closures
from tolerances import EXACT_VALUE, FLOAT64


def distance(model, k):
    return (model.w - k).square().mean()


def values(*numbers):
    return [torch.tensor([float(x)]) for x in numbers]


class Closing(torch.optim.SGD):
    """A user's optimizer that evaluates as often as it is told, moving in between; keeps losses and gradients."""

    def __init__(self, parameters, evaluations=2, lr=0.1):
        super().__init__(parameters, lr=lr)
        self.evaluations, self.losses, self.seen = evaluations, [], []

    def step(self, closure):
        for _ in range(self.evaluations):
            with torch.enable_grad():
                self.losses.append(float(closure()))
            self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.sub_(p.grad, alpha=group["lr"])
                        self.state[p]["moves"] = self.state[p].get("moves", 0) + 1


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("cut", [[1, 1, 1, 1], [4], [3, 1], [1, 2, 1]])
@pytest.mark.parametrize("form", ["mean", "own count", "two losses"])
def test_c038_every_evaluation_runs_the_whole_window_and_returns_its_mean_loss(line_search, cut, form):
    model = Weight(0.0).double()

    def loss(model, k):
        value = (model.w - k).square()
        return {
            "mean": value.mean(),
            "own count": Loss(value.sum(), torch.tensor(len(k))),
            "two losses": [value.mean() / 2, Loss(value.sum() / 2, len(k))],
        }[form]

    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn=line_search)
    engine = Engine(model, optimizer, loss=loss)
    micro_batches = list(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).split(cut))
    result = engine.step_window(micro_batches)
    assert model.w.item() == pytest.approx(2.5, abs=EXACT_VALUE)
    assert float(result.loss) == pytest.approx(7.5, rel=FLOAT64)  # of the first evaluation, at w = 0
    assert float(result.grad_norm) == pytest.approx(5.0, rel=FLOAT64)
    assert float(engine.step_window(micro_batches).loss) == pytest.approx(1.25, abs=EXACT_VALUE)
    assert (engine.step_count, engine.micro_step_count) == (2, 2 * len(cut))
    assert model.w.grad is None


def test_c038_lbfgs_on_micro_batches_takes_the_path_of_lbfgs_on_the_full_batch():
    model = LinearStack().double()
    twin = copy.deepcopy(model)
    batch = regression_batch(7, torch.float64)
    plain = torch.optim.LBFGS(twin.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    engine = Engine(model, optimizer, loss=squared_error, micro_batch_size=3)

    def closure():
        plain.zero_grad()
        value = squared_error(twin, batch)
        value.backward()
        return value

    for _ in range(3):
        plain.step(closure)
        engine.step(batch)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)  # rounding grows along the path


def test_one_micro_batch_is_the_plain_closure_bit_for_bit():
    model = LinearStack()
    twin = copy.deepcopy(model)
    batch = regression_batch(5)
    plain, optimizer = torch.optim.LBFGS(twin.parameters()), torch.optim.LBFGS(model.parameters())
    engine = Engine(model, optimizer, loss=squared_error)

    def closure():
        plain.zero_grad()
        value = squared_error(twin, batch)
        value.backward()
        return value

    for _ in range(2):
        plain.step(closure)
        engine.step(batch)
    assert same_bits(state_of(model, optimizer), state_of(twin, plain))


def test_every_evaluation_sees_the_same_random_numbers_and_the_buffers_of_the_beginning():
    model = nn.Sequential(WithDropout(), nn.BatchNorm1d(6))
    optimizer = Closing(model.parameters(), evaluations=3, lr=0.0)
    engine = Engine(model, optimizer, loss=squared_error, plan=Plan(batch_size=8, micro_batch_size=8))
    twin = copy.deepcopy(model)
    batch = regression_batch(8)
    state = torch.get_rng_state()
    engine.step(batch)
    assert len(set(optimizer.losses)) == 1
    assert all(torch.equal(a, b) for a, b in zip(optimizer.seen[0], optimizer.seen[2], strict=True))
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    squared_error(twin, batch)
    assert torch.equal(after, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


def test_window_statistics_count_the_last_evaluation_only():
    model = ConvBatchNorm()
    plan = Plan(batch_size=6, micro_batch_size=2, norm_policy="window")
    batch = {"x": torch.randn(6, 3, 6, 6), "y": torch.randn(6, 2)}
    twin = copy.deepcopy(model)
    Engine(model, Closing(model.parameters(), 3, lr=0.0), plan, loss=squared_error).step(batch)
    Engine(twin, torch.optim.SGD(twin.parameters(), lr=0.0), plan, loss=squared_error).step(batch)
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)


def test_the_gradient_of_every_evaluation_is_clipped_and_the_norm_reported_before():
    optimizer = Closing((model := Weight(0.0)).parameters(), evaluations=2, lr=0.0)
    engine = Engine(model, optimizer, loss=distance, max_grad_norm=1.0)
    result = engine.step_window(values(1, 2, 3, 4))
    assert float(result.grad_norm) == 5.0
    assert [float(gradients[0]) for gradients in optimizer.seen] == pytest.approx([-1.0, -1.0], abs=EXACT_VALUE)


# --- windows that make no update ---


@pytest.mark.parametrize("kind", ["lbfgs", "own"])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_window_that_is_not_finite_at_first_moves_nothing(kind, fresh):
    model = LinearStack()
    optimizer = torch.optim.LBFGS(model.parameters()) if kind == "lbfgs" else Closing(model.parameters())
    engine = Engine(model, optimizer, loss=squared_error)
    batch = regression_batch(4)
    if not fresh:
        engine.step(batch)
    before = state_of(model, optimizer)
    result = engine.step({**batch, "y": batch["y"] * math.nan})
    assert result.reason == "non-finite gradient"
    assert same_bits(before, state_of(model, optimizer))
    assert all(p.grad is None for p in model.parameters())
    assert engine.step(batch).reason is None


def test_a_window_that_counts_nothing_evaluates_nothing():
    model = Weight(0.0)
    optimizer = torch.optim.LBFGS(model.parameters())
    engine = Engine(model, optimizer, loss=lambda m, k: Loss(distance(m, k), 0))
    result = engine.step_window(values(1, 2))
    assert result.reason == "empty"
    assert math.isnan(float(result.loss))
    assert not optimizer.state
    with pytest.raises(BatchError):
        engine.step_window([])


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_weights_that_are_not_finite_in_the_end_are_put_back(policy):
    model = Weight(3.0)
    optimizer = Closing(model.parameters(), evaluations=3, lr=math.inf)
    optimizer.state[model.w]["moves"] = 7
    engine = Engine(model, optimizer, loss=distance, nonfinite=policy)
    if policy == "skip":
        assert engine.step_window(values(1)).reason == "non-finite gradient"
    else:
        with pytest.raises(NonFiniteError):
            engine.step_window(values(1))
    assert model.w.item() == 3.0
    assert optimizer.state[model.w]["moves"] == 7
    assert engine.step_count == 0


@pytest.mark.parametrize("recovers", [True, False])
def test_values_on_the_way_that_are_not_finite_are_the_optimizer_s_to_judge(recovers):
    """The loss is NaN left of zero: an optimizer that comes back is let through, one that stays there is not."""

    class Probing(Closing):
        def step(self, closure):
            (w,) = self.param_groups[0]["params"]
            closure()
            for at in (-1.0, 2.0) if recovers else (2.0, -1.0):
                with torch.no_grad():
                    w.fill_(at)
                self.losses.append(float(closure()))

    model = Weight(1.0)
    optimizer = Probing(model.parameters())
    engine = Engine(model, optimizer, loss=lambda m, x: (m.w.log() * x).mean())
    result = engine.step_window(values(1, 1))
    assert sum(map(math.isnan, optimizer.losses)) == 1
    assert result.reason == (None if recovers else "non-finite gradient")
    assert model.w.item() == (2.0 if recovers else 1.0)


def test_lbfgs_that_runs_into_nan_never_ends_there():
    model = Weight(1.0).double()
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    engine = Engine(model, optimizer, loss=lambda m, x: (1000 * m.w * x - (m.w - 1e-3).log()).mean())
    result = engine.step_window([torch.ones(1, dtype=torch.float64)])
    assert model.w.item() > 1e-3
    assert result.skipped == (model.w.item() == 1.0)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_error_of_any_evaluation_leaves_weights_and_state_as_they_were(at):
    model = LinearStack()
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    batches = [regression_batch(2), regression_batch(2)]
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) == at + 1000:
            raise ValueError("user")
        return squared_error(model, batch)

    engine = Engine(model, optimizer, loss=loss)
    engine.step_window(batches)
    before = state_of(model, optimizer)
    calls[:] = [1] * 1000
    with pytest.raises(ValueError, match="user"):
        engine.step_window(batches)
    assert same_bits(before, state_of(model, optimizer))
    assert all(p.grad is None for p in model.parameters())


def test_an_out_of_memory_error_of_an_evaluation_restarts_the_window_with_half_the_size():
    def run(fails):
        torch.manual_seed(0)
        model = LinearStack().double()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        batch, calls = regression_batch(4, torch.float64), []

        def loss(model, part):
            calls.append(1)
            if fails and len(calls) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return squared_error(model, part)

        engine = Engine(model, optimizer, loss=loss, micro_batch_size=2 if fails else 1)
        engine.step(batch)
        return engine, model

    with pytest.warns(UserWarning, match="micro_batch_size=2"):
        engine, model = run(True)
    assert engine.micro_batch_size == 1
    _, wanted = run(False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True))


def test_the_history_of_lbfgs_is_never_written_to_by_torch():
    """What is kept of it before an update is a reference."""
    model = LinearStack()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=4)
    engine = Engine(model, optimizer, loss=squared_error)
    batch = regression_batch(4)
    kept = []
    for _ in range(5):
        engine.step(batch)
        (state,) = optimizer.state.values()
        kept += [(tensor, tensor.clone()) for name in closures._HISTORY for tensor in state[name]]
    assert len(kept) > 12
    assert all(torch.equal(tensor, copied) for tensor, copied in kept)


# --- refusals ---


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        (torch.optim.LBFGS, True),
        (torch.optim.SGD, False),
        (torch.optim.AdamW, False),
        (Closing, True),
        (torch.optim.SparseAdam, False),
    ],
)
def test_an_optimizer_whose_step_requires_a_closure_is_recognised(optimizer, wanted):
    model = Weight()
    made = optimizer(model.parameters())
    assert closures.needed(made) is wanted
    torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0)  # wraps step
    assert closures.needed(made) is wanted


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true"])
def test_c038_precisions_that_a_closure_does_not_go_with_are_refused_at_set_up_with_the_reason(precision):
    model = Weight()
    job = Job(model, distance, lambda m: torch.optim.LBFGS(m.parameters()), torch.ones(4))
    with pytest.raises(UnsupportedError, match="LBFGS") as caught:
        build(job, Plan(batch_size=4, micro_batch_size=1, precision=precision))
    if precision == "16-mixed":
        assert "loss scale" in caught.value.got
        with pytest.raises(UnsupportedError, match="16-mixed"):
            Engine(model, Closing(model.parameters()), loss=distance, precision=precision)


class Sharp(torch.optim.Optimizer):
    """As SAM is written: a closure that may be left out but is called, and an optimizer inside that moves."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        moved = [(p, p.grad * 0.5) for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for p, by in moved:
                p.add_(by)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, by in moved:
                p.sub_(by)
        self.inner.step()


class Required(Sharp):
    def step(self, closure):
        super().step(closure)


def test_an_optimizer_inside_of_one_with_a_closure_moves_the_weights():
    def made():
        torch.manual_seed(0)
        return LinearStack().double()

    batch = regression_batch(6, torch.float64)
    model, plain = made(), made()
    engine = Engine(model, Required(model.parameters()), loss=squared_error, micro_batch_size=2)
    assert not engine.step(batch).skipped

    optimizer = Sharp(plain.parameters())

    def closure():
        optimizer.zero_grad()
        loss = squared_error(plain, batch)
        loss.backward()
        return loss

    optimizer.step(closure)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=FLOAT64, atol=FLOAT64)


def test_a_skipped_window_leaves_the_optimizer_inside_of_one_as_it_was():
    class Stateful(Required):
        def __init__(self, parameters):
            super().__init__(parameters)
            self.inner = torch.optim.AdamW(self.param_groups, lr=0.1)

    evaluations = []

    def loss(model, batch):
        evaluations.append(None)
        factor = math.nan if len(evaluations) == 4 else 1.0  # the second evaluation of the second window
        return squared_error(model, batch) * factor

    model = LinearStack()
    optimizer = Stateful(model.parameters())
    engine = Engine(model, optimizer, loss=loss)
    batch = regression_batch(6)
    assert [engine.step(batch).skipped for _ in range(3)] == [False, True, False]
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert {int(state["step"]) for state in optimizer.inner.state.values()} == {2}


@pytest.mark.parametrize("message", ["disclosure of the state failed", "'NoneType' object is not callable"])
def test_an_error_behind_the_update_of_an_optimizer_is_not_taken_for_a_missing_closure(message):
    class Moved(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            self.look()

        def look(self):
            raise TypeError(message)

    model = Weight(0.0)
    engine = Engine(model, Moved(model.parameters(), lr=0.1), loss=distance, micro_batch_size=1)
    with pytest.raises(TypeError, match=message):
        engine.step(torch.tensor([1.0, 2.0]))


def test_an_optimizer_that_calls_the_closure_that_it_may_do_without_is_refused_with_the_way_out():
    model = Weight(0.0)
    engine = Engine(model, Sharp(model.parameters()), loss=distance, micro_batch_size=1)
    with pytest.raises(UnsupportedError, match=r"Sharp.step\(\) needs the closure") as raised:
        engine.step(torch.tensor([1.0, 2.0]))
    assert "define it as step(self, closure)" in str(raised.value)
    job = Job(lambda: Weight(0.0), distance, lambda model: Sharp(model.parameters()), torch.ones(2))
    with pytest.raises(UnsupportedError, match="needs the closure"):
        estimate(job, Plan(batch_size=2, micro_batch_size=1), "cpu")


def test_a_closure_beside_another_optimizer_is_refused_by_name():
    model = nn.ModuleList([Weight(), Weight()])
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=1.0), torch.optim.LBFGS(model[1].parameters())]
    with pytest.raises(UnsupportedError, match="LBFGS") as caught:
        Engine(model, optimizers, loss=distance)
    assert caught.value.got == "SGD, LBFGS"


def test_a_closure_in_a_loop_by_hand_is_refused_by_name():
    model = Weight()
    engine = Engine(model, torch.optim.LBFGS(model.parameters()), loss=distance)
    with pytest.raises(UnsupportedError, match="by hand"), engine.window(values(1)):
        pass


def test_an_optimizer_that_never_calls_its_closure_is_told_so():
    model = Weight()
    engine = Engine(model, Closing(model.parameters(), evaluations=0), loss=distance)
    with pytest.raises(PlanError, match="did not call"):
        engine.step_window(values(1))


def test_build_makes_an_engine_with_a_closure_and_the_scheduler_moves_once_per_window():
    job = Job(
        Weight(0.0),
        distance,
        lambda m: torch.optim.LBFGS(m.parameters()),
        torch.ones(4),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4),
    )
    engine = build(job, Plan(batch_size=4, micro_batch_size=1), device="cpu")
    rates = [engine.step(torch.tensor([1.0, 2.0, 3.0, 4.0])).lr[0] for _ in range(3)]
    assert rates == [1.0, 0.75, 0.5]
    assert engine.model.w.item() == pytest.approx(2.5, abs=EXACT_VALUE)
