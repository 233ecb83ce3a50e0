"""The command line in process: exit codes, messages of four parts, tables and JSON."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

import snugfit
from snugfit import Plan, cli, hardware

JOBS = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
import snugfit


def model():
    blocks = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    return nn.Sequential(blocks, nn.Linear(16, 1))


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def optimizer(model):
    return torch.optim.AdamW(model.parameters())


def batch(n):
    return {"x": torch.ones(n, 16), "y": torch.zeros(n, 1)}


def make(model=model, loss=loss, batch=batch):
    return snugfit.Job(model, loss, optimizer, batch)


def job():
    return make()


def model_raises():
    return make(model=lambda: nn.Linear(16, -1))


def no_tensors():
    return make(batch={"name": "x", "size": 3})


def unequal():
    return make(batch={"x": torch.ones(4, 16), "y": torch.zeros(3, 1)})


def vector():
    return make(loss=lambda model, batch: model(batch["x"]).flatten())


def no_tensor():
    return make(loss=lambda model, batch: 1.0)


def loss_raises():
    return make(loss=lambda model, batch: model(batch["z"]))


def picks_by_value():
    return make(loss=lambda model, batch: model(batch["x"])[model(batch["x"]) > 0].mean())


def exits():
    return make(loss=lambda model, batch: sys.exit(0))


def summed():
    return make(loss=lambda model, batch: (model(batch["x"]) - batch["y"]).square().sum())


def log_of_nothing():
    return make(loss=lambda model, batch: (model(batch["x"]) * 0).log().mean())


def nan_loss():
    return make(loss=lambda model, batch: (model(batch["x"]) * float("nan")).mean())


def large():
    return make(model=lambda: nn.Sequential(nn.Linear(16, 4_000_000), nn.Linear(4_000_000, 1)))


not_a_job = 5
"""


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.py").write_text(JOBS)
    return "jobs.py"


@pytest.fixture
def call(capsys):
    """Run the command line; gives (exit code, standard output, standard error)."""

    def run(*words):
        status = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def assert_four_parts(err):
    lines = err.splitlines()
    assert "Traceback" not in err
    assert [line for line in lines if line.startswith("  got:      ")]
    assert [line for line in lines if line.startswith("  expected: ")]
    assert [line for line in lines if line.startswith("hint: ")]
    assert len(lines) <= 24, "an error fits one screen"


BAD = {
    "an unknown device": (["estimate", "jobs.py", "--device", "rtx-3061-12gb"], "rtx-3060-12gb"),
    "a batch of 0": (["estimate", "jobs.py", "--device", "cpu", "--batch", "0"], "batch_size=0"),
    "a negative batch": (["plan", "jobs.py", "--device", "cpu", "--batch", "-4"], "batch_size=-4"),
    "a micro-batch of 0": (["estimate", "jobs.py", "--device", "cpu", "--micro-batch", "0"], "micro_batch_size=0"),
    "a world of 0": (["estimate", "jobs.py", "--device", "cpu", "--world-size", "0"], "world_size=0"),
    "a batch that is no number": (["estimate", "jobs.py", "--batch", "many"], "many"),
    "an unknown option": (["estimate", "jobs.py", "--batches", "4"], "--batches"),
    "an unknown command": (["guess", "jobs.py"], "guess"),
    "no target": (["estimate"], "target"),
    "no steps": (["train", "jobs.py"], "--steps"),
    "an unknown target": (["estimate", "bert-lage"], "bert-large"),
    "a missing file": (["estimate", "none.py"], "none.py"),
    "a file without the function": (["estimate", "jobs.py:jobb"], "jobs.py:job"),
    "a name that is no job": (["estimate", "jobs.py:not_a_job"], "int"),
    "an unknown precision": (["estimate", "jobs.py", "--device", "cpu", "--precision", "fp16"], "bf16-mixed"),
    "an unknown recompute": (["estimate", "jobs.py", "--device", "cpu", "--recompute", "half"], "every:K"),
    "a budget without unit": (["estimate", "jobs.py", "--device", "cpu", "--budget", "24G"], "24GiB"),
    "a budget whose unit is forgotten": (["plan", "jobs.py", "--device", "cpu", "--budget", "160"], "160MiB"),
    "a cap whose unit is forgotten": (["train", "jobs.py", "--steps", "1", "--memory-cap", "2"], "2GiB"),
    "a misspelt change of the job": (["plan", "jobs.py", "--device", "cpu", "--allow", "loraa"], "'lora'"),
    "a misspelt form": (["plan", "jobs.py", "--device", "cpu", "--recompute", "evry:2"], "every:2"),
    "a misspelt policy": (
        ["plan", "jobs.py", "--device", "cpu", "--recompute", "blocks@keep-matmull"],
        "'keep-matmul'",
    ),
    "a misspelt device": (["plan", "jobs.py", "--device", "rtx-3060-12g"], "rtx-3060-12gb"),
    "a misspelt norm policy": (["plan", "jobs.py", "--device", "cpu", "--norm-policy", "freeze"], "'frozen'"),
    "a misspelt sharding": (["plan", "jobs.py", "--device", "cpu", "--shard", "fsdp2"], "'fsdp'"),
    "a misspelt update": (
        ["plan", "jobs.py", "--device", "cpu", "--precision", "bf16-true", "--bf16-update", "stochastic"],
        "'stochastic-rounding'",
    ),
    "a model that raises": (["estimate", "jobs.py:model_raises", "--device", "cpu"], "RuntimeError"),
    "a batch without tensors": (["estimate", "jobs.py:no_tensors", "--device", "cpu"], "tensor"),
    "unequal first dimensions": (["estimate", "jobs.py:unequal", "--device", "cpu"], "3"),
    "a loss that is a vector": (["estimate", "jobs.py:vector", "--device", "cpu"], "32"),
    "a loss that is no tensor": (["estimate", "jobs.py:no_tensor", "--device", "cpu"], "float"),
    "a loss that raises": (["estimate", "jobs.py:loss_raises", "--device", "cpu"], "KeyError"),
    "an operation that needs values": (["estimate", "jobs.py:picks_by_value", "--device", "cpu"], "index.Tensor"),
    "measuring a card that is not here": (["measure", "jobs.py", "--device", "rtx-3060-12gb"], "estimate"),
    "a cut-off plan": (["train", "jobs.py", "--steps", "1", "--plan", "cut.json"], "cut.json"),
    "a plan with unknown keys": (["train", "jobs.py", "--steps", "1", "--plan", "keys.json"], "'extra'"),
    "a plan of another version": (["train", "jobs.py", "--steps", "1", "--plan", "version.json"], "version=99"),
    "a missing plan": (["train", "jobs.py", "--steps", "1", "--plan", "none.json"], "none.json"),
    "a plan given twice": (["train", "jobs.py", "--steps", "1", "--plan", "good.json", "--batch", "4"], "--batch"),
    "a cap on a card": (
        ["train", "jobs.py", "--steps", "1", "--memory-cap", "1GiB", "--device", "t4"],
        "--memory-cap",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message_of_four_parts_and_exit_code_2(jobs, call, tmp_path, name):
    plan = Plan(batch_size=4, micro_batch_size=2)
    plan.save("good.json")
    (tmp_path / "cut.json").write_text(plan.to_json()[:40])
    (tmp_path / "keys.json").write_text(json.dumps({**plan.to_dict(), "extra": 1}))
    (tmp_path / "version.json").write_text(json.dumps({**plan.to_dict(), "version": 99}))
    before = sorted(os.listdir(tmp_path))
    words, part = BAD[name]
    status, out, err = call(*words)
    assert status == cli.USER_ERROR, err
    assert out == ""
    assert_four_parts(err)
    assert part in err
    assert sorted(set(os.listdir(tmp_path)) - {"__pycache__"}) == before, "a failing command writes nothing"


def test_the_traceback_is_shown_when_asked_for(jobs, call):
    status, _, err = call("estimate", "jobs.py:loss_raises", "--device", "cpu", "--debug")
    assert status == cli.USER_ERROR
    assert "Traceback" in err
    assert "KeyError" in err


def test_an_error_of_the_user_s_code_names_the_user_s_line(jobs, call):
    _, _, err = call("estimate", "jobs.py:loss_raises", "--device", "cpu")
    line = next(i for i, text in enumerate(JOBS.splitlines(), start=1) if 'batch["z"]' in text)
    assert f"jobs.py:{line}" in err


def test_a_micro_batch_larger_than_the_batch_is_clamped_and_said(jobs, call):
    status, out, err = call(
        "estimate", jobs, "--device", "cpu", "--batch", 4, "--micro-batch", 64, "--budget", "1GiB", "--json"
    )
    assert status == cli.DONE
    assert "warning: " in err
    assert "clamped to 4" in err
    assert json.loads(out)["plan"]["micro_batch_size"] == 4


def test_warnings_are_as_before_after_a_command(jobs, call):
    show, filters = warnings.showwarning, list(warnings.filters)
    call("estimate", jobs, "--device", "cpu", "--batch", 4, "--micro-batch", 64)
    assert warnings.showwarning is show
    assert warnings.filters == filters


def test_estimate_says_that_a_job_fits(jobs, call):
    status, out, err = call("estimate", jobs, "--device", "rtx-3060-12gb", "--batch", 4)
    assert (status, err) == (cli.DONE, "")
    for part in ("peak allocated", "peak reserved", "context", "margin", "headroom", "parameter", "the peak is in"):
        assert part in out
    assert out.rstrip().endswith("fits (modelled)")
    assert "does not fit" not in out


def test_estimate_says_that_a_job_does_not_fit(jobs, call):
    status, out, err = call("estimate", jobs, "--device", "rtx-3060-12gb", "--budget", "100MiB")
    assert (status, err) == (cli.DOES_NOT_FIT, "")
    assert out.rstrip().endswith("does not fit (modelled)")


def test_the_json_of_estimate_is_one_document_with_whole_bytes(jobs, call, tmp_path):
    status, out, err = call(
        "estimate", jobs, "--device", "t4", "--batch", 8, "--micro-batch", 2, "--json", "-o", tmp_path / "new.json"
    )
    document = json.loads(out)
    assert (status, err) == (cli.DONE, "")
    assert document["fits"] is True
    assert document["plan"]["batch_size"] == 8
    assert document["needed_bytes"] <= document["budget_bytes"]
    assert sum(document["memory"]["by_category"].values()) == document["memory"]["peak_allocated_bytes"]
    assert json.loads((tmp_path / "new.json").read_text()) == document


def test_recompute_reaches_the_plan(jobs, call):
    _, out, _ = call("estimate", jobs, "--device", "cpu", "--recompute", "segments:2", "--json")
    assert len(json.loads(out)["plan"]["recompute"]) == 2
    _, out, _ = call("estimate", jobs, "--device", "cpu", "--recompute", "none", "--json")
    assert json.loads(out)["plan"]["recompute"] == []


def test_measure_labels_its_numbers_as_measured(jobs, call):
    status, out, _ = call("measure", jobs, "--device", "cpu", "--batch", 4, "--json")
    assert status == cli.DONE
    assert json.loads(out)["memory"]["label"] == "CPU-measured"


def test_plan_prints_a_ladder_and_reasons_and_saves_the_plan(jobs, call, tmp_path):
    status, out, err = call("plan", jobs, "--device", "rtx-3060-12gb", "--batch", 4, "-o", tmp_path / "plan.json")
    assert (status, err) == (cli.DONE, "")
    assert "full batch" in out
    assert "reason" in out
    assert Plan.load(tmp_path / "plan.json").batch_size == 4


def test_the_json_of_plan_holds_the_plan_its_ladder_and_its_reasons(jobs, call):
    status, out, _ = call("plan", jobs, "--device", "cpu", "--batch", 4, "--precision", "32-true", "--json")
    document = json.loads(out)
    assert status == cli.DONE
    assert Plan.from_dict(document["plan"]).precision == "32-true"
    assert document["ladder"][-1]["fits"]
    assert document["reasons"]["precision"] == "given"


def test_plan_says_what_is_too_large_when_nothing_fits(jobs, call, tmp_path):
    words = ("plan", "jobs.py:large", "--device", "rtx-3060-12gb", "--budget", "1GiB", "-o", tmp_path / "plan.json")
    status, out, err = call(*words)
    assert (status, out) == (cli.DOES_NOT_FIT, "")
    assert_four_parts(err)
    assert "optimizer" in err
    assert not (tmp_path / "plan.json").exists()
    status, out, err = call(*words, "--json")
    assert status == cli.DOES_NOT_FIT
    assert json.loads(out)["fits"] is False


@pytest.mark.parametrize("columns", [None, "60", "120"])
def test_gpus_lists_every_device_of_the_catalogue(call, monkeypatch, columns):
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    status, out, err = call("gpus")
    assert (status, err) == (cli.DONE, "")
    assert all(name in out for name in hardware.devices())


def test_the_json_of_gpus_holds_memory_and_sources(call):
    _, out, _ = call("gpus", "--json")
    cards = {card["name"]: card for card in json.loads(out)["devices"]}
    assert set(cards) == set(hardware.devices())
    assert all(card["memory_bytes"] > 0 and card["source"] for card in cards.values())


def test_train_leaves_a_run_folder_and_says_how_it_ended(jobs, call, tmp_path):
    status, out, _ = call("train", jobs, "--steps", 2, "--batch", 4, "--device", "cpu", "--run-dir", tmp_path / "run")
    assert status == cli.DONE
    assert "2 steps" in out
    assert Plan.load(tmp_path / "run" / "plan.json").batch_size == 4
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_train_runs_a_given_plan_and_prints_the_report_as_json(jobs, call, tmp_path):
    Plan(batch_size=4, micro_batch_size=1).save("plan.json")
    status, out, _ = call("train", jobs, "--steps", 1, "--plan", "plan.json", "--device", "cpu", "--json")
    assert status == cli.DONE
    assert json.loads(out) == json.loads((tmp_path / "runs" / "jobs" / "report.json").read_text())
    assert Plan.load(tmp_path / "runs" / "jobs" / "plan.json").micro_batch_size == 1


def test_a_cap_below_the_static_memory_says_which_tensors_exceed_it(jobs, call, monkeypatch, tmp_path):
    monkeypatch.setattr(cli.capped, "measure_baseline", lambda target, options, cap_bytes: 0)
    status, out, err = call("train", "jobs.py:large", "--steps", 1, "--memory-cap", "500MiB", "--batch", 1)
    assert (status, out) == (cli.DOES_NOT_FIT, "")
    assert_four_parts(err)
    for group in ("parameter", "gradient", "optimizer"):
        assert group in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words", [["--help"], ["estimate", "--help"], ["train", "--help"]])
def test_help_is_shown_with_exit_code_0(call, words):
    status, out, _ = call(*words)
    assert status == cli.DONE
    assert "Usage" in out


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_what_the_users_code_prints_does_not_mix_with_the_json_document(command, jobs, call, tmp_path):
    (tmp_path / jobs).write_text("print('noise of the file')\n" + JOBS)
    status, out, err = call(command, jobs, "--device", "cpu", "--json")
    assert status == 0
    assert json.loads(out)
    assert "noise of the file" in err


def test_plan_says_that_a_micro_batch_was_clamped(jobs, call):
    status, _, err = call("plan", jobs, "--device", "cpu", "--batch", "8", "--micro-batch", "100")
    assert status == 0
    assert "clamped to 8" in err


def test_training_on_a_card_that_is_not_here_is_refused_before_anything_is_written(jobs, call, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    status, _, err = call(
        "train", jobs, "--steps", "1", "--batch", "4", "--device", "rtx-3060-12gb", "--run-dir", "run"
    )
    assert status == 2
    assert "needs a device that is present" in err
    assert "CUDA" in err
    assert_four_parts(err)
    assert not (tmp_path / "run").exists()


def test_data_of_another_batch_size_than_the_plan_s_is_refused(jobs, call, tmp_path):
    data = "\n\ndef job():\n    return snugfit.Job(model, loss, optimizer, batch, data=lambda: [batch(3)] * 4)\n"
    (tmp_path / jobs).write_text(JOBS + data)
    status, _, err = call("train", jobs, "--steps", "1", "--batch", "8", "--device", "cpu")
    assert status == 2
    assert "a first batch of 3 samples" in err
    assert_four_parts(err)


def test_a_precision_that_is_nearly_right_is_suggested(jobs, call):
    for given, meant in (("bf16", "bf16-mixed"), ("fp16", "16-mixed"), ("32", "32-true")):
        _, _, err = call("estimate", jobs, "--device", "cpu", "--precision", given)
        assert err.splitlines()[-1].endswith(f"choose --precision {meant}")


def test_the_version_and_the_help_are_printed_with_exit_code_0(call):
    assert call("--version") == (0, f"snugfit {snugfit.__version__}\n", "")
    status, out, _ = call()
    assert status == 0
    assert "estimate" in out


def test_python_runs_the_package_as_the_command_line():
    ran = subprocess.run([sys.executable, "-m", "snugfit", "--version"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"snugfit {snugfit.__version__}\n")


def test_estimate_measure_and_train_take_a_plan_file(jobs, call, tmp_path):
    Plan(batch_size=8, micro_batch_size=3).save(tmp_path / "plan.json")
    for command in ("estimate", "measure"):
        status, out, _ = call(command, "jobs.py", "--plan", "plan.json", "--device", "cpu", "--json")
        assert status == 0
        assert json.loads(out)["plan"]["micro_batch_size"] == 3
        status, _, err = call(command, "jobs.py", "--plan", "plan.json", "--batch", "8", "--device", "cpu")
        assert status == 2
        assert "the plan is given twice" in err
    status, _, err = call("train", "jobs.py", "--plan", "plan.json", "--steps", "1", "-o", "report.json")
    assert status == 0
    assert "plan: batch 8 as 2 x 3 + 2, fp32" in err
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 1


def test_train_says_where_it_runs_and_for_what_its_plan_was_made(jobs, call):
    call("plan", "jobs.py", "--device", "rtx-3060-12gb", "--batch", 8, "-o", "plan.json")
    train = ("train", "jobs.py", "--device", "cpu", "--steps", 1)
    assert "device: cpu; the plan was made for rtx-3060-12gb\n" in call(*train, "--plan", "plan.json")[2]
    assert "device: cpu\n" in call(*train, "--batch", 8)[2]


def test_a_run_without_any_update_fails_and_says_how_to_find_out_why(jobs, call, tmp_path):
    status, out, err = call("train", "jobs.py:nan_loss", "--batch", "4", "--steps", "3", "--device", "cpu")
    assert status == 1
    assert "3 steps (3 skipped)" in out
    assert "no window of the run made an update" in err
    assert "snugfit diagnose jobs.py:nan_loss" in err
    assert_four_parts(err)


@pytest.mark.parametrize("command", ["estimate", "check", "diagnose", "train"])
def test_a_job_that_ends_the_process_is_an_error_and_not_a_success(command, jobs, call):
    words = ["--steps", "1"] if command == "train" else []
    status, out, err = call(command, "jobs.py:exits", "--batch", "4", "--device", "cpu", *words)
    assert (status, out) == (2, "")
    assert "the job raised SystemExit" in err
    assert_four_parts(err)


@pytest.mark.parametrize("command", ["check", "diagnose"])
def test_a_micro_batch_of_nothing_is_refused(command, jobs, call):
    status, _, err = call(command, "jobs.py", "--micro-batch", "0", "--device", "cpu")
    assert status == 2
    assert "micro_batch_size=0" in err


def test_a_path_that_cannot_be_written_is_named(jobs, call, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = call("estimate", "jobs.py", "--device", "cpu", "-o", "file/report.json")
    assert status == 2
    assert "the output cannot be written" in err
    assert_four_parts(err)


def test_an_output_that_is_a_folder_is_refused_before_the_search(jobs, call, monkeypatch):
    monkeypatch.setattr(cli.SearchRequest, "search", lambda *_: pytest.fail("searched in vain"))
    status, _, err = call("plan", "jobs.py", "--device", "rtx-3060-12gb", "-o", ".")
    assert status == 2
    assert "the output is a folder" in err
    assert_four_parts(err)


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_an_answer_that_cannot_be_saved_is_printed_all_the_same(command, jobs, call, monkeypatch):
    def no_room(*_):
        raise OSError(28, "No space left on device", "plan.json")

    monkeypatch.setattr(cli.Plan, "save", no_room)
    monkeypatch.setattr(cli, "write_atomically", no_room)
    status, out, err = call(command, "jobs.py", "--device", "rtx-3060-12gb", "--batch", 4, "--json", "-o", "plan.json")
    assert status == 2
    assert json.loads(out)
    assert "No space left on device" in err


def test_check_proves_a_job_and_says_what_it_compared(jobs, call, tmp_path):
    status, out, _ = call("check", "jobs.py", "--device", "cpu", "--recompute", "every:1", "-o", "check.json")
    assert status == 0
    assert "batch 8 as 2 x 3 + 2, fp32, recompute 2 segments" in out
    assert out.rstrip().endswith("passed")
    document = json.loads((tmp_path / "check.json").read_text())
    assert document["ok"]
    assert document["plan"]["micro_batch_size"] == 3


def test_check_fails_where_there_is_a_hazard(jobs, call):
    status, out, _ = call("check", "jobs.py:summed", "--device", "cpu", "--json")
    assert status == 1
    assert [hazard["kind"] for hazard in json.loads(out)["hazards"]] == ["sum-returned-as-mean"]


def test_diagnose_finds_the_operation_and_says_when_all_is_finite(jobs, call):
    status, out, _ = call("diagnose", "jobs.py", "--device", "cpu")
    assert status == 0
    assert "every value is finite" in out
    status, out, _ = call("diagnose", "jobs.py:log_of_nothing", "--device", "cpu", "--json")
    assert status == 1
    found = json.loads(out)
    assert (found["op"], found["phase"], found["micro_batch"]) == ("log", "forward", 0)


def test_the_policy_of_norms_and_the_update_of_bf16_weights_are_options(jobs, call):
    words = ("--device", "cpu", "--batch", "4", "--json")
    status, out, _ = call("estimate", "jobs.py", "--precision", "bf16-true", "--bf16-update", "nearest", *words)
    assert (status, json.loads(out)["plan"]["bf16_update"]) == (0, "nearest")
    status, _, err = call("check", "jobs.py", "--norm-policy", "Frozen", *words)
    assert status == 2
    assert "hint: choose --norm-policy frozen" in err


def test_a_saved_window_is_diagnosed_under_its_own_plan(jobs, call):
    status, _, err = call("train", "jobs.py:nan_loss", "--batch", "8", "--micro-batch", "5", "--steps", "60")
    assert status == 1
    assert "nonfinite.pt" in err
    status, out, _ = call("diagnose", "jobs.py:nan_loss", "--window", "runs/jobs/nonfinite.pt", "--json")
    assert status == 1
    assert json.loads(out)["plan"]["micro_batch_size"] == 5


STEPS = """
import torch
import snugfit
from torch import nn


def make_step(seq=8, width=64):
    model = nn.Sequential(nn.Embedding(100, width), nn.Linear(width, 100))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(4, seq, dtype=torch.long)

    def step():
        logits = model(ids)
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_step_that_raises():
    raise ValueError("no such file")


def builds():
    return make_step()


def returns_none():
    pass


make_step_5 = 5
"""
ESTIMATED = {"plan", "budget_bytes", "needed_bytes", "fits", "memory", "what_if", "measured", "comparison"}


@pytest.fixture
def steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPS)
    return "steps.py"


@pytest.mark.parametrize("target", ["steps.py", "steps.py:make_step"])
def test_a_step_of_one_s_own_is_estimated_as_trace_does(target, steps, call):
    status, out, err = call("estimate", target, "--device", "t4", "--seq", 512, "--json")
    assert (status, err) == (cli.DONE, "")
    document = json.loads(out)
    assert set(document) == ESTIMATED
    assert document["plan"] is None
    scope = {}
    exec(STEPS, scope)
    assert document["memory"] == snugfit.trace(lambda: scope["make_step"](seq=512), "t4").to_dict()


def test_a_step_s_table_says_which_step(steps, call):
    status, out, _ = call("estimate", steps, "--device", "t4")
    assert status == cli.DONE
    assert out.startswith("step:   steps.py\ndevice: t4, modelled\n")
    assert out.rstrip().endswith("fits (modelled)")


STEPS_REFUSED = {
    "a micro-batch": (["estimate", "steps.py", "--micro-batch", "2"], "--micro-batch"),
    "a plan": (["estimate", "steps.py:make_step", "--plan", "plan.json", "--world-size", "2"], "--plan, --world-size"),
    "a comparison": (["estimate", "steps.py", "--device", "cpu", "--compare"], "--compare"),
    "another command": (["plan", "steps.py:make_step"], "snugfit estimate steps.py:make_step"),
    "what raises": (["estimate", "steps.py:make_step_that_raises", "--device", "t4"], "ValueError"),
    "a number": (["estimate", "steps.py:make_step_5", "--device", "t4"], "int"),
    "a name that is missing": (["estimate", "steps.py:make_stop", "--device", "t4"], "steps.py:make_step"),
    "a size that it does not take": (["estimate", "steps.py", "--device", "t4", "--image", "64"], "image"),
    "another name": (["estimate", "steps.py:builds", "--device", "t4"], "name it make_step"),
    "a function that is no step either": (["estimate", "steps.py:returns_none"], "so it was not called"),
    "what-if": (["estimate", "steps.py", "--what-if"], "--what-if belongs to a job"),
    "two options": (["estimate", "steps.py", "--what-if", "--batch", "4"], "--batch, --what-if belong to a job"),
}


@pytest.mark.parametrize("name", STEPS_REFUSED)
def test_what_a_step_cannot_do_is_one_message_of_four_parts(name, steps, call):
    words, part = STEPS_REFUSED[name]
    status, out, err = call(*words)
    assert (status, out) == (cli.USER_ERROR, "")
    assert_four_parts(err)
    assert part in err


def test_compare_measures_here_and_shows_the_difference_by_category(jobs, call):
    words = ("estimate", jobs, "--device", "cpu", "--batch", 4, "--compare")
    status, out, err = call(*words, "--no-what-if")
    assert (status, err) == (cli.DONE, "")
    assert "estimated against CPU-measured" in out
    status, out, _ = call(*words, "--json")
    document = json.loads(out)
    assert set(document) == ESTIMATED
    assert document["measured"]["label"] == "CPU-measured"
    compared = document["comparison"]
    assert set(compared) == {"peak_allocated", "peak_reserved", "by_category", "phases"}
    parts = compared["by_category"].values()
    assert sum(part["difference_bytes"] for part in parts) == compared["peak_allocated"]["difference_bytes"]


def test_a_card_that_is_not_here_cannot_be_compared_with(jobs, call):
    status, out, err = call("estimate", jobs, "--device", "t4", "--compare")
    assert (status, out) == (cli.USER_ERROR, "")
    assert_four_parts(err)
    assert "--compare --device cpu" in err


def test_what_if_lines_are_printed_and_in_the_document_when_asked_for(jobs, call):
    words = ("estimate", "jobs.py:large", "--device", "rtx-3060-12gb", "--batch", 64)
    status, out, _ = call(*words, "--what-if")
    assert status == cli.DONE
    assert "what if" in out
    assert "micro-batch 32" in out
    _, out, _ = call(*words, "--json", "--what-if")
    (first, *_) = json.loads(out)["what_if"]
    assert set(first) == {
        "change",
        "freed_bytes",
        "needed_bytes",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "plan",
    }
    _, out, _ = call(*words, "--json")
    assert json.loads(out)["what_if"] is None
    _, out, _ = call(*words, "--no-what-if")
    assert "what if" not in out
    assert "--what-if" not in out


def test_nothing_is_traced_again_unasked_where_it_would_take_long(jobs, call, monkeypatch):
    monkeypatch.setattr(cli.estimates, "_PATIENCE_S", 0.0)
    _, out, _ = call("estimate", jobs, "--device", "t4")
    assert "--what-if" in out
    assert "frees" not in out


def test_an_estimate_shows_holders_phases_both_windows_and_the_margin_in_80_columns(jobs, call, monkeypatch):
    monkeypatch.setattr(cli.tables, "_WIDTH_OF_FILES", 80)
    _, out, _ = call("estimate", jobs, "--device", "rtx-3060-12gb", "--batch", 4, "--what-if")
    for part in ("largest", "made by", "forward end", "first step", "steady state", "5% of reserved", "live: tensors"):
        assert part in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80


def test_the_settings_of_the_allocator_reach_the_estimate(jobs, call, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    _, out, _ = call("estimate", jobs, "--device", "t4", "--no-what-if")
    assert "expandable segments are on" in out
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    status, out, err = call("estimate", jobs, "--device", "t4")
    assert (status, out) == (cli.USER_ERROR, "")
    assert "max_split_size_mb" in err
    assert_four_parts(err)


def test_a_batch_size_that_nobody_said_is_called_a_default(jobs, call):
    _, out, _ = call("plan", jobs, "--device", "cpu", "--json")
    assert "a default: --batch" in json.loads(out)["reasons"]["batch_size"]
    _, out, _ = call("plan", jobs, "--device", "cpu", "--batch", 8, "--json")
    assert "default" not in json.loads(out)["reasons"]["batch_size"]


def test_where_nothing_fits_no_plan_is_written_and_the_document_has_the_ways(jobs, call, tmp_path):
    words = ("--device", "rtx-3060-12gb", "--budget", "601MiB", "--batch", 8)
    status, out, err = call("plan", jobs, *words, "-o", "none.json", "--json")
    assert status == 1
    assert "no plan was written to none.json" in err
    assert not (tmp_path / "none.json").exists()
    ways = json.loads(out)["ways"]
    assert {way["name"] for way in ways} == {"8bit-optimizer", "host-offload", "fused-backward", "lora", "fsdp"}


def test_a_plan_is_named_in_the_script_as_it_was_saved_and_columns_are_respected(jobs, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = call("plan", jobs, "--device", "cpu", "--batch", 8, "-o", "mine.json")
    assert status == 0
    assert 'snugfit.Plan.load("mine.json")' in out
    assert max(map(len, out.splitlines())) <= 80
    assert out == "".join(f"{line.rstrip()}\n" for line in out.splitlines())


def test_a_model_that_is_built_on_a_card_is_planned_without_one(jobs, call, tmp_path):
    text = (
        "import torch\nimport snugfit\n"
        "def job():\n"
        "    return snugfit.Job(lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).{},\n"
        "        lambda m, b: m(b).mean(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1),"
        " lambda n: torch.zeros(n, 8))\n"
    )
    for number, move in enumerate(('to("cuda")', "cuda()", 'to("cuda:0", torch.float32)')):
        (tmp_path / f"built{number}.py").write_text(text.format(move))
        status, out, err = call("plan", f"built{number}.py", "--device", "rtx-3060-12gb", "--batch", 8)
        assert status == 0, err
        assert "fits (modelled)" in out
    status, _, err = call("plan", "built0.py", "--device", "cpu", "--batch", 8)
    assert status == 2
    assert "a job leaves it out" in err


# where the answer goes


def _printing(*arguments, stdout):
    """The exit status and standard error of the command in a process of its own."""
    command = [sys.executable, "-m", "snugfit.cli", *arguments]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [("gpus",), ("gpus", "--json")])
def test_a_reader_that_has_seen_enough_ends_the_command_without_a_word(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert _printing(*arguments, stdout=writing) == (141, "")
    finally:
        os.close(writing)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [("gpus",), ("--version",)])
def test_an_answer_that_finds_no_room_is_one_named_error(arguments):
    with open("/dev/full", "w") as full:
        status, said = _printing(*arguments, stdout=full)
    assert (status, said.splitlines()[0]) == (2, "the answer cannot be written")
    assert "No space left on device" in said
    assert "Traceback" not in said


def test_a_closed_standard_output_is_refused_before_any_work(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["estimate", "no_such_file.py", "--device", "cpu", "--micro-batch", "1"]) == 2
    assert capsys.readouterr().err.startswith("standard output is closed")
