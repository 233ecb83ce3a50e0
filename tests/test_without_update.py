"""A window that is traced without its update has the micro-steps of one with it, and no state of the optimizer."""

import pytest
import torch
from torch import nn

import snugfit
from snugfit import hardware
from snugfit.memory import tracing
from snugfit.planning import scaling

WIDTH = 32
CARD, CPU = "rtx-3060-12gb", "cpu"


class Net(nn.Module):
    def __init__(self, norm=nn.Identity):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 4 * WIDTH), norm(4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x))))


def both(device, model=Net, optimizer=torch.optim.Adam, **fields):
    """The trace of a window with its update and without."""
    job = snugfit.Job(
        model,
        lambda model, x: model(x).square().mean(),
        lambda model: optimizer(model.parameters()),
        lambda samples: torch.zeros(samples, WIDTH),
        max_grad_norm=1.0,
    )
    plan = snugfit.Plan(batch_size=32, micro_batch_size=32, **fields)
    target = hardware.resolve(device)
    return [tracing.record_job(job, plan, target, [[0]], with_update=update) for update in (True, False)]


def micro_step(trace):
    recording = trace.recording
    ((start, end),) = scaling.micro_steps(recording)
    births = [recording.births[event - 1] for event in recording.events[start:end] if event > 0]
    work = [(position, item) for position, item in recording.work if start < position <= end]
    return start, end, recording.events[start:end], births, work


@pytest.mark.filterwarnings("ignore:.*is rounded away:UserWarning")
@pytest.mark.parametrize(
    ("device", "fields"),
    [
        (CPU, {}),
        (CPU, {"precision": "bf16-true"}),
        (CARD, {}),
        (CARD, {"precision": "bf16-mixed"}),
        (CARD, {"precision": "16-mixed"}),
        (CARD, {"precision": "bf16-true"}),
        (CARD, {"precision": "bf16-true", "bf16_update": "nearest"}),
        (CARD, {"precision": "bf16-true", "bf16_update": "stochastic-rounding"}),
        (CARD, {"recompute": (snugfit.Segment(("up", "norm")),)}),
        (CARD, {"norm_policy": "window", "model": lambda: Net(nn.BatchNorm1d)}),
        (CARD, {"precision": "bf16-mixed", "model": lambda: Net().bfloat16()}),
    ],
)
def test_the_micro_step_is_the_same(device, fields):
    with_update, without = map(micro_step, both(device, **fields))
    assert with_update == without


def test_only_the_update_is_missing():
    with_update, without = (trace.recording for trace in both(CARD))
    categories = [{birth.category for birth in recording.births} for recording in (with_update, without)]
    assert categories[0] - categories[1] == {"optimizer"}
    marks = ["window", "micro-batch", "forward end", "backward end", "step end"]
    assert [[name for _, name in recording.marks] for recording in (with_update, without)] == [marks, marks]


def test_an_optimizer_that_evaluates_the_loss_itself_steps_anyway():
    with_update, without = both(CARD, optimizer=lambda parameters: torch.optim.LBFGS(parameters, max_iter=2))
    assert with_update.recording == without.recording
