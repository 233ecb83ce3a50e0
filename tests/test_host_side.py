"""What a trace says of the host: what begins, what is repeated, what passes a mode, what is moved."""

import pytest
import torch
from torch import nn

from snugfit import Job, Plan, Segment
from snugfit.hardware import resolve
from snugfit.memory.tracing import record_job

WIDTH, LAYERS = 512, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(self.first(x).tanh())


def work_of(*segments, device="cpu", size=8, length=1):
    job = Job(
        lambda: nn.Sequential(*(Block() for _ in range(LAYERS))),
        lambda model, x: model(x).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        lambda n: torch.zeros(n, length, WIDTH),
    )
    plan = Plan(batch_size=8, micro_batch_size=size, recompute=segments)
    every = tuple(range(plan.accumulation_steps))
    return record_job(job, plan, resolve(device), windows=(every, every)).work


def count(work, begins):
    return sum(item.begins == begins for item in work)


@pytest.mark.parametrize("size", [8, 4, 2])
def test_a_window_begins_once_and_then_each_further_micro_batch(size):
    work = work_of(size=size)
    assert work[0].begins == "window"
    assert count(work, "window") == 1
    assert count(work, "micro-batch") == 8 // size - 1


@pytest.mark.parametrize(
    "segments",
    [
        (),
        (Segment(("0",)),),
        (Segment(("0",)), Segment(("1",)), Segment(("3",))),
        (Segment(("0", "1")), Segment(("2", "3"))),
    ],
)
def test_the_repetition_of_each_segment_begins_once(segments):
    assert count(work_of(*segments), "segment") == len(segments)


def test_what_is_repeated_is_what_the_segments_forwards_ran_up_to_the_last_saved_tensor():
    repeated = [item.op for item in work_of(Segment(("0",)), Segment(("1",))) if item.is_repeated]
    assert repeated == ["addmm.default", "tanh.default"] * 2  # the second layer's result is saved by nobody


def test_a_repetition_that_runs_nothing_for_all_is_kept_begins_as_well():
    segments = [Segment((f"{i}",), "keep:addmm,tanh") for i in range(2)]
    work = work_of(*segments)
    assert not any(item.is_repeated for item in work)
    assert count(work, "segment") == len(segments)


def test_nothing_is_repeated_or_watched_without_segments():
    assert not any(item.is_repeated or item.is_watched or item.is_copy for item in work_of())


def test_operations_pass_the_mode_of_a_segment_that_keeps_results_and_no_other():
    assert not any(item.is_watched for item in work_of(Segment(("0",)), Segment(("1",))))
    watched = [item.op for item in work_of(Segment(("0",), "keep-matmul"), Segment(("1",))) if item.is_watched]
    assert watched == ["addmm.default", "tanh.default", "addmm.default", "add.Tensor"]


def test_on_a_card_saved_tensors_of_an_offloaded_segment_are_moved_there_and_back():
    plain, offloaded = (
        [item for item in work_of(*segments, device="a100-sxm-40gb", length=256) if item.is_copy]
        for segments in ((), (Segment(("0", "1"), "offload"),))
    )
    assert [item.phase for item in plain] == ["forward"]  # the micro-batch
    there = [item.bytes for item in offloaded if item.phase == "forward"][1:]
    back = [item.bytes for item in offloaded if item.phase == "backward"]
    assert sorted(there) == sorted(back)
    # per block its input and what tanh made, each read and written
    assert sum(there) == 2 * 2 * 2 * 8 * 256 * WIDTH * 4
