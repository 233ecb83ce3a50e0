"""Several losses of one window: a ratio each, over networks and graphs that they share, in windows by hand too."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from models import Weight, mean_product
from snugfit import Engine, Job, Loss, Plan, PlanError, Segment, build, estimate
from strategies import cuts
from test_step import HOOKS, Sgd, values, window
from tolerances import EXACT_VALUE, FLOAT64
from weighted_losses import Classifier, Keep, batch_of, cut, full_gradients, relative_error, step_of

# --- against the full batch, in float64 ---


KINDS = ("job mean", "job sum", "own number", "own tensor", "shared tensor", "own mean")


def several(kinds, coefficients):
    """A loss function of as many losses, each with a mask of its own."""

    def loss(model, part):
        scores, gate = model(part["x"])
        tokens = F.cross_entropy(scores, part["labels"], reduction="none")
        shared, found = part["mask"].sum(), []
        for k, (kind, coefficient) in enumerate(zip(kinds, coefficients, strict=True)):
            each = coefficient * (tokens * gate[:, k % 3].sin() + gate[:, (k + 1) % 3].square())
            weight = part["weight"] if k % 2 else part["mask"]
            if kind == "job mean":
                found.append(each.mean())
            elif kind == "job sum":
                found.append(Loss(each.sum()))
            elif kind == "shared tensor":
                found.append(Loss((each * part["mask"]).sum(), shared))
            elif kind == "own mean":
                found.append(Loss((each * weight).sum(), weight.sum().item()))
            else:
                count = weight.sum()
                found.append(Loss((each * weight).sum(), float(count) if kind == "own number" else count))
        return found

    return loss


def ratio_of(model, kinds, coefficients, batch):
    """The same over the full batch: a sum of ratios."""
    size = len(batch["x"])
    total = sum(p.sum() * 0 for p in model.parameters())
    for kind, value in zip(kinds, several(kinds, coefficients)(model, batch), strict=True):
        if kind == "job mean":
            total = total + value
        elif kind == "job sum":
            total = total + value.total / size
        elif float(value.count) > 0:
            total = total + value.total / value.count
    return total


@given(st.data())
def test_every_loss_is_its_own_ratio_over_the_window(data):
    size = data.draw(st.integers(1, 8))
    batch, sizes = batch_of(size, data.draw(st.integers(0, 99))), data.draw(cuts(size))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    coefficients = [data.draw(st.sampled_from([1.0, 0.01, -3.0, 1e4])) for _ in kinds]
    torch.manual_seed(0)
    model, twin = Classifier(), Classifier()
    twin.load_state_dict(model.state_dict())
    whole = ratio_of(twin, kinds, coefficients, batch)
    wanted, whole = full_gradients(twin, whole), float(whole.detach())
    keep = Keep(model)
    engine = Engine(model, keep, loss=several(kinds, coefficients))
    scale = sum(abs(coefficient) for coefficient in coefficients)
    for _ in range(2):
        result = engine.step_window(cut(batch, sizes))
        assert (result.reason == "empty") == (whole == 0)
        if whole == 0:
            assert math.isnan(float(result.loss))
            continue
        assert abs(float(result.loss) - whole) <= FLOAT64 * scale * 10
        error = torch.stack([(a - b).norm() for a, b in zip(keep.seen[-1], wanted, strict=True)]).norm()
        assert float(error) <= FLOAT64 * scale * 10
        assert all(p.grad is None for p in model.parameters())


def test_an_auxiliary_mean_goes_with_a_loss_over_tokens():
    """The balancing term of a mixture of experts: a mean per micro-batch, weighted by its samples."""
    model, batch = Classifier(), batch_of(7)

    def balance(gate):
        share = gate.softmax(1).mean(0)
        return 3 * (share * share.detach()).sum()

    def loss(model, part):
        scores, gate = model(part["x"])
        tokens = F.cross_entropy(scores, part["labels"], reduction="none")
        return Loss((tokens * part["mask"]).sum(), part["mask"].sum()), 0.01 * balance(gate)

    parts = cut(batch, [3, 3, 1])
    scores, _ = model(batch["x"])
    tokens = F.cross_entropy(scores, batch["labels"], reduction="none")
    main = (tokens * batch["mask"]).sum() / batch["mask"].sum()
    auxiliary = sum(len(part["x"]) * balance(model(part["x"])[1]) for part in parts) / 7
    wanted = full_gradients(model, main + 0.01 * auxiliary)
    found, result, _ = step_of(model, loss, parts)
    assert relative_error(found, wanted) <= FLOAT64
    assert float(result.loss) == pytest.approx(float((main + 0.01 * auxiliary).detach()), rel=FLOAT64)


def test_a_window_of_one_micro_batch_needs_no_second_backward_for_a_second_denominator():
    backwards = []

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            backwards.append(1)
            return gradient

    def loss(model, x):
        out = Counting.apply(model(x))
        return Loss(out.sum(), 2), Loss(out.square().sum(), 3), out.mean()

    window(values(1), [1.0], loss, Weight(1.0), reference=None)
    assert len(backwards) == 1
    window(values(1, 2, 3), [1.0] * 3, loss, Weight(1.0), reference=None)
    assert len(backwards) == 1 + 3 + 3 + 1  # one for each denominator, but in the last micro-batch one


def test_losses_that_report_the_same_tensor_share_a_denominator_and_one_backward():
    def loss(model, x):
        count = torch.tensor(float(len(x)))
        return Loss(model(x).sum(), count), Loss(2 * model(x).sum(), count)

    outcome, model = window([torch.ones(3), torch.full((1,), 5.0)], [3.0, 1.0], loss, reference=None)
    assert [float(count) for count in outcome.reported_counts] == [4.0]
    assert model.w.item() == pytest.approx(-6.0, abs=EXACT_VALUE)

    def splitting(model, x):
        count = torch.tensor(float(len(x)))
        return Loss(model(x).sum(), count), Loss(model(x).sum(), count.clone() if len(x) == 1 else count)

    with pytest.raises(PlanError, match="shared"):
        window([torch.ones(3), torch.ones(1)], [3.0, 1.0], splitting, reference=None)


# --- only= ---


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("own", [False, True])
def test_c120_two_networks_in_one_window_on_a_graph_that_is_shared(order, own):
    model = nn.ModuleDict({"d": Weight(), "g": Weight()})

    def loss(model, x):
        d, g = model["d"](x).sum(), model["g"](x).sum()  # d is an inner node that both losses use
        count = 1 if own else None
        return [Loss(2 * d.exp().log(), count), Loss(5 * d.exp().log() * g, count, only=model["g"])][::order]

    optimizers = [Sgd(model["d"].parameters()), Sgd(model["g"].parameters())]
    outcome, _ = window(values(1, 1), [1.0, 1.0], loss, model, optimizers, reference=None)
    assert model["d"].w.item() == pytest.approx(1.0 - 2.0, abs=EXACT_VALUE)
    assert model["g"].w.item() == pytest.approx(1.0 - 5.0, abs=EXACT_VALUE)
    assert float(outcome.loss) == pytest.approx(7.0, abs=EXACT_VALUE)


@pytest.mark.parametrize("own", [False, True])
def test_c120_by_hand_and_each_optimizer_moves_once(own):
    model = nn.ModuleDict({"d": Weight(), "g": Weight()})
    moves = []

    class Counting(Sgd):
        def step(self, closure=None):
            moves.append(self)
            super().step()

    optimizers = [Counting(model["d"].parameters()), Counting(model["g"].parameters())]
    engine = Engine(model, optimizers, loss=mean_product)
    with engine.window(values(1, 1)) as hand:
        for x in hand:
            d, g = model["d"].w, model["g"].w
            hand.backward((2 * d * x).sum(), count=1 if own else None)
            hand.backward(Loss((5 * d * g * x).sum(), 1 if own else None), only=model["g"])
    assert model["d"].w.item() == -1.0
    assert model["g"].w.item() == -4.0
    assert moves == optimizers
    assert float(hand.result.loss) == 7.0
    assert engine.step_count == 1


def test_by_hand_several_denominators_are_exact_too():
    batch, model = batch_of(7), Classifier()
    kinds, coefficients = ["own tensor", "job mean", "own number"], [1.0, 0.5, 3.0]
    loss = several(kinds, coefficients)
    wanted = full_gradients(model, ratio_of(model, kinds, coefficients, batch))
    keep = Keep(model)
    engine = Engine(model, keep, loss=loss)
    for together in (True, False):
        with engine.window(cut(batch, [3, 3, 1])) as hand:
            for part in hand:
                if together:
                    hand.backward(loss(model, part))
                else:
                    for k in range(3):
                        hand.backward(loss(model, part)[k])
        assert relative_error(keep.seen[-1], wanted) <= FLOAT64


def test_by_hand_a_loss_without_a_count_of_its_own_may_come_in_some_micro_batches_only():
    engine = Engine(model := Weight(1.0), Sgd(model.parameters()), loss=mean_product)
    with engine.window(values(1, 2)) as hand:
        for i, x in enumerate(hand):
            hand.backward(model(x).mean())
            if i:
                hand.backward(model(x).mean())
    assert model.w.item() == 1.0 - 2.5


def by_hand(engine, micro_batches, body):
    with engine.window(micro_batches) as hand:
        for i, x in enumerate(hand):
            body(hand, i, x)
    return hand.result


def test_by_hand_a_loss_with_a_count_of_its_own_comes_in_all_micro_batches_or_in_none():
    engine = Engine(model := Weight(1.0), Sgd(model.parameters()), loss=mean_product)

    def body(hand, i, x, at):
        hand.backward(model(x).mean())
        if i == at:
            hand.backward(Loss(model(x).sum(), 1))

    for at in (0, 1):
        with pytest.raises(PlanError, match="another number"):
            by_hand(engine, values(1, 2), lambda *arguments, at=at: body(*arguments, at))
        assert model.w.grad is None
        assert model.w.item() == 1.0


def test_two_backwards_by_hand_over_a_freed_graph_are_told_to_go_together():
    engine = Engine(model := Weight(1.0), Sgd(model.parameters()), loss=mean_product)

    def body(hand, i, x):
        out = model(x).exp().mean()
        hand.backward(out)
        hand.backward(out * 2)

    with pytest.raises(PlanError, match="share a graph") as caught:
        by_hand(engine, values(1), body)
    assert "[first, second]" in caught.value.hint
    assert model.w.item() == 1.0


def test_under_other_hooks_the_several_losses_read_no_value(monkeypatch):
    def refuse(*_):
        raise AssertionError("a tensor's value was read")

    model, batch = Classifier(), batch_of(6)
    loss = several(["own tensor", "job mean", "shared tensor"], [1.0, 1.0, 1.0])
    hooks = type(HOOKS)(lambda found, count: None, list, HOOKS.synchronises, lambda: None, lambda s: None, HOOKS.move)
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for reference in (None, (4.0, 2.0)):
        window(cut(batch, [3, 2, 1]), [3.0, 2.0, 1.0], loss, model, [optimizer], hooks=hooks, reference=reference)


# --- with everything else ---


def test_several_denominators_go_with_recomputation():
    """Every backward recomputes: the graph is walked once for each denominator."""
    model, batch = Classifier(), batch_of(7)
    kinds, coefficients = ["own tensor", "job mean", "own number"], [1.0, 0.5, 3.0]
    loss = several(kinds, coefficients)
    wanted = full_gradients(model, ratio_of(model, kinds, coefficients, batch))
    plan = Plan(batch_size=7, micro_batch_size=3, recompute=(Segment(("trunk",)), Segment(("head",))))
    keep = Keep(model)
    engine = Engine(model, keep, plan, loss=loss)
    for _ in range(2):
        engine.step(batch)
        assert relative_error(keep.seen[-1], wanted) <= FLOAT64


def test_several_denominators_go_with_bf16_weights():
    model, batch = Classifier().float(), batch_of(6)
    batch = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
    kinds, coefficients = ["own tensor", "job mean"], [1.0, 0.5]
    loss = several(kinds, coefficients)
    wanted = full_gradients(model, ratio_of(model, kinds, coefficients, batch))
    job = Job(model, loss, lambda m: torch.optim.SGD(m.parameters(), lr=1.0), batch)
    engine = build(job, Plan(batch_size=6, micro_batch_size=2, precision="bf16-true"), device="cpu")
    before = [held.clone() for group in engine.optimizers[0].param_groups for held in group["params"]]
    assert engine.step(batch).reason is None
    after = [held for group in engine.optimizers[0].param_groups for held in group["params"]]
    moves = [(b - a).detach() for b, a in zip(before, after, strict=True)]
    assert relative_error(moves, wanted) < 2e-2  # bf16


def test_a_second_denominator_costs_one_more_gradient_and_none_in_a_window_of_one_micro_batch():
    width = 512

    def job(loss):
        return Job(
            lambda: nn.Linear(width, width, bias=False),
            loss,
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            lambda size: torch.ones(size, width),
        )

    def one(model, x):
        value = model(x).square().mean(1)
        return Loss(value.sum() + value.sqrt().sum(), len(x))

    def two(model, x):
        value = model(x).square().mean(1)
        return Loss(value.sum(), len(x)), Loss(value.sqrt().sum(), len(x))

    gradient = 4 * width * width
    for size, extra in ((2, 0), (5, gradient)):  # the second of three micro-batches holds both
        plan = Plan(batch_size=size, micro_batch_size=2)
        peaks = [estimate(job(loss), plan, "rtx-3060-12gb").peak_allocated_bytes for loss in (one, two)]
        assert abs(peaks[1] - peaks[0] - extra) < gradient / 8


def test_an_out_of_memory_error_between_two_denominators_restarts_the_window():
    model, batch = Classifier(), batch_of(8)
    kinds, coefficients = ["own tensor", "job mean", "own number"], [1.0, 0.5, 3.0]
    plain = several(kinds, coefficients)
    wanted = full_gradients(model, ratio_of(model, kinds, coefficients, batch))
    calls = []

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            calls.append(1)
            if len(calls) == 5:  # the second denominator of the second micro-batch
                raise torch.OutOfMemoryError("CUDA out of memory")
            return gradient

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return tuple(Failing.apply(out) for out in self.inner(x))

    wrapped = Wrapped()
    keep = Keep(wrapped)
    engine = Engine(wrapped, keep, loss=plain, micro_batch_size=2)
    with pytest.warns(UserWarning, match="out of memory"):
        engine.step(batch)
    assert engine.micro_batch_size == 1
    assert relative_error(keep.seen[-1], wanted) <= FLOAT64


ONLY = {
    "a generator": (lambda model: model.parameters(), "list it once"),
    "a zip": (lambda model: zip(model.parameters(), strict=True), "list it once"),
    "a parameter itself": (lambda model: next(model.parameters()), "list"),
    "a number": (lambda model: 3, "list"),
    "names": (lambda model: ["w"], "list of parameters"),
    "nothing": (lambda model: [], "leave a loss that trains nothing out"),
    "a module without parameters": (lambda model: nn.Tanh(), "leave a loss that trains nothing out"),
    "frozen parameters": (lambda model: [nn.Parameter(torch.ones(1), requires_grad=False)], "leave a loss"),
}


@pytest.mark.parametrize("name", ONLY)
@pytest.mark.parametrize("by_hand", [False, True])
def test_what_names_no_parameters_or_only_once_is_refused(name, by_hand):
    make, hint = ONLY[name]
    model = Weight()
    only = make(model)
    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=lambda m, x: Loss(m(x).sum(), only=only),
        micro_batch_size=1,
    )

    def run():
        if not by_hand:
            engine.step(torch.ones(2))
            return
        with engine.window(torch.ones(2)) as window:
            for x in window:
                window.backward(model(x).mean(), only=only)

    with pytest.raises(PlanError, match="only= does not name parameters") as caught:
        run()
    assert hint in caught.value.hint
    assert model.w.item() == 1


@pytest.mark.parametrize("make", [list, tuple, dict.fromkeys, lambda p: nn.ParameterList(p)])
def test_any_container_of_parameters_can_be_named_again_and_again(make):
    model = Weight()
    only = make(list(model.parameters()))
    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=lambda m, x: Loss(m(x).sum(), only=only),
        micro_batch_size=1,
    )
    engine.step(torch.ones(2))
    assert model.w.item() == 0
