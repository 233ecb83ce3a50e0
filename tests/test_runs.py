"""Training into a run folder, and under a hard memory cap in a child process."""

import json
import sys

import pytest
import torch
from torch import nn

from snugfit import capped, run_progress, runs, sizes
from snugfit.errors import BatchError, InfeasibleError, PlanError, UnsupportedError
from snugfit.jobs import Job, Loss
from snugfit.memory.measuring import measure
from snugfit.memory.reports import MemoryReport, PeakAt, margin_bytes
from snugfit.plans import Plan
from snugfit.training.counting import tokens

MIB = sizes.MIB
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a memory cap needs Linux")


def batch(num_samples):
    return {"x": torch.rand(num_samples, 8), "target": torch.rand(num_samples, 1)}


def loss(model, micro_batch):
    return nn.functional.mse_loss(model(micro_batch["x"]), micro_batch["target"])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def job(**options):
    return Job(lambda: nn.Linear(8, 1), loss, sgd, batch, **options)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


PLAN = Plan(batch_size=8, micro_batch_size=3)


def test_a_run_leaves_its_plan_one_line_per_step_and_a_report(tmp_path):
    outcome = runs.train(job(seed=3), PLAN, steps=3, run_dir=tmp_path, device="cpu", predicted={"label": "modelled"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "plan.json", "report.json"]
    assert Plan.load(tmp_path / "plan.json") == PLAN
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert set(steps[0]) == {
        "step",
        "loss",
        "lr",
        "grad_norm",
        "samples_per_s",
        "peak_memory_bytes",
        "skipped",
        "reason",
        "metrics",
    }
    assert all(line["lr"] == [0.1] and line["samples_per_s"] > 0 and not line["skipped"] for line in steps)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["first_loss"], report["last_loss"]) == (steps[0]["loss"], steps[-1]["loss"])
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (report["steps"], report["skipped"], report["seed"], report["device"]) == (3, 0, 3, "cpu")
    assert report["predicted"] == {"label": "modelled"}
    assert report["versions"]["torch"] == torch.__version__
    assert report["seconds"] == outcome.seconds > 0
    assert report["peak_memory_bytes"] == outcome.peak_memory_bytes


def test_a_run_without_data_says_that_it_trained_on_the_example_batch(tmp_path):
    outcome = runs.train(job(), PLAN, steps=1, run_dir=tmp_path, device="cpu")
    assert any("example batch" in note for note in outcome.notes)


def test_data_is_gone_through_again_until_all_steps_are_done(tmp_path):
    passes = []

    def data():
        passes.append(len(passes))
        yield from (batch(8), batch(8))

    outcome = runs.train(job(data=data), PLAN, steps=5, run_dir=tmp_path, device="cpu")
    assert (len(passes), len(lines(tmp_path)), outcome.notes) == (3, 5, ())


def test_data_without_a_batch_is_an_error(tmp_path):
    with pytest.raises(BatchError, match="no batch"):
        runs.train(job(data=list), PLAN, steps=1, run_dir=tmp_path, device="cpu")
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize("data", [lambda: None, lambda: 3])
def test_data_that_cannot_be_gone_through_is_an_error(tmp_path, data):
    with pytest.raises(BatchError, match="cannot be gone through"):
        runs.train(job(data=data), PLAN, steps=1, run_dir=tmp_path, device="cpu")


def test_c009_the_report_repeats_what_losses_are_means_over(tmp_path):
    def weight(micro_batch):
        return float(micro_batch["target"].numel())

    def reported(model, micro_batch):
        return Loss(loss(model, micro_batch) * 2.0, 2.0)

    counted = {
        "samples": {},
        'snugfit.tokens(ignore_index=-1, key="target")': {"count": tokens(-1, key="target")},
        weight.__qualname__: {"count": weight},
    }
    for wanted, settings in counted.items():
        assert runs.train(job(**settings), PLAN, steps=1, run_dir=tmp_path, device="cpu").counted == wanted
        assert json.loads((tmp_path / "report.json").read_text())["counted"] == wanted
    own = Job(lambda: nn.Linear(8, 1), reported, sgd, batch)
    outcome = runs.train(own, PLAN, steps=1, run_dir=tmp_path, device="cpu")
    assert outcome.counted == "1 counts that losses report themselves, else samples"


def test_the_same_seed_gives_the_same_run_and_the_callers_random_state_is_kept(tmp_path):
    losses = []
    for name in ("first", "second"):
        torch.manual_seed(len(losses))
        expected = torch.rand(1, generator=torch.Generator().manual_seed(len(losses)))
        outcome = runs.train(job(seed=5), PLAN, steps=2, run_dir=tmp_path / name, device="cpu")
        assert torch.equal(torch.rand(1), expected)
        losses.append(outcome.last_loss)
    assert losses[0] == losses[1]


def test_a_step_whose_loss_is_not_finite_is_written_as_null(tmp_path):
    def data():
        yield {"x": torch.full((8, 8), torch.inf), "target": torch.rand(8, 1)}
        yield batch(8)

    outcome = runs.train(job(data=data), PLAN, steps=2, run_dir=tmp_path, device="cpu")
    first = lines(tmp_path)[0]
    assert (first["loss"], first["skipped"], first["reason"]) == (None, True, "non-finite gradient")
    assert (outcome.first_loss, outcome.skipped) == (None, 1)
    assert outcome.last_loss is not None, "the skipped step moved no weight"


def test_a_new_run_in_an_old_folder_leaves_nothing_of_the_old_one(tmp_path):
    for steps in (3, 1):
        runs.train(job(), PLAN, steps=steps, run_dir=tmp_path, device="cpu")
    assert len(lines(tmp_path)) == 1


def test_resuming_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedError, match="cannot resume"):
        runs.train(job(), PLAN, steps=1, run_dir=tmp_path, resume=True)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
def test_a_run_needs_at_least_one_step(tmp_path, steps):
    with pytest.raises(PlanError, match="steps"):
        runs.train(job(), PLAN, steps=steps, run_dir=tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (None, 3, tmp_path / "file"):
        with pytest.raises(PlanError, match="folder of the run"):
            runs.train(job(), PLAN, steps=1, run_dir=folder, device="cpu")


@linux
def test_the_peak_of_a_run_is_seen_although_it_lies_inside_of_a_step(tmp_path):
    size = 64 * MIB

    def large_loss(model, micro_batch):
        torch.ones(size // 4).sum()
        return loss(model, micro_batch)

    outcome = runs.train(
        Job(lambda: nn.Linear(8, 1), large_loss, sgd, batch), PLAN, steps=1, run_dir=tmp_path, device="cpu"
    )
    assert 0.95 * size < outcome.peak_memory_bytes < 1.2 * size
    assert "VmHWM" in outcome.peak_memory_source


JOB_FILE = """
import torch
from torch import nn
import snugfit

WIDTH = 512

def model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(8)])

def loss(model, micro_batch):
    return model(micro_batch["x"]).square().mean()

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

def batch(num_samples):
    return {"x": torch.rand(num_samples, WIDTH)}

def job():
    return snugfit.Job(model, loss, optimizer, batch)
"""
NUM_SAMPLES = 4096
NAIVE = Plan(batch_size=NUM_SAMPLES, micro_batch_size=NUM_SAMPLES)
CUT = Plan(batch_size=NUM_SAMPLES, micro_batch_size=256)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "mlp.py"
    path.write_text(JOB_FILE)
    return str(path)


@pytest.fixture(scope="module")
def baseline(target):
    return capped.measure_baseline(target)


def run(target, plan, cap_bytes, folder, **options):
    plan.save(folder / "given.json")
    return capped.run_capped(
        target, folder / "given.json", cap_bytes=cap_bytes, steps=2, run_dir=folder / "run", **options
    )


@linux
@pytest.mark.slow
def test_under_a_cap_the_naive_plan_dies_of_a_real_out_of_memory_error_and_the_cut_one_trains(
    target, baseline, tmp_path, capfd
):
    peaks = {plan: measure(capped.load_target(target), plan, "cpu").peak_allocated_bytes for plan in (NAIVE, CUT)}
    allowed = (peaks[NAIVE] + peaks[CUT]) // 2
    cap = baseline + capped.RESERVE_BYTES + allowed
    assert capped.budget_under_cap(cap, baseline) == allowed + margin_bytes(allowed, "cpu")
    (tmp_path / "naive").mkdir()
    assert run(target, NAIVE, cap, tmp_path / "naive", recover=False) == capped.EXIT_OUT_OF_MEMORY
    message = capfd.readouterr().err
    assert "out of memory" in message
    assert all(part in message for part in ("  got:", "  expected:", "hint:"))
    assert "Traceback" not in message
    assert not (tmp_path / "naive" / "run" / "report.json").exists()
    assert run(target, CUT, cap, tmp_path) == capped.EXIT_DONE
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["steps"], len(lines(tmp_path / "run"))) == (2, 2)
    assert peaks[CUT] * 0.9 < report["peak_memory_bytes"] < allowed


@linux
@pytest.mark.slow
def test_the_baseline_is_the_same_at_every_start(target, baseline):
    assert abs(capped.measure_baseline(target) - baseline) < capped.RESERVE_BYTES / 4


@linux
def test_a_target_that_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(PlanError, match="could not load the job") as caught:
        capped.measure_baseline(str(tmp_path / "missing.py"))
    assert "missing.py" in caught.value.got


@linux
def test_a_job_that_exists_in_memory_only_is_refused_by_name(tmp_path):
    with pytest.raises(PlanError, match="in memory only") as caught:
        capped.run_capped(job(), "plan.json", cap_bytes=1, steps=1, run_dir=tmp_path)
    assert "file.py:name" in str(caught.value)


def test_a_cap_below_the_baseline_is_refused_with_the_number_that_decides():
    with pytest.raises(InfeasibleError) as caught:
        capped.budget_under_cap(300 * MIB, 290 * MIB)
    assert "290.00 MiB" in str(caught.value)
    assert "306.00 MiB" in caught.value.hint


def test_under_a_cap_the_larger_of_reserve_and_margin_stays_free_not_both():
    def fits(tensors, budget):
        return tensors + margin_bytes(tensors, "cpu") <= budget

    small = capped.budget_under_cap(400 * MIB, 290 * MIB)  # 110 MiB above the baseline, 16 of them in reserve
    assert fits(94 * MIB, small)
    assert not fits(94 * MIB + 2, small)
    assert capped.budget_under_cap(4290 * MIB, 290 * MIB) == 4000 * MIB  # whose margin is more than the reserve


@linux
@pytest.mark.slow
def test_an_allocation_that_onednn_was_refused_is_out_of_memory(tmp_path, target, capfd):
    job = tmp_path / "refused.py"
    job.write_text(
        "import torch, snugfit\n"
        "def loss(model, batch):\n"
        "    raise RuntimeError('could not create a primitive')\n"
        "def job():\n"
        "    return snugfit.Job(lambda: torch.nn.Linear(2, 2), loss,\n"
        "        lambda m: torch.optim.SGD(m.parameters(), 0.1), lambda n: torch.ones(n, 2), count='samples')\n"
    )
    cap = capped.measure_baseline(str(job)) + 64 * MIB
    assert run(str(job), Plan(batch_size=2, micro_batch_size=2), cap, tmp_path) == capped.EXIT_OUT_OF_MEMORY
    message = capfd.readouterr().err
    assert "oneDNN: could not create a primitive" in message
    assert all(part in message for part in ("  got:", "  expected:", "hint:"))


def test_a_cap_below_the_static_memory_says_which_tensors_exceed_it():
    held = {"parameter": 40 * MIB, "gradient": 40 * MIB, "optimizer": 80 * MIB, "input": MIB}
    report = MemoryReport(
        device="cpu",
        label="modelled",
        peak_allocated_bytes=200 * MIB,
        peak_reserved_bytes=200 * MIB,
        static_bytes=160 * MIB,
        context_bytes=0,
        by_category=held,
        by_module={},
        peak_at=PeakAt(2, "backward", "", "mm"),
        phases={"backward end": held},
    )
    capped.check_static(report, 160 * MIB)
    with pytest.raises(InfeasibleError) as caught:
        capped.check_static(report, 100 * MIB)
    assert "parameter 40.00 MiB, gradient 40.00 MiB, optimizer 80.00 MiB" in str(caught.value)
    assert (caught.value.smallest, caught.value.budget_bytes) == (report, 100 * MIB)


def test_a_long_run_says_in_lines_how_far_it_is_and_how_long_it_will_take(capsys):
    now = [0.0]
    say = run_progress.lines_now_and_then(6, lambda: now[0])
    progress = run_progress.Progress(2, 3, say)
    loss = progress.following(lambda model, micro_batch: (model, micro_batch))
    line = {"loss": 1.5, "lr": [0.1], "samples_per_s": 2.0, "peak_memory_bytes": None, "skipped": False}
    for micro_batch in range(3):
        assert loss("model", micro_batch) == ("model", micro_batch)
        now[0] += 8.0
    progress.updated(line)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "update 1 of 2, micro-batch 1 of 3 (after 0:00:00)",
        "update 1 of 2, micro-batch 3 of 3 (after 0:00:16, about 0:00:32 left)",
    ]
    now[0] += 8.0
    loss("model", 0)
    assert capsys.readouterr().err.startswith("update 2 of 2, micro-batch 1 of 3, loss 1.5000, lr 0.1, 2 samples/s (")


def test_every_micro_step_and_every_update_of_a_run_is_told(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(run_progress, "lines_now_and_then", lambda total, clock: lambda *said: told.append(said))
    runs.train(job(), PLAN, steps=2, run_dir=tmp_path, device="cpu")
    assert [done for done, _ in told] == [0, 1, 2, 3, 3, 4, 5, 6]
    assert [text.partition(", loss")[0] for _, text in told[:4]] == [
        "update 1 of 2, micro-batch 1 of 3",
        "update 1 of 2, micro-batch 2 of 3",
        "update 1 of 2, micro-batch 3 of 3",
        "update 1 of 2",
    ]
