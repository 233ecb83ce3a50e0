"""What kernels take beside their results, each figure worked out from the ATen file that the rule names."""

import gzip
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from snugfit import hardware
from snugfit.memory import tracing

TRACES = Path(__file__).parents[2] / "shared" / "groundtruth" / "traces"


def temporaries(operation, device="a100-sxm-40gb"):
    """Sizes of what the rules add to an operation, in order, without those of loss and its gradient."""
    births = []

    def make_step(recorder):
        allocate = recorder.allocate

        def noted(num_bytes, category, op):
            if category == "temporary":
                births.append((op.split(".")[0], num_bytes))
            return allocate(num_bytes, category, op)

        recorder.allocate = noted
        return operation

    tracing.record(make_step, hardware.resolve(device), 1)
    return births


def of(operation, name):
    return [num_bytes for op, num_bytes in temporaries(operation) if op.startswith(name)]


def test_a_gradient_that_is_one_number_expanded_is_copied_by_both_products():
    def step():
        weight = torch.zeros(32, 48, requires_grad=True)
        (torch.zeros(64, 32, requires_grad=True) @ weight).sum().backward()

    assert of(step, "mm") == [64 * 48 * 4, 64 * 48 * 4]


def test_index_backward_sorts_its_indices():
    # Four int64 per index beside a short-lived one, and 1 byte of scratch for what one block can sort.
    def step():
        torch.zeros(1000, 16, requires_grad=True)[torch.zeros(2048, dtype=torch.int64)].mean().backward()

    assert of(step, "index_put") == [*5 * [2048 * 8], 1]


def test_index_backward_of_a_recorded_trace_takes_what_the_rule_says():
    path = TRACES / "cs336_small_ctx256_b32_fwdbwd_fp32_magma.json.gz"
    if not path.exists():
        pytest.skip("the recorded traces are not here")
    events = json.loads(gzip.decompress(path.read_bytes()))["events"]
    allocated = [num_bytes for kind, _, num_bytes, _ in events if kind == 0]

    def step():
        torch.zeros(10000, 768, requires_grad=True)[torch.zeros(32, 256, dtype=torch.int64)].mean().backward()

    sizes = of(step, "index_put")
    assert sizes in [allocated[i : i + len(sizes)] for i in range(len(allocated))]


def test_embedding_backward_of_few_indices_takes_nothing_and_of_many_a_row_per_part():
    def step(count, dtype=torch.float32):
        weight = torch.zeros(50000, 64, requires_grad=True, dtype=dtype)
        F.embedding(torch.zeros(count, dtype=torch.int64), weight).mean().backward()

    assert of(lambda: step(3072), "embedding_dense_backward") == []
    parts = 409 + 4096
    expected = [4096 * 8] * 5 + [parts * 8, parts * 64 * 4]
    assert of(lambda: step(4096), "embedding_dense_backward") == expected
    assert of(lambda: step(4096, torch.bfloat16), "embedding_dense_backward") == expected


def test_embedding_backward_into_few_rows_is_summed_in_place():
    def step(dtype):
        weight = torch.zeros(2, 64, requires_grad=True, dtype=dtype)
        F.embedding(torch.zeros(4096, dtype=torch.int64), weight).mean().backward()

    parts = 409 + 2
    expected = [4096 * 8] * 3 + [2 * 8] * 2 + [parts * 8] * 2
    assert of(lambda: step(torch.float32), "embedding_dense_backward") == expected
    assert of(lambda: step(torch.bfloat16), "embedding_dense_backward") == [*expected, 2 * 64 * 4]


def test_a_mean_squared_error_holds_the_errors_of_all_elements():
    assert of(lambda: F.mse_loss(torch.zeros(100, 10), torch.zeros(100, 10)), "mse_loss") == [4000]
    assert of(lambda: F.mse_loss(torch.zeros(10), torch.zeros(10), reduction="none"), "mse_loss") == []


def test_softmax_and_layer_norm_copy_what_is_not_contiguous():
    assert of(lambda: torch.zeros(8, 16).t().softmax(-1), "_softmax") == [8 * 16 * 4]
    assert of(lambda: torch.zeros(8, 16).softmax(-1), "_softmax") == []
    assert of(lambda: F.layer_norm(torch.zeros(8, 16).t(), (8,)), "native_layer_norm") == [8 * 16 * 4]


def test_softmax_backward_multiplies_gradient_and_output_and_its_logarithm_does_not():
    def step(function, dtype=torch.float32):
        value = torch.zeros(8, 16, dtype=dtype, requires_grad=True)
        function(value, -1, dtype=torch.float32).mean().backward()

    assert of(lambda: step(torch.softmax), "_softmax_backward_data") == [8 * 16 * 4]
    assert of(lambda: step(torch.softmax, torch.float16), "_softmax_backward_data") == [8 * 16 * 4]
    assert of(lambda: step(torch.log_softmax), "_log_softmax_backward_data") == []


def test_a_sum_of_truth_values_copies_them_into_whole_numbers():
    # make_reduction of ReduceOpsUtils.h casts to the type of the result, 8 bytes; half precision is read as it is.
    assert of(lambda: torch.zeros(64, 8, dtype=torch.bool).sum(), "sum") == [64 * 8 * 8]
    assert of(lambda: torch.zeros(64, 8, dtype=torch.float16).sum(dtype=torch.float32), "sum") == []
    assert of(lambda: torch.zeros(64, 8, dtype=torch.int32).cumsum(0), "cumsum") == [64 * 8 * 8]


def test_the_norm_of_gradients_takes_a_number_per_chunk_of_the_longest():
    # 65,536 elements per chunk (MultiTensorApply.cuh): 3 chunks for each of two tensors.
    def step():
        torch._foreach_norm([torch.zeros(2 * 65536 + 1), torch.zeros(4)])

    assert of(step, "_foreach_norm") == [2 * 3 * 4]


def test_a_convolution_copies_the_operand_of_the_other_layout():
    def step(layout):
        weight = torch.zeros(8, 4, 3, 3).contiguous(memory_format=torch.channels_last)
        F.conv2d(torch.zeros(2, 4, 16, 16).contiguous(memory_format=layout), weight)

    assert of(lambda: step(torch.channels_last), "convolution") == []
    assert of(lambda: step(torch.contiguous_format), "convolution") == [2 * 4 * 16 * 16 * 4]


def test_layer_norm_keeps_its_statistics_in_single_precision():
    def make_step(recorder):
        seen.append(recorder.recording)
        return lambda: F.layer_norm(torch.zeros(512, 64, dtype=torch.bfloat16), (64,))

    seen = []
    tracing.record(make_step, hardware.resolve("a100-sxm-40gb"), 1)
    assert [b.num_bytes for b in seen[0].births if b.op.startswith("native_layer_norm")] == [512 * 64 * 2, 2048, 2048]


def events_of(make_step):
    recordings = []

    def kept(recorder):
        recordings.append(recorder.recording)
        step = make_step()
        recorder.mark("begin")
        return step

    tracing.record(kept, hardware.resolve("a100-sxm-40gb"), 1)
    recording = recordings[0]
    start = next(position for position, name in recording.marks if name == "begin")
    return [(event > 0, recording.births[abs(event) - 1].num_bytes) for event in recording.events[start:]]


def test_an_index_on_the_host_is_copied_to_the_card_for_the_length_of_the_kernel():
    def make_step():
        value = torch.zeros(300, 20, device="cuda")
        labels, rows = torch.zeros(300, dtype=torch.int64, device="cuda"), torch.arange(300)
        return lambda: value[rows, labels]

    assert events_of(make_step)[:3] == [(True, 2400), (True, 1200), (False, 2400)]


def test_what_runs_on_the_host_takes_nothing_of_the_card():
    def make_step():
        weight = torch.zeros(32, 32, device="cuda")
        return lambda: weight + (torch.zeros(32, 32) @ torch.zeros(32, 32)).softmax(-1).to("cuda")

    assert [size for born, size in events_of(make_step) if born and size > 32 * 32 * 4] == []
