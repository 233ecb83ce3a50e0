"""The tables of eager and sdpa attention in transformers' model pages, with the transformers of their time.

Entry point: ``rows``. Model code decides what is saved: 5.x is a fifth off on eager OPT rows of 2024. The rows are
handed to interpreters that have 4.46.3 or 4.43.4; ``sdpa_sweep`` predicts them there.
"""

from collections.abc import Iterator, Sequence

from published import Options, Prediction, Row, Skipped, families

OLDER = ("sdpa-gpt2", "sdpa-gptneox")
"Families whose pages were written for 4.43: its GPT-2 and GPT-NeoX are those of the tables."


def rows(published: Sequence[Row], options: Options) -> Iterator[Prediction | Skipped]:
    """Predict the rows, each family in a process with its transformers."""
    older = [row for row in published if row.family in OLDER]
    newer = [row for row in published if row.family not in OLDER]
    for group, python, option in (
        (newer, options.python_446, "--python-446"),
        (older, options.python_443, "--python-443"),
    ):
        if not group:
            continue
        if python:
            yield from families.predict("sdpa_sweep", group, options, python=python)
        else:
            yield from (Skipped(row.id, f"needs the transformers of its time: {option} was not given") for row in group)
