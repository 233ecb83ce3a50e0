"""Losses with denominators of their own: ratios over the window, whatever the micro-batches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from models import LinearStack, Weight, mean_product, regression_batch
from snugfit import BatchError, Engine, Loss, PlanError
from strategies import cuts
from test_step import Sgd, values, window
from tolerances import EXACT_VALUE, FLOAT64
from weighted_losses import CLASSES, Classifier, Keep, batch_of, cut, full_gradients, relative_error, step_of

# --- the cases ---


def test_c001_a_token_weighs_what_a_token_weighs_however_the_window_is_cut():
    def loss(model, x):
        return Loss((model.w * x).sum(), x.numel())

    tokens = [6.0, 1.0, 1.0, 1.0]
    for sizes in ([1, 3], [4], [2, 2], [1, 1, 1, 1], [3, 1]):
        parts = list(torch.tensor(tokens).split(sizes))
        for function in (loss, mean_product, lambda m, x: Loss(m(x).sum(), torch.tensor(x.numel()))):
            outcome, model = window(parts, [float(size) for size in sizes], function, Weight(1.0), reference=None)
            assert model.w.item() == pytest.approx(1.0 - 2.25, abs=EXACT_VALUE)
            assert float(outcome.loss) == pytest.approx(2.25, abs=EXACT_VALUE)
    for sizes in ([4, 1], [5], [1] * 5, [2, 2, 1]):
        model = Weight(1.0)
        engine = Engine(model, Sgd(model.parameters()), loss=mean_product)
        result = engine.step_window(list(torch.tensor([1.0, 1.0, 1.0, 1.0, 6.0]).split(sizes)))
        assert model.w.item() == pytest.approx(-1.0, abs=EXACT_VALUE)
        assert float(result.loss) == pytest.approx(2.0, abs=EXACT_VALUE)


@pytest.mark.parametrize("form", ["mean", "sum", "sum and count", "function without a count argument"])
def test_c002_nobody_has_to_divide_by_the_number_of_micro_batches(form):
    class Blind(nn.Module):
        """Its loss takes no count argument."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x).mean()

    inner = Weight(1.0)
    model = Blind(inner) if form.startswith("function") else inner
    loss = {
        "mean": mean_product,
        "sum": lambda m, x: Loss(m(x).sum()),
        "sum and count": lambda m, x: Loss(m(x).sum(), len(x)),
        "function without a count argument": lambda m, x: m(x),
    }[form]
    engine = Engine(model, Sgd(model.parameters()), loss=loss, micro_batch_size=2)
    result = engine.step(torch.arange(1.0, 9.0))
    assert result.num_micro_batches == 4
    assert inner.w.item() == 1.0 - 4.5
    assert float(result.loss) == 4.5


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("form", ["mean", "sum", "sum and count"])
def test_c008_label_smoothing_changes_nothing_about_the_weights(smoothing, form):
    model = nn.Linear(2, CLASSES, bias=False)
    nn.init.zeros_(model.weight)
    x, labels = torch.randn(8, 2), torch.randint(CLASSES, (8,))

    def loss(model, part):
        reduction = "mean" if form == "mean" else "sum"
        value = F.cross_entropy(model(part[0]), part[1], label_smoothing=smoothing, reduction=reduction)
        return {"mean": value, "sum": Loss(value), "sum and count": Loss(value, len(part[1]))}[form]

    wanted = full_gradients(model, F.cross_entropy(model(x), labels, label_smoothing=smoothing))
    found, result, _ = step_of(model, loss, [(x[i : i + 2], labels[i : i + 2]) for i in range(0, 8, 2)])
    assert float(result.loss) == pytest.approx(1.386294, abs=EXACT_VALUE)
    assert relative_error(found, wanted) < EXACT_VALUE


@pytest.mark.parametrize("form", ["mean", "sum", "own count"])
def test_c009_a_loss_per_sequence_is_a_mean_over_sequences(form):
    parts = [{"loss": torch.tensor([6.0])}, {"loss": torch.ones(3)}]

    def loss(model, part):
        value = model.w * part["loss"]
        return {"mean": value.mean(), "sum": Loss(value.sum()), "own count": Loss(value.sum(), len(value))}[form]

    found, result, _ = step_of(Weight(1.0), loss, parts)
    assert float(found[0]) == 2.25
    assert float(result.loss) == 2.25
    assert result.count == 4.0


@pytest.mark.parametrize("form", ["mean", "own count", "two losses"])
def test_c011_the_loss_is_logged_once_per_window_without_a_graph(form):
    def loss(model, x):
        value = (model.w * x).sum()
        return {"mean": value, "own count": Loss(value, 1), "two losses": [value / 2, Loss(value / 2, 1)]}[form]

    outcome, _ = window(values(1, 2, 3, 6), [1.0] * 4, loss, Weight(1.0), reference=None)
    assert float(outcome.loss) == 3.0
    assert outcome.loss.grad_fn is None
    assert not outcome.loss.requires_grad
    assert outcome.loss.dim() == 0


# --- against the full batch, in float64 ---


@given(st.data())
def test_class_weights_are_one_ratio_over_the_window(data):
    size = data.draw(st.integers(1, 9))
    batch, sizes = batch_of(size, data.draw(st.integers(0, 99))), data.draw(cuts(size))
    on_device, smoothing = data.draw(st.booleans()), data.draw(st.sampled_from([0.0, 0.1]))
    weight = torch.tensor([0.1, 1.0, 5.0, 30.0], dtype=torch.float64)

    def loss(model, part):
        total = F.cross_entropy(model(part["x"])[0], part["labels"], weight, reduction="sum", label_smoothing=smoothing)
        count = weight[part["labels"]].sum()
        return Loss(total, count if on_device else float(count))

    torch.manual_seed(0)
    model = Classifier()
    whole = F.cross_entropy(model(batch["x"])[0], batch["labels"], weight, label_smoothing=smoothing)
    wanted, whole = full_gradients(model, whole), float(whole.detach())
    keep = Keep(model)
    engine = Engine(model, keep, loss=loss)
    for _ in range(2):  # the second window takes R from the first
        result = engine.step_window(cut(batch, sizes))
        assert relative_error(keep.seen[-1], wanted) <= FLOAT64
        assert abs(float(result.loss) - whole) <= FLOAT64 * abs(whole)


# --- nothing to count ---


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_empty_in_a_micro_batch_or_everywhere_leaves_the_others_alone(zero, bad):
    def loss(model, x):
        nothing = Loss(model.w * bad, zero)
        second = Loss((model.w * x).sum(), 1) if float(x.sum()) < 3 else nothing
        return Loss((2 * model.w * x).sum(), torch.tensor(2.0)), second, nothing

    outcome, model = window(values(1, 2, 3), [1.0] * 3, loss, Weight(1.0), reference=None)
    assert outcome.reason is None
    assert model.w.item() == pytest.approx(1.0 - 2.0 - 1.5, abs=EXACT_VALUE)
    assert float(outcome.loss) == pytest.approx(3.5, abs=EXACT_VALUE)


@pytest.mark.parametrize("zero", [0, torch.tensor(0)])
def test_a_window_in_which_every_loss_is_empty_makes_no_step(zero):
    outcome, model = window(
        values(1, 2), [1.0, 1.0], lambda m, x: (Loss(m.w * math.nan, zero), Loss(m.w * 1, zero)), reference=None
    )
    assert outcome.reason == "empty"
    assert math.isnan(float(outcome.loss))
    assert model.w.item() == 0.0


def test_micro_batches_that_count_nothing_are_left_out_with_several_losses_too():
    def loss(model, x):
        return model(x).mean(), Loss(model(x).sum(), x.numel())

    outcome, model = window([torch.zeros(0), *values(4), torch.zeros(0)], [0.0, 1.0, 0.0], loss, reference=None)
    assert outcome.reason is None
    assert model.w.item() == -8.0


def test_what_counted_nothing_keeps_the_reference_of_the_windows_before():
    def loss(model, x):
        return model(x).mean(), Loss(model(x).sum(), 0 if float(x.sum()) == 0 else 8)

    engine = Engine(model := Weight(1.0), Keep(model), loss=loss)
    engine.step_window(values(1, 2))
    engine.step_window(values(0, 0))
    assert engine.state_dict(model=False)["progress"]["reference"] == (16.0,)


# --- fp16 ---


@pytest.mark.parametrize("device_count", [True, False])
def test_2048_raw_token_losses_do_not_overflow_fp16_not_even_in_the_first_window(device_count):
    torch.manual_seed(0)
    model = nn.Linear(8, CLASSES)
    x, labels = torch.randn(2048, 8), torch.randint(CLASSES, (2048,))

    def loss(model, part):
        total = F.cross_entropy(model(part[0]), part[1], reduction="sum")
        count = len(part[1])
        return Loss(total, torch.tensor(count) if device_count else count), Loss(0.1 * total, float(count))

    keep = Keep(model)
    engine = Engine(model, keep, loss=loss, precision="16-mixed")
    parts = [(x[i : i + 512], labels[i : i + 512]) for i in range(0, 2048, 512)]
    results = [engine.step_window(parts) for _ in range(2)]
    assert [result.reason for result in results] == [None, None]
    wanted = full_gradients(model, 1.1 * F.cross_entropy(model(x), labels))
    assert relative_error(keep.seen[0], wanted) < 1e-2  # fp16


# --- contradictions and bad input ---


def half(model, x):
    return Loss(model(x).sum(), 1) if float(x.sum()) == 1 else mean_product(model, x)


CONTRADICTIONS = {
    "another number": lambda m, x: [m(x).mean()] * int(x.sum()),
    "another number with counts": lambda m, x: [Loss(m(x).sum(), 1)] * int(x.sum()),
    "a count at one time": half,
    "kinds that change places": lambda m, x: [Loss(m(x).sum(), 1), m(x).mean()][:: 1 if float(x.sum()) == 1 else -1],
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_losses_of_one_window_that_contradict_each_other_are_an_error_and_move_nothing(name):
    model = Weight(1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(model, optimizer, loss=CONTRADICTIONS[name])
    with pytest.raises(PlanError, match=r"another number|contradict"):
        engine.step_window(values(1, 2))
    assert model.w.item() == 1.0
    assert model.w.grad is None
    assert not optimizer.state
    assert engine.step_window(values(1, 1)).reason is None  # the engine goes on


BAD = {
    "nothing": (lambda m, b: None, "NoneType", "return the loss"),
    "nothing in a sequence": (lambda m, b: [m(b["x"]).mean(), None], "NoneType", "return the loss"),
    "a vector": (lambda m, b: m(b["x"]), "shape (4, 6)", ".mean()"),
    "no graph": (lambda m, b: m(b["x"]).mean().detach(), "without a graph", ".detach()"),
    "a number": (lambda m, b: m(b["x"]).mean().item(), "float", "loss tensor"),
    "a dictionary": (lambda m, b: {"loss": m(b["x"]).mean()}, "dict", "loss tensor"),
    "an empty sequence": (lambda m, b: [], "an empty list", "return the loss"),
    "a vector count": (lambda m, b: Loss(m(b["x"]).mean(), torch.ones(2)), "of", "count"),
    "a module that takes scores and labels": (
        nn.CrossEntropyLoss(),
        "CrossEntropyLoss",
        "def loss(",
    ),
    "a function that takes scores and labels": (F.mse_loss, "mse_loss", "def loss("),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("position", [0, 1])
def test_a_loss_that_cannot_be_used_says_what_to_do_and_moves_nothing(name, position):
    loss, got, hint = BAD[name]
    model = LinearStack()
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    calls = []

    def function(model, batch):
        calls.append(1)
        return loss(model, batch) if len(calls) > position else m_loss(model, batch)

    function = loss if position == 0 or "takes scores" in name else function
    with pytest.raises(PlanError) as caught:
        Engine(model, optimizer, loss=function).step_window([regression_batch(4), regression_batch(4)])
    assert got in caught.value.got
    assert hint in caught.value.hint
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state


def m_loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def test_an_empty_list_is_no_window():
    engine = Engine(model := Weight(1.0), Sgd(model.parameters()), loss=mean_product)
    with pytest.raises(BatchError, match="without micro-batches"):
        engine.step_window([])
    assert engine.step_window(values(1)).reason is None
