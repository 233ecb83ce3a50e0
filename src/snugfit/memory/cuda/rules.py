"""What CUDA allocates beside the tensors that a step shows: the one object that the recorder calls.

Entry point: ``Rules``. Each operation is looked up by its name; what none of the tables knows costs a look into a
dictionary or two. ``temporaries`` says what lives for the length of a kernel, ``storage_sizes`` which results have
another size on CUDA than the same operation's on a CPU, ``workspaces`` what cuBLAS keeps.
"""

from torch import Tensor

from snugfit.memory.cuda import blas_operands, storage_sizes, temporaries
from snugfit.memory.cuda.target import Target
from snugfit.memory.cuda.unknown import WATCHED, Unknown
from snugfit.memory.cuda.workspaces import HANDLE_OPERATIONS, Workspaces
from snugfit.memory.events import Call, tensors_of
from snugfit.memory.recording import Recorder

_INDEXING = frozenset(["index.Tensor", "index_put.default", "index_put_.default", "_index_put_impl_.default"])
_KNOWN = HANDLE_OPERATIONS | WATCHED | _INDEXING | storage_sizes.SIZES.keys() | temporaries.BUFFERS.keys()


class Rules:
    """Adds to a recording what CUDA's kernels and libraries take, for one target."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._workspaces = Workspaces(target)
        self._unknown = Unknown()

    @property
    def assumptions(self) -> list[str]:
        """What the recording leaves out, in words."""
        return self._unknown.sentences

    def __call__(self, call: Call, recorder: Recorder) -> None:
        """Look at one operation, whose results are recorded already."""
        name = call.name
        if name not in _KNOWN or _is_on_the_host(call, recorder):
            return
        if name in WATCHED:
            self._unknown.see(call)
        for tensor, num_bytes in storage_sizes.SIZES[name](call) if name in storage_sizes.SIZES else ():
            recorder.resize(tensor, num_bytes)
        taken = blas_operands.record(call, recorder) if name in HANDLE_OPERATIONS else []
        if name in HANDLE_OPERATIONS:
            self._workspaces(call, recorder)
        if name in _INDEXING:
            taken += _copies_of_host_indices(call, recorder)
        brief: list[int] = []
        for size in temporaries.BUFFERS[name](call, self._target) if name in temporaries.BUFFERS else ():
            if isinstance(size, int):
                taken.append(recorder.allocate(size, "temporary", name))
                while brief:
                    recorder.release(brief.pop())
            else:
                brief += [recorder.allocate(num_bytes, "temporary", name) for num_bytes in size]
        for allocation in reversed((*brief, *taken)):
            recorder.release(allocation)


def _is_on_the_host(call: Call, recorder: Recorder) -> bool:
    """Whether an operation ran on the host: what a step computes of its batch before it moves it."""
    if not recorder.places.names_device:
        return False
    made = tensors_of(call.result) or tensors_of(call.args[0])
    return bool(made) and recorder.place_of(made[0]) == "host"


def _copies_of_host_indices(call: Call, recorder: Recorder) -> list[int]:
    """Indices on the host are copied to the card for the length of the kernel (TensorAdvancedIndexing.cpp).

    Seen in a published trace: the copy of a forward's index comes before its result.
    """
    if not recorder.places.names_device:
        return []
    indices = [index for index in call.args[1] if isinstance(index, Tensor) and recorder.place_of(index) == "host"]
    copies = [
        recorder.allocate(index.numel() * index.element_size(), "temporary", f"{call.name}, copy of a host index")
        for index in indices
    ]
    events = recorder.recording.events
    if call.name == "index.Tensor" and len(copies) == 1 and events[-2] > 0:
        events[-2:] = events[-1], events[-2]
    return copies
