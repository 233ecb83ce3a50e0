"""Numbers that a step reads and a trace does not have: what they are taken as, and that the report says it."""

import math

import numpy
import pytest
import scipy.optimize
import torch
from torch import nn

import snugfit
from snugfit.memory.known_values import assumed_values

CARD = "rtx-3090"


def job(max_iter, rows):
    class Counted(torch.optim.LBFGS):
        def step(self, closure):
            loss = super().step(closure)
            state = self.state[self._params[0]]
            rows.append((len(state.get("old_dirs") or ()), state["func_evals"]))
            return loss

    return snugfit.Job(
        lambda: nn.Linear(256, 128),
        lambda model, x: ((model(x) * 10).square() + model(x) ** 4).mean(),
        lambda model: Counted(model.parameters(), max_iter=max_iter, history_size=5, lr=0.1),
        lambda n: torch.randn(n, 256),
    )


@pytest.mark.parametrize("max_iter", [3, 4, 5, 6])
def test_lbfgs_runs_all_its_iterations_and_fills_its_history(max_iter):
    plan = snugfit.Plan(batch_size=16, micro_batch_size=16)
    traced, real = [], []
    predicted = snugfit.estimate(job(max_iter, traced), plan, "cpu")
    measured = snugfit.measure(job(max_iter, real), plan, "cpu")
    assert traced == real
    assert [evaluations for _, evaluations in traced] == [max_iter, 2 * max_iter]
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=1e-3)
    assert assumed_values.COMPARED in predicted.assumptions


def traced(use):
    def make_step():
        model = nn.Linear(8, 8).cuda()

        def step():
            loss = model(torch.zeros(4, 8, device="cuda")).square().mean()
            use(loss)
            loss.backward()

        return step

    return snugfit.trace(make_step, CARD)


@pytest.mark.parametrize(
    "use",
    [
        lambda loss: math.isfinite(loss.item()),
        lambda loss: math.exp(loss.item()) > 5,
        lambda loss: numpy.isnan(loss.item()),
        lambda loss: f"{loss.item():.2f}",
        lambda loss: loss.detach().cpu().numpy(),
        lambda loss: loss.detach().cpu().numpy().reshape(1).mean() > 0,
        lambda loss: loss.tolist(),
    ],
)
def test_a_number_is_said_to_be_taken_as_one_where_no_stand_in_can_refuse(use):
    [sentence] = [text for text in traced(use).assumptions if "taken as 1.0" in text]
    assert "nobody knows" in sentence
    assert "the branch for that value is what was traced" in sentence
    assert "test_unknown_numbers.py:" in sentence


def normal(model, batch):
    mean, spread = model(batch["x"]).chunk(2, dim=-1)
    return -torch.distributions.Normal(mean, spread.exp(), validate_args=True).log_prob(batch["y"]).mean()


def policy(model, batch):
    chosen = torch.distributions.Categorical(logits=model(batch["x"]), validate_args=True)
    return -chosen.log_prob(chosen.sample()).mean()


def loss_job(loss):
    return snugfit.Job(
        lambda: nn.Linear(8, 8),
        loss,
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: {"x": torch.randn(n, 8), "y": torch.randn(n, 4)},
    )


@pytest.mark.parametrize(("loss", "sentence"), [(normal, assumed_values.CHECKED), (policy, "finite")])
def test_distributions_that_check_their_arguments_are_traced_as_with_valid_ones(loss, sentence):
    plan = snugfit.Plan(batch_size=64, micro_batch_size=32)
    predicted, measured = snugfit.estimate(loss_job(loss), plan, "cpu"), snugfit.measure(loss_job(loss), plan, "cpu")
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.01)
    assert any(sentence in line for line in predicted.assumptions)
    assert snugfit.plan(loss_job(loss), CARD, batch_size=64).plan.micro_batch_size == 64


def test_a_known_argument_that_is_not_valid_is_still_found():
    def loss(model, batch):
        prior = torch.distributions.Normal(torch.zeros(()), torch.tensor(-1.0), validate_args=True)
        return -prior.log_prob(model(batch["x"])).mean()

    with pytest.raises(snugfit.UnsupportedError) as caught:
        snugfit.estimate(loss_job(loss), snugfit.Plan(batch_size=4, micro_batch_size=4), "cpu")
    assert "found invalid values" in caught.value.got


def with_covariance(x):
    covariance = torch.diag_embed(x.exp() + 1) + torch.zeros_like(x)[..., None]
    return (
        -torch.distributions.MultivariateNormal(x, covariance, validate_args=True).log_prob(torch.zeros_like(x)).mean()
    )


@pytest.mark.parametrize("device", [CARD, "cpu"])
@pytest.mark.parametrize(
    "loss", [with_covariance, lambda x: nn.functional.gaussian_nll_loss(x, torch.zeros_like(x), x.exp())]
)
def test_what_torch_checks_of_values_by_all_and_any_is_taken_to_hold(loss, device):
    job = loss_job(lambda model, batch: loss(model(batch["x"])))
    report = snugfit.estimate(job, snugfit.Plan(batch_size=4, micro_batch_size=2), device)
    assert assumed_values.CHECKED in report.assumptions


def test_draws_that_go_on_until_enough_are_accepted_are_no_checks():
    def loss(model, batch):
        out = model(batch["x"])
        return torch.distributions.VonMises(out, out.exp(), validate_args=True).sample().mean() + out.mean()

    with pytest.raises(snugfit.UnsupportedError, match="cannot be traced without real values"):
        snugfit.estimate(loss_job(loss), snugfit.Plan(batch_size=4, micro_batch_size=2), "cpu")


def test_what_a_step_itself_tests_is_still_refused():
    with pytest.raises(snugfit.UnsupportedError, match="cannot be traced without real values"):
        traced(lambda loss: bool((loss.detach() > 0).all()))


@pytest.mark.parametrize(
    "use",
    [
        lambda costs: scipy.optimize.linear_sum_assignment(costs),
        lambda costs: numpy.isnan(costs.numpy()),
        lambda costs: numpy.log(costs.numpy()),
    ],
    ids=["scipy", "isnan", "log"],
)
def test_foreign_code_that_cannot_take_unknown_numbers_is_a_refusal_by_name(use):
    def loss(model, batch):
        out = model(batch["x"])
        use(out.detach())
        return out.square().mean()

    with pytest.raises(snugfit.UnsupportedError, match=r"Job\.loss raised TypeError in the trace") as caught:
        snugfit.estimate(loss_job(loss), snugfit.Plan(batch_size=8, micro_batch_size=8), "cpu")
    assert "snugfit.opaque" in caught.value.hint


def test_float_says_where_it_was_read_and_which_branch_was_traced():
    seen = []
    [sentence] = [text for text in traced(lambda loss: seen.append(float(loss))).assumptions if "float(...)" in text]
    assert seen == [1.0, 1.0]
    assert "test_unknown_numbers.py:" in sentence
    assert sentence.endswith("is taken as 1.0; if the step branches on it, that is the branch that was traced")


@pytest.mark.parametrize(
    "use",
    [
        lambda loss: (loss.detach().cpu().numpy() > 0).any(),
        lambda loss: min(1.0, loss.item()),
        lambda loss: 3.0 in [loss.item()],
    ],
)
def test_comparing_a_stand_in_is_refused_also_in_arrays(use):
    with pytest.raises(snugfit.UnsupportedError, match="decides by a number"):
        traced(use)


class Packed(nn.Module):
    def __init__(self, kind, options, is_trained=False, batch_first=True):
        super().__init__()
        self.before = nn.Linear(32, 32) if is_trained else nn.Identity()
        self.batch_first = batch_first
        self.inner = kind(32, 64, batch_first=batch_first, **options)

    def forward(self, x):
        x = self.before(x) if self.batch_first else self.before(x).transpose(0, 1)
        lengths = torch.tensor([10, 8, 7, 3])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=self.batch_first)
        return nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=self.batch_first)[0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"proj_size": 16}),
        (nn.LSTM, {"bidirectional": True, "num_layers": 2, "dropout": 0.2}),
        (nn.GRU, {"bias": False}),
        (nn.RNN, {"nonlinearity": "relu"}),
    ],
)
def test_packed_sequences_on_the_cpu_need_what_is_measured(kind, options):
    assert_measured_as_predicted(packed_job(lambda: Packed(kind, options)))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_sequences_that_are_trained_before_they_are_packed_need_what_is_measured(kind, batch_first):
    assert_measured_as_predicted(packed_job(lambda: Packed(kind, {}, is_trained=True, batch_first=batch_first)))


def test_sequences_that_are_trained_before_they_are_packed_are_traced_for_a_card():
    plan = snugfit.Plan(batch_size=4, micro_batch_size=4, precision="bf16-mixed")
    report = snugfit.estimate(packed_job(lambda: Packed(nn.LSTM, {}, is_trained=True)), plan, CARD)
    assert report.at("backward end")["gradient"] > 0


def packed_job(model):
    return snugfit.Job(
        model,
        lambda model, x: model(x).square().mean(),
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: torch.randn(n, 10, 32),
    )


def assert_measured_as_predicted(job):
    plan = snugfit.Plan(batch_size=4, micro_batch_size=4)
    predicted, measured = (run(job, plan, "cpu") for run in (snugfit.estimate, snugfit.measure))
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, abs=64)
