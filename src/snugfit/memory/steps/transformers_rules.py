"""Where transformers reads values of masks and token ids, which fake tensors do not have, and what is assumed there.

Entry point: ``rules``, a context, for transformers 4.43 to 5. Only what is already imported is touched. Left out: the
copy of a mask by which 4.x un-masks rows without any position, alive for one operation at the start of a forward.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from snugfit.memory import torch_private

PADDING = "transformers models: a padding mask masks something"
PACKING = "transformers models: sequences are not packed into one row"


@contextmanager
def rules(
    made_by: Callable[[Tensor], str], read: Callable[[Tensor], Tensor | None], assume: Callable[[str], None]
) -> Iterator[None]:
    """Let transformers take the way that it takes with real tensors.

    1. Before 5.0 models warn where the first or last token is the padding token: the warning is left out.
    2. A mask is dropped where it masks nothing, which lets attention take its flash kernel. One that the model makes
       itself of ones, for want of a given one, masks nothing; one whose values nobody knows masks something.
    3. From 4.53 on position ids are searched for several sequences packed into one row; transformers does not look
       into fake ones and makes a mask of every pair of positions. Sequences of unknown positions are not packed.

    Args:
        made_by: The operation that made a tensor's storage, such as ``ones.default``.
        read: The values of a tensor; None where the trace does not know them.
        assume: Called with the sentence of what is assumed, where it is.
    """
    if "transformers" not in sys.modules:
        yield
        return

    def is_ones(mask: Tensor) -> bool:
        if made_by(mask) in ("ones.default", "ones_like.default", "new_ones.default"):
            return True
        values = read(mask)
        if values is None:
            assume(PADDING)
            return False
        with torch_private.without_modes():
            return bool((values == 1).all())

    def find_packed(original: Any) -> Any:
        def find(position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            values = read(position_ids)
            if values is None:
                assume(PACKING)
                return None
            with torch_private.without_modes():
                follow_each_other = bool((values.diff(dim=-1) == 1).all())
            return None if follow_each_other else original(position_ids, *args, **kwargs)

        return find

    with ExitStack() as stack:
        models: Any = sys.modules.get("transformers.modeling_utils")
        model = getattr(models, "PreTrainedModel", None)
        if hasattr(model, "warn_if_padding_and_no_attention_mask"):
            stack.enter_context(mock.patch.object(model, "warn_if_padding_and_no_attention_mask", _without_warning))
        masking: Any = sys.modules.get("transformers.masking_utils")
        if hasattr(masking, "find_packed_sequence_indices"):
            _replace(stack, masking, "find_packed_sequence_indices", find_packed)
        if hasattr(masking, "_ignore_causal_mask_sdpa"):
            _replace(stack, masking, "_ignore_causal_mask_sdpa", _ignoring("padding_mask", is_ones))
        before: Any = sys.modules.get("transformers.modeling_attn_mask_utils")
        converter: Any = getattr(before, "AttentionMaskConverter", None)
        if hasattr(converter, "_ignore_causal_mask_sdpa"):
            wrapped = staticmethod(_ignoring("attention_mask", is_ones)(converter._ignore_causal_mask_sdpa))
            stack.enter_context(mock.patch.object(converter, "_ignore_causal_mask_sdpa", wrapped))
        if hasattr(before, "_prepare_4d_attention_mask_for_sdpa"):
            _replace(stack, before, "_prepare_4d_attention_mask_for_sdpa", _expanding(converter, is_ones))
        yield


def _without_warning(*_: Any) -> None:
    """Of its own, not a mock's return value: a mock remembers its arguments and would keep every batch alive."""


def _replace(stack: ExitStack, home: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Wrap a function in its module and in the models that imported it by name."""
    original = getattr(home, name)
    for module in [home, *(m for key, m in list(sys.modules.items()) if key.startswith("transformers.models."))]:
        if vars(module).get(name) is original:
            stack.enter_context(mock.patch.object(module, name, wrap(original)))


def _ignoring(argument: str, is_ones: Callable[[Tensor], bool]) -> Callable[[Any], Any]:
    """A causal mask is left to the kernel if no mask is given, or one of ones; never if another is given."""

    def wrap(original: Any) -> Any:
        signature = inspect.signature(original)

        def ignore(*args: Any, **kwargs: Any) -> bool:
            bound = signature.bind(*args, **kwargs)
            mask = bound.arguments.get(argument)
            if mask is not None:
                if not is_ones(mask):
                    return False
                bound.arguments[argument] = None
            return bool(original(*bound.args, **bound.kwargs))

        return ignore

    return wrap


def _expanding(converter: Any, is_ones: Callable[[Tensor], bool]) -> Callable[[Any], Any]:
    """A mask of ones is dropped, another one expanded to one value per pair of positions."""

    def wrap(_: Any) -> Any:
        def prepare(mask: Tensor, dtype: Any, tgt_len: int | None = None) -> Any:
            if is_ones(mask):
                return None
            return converter._expand_mask(mask=mask, dtype=dtype, tgt_len=mask.shape[1] if tgt_len is None else tgt_len)

        return prepare

    return wrap
