"""Memory that cuBLAS takes and keeps beside the tensors of a step: one workspace per thread that multiplies.

Entry points: ``cublas_workspace_bytes``, ``cublaslt_workspace_bytes`` and ``Workspaces``. Rules:
ATen/cuda/CublasHandlePool.cpp. Left out: cuDNN's workspaces, which only a GPU can tell.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from snugfit.errors import PlanError
from snugfit.memory.cuda.target import Target
from snugfit.memory.events import Call
from snugfit.memory.recording import Recorder
from snugfit.sizes import KIB, MIB

_DEFAULT_BYTES = 2 * 4 * MIB + 8 * 16 * KIB
_LARGE_BYTES = 32 * MIB
_LARGE_SINCE = {9: (2, 0), 10: (2, 12), 11: (2, 14), 12: (2, 12)}
"""First torch in which a major compute capability has 32 MiB.

Sources: pytorch/pytorch#89027 (9), #175344 (10 and 12), #189312 (11); in the CUDA wheel of 2.14.1 the compiled
``parseChosenWorkspaceSize`` compares the major capability with 9 to 12. Published traces of torch 2.6 show
33,554,432 B on 9.0, of 2.11 8,519,680 B below.
"""
_LT_DEFAULT_KIB = 1024
_LT_CACHED_SINCE, _LT_SHARED_SINCE = (2, 9), (2, 12)
"""From when cuBLASLt keeps its workspace, and from when it has none of its own but uses that of cuBLAS.

Sources: pytorch/pytorch#156495, #168175 with #175879. Before, every call takes and frees one: 1 MiB per call explains
nvidia-smi readings of MLP jobs of 2024.
"""
_UNCACHED_SINCE = (2, 15)
"From this torch on a workspace is allocated per call and freed: pytorch/pytorch#194311."

_PAIR = re.compile(r":([0-9]+):([0-9]+)")

HANDLE_OPERATIONS = frozenset(
    """mm.default mm.out mm.dtype addmm.default addmm.out addmm_.default _addmm_activation.default bmm.default bmm.out
    bmm.dtype baddbmm.default baddbmm.out baddbmm_.default addbmm.default mv.default addmv.default addmv_.default
    dot.default vdot.default _int_mm.default linalg_lu_factor_ex.default linalg_solve_triangular.default
    triangular_solve.default lu_solve.default""".split()
)
"Operations that ask for a cuBLAS handle. Source: ATen/native/cuda/Blas.cpp, linalg/BatchLinearAlgebraLibBlas.cpp."


def cublas_workspace_bytes(target: Target, environment: Mapping[str, str] = os.environ) -> int:
    """Bytes of one cuBLAS workspace; a training step holds two, as backward runs on a thread of its own.

    Args:
        target: The card and torch.
        environment: Where ``CUBLAS_WORKSPACE_CONFIG`` is looked up, such as ``:4096:8`` (KiB and count, any number
            of pairs).

    Raises:
        PlanError: The setting cannot be read; torch itself would warn and take its default.
    """
    setting = environment.get("CUBLAS_WORKSPACE_CONFIG")
    if setting is None:
        since = _LARGE_SINCE.get(target.compute_capability[0])
        return _LARGE_BYTES if since is not None and target.torch_version >= since else _DEFAULT_BYTES
    pairs = _PAIR.findall(setting)
    if not pairs or "".join(f":{size}:{count}" for size, count in pairs) != setting:
        raise PlanError(
            "CUBLAS_WORKSPACE_CONFIG cannot be read",
            got=setting,
            expected="pairs of a size in KiB and a count, such as :4096:8 or :4096:2:16:8; :0:0 for none",
            hint="unset CUBLAS_WORKSPACE_CONFIG, or set it to what the training run will have",
        )
    return sum(int(size) * KIB * int(count) for size, count in pairs)


def cublaslt_workspace_bytes(target: Target, environment: Mapping[str, str] = os.environ) -> int:
    """Bytes of the workspace that cuBLASLt has of its own; 0 where it shares that of cuBLAS.

    Raises:
        PlanError: ``CUBLASLT_WORKSPACE_SIZE`` is no number of KiB.
    """
    setting = environment.get("CUBLASLT_WORKSPACE_SIZE", str(_LT_DEFAULT_KIB))
    if not setting.strip().isdecimal():
        raise PlanError(
            "CUBLASLT_WORKSPACE_SIZE cannot be read",
            got=setting,
            expected="a whole number of KiB, such as 1024",
            hint="unset CUBLASLT_WORKSPACE_SIZE, or set it to what the training run will have",
        )
    shared = environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "")
    by_default = target.torch_version >= _LT_SHARED_SINCE
    is_shared = shared in ("1", "true", "TRUE") if shared else by_default
    return 0 if is_shared else int(setting) * KIB


def fuses_bias(args: Sequence[Any]) -> bool:
    """Whether ``addmm`` goes through cuBLASLt: a bias of one dimension, matrices with several rows and columns.

    Rule: ``isInputCompliesAddmmCudaLt`` in ATen/native/cuda/Blas.cpp.
    """
    bias, first, second = args[:3]
    return (
        bias.dim() == 1
        and bias.is_contiguous()
        and bias.shape[0] == second.shape[1]
        and first.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        and min(*first.shape, *second.shape) > 1
    )


class Workspaces:
    """Allocates the workspaces: one for the forward's thread, one for backward's, each at its first use."""

    def __init__(self, target: Target) -> None:
        cache = os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE")
        cached = target.torch_version < _UNCACHED_SINCE or cache == "1"
        self._blas = cublas_workspace_bytes(target), cached
        self._lt = cublaslt_workspace_bytes(target), cached and target.torch_version >= _LT_CACHED_SINCE
        self._held: set[tuple[str, bool]] = set()

    def __call__(self, call: Call, recorder: Recorder) -> None:
        """Look at one operation that needs a handle, whose results are recorded already."""
        self._take("cuBLAS", *self._blas, call, recorder)
        if self._lt[0] and call.name == "addmm.default" and fuses_bias(call.args):
            self._take("cuBLASLt", *self._lt, call, recorder)

    def _take(self, library: str, num_bytes: int, cached: bool, call: Call, recorder: Recorder) -> None:
        if not num_bytes:
            return
        if not cached:
            recorder.release(recorder.allocate(num_bytes, "workspace", f"{library} workspace"))
        elif (library, call.phase == "backward") not in self._held:
            self._held.add((library, call.phase == "backward"))
            recorder.allocate(num_bytes, "workspace", f"{library} workspace")
