"""Sparse gradients, and optimizers that could unscale by themselves: the same weights as the plain form."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from models import LinearStack, regression_batch, same_bits, squared_error, state_of
from snugfit import Engine, Loss, LossScale, PlanError, UnsupportedError
from strategies import cuts
from tolerances import CUT_FLOAT32, FLOAT64

ROWS = 5


class Bag(nn.Module):
    """An embedding, sparse on demand, and a head."""

    def __init__(self, sparse, kind=nn.Embedding):
        super().__init__()
        self.table = kind(ROWS, 3, sparse=sparse, **({"mode": "sum"} if kind is nn.EmbeddingBag else {}))
        self.head = nn.Linear(3, 2)
        self.double()

    def forward(self, ids):
        found = self.table(ids)
        return self.head(found if found.dim() == 2 else found.sum(1))


def pair(kind=nn.Embedding):
    torch.manual_seed(0)
    sparse = Bag(True, kind)
    dense = Bag(False, kind)
    dense.load_state_dict(sparse.state_dict())
    return sparse, dense


def loss(model, part):
    return F.mse_loss(model(part["ids"]), part["y"])


def batch_of(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(ROWS - 1, (size, 4), generator=generator)  # the last row is never met
    return {"ids": ids, "y": torch.randn(size, 2, dtype=torch.float64, generator=generator)}


def cut(batch, sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [{k: v[a : a + n] for k, v in batch.items()} for a, n in zip(starts, sizes, strict=True)]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, of its Adagrad
@given(st.data())
def test_sparse_gradients_are_averaged_measured_and_clipped_like_dense_ones(data):
    size = data.draw(st.integers(1, 6))
    sizes, limit = data.draw(cuts(size)), data.draw(st.sampled_from([None, 1e-2, 1e3]))
    kind = data.draw(st.sampled_from([nn.Embedding, nn.EmbeddingBag]))
    optimizer = data.draw(st.sampled_from([torch.optim.SGD, torch.optim.Adagrad]))
    own = data.draw(st.booleans())

    def several(model, part):
        error = (model(part["ids"]) - part["y"]).square().mean(1)
        return [Loss(error.sum(), len(error)), Loss(error.sqrt().sum(), 2.0 * len(error)), error.mean()]

    results = []
    models = pair(kind)
    for model in models:
        engine = Engine(
            model, optimizer(model.parameters(), lr=0.1), loss=several if own else loss, max_grad_norm=limit
        )
        results = [*results, *(engine.step_window(cut(batch_of(size), sizes)) for _ in range(2))]
    for a, b in zip(results[:2], results[2:], strict=True):
        assert float(a.grad_norm) == pytest.approx(float(b.grad_norm), rel=FLOAT64)
        assert float(a.loss) == pytest.approx(float(b.loss), rel=FLOAT64)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=FLOAT64, atol=FLOAT64)


def test_what_a_sparse_gradient_holds_twice_is_summed_before_its_norm_is_taken():
    model = nn.Embedding(3, 1, sparse=True)
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.0), loss=lambda m, ids: m(ids).sum(), micro_batch_size=1
    )
    result = engine.step(torch.tensor([[1, 1], [1, 2]]))
    assert float(result.grad_norm) == pytest.approx(math.hypot(1.5, 0.5))  # not of 0.5, 0.5, 0.5, 0.5


def test_sparse_adam_sees_the_averaged_gradient_and_touches_only_rows_that_were_met():
    model, _ = pair()
    twin = copy.deepcopy(model)
    batch = batch_of(6)

    def optimizers(model):
        return [torch.optim.SparseAdam([model.table.weight]), torch.optim.AdamW(model.head.parameters())]

    engine = Engine(model, optimizers(model), loss=loss, micro_batch_size=2)
    plain = optimizers(twin)
    for _ in range(3):
        engine.step(batch)
        loss(twin, batch).backward()
        for optimizer in plain:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)  # Adam divides by small numbers
    state = engine.optimizers[0].state[model.table.weight]
    assert torch.equal(state["exp_avg"][-1], torch.zeros(3, dtype=torch.float64))


def test_a_sparse_gradient_that_is_not_finite_skips_the_window_and_fp16_is_unscaled():
    model = Bag(True).float()
    twin = Bag(False).float()
    twin.load_state_dict(model.state_dict())
    batch = batch_of(4)
    batch["y"] = batch["y"].float()
    settings = {"loss": loss, "micro_batch_size": 2, "precision": "16-mixed", "loss_scale": LossScale(init_scale=256.0)}
    engines = [Engine(m, torch.optim.SGD(m.parameters(), lr=0.1), **settings) for m in (model, twin)]
    results = [engine.step(batch) for engine in engines]
    assert [result.reason for result in results] == [None, None]
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, **CUT_FLOAT32)
    before = state_of(model, engines[0].optimizers[0])
    bad = {**batch, "y": batch["y"] * math.inf}
    assert engines[0].step(bad).reason == "non-finite gradient"
    assert same_bits(before, state_of(model, engines[0].optimizers[0]))


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        torch.optim.Adam,
        torch.optim.RMSprop,
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    ],
)
def test_an_optimizer_that_fails_on_sparse_gradients_is_refused_before_anything_runs(optimizer):
    model, _ = pair()
    with pytest.raises(UnsupportedError, match="table") as caught:
        Engine(model, optimizer(model.parameters()), loss=loss)
    assert caught.value.module == "table"
    frozen, _ = pair()
    Engine(frozen, optimizer(frozen.head.parameters()), loss=loss)  # nothing updates the table


def test_sparse_adam_over_dense_gradients_is_named_before_any_optimizer_moves():
    model, _ = pair()
    optimizers = [torch.optim.SGD([model.head.bias], lr=1.0), torch.optim.SparseAdam([model.head.weight])]
    before = [p.clone() for p in model.parameters()]
    engine = Engine(model, optimizers, loss=loss)
    with pytest.raises(PlanError, match="SparseAdam"):
        engine.step(batch_of(2))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_optimizer_that_could_take_the_loss_scale_is_not_given_it_twice(kind):
    """Its step unscales where a scaler hands it the scale; here the gradient is unscaled already."""
    models = [LinearStack() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    batch = regression_batch(6)
    engines = []
    for model, options in zip(models, ({"fused": True}, {"foreach": False}), strict=True):
        optimizer = kind(model.parameters(), lr=0.1, **options)
        assert not options.get("fused") or optimizer._step_supports_amp_scaling
        engines.append(Engine(model, optimizer, loss=squared_error, micro_batch_size=4, precision="16-mixed"))
    for bad in (False, True, False):
        given = {**batch, "y": batch["y"] * math.nan} if bad else batch
        before = state_of(models[0], engines[0].optimizers[0])
        results = [engine.step(given) for engine in engines]
        assert [result.skipped for result in results] == [bad, bad]
        assert same_bits(before, state_of(models[0], engines[0].optimizers[0])) is bad
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, **CUT_FLOAT32)
    assert results[0].loss_scale == 32768.0
