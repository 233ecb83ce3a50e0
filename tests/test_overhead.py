"""What the engine adds to a hand-written loop of the same arithmetic, counted: operations, reads of values, memory."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from engine_overhead import (
    COUNTS,
    PRECISIONS,
    Operations,
    Setting,
    cost,
    engine_run,
    loop_run,
    peak_bytes,
    reads_on_device,
    window_of,
)

from tolerances import CUT_FLOAT32

CLIPS = (None, 1.0)


def windows(**more):
    """Every precision, with and without clipping, and every way of counting."""
    return pytest.mark.parametrize(
        "setting",
        [Setting(p, clip, counts, **more) for p in PRECISIONS for clip in CLIPS for counts in COUNTS],
        ids=str,
    )


@windows()
def test_a_micro_step_adds_at_most_two_operations_and_a_window_three(setting):
    counted = cost(setting)
    assert counted.operations_per_micro_step <= 2
    assert counted.operations_per_window <= 3


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("groups", [2, 5])
def test_what_a_window_adds_does_not_grow_with_parameter_groups(groups, clip):
    assert cost(Setting(groups=groups, max_grad_norm=clip)) == cost(Setting(max_grad_norm=clip))


@windows()
def test_no_value_is_read_in_a_micro_step_and_one_flag_in_a_window(setting):
    counted = cost(setting)
    assert (counted.reads_per_micro_step, counted.reads_per_window) == (0, 1)


def test_a_count_that_only_the_device_knows_costs_one_read_in_each_micro_step():
    assert [reads_on_device(number) for number in (4, 8)] == [4 + 1, 8 + 1]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_policy_that_ignores_what_is_not_finite_reads_nothing(precision, counts):
    counted = cost(Setting(precision, 1.0, counts, nonfinite="ignore"))
    assert (counted.reads_per_micro_step, counted.reads_per_window) == (0, 0)


@windows()
def test_the_peak_is_at_most_64_kib_above_the_loop_s(setting):
    batches = window_of(4, setting.counts)
    assert peak_bytes(engine_run(setting), batches) <= peak_bytes(loop_run(setting), batches) + 64 * 2**10


@windows()
def test_the_loop_by_hand_and_the_engine_do_the_same(setting):
    batches = window_of(4, setting.counts)
    engine, loop = engine_run(setting), loop_run(setting)
    for _ in range(3):
        result, (loss, norm) = engine(batches), loop(batches)
        torch.testing.assert_close(result.loss, loss, **CUT_FLOAT32)
        torch.testing.assert_close(result.grad_norm, norm, **CUT_FLOAT32)


@pytest.mark.parametrize("read", [float, bool, int, lambda x: x.item(), lambda x: x.tolist(), lambda x: [1, 2][x]])
def test_a_planted_read_is_counted_once(read):
    with Operations() as mode:
        read(torch.ones((), dtype=torch.int64))
    assert mode.reads == 1


def test_a_planted_operation_is_counted_and_a_planted_tensor_is_in_the_peak():
    x = torch.ones(2**20)
    with Operations() as mode:
        _ = x + 1
    assert dict(mode.counted) == {"aten.add.Tensor": 1}
    assert peak_bytes(lambda _: (x + 1).sum(), []) >= x.nbytes
