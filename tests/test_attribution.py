"""Who holds what: every sum is exact, and module, phase and category are named wherever the step runs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import snugfit
from models import ConvBatchNorm, LinearStack, Transformer, WithDropout, regression_batch, token_batch, token_loss
from snugfit import Plan, hardware
from snugfit.memory import tracing
from snugfit.memory.reporting.attribution import CATEGORIES, pattern

CARD = "rtx-3060-12gb"
WIDTH = 512
SQUARE = 4 * WIDTH * WIDTH
MIB = 2**20


def mse(model, micro_batch):
    return F.mse_loss(model(micro_batch["x"]), micro_batch["y"])


def mean_of_images(model, micro_batch):
    return F.cross_entropy(model(micro_batch["x"]), micro_batch["y"])


def images(size):
    return {"x": torch.zeros(size, 3, 12, 12), "y": torch.zeros(size, dtype=torch.long)}


JOBS = {
    "linear": (lambda: LinearStack(width=6), mse, regression_batch),
    "transformer": (lambda: Transformer(dropout=0.1), token_loss, token_batch),
    "tied": (lambda: Transformer(tied=True), token_loss, token_batch),
    "convolution": (ConvBatchNorm, mean_of_images, images),
    "dropout": (WithDropout, mse, regression_batch),
}
PLANS = {
    "whole": {"micro_batch_size": 8},
    "three micro-batches": {"micro_batch_size": 3},
    "bf16-mixed": {"micro_batch_size": 4, "precision": "bf16-mixed"},
    "16-mixed": {"micro_batch_size": 8, "precision": "16-mixed"},
    "bf16-true": {"micro_batch_size": 4, "precision": "bf16-true"},
}


@pytest.mark.parametrize("device", [CARD, "cpu"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", JOBS)
def test_every_sum_is_the_peak_to_the_byte(name, plan, device):
    model, loss, batch = JOBS[name]
    job = snugfit.Job(model, loss, lambda m: torch.optim.AdamW(m.parameters()), batch, count="samples", max_grad_norm=1)
    recompute = snugfit.checkpointing.every(model(), 1) if name == "transformer" else ()
    described = Plan(batch_size=8, recompute=recompute, **PLANS[plan])
    assert_exact(snugfit.estimate(job, described, device))


def assert_exact(report):
    peak = report.peak_allocated_bytes
    assert sum(report.by_category.values()) == peak
    assert sum(size for held in report.by_module.values() for size in held.values()) == peak
    assert sum(holder.num_bytes for holder in report.holders) == peak
    assert all(holder.num_bytes % holder.num_storages == 0 for holder in report.holders)
    assert set(report.by_category) <= set(CATEGORIES)
    for category, num_bytes in report.by_category.items():
        assert num_bytes == sum(held.get(category, 0) for held in report.by_module.values()) > 0
        assert num_bytes == sum(holder.num_bytes for holder in report.holders if holder.category == category)
    assert max(window.peak_allocated_bytes for window in report.windows) == peak
    assert max(window.peak_reserved_bytes for window in report.windows) == report.peak_reserved_bytes
    at_peak = report.windows[report.peak_at.window - 1]
    assert (at_peak.peak_at, at_peak.by_phase[report.peak_at.phase]) == (report.peak_at, peak)
    for window in report.windows:
        assert max(window.by_phase.values()) == window.peak_allocated_bytes
    for held in report.phases.values():
        assert 0 < sum(held.values()) <= peak
    assert 0 <= report.fragmentation_bytes <= report.unused_bytes <= report.peak_reserved_bytes


def trace(make_step, device=CARD):
    report = snugfit.trace(make_step, device)
    assert_exact(report)
    return report


def test_what_is_alike_in_repeated_modules_is_one_holder():
    def make_step():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.zeros(4096, WIDTH)

        def step():
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    report = trace(make_step)
    # The outputs of the ReLUs are saved (that of a linear layer is not: the next layer's input is the ReLU's). At the
    # peak, two gradients in the backward of the last layer, that of the last ReLU has gone.
    outputs = next(holder for holder in report.holders if holder.op == "relu.default")
    assert (outputs.module, outputs.num_storages, outputs.category) == ("*.*", 3, "saved")
    assert (outputs.num_bytes, outputs.phase) == (3 * 4096 * WIDTH * 4, "forward")
    assert outputs.window == report.peak_at.window
    weights = next(holder for holder in report.holders if holder.category == "parameter")
    assert (weights.module, weights.num_storages, weights.num_bytes, weights.window) == ("*.*", 4, 4 * SQUARE, 0)


def test_indices_in_a_name_become_stars_and_nothing_else_does():
    assert pattern("encoder.layer.11.output.dense") == "encoder.layer.*.output.dense"
    assert pattern("block1.conv2d") == "block1.conv2d"
    assert pattern("") == ""


def test_the_first_step_and_the_steady_state_are_both_there():
    def make_step():
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        optimizer = torch.optim.Adam(model.parameters())

        def step():
            model(torch.zeros(65536, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    report = trace(make_step)
    first, steady = report.windows
    assert (first.window, steady.window, report.peak_at.window) == (1, 2, 2)
    moments = 2 * SQUARE  # step counts are on the host
    assert steady.peak_allocated_bytes - first.peak_allocated_bytes == moments


def test_recomputed_tensors_belong_to_their_modules_whether_checkpoint_is_given_a_module_or_a_closure():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)

        def forward(self, x):
            return self.down(torch.tanh(self.up(x)))

    def make_step(closure):
        def make():
            model = nn.Sequential(*(Block() for _ in range(3)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step():
                x = torch.zeros(8192, 64, requires_grad=True)
                for block in model:
                    function = (lambda x, block=block: block(x) + x) if closure else block
                    x = checkpoint(function, x, use_reentrant=False)
                x.sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        return make

    hidden = 8192 * 1024 * 4
    for closure in (False, True):
        report = trace(make_step(closure))
        assert report.peak_at.phase == "backward"
        # Of the segment that is run again at the peak: its tanh is saved, in the module that made it.
        (recomputed,) = [h for h in report.holders if h.op == "tanh.default" and h.phase == "backward"]
        block, _, _ = report.peak_at.module.partition(".")
        assert (recomputed.module, recomputed.category, recomputed.num_bytes) == (block, "saved", hidden)


def test_parts_that_are_called_without_their_model_have_its_names_and_a_loss_module_has_its_own():
    def make_step():
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        model.head = nn.Linear(WIDTH, 1000)
        criterion = nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            x = torch.zeros(4096, WIDTH)
            for layer in model.layers:
                x = torch.relu(layer(x))
            criterion(model.head(x), torch.zeros(4096, dtype=torch.long)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    report = trace(make_step)
    assert report.by_module["layers.0"]["parameter"] == SQUARE + 4 * WIDTH
    assert report.by_module["head"]["parameter"] == 4 * 1000 * WIDTH + 4096  # 4000 bytes of bias in blocks of 512
    assert report.by_module["CrossEntropyLoss"]["saved"] >= 4 * 4096 * 1000  # the log-probabilities
    assert report.peak_at.module == "CrossEntropyLoss"


def test_two_models_in_one_step_are_told_apart():
    def make_step():
        generator = nn.Sequential(nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH))
        discriminator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator)]

        def step():
            discriminator(generator(torch.zeros(64, 64))).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return step

    modules = trace(make_step).by_module
    assert modules["1"]["parameter"] == modules["Sequential.0"]["parameter"] == SQUARE + 4 * WIDTH


def test_tied_weights_and_all_that_goes_with_them_belong_to_the_module_that_comes_first():
    def make_step():
        model = Transformer(tied=True, width=64)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        batch = token_batch(64, length=64)

        def step():
            token_loss(model, batch).backward()
            optimizer.step()

        return step

    report = trace(make_step)
    table = 11 * 64 * 4 + 256  # 2816 bytes in blocks of 512
    held = report.by_module["embedding"]
    assert (held["parameter"], held["gradient"], held["optimizer"]) == (table, table, 2 * table)
    assert "parameter" not in report.by_module.get("head", {})


def test_gradients_are_gradients_without_an_optimizer_too():
    def make_step():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))

        def step():
            model.zero_grad()
            model(torch.zeros(8, WIDTH)).sum().backward()

        return step

    report = trace(make_step)
    assert report.at("step end")["gradient"] == SQUARE
    assert report.by_module["0"]["gradient"] == SQUARE


def test_what_clipping_makes_belongs_to_the_update():
    def make_step():
        parameters = [nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(8)]
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        def step():
            torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    recording = tracing.record(lambda _: make_step(), hardware.resolve(CARD)).recording
    norms = [birth for birth in recording.births if "norm" in birth.op]
    assert {(birth.phase, birth.category) for birth in norms} == {("optimizer", "temporary")}
    assert len([birth for birth in norms if birth.window == 1]) >= 8


def test_a_model_that_is_gone_holds_nothing_and_gives_its_name_to_no_other():
    def make_step():
        def step():
            for depth in (3, 1):
                model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))
                model(torch.zeros(8, WIDTH)).sum().backward()
                del model

        return step

    report = trace(make_step)
    assert report.at("step end").get("parameter", 0) == 0
    assert report.by_category["parameter"] == 3 * SQUARE


def test_the_copy_of_a_given_module_is_attributed_like_one_that_is_built():
    given = Transformer(width=64)
    job = snugfit.Job(given, token_loss, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), token_batch)
    described = Plan(batch_size=4, micro_batch_size=4)
    first = snugfit.estimate(job, described, CARD)
    second = snugfit.estimate(
        snugfit.Job(lambda: Transformer(width=64), job.loss, job.optimizer, job.batch), described, CARD
    )
    assert first.by_module == second.by_module


def test_c089_scores_their_copy_and_log_probabilities_are_all_counted_and_named():
    tokens, classes = 32768, 151936
    scores = 2 * tokens * classes
    wide = 2 * scores

    def make_step():
        head = nn.Linear(8, classes, bias=False, dtype=torch.bfloat16)
        hidden = torch.zeros(1, tokens, 8, dtype=torch.bfloat16)
        labels = torch.zeros(tokens, dtype=torch.long)

        def step():
            logits = head(hidden)
            F.cross_entropy(logits.float().flatten(0, 1), labels).backward()

        return step

    report = trace(make_step, "a100-80gb")
    assert round(scores / 2**30, 2) == 9.27
    assert round(wide / 2**30, 2) == 18.55
    # The forward ends with the scores, their float32 copy and the log-probabilities: 46.4 GiB.
    small = 100 * MIB  # weights, inputs, workspaces
    assert scores + 2 * wide <= report.windows[0].by_phase["forward"] <= scores + 2 * wide + small
    # Backward drops the copy and makes two gradients more, of the log-probabilities and of the float32 scores.
    assert scores + 3 * wide <= report.peak_allocated_bytes <= scores + 3 * wide + small
    named = {(holder.op, holder.module): holder.num_bytes for holder in report.holders if holder.num_bytes >= scores}
    assert named == {
        ("mm.default", ""): scores,
        ("_log_softmax.default", ""): wide,
        ("nll_loss_backward.default", ""): wide,
        ("_log_softmax_backward_data.default", ""): wide,
    }
    (sentence,) = (sentence for sentence in report.advice if "chunked_cross_entropy" in sentence)
    assert "hidden states" in sentence
    assert "docs/checkpointing.md" in sentence
