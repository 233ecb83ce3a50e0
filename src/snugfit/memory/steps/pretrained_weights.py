"""``from_pretrained`` inside of a trace: the shapes and types of the weights in a file, not their values.

Entry point: ``without_values``, for transformers from 5.0, whose threads read files and move weights where no mode of
torch's sees it. Earlier versions read the files for real.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from snugfit.memory import torch_private
from snugfit.memory.recording import Recorder

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"Names of safetensors."


@contextmanager
def without_values(recorder: Recorder) -> Iterator[None]:
    """Let transformers make fake weights where it would read them, in the thread that traces."""
    loading: Any = sys.modules.get("transformers.core_model_loading")
    if not hasattr(loading, "_materialize_copy"):
        yield
        return

    def materialise(weight: Any, device: Any = None, dtype: Any = None) -> Tensor:
        known = _TYPES.get(weight.get_dtype()) if hasattr(weight, "get_dtype") else None
        if known is not None:
            made = torch.empty(weight.get_shape(), dtype=known, device="cpu")
        else:
            with torch_private.no_modes():
                read = weight[...]
            made = recorder.faked(read)
        return made if device is None and dtype is None else made.to(device=device, dtype=dtype)

    with (
        mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}),
        mock.patch.object(loading, "_materialize_copy", materialise),
    ):
        yield
