"""Losses whose weights are wrong: divided twice, counted in another unit, a sum that is a mean."""

import pytest
import torch
from torch.nn import functional as F

from checked_jobs import found, own_loss, regression, sgd, transformers_model
from models import (
    VOCABULARY,
    LinearStack,
    Transformer,
    regression_batch,
    shifted_token_loss,
    squared_error,
    token_batch,
    token_loss,
)
from snugfit import BatchError, Engine, Job, Loss, Plan, check, tokens


@pytest.mark.parametrize("fixed", [1, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_a_sum_that_is_returned_as_a_mean_is_found(fixed, micro_batch_size):
    def loss(model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum") / fixed

    assert found(*regression(LinearStack, loss, 8, micro_batch_size)) == ["sum-returned-as-mean"]


@pytest.mark.parametrize(
    ("loss", "given", "remedy"),
    [
        (token_loss, "samples", "snugfit.tokens()"),
        (token_loss, tokens(shift=True), "snugfit.tokens()"),
        (shifted_token_loss, tokens(), "snugfit.tokens(shift=True)"),
        (shifted_token_loss, "samples", "snugfit.tokens(shift=True)"),
        (lambda m, b: F.cross_entropy(m(b["ids"]).mean(1), b["ids"][:, 0]), tokens(), '"samples"'),
    ],
)
def test_a_wrong_count_is_named_with_one_that_was_tried(loss, given, remedy):
    batch = token_batch(6)
    report = check(Job(Transformer, loss, sgd, batch, count=given), Plan(batch_size=6, micro_batch_size=2), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["wrong-count"]
    assert f"count={remedy} " in report.hazards[0].message


def test_labels_counted_without_their_shift_are_found_where_no_label_is_ignored():
    batch = token_batch(8, ignored=0.0)
    plan = Plan(batch_size=8, micro_batch_size=2)
    report = check(Job(Transformer, shifted_token_loss, sgd, batch, count=tokens()), plan, "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["wrong-count"]
    assert "tokens(shift=True)" in report.hazards[0].message
    assert found(Job(Transformer, shifted_token_loss, sgd, batch, count=tokens(shift=True)), plan) == []


def test_labels_of_a_pair_are_counted_by_their_place():
    ids = torch.randint(VOCABULARY, (4, 5))
    labels = ids.masked_fill(torch.rand(4, 5) < 0.4, -100)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    report = check(Job(Transformer, loss, sgd, (ids, labels)), Plan(batch_size=4, micro_batch_size=1), "cpu")
    assert "count=snugfit.tokens(key=1) " in report.hazards[0].message


def test_a_count_that_cannot_be_guessed_is_measured():
    def loss(model, batch):
        weights = batch["weight"]
        return (F.mse_loss(model(batch["x"]), batch["y"], reduction="none").mean(1) * weights).sum() / weights.sum()

    batch = {**regression_batch(4), "weight": torch.tensor([1.0, 0.0, 2.0, 1.0])}
    report = check(*regression(LinearStack, loss, batch=batch), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["wrong-count"]
    assert "weighs them 0.2500 to 0.7500" in report.hazards[0].message


def test_half_precision_does_not_hide_a_wrong_weight():
    """One label more or less among hundreds moves the gradient less than bfloat16 can show."""
    ids = torch.randint(VOCABULARY, (4, 100))
    labels = ids.clone()
    labels[0, 0] = -100
    job = Job(Transformer, token_loss, sgd, {"ids": ids, "labels": labels})
    report = check(job, Plan(batch_size=4, micro_batch_size=1, precision="bf16-mixed"), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["wrong-count"]
    assert report.gradient_error < 1e-2


def test_a_micro_batch_in_which_no_label_counts_is_explained():
    batch = token_batch(4, ignored=0.0)
    batch["labels"][:2] = -100
    report = check(Job(Transformer, token_loss, sgd, batch), Plan(batch_size=4, micro_batch_size=2), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["wrong-count"]
    assert "count=snugfit.tokens() " in report.hazards[0].message
    assert found(Job(Transformer, token_loss, sgd, batch, count=tokens()), Plan(batch_size=4, micro_batch_size=2)) == []


@pytest.mark.parametrize("counted", [False, True])
def test_a_loss_whose_total_is_a_mean_is_found(counted):
    def loss(model, batch):
        return Loss(squared_error(model, batch), len(batch["x"]) if counted else None)

    assert found(*regression(LinearStack, loss, 5, 2)) == ["mean-returned-as-sum"]


def causal_batch():
    ids = torch.randint(32, (6, 8))
    lengths = torch.tensor([8, 7, 3, 2, 8, 5])[:, None]
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(8) >= lengths, -100)}


def mean_of_sequence_means(model, batch):
    logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    kept = labels != -100
    return ((losses * kept).sum(1) / kept.sum(1)).mean()


@pytest.mark.parametrize(("loss", "is_right"), [(own_loss, True), (mean_of_sequence_means, False)])
def test_a_count_that_was_not_given_is_settled_as_training_does(loss, is_right):
    torch.manual_seed(0)
    model = transformers_model("gpt2", use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)().double()
    batch, plan = causal_batch(), Plan(batch_size=6, micro_batch_size=2)
    report = check(Job(model, loss, sgd, batch), plan, "cpu")
    assert report.ok == is_right
    assert any("tokens(shift=True) was counted" in line for line in report.assumptions)
    full = torch.autograd.grad(loss(model, batch), list(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.warns(UserWarning, match="count inferred"):
        Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, loss=loss).step(batch)
    moved = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    distance = sum(float((a - b).square().sum()) for a, b in zip(moved, full, strict=True)) ** 0.5
    assert (distance < report.gradient_tolerance) == is_right


@pytest.mark.parametrize("count", ["samples", tokens(shift=True)])
def test_a_count_that_was_given_is_taken_as_it_is(count):
    job = Job(transformers_model("gpt2", use_cache=False), own_loss, sgd, causal_batch(), count=count)
    report = check(job, Plan(batch_size=6, micro_batch_size=2), "cpu")
    assert [hazard.kind for hazard in report.hazards] == (["wrong-count"] if count == "samples" else [])
    assert not any("was counted" in line for line in report.assumptions)


def labels_not_ignored(batch):
    return float((batch["labels"] != -100).sum())


def test_a_function_that_counts_labels_is_tried_on_labels_of_other_lengths():
    batch, plan = token_batch(6, ignored=0.0), Plan(batch_size=6, micro_batch_size=2)
    wrong = Job(Transformer, shifted_token_loss, sgd, batch, count=labels_not_ignored)
    assert found(wrong, plan) == ["wrong-count"]
    assert found(Job(Transformer, token_loss, sgd, batch, count=labels_not_ignored), plan) == []


@pytest.mark.parametrize("count", ["samples", lambda batch: float(batch["labels"].numel())])
def test_an_example_that_cannot_show_a_wrong_count_is_remarked_on(count):
    plan = Plan(batch_size=6, micro_batch_size=2)
    report = check(Job(Transformer, token_loss, sgd, token_batch(6, ignored=0.0), count=count), plan, "cpu")
    assert report.ok
    (line,) = [line for line in report.assumptions if "could not show" in line]
    assert "snugfit.tokens()" in line
    batch = token_batch(6)
    report = check(Job(Transformer, token_loss, sgd, batch, count=tokens()), plan, "cpu")
    assert not any("could not show" in line for line in report.assumptions)


def detection_batch(num):
    labels = [{"boxes": torch.full((1 + i % 3, 4), float(i))} for i in range(num)]
    return {"x": torch.linspace(-1, 1, 4 * num).view(num, 4), "labels": labels}


def box_loss(model, batch):
    """A mean over boxes, of which samples have different numbers."""
    scores = model(batch["x"])
    pairs = [(scores[i] - target["boxes"]).square() for i, target in enumerate(batch["labels"])]
    return torch.cat(pairs).mean()


def cut_lists(batch, size):
    return [{key: value[i : i + size] for key, value in batch.items()} for i in range(0, len(batch["x"]), size)]


@pytest.mark.parametrize(
    ("count", "kinds"),
    [
        (lambda batch: sum(len(target["boxes"]) for target in batch["labels"]), []),
        (lambda batch: len(batch["x"]), ["wrong-count"]),
    ],
    ids=["boxes", "samples"],
)
def test_a_job_that_is_cut_by_hand_is_judged_though_snugfit_cannot_count_its_samples(count, kinds):
    job = Job(lambda: torch.nn.Linear(4, 4), box_loss, sgd, detection_batch(5), split=cut_lists, count=count)
    report = check(job, Plan(batch_size=5, micro_batch_size=2), "cpu")
    assert [hazard.kind for hazard in report.hazards] == kinds
    assert report.ok == (not kinds)


def test_values_that_are_not_finite_are_named_in_a_job_that_is_cut_by_hand():
    batch = detection_batch(4)
    batch["x"][1] = float("nan")
    count = lambda part: len(part["x"])  # noqa: E731
    job = Job(lambda: torch.nn.Linear(4, 4), box_loss, sgd, batch, split=cut_lists, count=count)
    assert [hazard.kind for hazard in check(job, Plan(batch_size=4, micro_batch_size=2), "cpu").hazards] == [
        "non-finite-data"
    ]


def test_what_is_cut_by_hand_and_cannot_be_counted_is_told_to_pass_a_count():
    job = Job(lambda: torch.nn.Linear(4, 4), box_loss, sgd, detection_batch(4), split=cut_lists)
    with pytest.raises(BatchError, match="did not cut cannot be counted") as caught:
        check(job, Plan(batch_size=4, micro_batch_size=2), "cpu")
    assert caught.value.hint.startswith("pass count=")
    assert "split=" not in caught.value.hint
