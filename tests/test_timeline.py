"""Memory over the step: what is kept of a recording is what was there, and no peak is lost."""

import random

import pytest
import torch
from torch import nn

import snugfit
from models import LinearStack
from snugfit import Plan, hardware
from snugfit.memory import tracing
from snugfit.memory.events import Birth, Recording, Work
from snugfit.memory.reporting.attribution import CATEGORIES
from snugfit.memory.reporting.timeline import timeline
from snugfit.memory.traces import Trace


def drawn_recording(seed, num_births=120, windows=2):
    """Births and deaths at random; what is left in the end dies never."""
    draw = random.Random(seed)
    recording, live = Recording(), []
    for window in range(1, windows + 1):
        recording.marks.append((len(recording.events), "window"))
        for _ in range(num_births):
            recording.births.append(Birth(draw.randrange(1, 5000), draw.choice(CATEGORIES), "forward", "", "", window))
            recording.events.append(len(recording.births))
            live.append(len(recording.births))
            while live and draw.random() < 0.48:
                recording.events.append(-live.pop(draw.randrange(len(live))))
        recording.marks.append((len(recording.events), "step end"))
    return recording


def on_cpu(recording):
    return Trace(recording, hardware.resolve("cpu"), ())


def alive(recording, position):
    """Category to bytes after so many events, counted one storage at a time."""
    born = [event for event in recording.events[:position] if event > 0]
    dead = {-event for event in recording.events[:position] if event < 0}
    held = [recording.births[event - 1] for event in born if event not in dead]
    return {name: sum(birth.num_bytes for birth in held if birth.category == name) for name in CATEGORIES}


def starts(recording):
    return [position for position, name in recording.marks if name == "window"]


@pytest.mark.parametrize("points", [2, 7, 40, 10_000])
@pytest.mark.parametrize("seed", range(4))
def test_every_moment_that_is_kept_is_what_was_there(seed, points):
    recording = drawn_recording(seed)
    for window, start in zip(timeline(on_cpu(recording), points=points), starts(recording), strict=True):
        for index, moment in enumerate(window.moments):
            there = {name: size for name, size in alive(recording, start + moment).items() if size}
            assert {name: row[index] for name, row in window.by_category.items() if row[index]} == there


@pytest.mark.parametrize("points", [2, 7, 40])
@pytest.mark.parametrize("seed", range(8))
def test_thinning_out_loses_neither_the_peak_nor_that_of_a_category(seed, points):
    recording = drawn_recording(seed)
    borders = [*starts(recording), len(recording.events)]
    for number, window in enumerate(timeline(on_cpu(recording), points=points)):
        moments = [alive(recording, position) for position in range(borders[number], borders[number + 1] + 1)]
        heights = [sum(moment.values()) for moment in moments]
        assert max(window.allocated_bytes) == max(heights)
        assert window.moments[window.peak] == heights.index(max(heights))
        for category, row in window.by_category.items():
            assert max(row) == max(moment[category] for moment in moments)
        assert len(window.moments) <= points + 2 + len(CATEGORIES) + 2 * len(window.spans)


def test_a_short_window_is_kept_whole():
    recording = drawn_recording(0, num_births=20, windows=1)
    (window,) = timeline(on_cpu(recording))
    assert window.moments == tuple(range(len(recording.events) + 1))


def test_time_adds_up_and_never_runs_backwards():
    recording = drawn_recording(1, num_births=30, windows=1)
    recording.work = [(at, Work("mm", "forward", "float32", 1, 1)) for at in (0, 3, 3, 17, len(recording.events))]
    (window,) = timeline(on_cpu(recording), seconds=[at / 10 for at, _ in recording.work])
    assert window.seconds[-1] == pytest.approx((0 + 3 + 3 + 17 + len(recording.events)) / 10)
    assert list(window.seconds) == sorted(window.seconds)
    assert window.seconds[window.moments.index(3)] == pytest.approx(0.6), "a kernel has ended at its own position"
    assert window.seconds[window.moments.index(10)] == pytest.approx(0.6 + 1.7 / 2), "and runs evenly before"


def test_no_time_is_made_up_where_none_was_asked_for():
    assert timeline(on_cpu(drawn_recording(2)))[0].seconds == ()


def job():
    return snugfit.Job(
        LinearStack,
        lambda model, x: model(x).square().mean(),
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: torch.ones(n, 6),
    )


@pytest.fixture(scope="module")
def traced():
    return tracing.record_job(job(), Plan(batch_size=8, micro_batch_size=4), hardware.resolve("rtx-3060-12gb"))


def test_the_timeline_of_a_job_peaks_where_its_report_does(traced):
    report, windows = traced.report(), timeline(traced, points=10)
    assert [window.allocated_bytes[window.peak] for window in windows] == [
        window.peak_allocated_bytes for window in report.windows
    ]
    highest = windows[report.peak_at.window - 1]
    at_peak = {name: row[highest.peak] for name, row in highest.by_category.items() if row[highest.peak]}
    assert at_peak == report.by_category
    assert sum(at_peak.values()) == report.peak_allocated_bytes


def test_the_reserved_line_reaches_the_peak_reserved_of_every_window(traced):
    report = traced.report()
    for window, expected in zip(timeline(traced, points=10), report.windows, strict=True):
        assert max(window.reserved_bytes) == expected.peak_reserved_bytes
        assert all(r >= a for r, a in zip(window.reserved_bytes, window.allocated_bytes, strict=True))


def test_the_phases_of_two_micro_batches_follow_one_another_without_a_gap(traced):
    for window in timeline(traced, points=10):
        assert [(span.phase, span.micro_batch) for span in window.spans] == [
            ("forward", 1),
            ("backward", 1),
            ("forward", 2),
            ("backward", 2),
            ("optimizer", 2),
        ]
        assert window.spans[0].start == 0
        assert [span.start for span in window.spans[1:]] == [span.end for span in window.spans[:-1]]
        assert window.spans[-1].end == len(window.moments) - 1


def test_the_cpu_has_no_reserved_line():
    traced = tracing.record_job(job(), Plan(batch_size=4, micro_batch_size=4), hardware.resolve("cpu"))
    assert all(window.reserved_bytes == () for window in timeline(traced))


def test_a_step_of_ones_own_has_phases_without_micro_batches():
    def make(recorder):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

        return step

    window = timeline(tracing.record(make, hardware.resolve("rtx-3060-12gb")))[-1]
    assert [(span.phase, span.micro_batch) for span in window.spans] == [
        ("forward", 0),
        ("backward", 0),
        ("optimizer", 0),
    ]
