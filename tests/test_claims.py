"""The answers to what is asked for and claimed: complete, and every file and test that they name is there."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "claims.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = {match[1]: match[2] for match in re.finditer(r"^\| ([TF]\d+) \| (.*) \|$", TEXT, re.MULTILINE)}
LINK = re.compile(r"\[([^\]]*)\]\((?!https:)([^)#]+)\)")


def test_every_row_that_is_asked_for_and_every_figure_has_one_answer():
    asked = [f"T{number}" for number in range(1, 20)] + [f"F{number}" for number in range(1, 16)]
    assert list(ROWS) == asked
    assert len(re.findall(r"^\| [TF]\d+ \|", TEXT, re.MULTILINE)) == len(asked)


@pytest.mark.parametrize("row", [name for name in ROWS if name.startswith("T")])
def test_what_is_asked_for_names_where_it_is_done_and_a_test(row):
    targets = [target for _, target in LINK.findall(ROWS[row])]
    assert any(target.startswith("../src/") for target in targets)
    assert any(target.startswith("../tests/") for target in targets)


def test_every_file_that_is_linked_is_there_and_holds_the_name_that_the_link_says():
    for words, target in LINK.findall(TEXT):
        file = (PAGE.parent / target).resolve()
        assert file.exists(), target
        name = words.strip("`")
        if name != words and file.suffix == ".py" and not name.endswith(".py"):
            assert re.search(rf"\b(def|class) {name}\b|^{name}\b", file.read_text("utf-8"), re.MULTILINE), words


def test_every_number_of_the_figures_says_how_it_came_about():
    for name, row in ROWS.items():
        if name.startswith("F"):
            assert re.search(r"modelled|CPU-measured|measured by others|arithmetic", row), name


def test_the_weight_of_the_old_value_099_belongs_to_ten_micro_steps():
    old, steps = 0.9, 10
    assert old ** (1 / steps) == pytest.approx(0.99, abs=6e-4)
    value = torch.tensor(0.0)
    for _ in range(steps):
        value = torch.lerp(value, torch.tensor(1.0), 1 - old ** (1 / steps))
    assert float(value) == pytest.approx(1 - old, abs=1e-6)


def test_no_plain_adamw_over_seven_billion_weights_reaches_38_gb():
    """Weights, gradients and two moments at two bytes each; the count is that of the layers' shapes."""
    width, hidden, vocabulary, layers = 4096, 11008, 32000, 32
    layer = 4 * width * width + 3 * width * hidden + 2 * width
    count = layers * layer + 2 * vocabulary * width + width
    assert f"{count:,}" in TEXT
    assert 4 * 2 * count > 53 * 10**9 > 38 * 10**9


def test_weights_and_gradients_of_seven_billion_in_bf16_leave_no_room_on_24_gib():
    assert 2 * 2 * 6_738_415_616 > 24 * 2**30
