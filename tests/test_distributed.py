"""Two gloo processes: counts, losses and decisions are those of one process with the whole batch."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

sys.path.insert(0, str(Path(__file__).parent))

from models import WIDTH, LinearStack, Weight, mean_product, regression_batch
from snugfit import Loss, NonFiniteError, Plan, PlanError, UnsupportedError
from snugfit.training import distributed
from snugfit.training.engine import Engine
from tolerances import FLOAT64
from two_ranks import RANKS, results_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every scenario returns on each of two ranks."""
    return results_of(SCENARIOS, tmp_path_factory.mktemp("ranks"))


class Keep(torch.optim.SGD):
    """Plain SGD that keeps the first gradient of every step."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=1.0)
        self.seen = []

    def step(self, closure=None):
        self.seen.append(next(p.grad for group in self.param_groups for p in group["params"]).clone())
        super().step()


def engine_of(model, loss=mean_product, **settings):
    keep = Keep(model)
    return Engine(DistributedDataParallel(model), keep, loss=loss, **settings), keep


def c003(rank):
    found = []
    micro_batches = [torch.tensor([6.0]), torch.ones(3)]

    def reported(model, micro_batch):
        return Loss(
            model(micro_batch).sum(),
            torch.tensor(len(micro_batch)),
            metrics={"x": (micro_batch.sum(), len(micro_batch))},
        )

    for loss in (mean_product, reported):
        engine, keep = engine_of(Weight(), loss)
        result = engine.step_window([micro_batches[rank]])
        engine.check_ranks()
        found += [float(keep.seen[0]), float(result.loss), float(result.count), float(result.grad_norm)]
    return [*found, float(result.metrics["x"])]


def test_c003_the_gradient_and_the_logged_loss_are_means_over_the_counted_units_of_all_ranks(ranks):
    for found in ranks["c003"]:
        assert found == [2.25, 2.25, 4.0, 2.25] * 2 + [2.25]


def c111(rank):
    engine, keep = engine_of(Weight())
    reductions = []
    engine.model.register_comm_hook(None, counting_hook(reductions))
    numbers = [(1.0, 3.0), (2.0, 5.0)][rank]
    engine.step_window([torch.tensor([x]) for x in numbers])
    first, once = float(keep.seen[0]), len(reductions)
    every, kept = engine_of(Weight(), plan=Plan(batch_size=4, micro_batch_size=1, world_size=2, sync="micro"))
    every.step_window([torch.tensor([x]) for x in numbers])
    engine.check_ranks()
    return [first, once, float(kept.seen[0])]


def counting_hook(reductions):
    def hook(state, bucket):
        reductions.append(1)
        future = dist.all_reduce(bucket.buffer() / RANKS, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    return hook


def test_c111_and_c109_gradients_are_reduced_once_in_the_last_micro_step(ranks):
    for found in ranks["c111"]:
        assert found == [2.75, 1, 2.75]


def c109(rank):
    """Forwards that DDP runs before their micro-step, or not at all."""
    found = []
    for outside in (0, 1, None):
        model = Weight(0.0)
        engine, _ = engine_of(model)
        parts = [torch.tensor([x]) for x in [(1.0, 3.0), (2.0, 5.0)][rank]]
        before = None if outside is None else engine.model(parts[outside]).mean()
        try:
            with engine.window(parts) as window:
                for i, x in enumerate(window):
                    if outside is None:
                        window.backward(engine.model.module(x).mean())
                    else:
                        window.backward(before if i == outside else engine.model(x).mean())
            found.append("went on")
        except PlanError as error:
            found.append(str(error))
        engine.step_window(parts)
        engine.check_ranks()
    try:
        Engine(torch.compile(engine.model), torch.optim.SGD(model.parameters(), 1.0), loss=mean_product)
        found.append("went on")
    except UnsupportedError as error:
        found.append(str(error))
    return found


def test_c109_a_forward_that_ddp_did_not_run_in_its_micro_step_is_detected_and_the_next_window_is_right(ranks):
    for *forwards, compiled in ranks["c109"]:
        assert all("DDP did not run in its own micro-step" in found for found in forwards)
        assert "DistributedDataParallel(torch.compile(model))" in compiled


def uneven(rank):
    """Unequal numbers and sizes of micro-batches, an empty last one, one rank's overflow, an empty rank."""
    torch.manual_seed(0)
    model = LinearStack().double()
    batch = regression_batch(7, torch.float64)
    keep = Keep(model)

    def loss(model, micro_batch):
        error = model(micro_batch["x"]) - micro_batch["y"]
        return (error.square().mean(1) * micro_batch["w"]).sum() / micro_batch["w"].sum()

    batch["w"] = torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0, 3.0, 0.0], dtype=torch.float64)
    wanted = torch.autograd.grad(loss(model, batch), next(model.parameters()))[0]
    engine = Engine(DistributedDataParallel(model), keep, loss=loss, count=lambda m: m["w"].sum())
    cuts = [[(0, 1), (1, 2), (2, 3)], [(3, 5), (5, 7)]][rank]
    parts = [{key: value[a:b] for key, value in batch.items()} for a, b in cuts]
    before = [p.detach().clone() for p in model.parameters()]
    engine.step_window(parts)
    error = float((keep.seen[0] - wanted).norm() / wanted.norm())
    bad = [{**parts[0], "y": parts[0]["y"] * (float("nan") if rank == 1 else 1.0)}]
    skipped = engine.step_window(bad)
    moved = [p.detach().clone() for p in model.parameters()]
    engine.check_ranks()
    empty = {**parts[0], "w": parts[0]["w"] * (0.0 if rank == 1 else 1.0)}
    refused = False
    try:
        engine.step_window([empty])
    except UnsupportedError:
        refused = True
    both = engine.step_window([{**parts[0], "w": parts[0]["w"] * 0}])
    return [error, skipped.reason, both.reason, refused, torch.equal(moved[0], before[0])]


def test_unequal_micro_batches_give_the_full_batch_s_gradient_and_all_ranks_decide_alike(ranks):
    for error, skipped, both, refused, same in ranks["uneven"]:
        assert error <= FLOAT64
        assert (skipped, both, refused, same) == ("non-finite gradient", "empty", True, False)


def drifting(rank):
    model = LinearStack()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_product)
    with torch.no_grad():
        model.layers[1].weight.fill_(float(rank))
        model.layers[2].bias.fill_(1.0)
        for parameter in (*model.layers[0].parameters(), model.layers[1].bias, model.layers[2].weight):
            parameter.zero_()
    try:
        engine.check_ranks()
    except PlanError as error:
        return list(error.names)
    return []


def test_ranks_that_drifted_apart_are_told_which_weights_differ(ranks):
    for names in ranks["drifting"]:
        assert names == ["layers.1.weight"]


def c022(rank):
    engine, _ = engine_of(Weight())
    optimizer = engine.optimizers[0]
    engine.runner.schedulers = (LambdaLR(optimizer, lambda step: 1 - step / 4),)
    rates = [engine.step_window(window).lr[0] for window in engine.windows([torch.ones(1)] * 8, 2)]
    return [*rates, optimizer.param_groups[0]["lr"]]


def test_c022_the_scheduler_moves_once_per_update_on_two_ranks_too(ranks):
    assert ranks["c022"] == [[1.0, 0.75, 0.5, 0.25, 0.0]] * RANKS


def test_one_process_is_one_rank_and_agrees_with_itself():
    assert distributed.world_size() == 1
    distributed.check_ranks(LinearStack())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64, torch.complex128])
def test_weights_of_every_width_are_compared(dtype):
    weights = torch.ones(3, dtype=dtype)
    others = weights.clone()
    others[1] *= -1
    assert int(distributed._bit_sum(weights)) != int(distributed._bit_sum(others))
    assert int(distributed._bit_sum(weights[0])) == int(distributed._bit_sum(others[0]))


class Normalised(nn.Module):
    """Two BatchNorm layers, of which one is never called."""

    def __init__(self):
        super().__init__()
        self.norm, self.head, self.unused = nn.BatchNorm1d(2), nn.Linear(2, 1), nn.BatchNorm1d(2, affine=False)

    def forward(self, x):
        return self.head(self.norm(x))


def pooled(rank):
    """Running statistics of two windows under the window policy; in the second one rank is given other sizes."""
    torch.manual_seed(0)
    model = Normalised().double()
    plan = Plan(batch_size=8, micro_batch_size=2, world_size=RANKS, norm_policy="window")
    ddp = DistributedDataParallel(model)
    engine = Engine(ddp, Keep(ddp), plan, loss=lambda model, x: model(x).square().mean())
    found = []
    for sizes in ((4, 4), (6, 2)):
        whole = torch.arange(16.0, dtype=torch.float64).reshape(8, 2) ** 2
        engine.step(whole[: sizes[0]] if rank == 0 else whole[sizes[0] :])
        engine.check_ranks()
        norm = model.norm
        found.append([norm.running_mean.clone(), norm.running_var.clone(), int(norm.num_batches_tracked)])
    return [*found, int(model.unused.num_batches_tracked), model.unused.running_var.tolist()]


def test_running_statistics_of_a_window_are_pooled_over_ranks_too(ranks):
    whole = torch.arange(16.0, dtype=torch.float64).reshape(8, 2) ** 2
    big = nn.BatchNorm1d(2).double()
    for windows in zip(*(found[:2] for found in ranks["pooled"]), strict=True):
        big(whole)
        for mean, variance, tracked in windows:
            torch.testing.assert_close(mean, big.running_mean, rtol=FLOAT64, atol=0)
            torch.testing.assert_close(variance, big.running_var, rtol=FLOAT64, atol=0)
            assert tracked == int(big.num_batches_tracked)
    for found in ranks["pooled"]:
        assert found[2:] == [0, [1.0, 1.0]]


def diagnosed(rank):
    model = LinearStack()
    engine, _ = engine_of(model, lambda model, x: model(x).mean(), micro_batch_size=1, nonfinite="raise")
    batch = torch.ones(2, WIDTH)
    skipped = [engine.step(batch).skipped]
    batch[1] = math.nan if rank == 1 else 1.0
    with pytest.raises(NonFiniteError) as caught:
        engine.step(batch)
    found = caught.value.diagnosis
    skipped.append(engine.step(torch.ones(2, WIDTH)).skipped)
    return [skipped, str(caught.value), found.rank, found.micro_batch, found.cause]


def test_every_rank_diagnoses_its_own_micro_batches_without_waiting_for_another(ranks):
    clean, bad = ranks["diagnosed"]
    assert clean[0] == bad[0] == [False, False]
    assert clean[2:] == [0, None, "none"]
    assert "look at the messages of the other ranks" in clean[1]
    assert bad[2:4] == [1, 1]
    assert "the input of micro-batch 1 is not finite" in bad[1]


def c045(rank):
    """A NaN in one micro-batch of one rank, then a normal window."""
    engine, keep = engine_of(Weight())
    numbers = [(1.0, 3.0), (2.0, float("nan"))][rank]
    skipped = engine.step_window([torch.tensor([x]) for x in numbers])
    before = (float(engine.model.module.w.detach()), engine.step_count, len(keep.seen))
    result = engine.step_window([torch.tensor([x]) for x in ((1.0, 3.0), (2.0, 5.0))[rank]])
    engine.check_ranks()
    return [skipped.reason, *before, result.reason, float(keep.seen[-1]), engine.step_count]


def test_c045_all_ranks_skip_the_window_in_which_one_has_a_nan(ranks):
    for found in ranks["c045"]:
        assert found == ["non-finite gradient", 1.0, 0, 0, None, 2.75, 1]


def static_graph(rank):
    model = Weight()
    wrapped = DistributedDataParallel(model, static_graph=True)
    with pytest.raises(UnsupportedError, match="static_graph"):
        Engine(wrapped, torch.optim.SGD(model.parameters(), lr=1.0), loss=mean_product)
    engine, _ = engine_of(Weight(), micro_batch_size=1)
    inner = engine.model.module
    return [engine.step(torch.ones(2)).skipped, engine.close() is inner]


def test_ddp_that_fixes_its_reductions_is_refused_by_name_and_any_other_is_given_back_plain(ranks):
    assert ranks["static_graph"] == [[False, True]] * RANKS


SCENARIOS = (
    c003,
    c022,
    c109,
    c111,
    uneven,
    drifting,
    c045,
    pooled,
    diagnosed,
    static_graph,
)
