"""DDP in a trace, against DDP itself in two gloo processes whose every allocation torch's profiler lists."""

import random
import time

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import snugfit
import two_ranks
from snugfit.memory import torch_private, tracing
from snugfit.memory.steps import data_parallel

MARK = "mark "
WIDTH = 1000
GRADIENT = 4 * WIDTH * WIDTH
"Bytes of the one million fp32 weights of case C091."
SMALL = 20_000
"""Bytes that are no tensors of the trace: numbers that DDP divides by, indices that it compares, and the last message
while gloo holds it (the buffers of a norm, 8 KB)."""

CASES = {
    "default": (1, 1, {}),
    "default, accumulated": (4, 3, {}),
    "many buckets": (9, 1, {}),
    "views": (4, 1, {"gradient_as_bucket_view": True}),
    "views, accumulated": (4, 3, {"gradient_as_bucket_view": True}),
    "views of many buckets": (9, 1, {"gradient_as_bucket_view": True}),
    "unused looked for": (9, 1, {"find_unused_parameters": True}),
    "own cap": (5, 1, {"bucket_cap_mb": 5}),
}
"Number of layers, micro-batches of a window, options of DDP."


def windows(num_layers, micro_batches, options):
    """Two windows of a wrapped model, gradients cleared to none before each; says what lives between them."""
    model = DistributedDataParallel(layers(num_layers), **options)
    inputs = torch.ones(2, WIDTH)

    def step():
        for parameter in model.parameters():
            parameter.grad = None
        for index in range(micro_batches):
            if index < micro_batches - 1:
                with model.no_sync():
                    model(inputs).sum().backward()
            else:
                model(inputs).sum().backward()

    return step


def layers(num_layers):
    modules = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)]
    return nn.Sequential(*modules, nn.BatchNorm1d(WIDTH, affine=False)) if num_layers == 5 else nn.Sequential(*modules)


def really(rank):
    """For each case: peak, bytes alive after the last window, and the sizes of the buckets as they were made.

    A thread of gloo may hold the message that it sent last for a while, which only ever adds: the least of some counts.
    """
    with torch_private.profiled_memory(MARK) as events:
        for name in [*CASES] * 3:
            mark(f"begin {name}")
            step = windows(*CASES[name])
            for _ in range(2):
                step()
                time.sleep(0.02)
            mark("end")
            del step
    found, name, live, peak, buckets = {}, "", {}, 0, []
    for event in events:
        if not event.address:
            said = event.scopes[-1].removeprefix(MARK)
            if said == "end":
                found.setdefault(name, []).append({"peak": peak, "end": sum(live.values()), "buckets": buckets})
            else:
                name = said.removeprefix("begin ")
                live, peak, weights, buckets = {}, 0, CASES[name][0], []
        elif event.num_bytes > 0:
            live[event.address] = event.num_bytes
            peak = max(peak, sum(live.values()))
            if event.num_bytes >= GRADIENT and event.scopes[-1:] == ("aten::empty",):
                weights -= 1
                if weights < 0:  # after the weights themselves
                    buckets.append(event.num_bytes)
        else:
            live.pop(event.address, None)
    return {name: min(runs, key=lambda run: (run["peak"], run["end"])) for name, runs in found.items()}


def mark(name):
    with record_function(MARK + name):
        pass


def estimated(rank):
    """Gradients of a job whose module is in DDP already, in processes that train together; and whether it stayed."""
    given = DistributedDataParallel(layers(1), gradient_as_bucket_view=True)
    before = [parameter.clone() for parameter in given.parameters()]
    plan = snugfit.Plan(batch_size=8, micro_batch_size=2, world_size=2)
    report = snugfit.estimate(million(given), plan, "cpu")
    same = all(torch.equal(a, b) for a, b in zip(before, given.parameters(), strict=True))
    return {"gradient": report.at("backward end")["gradient"], "same": same}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_ranks.results_of([really, estimated], tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def measured(ranks):
    return ranks["really"][0]


@pytest.fixture(scope="module")
def traced():
    return {
        name: tracing.record(lambda _, case=case: windows(*case), snugfit.hardware.resolve("cpu"))
        for name, case in CASES.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_the_trace_of_ddp_needs_what_ddp_needs(name, measured, traced):
    assert abs(traced[name].report().peak_allocated_bytes - measured[name]["peak"]) <= SMALL


@pytest.mark.parametrize("name", CASES)
def test_the_trace_makes_the_buckets_that_ddp_makes(name, measured, traced):
    recording = traced[name].recording
    made = [birth.num_bytes for birth in recording.births if birth.op == "new_empty.default"]
    assert made == measured[name]["buckets"]
    assert made


@pytest.mark.parametrize(
    ("options", "copies"), [({}, 2), ({"gradient_as_bucket_view": True}, 1)], ids=["copies", "views"]
)
def test_c091_gradients_count_twice_under_ddp_and_once_where_they_live_in_its_buckets(options, copies, measured):
    report = snugfit.trace(lambda: windows(1, 1, options), "cpu")
    assert report.at("step end")["gradient"] == copies * 4_000_000
    if not options:
        weights, inputs = GRADIENT, 4 * 2 * WIDTH
        assert abs(measured["default"]["end"] - weights - inputs - copies * 4_000_000) <= SMALL


def test_c091_a_plan_that_shards_by_ddp_counts_the_gradients_twice():
    plan = snugfit.Plan(batch_size=8, micro_batch_size=2, world_size=2, shard="ddp")
    alone = snugfit.estimate(million(), snugfit.Plan(batch_size=4, micro_batch_size=2), "cpu")
    report = snugfit.estimate(million(), plan, "cpu")
    assert alone.at("backward end")["gradient"] == 4_000_000
    assert report.at("backward end")["gradient"] == 8_000_000
    assert any("one more copy of all gradients" in sentence for sentence in report.assumptions)
    assert any("NCCL" in sentence for sentence in report.assumptions)
    assert "module" not in " ".join(report.by_module)


def test_a_module_in_ddp_is_estimated_with_its_own_options_and_left_alone(ranks):
    for found in ranks["estimated"]:
        assert found == {"gradient": 4_000_000, "same": True}


def million(model=lambda: layers(1)):
    return snugfit.Job(
        model,
        lambda model, batch: model(batch).mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda samples: torch.ones(samples, WIDTH),
    )


def test_tensors_are_put_into_buckets_as_ddp_puts_them():
    draw = random.Random(0)
    for _ in range(50):
        tensors = [
            torch.empty(draw.randrange(1, 900_000), dtype=draw.choice([torch.float32, torch.bfloat16]), device="meta")
            for _ in range(draw.randrange(1, 30))
        ]
        limits = draw.choice([(2**20, 2**22), (2**20, 2**20)])
        expected, _ = dist._compute_bucket_assignment_by_size(tensors, list(limits))
        position = {id(tensor): index for index, tensor in enumerate(tensors)}
        found = [[position[id(tensor)] for tensor in bucket] for bucket in data_parallel.assign(tensors, limits)]
        assert found == expected


def test_what_ddp_does_beside_its_buckets_is_refused_by_name():
    def compressed():
        model = DistributedDataParallel(layers(1))
        model.register_comm_hook(None, lambda state, bucket: None)
        return lambda: None

    with pytest.raises(snugfit.UnsupportedError) as refused:
        snugfit.trace(compressed, "cpu")
    assert "communication hook" in str(refused.value)
    assert refused.value.op == "DistributedDataParallel"
