"""What recomputation changes: dropout, inputs in place, caches, counters, cut graphs."""

import math
import random

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
    class Model(LinearStack):
        def __init__(self):
            super().__init__()
            self.layers[1] = nn.Sequential(PythonNoise(), nn.Linear(WIDTH, WIDTH))

    report = check(*regression(Model, recompute=(Segment("layers.1"),)), "cpu")
    assert ("random-numbers-not-replayed", "layers.1") in [(h.kind, h.module) for h in report.hazards]


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


def test_a_cache_under_recomputation_is_found():
    model = transformers_model("gpt2", use_cache=True)
    job = Job(model, own_loss, sgd, language_batch(), count=tokens(shift=True))
    plan = {"batch_size": 4, "micro_batch_size": 2}
    report = check(job, Plan(**plan, recompute=checkpointing.blocks(model())), "cpu")
    assert {hazard.kind for hazard in report.hazards} == {"cache-under-recompute"}
    assert [hazard.module for hazard in report.hazards] == ["transformer.h.0", "transformer.h.1"]
    assert math.isnan(report.recompute_error)
    assert found(job, Plan(**plan)) == []


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
