"""The tracer sees every form of recomputation by running it: bytes, peaks and operations are those of a real run."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import snugfit
from models import Transformer, token_batch, token_loss
from saved_tensors import saved_bytes
from snugfit import Job, Plan, Segment
from snugfit.hardware import resolve
from snugfit.memory.tracing import record_job
from snugfit.training.checkpointing import blocks, every, match, segments
from test_recompute_forms import FORMS

ATTENTION_ON_CPU = {  # which torch's counter leaves out
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, out_shape, **__: sdpa_flop_count(
        q, k, v
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda gradient, q, k, v, *_, out_shape, **__: sdpa_backward_flop_count(gradient, q, k, v)
    ),
}

# On the host nothing is moved, which a test of test_recompute_forms says.
pytestmark = pytest.mark.filterwarnings("ignore:segments are offloaded to the host")


def job():
    return Job(
        lambda: Transformer(depth=4, width=32),
        token_loss,
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: token_batch(n, length=16),
        count=snugfit.tokens(),
    )


def plan_of(form):
    return Plan(batch_size=8, micro_batch_size=8, recompute=FORMS[form](Transformer(depth=4, width=32)))


@pytest.mark.parametrize("form", FORMS)
def test_saved_bytes_and_the_peak_are_those_that_a_run_has(form):
    plan = plan_of(form)
    predicted, measured = snugfit.estimate(job(), plan, "cpu"), snugfit.measure(job(), plan, "cpu")
    assert predicted.at("forward end")["saved"] == measured.at("forward end")["saved"]
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.01)


@pytest.mark.parametrize("form", FORMS)
def test_operations_and_their_flops_are_those_that_a_run_has(form):
    plan = plan_of(form)
    predicted = sum(work.flops for work in record_job(job(), plan, resolve("cpu")).work)
    engine = snugfit.build(job(), plan, "cpu")
    batch = job().batch(8)
    engine.step(batch)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION_ON_CPU) as counter:
        engine.step(batch)
    assert predicted == counter.get_total_flops() > 0


@pytest.mark.parametrize("form", ["every block", "two runs", "keep-matmul", "nested"])
def test_a_repetition_that_ends_early_leaves_the_modules_it_was_in(form):
    births = record_job(job(), plan_of(form), resolve("cpu")).recording.births
    first, second = (
        {birth.module for birth in births if birth.window == window and birth.phase == "forward"} for window in (1, 2)
    )
    assert first == second
    assert len(first) > 4 * 4


def test_saved_bytes_of_segments_are_those_that_saved_tensor_hooks_count():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            return x + self.inner(x).tanh()

    def model():
        return nn.Sequential(*(Block() for _ in range(6)))

    def loss(net, batch):
        return net(batch).sum()

    own = Job(model, loss, lambda net: torch.optim.SGD(net.parameters(), lr=0.1), lambda n: torch.ones(n, 16))
    for chosen in (blocks, lambda net: every(net, 2), segments, lambda net: match(net, "*.inner")):
        plan = Plan(batch_size=32, micro_batch_size=32, recompute=chosen(model()))
        engine = snugfit.build(own, plan, "cpu")
        net, batch = engine.model, torch.ones(32, 16)
        expected = saved_bytes(lambda net=net, batch=batch: loss(net, batch), (*net.parameters(), batch))
        expected += 2 * batch.element_size()  # the loss, and the window's part of it
        expected += len(plan.recompute) * torch.get_rng_state().nbytes  # torch keeps one for each repetition
        assert snugfit.estimate(own, plan, "cpu").at("forward end")["saved"] == expected


@pytest.mark.parametrize("device", ["cpu", "rtx-3060-12gb"])
def test_c072_one_region_round_the_whole_model_saves_nothing_and_one_per_block_does(device):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

        def forward(self, x):
            return x + self.parts(x)

    def peak(recompute):
        own = Job(
            lambda: nn.Sequential(*(Block() for _ in range(16))),
            lambda model, x: model(x).square().mean(),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            lambda n: torch.zeros(n, 32),
        )
        report = snugfit.estimate(own, Plan(batch_size=4096, micro_batch_size=4096, recompute=recompute), device)
        return report.peak_allocated_bytes / 1e6

    none, per_block = peak(()), peak(tuple(Segment(str(i)) for i in range(16)))
    whole = peak((Segment(tuple(str(i) for i in range(16))),))
    if device == "cpu":
        assert none == pytest.approx(87.0, rel=0.1)
        assert whole == pytest.approx(87.6, rel=0.1)
        assert per_block == pytest.approx(15.8, rel=0.1)
    assert none - per_block >= 0.9 * (87.0 - 15.8)
    assert whole > 0.95 * none


def test_c074_single_small_linears_and_a_recurrent_layer_of_one_sample_save_nothing():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.recurrent = nn.LSTM(64, 64, batch_first=True)

        def forward(self, x):
            return self.recurrent(self.second(self.first(x)))[0]

    own = Job(
        Small,
        lambda model, x: model(x).sum(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda n: torch.zeros(n, 4, 64),
    )
    plain = snugfit.estimate(own, Plan(batch_size=1, micro_batch_size=1), "cpu")
    for name in ("first", "second", "recurrent"):
        plan = Plan(batch_size=1, micro_batch_size=1, recompute=(Segment(name),))
        saved = plain.peak_allocated_bytes - snugfit.estimate(own, plan, "cpu").peak_allocated_bytes
        assert saved <= 0.02 * plain.peak_allocated_bytes


def test_c089_the_logits_of_a_long_sequence_and_what_a_chunked_loss_leaves_of_them():
    tokens, classes, features = 32768, 151936, 64

    def peak(chunks):
        def loss(model, batch):
            hidden = model.body(batch["x"])
            if chunks is None:
                logits = torch.nn.functional.linear(hidden, model.head.weight)
                return torch.nn.functional.cross_entropy(logits.float(), batch["y"])
            return snugfit.chunked_cross_entropy(hidden, model.head.weight, batch["y"], chunks=chunks)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(features, features), nn.Linear(features, classes, bias=False)

        own = Job(
            Model,
            loss,
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            lambda n: {"x": torch.empty(n, features), "y": torch.empty(n, dtype=torch.long)},
        )
        plan = Plan(batch_size=tokens, micro_batch_size=tokens, precision="bf16-mixed")
        return snugfit.estimate(own, plan, "a100-80gb").peak_allocated_bytes / 2**30

    # The forward needs 9.27 for the scores, 18.55 for their fp32 copy and 18.55 for log-probabilities; backward these
    # last and two gradients of their size, for torch has one kernel for the labels and one for the softmax.
    whole = peak(None)
    assert whole == pytest.approx(3 * 18.55, abs=0.2)
    assert whole >= 9.27 + 18.55 + 18.55
    assert peak(32) < whole / 16


class Wide(nn.Module):
    """A block that saves much: a linear layer to four times the width, and back."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def wide_model():
    return nn.Sequential(*(Wide() for _ in range(8)))


def wide_job():
    return Job(
        wide_model,
        lambda model, x: model(x).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda n: torch.zeros(n, 256),
    )


def wide_plan(recompute, rows=8192):
    return Plan(batch_size=rows, micro_batch_size=rows, recompute=recompute)


def wide_peak(recompute, device="rtx-3060-12gb"):
    return snugfit.estimate(wide_job(), wide_plan(recompute), device)


def test_offloaded_segments_leave_the_card_and_keep_nothing_on_it_but_their_weights():
    names = tuple(str(i) for i in range(8))
    plain, moved = wide_peak(()), wide_peak(tuple(Segment(name, "offload") for name in names))
    rows = 8192 * 4
    # Every block saves its input, and relu's result for relu and for the layer behind it.
    assert plain.at("forward end")["saved"] - moved.at("forward end")["saved"] >= 7 * rows * (256 + 1024)
    assert moved.peak_allocated_bytes < plain.peak_allocated_bytes - 6 * rows * (256 + 1024)


def test_offload_does_not_lower_a_peak_that_lies_in_a_repetition():
    full = tuple(Segment(str(i)) for i in range(7))
    both = (*full, Segment("7", "offload"))
    one = wide_peak((*full, Segment("7")))
    assert wide_peak(both).peak_allocated_bytes >= one.peak_allocated_bytes


FULL = tuple(Segment(str(i)) for i in range(7))
LAST, ALL = (Segment("7", "offload"),), tuple(Segment(str(i), "offload") for i in range(8))


@pytest.mark.parametrize(
    ("recompute", "rows", "reason"),
    [
        ((Segment(("0", "1", "2", "3", "4")), *LAST), 8192, "the recomputation of 0, 1, 2, 3, 4, which"),
        ((*FULL, *LAST), 8192, "the backward of 7, where its tensors are back"),
        (ALL, 64, "tensors below 1.00 MiB stay"),
    ],
)
def test_a_report_says_with_both_numbers_where_offloading_does_not_lower_the_peak(recompute, rows, reason):
    moved = snugfit.estimate(wide_job(), wide_plan(recompute, rows), "rtx-3060-12gb")
    kept = tuple(segment for segment in recompute if segment.policy == "full")
    left = snugfit.estimate(wide_job(), wide_plan(kept, rows), "rtx-3060-12gb")
    (said,) = [sentence for sentence in moved.advice if "offloading" in sentence]
    assert reason in said
    assert moved.peak_allocated_bytes >= left.peak_allocated_bytes
    for report in (moved, left):
        assert snugfit.sizes.text(report.peak_allocated_bytes) in said


def test_nothing_is_said_of_offloading_that_lowers_the_peak():
    assert not [sentence for sentence in wide_peak(ALL).advice if "offload" in sentence]


@pytest.mark.parametrize("device", ["rtx-3060-12gb", "cpu"])
def test_a_plan_whose_given_segments_are_offloaded_for_nothing_is_refused_with_the_reason(device):
    with pytest.raises(snugfit.PlanError, match="the peak is not lower for it") as caught:
        snugfit.plan(wide_job(), device, 8192, fixed={"recompute": (*FULL, *LAST)})
    assert caught.value.moved_bytes >= caught.value.left_bytes > 0
    assert ("on the host already" if device == "cpu" else "the peak lies in") in str(caught.value)


def test_a_plan_whose_given_segments_are_offloaded_for_less_memory_is_made():
    found = snugfit.plan(wide_job(), "rtx-3060-12gb", 8192, fixed={"recompute": ALL})
    assert found.plan.recompute == ALL
    assert found.memory.peak_allocated_bytes < wide_peak(()).peak_allocated_bytes


def test_offloading_runs_what_plain_training_runs_and_moves_what_saved_tensor_hooks_count():
    card = resolve("rtx-3060-12gb")
    plain, moved = (record_job(wide_job(), wide_plan(recompute), card) for recompute in ((), ALL))
    assert sum(work.flops for work in moved.work) == sum(work.flops for work in plain.work) > 0
    model, batch = wide_model(), torch.zeros(8192, 256)
    counted = saved_bytes(lambda: model(batch), (*model.parameters(), batch))
    saved = [trace.report().at("forward end")["saved"] for trace in (plain, moved)]
    assert saved[0] - saved[1] == counted > 0


def test_a_traced_window_is_watched_as_one_of_a_long_run_is():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(3)))
    job = Job(
        lambda: copy.deepcopy(model),
        lambda model, x: model(x).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda n: torch.randn(n, 8),
        count="samples",
    )
    plan = Plan(batch_size=4, micro_batch_size=4, recompute=tuple(Segment((str(i),)) for i in range(3)))
    work = record_job(job, plan, resolve("cpu")).work
    assert any(item.is_repeated for item in work)
    assert not any(item.is_watched for item in work)
