"""What only a card can tell, said in words: the scratch memory of cuDNN.

Entry point: ``Unknown``. It looks at operations that go to cuDNN and bounds what it can.
"""

import math

import torch
from torch import Tensor

from snugfit import sizes
from snugfit.memory.events import Call

CONVOLUTIONS = ("convolution.default", "convolution_backward.default")
CUDNN_ATTENTION = ("_scaled_dot_product_cudnn_attention.default",)
SORTS = ("sort.default", "sort.stable")
WATCHED = frozenset([*CONVOLUTIONS, *CUDNN_ATTENTION, *SORTS])
_SORTED_IN_PLACE = 4096
"Length up to which a row is sorted in shared memory: native/cuda/Sort.cpp, ``should_use_small_sort``."


class Unknown:
    """Collects what was seen that no rule can size, for the report's assumptions."""

    def __init__(self) -> None:
        self._largest = 0
        self._has_attention = False
        self._has_sort = False

    def see(self, call: Call) -> None:
        """Look at one operation."""
        if call.name in CUDNN_ATTENTION:
            self._has_attention = True
        elif call.name in SORTS:
            tensor = call.args[0]
            dim = call.kwargs.get("dim", call.args[1] if call.name == "sort.default" and len(call.args) > 1 else -1)
            self._has_sort |= tensor.dim() > 0 and tensor.shape[dim] > _SORTED_IN_PLACE
        elif call.name == CONVOLUTIONS[0]:
            self._largest = max(self._largest, lowered_bytes(call.args[1], call.result))

    @property
    def sentences(self) -> list[str]:
        """What is assumed."""
        found = []
        if self._largest:
            search = "on, the first window tries several algorithms" if torch.backends.cudnn.benchmark else "off"
            found.append(
                "convolutions: cuDNN's workspace is not counted, only the card can tell; the largest convolution "
                f"lowered to one matrix product would take {sizes.text(self._largest)} more (algorithm search: "
                f"{search}; CUDNN_CONV_WSCAP_DBG caps it in MiB)"
            )
        if self._has_attention:
            found.append("attention by cuDNN: what its engines take beside the frontend's buffers is not counted")
        if self._has_sort:
            found.append(f"sorting rows of more than {_SORTED_IN_PLACE} elements: the scratch memory is not counted")
        return found


def lowered_bytes(weight: Tensor, output: Tensor) -> int:
    """Bytes of a convolution's input with every window of the kernel written out: what explicit algorithms take."""
    inputs_per_output = math.prod(weight.shape[1:])
    positions = output.shape[0] * math.prod(output.shape[2:])
    groups = max(1, output.shape[1] // weight.shape[0])
    return int(inputs_per_output * positions * groups * output.element_size())
