"""The page and what it is made of: figures that plotly accepts, names that stay text, files refused by name."""

import base64
import dataclasses
import hashlib
import html as entities
import json
import re
import subprocess
import sys

import plotly.graph_objects as go
import pytest

from paged import CARD, EVIL, PLAN, RUNGS, considered, traced, write_run
from snugfit import Plan, PlanError, Segment, UnsupportedError, cli, runs
from snugfit.page import details, html, markup, modules, over_time, run_figures, run_folder, techniques, trades
from snugfit.page.drawing import Unit
from test_cli import JOBS, assert_four_parts

GIB, MIB = Unit("GiB", 2**30), Unit("MiB", 2**20)


@pytest.fixture(scope="module")
def known():
    return traced()


@pytest.fixture(scope="module")
def searched(known):
    return dataclasses.replace(
        known,
        ladder=RUNGS,
        frontier=RUNGS[1:],
        runner_up=RUNGS[3].plan,
        step_time_s=2.5,
        reasons={"precision": "given"},
    )


@pytest.fixture
def saved(tmp_path, known):
    PLAN.save(tmp_path / "plan.json")
    details.save(known, details.beside(tmp_path / "plan.json"))
    return tmp_path / "plan.json"


# What is written and read


def test_details_that_are_saved_are_read_as_they_were(tmp_path, searched):
    details.save(searched, tmp_path / "plan.details.json")
    assert details.load(tmp_path / "plan.details.json", PLAN) == searched


def test_details_of_a_version_that_knew_nothing_of_loops_are_read(tmp_path, searched):
    file = tmp_path / "old.details.json"
    details.save(searched, file)
    document = json.loads(file.read_text())
    assert document.pop("loop")["form"] != "other"
    document.pop("plan_file")
    file.write_text(json.dumps(document))
    old = details.load(file, searched.plan)
    assert "for micro in cut(batch," in entities.unescape(html.document(old))


def test_details_lie_beside_their_plan():
    assert details.beside("runs/plan.json").as_posix() == "runs/plan.details.json"


def changed(saved, change):
    file = details.beside(saved)
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    return file


def set_first_window(name, value):
    return lambda document: document["timeline"][0].update({name: value})


REFUSED = {
    "an unknown format": (lambda d: d.update(format="other 1"), "format"),
    "a missing part": (lambda d: d.pop("memory"), "memory"),
    "text for a size": (lambda d: d.update(budget_bytes="much"), "budget_bytes"),
    "a negative size": (lambda d: d.update(budget_bytes=-1), "budget_bytes"),
    "a time that is no number": (lambda d: d.update(step_time_s=float("nan")), "step_time_s"),
    "a plan that is none": (lambda d: d["plan"].update(precision="fp4"), "plan"),
    "rows of unequal length": (set_first_window("moments", [0]), "window 1"),
    "a peak outside of the window": (set_first_window("peak", 10**6), "window 1"),
    "a phase outside of the window": (
        set_first_window("spans", [{"phase": "forward", "micro_batch": 1, "start": 0, "end": -1}]),
        "window 1",
    ),
    "an unknown category": (lambda d: d["memory"]["by_category"].update({"<b>": 1}), "'<b>'"),
    "another peak": (lambda d: d["memory"].update(peak_allocated_bytes=1), "report that says 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_details_that_cannot_be_true_are_refused_by_name(saved, name):
    change, word = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        details.load(changed(saved, change), PLAN)
    assert_four_parts(str(caught.value))
    assert word in caught.value.got
    assert "plan.details.json" in caught.value.what


@pytest.mark.parametrize("document", ["", "{", "[]", "\x00", '{"format": NaN}', "[" * 100_000])
def test_a_file_that_is_cut_off_or_foreign_is_refused(saved, document):
    details.beside(saved).write_text(document)
    with pytest.raises(PlanError, match=r"plan\.details\.json") as caught:
        details.load(details.beside(saved), PLAN)
    assert_four_parts(str(caught.value))


def test_details_that_are_cut_off_anywhere_are_refused(saved):
    whole = details.beside(saved).read_text()
    for share in (0.1, 0.5, 0.9):
        details.beside(saved).write_text(whole[: int(share * len(whole))])
        with pytest.raises(PlanError, match="not a JSON document"):
            details.load(details.beside(saved), PLAN)


def test_bytes_that_are_no_text_and_files_that_are_too_large_are_refused(saved, monkeypatch):
    details.beside(saved).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="cannot read"):
        details.load(details.beside(saved), PLAN)
    with details.beside(saved).open("wb") as stream:
        stream.truncate(65 * 2**20)
    with pytest.raises(PlanError, match="too large"):
        details.load(details.beside(saved), PLAN)


def test_details_of_another_plan_are_refused_with_what_differs(saved):
    other = dataclasses.replace(PLAN, micro_batch_size=2, fingerprint="class=Other")
    with pytest.raises(PlanError) as caught:
        details.load(details.beside(saved), other)
    assert caught.value.differing == ("micro_batch_size", "fingerprint")
    assert "micro_batch_size=4" in caught.value.got
    assert "micro_batch_size=2" in caught.value.expected


# Figures


def test_plotly_accepts_every_figure(searched, tmp_path):
    run = run_folder.read(write_run(tmp_path / "run", predicted=searched.memory.to_dict()))
    for figure in (
        over_time.memory_over_step(searched, MIB),
        modules.by_module(searched.memory, MIB),
        trades.rung_memory(searched, GIB),
        trades.rung_times(searched),
        trades.frontier(searched, GIB),
        run_figures.losses(run),
        run_figures.step_times(run, PLAN, 1.0),
        run_figures.peaks(run, MIB),
    ):
        go.Figure(figure)


def test_the_peak_that_is_marked_is_the_reports(known):
    figure = over_time.memory_over_step(known, MIB)
    (peak,) = [trace for trace in figure["data"] if trace["name"] == "peak" and trace["visible"]]
    assert peak["y"][0] * 2**20 == known.memory.peak_allocated_bytes
    (curve,) = [trace for trace in figure["data"] if trace["name"] == "allocated" and trace["visible"]]
    assert max(curve["y"]) == pytest.approx(peak["y"][0], abs=1e-5)
    assert curve["x"][curve["y"].index(max(curve["y"]))] == peak["x"][0]


def test_a_budget_far_above_is_left_out_of_the_picture(known):
    assert not [t for t in over_time.memory_over_step(known, MIB)["data"] if t["name"] == "budget"]
    near = dataclasses.replace(known, budget_bytes=known.memory.peak_reserved_bytes)
    budgets = [t for t in over_time.memory_over_step(near, MIB)["data"] if t["name"] == "budget"]
    assert {value * 2**20 for trace in budgets for value in trace["y"]} == {near.budget_bytes}


def test_the_boxes_of_modules_add_up_to_the_peak(known):
    (trace,) = modules.by_module(known.memory, MIB)["data"]
    values = dict(zip(trace["ids"], trace["values"], strict=True))
    assert values[trace["ids"][0]] == known.memory.peak_allocated_bytes
    for identity in set(trace["parents"]) - {""}:
        inner = [v for v, parent in zip(trace["values"], trace["parents"], strict=True) if parent == identity]
        assert sum(inner) == values[identity]
    assert len(values) == len(trace["ids"]), "identities differ"


def held(**modules_):
    report = traced().memory
    total = sum(sum(categories.values()) for categories in modules_.values())
    return dataclasses.replace(report, by_module=modules_, peak_allocated_bytes=total)


def test_blocks_that_hold_about_the_same_are_one_box():
    blocks = {f"layer.{n}.linear": {"saved": 1000 + n % 2, "parameter": 500} for n in range(12)}
    blocks["layer.12.linear"] = {"saved": 400, "parameter": 500}
    (trace,) = modules.by_module(held(**blocks, head={"saved": 100}), GIB)["data"]
    assert "0 to 11.linear" in trace["labels"]
    assert "12.linear" in trace["labels"]
    assert trace["values"][trace["labels"].index("0 to 11.linear")] == 12 * 1500 + 6


def test_what_is_too_small_to_be_seen_is_one_box():
    tiny = {f"m{n}": {"buffer": 1} for n in range(50)}
    (trace,) = modules.by_module(held(large={"saved": 10**6}, **tiny), GIB)["data"]
    assert trace["values"][trace["labels"].index("small parts")] == 50
    assert len(trace["ids"]) == 3


def test_the_frontier_marks_the_chosen_plan_the_runner_up_and_the_budget(searched):
    chosen = dataclasses.replace(searched, plan=RUNGS[2].plan)
    figure = trades.frontier(chosen, GIB)
    marked = {trace["name"]: (trace["x"], trace["y"]) for trace in figure["data"]}
    assert marked["chosen"] == ([10.0], [2.5])
    assert marked["runner-up"] == ([8.0], [3.0])
    assert marked["frontier"] == ([8.0, 10.0, 20.0], [3.0, 2.5, 2.0])
    assert marked["other rungs"] == ([30.0], [4.0])
    assert figure["layout"]["shapes"][0]["x0"] == CARD.memory_bytes / 2**30


def test_a_rung_that_needs_many_budgets_does_not_press_the_others_flat(searched):
    huge = considered("full batch, fp32", 1700, 4.0)
    wide = dataclasses.replace(searched, ladder=(huge, *RUNGS[1:]), frontier=(huge, *RUNGS[1:]))
    assert trades.rung_memory(wide, GIB)["layout"]["xaxis"]["range"][1] == 3 * CARD.memory_bytes / 2**30
    axis = trades.frontier(wide, GIB)["layout"]["xaxis"]
    assert axis["type"] == "log"
    assert all(float(text) == at for at, text in zip(axis["tickvals"], axis["ticktext"], strict=True)), "20, not 2"


def test_the_techniques_are_shown_on_plans_that_differ_in_nothing_else(searched):
    page = techniques.techniques(searched, GIB)
    text = re.sub(r"<[^>]+>", " ", page)
    mixed, accumulated, recomputed = re.split(r"Gradient accumulation|Activation checkpointing", " ".join(text.split()))
    assert "30.00 GiB 20.00 GiB -33 %" in mixed
    assert "24 bits 8 bits -67 %" in mixed
    assert "20.00 GiB 10.00 GiB -50 %" in accumulated
    assert "2 s 2.5 s +25 %" in accumulated
    assert "20.00 GiB 8.00 GiB -60 %" in recomputed
    assert "100 FLOP 133 FLOP +33 %" in recomputed
    assert "8 bits 8 bits same" in recomputed


def test_a_card_says_whether_its_plans_are_rungs_and_the_page_explains_what_is_kept(searched):
    assert techniques.techniques(searched, GIB).count("Two rungs of the ladder") == 3
    kept = dataclasses.replace(RUNGS[-1].plan, recompute=(Segment(("0",), "keep-matmul"),))
    point = dataclasses.replace(RUNGS[-1], plan=kept, flops=0)
    other = dataclasses.replace(searched, ladder=RUNGS[:-1], frontier=(point,))
    page = techniques.techniques(other, GIB)
    assert page.count("Two plans that are not both rungs") == 1
    assert "counted for rungs of the ladder only" in page
    assert "keep-matmul: results of matrix products, convolutions and attention are kept." in html.document(other)


def test_a_technique_that_the_search_never_met_has_no_numbers(searched):
    page = techniques.techniques(dataclasses.replace(searched, ladder=RUNGS[:1], frontier=()), GIB)
    assert page.count("met no plan with it") == 3


def test_a_long_run_is_drawn_with_its_extremes(tmp_path):
    steps = [
        run_folder.Step(
            step=n, loss=-50.0 if n == 4321 else 1.0, samples_per_s=9.0, peak_memory_bytes=None, skipped=False
        )
        for n in range(1, 10_001)
    ]
    figure = run_figures.losses(run_folder.Run(steps=tuple(steps), ending=None, notes=()))
    shown = figure["data"][0]
    assert len(shown["x"]) <= 2000
    assert shown["y"][shown["x"].index(4321)] == -50.0
    assert shown["x"] == sorted(set(shown["x"]))


# The page


def outside_of_plotly(page):
    """The page without plotly's own script, which has addresses and markup in its texts."""
    return page.replace(html.plotly_script(), "")


def figures(page):
    return [json.loads(text) for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page)]


def test_the_page_says_verdict_peak_plan_and_labels(searched):
    page = entities.unescape(outside_of_plotly(html.document(searched)))
    for words in (
        "fits (modelled)",
        "8 samples go through the model in 2 micro-batches of 4",
        "job.py, seq 8: batch 8",
    ):
        assert words in page
    assert MIB.text(searched.memory.peak_reserved_bytes) in page
    assert "2.5 s" in page
    assert "does not fit (modelled)" in html.document(dataclasses.replace(searched, budget_bytes=1))


def test_the_page_says_what_to_change_in_a_script_and_what_is_worth_knowing(searched):
    told = dataclasses.replace(searched, notes=("a note",), advice={"clipping": "a limit"})
    page = entities.unescape(outside_of_plotly(html.document(told)))
    code = page[page.index("What to change in your script") : page.index("What memory is paid with")]
    assert "start : start + 4" in code
    assert "snugfit.Engine(model, optimizer, plan, loss=loss_fn)" in code
    assert "<li>a note</li>" in page
    assert "<td>clipping</td><td>a limit</td>" in page


def test_names_that_are_markup_stay_text(searched):
    evil = dataclasses.replace(
        searched,
        target=EVIL,
        options={EVIL: EVIL},
        reasons={"precision": EVIL},
        notes=(EVIL,),
        advice={EVIL: EVIL},
        versions={EVIL: EVIL},
        ladder=tuple(dataclasses.replace(rung, name=EVIL, pays_with=EVIL) for rung in RUNGS),
        memory=dataclasses.replace(searched.memory, device=EVIL, label=EVIL, advice=(EVIL,), assumptions=(EVIL,)),
    )
    page = outside_of_plotly(html.document(evil))
    assert EVIL in str(searched.memory.by_module), "the model has such a module"
    assert "<script>alert" not in page
    assert "<img" not in page
    assert entities.escape(EVIL) in page


def test_text_in_figures_is_escaped_for_plotly_which_reads_markup(searched):
    shown = json.dumps(figures(html.document(searched)))
    assert entities.escape("<script>alert(1)") in shown
    assert "<script>" not in shown


def test_no_text_in_a_figure_can_end_the_script_that_it_lies_in():
    text = "</script><script>alert(1)</script><!-- & "
    piece = markup.plot("name", {"data": [{"text": [text]}], "layout": {}}, "label")
    assert piece.count("</script>") == 1
    assert "<!--" not in piece
    assert figures(piece) == [{"data": [{"text": [text]}], "layout": {}}]


def test_the_page_loads_nothing_and_lets_no_other_script_run(searched):
    page = html.document(searched)
    own = outside_of_plotly(page)
    assert not re.search(r"""(src|href)=["'](?!data:)""", own)
    assert not re.search(r"https?://|url\(|@import", own)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    assert len(scripts) == 2
    assert set(re.findall(r"'sha256-([^']*)'", policy)) == hashes
    assert "default-src 'none'" in policy


def test_a_page_without_a_search_says_where_ladder_and_reasons_come_from(known):
    page = html.document(known)
    assert "snugfit plan TARGET" in page
    assert 'id="ladder"' not in page
    assert 'id="memory"' in page


def test_a_plan_whose_memory_was_put_together_has_a_page_without_a_timeline(tmp_path, searched):
    details.save(dataclasses.replace(searched, timeline=()), tmp_path / "plan.details.json")
    page = html.document(details.load(tmp_path / "plan.details.json", PLAN))
    assert 'id="memory"' not in page
    assert 'id="ladder"' in page


def test_importing_snugfit_and_its_command_line_does_not_import_plotly():
    code = "import sys, snugfit.cli; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


def test_without_plotly_the_error_says_how_to_install_it(known, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UnsupportedError) as caught:
        html.document(known)
    assert_four_parts(str(caught.value))
    assert caught.value.hint == 'pip install "snugfit[report]"'


# Runs


def test_a_run_is_read_and_shown(tmp_path, known):
    run = run_folder.read(write_run(tmp_path / "run", predicted=known.memory.to_dict()))
    page = html.document(known, run)
    assert [step.loss for step in run.steps] == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert run.ending.predicted == known.memory
    for name in ("loss", "step-times", "peaks"):
        assert f'id="{name}"' in page
    assert "the job has no data" in page
    times = run_figures.step_times(run, PLAN, None)["data"][0]["y"]
    assert times == [2.0] * 5, "8 samples at 4 samples/s"
    shown = dict(zip(*(run_figures.peaks(run, MIB)["data"][0][name] for name in "yx"), strict=True))
    assert shown["observed"] * 2**20 == 10**8


def test_a_run_that_was_killed_is_shown_without_its_end(tmp_path, known):
    folder = write_run(tmp_path / "run")
    (folder / runs.REPORT).unlink()
    with (folder / runs.METRICS).open("a") as stream:
        stream.write('{"step": 6, "lo')
    run = run_folder.read(folder)
    assert len(run.steps) == 5
    assert len(run.notes) == 2
    assert "cut off" in html.document(known, run)


def test_a_run_that_ended_before_its_first_step_is_said(tmp_path, known):
    folder = write_run(tmp_path / "run", steps=0)
    assert "before its first step" in html.document(known, run_folder.read(folder))


@pytest.mark.parametrize(
    ("name", "document", "word"),
    [
        (runs.METRICS, '{"step": 1}\n', "line 1"),
        (runs.METRICS, "no JSON\n", "line 1"),
        (runs.METRICS, '{"step": 1, "loss": Infinity, "samples_per_s": 1, "skipped": false}\n', "line 1"),
        (runs.REPORT, "{", "report.json"),
        (runs.REPORT, '{"steps": -1}', "report.json"),
    ],
)
def test_a_run_folder_with_foreign_files_is_refused(tmp_path, name, document, word):
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(document)
    with pytest.raises(PlanError) as caught:
        run_folder.read(folder)
    assert_four_parts(str(caught.value))
    assert word in caught.value.what


# The command


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.py").write_text(JOBS)


@pytest.fixture
def call(capsys):
    def run(*words):
        status = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_plan_writes_details_beside_the_plan_and_report_shows_them(jobs, tmp_path, call):
    status, _, err = call("plan", "jobs.py", "--device", "rtx-3060-12gb", "--batch", 4, "-o", "plan.json")
    assert status == 0, err
    plan = Plan.load("plan.json")
    kept = details.load(tmp_path / "plan.details.json", plan)
    assert kept.target == "jobs.py"
    assert kept.memory.device == "rtx-3060-12gb"
    assert kept.budget_bytes == CARD.memory_bytes
    assert plan in [rung.plan for rung in kept.ladder]
    assert set(kept.reasons) >= {"precision", "micro_batch_size"}
    status, out, err = call("report", "plan.json")
    assert (status, err) == (0, "")
    assert out.startswith("plan.html")
    assert (tmp_path / "plan.html").read_text() == html.document(dataclasses.replace(kept, plan_file="plan.json"))
    status, out, _ = call("report", "plan.json", "-o", "there/page.html", "--json")
    assert json.loads(out) == {"page": "there/page.html", "num_bytes": (tmp_path / "there/page.html").stat().st_size}


def test_train_that_plans_itself_leaves_details_in_its_folder(jobs, tmp_path, call):
    status, _, err = call("train", "jobs.py", "--device", "cpu", "--batch", 4, "--steps", 2, "--run-dir", "run")
    assert status == 0, err
    assert details.load(tmp_path / "run/plan.details.json", Plan.load("run/plan.json")).memory.device == "cpu"
    status, _, err = call("report", "run")
    assert (status, err) == (0, "")
    page = (tmp_path / "run/page.html").read_text()
    assert 'id="peaks"' in page
    assert 'id="ladder"' in page


def test_train_with_a_plan_file_takes_over_what_lies_beside_it(jobs, tmp_path, call):
    call("plan", "jobs.py", "--device", "cpu", "--batch", 4, "-o", "plan.json")
    train = ("train", "jobs.py", "--device", "cpu", "--steps", 1, "--run-dir", "run", "--plan", "plan.json")
    assert call(*train)[0] == 0
    assert (tmp_path / "run/plan.details.json").read_text() == (tmp_path / "plan.details.json").read_text()
    assert call(*train[:-1], "run/plan.json")[0] == 0
    assert (tmp_path / "run/plan.details.json").exists(), "a plan of the run's own folder"
    (tmp_path / "plan.details.json").unlink()
    assert call(*train)[0] == 0
    assert not (tmp_path / "run/plan.details.json").exists(), "those of the earlier run are gone"


def test_a_plan_alone_is_refused_with_both_ways_to_a_page(jobs, tmp_path, call):
    Plan(batch_size=4, micro_batch_size=4).save(tmp_path / "bare.json")
    status, out, err = call("report", "bare.json")
    assert (status, out) == (2, "")
    assert_four_parts(err)
    assert "bare.details.json" in err
    assert "plan -o" in err
    assert "--target" in err


def test_a_plan_alone_is_traced_again_for_a_job(jobs, tmp_path, call):
    Plan(batch_size=4, micro_batch_size=2).save(tmp_path / "bare.json")
    words = ("report", "bare.json", "--target", "jobs.py", "--device", "rtx-3060-12gb", "--budget", "1GiB")
    status, _, err = call(*words)
    assert status == 0, err
    page = (tmp_path / "bare.html").read_text()
    assert "1.00 GiB" not in page, "small jobs are shown in MiB"
    assert "1,024 MiB" in page
    assert "rtx-3060-12gb" in page


def test_a_plan_of_another_model_is_not_traced_for_this_one(jobs, tmp_path, call):
    PLAN.save(tmp_path / "other.json")
    status, _, err = call("report", "other.json", "--target", "jobs.py", "--device", "cpu")
    assert status == 2
    assert_four_parts(err)
    assert "another model" in err


@pytest.mark.parametrize("words", [("--device", "cpu"), ("--budget", "1GiB"), ("--seq", "4")])
def test_what_is_said_of_a_job_that_is_not_named_is_refused(jobs, saved, call, words):
    status, _, err = call("report", saved, *words)
    assert status == 2
    assert_four_parts(err)
    assert "--target" in err


@pytest.mark.parametrize("source", ["nothing.json", "empty"])
def test_a_source_that_is_neither_plan_nor_run_is_refused(jobs, tmp_path, call, source):
    (tmp_path / "empty").mkdir()
    status, _, err = call("report", source)
    assert status == 2
    assert_four_parts(err)
