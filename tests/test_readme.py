"""The Python blocks of the README run, one after the other, as written."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_python_blocks_of_the_readme_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out
    assert names["window"].result.step == 4
    assert "micro_batch_size=" in printed
    assert names["report"].at("backward end")["gradient"] == 4096 * 4096 * 4 + 4096 * 4


def test_the_tree_of_the_readme_names_every_source_file():
    text = README.read_text(encoding="utf-8")
    files = {path.name for path in (README.parent / "src").rglob("*.py")} - {"__init__.py"}
    assert {name for name in files if name not in text} == set()
