"""A run leaves the window that failed in a file, from which it is diagnosed again."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import snugfit
from diagnosed_jobs import Maps, Noisy, job_of, mean_output, plan_of, random_bits
from models import same_bits
from snugfit import NonFiniteError, PlanError
from snugfit.training import random_states
from snugfit.training.diagnosing import saved_window
from snugfit.training.diagnosing.diagnose import diagnose

CPU = torch.device("cpu")


def trained_until_it_fails(model, folder, batch=None, loss=mean_output, **options):
    job = job_of(model, loss, batch, nonfinite="raise", **options)
    with pytest.raises(NonFiniteError) as caught:
        snugfit.train(job, plan_of(precision=options.get("precision", "32-true")), steps=5, run_dir=folder)
    return job, caught.value


def test_a_run_leaves_the_window_that_failed_and_it_is_diagnosed_again(tmp_path):
    batches = [torch.randn(4, 4) for _ in range(3)]
    batches[2][3, 1] = math.nan
    job, error = trained_until_it_fails(nn.Linear(4, 4), tmp_path, data=lambda: iter(batches))
    assert "nonfinite.pt" in str(error)
    assert error.diagnosis.micro_batch == 1
    found = diagnose(job, plan_of(), "cpu", window=tmp_path / "nonfinite.pt")
    assert (found.cause, found.micro_batch, found.step) == (error.diagnosis.cause, 1, 2)
    saved = saved_window.load(tmp_path / "nonfinite.pt")
    assert torch.equal(saved.micro_batches[0], batches[2][:2])
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.filterwarnings("ignore:BatchNorm makes")
def test_a_saved_window_begins_with_the_very_weights_buffers_and_random_states(tmp_path):
    class FailsLate(Noisy):
        def forward(self, x):
            y = super().forward(x)
            return y / 0 if x[0, 0] > 100 and bool((y[0] == 0).any()) else y

    batch = torch.randn(4, 4)
    batch[2] = 1000.0
    data = [torch.randn(4, 4), torch.randn(4, 4), batch]
    job, error = trained_until_it_fails(FailsLate(), tmp_path, data=lambda: iter(data * 4))
    found = diagnose(job, plan_of(), "cpu", window=tmp_path / "nonfinite.pt")
    assert (found.module, found.op, found.micro_batch) == ("", "div", 1)
    assert found.to_dict() == error.diagnosis.to_dict()


def test_a_saved_window_is_looked_at_under_another_precision_too(tmp_path):
    model = Maps()
    job = job_of(model, nonfinite="raise")
    with pytest.raises(NonFiniteError):
        snugfit.train(job, plan_of(precision="16-mixed"), steps=1, run_dir=tmp_path)
    path = tmp_path / "nonfinite.pt"
    assert diagnose(job, plan_of(precision="16-mixed"), "cpu", window=path).module == "b"
    assert diagnose(job, plan_of(precision="bf16-mixed"), "cpu", window=path).cause == "none"


def test_a_saved_window_has_the_scale_that_it_failed_at_and_no_more_data_than_its_own(tmp_path):
    large = torch.full((10**6, 4), 10.0)
    job = job_of(nn.Linear(4, 4), data=lambda: iter([large[:4] * math.nan, large[:4], large[4:8]]))
    job = dataclasses.replace(job, loss=lambda model, x: torch.log(model(x) * 0).mean(), max_skipped_windows=3)
    plan, path = plan_of(precision="16-mixed"), tmp_path / "nonfinite.pt"
    with pytest.raises(NonFiniteError):
        snugfit.train(job, plan, steps=3, run_dir=tmp_path)
    assert path.stat().st_size < 100_000
    assert diagnose(job, plan, "cpu", window=path).loss_scale == 16384.0


def test_a_saved_window_begins_with_its_buffers(tmp_path):
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def forward(self, x):
            self.seen += 1
            return super().forward(x) / (self.seen - 6)

    job, error = trained_until_it_fails(Counting(), tmp_path)
    found = diagnose(job, plan_of(), "cpu", window=tmp_path / "nonfinite.pt")
    assert (found.op, found.micro_batch, found.step) == ("div", 1, 2)
    assert found.to_dict() == error.diagnosis.to_dict()


def test_a_window_that_a_file_may_not_hold_is_said_and_not_written(tmp_path):
    class Own(dict):
        pass

    batch = Own(x=torch.full((4, 4), math.nan))
    _, error = trained_until_it_fails(
        nn.Linear(4, 4), tmp_path, batch, loss=lambda model, micro_batch: model(micro_batch["x"]).mean()
    )
    assert "the window could not be saved" in str(error)
    assert "Own at micro-batch 0" in str(error)
    assert error.diagnosis is not None
    assert not (tmp_path / "nonfinite.pt").exists()


def test_a_run_that_retries_no_memory_error_is_diagnosed_too(tmp_path):
    job = job_of(nn.Linear(4, 4), batch=torch.full((4, 4), math.nan), nonfinite="raise")
    with pytest.raises(NonFiniteError) as caught:
        snugfit.train(job, plan_of(), steps=1, run_dir=tmp_path, recover=False)
    assert caught.value.diagnosis.cause.startswith("the input of micro-batch 0")
    assert (tmp_path / "nonfinite.pt").exists()


def test_a_window_of_an_earlier_run_does_not_stay(tmp_path):
    (tmp_path / "nonfinite.pt").write_bytes(b"old")
    snugfit.train(job_of(nn.Linear(4, 4)), plan_of(), steps=1, run_dir=tmp_path)
    assert not (tmp_path / "nonfinite.pt").exists()


@pytest.mark.parametrize("what", ["missing", "text", "other", "version", "lengths", "kind", "model", "pickle"])
def test_a_file_that_is_no_window_of_this_job_is_refused_in_four_parts(tmp_path, what):
    job, _ = trained_until_it_fails(nn.Linear(4, 4), tmp_path, torch.full((4, 4), math.nan))
    path = tmp_path / "nonfinite.pt"
    content = torch.load(path, weights_only=True)
    if what == "missing":
        path.unlink()
    elif what == "text":
        path.write_text("no window")
    elif what == "other":
        torch.save({"x": torch.ones(1)}, path)
    elif what == "version":
        torch.save({**content, "version": 99}, path)
    elif what == "lengths":
        torch.save({**content, "counts": [1.0]}, path)
    elif what == "kind":
        torch.save({**content, "buffers": None}, path)
    elif what == "pickle":
        torch.save({**content, "step": Maps()}, path)
    else:
        job = job_of(nn.Linear(4, 5))
    with pytest.raises(PlanError) as caught:
        diagnose(job, plan_of(), "cpu", window=path)
    for part in ("  got:      ", "  expected: ", "hint: "):
        assert part in str(caught.value)


def test_a_file_that_is_refused_changes_no_random_state(tmp_path):
    job, bits = job_of(nn.Linear(4, 4)), random_bits()
    with pytest.raises(PlanError):
        diagnose(job, plan_of(), "cpu", window=tmp_path / "none.pt")
    assert same_bits(bits, random_bits())
    assert random_states.take(CPU).keys() == {"torch", "python", "numpy"}


def changed(name, value):
    return lambda content: {**content, name: value(content[name]) if callable(value) else value}


def state_changed(name, value):
    return lambda content: {**content, "random": {**content["random"], name: value(content["random"][name])}}


def without(name):
    return lambda parts: {key: part for key, part in parts.items() if key != name}


DAMAGES = {
    "no micro-batch": changed("micro_batches", []),
    "micro-batches of another kind": changed("micro_batches", {}),
    "a parameter as micro-batch": changed("micro_batches", lambda parts: [nn.Parameter(part) for part in parts]),
    "a set in a micro-batch": changed("micro_batches", lambda parts: [[{1, 2}], *parts[1:]]),
    "a tuple as key": changed("micro_batches", lambda parts: [{(1, 2): 3}, *parts[1:]]),
    "micro-batches of another job": changed("micro_batches", [{"x": torch.ones(2, 4)}] * 2),
    "micro-batches without a tensor": changed("micro_batches", [3, 4]),
    "micro-batches of another width": changed("micro_batches", [torch.ones(2, 5)] * 2),
    "counts that are words": changed("counts", ["a", "b"]),
    "counts below 0": changed("counts", [-1.0, 2.0]),
    "counts that are nan": changed("counts", [math.nan, 2.0]),
    "counts that are inf": changed("counts", [math.inf, 2.0]),
    "counts that are truths": changed("counts", [True, True]),
    "counts as a tuple": changed("counts", (1.0, 2.0)),
    "a step below 0": changed("step", -1),
    "a step that is true": changed("step", True),
    "a step that is a tensor": changed("step", torch.tensor(1)),
    "a loss scale of 0": changed("loss_scale", 0.0),
    "a loss scale that is nan": changed("loss_scale", math.nan),
    "a loss scale that is a word": changed("loss_scale", "2"),
    "no precision": changed("precision", "64-true"),
    "a precision that is None": changed("precision", None),
    "a reference that is a list": changed("reference", [1.0]),
    "a reference of words": changed("reference", ("a",)),
    "a reference that is nan": changed("reference", (math.nan,)),
    "a reference that is a vector": changed("reference", (torch.ones(2),)),
    "a reference that is nan on a tensor": changed("reference", (torch.tensor(math.nan),)),
    "random states of another kind": changed("random", []),
    "no state of torch": changed("random", without("torch")),
    "no state of python": changed("random", without("python")),
    "no state of numpy": changed("random", without("numpy")),
    "a short state of torch": state_changed("torch", lambda state: state[:-1]),
    "a state of torch of another type": state_changed("torch", lambda state: state.float()),
    "a state of torch that is a list": state_changed("torch", lambda state: state.tolist()),
    "a short state of python": state_changed("python", lambda state: (state[0], state[1][:-1], state[2])),
    "a state of python below 0": state_changed("python", lambda state: (3, (-1, *state[1][1:]), state[2])),
    "a state of python with a word": state_changed("python", lambda state: (3, state[1], "x")),
    "a state of python of two": state_changed("python", lambda state: state[:2]),
    "a state of numpy that is none": state_changed("numpy", lambda state: None),
    "a state of numpy of another kind": state_changed("numpy", lambda state: ("PCG64", *state[1:])),
    "a short state of numpy": state_changed("numpy", lambda state: (state[0], state[1][:-1], *state[2:])),
    "a state of numpy below 0": state_changed("numpy", lambda state: (state[0], state[1] - 2**33, *state[2:])),
    "a state of numpy of floats": state_changed("numpy", lambda state: (state[0], state[1].float(), *state[2:])),
    "a state of numpy out of place": state_changed("numpy", lambda state: (state[0], state[1], 9999, *state[3:])),
    "a state of cuda that is a word": changed("random", lambda states: {**states, "cuda": "x"}),
    "parameters that are lists": changed("parameters", lambda named: {name: [1.0] for name in named}),
    "parameters without a name": changed("parameters", lambda named: dict(enumerate(named.values()))),
    "parameters of another shape": changed("parameters", lambda named: {n: p[:1] for n, p in named.items()}),
    "parameters of whole numbers": changed("parameters", lambda named: {n: p.long() for n, p in named.items()}),
    "complex parameters": changed("parameters", lambda named: {n: p.cfloat() for n, p in named.items()}),
    "a parameter too many": changed("parameters", lambda named: {**named, "more": torch.ones(1)}),
    "buffers that are a list": changed("buffers", []),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_window_with_bad_contents_is_refused_in_four_parts_before_anything_changes(tmp_path, name):
    job, _ = trained_until_it_fails(nn.Linear(4, 4), tmp_path, torch.full((4, 4), math.nan))
    path = tmp_path / "nonfinite.pt"
    content = torch.load(path, weights_only=True)
    torch.save(DAMAGES[name](content), path)
    bits = random_bits()
    with pytest.raises(PlanError) as caught:
        diagnose(job, plan_of(), "cpu", window=path)
    for part in ("  got:      ", "  expected: ", "hint: "):
        assert part in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert same_bits(bits, random_bits())


@pytest.mark.parametrize("at", [0.0, 0.1, 0.3, 0.6, 0.95])
def test_a_file_that_was_cut_is_refused_without_advice_to_run_it_as_code(tmp_path, at):
    job, _ = trained_until_it_fails(nn.Linear(4, 4), tmp_path, torch.full((4, 4), math.nan))
    path = tmp_path / "nonfinite.pt"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * at)])
    with pytest.raises(PlanError, match="cannot be read") as caught:
        diagnose(job, plan_of(), "cpu", window=path)
    assert "weights_only" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_pickle_with_more_than_tensors_passes_no_advice_on(tmp_path):
    path = tmp_path / "nonfinite.pt"
    torch.save({"format": "snugfit window", "step": Maps()}, path)
    with pytest.raises(PlanError) as caught:
        saved_window.load(path)
    assert "holds more than tensors" in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("given", [3, b"nonfinite.pt", ["nonfinite.pt"]])
def test_what_is_no_path_is_no_window(given):
    with pytest.raises(PlanError, match="window is not a path") as caught:
        diagnose(job_of(Maps, mean_output), plan_of(), "cpu", window=given)
    assert "steps=" in caught.value.hint


def test_a_folder_is_no_window(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        saved_window.load(tmp_path)


def test_the_hint_of_a_run_names_the_file_that_it_left(tmp_path):
    _, error = trained_until_it_fails(nn.Linear(4, 4), tmp_path, torch.full((4, 4), math.nan))
    assert f"--window {tmp_path / 'nonfinite.pt'}" in error.hint
    assert str(error).endswith(error.hint)


def test_the_hint_of_a_run_names_no_file_that_it_could_not_write(tmp_path):
    class Own(dict):
        pass

    batch = Own(x=torch.full((4, 4), math.nan))
    _, error = trained_until_it_fails(nn.Linear(4, 4), tmp_path, batch, loss=lambda model, b: model(b["x"]).mean())
    assert "--window" not in error.hint
