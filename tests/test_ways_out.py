"""Ways out when nothing fits: numbers against real traces of the changed scripts, known answers, jobs that train."""

import importlib.util
import json
from dataclasses import replace

import pytest
import torch
from torch import distributed as dist
from torch import nn

import snugfit
from snugfit import Job, Plan, PlanError, UnsupportedError, checkpointing, hardware, sizes
from snugfit.memory import tracing
from snugfit.memory.events import Birth, Recording
from snugfit.planning import ways_out as ways_out_module
from snugfit.planning.ways import eight_bit, fsdp, host_offload, lora, recorded_step
from snugfit.planning.ways.rewriting import Rewriting
from snugfit.planning.ways_out import NAMES, sentences, ways_out
from snugfit.training import buckets

CARD = hardware.resolve("rtx-3090")
BILLION = 1e9
LLAMA_WEIGHTS = 6_738_415_616
"Parameters of Llama-2-7B: 32 x (4 x 4096^2 + 3 x 4096 x 11008 + 2 x 4096) + 2 x 32000 x 4096 + 4096."
WIDTH, DEPTH = 1024, 4


class Stack(nn.Module):
    def __init__(self, width=WIDTH, depth=DEPTH):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 2 * width)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.out(x)


def loss(model, micro_batch):
    return model(micro_batch["x"]).float().pow(2).mean()


def batch(num_samples, width=WIDTH):
    return {"x": torch.randn(num_samples, width, generator=torch.Generator().manual_seed(0))}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def stack_job():
    return Job(Stack, loss, adamw, batch)


def tiny_job():
    return Job(lambda: Stack(64, 2), loss, adamw, lambda num_samples: batch(num_samples, 64))


def rows_of(job, plan, budget="24GiB", device=CARD, **options):
    return {row.name: row for row in ways_out(job, plan, hardware.resolve(device), sizes.parse(budget), **options)}


class LlamaBlock(nn.Module):
    """The weights of a block of Llama-2-7B, in an order of products that is not its own."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4096, 4096, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(4096, 11008, bias=False) for _ in range(2))
        self.down = nn.Linear(11008, 4096, bias=False)
        self.norm, self.norm_2 = nn.RMSNorm(4096), nn.RMSNorm(4096)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.o(self.q(y) * self.k(y) + self.v(y))
        y = self.norm_2(x)
        return x + self.down(self.gate(y) * self.up(y))


class LlamaShape(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32000, 4096)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(32))
        self.norm, self.head = nn.RMSNorm(4096), nn.Linear(4096, 32000, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def get_output_embeddings(self):
        return self.head


@pytest.fixture(scope="module")
def llama():
    """Full fine-tuning of a model with the weights of Llama-2-7B on 24 GiB (F9), with next to no activations."""
    pytest.importorskip("peft")
    job = Job(
        LlamaShape,
        lambda model, ids: nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
        adamw,
        lambda num_samples: torch.zeros(num_samples, 32, dtype=torch.long),
    )
    model = tracing.skeleton(job)
    assert sum(p.numel() for p in model.parameters()) == LLAMA_WEIGHTS
    plan = Plan(batch_size=8, micro_batch_size=8, precision="bf16-mixed")
    found = ways_out(job, plan, CARD, sizes.parse("24GiB"), model=model)
    return {row.name: row for row in found}


def test_seven_billion_weights_and_gradients_in_bf16_are_25_gib_and_fit_24_gib_in_no_full_fine_tuning(llama):
    held = llama["8bit-optimizer"].memory.at("backward end")
    assert held["parameter"] + held["gradient"] == pytest.approx(2 * 2 * LLAMA_WEIGHTS, rel=1e-3)
    assert 2 * 2 * LLAMA_WEIGHTS / sizes.GIB == pytest.approx(25.1, abs=0.01)
    assert not llama["8bit-optimizer"].fits
    assert not llama["fused-backward"].fits


def test_seven_billion_weights_fit_24_gib_with_lora_the_host_or_more_cards(llama):
    fitting = {name for name, row in llama.items() if row.fits}
    assert fitting == {"lora", "host-offload", "fsdp"}
    assert list(llama)[:3] == [name for name in llama if llama[name].fits]


def test_eight_bit_state_reaches_the_38_gib_that_plain_adamw_cannot(llama):
    held = llama["8bit-optimizer"].memory.at("backward end")
    static = held["parameter"] + held["gradient"] + held["optimizer"]
    # 2 bytes of weight, 2 of gradient, 2 moments of 1 byte and 1/64 of scales: 6.03 bytes each.
    assert static / LLAMA_WEIGHTS == pytest.approx(6 + 2 * 4 / 256, rel=1e-2)
    assert (6 + 2 * 4 / 256) * LLAMA_WEIGHTS / sizes.GIB == pytest.approx(37.85, abs=0.01)
    assert 4 * 2 * LLAMA_WEIGHTS / BILLION == pytest.approx(53.9, abs=0.05)


def test_lora_trains_forty_million_parameters_of_seven_billion(llama):
    # rank 16 beside 32 layers of q, k, v, o (4096 to 4096) and gate, up, down (4096 and 11008).
    trained = 16 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert trained == 39_976_960
    assert "40.0 million" in llama["lora"].change
    assert llama["lora"].memory.at("step end")["optimizer"] == pytest.approx(2 * 4 * trained, rel=1e-3)


def test_four_cards_of_24_gib_are_too_few_for_adamw_over_seven_billion_weights(llama):
    # fp32 weight, gradient and two moments: 25.1 GiB on each of four cards, 16.7 on each of six; and what is whole of
    # the two embeddings, 131 million each, in backward: bf16 weights and gradients and fp32 of what is reduced, twice.
    assert 16 * LLAMA_WEIGHTS / 4 > 24 * sizes.GIB
    whole = 2 * 32000 * 4096 * (2 + 2 + 2 * 4)
    assert 16 * LLAMA_WEIGHTS / 7 + whole < 22 * sizes.GIB
    assert llama["fsdp"].world_size in (5, 6, 7)


def test_what_is_executed_is_said_and_comes_with_its_job(llama):
    executed = {name for name, row in llama.items() if row.executed_by_snugfit}
    assert executed == {"8bit-optimizer", "lora"}
    assert all((row.job is not None) == row.executed_by_snugfit for row in llama.values())


def test_sentences_name_each_way_its_memory_and_its_time(llama):
    heading, *lines = sentences(llama.values())
    assert "times relative to the smallest candidate" in heading
    assert [line.partition(":")[0] for line in lines] == list(llama)
    for line, row in zip(lines, llama.values(), strict=True):
        assert sizes.text(row.needed_bytes) in line
        assert f"{row.relative_time:.2f} x the time" in line


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_8_bit_row_is_what_tracing_its_job_gives(precision):
    pytest.importorskip("torchao")
    plan = Plan(batch_size=8, micro_batch_size=4, precision=precision)
    row = rows_of(stack_job(), plan, allow=["8bit-optimizer"])["8bit-optimizer"]
    traced = snugfit.estimate(row.job, row.plan, CARD)
    assert row.memory.at("backward end")["optimizer"] == traced.at("backward end")["optimizer"]
    assert row.memory.peak_allocated_bytes == pytest.approx(traced.peak_allocated_bytes, abs=4096)


def test_8_bit_state_of_bf16_weights_is_never_below_what_tracing_its_job_gives():
    pytest.importorskip("torchao")
    low = {"gradient_dtype": "parameter", "bf16_update": "stochastic-rounding"}
    plan = Plan(batch_size=8, micro_batch_size=4, precision="bf16-true", **low)
    row = rows_of(stack_job(), plan, allow=["8bit-optimizer"])["8bit-optimizer"]
    traced = snugfit.estimate(row.job, row.plan, CARD)
    assert row.memory.at("backward end")["optimizer"] == traced.at("backward end")["optimizer"]
    assert 1 <= row.memory.peak_allocated_bytes / traced.peak_allocated_bytes < 1.15


def test_8_bit_moments_take_what_torchao_allocates():
    torchao = pytest.importorskip("torchao.optim.subclass_8bit")
    moment = torchao.OptimState8bit.zeros((64, 128))
    parts = [part.untyped_storage().nbytes() for part in (moment.codes, moment.scale, moment.qmap)]
    assert eight_bit.moment_bytes(64 * 128, 4) == tuple(parts) == (8192, 128, 1024)
    assert eight_bit.moment_bytes(4095, 4) == (4 * 4095,)
    assert eight_bit.moment_bytes(4100, 2) == (2 * 4100,)  # blocks of 256 do not divide it


def test_the_fused_row_is_what_tracing_such_a_script_gives():
    def make_step():
        model = Stack().cuda()
        optimizers = {p: torch.optim.AdamW([p], lr=1e-3, foreach=False) for p in model.parameters()}

        def update(p):
            optimizers[p].step()
            p.grad = None

        for p in optimizers:
            p.register_post_accumulate_grad_hook(update)
        x = torch.randn(4, WIDTH).cuda()
        return lambda: model(x).pow(2).mean().backward()

    traced = snugfit.trace(make_step, CARD)
    plan, options = Plan(batch_size=4, micro_batch_size=4), {"allow": ["fused-backward"], "runs_in_half": False}
    row = rows_of(stack_job(), plan, **options)["fused-backward"]
    assert row.memory.peak_allocated_bytes == pytest.approx(traced.peak_allocated_bytes, rel=0.01)


def test_fused_backward_takes_the_whole_batch_at_once_or_says_that_even_less_does_not_fit():
    plan = Plan(batch_size=8, micro_batch_size=2)
    fitting = rows_of(stack_job(), plan, allow=["fused-backward"])["fused-backward"]
    assert fitting.fits
    assert fitting.plan.accumulation_steps == 1
    failing = rows_of(stack_job(), plan, "1GiB", allow=["fused-backward"])["fused-backward"]
    assert not failing.fits
    assert "already with 2 of the 8 samples at once" in failing.notes[0]


def test_fused_backward_says_at_least_where_the_saved_activations_of_the_batch_alone_are_too_large():
    plan = Plan(batch_size=2**20, micro_batch_size=1)
    row = rows_of(stack_job(), plan, "8GiB", allow=["fused-backward"], runs_in_half=False)["fused-backward"]
    # Inputs of 5 layers, and of 4 of them what ReLU keeps is the next one's input: 1 Mi x 1024 x 4 bytes each.
    assert row.needed_bytes > 5 * 4 * sizes.GIB
    assert not row.fits
    assert row.is_least
    assert sentences([row])[1].startswith("fused-backward: does not fit, at least ")


@pytest.mark.parametrize("micro_batch_size", [4, 2])
def test_the_host_row_is_what_tracing_torchaos_optimizer_gives(micro_batch_size, monkeypatch):
    offload = pytest.importorskip("torchao.optim.cpu_offload")
    monkeypatch.setattr(offload, "get_available_devices", lambda: ["cpu", "cuda"])

    def make_step():
        model = Stack().cuda()
        optimizer = offload.CPUOffloadOptimizer(
            model.parameters(), torch.optim.AdamW, offload_gradients=micro_batch_size == 4, lr=1e-3
        )
        micro_batches = [torch.randn(micro_batch_size, WIDTH).cuda() for _ in range(4 // micro_batch_size)]

        def step():
            for x in micro_batches:
                model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    traced = snugfit.trace(make_step, CARD)
    plan = Plan(batch_size=4, micro_batch_size=micro_batch_size)
    step = recorded_step.record(stack_job(), plan, CARD, Stack())
    changed = host_offload.needs(step, gradients=micro_batch_size == 4).report()
    assert changed.peak_allocated_bytes == pytest.approx(traced.peak_allocated_bytes, rel=0.01)


def test_gradients_stay_on_the_card_where_there_is_room_for_them():
    plan = Plan(batch_size=4, micro_batch_size=2)
    roomy = rows_of(stack_job(), plan, "24GiB", allow=["host-offload"])["host-offload"]
    tight = rows_of(stack_job(), plan, "1GiB", allow=["host-offload"])["host-offload"]
    assert roomy.change.startswith("optimizer state on the host")
    assert tight.change.startswith("optimizer state and gradients on the host")
    assert "CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW)" in roomy.code
    assert "register_post_accumulate_grad_hook" in tight.code  # torchao's would overwrite the first micro-batch's


def test_a_shard_takes_what_fsdp2_allocates_on_one_of_two_ranks():
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        for layer in (*model, model):
            fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        local = [parameter._local_tensor for parameter in model.parameters()]
        state = [optimizer.state[p]["exp_avg"]._local_tensor for p in model.parameters()]
    finally:
        dist.destroy_process_group()
    held, moments = ([tensor.untyped_storage().nbytes() for tensor in tensors] for tensors in (local, state))
    shapes = [(7, 5), (7,), (3, 7), (3,)]
    assert [fsdp.shard_bytes(shape, 4, 2) for shape in shapes] == held == [80, 16, 56, 8]
    assert moments == held


def test_more_cards_are_taken_until_what_is_spread_fits():
    # 16 bytes for each of 6.3 million weights: 96 MiB on one card, beside 0.5 GiB of context and 0.6 of margin.
    plan = Plan(batch_size=64, micro_batch_size=1)
    options = {"allow": ["fsdp"], "runs_in_half": False}
    rows = [rows_of(stack_job(), plan, f"{mib}MiB", **options)["fsdp"] for mib in (1400, 1250)]
    assert all(row.fits for row in rows)
    assert 2 == rows[0].world_size < rows[1].world_size
    assert rows[1].plan.world_size == rows[1].world_size
    assert rows[1].plan.shard == "fsdp"
    assert rows[1].plan.batch_size == 64


@pytest.mark.parametrize("name", ["fsdp", "host-offload", "fused-backward"])
def test_what_is_done_by_hand_is_done_in_the_precision_in_which_the_card_is_fast(name):
    plan = Plan(batch_size=4096, micro_batch_size=4096)
    fast, slow = (rows_of(stack_job(), plan, allow=[name], runs_in_half=half)[name] for half in (True, False))
    assert (fast.plan.precision, slow.plan.precision) == ("bf16-mixed", "32-true")
    assert fast.step_time_s < slow.step_time_s
    assert any("torch.autocast(" in line for line in fast.by_hand)
    assert not any("torch.autocast(" in line for line in slow.by_hand)
    old = rows_of(stack_job(), plan, device="t4", allow=[name])[name]
    assert old.plan.precision == "32-true"


def test_a_step_that_does_not_run_in_bf16_is_done_by_hand_in_fp32():
    def of_probabilities(model, micro_batch):
        found = model(micro_batch["x"]).sigmoid()
        return nn.functional.binary_cross_entropy(found, torch.zeros_like(found))

    rows = rows_of(
        replace(stack_job(), loss=of_probabilities),
        Plan(batch_size=4, micro_batch_size=4),
        allow=["fsdp", "host-offload"],
    )
    assert [row.plan.precision for row in rows.values()] == ["32-true"] * 2


def test_cards_without_bf16_gather_in_the_type_of_the_plan():
    plan = Plan(batch_size=8, micro_batch_size=4, precision="16-mixed")
    row = rows_of(stack_job(), plan, device="t4", allow=["fsdp"])["fsdp"]
    assert "param_dtype=torch.float16, reduce_dtype=torch.float32" in row.code


def test_a_batch_of_one_cannot_be_spread_over_cards():
    row = rows_of(stack_job(), Plan(batch_size=1, micro_batch_size=1), allow=["fsdp"])["fsdp"]
    assert not row.fits
    assert "batch of one sample" in row.notes[0]


def test_cards_beyond_the_samples_of_a_batch_are_not_taken():
    row = rows_of(stack_job(), Plan(batch_size=3, micro_batch_size=1), "1GiB", allow=["fsdp"])["fsdp"]
    assert not row.fits
    assert row.world_size == 3
    assert "too large" in row.notes[0]


def test_weights_become_bf16_only_where_a_way_does_not_fit_otherwise():
    plan = Plan(batch_size=4, micro_batch_size=2)
    roomy = rows_of(stack_job(), plan, "24GiB", allow=["8bit-optimizer"])["8bit-optimizer"]
    tight = rows_of(stack_job(), plan, "1GiB", allow=["8bit-optimizer"])["8bit-optimizer"]
    assert (roomy.plan.precision, tight.plan.precision) == ("32-true", "bf16-true")
    assert "bf16" in tight.change
    old_card = rows_of(stack_job(), plan, "1GiB", device="v100-sxm-16gb", allow=["8bit-optimizer"])["8bit-optimizer"]
    assert old_card.plan.precision == "32-true"


class Square(nn.Module):
    """Weights of one shape, so that the compiler has one update to compile."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def square_job():
    return Job(Square, loss, adamw, lambda num_samples: batch(num_samples, 64), max_grad_norm=1.0)


def losses_of(job, plan):
    torch.manual_seed(0)
    engine = snugfit.build(job, plan, "cpu")
    return engine, [float(engine.step(batch(8, 64)).loss) for _ in range(3)]


@pytest.mark.filterwarnings("ignore")  # of the compiler and of torchao
def test_the_8_bit_job_trains_as_it_is_with_both_kinds_of_weights():
    pytest.importorskip("torchao")
    plan = Plan(batch_size=8, micro_batch_size=4, recompute=checkpointing.blocks(Square()))
    row = rows_of(square_job(), plan, device="cpu", allow=["8bit-optimizer"])["8bit-optimizer"]
    assert row.executed_by_snugfit
    engine, losses = losses_of(row.job, row.plan)
    assert losses[2] < losses[1] < losses[0]
    assert type(engine.optimizers[0]).__name__ == "AdamW8bit"
    low = {"gradient_dtype": "parameter", "bf16_update": "stochastic-rounding"}
    engine, losses = losses_of(row.job, replace(row.plan, precision="bf16-true", **low))
    assert losses[2] < losses[0]
    assert buckets.takes_parameters_one_by_one(engine.optimizers[0], "stochastic-rounding")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_lora_job_trains_as_it_is(precision):
    pytest.importorskip("peft")
    plan = Plan(batch_size=8, micro_batch_size=4, precision=precision, recompute=checkpointing.blocks(Square()))
    row = rows_of(square_job(), plan, device="cpu", allow=["lora"])["lora"]
    assert row.executed_by_snugfit
    engine, losses = losses_of(row.job, row.plan)
    assert losses[2] < losses[1] < losses[0]
    frozen = {p.dtype for p in engine.model.parameters() if not p.requires_grad}
    assert frozen == {torch.float32 if precision == "32-true" else torch.bfloat16}


def test_an_8_bit_optimizer_keeps_groups_and_options():
    pytest.importorskip("torchao")

    def two_groups(model):
        groups = [{"params": [model.out.weight], "lr": 0.5}, {"params": [model.out.bias], "weight_decay": 0.0}]
        return torch.optim.Adam(groups, lr=0.25, betas=(0.5, 0.75))

    made = eight_bit.with_8bit_optimizer(Job(Stack, loss, two_groups, batch)).optimizer(Stack(64, 2))
    assert type(made).__name__ == "Adam8bit"
    assert [float(group["lr"]) for group in made.param_groups] == [0.5, 0.25]
    assert [group["betas"] for group in made.param_groups] == [(0.5, 0.75)] * 2
    assert made.param_groups[1]["weight_decay"] == 0.0


def test_lora_freezes_all_but_its_adapters_and_keeps_names_and_the_given_module():
    pytest.importorskip("peft")
    given = Stack(64, 2)
    before = {name: value.clone() for name, value in given.state_dict().items()}
    adapted = lora.with_lora(Job(given, loss, adamw, batch), rank=4).model()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in trained.values()) == 4 * (2 * (64 + 64) + 64 + 128)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for name, p in adapted.named_parameters() if name not in trained} == {torch.bfloat16}
    assert [name for name, _ in adapted.named_children()] == ["blocks", "out"]
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())


def test_every_adapter_of_an_encoder_with_multi_head_attention_is_reached_by_a_gradient():
    pytest.importorskip("peft")
    made = lora.with_lora(
        Job(lambda: torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), loss, adamw, batch), base_dtype=None
    )
    adapted = made.model()
    adapted(torch.randn(2, 3, 16)).square().sum().backward()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in trained.values()) == 2 * lora.RANK * (16 + 32)  # linear1 and linear2
    assert [name for name, p in trained.items() if p.grad is None] == []


def test_an_optimizer_without_an_8_bit_form_is_named():
    job = replace(stack_job(), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    row = rows_of(job, Plan(batch_size=2, micro_batch_size=2), allow=["8bit-optimizer"])["8bit-optimizer"]
    assert row.memory is None
    assert "SGD" in row.notes[0]
    with pytest.raises(UnsupportedError, match="SGD"):
        eight_bit.with_8bit_optimizer(job).optimizer(Stack(8, 1))


def test_a_library_that_is_missing_gets_its_install_line(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("torchao", "peft") else find(name))
    rows = rows_of(stack_job(), Plan(batch_size=2, micro_batch_size=2), allow=["8bit-optimizer", "lora"])
    for library, name in (("torchao", "8bit-optimizer"), ("peft", "lora")):
        assert any(f'pip install "snugfit[{library}]"' in note for note in rows[name].notes)
        assert not rows[name].executed_by_snugfit
    assert rows["8bit-optimizer"].memory is not None


def test_on_the_cpu_there_is_no_host_beside_it():
    rows = rows_of(tiny_job(), Plan(batch_size=2, micro_batch_size=2), device="cpu", allow=["host-offload", "fsdp"])
    assert all(row.memory is None and row.notes for row in rows.values())


def test_a_way_that_breaks_the_users_code_is_a_row_with_the_reason():
    def picky(model):
        if any("lora_" in name for name, _ in model.named_parameters()):
            raise RuntimeError("no adapters here")
        return adamw(model)

    pytest.importorskip("peft")
    row = rows_of(replace(stack_job(), optimizer=picky), Plan(batch_size=2, micro_batch_size=2), allow=["lora"])["lora"]
    assert row.memory is None
    assert "no adapters here" in row.notes[0]


def test_only_allowed_ways_are_worked_out_and_unknown_ones_refused():
    plan = Plan(batch_size=2, micro_batch_size=2)
    assert list(rows_of(stack_job(), plan, allow=["fsdp"])) == ["fsdp"]
    with pytest.raises(PlanError, match="unknown change of the job") as raised:
        rows_of(stack_job(), plan, allow=["zero-offload"])
    assert all(name in str(raised.value) for name in NAMES)


def test_rows_are_ordered_by_fit_then_time_on_all_cards_then_change(monkeypatch):
    made = [
        ways_out_module.WayOut(
            name=name, change="", code="", memory=None, step_time_s=1.0, relative_time=time, fits=fits,
            executed_by_snugfit=False, plan=Plan(batch_size=4, micro_batch_size=4), world_size=cards,
        )
        for name, time, fits, cards in (
            ("fsdp", 0.5, True, 4), ("lora", 1.0, True, 1), ("8bit-optimizer", 1.0, True, 1),
            ("host-offload", 0.1, False, 1),
        )
    ]  # fmt: skip
    ordered = [row.name for row in sorted(made, key=ways_out_module._by_cost)]
    assert ordered == ["8bit-optimizer", "lora", "fsdp", "host-offload"]


def test_a_row_goes_to_json_and_leaves_the_job_out():
    row = rows_of(stack_job(), Plan(batch_size=2, micro_batch_size=2), allow=["fsdp"])["fsdp"]
    document = row.to_dict()
    assert document["needed_bytes"] == row.needed_bytes
    assert "job" not in document
    assert json.loads(json.dumps(document)) == document


def test_micro_batches_that_are_not_traced_take_the_time_of_the_second_one():
    steps = [
        recorded_step.record(stack_job(), Plan(batch_size=n, micro_batch_size=1), CARD, Stack()) for n in (2, 3, 7)
    ]
    two, three, seven = (sum(step.seconds().values()) for step in steps)
    assert seven - three == pytest.approx(4 * (three - two))


def test_a_traced_step_has_its_optimizers_state_from_the_beginning_and_no_copy_of_building():
    low = recorded_step.in_bfloat16(Plan(batch_size=2, micro_batch_size=1))
    report = recorded_step.record(stack_job(), low, CARD, Stack()).trace.report()
    weights = sum(p.numel() for p in Stack().parameters())
    assert report.at("forward end")["optimizer"] == pytest.approx(8 * weights, rel=0.01)
    assert report.peak_at.phase != "build"


def test_a_rewritten_recording_keeps_marks_and_what_is_not_changed():
    births = [Birth(size, "saved", "forward", "", "op", 1) for size in (10, 20, 30)]
    recording = Recording(births, [1, 2, -1, 3, -2, -3], [(0, "window"), (3, "forward end"), (6, "step end")])
    changed = Rewriting(recording)
    changed.resize(0, 11)
    changed.remove(1)
    changed.end_at(2, 4)
    changed.add(Birth(5, "temporary", "forward", "", "op", 1), 3, 5)
    done = changed.done()
    assert done.events == [1, -1, 4, 3, -3, -4]
    assert [birth.num_bytes for birth in done.births] == [11, 20, 30, 5]
    assert done.marks == [(0, "window"), (2, "forward end"), (6, "step end")]
    assert recording.births[0].num_bytes == 10


def test_a_way_is_a_short_line_that_ends_in_what_to_type():
    fits = ways_out(stack_job(), Plan(batch_size=2, micro_batch_size=2), hardware.resolve("cpu"), sizes.GIB)
    by_name = {line.partition(":")[0]: line for line in sentences(fits)}
    for way in fits:
        line = by_name[way.name]
        if way.fits:
            typed = f"--allow {way.name}"
            assert line.endswith(f"type {typed}" if way.executed_by_snugfit else f"by hand, {typed} prints the lines")
        assert "type --allow" not in line or way.executed_by_snugfit
        assert len(line) < 200
    long = replace(fits[0], memory=None, notes=("a reason " * 100 + "\nTraceback",))
    assert len(sentences([long])[0]) < 200
