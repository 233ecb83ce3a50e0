"""The Python blocks of every page under docs/ run, one after the other, as written."""

import re
from pathlib import Path

import pytest

PAGES = sorted(Path(__file__).parents[1].joinpath("docs").glob("*.md"))


@pytest.mark.filterwarnings("ignore:segments are offloaded to the host")  # as the page says
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_blocks_of_a_page_run_and_print_what_it_says(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    said = [line for block in blocks for line in re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)]
    names = {}
    for block in blocks:
        exec(block, names)
    assert capsys.readouterr().out.splitlines() == said
