"""The engine against plain loops: bit for bit where counts are known and equal, else equal to the full batch."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from models import (
    WIDTH,
    ConvBatchNorm,
    LinearStack,
    Transformer,
    Weight,
    mean_product,
    regression_batch,
    same_bits,
    shifted_token_loss,
    squared_error,
    state_of,
    token_loss,
)
from snugfit import Loss, Segment
from snugfit.plans import Plan
from snugfit.training.counting import tokens
from snugfit.training.engine import Engine
from snugfit.training.splitting import split
from strategies import cuts, labels
from tolerances import CUT_FLOAT32, FLOAT64


class Keep(torch.optim.SGD):
    """Plain SGD of rate 0 that keeps the gradients which it was given."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)
        self.seen = []

    def step(self, closure=None):
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])


def relative_error(found, wanted):
    """Norm of the difference over the norm of the wanted gradient, all parameters together."""
    difference = sum(float((a - b).square().sum()) for a, b in zip(found, wanted, strict=True)) ** 0.5
    return difference / max(sum(float(b.square().sum()) for b in wanted) ** 0.5, 1e-300)


def full_batch_gradient(model, loss, batch):
    twin = copy.deepcopy(model)
    loss(twin, batch).backward()
    return [p.grad for p in twin.parameters()]


def engine_gradient(model, loss, micro_batches, count="samples"):
    keep = Keep(model)
    result = Engine(model, keep, loss=loss, count=count).step_window(micro_batches)
    return keep.seen[0], result


def parts_of(batch, sizes):
    """A batch cut into consecutive parts of the given sizes."""
    ones, parts, start = split(batch, 1), [], 0
    for size in sizes:
        rows = ones[start : start + size]
        parts.append({key: torch.cat([row[key] for row in rows]) for key in batch})
        start += size
    return parts


@given(st.data(), st.integers(1, 9))
def test_any_cut_of_a_mean_over_samples_has_the_full_batch_s_gradient(data, size):
    torch.manual_seed(size)
    model, batch = LinearStack().double(), regression_batch(size, torch.float64)
    sizes = data.draw(cuts(size))
    found, result = engine_gradient(model, squared_error, parts_of(batch, sizes))
    assert relative_error(found, full_batch_gradient(model, squared_error, batch)) <= FLOAT64
    assert float(result.loss) == pytest.approx(squared_error(model, batch).item(), rel=FLOAT64)
    assert result.num_micro_batches == len(sizes)


@settings(max_examples=25)  # a transformer, where the others are linear
@given(st.data(), st.integers(1, 6), st.booleans(), st.booleans())
def test_any_cut_of_a_mean_over_tokens_has_the_full_batch_s_gradient(data, size, shift, reports):
    torch.manual_seed(size)
    model = Transformer(depth=1, width=4).double()
    drawn = torch.tensor(data.draw(labels(size)))
    batch = {"ids": drawn.clamp(min=0), "labels": drawn}
    mean = shifted_token_loss if shift else token_loss
    counter = tokens(shift=shift)

    def reported(model, micro_batch):
        total = mean(model, micro_batch) * counter(micro_batch)
        return Loss(total, torch.tensor(counter(micro_batch)))

    found, result = engine_gradient(
        model, reported if reports else mean, parts_of(batch, data.draw(cuts(size))), "samples" if reports else counter
    )
    assert relative_error(found, full_batch_gradient(model, mean, batch)) <= FLOAT64
    assert float(result.count) == counter(batch)
    assert float(result.loss) == pytest.approx(mean(model, batch).item(), rel=FLOAT64)


@given(st.data(), st.integers(1, 9))
def test_a_loss_given_as_a_sum_has_the_gradient_of_the_mean(data, size):
    torch.manual_seed(size)
    model, batch = LinearStack().double(), regression_batch(size, torch.float64)

    def as_sum(model, micro_batch):
        return Loss(F.mse_loss(model(micro_batch["x"]), micro_batch["y"], reduction="sum") / WIDTH)

    found, _ = engine_gradient(model, as_sum, parts_of(batch, data.draw(cuts(size))))
    assert relative_error(found, full_batch_gradient(model, squared_error, batch)) <= FLOAT64


def plain_loop(model, optimizer, scheduler, batches, micro, max_grad_norm, scaler=None, precision=None):
    """What a careful person writes by hand, for equal micro-batches."""
    losses, norms = [], []
    for batch in batches:
        parts = split(batch, micro)
        total = 0.0
        for part in parts:
            with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
                loss = squared_error(model, part)
            loss = loss / len(parts)
            (loss if scaler is None else scaler.scale(loss)).backward()
            total = total + loss.detach()
        if scaler is not None:
            scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total)
    return losses, norms


@pytest.mark.parametrize("micro", [8, 4, 2, 1])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_with_equal_known_counts_the_engine_is_the_plain_loop_bit_for_bit(micro, precision, make):
    ours, theirs = LinearStack(), LinearStack()
    theirs.load_state_dict(ours.state_dict())
    batches = [regression_batch(8) for _ in range(5)]
    optimizers = [make(model.parameters()) for model in (ours, theirs)]
    schedulers = [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 5) for optimizer in optimizers]
    engine = Engine(
        ours,
        optimizers[0],
        loss=squared_error,
        micro_batch_size=micro,
        precision=precision,
        scheduler=schedulers[0],
        max_grad_norm=0.05,
    )
    results = [engine.step(batch) for batch in batches]
    scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
    dtype = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}[precision]
    losses, norms = plain_loop(theirs, optimizers[1], schedulers[1], batches, micro, 0.05, scaler, dtype)
    assert same_bits(state_of(ours, optimizers[0], schedulers[0]), state_of(theirs, optimizers[1], schedulers[1]))
    assert same_bits([result.loss for result in results], losses)
    assert same_bits([result.grad_norm for result in results], norms)
    assert max(norms) > 0.05  # clipping was at work


@pytest.mark.filterwarnings("ignore:BatchNorm makes:UserWarning")
def test_batchnorm_under_the_policy_micro_is_the_plain_loop_bit_for_bit():
    ours, theirs = ConvBatchNorm(), ConvBatchNorm()
    theirs.load_state_dict(ours.state_dict())
    batch = {"x": torch.randn(8, 3, 6, 6), "y": torch.randn(8, 2)}
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (ours, theirs)]
    Engine(ours, optimizers[0], loss=squared_error, micro_batch_size=4).step(batch)
    for part in split(batch, 4):
        (squared_error(theirs, part) / 2).backward()
    optimizers[1].step()
    assert same_bits(state_of(ours), state_of(theirs))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("micro", [8, 4, 2, 3])
def test_every_way_of_cutting_gives_the_same_losses(micro, recompute):
    segments = (Segment("layers.0"), Segment(("layers.1", "layers.2"))) if recompute else ()
    batches = [regression_batch(8) for _ in range(20)]
    model = LinearStack()
    golden, twin = copy.deepcopy(model), copy.deepcopy(model)
    wanted = [step.loss for step in map(engine_of(golden, 8, ()).step, batches)]
    found = [step.loss for step in map(engine_of(twin, micro, segments).step, batches)]
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted), **CUT_FLOAT32)
    plain = copy.deepcopy(model)
    same = [step.loss for step in map(engine_of(plain, micro, ()).step, batches)]
    assert same_bits(found, same)  # recomputing changes no bit
    assert same_bits(state_of(twin), state_of(plain))


def engine_of(model, micro, segments):
    plan = Plan(batch_size=8, micro_batch_size=micro, recompute=segments)
    return Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan, loss=squared_error)


def test_c001_the_window_is_the_mean_over_counted_units():
    def counted(micro_batch):
        return micro_batch.numel()

    for window in (
        [[6.0], [1.0, 1.0, 1.0]],
        [[6.0, 1.0], [1.0, 1.0]],
        [[6.0, 1.0, 1.0, 1.0]],
        [[6.0], [1.0], [1.0, 1.0]],
    ):
        found, result = engine_gradient(
            Weight().double(), mean_product, [torch.tensor(x).double() for x in window], counted
        )
        assert float(found[0]) == pytest.approx(2.25, rel=FLOAT64)
        assert float(result.loss) == pytest.approx(2.25, rel=FLOAT64)


def test_c001_b_a_short_last_micro_batch_counts_by_its_samples():
    for micro in (4, 1, 2, 3, 5):
        model = Weight()
        keep = Keep(model)
        Engine(model, keep, loss=mean_product, micro_batch_size=micro).step(torch.tensor([1.0, 1.0, 1.0, 1.0, 6.0]))
        torch.testing.assert_close(keep.seen[0][0], torch.tensor(2.0), **CUT_FLOAT32)


def test_c002_nobody_has_to_divide_by_the_number_of_micro_batches():
    found, result = engine_gradient(Weight(), mean_product, list(torch.arange(1.0, 9.0).split(2)))
    assert float(found[0]) == 4.5
    assert float(result.loss) == 4.5


def test_c009_a_loss_per_sequence_is_weighted_by_sequences():
    long, short = {"x": torch.full((1, 10), 6.0)}, {"x": torch.ones(3, 1)}

    def per_sequence(model, micro_batch):
        return model(micro_batch["x"].mean(1)).mean()

    found, _ = engine_gradient(Weight(), per_sequence, [long, short])
    assert float(found[0]) == 2.25


def test_c011_the_logged_loss_is_the_window_s_mean_once_and_detached():
    model = Weight()
    micro_batches = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 6.0)]
    result = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), loss=mean_product).step_window(micro_batches)
    assert float(result.loss) == 3.0
    assert result.loss.grad_fn is None
    assert not result.loss.requires_grad
    assert result.loss.dim() == 0
