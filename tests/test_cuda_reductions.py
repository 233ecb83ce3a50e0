"""Buffers of CUDA's reduction kernel, against ATen/native/cuda/Reduce.cuh worked out by hand and recorded traces."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from snugfit.memory.cuda import reductions, target

TRACES = Path(__file__).parents[2] / "shared" / "groundtruth" / "traces"
A100 = target.of_capability((8, 0))  # 108 multiprocessors of 2048 threads


def buffers(shape, dims, dtype=torch.float32, card=A100):
    return reductions.buffers(torch.empty(shape, dtype=dtype, device="meta"), dims, 4, card)


def test_a_small_sum_needs_no_buffer():
    assert buffers((4, 128, 1024), (0, 1)) == ()
    assert buffers((16,), ()) == ()
    assert buffers((1, 1), ()) == ()


def test_rows_summed_into_columns_take_a_buffer_of_whole_blocks():
    # 8192 rows, 4096 columns: blocks of 32 x 4 threads, each with 4 columns; 2048 values per thread. The grid of 32
    # blocks fits 54 times into 108 * 16 resident blocks, so that 54 blocks share an output.
    assert buffers((8192, 4096), (0,)) == (4 * 4096 * 54 * 32 * 4, 4 * 32)


def test_the_whole_of_a_long_vector_takes_one_number_per_block():
    # 2**25 numbers as one row: 512 threads read 4 numbers each, 65,536 values per thread of the loop; the card holds
    # 108 * 4 blocks of 512 threads, all of which share the one output.
    assert buffers((2**25,), ()) == (4 * 432, 4)


def test_a_card_with_more_blocks_shares_an_output_among_more():
    hopper = target.of_capability((9, 0))
    assert buffers((8192, 4096), (0,), card=hopper)[0] == 4 * 4096 * 66 * 32 * 4  # 132 * 16 blocks / 32


def test_dimensions_that_lie_behind_each_other_count_as_one():
    assert buffers((4, 512, 1024), (0, 1)) == buffers((2048, 1024), (0,))
    assert buffers((2048, 8, 128), (0,)) == buffers((2048, 1024), (0,))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("cs336_medium_ctx512_train_fp32_wedsonlin", (4, 512, 1024)),
        ("cs336_small_ctx256_b32_fwdbwd_fp32_magma", (32, 256, 768)),
    ],
)
def test_the_sums_of_recorded_traces_take_what_the_rule_says(name, shape):
    path = TRACES / f"{name}.json.gz"
    if not path.exists():
        pytest.skip("the recorded traces are not here")
    events = json.loads(gzip.decompress(path.read_bytes()))["events"]
    allocated = [num_bytes for kind, _, num_bytes, _ in events if kind == 0]
    result = 4 * shape[-1]  # the gradient of a norm's weight
    expected = (result, *buffers(shape, (0, 1)))
    found = sum(tuple(allocated[i : i + 3]) == expected for i in range(len(allocated)))
    assert found >= 24
