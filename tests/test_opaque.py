"""Functions that a trace cannot look into: described by the user, run with real tensors."""

import copy

import pytest
import torch
from torch import nn

import snugfit

CARD = "rtx-3090"
ROWS, WIDTH = 128, 1024
ACTIVATION = ROWS * WIDTH * 4
SQUARE = WIDTH * WIDTH * 4


def reads_values(x):
    if float(x.detach().sum()) > 1e30:
        raise ValueError("far too large")
    return x * 2


def step_of(function):
    """A linear layer before the function; the function's output is summed."""

    def make_step():
        model = nn.Linear(WIDTH, WIDTH, bias=False).cuda()

        def step():
            x = torch.zeros(ROWS, WIDTH, device="cuda")
            function(model(x)).sum().backward()
            model.zero_grad()

        return step

    return make_step


def saved(function):
    return snugfit.trace(step_of(function), CARD).at("forward end")["saved"]


PLAIN = ACTIVATION + 2 * 512
"What the step keeps without the function: its input, the loss and the gradient of the loss."


def test_inputs_and_outputs_are_kept_for_backward_by_default():
    function = snugfit.opaque(reads_values, lambda x: torch.empty_like(x))
    assert saved(function) == PLAIN + 2 * ACTIVATION


@pytest.mark.parametrize(
    ("saves", "kept"),
    [
        (lambda x, outputs: x, ACTIVATION),
        (lambda x, outputs: [outputs, torch.empty(ROWS, dtype=torch.float32, device="meta")], ACTIVATION + 512),
        (lambda x, outputs: None, 0),
    ],
)
def test_what_is_kept_may_be_said(saves, kept):
    assert saved(snugfit.opaque(reads_values, lambda x: torch.empty_like(x), saves=saves)) == PLAIN + kept


@pytest.mark.parametrize(
    "outputs_like",
    [
        lambda x: torch.empty(x.shape, device="meta"),
        lambda x: torch.empty(ROWS, WIDTH),
        lambda x: x.new_empty(x.shape),
    ],
)
def test_outputs_may_be_described_by_tensors_of_any_device(outputs_like):
    assert saved(snugfit.opaque(reads_values, outputs_like)) == PLAIN + 2 * ACTIVATION


def test_the_report_says_what_is_assumed():
    report = snugfit.trace(step_of(snugfit.opaque(reads_values, lambda x: torch.empty_like(x))), CARD)
    assert any(
        sentence.startswith("opaque: reads_values keeps its inputs and outputs") for sentence in report.assumptions
    )


def test_it_is_a_decorator_too_and_keeps_name_and_words():
    @snugfit.opaque(outputs_like=lambda x: torch.empty_like(x))
    def doubled(x):
        """Twice."""
        return reads_values(x)

    assert "doubled" in doubled.__name__
    assert doubled.__doc__ == "Twice."
    assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
    assert saved(doubled) == PLAIN + 2 * ACTIVATION


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x):
        return reads_values(x @ self.weight)


def test_a_modules_parameters_get_gradients_and_keep_their_names():
    def make_step():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Mixing()).cuda()
        names = list(model.state_dict())
        model[1] = snugfit.opaque(model[1], lambda x: torch.empty_like(x))
        assert list(model.state_dict()) == names
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step():
            optimizer.zero_grad()
            model(torch.zeros(ROWS, WIDTH, device="cuda")).sum().backward()
            optimizer.step()

        return step

    report = snugfit.trace(make_step, CARD)
    assert report.at("backward end")["gradient"] == 2 * SQUARE
    assert report.at("backward end")["parameter"] == 2 * SQUARE


def test_several_outputs_of_several_types_keep_their_structure():
    seen = []

    def make_step():
        split = snugfit.opaque(
            lambda x: {"values": x, "indices": x.argsort()},
            lambda x: {"values": torch.empty_like(x), "indices": torch.empty(x.shape, dtype=torch.int64)},
        )
        model = nn.Linear(8, 8).cuda()

        def step():
            made = split(model(torch.zeros(4, 8, device="cuda")))
            seen.append((made["values"].requires_grad, made["indices"].requires_grad, made["indices"].dtype))
            made["values"].sum().backward()

        return step

    snugfit.trace(make_step, CARD)
    assert seen == [(True, False, torch.int64)] * 2


def test_copies_are_opaque_too_and_real_tensors_run_the_function():
    module = snugfit.opaque(Mixing(), lambda x: torch.empty_like(x))
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.zero_()
    x = torch.ones(2, WIDTH)
    assert isinstance(twin, Mixing)
    assert float(module(x).detach()[0, 0]) == 2 * WIDTH
    assert not twin(x).any()
    job = snugfit.Job(
        nn.Sequential(module, nn.Linear(WIDTH, 1)),
        lambda model, batch: model(batch).mean(),
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        lambda n: torch.zeros(n, WIDTH),
    )
    report = snugfit.estimate(job, snugfit.Plan(batch_size=4, micro_batch_size=4), CARD)
    assert any(sentence.startswith("opaque: Mixing") for sentence in report.assumptions)


def test_a_recomputed_opaque_part_is_described_again():
    def make_step(recompute):
        def make():
            block = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Mixing(), nn.ReLU()).cuda()
            block[1] = snugfit.opaque(block[1], lambda x: torch.empty_like(x))

            def step():
                x = torch.zeros(ROWS, WIDTH, device="cuda", requires_grad=True)
                y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if recompute else block(x)
                y.sum().backward()

            return step

        return make

    plain, recomputed = (snugfit.trace(make_step(flag), CARD).at("forward end")["saved"] for flag in (False, True))
    assert plain - recomputed == 2 * ACTIVATION  # the inputs and outputs of the opaque part


@pytest.mark.parametrize(
    ("declare", "match"),
    [
        (lambda: snugfit.opaque(reads_values), "outputs_like of opaque is no function"),
        (lambda: snugfit.opaque(reads_values, torch.zeros(2)), "outputs_like of opaque is no function"),
        (lambda: snugfit.opaque(reads_values, torch.empty_like, saves=3), "saves of opaque is no function"),
        (lambda: snugfit.opaque(Mixing, torch.empty_like), "only functions and modules can be opaque"),
        (lambda: snugfit.opaque(3, torch.empty_like), "only functions and modules can be opaque"),
    ],
)
def test_what_cannot_be_declared_is_refused(declare, match):
    with pytest.raises(snugfit.PlanError, match=match):
        declare()


def test_a_description_without_tensors_is_refused():
    with pytest.raises(snugfit.UnsupportedError, match="returned no tensor"):
        snugfit.trace(step_of(snugfit.opaque(reads_values, lambda x: None)), CARD)
