"""Where model libraries act differently on fake tensors than on real ones, and how a trace puts that right.

Entry point: ``as_with_real_tensors``. Only libraries that are already imported are touched, and only for the length
of a trace. Each rule says what it assumes.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def as_with_real_tensors() -> Iterator[tuple[str, ...]]:
    """Let libraries take the way that they take with real tensors; gives the sentences of what is assumed.

    transformers looks at position ids for several sequences packed into one row. It cannot read fake ones, so it
    plays safe and makes a mask of every pair of positions, which also keeps the flash kernel of attention away.
    Assumed: sequences are not packed. A padding mask that a batch holds is always taken to mask something.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "find_packed_sequence_indices"):
        yield ()
        return
    with mock.patch.object(masking, "find_packed_sequence_indices", return_value=None):
        yield ("transformers models: sequences are not packed into one row, and a padding mask masks something",)
