"""Makes fake CPU tensors behave as CUDA tensors while a step is traced.

Entry point: ``cuda_semantics``, a context. The kernels that autograd sees are replaced where composite operators
branch on the device type: ``autocast`` lists and cache, ``kernels``, ``attention``; optimizers take their foreach
form. What is allocated beside the tensors is ``workspaces``'s.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.library import fallthrough_kernel

from snugfit.memory import torch_private
from snugfit.memory.cuda import autocast, autocast_state, kernels, normalisation, recurrent
from snugfit.memory.cuda.attention import ScaledDotProductAttention
from snugfit.memory.cuda.target import of_capability

aten: Any = torch.ops.aten


@contextmanager
def cuda_semantics(
    compute_capability: tuple[int, int],
    on_weight_cast: Callable[[Tensor], None] = lambda cast: None,
    assume: Callable[[str], None] = lambda sentence: None,
) -> Iterator[None]:
    """Make fake CPU tensors behave as CUDA tensors for as long as the context lasts.

    The kernels are replaced for the whole process (torch has one dispatcher), so nothing else should run torch
    code under CPU autocast meanwhile; all is undone at the end.

    Args:
        compute_capability: Of the target, such as ``(8, 6)``; decides which attention kernel runs.
        on_weight_cast: Called with every cast of a weight that autocast keeps.
        assume: Called with what a kernel had to assume, in words.
    """
    casts = autocast.CastCache(on_weight_cast)
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verrid.*")
        stack.callback(library._destroy)
        for name in torch_private.autocast_registrations("AutocastCPU"):
            # CUDA lets these pass, so that the operators that they are made of see autocast.
            _impose(library, name, fallthrough_kernel, "AutocastCPU")
        for name in torch_private.autocast_registrations("AutocastCUDA"):
            if name not in autocast.NOT_IMPOSED:
                _impose(library, name, autocast.kernel_for(name, casts), "AutocastCPU")
        for namespace, kernels_of_its in autocast.of_other_libraries(assume).items():
            its: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
            stack.callback(its._destroy)
            for name, kernel in kernels_of_its.items():
                _impose(its, name, kernel, "AutocastCPU")
        _impose(library, "dropout", kernels.dropout, "AutogradCPU")
        target = of_capability(compute_capability)
        _impose(library, "scaled_dot_product_attention", ScaledDotProductAttention(target), "AutogradCPU")
        fused_rms_norm = normalisation.rms_norm(target)
        if fused_rms_norm is not None:
            _impose(library, "rms_norm", fused_rms_norm, "AutogradCPU")
        for name, kernel in recurrent.kernels(assume).items():
            _impose(library, name, kernel, "AutogradCPU")
        # Which lays all weights behind each other: as many bytes, in one tensor instead of several.
        stack.enter_context(mock.patch.object(nn.RNNBase, "flatten_parameters", return_value=None))
        _impose(library, "softmax.int", kernels.softmax(aten._softmax), "AutogradCPU")
        _impose(library, "log_softmax.int", kernels.softmax(aten._log_softmax), "AutogradCPU")
        stack.enter_context(torch_private.foreach_for_fake_tensors())
        stack.enter_context(torch_private.autocast_as_cpu(casts.clear))
        stack.enter_context(autocast_state.answered_for_cuda())
        yield


def _impose(library: Any, name: str, kernel: Callable[..., Any], key: str) -> None:
    library.impl(name, kernel, key, allow_override=True)
