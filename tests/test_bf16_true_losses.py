"""Losses and evaluation of bf16 weights are in fp32, and recomputation changes no bit of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bf16_jobs import BF16, adamw, held, made, mean
from models import WIDTH, LinearStack, Transformer, regression_batch, same_bits, state_of, token_batch, token_loss
from snugfit import Segment, precision, tokens


class Scores(nn.Module):
    """The same bf16 score for 50000 classes."""

    def __init__(self, inside=None):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.inside = inside

    def forward(self, x, target=None):
        scores = self.w * x.new_ones(len(x), 50000)
        return scores if self.inside is None else self.inside(scores, target)


def test_c081_the_loss_of_bf16_scores_is_computed_and_logged_in_fp32():
    target = torch.zeros(4, dtype=torch.long)
    assert F.cross_entropy(torch.zeros(1, 50000, dtype=BF16), target[:1]).item() == 10.8125
    engine = made(Scores, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), adamw)
    result = engine.step({"x": torch.ones(4, 1), "y": target})
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(10.819778, abs=1e-5)
    with engine.evaluating() as model:
        scores = model(torch.ones(4, 1))
        assert scores.dtype == BF16
        engine.model.w.data.zero_()
        assert F.cross_entropy(model(torch.ones(4, 1)), target).item() == pytest.approx(10.819778, abs=1e-5)


def test_c081_in_a_window_by_hand_too():
    engine = made(Scores, mean, adamw)
    with engine.window({"x": torch.ones(4, 1), "y": torch.zeros(4, dtype=torch.long)}) as window:
        for micro_batch in window:
            window.backward(F.cross_entropy(engine.model(micro_batch["x"]), micro_batch["y"]))
    assert window.result.loss.item() == pytest.approx(10.819778, abs=1e-5)


@pytest.mark.parametrize("inside", [nn.CrossEntropyLoss(), F.cross_entropy, lambda s, t: nn.CrossEntropyLoss()(s, t)])
def test_c081_a_loss_that_the_model_computes_itself_is_fp32_too(inside):
    batch = {"x": torch.ones(4, 1), "y": torch.zeros(4, dtype=torch.long)}
    engine = made(lambda: Scores(inside), lambda m, b: m(b["x"], b["y"]), adamw)
    result = engine.step(batch)
    assert result.loss.item() == pytest.approx(10.819778, abs=1e-5)


def test_c081_a_loss_that_the_model_computes_by_hand_is_warned_about_once():
    def inside(scores, target):
        return -scores.log_softmax(-1).gather(1, target[:, None]).mean()

    batch = {"x": torch.ones(4, 1), "y": torch.zeros(4, dtype=torch.long)}
    engine = made(lambda: Scores(inside), lambda m, b: m(b["x"], b["y"]), adamw)
    with pytest.warns(UserWarning, match=r"logits\.float\(\)"):
        engine.step(batch)
    engine.step(batch)


class Judged(nn.Module):
    """Blocks that each add a loss of their own, one of them without parameters."""

    def __init__(self, seen):
        super().__init__()
        self.blocks = nn.ModuleList([Judging(nn.Linear(WIDTH, WIDTH), seen), Judging(nn.Tanh(), seen)])

    def forward(self, x):
        total = 0
        for block in self.blocks:
            x, loss = block(x)
            total = total + loss
        return total


class Judging(nn.Module):
    def __init__(self, inner, seen):
        super().__init__()
        self.inner, self.seen = inner, seen

    def forward(self, x):
        x = self.inner(x)
        loss = F.mse_loss(x, torch.zeros_like(x))
        self.seen.append(loss.dtype)
        return x, loss


def test_c081_losses_inside_of_recomputed_segments_are_the_same_again():
    def gradient(recompute):
        torch.manual_seed(0)
        seen = []
        engine = made(lambda: Judged(seen), lambda m, x: m(x), adamw, fields={"recompute": recompute})
        result = engine.step(torch.randn(4, WIDTH))
        return [result.loss, result.grad_norm], seen

    plain, seen = gradient(())
    recomputed, again = gradient((Segment("blocks.0"), Segment("blocks.1")))
    assert same_bits(plain, recomputed)
    assert {*seen, *again} == {torch.float32}


def test_a_loss_may_call_parts_of_the_model_and_use_its_weights():
    def loss(model, micro_batch):
        hidden = model.layers[0](micro_batch["x"])
        return F.mse_loss(F.linear(hidden, model.layers[1].weight), micro_batch["y"])

    engine = made(LinearStack, loss, adamw)
    assert torch.isfinite(engine.step(regression_batch(4)).loss)


def test_evaluation_leaves_the_weights_and_takes_inputs_as_they_are():
    engine = made(Transformer, token_loss, adamw, count=tokens())
    before = state_of(engine.model)
    with engine.evaluating() as model:
        assert model(token_batch(4)["ids"]).dtype == BF16
    assert same_bits(before, state_of(engine.model))


@pytest.mark.parametrize("segments", [("blocks.0",), ("blocks.0", "blocks.1")])
@pytest.mark.parametrize("island", [None, "blocks.1", "blocks.*.norm"])
def test_recompute_changes_no_bit(segments, island):
    def weights(recompute):
        def model():
            torch.manual_seed(3)
            transformer = Transformer()
            if island:
                precision.keep_fp32(transformer, island)
            return transformer

        engine = made(model, token_loss, adamw, count=tokens(), fields={"recompute": recompute})
        torch.manual_seed(4)
        for _ in range(2):
            engine.step(token_batch(4))
        return [p.detach() for p in held(engine)]

    assert same_bits(weights(()), weights((Segment(segments),)))
