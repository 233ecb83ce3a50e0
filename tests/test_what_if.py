"""What other plans would free: every line is what an estimate of its own plan says."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import snugfit
from models import token_batch, token_loss
from snugfit import Plan, sizes
from snugfit.memory import tracing
from snugfit.memory.reporting import what_if

CARD = "rtx-3060-12gb"
WIDTH = 256


class Model(nn.Module):
    """Repeated blocks whose activations are much larger than their weights."""

    def __init__(self, depth=2, width=WIDTH):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 11)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def job(model=Model, **options):
    return snugfit.Job(
        model,
        token_loss,
        lambda m: torch.optim.AdamW(m.parameters(), **options),
        lambda size: token_batch(size, length=512),
        count="samples",
    )


WHOLE = Plan(batch_size=32, micro_batch_size=32)


@pytest.fixture(scope="module")
def lines():
    return what_if.savings(job(), WHOLE, CARD)


def test_each_line_is_an_estimate_of_its_own_plan_on_top_of_those_before_it(lines):
    described = job()
    assert [line.change for line in lines][:3] == [
        "bf16-mixed",
        "micro-batch 16",
        "every block recomputed (2 segments)",
    ]
    before = snugfit.estimate(described, WHOLE, CARD)
    expected = [
        replace(WHOLE, precision="bf16-mixed"),
        replace(WHOLE, precision="bf16-mixed", micro_batch_size=16),
        replace(WHOLE, precision="bf16-mixed", micro_batch_size=16, recompute=snugfit.checkpointing.blocks(Model())),
    ]
    for line, plan in zip(lines, expected, strict=False):
        assert line.plan == plan
        memory = snugfit.estimate(described, plan, CARD)
        assert line.memory == memory
        assert line.freed_bytes == before.peak_reserved_bytes - memory.peak_reserved_bytes > 0
        before = memory


def test_the_micro_batch_is_halved_until_the_budget_holds_it():
    described = job()
    now = snugfit.estimate(described, WHOLE, CARD)
    budget = now.context_bytes + now.margin_bytes + now.peak_reserved_bytes // 5
    (line,) = [
        line
        for line in what_if.savings(described, replace(WHOLE, precision="bf16-mixed"), CARD, budget=budget)
        if line.change.startswith("micro-batch")
    ]
    assert line.plan.micro_batch_size in (8, 4, 2)
    assert line.memory.fits(budget)


def test_no_more_traces_are_made_than_promised(monkeypatch):
    plans = []
    estimate = tracing.estimate

    def counted(described, plan, device):
        plans.append(plan)
        return estimate(described, plan, device)

    monkeypatch.setattr(tracing, "estimate", counted)
    described = job()
    memory = estimate(described, WHOLE, CARD)
    what_if.savings(described, WHOLE, CARD, budget="700MiB", memory=memory)
    assert 3 <= len(plans) <= 5
    assert WHOLE not in plans


@pytest.mark.parametrize(
    ("plan", "device", "missing"),
    [
        (replace(WHOLE, precision="bf16-mixed"), CARD, "bf16-mixed"),
        (WHOLE, "cpu", "bf16-mixed"),
        (Plan(batch_size=4, micro_batch_size=1), CARD, "micro-batch"),
        (replace(WHOLE, recompute=snugfit.checkpointing.blocks(Model())), CARD, "recomputed"),
        (WHOLE, "cpu", "for-loop"),
    ],
)
def test_what_the_plan_or_the_device_does_not_have_gets_no_line(plan, device, missing):
    lines = what_if.savings(job(), plan, device)
    assert not [line.change for line in lines if missing in line.change]


def test_a_card_without_bfloat16_is_offered_float16():
    assert what_if.savings(job(), WHOLE, "t4")[0].change == "16-mixed"


def test_a_model_without_blocks_is_not_recomputed():
    described = job(lambda: nn.Sequential(nn.Embedding(11, 2048), nn.Linear(2048, 11)))
    changes = [line.change for line in what_if.savings(described, WHOLE, CARD)]
    assert not [change for change in changes if "recomputed" in change]


def test_a_change_that_needs_more_is_shown_and_not_built_upon():
    """Autocast keeps a copy of every weight: more than the activations of one token shrink by."""
    large = snugfit.Job(
        lambda: nn.Sequential(nn.Embedding(11, 2048), *(nn.Linear(2048, 2048) for _ in range(8)), nn.Linear(2048, 11)),
        token_loss,
        lambda m: torch.optim.SGD(m.parameters()),
        lambda size: token_batch(size, length=1),
        count="samples",
    )
    plan = Plan(batch_size=2, micro_batch_size=2)
    lines = what_if.savings(large, plan, CARD)
    assert lines[0].change == "bf16-mixed"
    assert lines[0].freed_bytes < 0
    assert not lines[0].helps
    assert all(line.plan.precision == "32-true" for line in lines[1:])


def test_the_form_of_the_optimizer_is_tried_where_the_peak_lies_in_the_update():
    described = job(lambda: Model(depth=2, width=1024))
    plan = Plan(batch_size=1, micro_batch_size=1, precision="bf16-mixed")
    now = snugfit.estimate(described, plan, CARD)
    lines = what_if.savings(described, plan, CARD)
    (line,) = lines
    assert line.plan.optimizer_impl == "for-loop"
    before, after = (window.by_phase["optimizer"] for window in (now.windows[-1], line.memory.windows[-1]))
    # Square roots of all second moments at once against at most three tensors of one parameter.
    parameters = [4 * parameter.numel() for parameter in Model(depth=2, width=1024).parameters()]
    assert before - after >= sum(parameters) - 3 * max(parameters)
    assert line.freed_bytes == now.peak_reserved_bytes - line.memory.peak_reserved_bytes > 0


def test_the_job_is_left_as_it_is():
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    what_if.savings(job(model), WHOLE, CARD)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_line_is_a_document_of_built_in_values(lines):
    line = lines[0].to_dict()
    assert set(line) == {
        "change",
        "freed_bytes",
        "needed_bytes",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "plan",
    }
    assert line["needed_bytes"] >= line["peak_reserved_bytes"] >= line["peak_allocated_bytes"] > sizes.MIB
