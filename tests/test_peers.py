"""Faults that other training tools have, as promises that this one keeps; ``benchmarks/peers`` runs them on both.

Tests 1 (two ranks: ``test_distributed``, any cut: ``test_parity``), 4 (``test_diagnose_engine``) and 11
(``test_diagnose_origins``) of that list are elsewhere; here is what had no test of its own.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from models import (
    ConvBatchNorm,
    Transformer,
    Weight,
    WithDropout,
    gradients,
    mean_product,
    same_bits,
    squared_error,
    state_of,
    token_loss,
)
from snugfit import Engine, LossScale, Plan, Segment, checkpointing, tokens
from tolerances import EXACT_VALUE

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


class Seen(torch.optim.SGD):
    """SGD that keeps the gradients of every update."""

    def __init__(self, parameters, lr=0.0):
        super().__init__(parameters, lr=lr)
        self.seen = []

    def step(self, closure=None):
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        return super().step(closure)


# 2 and 3: a loader's end


class Stream(IterableDataset):
    """Ten numbers and no length."""

    def __iter__(self):
        yield from (torch.tensor(float(x)) for x in range(1, 11))


@pytest.mark.parametrize("length", [True, False])
@pytest.mark.parametrize(("tail", "wanted"), [("flush", [2.5, 6.5, 9.5]), ("drop", [2.5, 6.5])])
def test_no_micro_batch_of_one_epoch_counts_in_the_next_and_the_last_window_weighs_its_own_size(length, tail, wanted):
    model = Weight()
    optimizer = Seen(model.parameters())
    engine = Engine(model, optimizer, loss=mean_product)
    loader = DataLoader(list(Stream()) if length else Stream(), batch_size=1)
    for _ in range(2):
        for window in engine.windows(loader, 4, tail=tail):
            assert model.w.grad is None
            engine.step_window(window)
        assert model.w.grad is None
    assert [float(found[0]) for found in optimizer.seen] == 2 * wanted


# 4 and 5: overflow


def one_sided(model, x):
    """Two weights; which of them gets an infinite gradient is in the batch."""
    return (model[0].w * x[:, 0] + model[1].w * x[:, 1]).mean()


@pytest.mark.parametrize("bad", [(math.inf, 1.0), (1.0, math.inf), (math.inf, math.inf), (math.nan, 1.0)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_overflow_under_one_of_two_optimizers_skips_both_and_halves_the_scale_once(precision, bad):
    model = nn.ModuleList([Weight(1.0), Weight(1.0)])
    optimizers = [torch.optim.SGD([part.w], lr=1.0) for part in model]
    schedulers = [LambdaLR(optimizer, lambda step: 1 - step / 4) for optimizer in optimizers]
    engine = Engine(
        model,
        optimizers,
        loss=one_sided,
        precision=precision,
        scheduler=schedulers,
        loss_scale=LossScale(init_scale=8.0) if precision == "16-mixed" else None,
    )
    average = AveragedModel(model)
    for batch, scale_after in ((torch.tensor([[1.0, 1.0], bad]), 4.0), (torch.ones(2, 2), 4.0)):
        result = engine.step_window(batch.split(1))
        if not result.skipped:
            average.update_parameters(model)
        if precision == "16-mixed":
            assert engine.state_dict()["scaler"]["scale"] == scale_after
    assert (result.step, engine.step_count, int(average.n_averaged)) == (1, 1, 1)
    assert result.lr == (1.0, 1.0)
    assert [part.w.item() for part in model] == [0.0, 0.0]


# 6: dropout under activation checkpointing


def applied(model, path):
    """Apply recomputation along one of the ways there are."""
    if path == "blocks":
        return checkpointing.apply(model, checkpointing.blocks(model))
    if path == "every second":
        return checkpointing.apply(model, checkpointing.every(model, 2))
    if path == "segments":
        return checkpointing.apply(model, checkpointing.segments(model, 2))
    if path == "match":
        return checkpointing.apply(model, checkpointing.match(model, "layers.[0-9]"))
    return checkpointing.apply(model, (Segment(("layers.0", "layers.1")),))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("path", ["blocks", "every second", "segments", "match", "run", "plan"])
def test_dropout_draws_its_mask_once_on_every_way_of_recomputing(path, precision):
    model, x = WithDropout(), torch.randn(4, 6)
    batch = {"x": x, "y": torch.zeros(4, 6)}
    found = []
    for recomputed in (False, True):
        twin = copy.deepcopy(model)
        plan = None
        if recomputed and path == "plan":
            segments = checkpointing.blocks(twin)
            plan = Plan(batch_size=4, micro_batch_size=2, precision=precision, recompute=segments)
        elif recomputed:
            applied(twin, path)
        optimizer = Seen(twin.parameters())
        options = {"plan": plan} if plan is not None else {"precision": precision, "micro_batch_size": 2}
        engine = Engine(twin, optimizer, loss=squared_error, **options)
        torch.manual_seed(3)
        engine.step(batch)
        found.append([*optimizer.seen[0], torch.rand(1)])  # the random stream goes on where it would have
    assert same_bits(*found)


# 7: BatchNorm


@pytest.mark.parametrize("recompute", [(), (Segment("features"),), (Segment("features.0"), Segment("features.1"))])
@pytest.mark.parametrize(("policy", "moves"), [("window", 1), ("micro", 4), ("frozen", 0)])
@pytest.mark.filterwarnings("ignore:.*BatchNorm")
def test_batches_are_tracked_as_the_policy_says_whatever_is_recomputed(policy, moves, recompute):
    model = ConvBatchNorm()
    plan = Plan(batch_size=16, micro_batch_size=4, norm_policy=policy, recompute=recompute)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, optimizer, plan, loss=lambda m, b: F.mse_loss(m(b["x"]), b["y"]))
    for window in (1, 2):
        engine.step({"x": torch.randn(16, 3, 6, 6), "y": torch.randn(16, 2)})
        tracked = [int(m.num_batches_tracked) for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        assert tracked == [window * moves] * 2


# 9: clipping


@pytest.mark.parametrize("scale", [None, 1.0, 64.0, 8192.0])
@pytest.mark.parametrize(("limit", "clipped"), [(1.0, 1.0), (4.0, 4.0), (100.0, 5.0)])
def test_what_is_clipped_and_reported_does_not_depend_on_the_loss_scale(scale, limit, clipped):
    model = Weight()
    optimizer = Seen(model.parameters())
    settings = {} if scale is None else {"precision": "16-mixed", "loss_scale": LossScale(init_scale=scale)}
    result = Engine(model, optimizer, loss=mean_product, max_grad_norm=limit, **settings).step_window(
        [torch.tensor([4.0]), torch.tensor([6.0])]
    )
    assert float(result.grad_norm) == 5.0
    assert float(optimizer.seen[0][0]) == pytest.approx(clipped, rel=EXACT_VALUE)


# 10: nothing to learn from


def masked_loss(model, batch):
    mask = (batch["labels"] != -100).float()
    losses = F.cross_entropy(
        model(batch["ids"]).flatten(0, 1), batch["labels"].clamp(min=0).flatten(), reduction="none"
    )
    return (losses * mask.flatten()).sum() / mask.sum()


def tokens_of(*counts):
    """One micro-batch for each number of labels that count."""
    parts = []
    for count in counts:
        labels = torch.full((1, 4), -100)
        labels[0, :count] = 1
        parts.append({"ids": torch.ones(1, 4, dtype=torch.long), "labels": labels})
    return parts


@pytest.mark.parametrize("loss", [token_loss, masked_loss], ids=["fused", "masked by hand"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_window_without_a_valid_token_moves_nothing_and_is_not_logged_as_a_loss_of_zero(precision, loss):
    model = Transformer(depth=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    engine = Engine(model, optimizer, loss=loss, count=tokens(), scheduler=scheduler, precision=precision)
    before = state_of(model, optimizer)
    result = engine.step_window(tokens_of(0, 0))
    assert (result.skipped, result.reason, result.count) == (True, "empty", 0)
    assert math.isnan(float(result.loss))
    assert same_bits(state_of(model, optimizer), before)
    assert (engine.step_count, result.lr, scheduler.get_last_lr()) == (0, (0.1,), [0.1])
    assert not gradients(model)


@pytest.mark.parametrize("loss", [token_loss, masked_loss], ids=["fused", "masked by hand"])
@pytest.mark.parametrize("counts", [(0, 3), (3, 0), (0, 1, 0, 2, 0)])
def test_micro_batches_without_a_valid_token_leave_the_others_alone(counts, loss):
    model = Transformer(depth=1)
    found = []
    for some in (counts, [count for count in counts if count]):
        optimizer = Seen(model.parameters())
        result = Engine(model, optimizer, loss=loss, count=tokens()).step_window(tokens_of(*some))
        assert not result.skipped
        found.append([result.loss, *optimizer.seen[0]])
    assert all(tensor.isfinite().all() for tensor in found[0])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
