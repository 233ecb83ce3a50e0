"""bert-large under the Trainer of 2022: ``hfbert-*`` rows, memory that nvidia-smi shows after training.

Entry point: ``rows``. The row that holds nothing but the context is subtracted, so it is no prediction. The optimizers
of transformers that the rows used are gone from its newer versions: ``hfbert_runs`` predicts under 4.46.3.
"""

from collections.abc import Iterator, Sequence

from published import Options, Prediction, Row, Skipped, families


def rows(published: Sequence[Row], options: Options) -> Iterator[Prediction | Skipped]:
    """Predict the rows in a process with transformers 4.46.3."""
    if options.python_446:
        yield from families.predict("hfbert_runs", published, options, python=options.python_446)
    else:
        reason = "needs the transformers of its time: --python-446 was not given"
        yield from (Skipped(row.id, reason) for row in published)
