"""Memory that CUDA's libraries take and keep beside the tensors of a step: the workspaces of cuBLAS.

Entry points: ``cublas_workspace_bytes`` and ``Workspaces``. Those of cuDNN are left out: only a GPU can tell them.
"""

from snugfit.memory.events import Call
from snugfit.memory.recording import Recorder
from snugfit.sizes import MIB

CUBLAS_WORKSPACE_BYTES = {9: 32 * MIB}
"cuBLAS workspace by major compute capability, per handle and stream; memory-rules.md section 3."
CUBLAS_WORKSPACE_DEFAULT_BYTES = 2 * 4 * MIB + 8 * 16 * 1024


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace; a training step holds two, as backward runs on a thread of its own."""
    return CUBLAS_WORKSPACE_BYTES.get(compute_capability[0], CUBLAS_WORKSPACE_DEFAULT_BYTES)


_MATRIX_PRODUCTS = ("mm.default", "addmm.default", "bmm.default", "baddbmm.default")


class Workspaces:
    """Allocates the cuBLAS workspaces: one for the forward's thread, one for backward's, each at its first use."""

    def __init__(self, compute_capability: tuple[int, int]) -> None:
        self._num_bytes = cublas_workspace_bytes(compute_capability)
        self._held: set[bool] = set()

    def __call__(self, call: Call, recorder: Recorder) -> None:
        """Look at one operation, whose results are recorded already."""
        if call.name in _MATRIX_PRODUCTS and (call.phase == "backward") not in self._held:
            self._held.add(call.phase == "backward")
            recorder.allocate(self._num_bytes, "workspace", "cuBLAS workspace")
