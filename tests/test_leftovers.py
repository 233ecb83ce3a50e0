"""What a micro-batch leaves alive is there as often as there are micro-batches, as in a real run on the CPU."""

import dataclasses

import pytest
import torch
from torch import nn

import snugfit
from snugfit import hardware
from snugfit.memory import tracing
from snugfit.memory.events import Birth, Recording
from snugfit.memory.steps import leftovers
from snugfit.planning import probing
from snugfit.planning.families import Family

WIDTH = 64
NUMBERS = 4096
"Bytes of the numbers that real kernels make and a trace does not know all of."


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.last = None

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def job(loss, make=list):
    """A job whose loss gets a fresh list for each model that is built."""
    kept = make()

    def model():
        kept.clear()
        return Net()

    return snugfit.Job(
        model,
        lambda model, batch: loss(model, batch["x"], kept),
        lambda model: torch.optim.Adam(model.parameters()),
        lambda samples: {"x": torch.zeros(samples, WIDTH)},
    )


def keeps(model, x, kept):
    out = model(x)
    kept.append(out.detach())
    return out.square().mean()


def grows_by_copying(model, x, kept):
    out = model(x)
    kept[:] = [torch.cat([*kept, out.detach()])]
    return out.square().mean()


def wants_the_inputs_gradient(model, x, kept):
    return model(x.requires_grad_()).square().mean()


def remembers_the_last(model, x, kept):
    model.last = model(x)
    return model.last.square().mean()


def leaves_nothing(model, x, kept):
    return model(x).square().mean()


def micro_batches(job, plan, device="cpu"):
    marks = tracing.record_job(job, plan, hardware.resolve(device)).recording.marks
    windows = [position for position, name in marks if name == "window"]
    return sum(name == "micro-batch" and position >= windows[-1] for position, name in marks)


@pytest.mark.parametrize("number", [4, 8, 80])
@pytest.mark.parametrize("loss", [keeps, wants_the_inputs_gradient])
def test_what_every_micro_batch_leaves_is_counted_for_each_of_them(loss, number):
    plan = snugfit.Plan(batch_size=64 * number, micro_batch_size=64)
    estimated, measured = snugfit.estimate(job(loss), plan, "cpu"), snugfit.measure(job(loss), plan, "cpu")
    assert estimated.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, abs=NUMBERS)
    assert sum(estimated.at("step end").values()) == pytest.approx(sum(measured.at("step end").values()), abs=NUMBERS)


@pytest.mark.parametrize("rows", [256, 500, 2450])
@pytest.mark.parametrize("loss", [keeps, remembers_the_last, grows_by_copying])
def test_a_tail_leaves_as_much_as_it_is_large(loss, rows):
    plan = snugfit.Plan(batch_size=rows, micro_batch_size=100)
    estimated, measured = snugfit.estimate(job(loss), plan, "cpu"), snugfit.measure(job(loss), plan, "cpu")
    assert estimated.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, abs=NUMBERS)
    assert sum(estimated.at("step end").values()) == pytest.approx(sum(measured.at("step end").values()), abs=NUMBERS)


@pytest.mark.parametrize("device", ["cpu", "rtx-3090"])
@pytest.mark.parametrize("loss", [leaves_nothing, remembers_the_last])
def test_a_loss_whose_leftovers_do_not_add_up_traces_two_micro_batches_and_the_tail(loss, device):
    plan = snugfit.Plan(batch_size=1000, micro_batch_size=96)
    assert micro_batches(job(loss), plan, device) == 3
    assert "of 11 micro-batches 3 are traced" in " ".join(snugfit.estimate(job(loss), plan, device).assumptions)


def test_a_loss_that_keeps_something_traces_all_micro_batches_and_says_so():
    plan = snugfit.Plan(batch_size=1000, micro_batch_size=96)
    for device in ("cpu", "rtx-3090"):
        assert micro_batches(job(keeps), plan, device) == 11
        assert "all 11 micro-batches are traced" in " ".join(snugfit.estimate(job(keeps), plan, device).assumptions)
    many = dataclasses.replace(plan, micro_batch_size=10)
    assert micro_batches(job(keeps), many) == 2
    assert "is counted 98 times more" in " ".join(snugfit.estimate(job(keeps), many, "cpu").assumptions)


def test_on_a_card_every_kept_result_takes_its_block():
    few, many = (snugfit.Plan(batch_size=64 * number, micro_batch_size=64) for number in (8, 80))
    ends = [sum(snugfit.estimate(job(keeps), plan, "rtx-3090").at("step end").values()) for plan in (few, many)]
    assert ends[1] - ends[0] == 2 * (80 - 8) * 64 * WIDTH * 4  # two windows


def test_what_cannot_be_traced_twice_is_multiplied():
    def loss(model, x, kept):
        built.add(id(model))
        if len(built) > 1:
            raise ValueError("this loss knows one model only")
        models.append(model)
        return keeps(model, x, kept)

    built, models = set(), []
    plan = snugfit.Plan(batch_size=64 * 8, micro_batch_size=64)
    estimated, measured = snugfit.estimate(job(loss), plan, "cpu"), snugfit.measure(job(keeps), plan, "cpu")
    assert "is counted 6 times more" in " ".join(estimated.assumptions)
    assert estimated.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, abs=NUMBERS)


def test_results_that_are_kept_beyond_a_trace_do_not_disturb_the_next_one():
    def loss(model, x, _):
        out = model(x)
        kept.append(out.detach())
        return (out - torch.stack(kept[-2:]).mean(0)).square().mean()

    kept = []
    plan = snugfit.Plan(batch_size=64 * 8, micro_batch_size=64)
    estimated = snugfit.estimate(job(loss), plan, "cpu")
    kept.clear()
    measured = snugfit.measure(job(loss), plan, "cpu")
    assert estimated.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.01)


def test_a_family_of_plans_counts_leftovers_by_the_number_of_micro_batches():
    plan = snugfit.Plan(batch_size=512, micro_batch_size=512)
    job_of = job(keeps)
    family = Family(probing.probe(job_of, plan, hardware.resolve("cpu"), tracing.skeleton(job_of), (), (128, 64)))
    floors = [family.chain(32, number).floor_bytes for number in (2, 16)]
    assert floors[1] - floors[0] == 14 * 32 * WIDTH * 4


def test_what_takes_the_place_of_something_smaller_grows_by_the_difference():
    def birth(num_bytes):
        return Birth(num_bytes, "saved", "forward", "", "cat", 1)

    marks = [(0, "window"), (0, "micro-batch"), (1, "micro-batch"), (3, "micro-batch"), (3, "step end")]
    recording = Recording([birth(100), birth(200)], [1, 2, -1], marks)
    found = leftovers.multiplied(recording, 3)
    assert [one.num_bytes for one in found.births] == [100, 200, 100, 100, 100]
    assert found.events == [1, 3, 4, 5, 2, -1]
    assert found.marks == [(0, "window"), (0, "micro-batch"), (1, "micro-batch"), (6, "micro-batch"), (6, "step end")]
