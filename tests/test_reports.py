"""The report's fields and its document: always the same keys, built-in values only."""

import json

import torch
from torch import nn

import snugfit
from snugfit import sizes
from snugfit.memory.reports import PHASES
from snugfit.sizes import GIB, MIB

KEYS = {
    "device",
    "label",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "static_bytes",
    "context_bytes",
    "margin_bytes",
    "by_category",
    "by_module",
    "peak_at",
    "holders",
    "phases",
    "windows",
    "unused_bytes",
    "fragmentation_bytes",
    "advice",
    "assumptions",
}
PEAK = {"window", "phase", "module", "op"}


def make_step():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.zeros(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_the_document_has_the_same_keys_whatever_the_device_and_goes_through_json():
    job = snugfit.Job(
        lambda: nn.Linear(4, 1), lambda m, x: m(x).mean(), lambda m: torch.optim.SGD(m.parameters()), torch.zeros(4, 4)
    )
    plan = snugfit.Plan(batch_size=4, micro_batch_size=2)
    reports = [
        snugfit.trace(make_step, "t4"),
        snugfit.trace(make_step, "cpu"),
        snugfit.estimate(job, plan, "t4"),
        snugfit.measure(job, plan, "cpu"),
    ]
    for report in reports:
        document = report.to_dict()
        assert set(document) == KEYS
        assert set(document["peak_at"]) == PEAK
        assert set(document["phases"]) == set(PHASES)
        assert all(
            set(holder) == {"num_bytes", "num_storages", "category", "module", "op", "phase", "window"}
            for holder in document["holders"]
        )
        assert all(
            set(window) == {"window", "peak_allocated_bytes", "peak_reserved_bytes", "peak_at", "by_phase"}
            for window in document["windows"]
        )
        assert all(set(window["peak_at"]) == PEAK for window in document["windows"])
        assert json.loads(json.dumps(document)) == document


def test_c093_live_reserved_and_margin_are_apart_and_add_up():
    report = snugfit.trace(make_step, "t4")
    assert report.peak_reserved_bytes % (2 * MIB) == 0
    assert report.peak_allocated_bytes < report.peak_reserved_bytes
    assert report.margin_bytes == 6 * GIB // 10  # 5 % of so little is less
    assert report.needed_bytes == report.peak_reserved_bytes + report.margin_bytes + report.context_bytes
    assert report.unused_bytes >= report.peak_reserved_bytes - report.peak_allocated_bytes


def test_c093_batches_of_changing_length_fragment_and_the_report_says_what_helps():
    def make_step(lengths):
        def make():
            model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
            optimizer = torch.optim.AdamW(model.parameters())

            def step():
                for length in lengths:
                    model(torch.zeros(length, 1024)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        return make

    longest = 3001 + 977 * max(7 * i % 31 for i in range(16))
    changing = snugfit.trace(make_step([3001 + 977 * (7 * i % 31) for i in range(16)]), "rtx-3060-12gb")
    fixed = snugfit.trace(make_step([longest] * 16), "rtx-3060-12gb")
    assert abs(changing.peak_allocated_bytes - fixed.peak_allocated_bytes) < 20 * MIB
    assert changing.peak_reserved_bytes > 2 * changing.peak_allocated_bytes
    assert fixed.peak_reserved_bytes < 1.1 * fixed.peak_allocated_bytes
    advice = " ".join(changing.advice)
    assert "expandable_segments:True" in advice
    assert "not together with max_split_size_mb" in advice
    assert "batches of one length" in advice
    assert changing.unused_bytes > changing.peak_reserved_bytes // 10
    assert "expandable" not in " ".join(fixed.advice)


def test_the_settings_of_the_allocator_that_are_in_effect_are_named(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    report = snugfit.trace(make_step, "t4")
    assert [sentence for sentence in report.assumptions if "expandable segments are on" in sentence]
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    plain = snugfit.trace(make_step, "t4")
    assert not [sentence for sentence in plain.assumptions if "expandable segments are on" in sentence]
    on_cpu = snugfit.trace(make_step, "cpu")
    assert (on_cpu.unused_bytes, on_cpu.fragmentation_bytes) == (0, 0)


def test_a_report_prints_as_a_short_summary_and_its_repr_stays():
    report = snugfit.trace(make_step, "t4")
    lines = str(report).splitlines()
    assert lines[0] == "t4, modelled"
    assert 8 <= len(lines) <= 12
    for num_bytes in (report.peak_allocated_bytes, report.peak_reserved_bytes, report.needed_bytes):
        assert any(sizes.text(num_bytes) in line for line in lines)
    for category, num_bytes in report.by_category.items():
        assert f"{category} {sizes.text(num_bytes)}" in str(report)
    assert f"{report.peak_at.phase} of window {report.peak_at.window}" in str(report)
    assert sum(line.startswith("  held by") for line in lines) == 1
    assert f"{sizes.text(report.holders[0].num_bytes)} {report.holders[0].category}" in str(report)
    assert f"{len(report.assumptions)}, listed in .assumptions" in lines[-1]
    assert repr(report).startswith("MemoryReport(device='t4'")
