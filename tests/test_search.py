import contextlib
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import snugfit
from snugfit import hardware, sizes
from snugfit.memory import tracing
from snugfit.planning import errands, joint, links, options
from snugfit.planning.chain import NOTHING
from snugfit.planning.learning import kind_of
from snugfit.planning.scaling import NotAffineError, ScaledTrace
from snugfit.planning.traced_plans import traced_plan
from snugfit.sizes import GIB, MIB

WIDTH = 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def job(model=Stack, loss=None, **arguments):
    return snugfit.Job(
        model,
        loss or (lambda model, batch: F.cross_entropy(model(batch["x"]).float(), batch["y"])),
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: {"x": torch.zeros(n, WIDTH), "y": torch.zeros(n, dtype=torch.long)},
        **arguments,
    )


def card(**changes):
    return dataclasses.replace(hardware.resolve("rtx-3060-12gb"), **changes)


def test_a_step_whose_operations_depend_on_the_size_is_not_interpolated():
    def loss(model, batch):
        x = model(batch["x"])
        for _ in range(len(x) % 7):
            x = x + model(batch["x"])
        return x.mean()

    plan = snugfit.Plan(batch_size=64, micro_batch_size=64)
    with pytest.raises(NotAffineError):
        ScaledTrace.record(job(loss=loss), plan, card(), (8, 13))
    tight = card(memory_bytes=int(1.2 * GIB), context_bytes=0)
    found = snugfit.plan(job(loss=loss), tight, batch_size=4096)
    assert found.memory == snugfit.estimate(job(loss=loss), found.plan, tight)
    assert found.memory.fits(tight.memory_bytes)


def test_the_ladder_climbs_in_order_and_holds_the_chosen_plan():
    tight = card(memory_bytes=int(1.5 * GIB), context_bytes=0)
    found = snugfit.plan(job(), tight, batch_size=16384)
    names = [rung.name for rung in found.ladder]
    assert names[:3] == ["full batch, fp32", "mixed precision", "gradient accumulation"]
    chosen = next(rung for rung in found.ladder if rung.plan == found.plan)
    assert chosen.fits
    assert chosen.step_time_s == min(rung.step_time_s for rung in found.ladder if rung.fits)
    assert not found.ladder[0].fits
    assert found.ladder[0].relative_time == 1.0
    assert found.plan.batch_size == 16384
    assert found.memory.fits(tight.memory_bytes)
    assert set(found.reasons) >= {"batch_size", "micro_batch_size", "precision", "recompute"}


def test_the_size_chosen_is_the_largest_even_cut_that_fits():
    tight = card(memory_bytes=int(1.5 * GIB), context_bytes=0)
    found = snugfit.plan(job(), tight, batch_size=16384, fixed={"recompute": (), "precision": "32-true"})
    assert found.memory == snugfit.estimate(job(), found.plan, tight)
    one_less = -(-16384 // (found.plan.accumulation_steps - 1))
    larger = dataclasses.replace(found.plan, micro_batch_size=one_less)
    assert not snugfit.estimate(job(), larger, tight).fits(tight.memory_bytes)


def test_a_batch_that_fits_is_left_whole_and_nothing_is_recomputed():
    found = snugfit.plan(job(), card(), batch_size=4096)
    assert (found.plan.micro_batch_size, found.plan.recompute) == (4096, ())
    assert found.plan.precision == "bf16-mixed"


@pytest.mark.parametrize(
    ("device", "precision"),
    [("cpu", "32-true"), ("gtx-1080-ti", "32-true"), ("t4", "16-mixed"), ("rtx-3060-12gb", "bf16-mixed")],
)
def test_a_precision_is_proposed_only_where_the_device_is_fast_at_it(device, precision):
    assert options.precisions(hardware.resolve(device), {})[-1].value == precision


def test_a_larger_budget_is_never_slower():
    times = []
    for budget in (GIB, 2 * GIB, 4 * GIB):
        found = snugfit.plan(job(), card(context_bytes=0), batch_size=8192, budget=budget)
        times.append(next(c.step_time_s for c in found.frontier if c.plan == found.plan))
    assert times == sorted(times, reverse=True)


def test_nothing_fits_is_an_error_with_the_closest_plan_and_the_tensors_that_are_too_large():
    with pytest.raises(snugfit.InfeasibleError) as caught:
        snugfit.plan(job(), card(), batch_size=64, budget="64MiB")
    assert caught.value.budget_bytes == 64 * MIB
    assert caught.value.smallest.needed_bytes > 64 * MIB
    assert "these tensors alone exceed it" in str(caught.value)
    assert "parameter" in caught.value.hint


def test_fixed_fields_are_kept_and_unknown_ones_refused():
    found = snugfit.plan(job(), card(), batch_size=64, fixed={"precision": "32-true", "micro_batch_size": 10})
    assert (found.plan.precision, found.plan.micro_batch_size) == ("32-true", 10)
    assert found.reasons["precision"] == "given"
    with pytest.raises(snugfit.PlanError, match="precison"):
        snugfit.plan(job(), card(), fixed={"precison": "32-true"})
    for given in ({"batch_size": 3}, {"world_size": 2}):
        with pytest.raises(snugfit.PlanError, match="not a field"):
            snugfit.plan(job(), card(), fixed=given)
    with pytest.raises(snugfit.PlanError, match="not a mapping"):
        snugfit.plan(job(), card(), fixed=3)
    with pytest.warns(UserWarning, match="clamped to 8"):
        assert snugfit.plan(job(), card(), batch_size=8, fixed={"micro_batch_size": 100}).plan.micro_batch_size == 8
    with pytest.raises(snugfit.PlanError, match="unknown change of the job"):
        snugfit.plan(job(), card(), allow=("magic",))


def test_the_batch_size_must_be_positive():
    for wrong in (0, -1, "8", 1.5):
        with pytest.raises(snugfit.PlanError, match="batch_size"):
            snugfit.plan(job(), card(), batch_size=wrong)


def test_c077_a_plan_names_the_layers_that_accumulation_makes_not_equivalent():
    job = snugfit.Job(
        lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.BatchNorm1d(64)),
        lambda model, batch: model(batch).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda n: torch.zeros(n, 64),
    )
    for fixed, expected in (
        ({"micro_batch_size": 2}, "1, 2 normalise micro-batches instead of the batch: not equivalent"),
        ({"micro_batch_size": 8}, "no BatchNorm layer is affected"),
    ):
        found = snugfit.plan(job, "rtx-3060-12gb", batch_size=8, fixed=fixed)
        assert found.reasons["norm_policy"].startswith(expected)


def test_a_plan_is_the_same_whether_traces_are_made_in_copies_of_the_process_or_one_after_the_other(monkeypatch):
    tight = card(memory_bytes=3 * GIB // 2)
    aside = snugfit.plan(job(), tight, 4096)
    monkeypatch.setattr(errands, "_ends_with_backward", lambda: not errands._is_copy[0])
    apart = snugfit.plan(job(), tight, 4096)
    monkeypatch.setattr(errands, "_is_possible", lambda: False)
    here = snugfit.plan(job(), tight, 4096)
    assert aside == here == apart


def test_an_update_of_one_parameter_after_another_is_planned_only_where_the_optimizer_takes_lists():
    def with_lists(foreach):
        return dataclasses.replace(
            job(Stack), optimizer=lambda model: torch.optim.RMSprop(model.parameters(), foreach=foreach)
        )

    tight = card(memory_bytes=GIB * 11 // 8)
    forms = [
        {one.plan.optimizer_impl for one in snugfit.plan(with_lists(foreach), tight, 4096).contenders}
        for foreach in (None, False)
    ]
    assert forms == [{"as-given", "for-loop"}, {"as-given"}]


def test_the_time_of_several_cards_holds_the_reductions_that_backward_does_not_hide():
    device, given = card(), {"micro_batch_size": 16, "recompute": ()}
    alone = snugfit.plan(job(), device, 64, fixed=given).step_time_s
    once, four_times = (
        snugfit.plan(job(), device, 128, world_size=2, fixed={**given, "sync": sync}).step_time_s - alone
        for sync in ("window", "micro")
    )
    gradients = 4 * sum(parameter.numel() for parameter in Stack().parameters())
    nothing_hidden = gradients / (0.8 * links.between(device).bandwidth)  # a ring of two sends each byte once
    assert 0 < once < 1.1 * nothing_hidden
    assert four_times == pytest.approx(4 * once)


def test_what_the_smallest_candidate_needs_is_the_least_budget():
    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])

    small = dataclasses.replace(job(), model=lambda: Stack(1), loss=loss)
    with pytest.raises(snugfit.InfeasibleError) as caught:
        snugfit.plan(small, "cpu", 61, 8 * MIB)
    least = caught.value.smallest.needed_bytes
    assert snugfit.plan(small, "cpu", 61, least).memory.needed_bytes <= least
    with pytest.raises(snugfit.InfeasibleError):
        snugfit.plan(small, "cpu", 61, int(0.995 * least))


def test_a_small_job_fills_the_segments_that_it_reserves_anyhow():
    linear = dataclasses.replace(
        job(), model=lambda: nn.Linear(WIDTH, 8), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0)
    )
    by_hand = snugfit.Plan(batch_size=4096, micro_batch_size=512, precision="bf16-mixed")
    needed = snugfit.estimate(linear, by_hand, "rtx-3060-12gb").needed_bytes
    found = snugfit.plan(linear, card(memory_bytes=needed), 4096)
    assert found.plan.micro_batch_size >= 512


def test_a_budget_that_only_what_needs_least_fits_gets_that_plan():
    with pytest.raises(snugfit.InfeasibleError) as caught:
        snugfit.plan(job(), card(memory_bytes=1100 * MIB), 16)
    least = caught.value.smallest.needed_bytes
    assert snugfit.plan(job(), card(memory_bytes=least), 16).memory.needed_bytes <= least


class SmallUNet(nn.Module):
    """Its steps are launches more than computation: the chain of its units says little of their time."""

    def __init__(self):
        super().__init__()
        self.downs = nn.ModuleList(convolutions(wide, 2 * wide) for wide in (16, 32, 64))
        self.ups = nn.ModuleList(convolutions(3 * wide, wide) for wide in (64, 32, 16))
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 1)

    def forward(self, x):
        x, kept = self.stem(x), []
        for down in self.downs:
            kept.append(x)
            x = F.max_pool2d(down(x), 2)
        for up in self.ups:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.head(x)


def convolutions(wide, wider):
    return nn.Sequential(
        nn.Conv2d(wide, wider, 3, padding=1), nn.ReLU(), nn.Conv2d(wider, wider, 3, padding=1), nn.ReLU()
    )


def test_a_larger_budget_gives_no_slower_plan():
    small = snugfit.Job(
        SmallUNet,
        lambda model, x: F.mse_loss(model(x), x),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda n: torch.randn(n, 3, 16, 16),
    )
    whole = snugfit.estimate(small, snugfit.Plan(batch_size=16, micro_batch_size=16), "24GiB").needed_bytes
    found = [snugfit.plan(small, "24GiB", 16, whole - less * MIB) for less in (3, 2, 1)]
    times = [report.step_time_s for report in found]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_where_weights_alone_are_too_large_the_smallest_candidate_has_the_smallest_micro_batches_that_run(norm):
    def make():
        return nn.Sequential(nn.Linear(8, 256), norm(256), nn.ReLU(), nn.Linear(256, 256), norm(256), nn.Linear(256, 3))

    wide = snugfit.Job(
        make,
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: {"x": torch.randn(n, 8), "y": torch.zeros(n, dtype=torch.long)},
    )
    with pytest.raises(snugfit.InfeasibleError) as caught:
        snugfit.plan(wide, "cpu", 4096, 900 << 10)
    least = 2 if norm is nn.BatchNorm1d else 1  # no variance of one sample
    assert f"micro-batches of {least}, fp32" in str(caught.value)


def test_what_would_have_needed_least_is_not_traced_where_an_allowed_change_makes_the_job_fit():
    pytest.importorskip("torchao")
    deep = job(lambda: Stack(24))

    def said(budget):
        steps = []
        with contextlib.suppress(snugfit.InfeasibleError):
            snugfit.plan(deep, "rtx-3090", 8, budget, allow=("8bit-optimizer",), progress=steps.append)
        return steps

    fitting, failing = said("1700MiB"), said("1100MiB")
    changed = next(place for place, step in enumerate(fitting) if step.startswith("AdamW8bit of torchao"))
    # A trace of what most likely does may be made here, or in a copy of the process.
    assert fitting[changed - 1] == "ways out" or fitting[changed - 2] == "ways out"
    assert (fitting.count("ways out"), failing.count("ways out")) == (1, 2)


def test_a_plan_of_an_8_bit_optimizer_is_refused_by_the_job_that_has_the_old_one():
    pytest.importorskip("torchao")
    deep = job(lambda: Stack(24))
    found = snugfit.plan(deep, "rtx-3090", 8, "1700MiB", allow=("8bit-optimizer",))
    assert found.plan.fingerprint.endswith(" optimizer=AdamW8bit")
    assert snugfit.estimate(found.job, found.plan, "rtx-3090").peak_reserved_bytes == found.memory.peak_reserved_bytes
    with pytest.raises(snugfit.PlanError, match="rests on another optimizer"):
        snugfit.estimate(deep, found.plan, "rtx-3090")


def test_of_a_batch_of_which_little_fits_no_plan_by_hand_is_faster():
    deep = job(lambda: Stack(8))
    blocks = tuple(snugfit.Segment((f"blocks.{i}",)) for i in range(8))
    by_hand = snugfit.Plan(
        batch_size=65536, micro_batch_size=256, precision="32-true", recompute=blocks, optimizer_impl="fused"
    )
    needed = snugfit.estimate(deep, by_hand, card()).needed_bytes
    found = snugfit.plan(deep, card(), 65536, needed)
    assert found.step_time_s <= 1.03 * traced_plan(deep, by_hand, card(), needed).step_time_s
    assert found.plan.precision == "32-true"
    missed = min(rung.memory.needed_bytes for rung in found.ladder if rung.plan.precision == "bf16-mixed")
    (said,) = [note for note in found.notes if note.startswith("bf16-mixed would take 0.")]
    assert f"{sizes.text(missed)} of {sizes.text(needed)} or more" in said


def test_a_faster_precision_that_is_taken_is_no_note():
    report = snugfit.plan(job(), card(), 40_000, "3GiB")
    assert report.plan.precision == "bf16-mixed"
    assert not [note for note in report.notes if "would take" in note]


def test_units_are_measured_at_sizes_near_those_that_may_fit():
    whole = snugfit.Plan(batch_size=65536, micro_batch_size=65536, precision="32-true")
    report = snugfit.estimate(job(), whole, card())
    given = job(), card(), whole, {}, tracing.skeleton(job())
    moving = report.peak_allocated_bytes - report.static_bytes
    roomy, tight = (joint.JointSearch(*given, report.needed_bytes - less) for less in (MIB, moving * 31 // 32))
    for search in (roomy, tight):
        search.aim(report)
    assert roomy.heads.pair == (32768, 16384)
    assert 4096 < tight.heads.pair[0] < 16384  # about four times a 32nd of the batch
    assert tight.heads.pair[1] == tight.heads.pair[0] // 2


def test_sizes_of_a_batch_hold_those_that_leave_no_smaller_micro_batch():
    assert {1024, 512, 256, 128, 64, 32, 16} <= set(options.micro_batch_sizes(65536))
    assert {40, 30, 24} <= set(options.micro_batch_sizes(3000))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_any_family_expects_of_its_plans_what_its_whole_batch_reserved_beyond_the_prediction(precision):
    whole = snugfit.Plan(batch_size=6000, micro_batch_size=6000, precision=precision)
    search = joint.JointSearch(job(), card(), whole, {}, tracing.skeleton(job()), 2 * GIB)
    search.reserved[whole] = 4 * GIB
    chain = search.chain(whole)
    beyond = 4 * GIB - chain.needed_bytes(chain.all_by(NOTHING))
    kind = kind_of(dataclasses.replace(whole, micro_batch_size=3), ())
    assert search.learnt.beyond(kind) == round(beyond * search.allowed_bytes / (4 * GIB))


@pytest.mark.filterwarnings("ignore:.*rounded away")
def test_a_model_of_16_bits_that_only_autocast_gives_what_it_takes_is_planned_with_autocast():
    half = dataclasses.replace(job(), model=lambda: nn.Linear(WIDTH, 8).to(torch.bfloat16))
    report = snugfit.plan(half, "rtx-4090", 16)
    assert report.plan.precision == "bf16-mixed"
    assert [rung.plan.precision for rung in report.ladder[:1]] == ["bf16-mixed"]
    assert report.notes[0].startswith("32-true is left out, for the step cannot be traced in it")
    with pytest.raises(snugfit.UnsupportedError, match="two types"):
        snugfit.plan(half, "rtx-4090", 16, fixed={"precision": "32-true"})
