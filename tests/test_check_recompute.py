"""What recomputation changes: dropout, inputs in place, caches, counters, cut graphs."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from checked_jobs import Counts, Wrapped, found, language_batch, own_loss, regression, sgd, transformers_model
from models import WIDTH, LinearStack, squared_error
from snugfit import Job, Plan, Segment, check, checkpointing, tokens


class Checkpointed(nn.Module):
    """A model that checkpoints one block by itself."""

    def __init__(self, block, **settings):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), block(), nn.Linear(WIDTH, WIDTH)
        self.settings = {"use_reentrant": False, **settings}

    def forward(self, x):
        return self.last(checkpoint(self.block, self.first(x), **self.settings))


def dropout_block():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("reentrant", [False, True])
def test_c055_dropout_that_is_not_replayed_is_found(reentrant):
    def model(**settings):
        return lambda: Checkpointed(dropout_block, use_reentrant=reentrant, **settings)

    report = check(*regression(model(preserve_rng_state=False)), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("dropout-not-replayed", "block")]
    assert report.recompute_error > 0.1
    assert found(*regression(model())) == []


def test_a_state_that_is_not_kept_is_no_hazard_where_nothing_is_random():
    block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())  # noqa: E731
    assert found(*regression(lambda: Checkpointed(block, preserve_rng_state=False))) == []


def test_dropout_that_a_library_model_does_not_replay_is_found():
    def model():
        built = transformers_model("gpt2", use_cache=False)()
        for block in built.transformer.h:
            own = block.forward
            block.forward = lambda *args, own=own, **kwargs: checkpoint(
                own, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )
        return built

    job = Job(model, own_loss, sgd, language_batch(), count=tokens(shift=True))
    report = check(job, Plan(batch_size=4, micro_batch_size=2), "cpu")
    assert [h.module for h in report.hazards if h.kind == "dropout-not-replayed"] == [
        "transformer.h.0",
        "transformer.h.1",
    ]


class PythonNoise(nn.Module):
    def forward(self, x):
        return x * (1 + random.random())


def test_a_recomputed_module_that_draws_from_python_is_found():
    def noisy():
        return nn.Sequential(PythonNoise(), nn.Linear(WIDTH, WIDTH))

    report = check(*regression(lambda: Checkpointed(noisy)), "cpu")
    assert ("random-numbers-not-replayed", "block") in [(h.kind, h.module) for h in report.hazards]


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_numbers_of_python_and_numpy_that_a_segment_repeats_are_no_hazard(draw):
    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return (self.inner(x) * (1 + draw())).sin()

    class Model(LinearStack):
        def __init__(self):
            super().__init__()
            self.layers[1] = Drawing()

    report = check(*regression(Model, recompute=(Segment("layers.1"),)), "cpu")
    assert not [hazard for hazard in report.hazards if hazard.kind == "random-numbers-not-replayed"]
    assert report.recompute_error == 0


def test_a_segment_that_draws_from_a_generator_of_numpy_of_its_own_is_found():
    class Model(LinearStack):
        def __init__(self):
            super().__init__()
            self.layers[1] = NumpyDropout()

    report = check(*regression(Model, recompute=(Segment("layers.1"),)), "cpu")
    (found,) = [hazard for hazard in report.hazards if hazard.kind == "random-numbers-not-replayed"]
    assert found.module == "layers.1"
    assert "only torch's, Python's and numpy's global random states are repeated" in found.message


class AddsInPlace(nn.Module):
    def forward(self, x):
        return x.add_(1).square()


@pytest.mark.parametrize("own", [False, True])
def test_a_recomputed_module_that_changes_its_input_is_found(own):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), AddsInPlace(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.first(x)
            return self.last(checkpoint(self.block, x, use_reentrant=False) if own else self.block(x))

    plan = {} if own else {"recompute": (Segment("block"),)}
    report = check(*regression(Model, **plan), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("input-changed-in-place", "block")]
    assert found(*regression(Model)) == ([] if not own else ["input-changed-in-place"])


def test_an_activation_in_place_inside_of_a_recomputed_module_is_no_hazard():
    block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))  # noqa: E731
    assert found(*regression(lambda: Checkpointed(block))) == []


def test_a_batch_that_the_loss_function_changes_is_found():
    def loss(model, batch):
        batch["x"].mul_(2)
        return squared_error(model, batch)

    report = check(*regression(LinearStack, loss), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["batch-changed-in-place"]
    assert "batch['x']" in report.hazards[0].message


def test_a_cache_that_the_engine_turns_off_is_no_hazard():
    model = transformers_model("gpt2", use_cache=True)
    job = Job(model, own_loss, sgd, language_batch(), count=tokens(shift=True))
    plan = Plan(batch_size=4, micro_batch_size=2, recompute=checkpointing.blocks(model()))
    with pytest.warns(UserWarning, match="use_cache of GPT2LMHeadModel is False"):
        assert found(job, plan) == []


@pytest.mark.filterwarnings("ignore:config.use_cache:UserWarning")
def test_a_cache_of_transformers_that_segments_are_handed_is_no_hazard():
    def own_loss(model, batch):
        return model(**batch, use_cache=True).loss

    model = transformers_model("gpt2", use_cache=True)
    job = Job(model, own_loss, sgd, language_batch(), count=tokens(shift=True))
    plan = Plan(batch_size=4, micro_batch_size=2, recompute=checkpointing.blocks(model()))
    report = check(job, plan, "cpu")
    assert report.hazards == ()
    assert report.recompute_error == 0


class OwnCache:
    """A cache that no library knows, and that nothing copies."""

    def __init__(self):
        self.seen = []

    def get_seq_length(self):
        return len(self.seen)


class Remembers(nn.Module):
    """Attends to all that was computed before, for which it has a cache."""

    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(WIDTH, WIDTH), Remembering()

    def forward(self, x):
        return self.block(self.first(x), OwnCache())


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache):
        cache.seen.append(self.linear(x))
        return torch.stack(cache.seen).sum(0).sin()


def test_a_cache_under_recomputation_is_found():
    plain, recomputed = regression(Remembers), regression(Remembers, recompute=(Segment("block"),))
    report = check(*recomputed, "cpu")
    assert {hazard.kind for hazard in report.hazards} == {"cache-under-recompute"}
    assert [hazard.module for hazard in report.hazards] == ["block"]
    assert report.recompute_error > 0.1
    assert found(*plain) == []


SEEN = []


class CountingStack(nn.Module):
    def __init__(self, asks=False, hook=True):
        super().__init__()
        self.layers = nn.ModuleList(Counts(asks) for _ in range(3))
        if hook:
            self.layers[1].linear.register_forward_hook(lambda module, args, output: SEEN.append(1))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


EACH = tuple(Segment(f"layers.{i}") for i in range(3))


def test_c061_what_counts_twice_under_recomputation_is_found():
    report = check(*regression(CountingStack, recompute=EACH), "cpu")
    assert {hazard.kind for hazard in report.hazards} == {"counted-twice"}
    named = [(h.module, h.message.split(" of ")[0]) for h in report.hazards]
    for i in range(3):
        assert [name for module, name in named if module == f"layers.{i}"] == ["calls", "log", "sums"]
    assert [name for module, name in named if module == "layers.1.linear"] == ["SEEN"]
    assert found(*regression(lambda: CountingStack(asks=True, hook=False), recompute=EACH)) == []
    assert found(*regression(CountingStack)) == []


class CountsGlobally(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        SEEN.append(1)
        return self.linear(x)


def test_what_a_forward_counts_outside_of_its_module_is_found():
    job, plan = regression(lambda: Wrapped(CountsGlobally()), recompute=(Segment("inner"),))
    report = check(job, plan, "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("counted-twice", "inner")]
    assert "SEEN of forward" in report.hazards[0].message
    assert found(*regression(lambda: Wrapped(CountsGlobally()))) == []


def test_a_metric_buffer_in_the_models_own_checkpoint_counts_twice():
    def model():
        return Checkpointed(lambda: Counts(asks=False))

    report = check(*regression(model), "cpu")
    assert ("block", "metric") in [(h.module, h.message.split(" of ")[0]) for h in report.hazards]


def test_values_that_are_only_overwritten_count_once():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(WIDTH, WIDTH), None

        def forward(self, x):
            self.last = x.detach()
            return self.linear(x)

    model = lambda: nn.Sequential(Remembers(), nn.Dropout(0.5), Remembers())  # noqa: E731
    job, plan = regression(model, lambda m, b: F.mse_loss(m(b["x"]), b["y"]), recompute=(Segment("0"), Segment("2")))
    assert found(job, plan) == []


def test_a_reentrant_checkpoint_that_cuts_the_graph_is_found():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.last(checkpoint(self.block, x, use_reentrant=True))

    report = check(*regression(Model), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("recompute-changes-gradient", "block")]


def test_a_generator_of_ones_own_makes_two_runs_differ():
    generator = torch.Generator().manual_seed(0)

    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(x * torch.rand(x.shape, generator=generator))

    assert found(*regression(Noise)) == ["two-runs-differ"]


COUNTER, NUMBERS, STEPS = [0], {"calls": 0}, itertools.count()


class Meter:
    def __init__(self):
        self.total, self.number = 0.0, 0

    def add(self, value):
        self.total += value
        self.number += 1


METER = Meter()


def count_in_a_helper():
    COUNTER[0] += 1


class Counting(nn.Module):
    """Counts before its layer, so that a recomputation comes past it."""

    total = 0

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how
        self.frozen = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x):
        getattr(self, f"count_in_{self.how}")(x.detach())
        return self.linear(x)

    def count_in_cell(self, x):
        COUNTER[0] += 1

    def count_in_dict(self, x):
        NUMBERS["calls"] += 1

    def count_in_class(self, x):
        type(self).total += 1

    def count_in_object(self, x):
        METER.add(1.0)

    def count_in_helper(self, x):
        count_in_a_helper()

    def count_in_iterator(self, x):
        next(STEPS)

    def count_in_parameter(self, x):
        self.frozen.data += x.mean(0)

    def count_in_nothing(self, x):
        x.mean()


@pytest.mark.parametrize("how", ["cell", "dict", "class", "object", "helper", "iterator", "parameter"])
def test_whatever_a_recomputed_module_can_reach_is_compared(how):
    job, plan = regression(lambda: Wrapped(Counting(how)), recompute=(Segment("inner"),))
    report = check(job, plan, "cpu")
    assert {hazard.kind for hazard in report.hazards} == {"counted-twice"}
    assert {hazard.module for hazard in report.hazards} == {"inner"}
    assert found(*regression(lambda: Wrapped(Counting(how)))) == []
    assert found(*regression(lambda: Wrapped(Counting("nothing")), recompute=(Segment("inner"),))) == []


class ChangesData(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, x):
        self.change(x)
        return self.linear(x)


CHANGES = {
    "data": lambda x: x.data.mul_(2),
    "numpy": lambda x: np.multiply(x.detach().numpy(), 2, out=x.detach().numpy()),
    "detached": lambda x: x.detach().add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_input_that_is_changed_past_autograd_is_found(change):
    report = check(*regression(lambda: Checkpointed(lambda: ChangesData(CHANGES[change]))), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("input-changed-in-place", "block")]


@pytest.mark.parametrize("change", CHANGES)
def test_a_batch_that_is_changed_past_autograd_is_found(change):
    def loss(model, batch):
        CHANGES[change](batch["x"])
        return squared_error(model, batch)

    report = check(*regression(LinearStack, loss), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["batch-changed-in-place"]
    assert "batch['x']" in report.hazards[0].message


class Appends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, kept):
        kept.append(self.linear(x))
        return x + torch.stack(kept).square().mean(0)


class AppendsToAList(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Appends(), Appends()])
        self.reentrant = reentrant

    def forward(self, x):
        x, kept = self.first(x), []
        for block in self.blocks:
            x = checkpoint(block, x, kept, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_list_that_a_recomputed_module_appends_to_is_a_cache(reentrant):
    report = check(*regression(lambda: AppendsToAList(reentrant)), "cpu")
    assert {hazard.kind for hazard in report.hazards} == {"cache-under-recompute"}
    assert [hazard.module for hazard in report.hazards] == ["blocks.0", "blocks.1"]
    assert "handed a list" in report.hazards[0].message


class Rerun(torch.autograd.Function):
    """A recomputation by hand."""

    @staticmethod
    def forward(ctx, block, replays, x):
        ctx.block, ctx.replays, ctx.state = block, replays, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng(enabled=ctx.replays):
            if ctx.replays:
                torch.set_rng_state(ctx.state)
            y = ctx.block(x)
        torch.autograd.backward(y, gradient)
        return None, None, x.grad


class RoundsAtRandom(torch.autograd.Function):
    """Random numbers in a backward that are no recomputation."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0 * torch.rand_like(gradient)


class RerunByHand(nn.Module):
    def __init__(self, replays):
        super().__init__()
        self.first, self.block, self.replays = nn.Linear(WIDTH, WIDTH), dropout_block(), replays

    def forward(self, x):
        return RoundsAtRandom.apply(Rerun.apply(self.block, self.replays, self.first(x)))


def test_dropout_that_a_recomputation_by_hand_does_not_replay_is_found():
    report = check(*regression(lambda: RerunByHand(replays=False)), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["dropout-not-replayed"]
    assert "backward of Rerun" in report.hazards[0].message
    assert found(*regression(lambda: RerunByHand(replays=True))) == []


class NumpyDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.generator = nn.Linear(WIDTH, WIDTH), np.random.default_rng(0)

    def forward(self, x):
        return self.linear(x) * torch.from_numpy(self.generator.random(WIDTH) < 0.5)


def test_a_recomputed_module_that_draws_from_its_own_generator_is_found():
    report = check(*regression(lambda: Checkpointed(NumpyDropout)), "cpu")
    assert ("random-numbers-not-replayed", "block") in [(hazard.kind, hazard.module) for hazard in report.hazards]
