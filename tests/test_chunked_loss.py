"""The last layer and cross entropy in chunks: the numbers of the plain form, the memory of one chunk."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import snugfit
from snugfit import Job, Plan, PlanError, chunked_cross_entropy
from tolerances import CHUNKED_FLOAT32, EXACT_VALUE, FLOAT64

ROWS, FEATURES, CLASSES = (4, 16), 32, 1000


def inputs(dtype, *, bias, class_weight):
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    labels = torch.randint(CLASSES, ROWS, generator=generator)
    labels[0, :5] = labels[3, 9] = -100
    given = {"hidden": numbers(*ROWS, FEATURES), "weight": numbers(CLASSES, FEATURES) * 0.2}
    if bias:
        given["bias"] = numbers(CLASSES)
    weights = torch.rand(CLASSES, generator=generator, dtype=dtype) + 0.1 if class_weight else None
    return {name: value.requires_grad_() for name, value in given.items()}, labels, weights


def plain(given, labels, weights, *, reduction="mean", label_smoothing=0.0, logit_scale=1.0, ignore_index=-100):
    logits = F.linear(given["hidden"], given["weight"], given.get("bias")) * logit_scale
    loss = F.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        weights,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss.reshape(labels.shape) if reduction == "none" else loss


def results(loss, given):
    """The loss, and gradients under different weights of its elements."""
    factors = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    return [loss.detach(), *torch.autograd.grad((loss * factors).sum(), list(given.values()))]


@pytest.mark.parametrize("chunks", [1, 3, 7, 64, 1000])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FLOAT64), (torch.float32, CHUNKED_FLOAT32)])
def test_loss_and_gradients_are_those_of_the_plain_form_whatever_the_options(dtype, tolerance, reduction, chunks):
    for smoothing, weighted, bias, scale in itertools.product((0.0, 0.1), (False, True), (False, True), (1.0, 0.3)):
        given, labels, weights = inputs(dtype, bias=bias, class_weight=weighted)
        options = {"reduction": reduction, "label_smoothing": smoothing, "logit_scale": scale}
        expected = results(plain(given, labels, weights, **options), given)
        loss = chunked_cross_entropy(**given, labels=labels, class_weight=weights, chunks=chunks, **options)
        for found, right in zip(results(loss, given), expected, strict=True):
            assert found.dtype == right.dtype
            assert (found - right).norm() <= tolerance * right.norm()


def gradients(loss, hidden, weight):
    given = [one.clone().requires_grad_() for one in (hidden, weight)]
    return torch.autograd.grad(loss(*given), given)


def farthest(found, right):
    """The largest distance of a gradient from the right one, relative to that."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))


def head_of(spread, *, rows=512, classes=4096):
    torch.manual_seed(0)
    return torch.randn(rows, 64), torch.randn(classes, 64) * spread, torch.randint(classes, (rows,))


@pytest.mark.parametrize("chunks", [1, 4, 32])
def test_fp32_gradients_are_those_of_float64_to_1e_7_which_those_of_the_plain_loss_are_not(chunks):
    hidden, weight, labels = head_of(0.05)
    right = gradients(lambda h, w: F.cross_entropy(h @ w.t(), labels), hidden.double(), weight.double())
    found = gradients(lambda h, w: chunked_cross_entropy(h, w, labels, chunks=chunks), hidden, weight)
    usual = gradients(lambda h, w: F.cross_entropy(h @ w.t(), labels), hidden, weight)
    assert farthest(found, right) <= 1e-7 < farthest(usual, right)


@pytest.mark.parametrize("chunks", [1, 7, 24, 64])
@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.1, False), (0.0, True), (0.1, True)])
def test_fp32_gradients_are_those_of_float64_to_1e_7_with_all_options_and_closer_than_plain(
    smoothing, weighted, chunks
):
    torch.manual_seed(chunks)
    given = {"hidden": torch.randn(64, 16), "weight": torch.randn(1000, 16) / 4, "bias": torch.randn(1000) / 3}
    labels, weights = torch.randint(1000, (64,)), torch.rand(1000) if weighted else None
    labels[torch.rand(64) < 0.2] = -100

    def of(loss, dtype):
        own = {name: value.to(dtype).requires_grad_() for name, value in given.items()}
        factors = None if weights is None else weights.to(dtype)
        return torch.autograd.grad(loss(own, factors), list(own.values()))

    usually = lambda own, factors: plain(own, labels, factors, label_smoothing=smoothing)  # noqa: E731
    right, usual = of(usually, torch.float64), of(usually, torch.float32)
    options = {"labels": labels, "chunks": chunks, "label_smoothing": smoothing}
    found = of(lambda own, factors: chunked_cross_entropy(**own, class_weight=factors, **options), torch.float32)
    for ours, theirs, one in zip(found, usual, right, strict=True):
        assert farthest([ours], [one]) <= 1e-7
        assert farthest([ours], [one]) < farthest([theirs], [one])


def test_beside_large_logits_the_error_of_the_gradients_is_that_of_the_fp32_logits():
    hidden, weight, labels = head_of(0.5)
    right = gradients(lambda h, w: F.cross_entropy(h @ w.t(), labels), hidden.double(), weight.double())
    logits = (hidden @ weight.t()).double()
    slope = (logits.softmax(1) - F.one_hot(labels, 4096)) / len(labels)
    same_logits = [slope @ weight.double(), slope.t() @ hidden.double()]
    found = gradients(lambda h, w: chunked_cross_entropy(h, w, labels, chunks=8), hidden, weight)
    assert farthest(same_logits, right) > 3e-7
    assert farthest(found, right) <= farthest(same_logits, right) + 1e-7


def test_rows_that_are_nearly_right_keep_the_accuracy_of_their_gradients_and_losses():
    hidden, weight, labels = head_of(0.02)
    weight[labels] += hidden * 0.25  # logits of about 16 for the labels
    right = gradients(lambda h, w: F.cross_entropy(h @ w.t(), labels), hidden.double(), weight.double())
    found = gradients(lambda h, w: chunked_cross_entropy(h, w, labels, chunks=8), hidden, weight)
    usual = gradients(lambda h, w: F.cross_entropy(h @ w.t(), labels), hidden, weight)
    assert farthest(found, right) <= 5e-7 < 1e-6 < farthest(usual, right)
    only = torch.zeros(1, dtype=torch.long)
    loss = chunked_cross_entropy(torch.ones(1, 1), torch.tensor([[30.0], [0.0], [0.0]]), only, chunks=1)
    assert loss.item() == pytest.approx(2 * math.exp(-30), rel=1e-6)


def test_classes_that_a_bias_of_minus_infinity_forbids_get_no_gradient():
    given, labels, _ = inputs(torch.float64, bias=True, class_weight=False)
    with torch.no_grad():
        given["bias"][500:] = -math.inf
    labels = labels.where(labels < 500, -100)
    expected = results(plain(given, labels, None), given)
    for found, right in zip(
        results(chunked_cross_entropy(**given, labels=labels, chunks=3), given), expected, strict=True
    ):
        torch.testing.assert_close(found, right, rtol=FLOAT64, atol=FLOAT64)
    assert found[500:].abs().max() == 0


def test_c089_a_chunked_loss_has_the_loss_and_the_gradients_of_the_plain_one():
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, FEATURES, requires_grad=True), torch.randn(1000, FEATURES, requires_grad=True)
    labels = torch.randint(1000, (64,))
    labels[::5] = -100
    expected = F.cross_entropy(hidden @ weight.T * 0.1, labels)
    right = torch.autograd.grad(expected, [hidden, weight])
    loss = chunked_cross_entropy(hidden, weight, labels, chunks=8, logit_scale=0.1)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for found, value in zip(torch.autograd.grad(loss, [hidden, weight]), right, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-7)


def test_ignored_rows_have_no_loss_and_no_gradient_and_all_ignored_is_nan_as_in_torch():
    given, labels, _ = inputs(torch.float32, bias=False, class_weight=False)
    losses = chunked_cross_entropy(**given, labels=labels, chunks=4, reduction="none")
    losses.sum().backward()
    ignored = labels == -100
    assert losses[ignored].abs().max() == 0
    assert given["hidden"].grad[ignored].abs().max() == 0
    assert given["hidden"].grad[~ignored].abs().amin(1).max() > 0
    nothing = torch.full_like(labels, -100)
    assert chunked_cross_entropy(**given, labels=nothing, chunks=4).isnan()
    assert chunked_cross_entropy(**given, labels=nothing, chunks=4, reduction="sum") == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_whose_classes_all_weigh_nothing_have_no_mean_as_in_torch(smoothing):
    torch.manual_seed(0)
    given = {"hidden": torch.randn(4, 3).requires_grad_(), "weight": torch.randn(5, 3).requires_grad_()}
    labels, weights = torch.tensor([0, 1, -100, 1]), torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0])
    expected = results(plain(given, labels, weights, label_smoothing=smoothing), given)
    loss = chunked_cross_entropy(**given, labels=labels, class_weight=weights, chunks=2, label_smoothing=smoothing)
    for found, right in zip(results(loss, given), expected, strict=True):
        assert found.isnan().equal(right.isnan())
    assert loss.isnan()


def test_an_ignore_index_of_one_s_own():
    given, labels, _ = inputs(torch.float64, bias=False, class_weight=False)
    labels = labels.clamp(min=0)
    expected = plain(given, labels, None, ignore_index=0)
    found = chunked_cross_entropy(**given, labels=labels, chunks=3, ignore_index=0)
    assert found.item() == pytest.approx(expected.item(), rel=FLOAT64)


def test_a_tied_weight_gets_both_of_its_gradients():
    ids = torch.tensor([[1, 2, 3, 4]])
    table = nn.Embedding(10, 8).double()
    F.cross_entropy(F.linear(table(ids), table.weight).flatten(0, 1), ids.flatten()).backward()
    expected, table.weight.grad = table.weight.grad, None
    chunked_cross_entropy(table(ids), table.weight, ids, chunks=2).backward()
    torch.testing.assert_close(table.weight.grad, expected, rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_needs_no_gradient_gets_none(frozen):
    given, labels, _ = inputs(torch.float32, bias=True, class_weight=False)
    given[frozen].requires_grad_(False)
    chunked_cross_entropy(**given, labels=labels, chunks=3).backward()
    assert {name for name, value in given.items() if value.grad is None} == {frozen}


def test_under_autocast_logits_are_bf16_and_loss_and_the_weight_s_gradient_fp32():
    given, labels, _ = inputs(torch.float32, bias=False, class_weight=False)
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(given["hidden"], given["weight"])
        assert logits.dtype == torch.bfloat16
        expected = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss = chunked_cross_entropy(**given, labels=labels, chunks=3)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), abs=EXACT_VALUE)
    right = torch.autograd.grad(expected, list(given.values()))
    for found, value in zip(torch.autograd.grad(loss, list(given.values())), right, strict=True):
        assert found.dtype == torch.float32
        assert (found - value).norm() <= 2**-7 * value.norm()


def test_the_sum_over_chunks_of_a_half_precision_weight_s_gradient_is_not_rounded_chunk_by_chunk():
    rows = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(512, dtype=torch.long)
    chunked_cross_entropy(rows, weight, labels, chunks=512, reduction="sum").backward()
    assert weight.grad.flatten().tolist() == [-256, 256]  # in bf16 a sum of halves stops at 128


def test_saved_for_backward_are_the_inputs_and_three_numbers_per_row():
    given, labels, _ = inputs(torch.float32, bias=False, class_weight=False)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        chunked_cross_entropy(**given, labels=labels, chunks=8, reduction="sum")
    rows = labels.numel()  # of each the label, the highest logit and the sum of the other classes' exponentials
    assert sorted(sizes) == sorted([rows * FEATURES, CLASSES * FEATURES, rows, rows, rows])


def test_without_gradients_nothing_is_saved():
    given, labels, _ = inputs(torch.float32, bias=False, class_weight=False)
    with torch.no_grad():
        assert not chunked_cross_entropy(**given, labels=labels, chunks=8).requires_grad


def peak_above_inputs(loss, rows, classes, features):
    """Bytes that the forward and backward of a traced loss need beside inputs and their gradients."""

    def make_step():
        hidden = torch.zeros(rows, features, requires_grad=True)
        weight = nn.Parameter(torch.zeros(classes, features))
        labels = torch.zeros(rows, dtype=torch.long)

        def step():
            hidden.grad = weight.grad = None
            loss(hidden, weight, labels).backward()

        return step

    report = snugfit.trace(make_step, "cpu")
    fixed = 2 * 4 * features * (rows + classes) + 8 * rows
    return report.peak_allocated_bytes - fixed


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "class_weight": True}])
@pytest.mark.parametrize("chunks", [2, 4, 8, 16])
def test_the_peak_is_that_of_one_chunk(chunks, options):
    rows, classes, features = 512, 4096, 16
    logits = 4 * rows * classes
    whole = peak_above_inputs(lambda h, w, y: F.cross_entropy(F.linear(h, w), y), rows, classes, features)
    assert whole >= 2 * logits

    def loss(hidden, weight, labels):
        given = {**options, "class_weight": torch.ones(classes)} if "class_weight" in options else options
        return chunked_cross_entropy(hidden, weight, labels, chunks=chunks, **given)

    part = peak_above_inputs(loss, rows, classes, features)
    assert part <= whole / chunks + logits / chunks
    assert part <= 1.2 * logits / chunks  # in place: rows and classes are few beside their product


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 50)


def chunked_job(chunks=None):
    def loss(model, batch):
        hidden = model.body(batch["x"])
        return chunked_cross_entropy(hidden, model.head.weight, batch["y"], bias=model.head.bias, chunks=chunks)

    return job_of(loss)


def job_of(loss):
    def batch(n):
        generator = torch.Generator().manual_seed(1)
        return {"x": torch.randn(n, 4, generator=generator), "y": torch.randint(50, (n,), generator=generator)}

    return Job(Head, loss, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), batch)


def number_of_chunks(monkeypatch, job, plan):
    seen = []
    from snugfit.training import chunked_loss

    real = chunked_loss._parts
    monkeypatch.setattr(chunked_loss, "_parts", lambda rows, number: seen.append(number) or real(rows, number))
    engine = snugfit.build(job, plan, "cpu")
    engine.step(job.batch(plan.batch_size))
    return set(seen)


@pytest.mark.parametrize(("planned", "given", "used"), [(1, None, 1), (1, 3, 3), (4, None, 4), (4, 3, 4)])
def test_the_plan_s_number_of_chunks_comes_before_the_call_s(monkeypatch, planned, given, used):
    plan = Plan(batch_size=8, micro_batch_size=8, loss_chunks=planned)
    assert number_of_chunks(monkeypatch, chunked_job(given), plan) == {used}


def test_a_plan_with_chunks_for_a_loss_that_has_none_is_refused_before_the_update():
    job = job_of(lambda model, batch: F.cross_entropy(model.head(model.body(batch["x"])), batch["y"]))
    engine = snugfit.build(job, Plan(batch_size=8, micro_batch_size=4, loss_chunks=2), "cpu")
    before = [parameter.clone() for parameter in engine.model.parameters()]
    with pytest.raises(PlanError, match="not cut"):
        engine.step(job.batch(8))
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))


def test_a_window_in_chunks_trains_as_one_without():
    weights = []
    for chunks in (1, 3):
        torch.manual_seed(0)
        job = chunked_job()
        engine = snugfit.build(job, Plan(batch_size=10, micro_batch_size=4, loss_chunks=chunks), "cpu")
        engine.step(job.batch(10))
        weights.append(torch.cat([parameter.detach().flatten() for parameter in engine.model.parameters()]))
    torch.testing.assert_close(*weights, rtol=CHUNKED_FLOAT32, atol=CHUNKED_FLOAT32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunks": 0},
        {"chunks": 2.5},
        {"labels": torch.zeros(5, dtype=torch.long)},
        {"labels": torch.zeros(*ROWS)},
        {"weight": torch.zeros(CLASSES, FEATURES + 1)},
        {"bias": torch.zeros(3)},
        {"class_weight": torch.zeros(3)},
        {"reduction": "max"},
        {"label_smoothing": 1.5},
        {"label_smoothing": "a"},
        {"ignore_index": None},
        {"logit_scale": nn.Parameter(torch.ones(()))},
        {"weight": nn.Linear(FEATURES, CLASSES)},
        {"weight": torch.zeros(CLASSES, FEATURES, dtype=torch.complex64)},
        {"weight": torch.zeros(0, FEATURES)},
        {"weight": torch.zeros(CLASSES, FEATURES).to_sparse()},
        {"hidden": torch.zeros(*ROWS, FEATURES).to_sparse()},
        {"labels": torch.zeros(*ROWS, dtype=torch.long, device="meta")},
        {"bias": torch.zeros(CLASSES, dtype=torch.complex64)},
        {"bias": torch.zeros(CLASSES, dtype=torch.long)},
        {"class_weight": torch.zeros(CLASSES, dtype=torch.complex64)},
        {"class_weight": torch.ones(CLASSES, dtype=torch.long)},
        {"logit_scale": math.nan},
        {"logit_scale": math.inf},
        {"logit_scale": True},
        {"label_smoothing": math.nan},
        {"label_smoothing": True},
        {"ignore_index": 1.5},
    ],
)
def test_bad_input_is_refused_by_name(wrong):
    given, labels, _ = inputs(torch.float32, bias=False, class_weight=False)
    with pytest.raises(PlanError) as caught:
        chunked_cross_entropy(**{**given, "labels": labels, "chunks": 2, **wrong})
    assert next(iter(wrong)) in str(caught.value)


def test_a_second_derivative_is_refused_by_name():
    given, labels, _ = inputs(torch.float32, bias=False, class_weight=False)
    loss = chunked_cross_entropy(**given, labels=labels, chunks=2)
    with pytest.raises(snugfit.UnsupportedError, match="second derivative"):
        torch.autograd.grad(loss, given["hidden"], create_graph=True)


@pytest.mark.parametrize("wrong", [5, -1, -5])
def test_a_label_that_is_no_class_is_an_index_error_as_plainly(wrong):
    hidden, weight, labels = torch.randn(4, 3), torch.randn(5, 3), torch.tensor([0, 4, wrong, -100])
    with pytest.raises(IndexError):
        F.cross_entropy(F.linear(hidden, weight), labels)
    with pytest.raises(IndexError) as caught:
        chunked_cross_entropy(hidden, weight, labels, chunks=2)
    assert isinstance(caught.value, PlanError)
    assert str(wrong) in caught.value.got
    assert "0 to 4" in caught.value.expected
