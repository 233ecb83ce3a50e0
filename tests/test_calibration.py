"""Measured rates: their file, whose device they are, and that measuring one gives rates that price a step."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugfit import cli, hardware, rates
from snugfit.errors import PlanError, UnsupportedError
from snugfit.memory.events import Work
from snugfit.planning import calibration, cost, timed_operations, timed_steps
from snugfit.rates import OVERHEADS, Rates
from tolerances import FLOAT64

CPU = hardware.resolve("cpu")
HERE = Rates(
    device="cpu",
    processor=calibration.processor(CPU),
    threads=torch.get_num_threads(),
    torch=torch.__version__,
    arithmetic={"product float32": ((10, 50.0), (1000, 5e9))},
    traffic={"other": ((1, 10.0),)},
    **dict.fromkeys(OVERHEADS, 1e-6),
)


def document(**changed):
    return json.dumps({**HERE.to_dict(), **changed})


def test_rates_are_the_same_after_a_trip_through_json():
    assert Rates.from_json(HERE.to_json()) == HERE


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_rates_are_the_same_after_a_trip_through_a_file(tmp_path, encoding):
    (tmp_path / "rates.json").write_text(HERE.to_json(), encoding=encoding)
    assert Rates.load(tmp_path / "rates.json") == HERE


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"version": 2}, "version"),
        ({"version": True}, "version"),
        ({"device": ""}, "device"),
        ({"processor": 3}, "processor"),
        ({"threads": 0}, "threads"),
        ({"threads": 1.5}, "threads"),
        ({"forward_s": -1e-6}, "forward_s"),
        ({"forward_s": "1"}, "forward_s"),
        ({"watched_s": float("nan")}, "watched_s"),
        ({"window_s": float("inf")}, "window_s"),
        ({"window_s": 10**400}, "window_s"),
        ({"traffic": {"other": [[1, 10**400]]}}, "other"),
        ({"link": 0}, "link"),
        ({"arithmetic": []}, "arithmetic"),
        ({"arithmetic": {"product bfloat16": [[1, 1]]}}, "arithmetic"),
        ({"traffic": {"add": [[1, 1]]}}, "traffic"),
        ({"traffic": {"other": []}}, "other"),
        ({"traffic": {"other": [[1, 1], [1, 2]]}}, "other"),
        ({"traffic": {"other": [[2, 1], [1, 2]]}}, "other"),
        ({"traffic": {"other": [[1, 0]]}}, "other"),
        ({"traffic": {"other": [[-1, 1]]}}, "other"),
        ({"traffic": {"other": [[1, 1, 1]]}}, "other"),
        ({"traffic": {"other": [[1, "fast"]]}}, "other"),
        ({"extra": 1}, "document"),
    ],
)
def test_a_file_with_a_wrong_value_is_an_error_that_names_it(tmp_path, changed, named):
    (tmp_path / "rates.json").write_text(document(**changed))
    with pytest.raises(PlanError, match=named) as raised:
        Rates.load(tmp_path / "rates.json")
    assert "rates.json" in str(raised.value)
    assert "snugfit calibrate" in raised.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, '{"device": "cpu"}'])
def test_a_file_that_holds_no_rates_is_a_named_error(text):
    with pytest.raises(PlanError, match="document"):
        Rates.from_json(text)


@pytest.mark.parametrize("path", ["a\0b", None])
def test_what_is_no_path_of_rates_is_a_named_error(path):
    with pytest.raises(PlanError, match="measured rates are not valid: the file"):
        Rates.load(path)
    with pytest.raises(PlanError, match="the document"):
        Rates.from_json(None)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_a_named_error(tmp_path, content):
    if content is not None:
        (tmp_path / "rates.json").write_bytes(content)
    with pytest.raises(PlanError, match=r"rates\.json"):
        Rates.load(tmp_path / "rates.json")


@given(st.floats(1e-3, 1e15))
def test_between_two_points_a_curve_runs_straight_in_logarithms_and_stays_level_beyond_them(size):
    curve = ((10.0, 100.0), (1000.0, 10000.0))
    expected = min(max(size, 10.0), 1000.0) * 10  # slope 1
    assert rates.at(curve, size) == pytest.approx(expected, rel=1e-9)


def test_rates_of_this_device_make_its_times_their_own():
    device = calibration.calibrated("cpu", HERE)
    assert device.rates == HERE
    work = Work("add.Tensor", "forward", "float32", 0, 40)
    assert cost.step_time([work], device) == pytest.approx(4 + 1e-6, rel=FLOAT64)


@pytest.mark.parametrize(
    "changed", [{"device": "a100-sxm-40gb"}, {"processor": "another"}, {"threads": torch.get_num_threads() + 1}]
)
def test_rates_of_another_device_are_refused_by_what_differs(changed):
    with pytest.raises(PlanError, match="not those of this device") as raised:
        calibration.calibrated("cpu", replace(HERE, **changed))
    assert next(iter(changed)) in raised.value.got


def test_rates_of_another_torch_are_taken_with_a_warning():
    with pytest.warns(UserWarning, match=r"torch 1\.0"):
        assert calibration.calibrated("cpu", replace(HERE, torch="1.0")).rates is not None


def test_rates_measured_on_a_card_are_good_for_that_card_elsewhere():
    card = replace(HERE, device="a100-sxm-40gb", processor="NVIDIA A100-SXM4-40GB", threads=99, link=2e10)
    assert calibration.calibrated("a100-sxm-40gb", card).rates == card
    with pytest.raises(PlanError, match="not those of this device"):
        calibration.calibrated("h100-sxm-80gb", card)


@pytest.mark.parametrize(("reached", "is_fast"), [(6e9, True), (4e9, False)])
def test_a_half_precision_that_was_measured_to_be_faster_is_worth_proposing(reached, is_fast):
    plain = replace(CPU, flops={"float32": 1e11})
    found = replace(HERE, arithmetic={**HERE.arithmetic, "product bfloat16": ((256, reached),)})
    assert calibration.calibrated(plain, found).fast_bfloat16 == is_fast


def test_only_a_device_of_this_machine_can_be_calibrated():
    with pytest.raises(UnsupportedError, match="calibrated"):
        calibration.calibrate("a100-sxm-40gb")


@pytest.fixture
def small(monkeypatch):
    """Sizes that take a moment."""
    monkeypatch.setattr(timed_operations, "SIDES", {"float32": (16, 64), "bfloat16": (16,), "float16": (16,)})
    monkeypatch.setattr(timed_operations, "SMALL_BYTES", 2**12)
    monkeypatch.setattr(timed_operations, "BYTES", (2**14,))
    monkeypatch.setattr(timed_operations, "BATCH_SECONDS", 1e-5)
    monkeypatch.setattr(timed_operations, "BATCHES", 1)
    monkeypatch.setattr(timed_steps, "LAYERS", 2)
    monkeypatch.setattr(timed_steps, "ROUNDS", 1)
    monkeypatch.setattr(timed_steps, "WARM_UP", 1)


@pytest.mark.usefixtures("small")
def test_measuring_gives_rates_of_this_device_and_leaves_random_states_alone():
    before = torch.get_rng_state()
    found = calibration.calibrate("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert Rates.from_json(found.to_json()) == found
    assert calibration.calibrated("cpu", found).rates == found
    assert {"product float32", "attention backward float32", "convolution float32"} <= set(found.arithmetic)
    assert {"other", "gelu", "native_layer_norm_backward", "bernoulli_"} <= set(found.traffic)
    assert found.forward_s > 0
    assert found.link is None


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (timed_operations._product(torch.device("cpu"), "float32", 16), 2 * 16**3),
        (next(timed_operations._attention(torch.device("cpu"), "float32", 2, 8, False)), 2 * 2 * 2 * 4 * 8 * 8 * 64),
        # 28 x 28 pixels, 9 taps, one channel each; and twice that for the two gradients
        (next(timed_operations._convolution(torch.device("cpu"), "float32", 3, 4, 4)), 2 * 3 * 4 * 28 * 28 * 9),
        (
            list(timed_operations._convolution(torch.device("cpu"), "float32", 3, 4, 4))[1],
            2 * 2 * 3 * 4 * 28 * 28 * 9,
        ),
    ],
)
def test_what_is_timed_is_counted_as_the_tracer_counts_it(call, flops):
    with torch.no_grad():
        assert sum(work.flops for work in timed_operations.counted(call)) == flops


JOB = """
import torch
from torch import nn
import snugfit


def job():
    def loss(model, x):
        return model(x).square().mean()

    model = lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    return snugfit.Job(model, loss, lambda m: torch.optim.SGD(m.parameters(), 0.1), lambda n: torch.ones(n, 16))
"""


def test_the_command_prints_the_rates_and_writes_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda device: HERE)
    file = tmp_path / "rates.json"
    assert cli.main(["calibrate", "--device", "cpu", "-o", str(file), "--json"]) == 0
    assert Rates.from_json(capsys.readouterr().out) == Rates.load(file) == HERE
    assert cli.main(["calibrate"]) == 0
    shown = capsys.readouterr().out
    assert HERE.processor in shown
    assert "product float32" in shown


def test_a_plan_made_with_measured_rates_has_their_times(tmp_path, capsys):
    (tmp_path / "job.py").write_text(JOB)
    command = ["plan", str(tmp_path / "job.py"), "--device", "cpu", "--batch", "4", "--json"]
    times = []
    for factor in (1, 1000):  # a machine on which all that is not arithmetic takes a thousand times as long
        slower = {name: factor * getattr(HERE, name) for name in OVERHEADS}
        traffic = {"other": ((1, 10.0 / factor),)}
        (tmp_path / "rates.json").write_text(
            replace(HERE, arithmetic={"product float32": ((1, 1e15),)}, traffic=traffic, **slower).to_json()
        )
        assert cli.main([*command, "--rates", str(tmp_path / "rates.json")]) == 0
        times.append(json.loads(capsys.readouterr().out)["ladder"][0]["step_time_s"])
    assert times[1] == pytest.approx(1000 * times[0], rel=1e-6)


def test_a_plan_is_not_made_with_the_rates_of_another_machine(tmp_path, capsys):
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "rates.json").write_text(replace(HERE, processor="another").to_json())
    status = cli.main(["plan", str(tmp_path / "job.py"), "--device", "cpu", "--rates", str(tmp_path / "rates.json")])
    assert status == 2
    assert "another" in capsys.readouterr().err
