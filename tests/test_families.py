"""The chain of units that a probe gives, against traces of the very plans that it predicts."""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import snugfit
from snugfit import hardware, rates
from snugfit.memory import tracing
from snugfit.planning import cost, errands, held_up, probing, scaling, units
from snugfit.planning.assumed_rates import assumed
from snugfit.planning.chain import NOTHING, Span
from snugfit.planning.families import Family, _option, update
from snugfit.planning.kept_results import keeping_products, kept_in_runs
from snugfit.planning.scaling import ScaledTrace, micro_steps
from snugfit.planning.traced_plans import traced_plan
from snugfit.planning.unit_runs import kept_by_policy, run_prices
from snugfit.planning.variants import Heads

WIDTH, TOKENS = 64, 32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        n, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, times):
        super().__init__()
        hidden = times * WIDTH
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Block(nn.Module):
    def __init__(self, times=4):
        super().__init__()
        self.attention, self.mlp = Attention(), FeedForward(times)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, depth=10):
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skips(nn.Module):
    """What comes out of the first blocks goes into the last ones, as in a U-Net."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(3))
        self.up = nn.ModuleList(Block() for _ in range(3))
        self.inlet = nn.Linear(8, WIDTH)

    def forward(self, x):
        x, skipped = self.inlet(x), []
        for block in self.down:
            x = block(x)
            skipped.append(x)
        for block in self.up:
            x = block(x + skipped.pop())
        return x


class Uneven(Decoder):
    """Blocks of which no two are alike."""

    def __init__(self):
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(Block(hidden) for hidden in (2, 3, 4, 5))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        return x + self.conv(F.silu(self.norm(x)))


class Pyramid(nn.Module):
    """Blocks of one kind, of which the first one and the last one work on images of other sizes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Conv() for _ in range(5))

    def forward(self, x):
        x = F.avg_pool2d(self.blocks[0](x), 2)
        for block in self.blocks[1:4]:
            x = block(x)
        return self.blocks[4](F.avg_pool2d(x, 2))


def decoder_job():
    return snugfit.Job(
        Decoder,
        lambda model, ids: F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()),
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: torch.zeros(n, TOKENS, dtype=torch.long),
    )


def skipping_job():
    return snugfit.Job(
        Skips,
        lambda model, x: model(x).float().square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), momentum=0.9),
        lambda n: torch.zeros(n, TOKENS, 8),
    )


def unhurried(card):
    """A card whose host takes no time for anything, so that its own kernels are all that counts."""
    device = hardware.resolve(card)
    return replace(device, rates=replace(assumed(device), **dict.fromkeys(rates.OVERHEADS, 0.0)))


def family_of(job, device, precision, sizes=(8, 4), batch_size=64):
    model = tracing.skeleton(job)
    plan = snugfit.Plan(batch_size=batch_size, micro_batch_size=sizes[0], precision=precision)
    return Family(probing.probe(job, plan, device, model, units.named(model), sizes))


def test_what_a_micro_batch_leaves_is_no_part_of_what_an_update_needs():
    device = hardware.resolve("a100-sxm-40gb")

    def floor(size):
        plan = snugfit.Plan(batch_size=4096, micro_batch_size=size, optimizer_impl="fused", precision="32-true")
        trace = ScaledTrace.record(decoder_job(), plan, device, (size, size), ((0,), (0,)))
        return update(trace, size)[0]

    assert floor(2048) == floor(2)


def test_where_it_is_known_what_units_compute_two_traces_tell_of_all_of_them_as_they_are_and_recomputed():
    job = snugfit.Job(
        Pyramid,
        lambda model, x: model(x).float().square().mean(),
        lambda model: torch.optim.SGD(model.parameters()),
        lambda n: torch.zeros(n, 16, 32, 32),
    )
    device, model = hardware.resolve("a100-sxm-40gb"), tracing.skeleton(job)
    names = units.named(model)
    plan = snugfit.Plan(batch_size=64, micro_batch_size=64, precision="32-true")
    whole = traced_plan(job, plan, device, 1 << 40, names)
    conv = 2 * 16 * 16 * 9 * 64  # FLOPs for each pixel of 64 images
    pixels = {0: 32 * 32, 1: 16 * 16, 2: 16 * 16, 3: 16 * 16, 4: 8 * 8}
    assert {name: whole.forward_work[name] for name in names} == {f"blocks.{i}": conv * n for i, n in pixels.items()}
    told, untold = (probing.probe(job, plan, device, model, names, (8, 4), done) for done in (whole.forward_work, {}))
    assert len(told.traces) == 2
    assert all({NOTHING, units.FULL} <= set(told.places[name]) for name in names)
    assert len(untold.traces) == 3


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_probe_sees_whether_the_loss_may_be_computed_in_chunks(is_cut):
    def loss(model, x):
        hidden = model(x)
        labels = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
        if is_cut:
            return snugfit.chunked_cross_entropy(hidden, model.head.weight, labels, chunks=None)
        return F.cross_entropy(model.head(hidden).flatten(0, -2), labels.flatten())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

        def forward(self, x):
            return self.body(x)

    job = snugfit.Job(
        Model,
        loss,
        lambda model: torch.optim.SGD(model.parameters()),
        lambda n: torch.zeros(n, TOKENS, WIDTH),
    )
    device = hardware.resolve("rtx-3060-12gb")
    assert family_of(job, device, "32-true").probe.cuts_loss is is_cut
    plan = snugfit.Plan(batch_size=64, micro_batch_size=8, precision="32-true", loss_chunks=4)
    assert (Heads(job, device, (), (8, 4)).of(plan) is not None) is is_cut


@pytest.mark.parametrize(("windows", "is_updated"), [(((0,),), False), (((0,), (0,)), True)])
def test_a_lone_window_is_traced_without_its_update(monkeypatch, windows, is_updated):
    seen = []

    def record(job, plan, device, windows, with_update):
        seen.append((plan.micro_batch_size, windows, with_update))
        return tracing.record_job(job, plan, device, windows)

    monkeypatch.setattr(scaling, "record_job", record)
    monkeypatch.setattr(errands, "_is_possible", lambda: False)
    plan = snugfit.Plan(batch_size=64, micro_batch_size=8, precision="32-true")
    ScaledTrace.record(decoder_job(), plan, hardware.resolve("rtx-3060-12gb"), (8, 4), windows)
    assert seen == [(8, windows, is_updated), (4, ((0,),), False)]


def alive_in_last_micro_batch(trace, *, rounded):
    """Most bytes alive while the last micro-batch of the last window runs, read off the event stream one by one."""
    recording = trace.recording
    start, end = micro_steps(recording)[-1]
    alive = peak = 0
    for position, event in enumerate(recording.events[:end]):
        size = recording.births[abs(event) - 1].num_bytes
        size = -(-size // 512) * 512 if rounded else size
        alive += size if event > 0 else -size
        if position >= start:
            peak = max(peak, alive)
    return peak


@pytest.mark.parametrize(
    ("job", "card", "precision", "tolerance"),
    [
        (decoder_job, "cpu", "32-true", 0.0),
        (decoder_job, "rtx-3060-12gb", "bf16-mixed", 0.002),  # sizes of some kernels' temporaries are not affine
        (skipping_job, "rtx-3060-12gb", "32-true", 0.02),  # where skips end is known for the options that were probed
    ],
)
def test_the_chain_needs_what_a_trace_of_the_very_plan_needs_but_for_two_tensors_between_blocks(
    job, card, precision, tolerance
):
    job, device = job(), unhurried(card)
    family = family_of(job, device, precision)
    draw = random.Random(0)
    compared = 0
    for size, number in ((8, 4), (16, 1), (5, 3)):
        chain = family.chain(size, number)
        names = [[o.name for o in unit.options if o.name != units.OFFLOAD] for unit in chain.units]
        mixed = tuple(Span(i, i, draw.choice(found)) for i, found in enumerate(names))
        for spans in (chain.all_by(NOTHING), chain.all_by(units.FULL), mixed):
            plan = snugfit.Plan(
                batch_size=size * number if card != "cpu" else 64,
                micro_batch_size=size,
                precision=precision,
                recompute=family.segments(chain, spans),
            )
            trace = tracing.record_job(job, plan, device, ((0,), (0, 1)) if number > 1 else ((0,), (0,)))
            needed = alive_in_last_micro_batch(trace, rounded=device.kind == "cuda")
            if chain.needed_bytes(spans) > chain.floor_bytes:
                between_blocks = size * TOKENS * WIDTH * 4
                assert abs(chain.needed_bytes(spans) - needed) <= tolerance * needed + 2 * between_blocks
                compared += 1
    assert compared > 3


@pytest.mark.parametrize("policy", [None, "keep-last", "keep-attention-last", "keep-matmul"])
def test_a_run_that_keeps_results_needs_and_takes_what_a_trace_of_it_does(policy):
    job, device = decoder_job(), unhurried("rtx-3060-12gb")
    family = family_of(job, device, "32-true", sizes=(64, 64))
    chain = family.chain(64, 1)
    first = chain.names.index("blocks.0")
    run = Span(first, first + 3, policy=policy)
    others = [Span(i, i, NOTHING) for i in range(len(chain.units)) if not run.first <= i <= run.last]
    spans = tuple(sorted((*others, run), key=lambda span: span.first))

    def traced(recompute):
        plan = snugfit.Plan(batch_size=64, micro_batch_size=64, recompute=recompute)
        trace = tracing.record_job(job, plan, device, ((0,), (0,)))
        return alive_in_last_micro_batch(trace, rounded=True), sum(cost.times(trace.work, device))

    (needed, took), (_, plain) = traced(family.segments(chain, spans)), traced(())
    assert 0 <= chain.needed_bytes(spans) - needed <= 2 * 64 * TOKENS * WIDTH * 4
    price = list(run_prices(chain.units, first, kept_by_policy(chain.units, policy)))[2]
    assert price.extra_ns / 1e9 == pytest.approx(took - plain, abs=4 * 5e-6)  # a launch more or less for each block


def test_what_a_run_keeps_of_a_block_are_its_last_product_and_its_attention():
    chain = family_of(decoder_job(), unhurried("rtx-3060-12gb"), "32-true").chain(8, 8)
    last, both, products = chain.units[chain.names.index("blocks.4")].in_runs
    tokens = 8 * TOKENS
    assert (last.policy, last.kept_bytes) == ("keep-last", 4 * tokens * WIDTH)
    assert both.policy == "keep-attention-last"
    # Attention returns as much as the product, and the logarithm of a sum for each of 4 heads and every token.
    assert both.kept_bytes - 2 * last.kept_bytes == pytest.approx(4 * 4 * tokens, abs=1024)
    # Three for queries, keys and values, one behind attention, four and one in the feed-forward part, and attention.
    assert (products.policy, products.kept_bytes - both.kept_bytes) == ("keep-matmul", 8 * last.kept_bytes)
    assert 0 < products.again_ns < both.again_ns < last.again_ns < chain.units[5].forward_ns
    assert all(way.last_ns <= way.again_ns for way in (products, both, last))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_a_block_keeps_of_its_products_is_read_off_its_forward_as_it_is_measured(precision):
    family = family_of(decoder_job(), unhurried("rtx-3090"), precision)
    place = family.probe.places["blocks.4"]
    known = {
        name: _option(name, found, found.forward_ns + found.backward_ns - plain.forward_ns - plain.backward_ns, 0, 0)
        for plain in [family._of_trace(0, 8, False)[place[NOTHING].unit]]
        for name, found in ((name, family._of_trace(0, 8, False)[place[name].unit]) for name in place)
    }
    chain, base = family.chain(8, 8), family.probe.traces[0]
    again_ns = chain.units[chain.names.index("blocks.4")].forward_ns
    element = next(element for element in family.probe.elements[0] if element.unit == "blocks.4")
    unmeasured = [known[NOTHING], known[units.FULL]]
    in_runs = kept_in_runs(
        base.base.recording,
        element,
        base.birth_bytes(8),
        held_up.spent(base, 8, family.probe.elements[0]),
        again_ns,
        unmeasured,
    )
    derived = keeping_products(in_runs, *unmeasured, again_ns)
    measured = known[units.KEEP_PRODUCTS]
    assert derived.forward_bytes in range(measured.forward_bytes, known[NOTHING].forward_bytes + 1)
    assert replace(derived, forward_bytes=measured.forward_bytes) == measured


@pytest.mark.parametrize(("device", "traces"), [("rtx-3090", 2), ("cpu", 3)])
def test_what_a_block_keeps_of_which_there_is_one_is_measured_on_a_cpu_only(device, traces):
    job = replace(decoder_job(), model=Uneven)
    family = family_of(job, hardware.resolve(device), "32-true")
    assert len(family.probe.traces) == traces
    assert (units.KEEP_PRODUCTS in family.probe.places["blocks.1"]) == (device == "cpu")
    chain = family.chain(8, 8)
    assert units.KEEP_PRODUCTS in chain.held[chain.names.index("blocks.1")]


def test_alike_blocks_share_their_options_and_one_trace_shows_them_all():
    family = family_of(decoder_job(), unhurried("rtx-3060-12gb"), "32-true")
    assert len(family.probe.traces) == 1
    assert set(family.probe.places["blocks.0"]) == {
        NOTHING,
        "full",
        "keep-matmul",
        "attention",
        "mlp",
        "each part",
        "keep-last",
        "keep-attention-last",
        "attention, keep-matmul",
        "mlp, keep-matmul",
    }
    assert len({id(family.probe.places[f"blocks.{i}"]) for i in range(10)}) == 1


def test_blocks_that_follow_each_other_are_joined_and_those_with_skips_between_them_are_not():
    chained = family_of(decoder_job(), hardware.resolve("cpu"), "32-true").probe.joined
    assert chained == {(f"blocks.{i}", f"blocks.{i + 1}") for i in range(9)}
    skipping = family_of(skipping_job(), hardware.resolve("cpu"), "32-true").probe.joined
    assert skipping == {("down.0", "down.1"), ("down.1", "down.2")}


def test_the_time_of_an_option_is_that_of_the_kernels_that_run_again():
    device = unhurried("rtx-3060-12gb")
    family = family_of(decoder_job(), device, "32-true", sizes=(64, 32), batch_size=256)
    chain = family.chain(64, 4)
    times = {option.name: option.extra_ns for option in chain.units[chain.names.index("blocks.4")].options}
    assert times[NOTHING] == 0
    assert 0 < times["keep-matmul"] < times["full"]
    spans = chain.all_by(units.FULL)
    plain, full = (
        sum(cost.times(tracing.record_job(decoder_job(), plan, device, ((0,), (0, 1))).work, device))
        for recompute in ((), family.segments(chain, spans))
        for plan in [snugfit.Plan(batch_size=128, micro_batch_size=64, recompute=recompute)]
    )
    assert 2 * chain.extra_ns(spans) / 1e9 == pytest.approx(full - plain, rel=0.02)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("size", [8, 512])
def test_a_chain_takes_what_a_trace_of_the_plan_does_also_where_the_host_holds_the_card_up(precision, size):
    device = hardware.resolve("rtx-3090")
    family = family_of(decoder_job(), device, precision, sizes=(size, size // 2), batch_size=4 * size)
    chain = family.chain(size, 4)
    for spans in (chain.all_by(NOTHING), chain.all_by(units.FULL)):
        plan = snugfit.Plan(
            batch_size=4 * size, micro_batch_size=size, precision=precision, recompute=family.segments(chain, spans)
        )
        predicted_ns = 4 * (chain.plain_ns + chain.extra_ns(spans)) + chain.update_ns
        took = traced_plan(decoder_job(), plan, device, 1 << 40).step_time_s
        assert predicted_ns / 1e9 == pytest.approx(took, rel=0.07)  # the head's part of what is hidden


def test_what_lies_in_tensors_too_small_to_be_moved_stays_where_a_block_is_offloaded():
    device = hardware.resolve("rtx-3090")
    device = replace(device, rates=replace(assumed(device), link=1e14))  # so that copies cost little
    family = family_of(decoder_job(), device, "32-true", sizes=(512, 256), batch_size=2048)
    of_size = {size: family.chain(size, 4) for size in (8, 512)}
    assert all(option.name != units.OFFLOAD for unit in of_size[8].units for option in unit.options)  # none has 1 MiB
    known = {option.name: option.kept_bytes for option in of_size[512].units[5].options}
    tokens = 512 * TOKENS
    small = 4 * 4 * tokens + 2 * 2 * 4 * tokens  # a sum for each of 4 heads; means and deviations of two LayerNorms
    assert known[units.OFFLOAD] - 4 * tokens * WIDTH == pytest.approx(small, abs=8 * 512)  # beside the block's input


def test_a_weight_that_modules_share_and_kernels_that_split_what_is_little_leave_sizes_to_be_interpolated():
    def tied():
        model = Decoder(2)
        model.embedding, model.head = nn.Embedding(20_000, WIDTH), nn.Linear(WIDTH, 20_000, bias=False)
        model.head.weight = model.embedding.weight
        return model

    job, device = replace(decoder_job(), model=tied), hardware.resolve("a100-sxm-80gb")
    chain = family_of(job, device, "bf16-mixed", sizes=(12, 6), batch_size=24).chain(2, 12)
    plan = snugfit.Plan(batch_size=4, micro_batch_size=2, precision="bf16-mixed")
    needed = alive_in_last_micro_batch(tracing.record_job(job, plan, device, ((0,), (0, 1))), rounded=True)
    assert chain.needed_bytes(chain.all_by(NOTHING)) == pytest.approx(needed, rel=0.02)


def test_a_unit_whose_backward_makes_nothing_does_not_hide_those_before_it():
    def model():
        layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16 * 16, 2))

    job = snugfit.Job(
        model,
        lambda model, x: model(x).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda n: torch.zeros(n, 8, 16, 16),
    )
    chain = family_of(job, hardware.resolve("cpu"), "32-true").chain(8, 4)
    activation = 8 * 8 * 16 * 16 * 4
    kept = sum(unit.plain.kept_bytes for name, unit in zip(chain.names, chain.units, strict=True) if name in "1234567")
    assert kept >= 4 * activation  # the result of each ReLU, kept by itself or by the convolution behind it
