"""The accuracy benchmark's own arithmetic, and published rows that must come out to the byte."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import accuracy
import published
from published import MIB, Options, Prediction, Row, Skipped, attention, cs336_rows, traces
from published.judging import Bound, Outcome, summarise

COLUMNS = "id,source,model,config_details,micro_batch,metric,value_MiB,reproducibility,notes,metric_scope"
MLP_COLUMNS = "set,input,output,hidden_layers,nvidia_smi_max_MiB,usable"

needs_published_rows = pytest.mark.skipif(
    not published.GROUNDTRUTH.is_dir(), reason=f"published measurements are not at {published.GROUNDTRUTH}"
)


def groundtruth(tmp_path: Path) -> Path:
    """A made-up folder: three rows of one family, one of another, one job."""
    lines = [
        "toy-001,somewhere,m,one,8,allocated,100,A,,peak",
        "toy-002,somewhere,m,two,8,allocated,200.5,A,,peak",
        "toy-003,somewhere,m,three,8,allocated,400,B,,peak",
        "to-y-001,somewhere,m,four,8,reserved,10,A,,resident",
    ]
    (tmp_path / "measurements.csv").write_text("\n".join([COLUMNS, *lines]) + "\n")
    (tmp_path / "mlp_jobs_nvidia_smi.csv").write_text(f"{MLP_COLUMNS}\n1,3,2,1,1500,yes\n")
    return tmp_path


def outcome(published_mib: float, predicted_mib: float | None, cause: str = "", fitted: bool = False) -> Outcome:
    row = Row("toy-001", "toy", "allocated", round(published_mib * MIB), "peak", "A", {})
    found = (
        Skipped(row.id, "not tried")
        if predicted_mib is None
        else Prediction(row.id, round(predicted_mib * MIB), cause, fitted)
    )
    return Outcome(row, found)


def test_rows_are_read_with_bytes_family_and_grade(tmp_path: Path) -> None:
    rows = published.read(groundtruth(tmp_path))
    assert [row.id for row in rows] == ["toy-001", "toy-002", "toy-003", "to-y-001", "mlpjobs-0001"]
    assert [row.family for row in rows] == ["toy", "toy", "toy", "to-y", "mlpjobs"]
    assert rows[1].num_bytes == 200 * MIB + MIB // 2
    assert rows[2].grade == "B"
    assert (rows[3].metric, rows[3].scope) == ("reserved", "resident")
    assert (rows[4].metric, rows[4].num_bytes, rows[4].fields["usable"]) == ("nvidia-smi", 1500 * MIB, "yes")


def test_rows_of_a_family_without_a_module_are_listed_not_dropped(tmp_path: Path) -> None:
    found = accuracy._predict(Options(groundtruth(tmp_path)), ["toy", "to-y"], jobs=1)
    assert [outcome.row.id for outcome in found] == ["toy-001", "toy-002", "toy-003", "to-y-001"]
    assert all(isinstance(outcome.found, Skipped) for outcome in found)


def test_errors_are_relative_to_the_published_value_and_signed() -> None:
    assert outcome(100, 99).error == pytest.approx(-0.01)
    assert outcome(100, 99).error_mib == pytest.approx(-1)
    assert math.isnan(outcome(100, None).error)


def test_a_summary_counts_what_was_predicted_and_not_fitted() -> None:
    rows = [outcome(100, 100), outcome(100, 100.4), outcome(100, 97), outcome(100, None), outcome(100, 50, fitted=True)]
    found = summarise(rows)
    assert found.num_rows == 3
    assert found.median == pytest.approx(0.004)
    assert found.share_within == pytest.approx(2 / 3)
    assert found.worst == pytest.approx(0.03)
    assert found.median_mib == pytest.approx(0.4)
    assert found.p95_mib == pytest.approx(3)


def test_nothing_predicted_meets_no_bound() -> None:
    assert not Bound().met([outcome(100, None)])


def test_a_row_above_one_per_cent_without_a_cause_misses_a_bound_that_wants_causes() -> None:
    bound = Bound(causes=True)
    assert bound.met([outcome(100, 100.9)])
    assert not bound.met([outcome(100, 102)])
    assert bound.met([outcome(100, 102, cause="a compiled run")])


@pytest.mark.parametrize(
    ("bound", "met"),
    [
        (Bound(median=0.02), True),
        (Bound(median=0.01), False),
        (Bound(share=0.5), True),
        (Bound(share=0.51), False),
        (Bound(worst=0.04), True),
        (Bound(worst=0.03), False),
        (Bound(median_mib=2), True),
        (Bound(p95_mib=3), False),
    ],
)
def test_each_end_of_a_bound_decides(bound: Bound, met: bool) -> None:
    assert bound.met([outcome(100, 100.0), outcome(100, 104 - 2**-10)]) is met


def test_a_family_whose_rows_all_failed_misses_its_target() -> None:
    row = Row("enzo-001", "enzo", "allocated", 100 * MIB, "peak", "A", {})
    (target,) = accuracy.published_targets([Outcome(row, Skipped("enzo-001", "FAILED"))], partial=True)
    assert target.met is False


def test_rows_that_are_off_and_rows_not_tried_are_printed_with_their_reasons() -> None:
    lines = accuracy.row_lines([outcome(100, 103, cause="a compiled run"), outcome(100, None)])
    assert "- toy-001 (allocated): +3.00%; a compiled run" in lines
    assert "- toy 001: not tried" in lines


def test_lists_are_compared_by_their_longest_common_order() -> None:
    matched, differences = traces.compare([1, 2, 3, 4, 5], [1, 3, 9, 4, 5, 6])
    assert matched == 4
    assert [(d.position, d.missing, d.index, d.added) for d in differences] == [
        (1, (2,), 1, ()),
        (3, (), 2, (9,)),
        (5, (), 5, (6,)),
    ]
    assert traces.compare([1, 2, 3], [1, 2, 3]) == (3, [])
    assert traces.compare([1, 2], []) == (0, [traces.Difference(0, (1, 2), (), 0)])


@needs_published_rows
def test_attention_between_forward_and_backward_comes_out_to_the_byte() -> None:
    rows = [row for row in published.read(published.GROUNDTRUTH) if row.family == "attn-magma"]
    found = {prediction.id: prediction for prediction in attention.rows(rows, Options())}
    assert {row.id: row.num_bytes for row in rows} == {
        identity: prediction.num_bytes for identity, prediction in found.items() if isinstance(prediction, Prediction)
    }


@needs_published_rows
def test_every_event_of_the_recorded_attention_step_is_traced_in_order() -> None:
    (row,) = [r for r in published.read(published.GROUNDTRUTH) if r.id == "snap-055"]
    script = cs336_rows.script_of(row, Options())
    assert not isinstance(script, str)
    recording = cs336_rows.trace_of(script).recording
    traced = [recording.births[abs(event) - 1].num_bytes * (1 if event > 0 else -1) for event in recording.events]
    log = traces.load(published.GROUNDTRUTH / "traces" / f"{cs336_rows.log_name(row)}.json.gz")
    assert traced == traces.changes(log)
