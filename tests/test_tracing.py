import gc

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

import snugfit
from snugfit.memory import tracing
from snugfit.memory.cpu import rules as cpu_rules
from snugfit.sizes import MIB

WIDTH = 1024
SQUARE = 4 * WIDTH * WIDTH
ROW = 4 * WIDTH
WORKSPACE = 8519680
CARD = "rtx-3060-12gb"


def stack(depth=3, optimizer=torch.optim.SGD, batch=64, **options):
    """A step of bias-free square layers with ReLU between: every byte can be counted by hand."""

    def make_step():
        layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
        model = nn.Sequential(*layers)
        update = optimizer(model.parameters(), lr=1e-3, **options)
        batch_ = torch.zeros(batch, WIDTH)

        def step():
            model(batch_).sum().backward()
            update.step()
            update.zero_grad()

        return step

    return make_step


def test_every_category_of_a_linear_stack_is_exact_at_every_phase():
    report = snugfit.trace(stack(), CARD)
    activations = 64 * ROW
    assert report.at("forward end") == {
        "workspace": 2 * WORKSPACE,  # both stay from the first window
        "parameter": 3 * SQUARE,
        "saved": 3 * activations + 1024,  # the three outputs of ReLU; the loss and its gradient
        "input": activations,
    }
    assert report.at("backward end") == {
        "workspace": 2 * WORKSPACE,
        "parameter": 3 * SQUARE,
        "gradient": 3 * SQUARE,
        "input": activations,
    }
    assert report.at("step end") == {"workspace": 2 * WORKSPACE, "parameter": 3 * SQUARE, "input": activations}
    assert report.static_bytes == 6 * SQUARE
    assert report.label == "modelled"
    assert report.context_bytes > 0


def test_the_categories_and_modules_at_the_peak_sum_to_the_peak():
    report = snugfit.trace(stack(optimizer=torch.optim.AdamW), CARD)
    assert sum(report.by_category.values()) == report.peak_allocated_bytes
    assert sum(size for held in report.by_module.values() for size in held.values()) == report.peak_allocated_bytes
    assert report.peak_reserved_bytes >= report.peak_allocated_bytes
    assert report.peak_reserved_bytes % (2 * MIB) == 0
    assert report.by_module["2"]["parameter"] == SQUARE
    assert report.by_module["2"]["optimizer"] == 2 * SQUARE


def test_the_moment_of_the_peak_is_named():
    report = snugfit.trace(stack(optimizer=torch.optim.AdamW), CARD)
    assert (report.peak_at.phase, report.peak_at.op) == ("optimizer", "_foreach_sqrt.default")
    wide = snugfit.trace(stack(batch=16384), CARD)
    assert (wide.peak_at.window, wide.peak_at.phase, wide.peak_at.op) == (1, "backward", "mm.default")


def test_c087_the_peak_counts_the_optimizer_state_that_the_first_update_makes():
    plain = snugfit.trace(stack(batch=16384), CARD)
    adam = snugfit.trace(stack(batch=16384, optimizer=torch.optim.AdamW), CARD)
    assert adam.peak_at.window == 2
    assert adam.peak_allocated_bytes - plain.peak_allocated_bytes == 2 * 3 * SQUARE


def test_c086_foreach_needs_one_copy_more_at_the_update_and_the_loop_three_tensors():
    def make_step(foreach):
        def make():
            parameters = [nn.Parameter(torch.zeros(100, 100)) for _ in range(100)]
            optimizer = torch.optim.Adam(parameters, foreach=foreach)

            def step():
                for parameter in parameters:
                    parameter.grad = torch.zeros(100, 100)
                optimizer.step()

            return step

        return make

    rounded = 40448  # 40000 bytes in blocks of 512
    foreach = snugfit.trace(make_step(None), CARD)
    loop = snugfit.trace(make_step(False), CARD)
    assert foreach.static_bytes == loop.static_bytes == 400 * rounded
    assert foreach.peak_allocated_bytes == 500 * rounded
    assert loop.peak_allocated_bytes - 400 * rounded == 3 * rounded  # two of one parameter, one of the last


def test_c082_tied_weights_count_once():
    def make_step():
        embedding, head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
        head.weight = embedding.weight
        model = nn.Sequential(embedding, head)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        ids = torch.zeros(4, 8, dtype=torch.long)

        def step():
            model(ids).sum().backward()
            optimizer.step()

        return step

    held = snugfit.trace(make_step, CARD).at("step end")
    assert (held["parameter"], held["gradient"], held["optimizer"]) == (256000, 256000, 512000)


@pytest.mark.parametrize(("form", "megabytes"), [("none", 87.0), ("whole", 87.6), ("block", 15.8)])
def test_c072_a_checkpoint_around_the_whole_model_saves_nothing(form, megabytes, monkeypatch):
    monkeypatch.setattr(cpu_rules, "HIDDEN", {})  # the case counts live storages, not what kernels allocate inside

    def make_step():
        blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(16)
        )
        inputs = torch.zeros(4096, 32)

        def forward(x, each=False):
            for block in blocks:
                x = x + (checkpoint(block, x, use_reentrant=False) if each else block(x))
            return x

        def step():
            # The output is not held: the published peaks count live storages of the blocks, no temporaries of kernels.
            if form == "whole":
                checkpoint(forward, inputs, use_reentrant=False).sum().backward()
            else:
                forward(inputs, each=form == "block").sum().backward()

        return step

    peak = snugfit.trace(make_step, "cpu").peak_allocated_bytes
    assert peak == pytest.approx(megabytes * 1e6, rel=0.1)


def test_code_that_names_cuda_needs_no_gpu():
    def make_step():
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        inputs = torch.zeros(32, 64, device="cuda")

        def step():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(inputs.to("cuda")).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    report = snugfit.trace(make_step, CARD)
    assert report.at("step end")["parameter"] == 64 * 64 * 4 + 512
    assert report.at("step end")["optimizer"] == 2 * (64 * 64 * 4 + 512)


def test_what_stays_on_the_host_is_not_counted_until_it_is_moved():
    def make_step():
        data = torch.zeros(4096, 64)
        model = nn.Linear(64, 64, bias=False).to("cuda:0")

        def step():
            micro_batch = data[torch.arange(32)]
            model(micro_batch.to("cuda", non_blocking=True)).sum().backward()

        return step

    report = snugfit.trace(make_step, CARD)
    assert report.at("step end")["parameter"] == 64 * 64 * 4
    assert report.at("forward end")["input"] == 32 * 64 * 4


def test_weights_cast_by_autocast_are_a_category_of_their_own():
    def make_step():
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
        inputs = torch.zeros(8, 256)

        def step():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(inputs).float().square().sum()
                loss.backward()

        return step

    assert snugfit.trace(make_step, CARD).at("forward end")["autocast"] == 2 * 256 * 256 * 2
    assert "autocast" not in snugfit.trace(make_step, CARD).at("step end")


@pytest.mark.parametrize(
    ("read", "op"),
    [
        (lambda x: int(x.sum()), "_local_scalar_dense"),
        (lambda x: bool((x > 0).all()), "_local_scalar_dense"),
        (lambda x: x.nonzero(), "nonzero"),
    ],
)
def test_reading_a_value_is_refused_by_op_and_module(read, op):
    class Reader(nn.Module):
        def forward(self, x):
            read(x)
            return x

    def make_step():
        model = nn.Sequential(nn.Linear(4, 4), Reader())
        return lambda: model(torch.ones(2, 4)).sum().backward()

    with pytest.raises(snugfit.UnsupportedError) as caught:
        snugfit.trace(make_step, "cpu")
    assert op in caught.value.op
    assert caught.value.module == "1"
    assert "hint:" in str(caught.value)


def test_make_step_must_return_a_function():
    with pytest.raises(snugfit.PlanError, match="did not return a step"):
        snugfit.trace(lambda: None, "cpu")


def test_a_trace_leaves_nothing_behind():
    torch.manual_seed(0)
    state, enabled = torch.get_rng_state(), gc.isenabled()
    hooks = len(module_hooks._global_forward_hooks), len(module_hooks._global_forward_pre_hooks)
    initialiser = nn.init.kaiming_uniform_
    snugfit.trace(stack(), CARD)
    with pytest.raises(snugfit.UnsupportedError):
        snugfit.trace(lambda: lambda: bool(torch.empty(2).sum()), CARD)
    assert torch.equal(torch.get_rng_state(), state)
    assert gc.isenabled() == enabled
    assert (len(module_hooks._global_forward_hooks), len(module_hooks._global_forward_pre_hooks)) == hooks
    assert nn.init.kaiming_uniform_ is initialiser
    assert not isinstance(torch.ones(2), tracing.torch_private.Fake)


def test_checkpointing_lowers_what_is_saved_and_recomputed_tensors_count_as_saved():
    def make_step(recompute):
        def make():
            layers = nn.ModuleList(
                nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(4)
            )

            def step():
                x = torch.zeros(512, 256)
                for layer in layers:
                    x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
                x.sum().backward()

            return step

        return make

    plain, recomputed = (snugfit.trace(make_step(flag), CARD) for flag in (False, True))
    assert recomputed.at("forward end")["saved"] < plain.at("forward end")["saved"] / 2
    assert recomputed.peak_at.phase == "backward"
    assert recomputed.by_category["saved"] > recomputed.at("forward end")["saved"]


def test_work_counts_the_flops_of_matrix_products():
    trace = tracing.record(lambda _: stack(depth=2)(), tracing.hardware.resolve(CARD))
    flops = sum(work.flops for work in trace.work)
    assert flops == 2 * 64 * WIDTH * WIDTH * (2 + 3)  # two products forward; backward needs no gradient of the input
    assert {work.phase for work in trace.work} == {"forward", "backward", "optimizer"}


def test_attention_of_transformers_is_traced_without_the_mask_that_it_makes_of_fake_tensors_only():
    transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=64, vocab_size=128)
    config.bos_token_id = config.eos_token_id = 0

    def make_step():
        model = transformers.GPT2LMHeadModel(config).eval()
        ids = torch.zeros(4, 64, dtype=torch.long)

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                model(input_ids=ids, use_cache=False).logits.sum().backward()

        return step

    ops = {work.op for work in tracing.record(lambda _: make_step(), tracing.hardware.resolve(CARD)).work}
    assert "_scaled_dot_product_flash_attention.default" in ops


def test_estimate_and_plan_leave_every_random_state_as_it_was():
    import random

    import numpy

    def batch(n):
        random.random()
        numpy.random.rand()
        return {"x": torch.randn(n, 8)}

    job = snugfit.Job(
        lambda: nn.Linear(8, random.randint(4, 4)),
        lambda model, batch: model(batch["x"]).pow(2).mean(),
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        batch,
    )

    def states():
        return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()

    before = states()
    snugfit.estimate(job, snugfit.Plan(batch_size=8, micro_batch_size=4), CARD)
    snugfit.plan(job, "cpu", batch_size=8)
    assert states() == before


def test_a_step_of_an_engine_is_traced_like_any_other():
    def make_step():
        model = nn.Linear(8, 1)
        engine = snugfit.Engine(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            loss=lambda model, x: model(x).pow(2).mean(),
            micro_batch_size=2,
            max_grad_norm=1.0,
        )
        batch = torch.randn(8, 8)
        return lambda: engine.step(batch)

    assert snugfit.trace(make_step, CARD).at("backward end")["gradient"] == 2 * 512


def test_a_step_that_makes_nothing_has_an_empty_report():
    assert snugfit.trace(lambda: lambda: None, CARD).peak_allocated_bytes == 0


def test_a_function_that_is_none_is_refused():
    with pytest.raises(snugfit.PlanError, match="cannot be called"):
        snugfit.trace(3, "cpu")


def test_functions_of_the_card_have_no_effect_without_one():
    def make_step():
        torch.cuda.set_device(0)
        model = nn.Linear(8, 8).cuda()

        def step():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            model(torch.zeros(4, 8, device="cuda")).sum().backward()
            return torch.cuda.max_memory_allocated()

        return step

    assert snugfit.trace(make_step, CARD).peak_allocated_bytes > 0


def test_a_custom_operator_without_a_fake_kernel_is_named_with_its_module():
    @torch.library.custom_op("snugfit_tests::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    class Opaque(nn.Module):
        def forward(self, x):
            return opaque(x)

    def make_step():
        model = nn.Sequential(nn.Linear(4, 4), Opaque())
        return lambda: model(torch.ones(2, 4))

    with pytest.raises(snugfit.UnsupportedError) as caught:
        snugfit.trace(make_step, CARD)
    assert "snugfit_tests.opaque" in caught.value.op.replace("::", ".")
    assert caught.value.module == "1"
    assert "register_fake" in caught.value.hint


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_second_gradient_of_losses_with_counts_of_their_own_is_counted(steps):
    def loss(model, batch):
        out = model(batch["x"])
        return [snugfit.Loss(out.sum(), 3.0), snugfit.Loss(out.square().sum(), len(out))]

    job = snugfit.Job(
        lambda: torch.nn.Linear(256, 256, bias=False),
        loss,
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        lambda n: {"x": torch.zeros(n, 256)},
    )
    plan = snugfit.Plan(batch_size=2 * steps, micro_batch_size=2)
    report, measured = snugfit.estimate(job, plan, "cpu"), snugfit.measure(job, plan, "cpu")
    weight = 256 * 256 * 4
    assert report.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, abs=16 * 1024)
    # the weight, a gradient for each denominator, and from the third micro-batch on the one that is added to them
    assert report.peak_allocated_bytes // weight == 1 + min(steps, 3)


@pytest.mark.parametrize(
    ("card", "precision"), [("rtx-3090", "bf16-mixed"), ("t4", "16-mixed"), ("gtx-1080", "32-true")]
)
def test_an_engine_with_automatic_precision_is_traced_in_that_of_the_card(card, precision):
    def make_step(asked):
        model = torch.nn.Linear(512, 512).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = snugfit.Engine(model, optimizer, loss=lambda m, x: m(x).square().mean(), precision=asked)
        assert engine.precision == precision
        batch = torch.zeros(8, 512)
        return lambda: engine.step(batch)

    found, explicit = (
        snugfit.trace(lambda asked=asked: make_step(asked), device=card) for asked in ("auto", precision)
    )
    assert found == explicit


def test_a_batch_of_another_size_than_asked_for_is_refused():
    job = snugfit.Job(
        lambda: nn.Linear(8, 1),
        lambda model, batch: model(batch["x"]).mean(),
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        lambda n: {"x": torch.zeros(3, 8)},
    )
    with pytest.raises(snugfit.BatchError, match="another size"):
        snugfit.estimate(job, snugfit.Plan(batch_size=8, micro_batch_size=8), CARD)


def test_a_plan_report_is_not_a_plan():
    job = snugfit.Job(
        lambda: nn.Linear(8, 1),
        lambda model, batch: model(batch["x"]).mean(),
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        lambda n: {"x": torch.zeros(n, 8)},
    )
    with pytest.raises(snugfit.PlanError) as caught:
        snugfit.estimate(job, snugfit.plan(job, "cpu", batch_size=8), "cpu")
    assert ".plan" in caught.value.hint
