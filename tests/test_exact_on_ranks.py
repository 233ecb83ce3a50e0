"""Two gloo processes: losses with counts of their own, and loaders of another length, are exact or named."""

import copy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

from models import LinearStack, Transformer, Weight, mean_product, regression_batch, token_batch, token_loss
from snugfit import Engine, Loss, Plan, PlanError, Segment, UnsupportedError, checkpointing
from tolerances import FLOAT64
from two_ranks import RANKS, results_of


class Keep(torch.optim.SGD):
    """Plain SGD of rate 0 that keeps the gradients of every step."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)
        self.seen = []

    def step(self, closure=None):
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        super().step()


def batch_of(size):
    torch.manual_seed(0)
    return {
        **regression_batch(size, torch.float64),
        "a": torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0, 3.0, 1.0], dtype=torch.float64)[:size],
        "b": torch.tensor([0.0, 4.0, 0.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)[:size],
    }


CUTS = [[(0, 1), (1, 2), (2, 4)], [(4, 6), (6, 7)]]
"The last micro-batch of the second rank counts nothing in b."
EVEN_CUTS = [[(0, 1), (1, 4)], [(4, 6), (6, 7)]]


def part(batch, cut):
    return {key: value[cut[0] : cut[1]] for key, value in batch.items()}


def losses(model, micro_batch, on_device=True):
    error = (model(micro_batch["x"]) - micro_batch["y"]).square().mean(1)
    counts = [micro_batch["a"].sum(), micro_batch["b"].sum()]
    counts = counts if on_device else [count.item() for count in counts]
    return [
        Loss((error * micro_batch["a"]).sum(), counts[0]),
        0.3 * error.sqrt().mean(),
        Loss((error.square() * micro_batch["b"]).sum(), counts[1]),
    ]


def wanted_of(model, batch):
    first, mean, last = losses(model, batch)
    whole = first.total / first.count + mean + last.total / last.count
    return torch.autograd.grad(whole, list(model.parameters())), float(whole.detach())


def error_of(found, wanted):
    difference = torch.stack([(a - b).norm() for a, b in zip(found, wanted, strict=True)]).norm()
    return float(difference / torch.stack([b.norm() for b in wanted]).norm())


def several(rank):
    """Errors of gradient and loss in two windows, and how often a bucket was reduced."""
    batch, found = batch_of(7), []
    for on_device in (True, False):  # by hand
        model = LinearStack().double()
        wanted, whole = wanted_of(model, batch)
        keep = Keep(model)
        engine = Engine(DistributedDataParallel(model), keep, loss=losses)
        reductions = []
        engine.model.register_comm_hook(None, counting_hook(reductions))
        for together in (True, False):
            with engine.window([part(batch, cut) for cut in CUTS[rank]]) as window:
                for micro_batch in window:
                    if together:
                        window.backward(losses(engine.model, micro_batch, on_device))
                    else:
                        for k in range(3):
                            window.backward(losses(engine.model, micro_batch, on_device)[k])
            difference = abs(float(window.result.loss) - whole)
            found.append([error_of(keep.seen[-1], wanted), difference, float(len(reductions))])
        engine.check_ranks()
    for on_device in (True, False):
        for sync in ("window", "micro"):
            model = LinearStack().double()
            wanted, whole = wanted_of(model, batch)
            keep = Keep(model)
            engine = Engine(
                DistributedDataParallel(model),
                keep,
                Plan(batch_size=7, micro_batch_size=2, world_size=2, uneven=True, sync=sync),
                loss=lambda m, p, on_device=on_device: losses(m, p, on_device),
            )
            reductions = []
            engine.model.register_comm_hook(None, counting_hook(reductions))
            parts = [part(batch, cut) for cut in (CUTS if sync == "window" else EVEN_CUTS)[rank]]
            for _ in range(2):
                result = engine.step_window(parts)
                error = error_of(keep.seen[-1], wanted)
                found.append([error, abs(float(result.loss) - whole), float(len(reductions))])
            engine.check_ranks()
    return found


def counting_hook(reductions):
    def hook(state, bucket):
        reductions.append(1)
        future = dist.all_reduce(bucket.buffer() / RANKS, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    return hook


def empty_at_the_end(rank):
    """A rank whose only loss counts nothing in its last micro-batch."""
    found = []
    for count in (float, torch.tensor):
        model = Weight()
        keep = Keep(model)
        engine = Engine(
            DistributedDataParallel(model),
            keep,
            loss=lambda m, x, count=count: Loss(
                (m(x) * (float("nan") if x.sum() == 0 else 1)).sum(), count(float(x.count_nonzero()))
            ),
        )
        numbers = [(6.0, 2.0), (4.0, 0.0)][rank]
        result = engine.step_window([torch.tensor([x]) for x in numbers])
        found += [float(keep.seen[0][0]), float(result.loss)]
    return found


def counting_nothing(rank):
    """A rank that runs a micro-step less than the other one, and a rank that reports nothing in a whole window."""
    plan = Plan(batch_size=4, micro_batch_size=1, world_size=2, sync="micro")
    model = Weight()
    keep = Keep(model)
    engine = Engine(
        DistributedDataParallel(model), keep, plan, loss=mean_product, count=lambda x: float(x.count_nonzero())
    )
    engine.step_window([torch.tensor([x]) for x in [(6.0, 2.0), (0.0, 4.0)][rank]])
    model = Weight().double()
    engine = Engine(
        DistributedDataParallel(model),
        torch.optim.SGD(model.parameters(), 0.0),
        loss=lambda m, x: Loss(m(x).sum(), float(x.count_nonzero())),
    )
    reported = engine.step_window([torch.tensor([x], dtype=torch.float64) for x in [(0.1, 0.2), (0.0, 0.0)][rank]])
    return [float(keep.seen[0][0]), float(reported.loss)]


def measuring(rank):
    """Metrics of the same names on both ranks, of other names, and of none on one of them."""
    model = Weight()
    kept = {
        "same": [{"a": (1.0 + rank, 4)}, {"a": (3.0, 4)}],
        "other": [{"a": (1.0, 4)}, {"b": (torch.tensor(2.0), 4)}][rank : rank + 1],
        "none": [{"a": (1.0, 4)}, None][rank : rank + 1],
    }
    found = {}
    for name, metrics in kept.items():
        brought = iter(metrics)
        engine = Engine(
            DistributedDataParallel(model),
            torch.optim.SGD(model.parameters(), 0.0),
            loss=lambda m, x, brought=brought: Loss(m(x).sum(), 1.0, metrics=next(brought)),
        )
        result = engine.step_window([torch.ones(1)] * len(metrics))
        found[name] = {key: float(value) for key, value in result.metrics.items()}
    return found


def reaching(rank):
    """Losses that reach a part only, and repeated calls by hand."""
    found = []
    for by_hand in (False, True):
        model = nn.ModuleDict({"d": Weight(), "g": Weight()})

        class Pair(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                return self.inner["d"](x).sum(), self.inner["g"](x).sum()

        def loss(wrapped, x):
            d, g = wrapped(x)
            return Loss(2 * d), Loss(5 * d * g, only=wrapped.module.inner["g"])

        pair = Pair(model)
        keep = Keep(pair)
        engine = Engine(DistributedDataParallel(pair), keep, loss=loss)
        numbers = [(1.0, 3.0), (2.0, 2.0)][rank]
        micro_batches = [torch.tensor([x]) for x in numbers]
        if by_hand:
            with engine.window(micro_batches) as window:
                for x in window:
                    first, second = loss(engine.model, x)
                    window.backward(second)
                    window.backward(first)
        else:
            engine.step_window(micro_batches)
        found.append([float(gradient) for gradient in keep.seen[0]])
    return found


def contradicting(rank):
    """Ranks with another number of losses are told, on both of them."""
    model = Weight()
    engine = Engine(
        DistributedDataParallel(model),
        Keep(model),
        loss=lambda m, x: [m(x).mean()] * (rank + 1),
    )
    try:
        engine.step_window([torch.ones(1)])
    except PlanError as error:
        return error.what
    return ""


def unused(rank):
    """DDP that looks for unused parameters cannot be made to reduce by itself."""
    model = LinearStack(depth=1)
    engine = Engine(
        DistributedDataParallel(model, find_unused_parameters=True),
        Keep(model),
        loss=lambda m, x: Loss(m(x).sum(), only=model),
    )
    try:
        engine.step_window([torch.ones(1, 6)])
    except UnsupportedError as error:
        return error.what
    return ""


def uneven(rank):
    """Ranks with 5 and 3 micro-batches, in windows of 2: short last windows are fine, a missing one is not."""
    found = []
    for policy in ("cut", "use"):
        model = Weight()
        keep = Keep(model)
        engine = Engine(DistributedDataParallel(model), keep, loss=mean_product)
        loader = iter([torch.tensor([float(x)]) for x in ((1, 2, 3, 4, 5), (6, 7, 8))[rank]])
        message = ""
        try:
            for window in engine.windows(loader, 2, uneven=policy):
                engine.step_window(window)
        except UnsupportedError as error:
            message = error.hint
        found.append([[float(gradients[0]) for gradients in keep.seen], len(list(loader)), message])
    same = Engine(DistributedDataParallel(model), keep, loss=mean_product)
    found.append(len([same.step_window(window) for window in same.windows([torch.ones(1)] * (4 - rank), 2)]))
    return found


def closing(rank):
    """An optimizer that evaluates the window itself."""
    model = Weight(0.0)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    engine = Engine(
        DistributedDataParallel(model), optimizer, loss=lambda m, k: (m(torch.ones_like(k)) - k).square().mean()
    )
    result = engine.step_window([torch.tensor([float(k)]) for k in ((1, 2), (3, 4))[rank]])
    engine.check_ranks()
    return [model.w.item(), float(result.loss)]


def sparse(rank):
    """Rows that one rank met only, and rows that both did."""
    model = nn.Embedding(4, 1, sparse=True)
    nn.init.zeros_(model.weight)
    engine = Engine(
        DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=1.0), loss=lambda m, ids: m(ids).sum()
    )
    result = engine.step_window([torch.tensor([row]) for row in ((0, 1), (1, 2))[rank]])
    engine.check_ranks()
    return [*model.weight.flatten().tolist(), float(result.grad_norm)]


def refused(rank):
    """One rank alone refuses, before its last micro-batch or behind it; the next window goes on."""
    model = Weight(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = Engine(DistributedDataParallel(model), optimizer, loss=mean_product)
    found = []
    for refuses, early in ((0, False), (1, True), (0, True), (None, False)):
        with engine.window([torch.ones(1), torch.ones(2)]) as window:
            for i, micro_batch in enumerate(window):
                if refuses == rank and early and i == 0:
                    window.skip("seen enough")
                    continue
                window.backward(engine.model(micro_batch).mean())
            if refuses == rank and not early:
                window.skip("a spike")
        engine.check_ranks()
        found.append([window.result.reason or "", model.w.item()])
    return found


class Branches(nn.Module):
    """Two layers, of which the second is used for samples that say so, and one that is not used at all."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, uses_second):
        return self.first(x) + (self.second(x) if uses_second else 0)


UNREACHED = {
    "on all ranks": ((1, 1, 0), (1, 1, 0)),
    "on one rank": ((1, 0), (1, 1, 1)),
    "whenever another reaches it": ((0, 0), (1, 0)),
    "nowhere": ((1, 1, 1), (1, 1, 1)),
}


def unreached(rank):
    """A parameter that the last micro-step does not reach, with views of buckets and without, in one bucket or many."""
    found = {}
    for name, uses in UNREACHED.items():
        for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-4}):
            torch.manual_seed(0)
            model = Branches().double()
            model.third.requires_grad_(False)
            batches = [[regression_batch(2, torch.float64) for _ in pattern] for pattern in uses]

            def loss(model, micro_batch):
                return (model(micro_batch["x"], micro_batch["uses"]) - micro_batch["y"]).square().mean()

            parts = [
                [{**batch, "uses": torch.tensor(bool(use))} for batch, use in zip(given, pattern, strict=True)]
                for given, pattern in zip(batches, uses, strict=True)
            ]
            everything = [micro_batch for mine in parts for micro_batch in mine]
            whole = sum(loss(model, micro_batch) for micro_batch in everything) / len(everything)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            wanted = torch.autograd.grad(whole, trained, allow_unused=True)
            wanted = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, wanted, strict=True)]
            keep = Keep(model.first)
            keep.add_param_group({"params": list(model.second.parameters())})
            engine = Engine(
                DistributedDataParallel(model, **options),
                keep,
                loss=loss,
                count=lambda micro_batch: len(micro_batch["x"]),
            )
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    engine.step_window(parts[rank])
            errors = [error_of(gradients, wanted) for gradients in keep.seen]
            said = [str(one.message) for one in caught if "of this rank reached second" in str(one.message)]
            found[f"{name}, {options}"] = [*errors, len(said)]
    return found


def recomputed(rank):
    """Whether segments under DDP, and of modules that FSDP has sharded, leave every gradient as it is."""
    found = []
    torch.manual_seed(rank)
    batch = token_batch(4)
    for chosen in (checkpointing.blocks, lambda model: checkpointing.segments(model, 2), nested_segments):
        for wrap in (DistributedDataParallel, sharded, sharded_flat, sharded_views):
            torch.manual_seed(0)
            model = Transformer(depth=4)
            twin = copy.deepcopy(model)
            segments = chosen(model)
            wrapped, plain = wrap(model), wrap(twin)
            checkpointing.apply(wrapped, segments)
            for one in (wrapped, plain):
                for _ in range(2):
                    token_loss(one, batch).backward()
            gradients = [[whole(parameter) for parameter in one.parameters()] for one in (model, twin)]
            found.append(all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True)))
    return found


def nested_segments(model):
    return [Segment(tuple(f"blocks.{i}" for i in range(4))), Segment(("blocks.1", "blocks.2")), Segment("blocks.1.ff")]


def sharded(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def sharded_flat(model, *, use_orig_params=False):
    """By FSDP1, whose weights are other tensors each time that they are gathered if they keep their own shape."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def sharded_views(model):
    return sharded_flat(model, use_orig_params=True)


def whole(parameter):
    gradient = torch.zeros(0) if parameter.grad is None else parameter.grad  # another rank's share
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


SCENARIOS = (
    several,
    empty_at_the_end,
    counting_nothing,
    measuring,
    reaching,
    contradicting,
    unused,
    uneven,
    closing,
    sparse,
    refused,
    unreached,
    recomputed,
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every scenario returns on each of two ranks."""
    return results_of(SCENARIOS, tmp_path_factory.mktemp("ranks"))


def test_several_denominators_are_exact_over_all_ranks_and_reduced_as_often_as_one(ranks):
    for found in ranks["several"]:
        assert not isinstance(found, str), found
        assert all(error <= FLOAT64 and difference <= FLOAT64 for error, difference, _ in found)
        assert [reductions for _, _, reductions in found] == [1.0, 2.0] * 2 + [1.0, 2.0, 2.0, 4.0] * 2


def test_a_rank_whose_last_loss_counts_nothing_still_reduces(ranks):
    for found in ranks["empty_at_the_end"]:
        assert found == [4.0] * 4


def test_a_rank_that_counts_nothing_in_a_micro_batch_or_a_window_is_waited_for_no_more_than_it_reduces(ranks):
    for gradient, loss in ranks["counting_nothing"]:
        assert gradient == 4.0  # (6 + 2 + 4) / 3
        assert loss == (0.1 + 0.2) / 2  # in float64, also where no loss was run


def test_metrics_are_averaged_by_name_also_where_ranks_have_other_ones(ranks):
    for found in ranks["measuring"]:
        assert found == {"same": {"a": 9 / 16}, "other": {"a": 0.25, "b": 0.5}, "none": {"a": 0.25}}


def test_c120_losses_that_reach_a_part_only_are_reduced_too_and_so_are_repeated_calls_by_hand(ranks):
    for found in ranks["reaching"]:
        assert found == [[4.0, 22.5], [4.0, 22.5]]


def test_ranks_with_another_number_of_losses_are_told_so_on_both(ranks):
    for what in ranks["contradicting"]:
        assert "ranks have another number of losses" in what


def test_what_ddp_cannot_reduce_is_refused_by_name(ranks):
    for what in ranks["unused"]:
        assert "find_unused_parameters" in what


def test_ranks_whose_loaders_end_at_different_times_stop_together_and_never_hang(ranks):
    for cut, use, same in ranks["uneven"]:
        for gradients, left, _ in (cut, use):
            assert gradients == [pytest.approx(4.0), pytest.approx(5.0)]
            assert left == 0
        assert cut[2] == ""
        assert "cut" in use[2]
        assert same == 2


def test_c038_a_closure_s_evaluations_are_those_of_all_ranks(ranks):
    for found in ranks["closing"]:
        assert found == [pytest.approx(2.5), pytest.approx(7.5)]


def test_sparse_gradients_are_averaged_over_all_ranks(ranks):
    for found in ranks["sparse"]:
        assert found == [-0.25, -0.5, -0.25, 0.0, pytest.approx(0.375**0.5)]


def test_a_window_that_one_rank_refuses_is_refused_by_all_and_the_next_one_goes_on(ranks):
    for found in ranks["refused"]:
        assert found == [["refused", 0.0]] * 3 + [["", -1.0]]


def test_a_parameter_that_the_last_micro_batch_does_not_reach_is_reduced_exactly(ranks):
    for rank, found in enumerate(ranks["unreached"]):
        assert not isinstance(found, str), found
        assert len(found) == 3 * len(UNREACHED)
        for name, (first, second, warned) in found.items():
            assert max(first, second) <= FLOAT64, name
            assert bool(warned) == (name.startswith("whenever") and rank == 0), name


def test_segments_under_ddp_and_of_modules_that_are_sharded_are_exact_on_all_ranks(ranks):
    assert ranks["recomputed"] == [[True] * 12] * RANKS
