"""DistributedDataParallel in a trace: the buckets in which gradients are reduced, and when they are made.

Entry points: ``wrapping_alone``, a context in which DDP wraps without other processes, and ``over_ranks`` for a job
whose plan shards by DDP. Left out: what NCCL holds outside of the allocator, which the report names, and hooks that
compress gradients.

NOTE [What DDP allocates] (torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp of torch 2.13;
each of 1 to 4 is measured on two gloo processes in tests/test_data_parallel_memory.py)
1. Wrapping sends the weights and buffers of rank 0: those of one type are copied into flat tensors of up to 250 MiB,
   two of them at a time. One tensor alone is sent as it is.
2. Then there is one bucket for all gradients of a type. With ``find_unused_parameters`` the buckets are those of 3 from
   the beginning and stay, over the parameters in reverse order.
3. The first forward after the first reduction lets that bucket go and makes the final ones, over the gradients in the
   order of their arrival: a bucket ends with the gradient that reaches its limit, 1 MiB for the first and
   ``bucket_cap_mb`` (25 MiB) for all others.
4. A gradient is copied into its bucket and back: one more copy of all gradients, for as long as the wrapper lives. With
   ``gradient_as_bucket_view`` it becomes a view of its bucket as it arrives; what autograd made for it, since it was
   None or micro-steps did not reduce, lives until then.
5. A forward that follows one that reduced sends rank 0's buffers, as in 1.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from snugfit import sizes
from snugfit.errors import UnsupportedError
from snugfit.jobs import Job
from snugfit.memory.recording import Recorder
from snugfit.plans import Plan
from snugfit.training import distributed

_Tensor = TypeVar("_Tensor", bound=Tensor)

_FIRST_BUCKET_BYTES = sizes.MIB
_BUCKET_MIB = 25
_BROADCAST_BYTES = 250 * sizes.MIB
_BROADCASTS_AT_A_TIME = 2
_NOT_FOLLOWED = ("mixed_precision", "delay_all_reduce_named_params", "bucket_cap_mb_list")


def over_ranks(job: Job, plan: Plan, copied: Callable[[nn.Module], Callable[[], nn.Module]]) -> tuple[Job, Plan]:
    """The job and the plan of one rank whose model is wrapped in DDP where the plan says so or the job did it.

    Args:
        job: Its model may be wrapped already, in processes that train together: the options stay.
        plan: How.
        copied: Makes a builder of a module's twin.
    """
    given = job.model
    wrapped = given if isinstance(given, DistributedDataParallel) else None
    if wrapped is None and plan.shard != "ddp":
        return (replace(job, model=copied(given)) if isinstance(given, nn.Module) else job), plan
    options: dict[str, Any] = {}
    if wrapped is not None:
        given = wrapped.module
        names = ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
        options = {name: getattr(wrapped, name) for name in names}
        if wrapped.bucket_bytes_cap != _BUCKET_MIB * sizes.MIB:
            options["bucket_cap_mb"] = wrapped.bucket_bytes_cap / sizes.MIB
    builder: Callable[[], nn.Module] = copied(given) if isinstance(given, nn.Module) else given
    optimizer = job.optimizer
    parallel = replace(
        job,
        model=lambda: DistributedDataParallel(builder(), **options),
        optimizer=lambda model: optimizer(model if wrapped is not None else model.module),
    )
    return parallel, replace(plan, shard="none")


@contextmanager
def wrapping_alone(recorder: Recorder, assume: Callable[[str], None]) -> Iterator[None]:
    """Let DDP wrap fake modules without a process group, its memory recorded; see the NOTE.

    Args:
        recorder: Of the trace.
        assume: Takes the sentences of what is assumed.
    """
    signature = inspect.signature(DistributedDataParallel.__init__)

    def wrap(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        for name in _NOT_FOLLOWED:
            if options.get(name):
                raise _refusal(f"{name}=", str(options[name]))
        nn.Module.__init__(self)
        self.module = options["module"]
        self.device_ids = options["device_ids"]
        self.find_unused_parameters = options["find_unused_parameters"]
        self.gradient_as_bucket_view = options["gradient_as_bucket_view"]
        self.static_graph = options["static_graph"]
        self.broadcast_buffers = options["broadcast_buffers"] is not False
        self.bucket_bytes_cap = int((options["bucket_cap_mb"] or _BUCKET_MIB) * sizes.MIB)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        first_bytes = self.bucket_bytes_cap if options["bucket_cap_mb"] else _FIRST_BUCKET_BYTES
        self.reducer = Buckets(self, (first_bytes, self.bucket_bytes_cap), recorder)
        assume(
            "DDP: gradients are views of its buckets"
            if self.gradient_as_bucket_view
            else "DDP: its buckets hold one more copy of all gradients (none with gradient_as_bucket_view=True)"
        )
        assume("NCCL's own buffers lie outside of the allocator and are not counted: measure them on your cards")

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        self.reducer.begin_forward()
        output = self.module(*inputs, **kwargs)
        self.reducer.end_forward()
        return output

    def no_hooks(self: Any, *args: Any, **kwargs: Any) -> None:
        raise _refusal("a communication hook", "register_comm_hook")

    patches: dict[str, Any] = {"__init__": wrap, "forward": forward, "register_comm_hook": no_hooks}
    with (
        mock.patch.multiple(DistributedDataParallel, **patches),
        # A trace in a process of a running group stays its own: no message with fake tensors.
        mock.patch.object(distributed, "world_size", return_value=1),
    ):
        yield


class Buckets:
    """The buckets of one wrapped module, from its wrapping to the end of the trace.

    Args:
        wrapper: The DDP module, whose flags say when it reduces.
        limits: Bytes at which the first bucket ends, and every other one.
        recorder: Writes down what is made here.
    """

    def __init__(self, wrapper: Any, limits: tuple[int, int], recorder: Recorder) -> None:
        self._wrapper = wrapper
        self._limits = limits
        self._recorder = recorder
        self._parameters = [parameter for parameter in wrapper.module.parameters() if parameter.requires_grad]
        self._is_final = wrapper.find_unused_parameters and not wrapper.static_graph
        self._reduces = False
        self._arrived: list[nn.Parameter] = []
        self._flat: list[Tensor] = []
        self._views: dict[int, Tensor] = {}
        self._broadcast([*wrapper.module.parameters(), *wrapper.module.buffers()])
        if self._is_final:
            self._make(list(reversed(assign(self._parameters, limits))))
        else:
            self._make(assign(self._parameters, None))
        # A hook on the node that accumulates, as DDP's own, leaves alone how autograd stores a gradient.
        self._nodes = [_accumulator(parameter) for parameter in self._parameters]
        for node, parameter in zip(self._nodes, self._parameters, strict=True):
            node.register_hook(self._arrival(parameter))

    def begin_forward(self) -> None:
        """What happens before the wrapped module runs: the final buckets are made, buffers are sent."""
        if torch.is_grad_enabled() and not self._is_final and len(self._arrived) == len(self._parameters):
            self._is_final = True
            self._flat, self._views = [], {}
            self._make(assign(self._arrived, self._limits))
        if self._wrapper.require_forward_param_sync and self._wrapper.broadcast_buffers:
            self._broadcast(list(self._wrapper.module.buffers()))

    def end_forward(self) -> None:
        """What happens afterwards: the wrapper expects gradients, unless it does not reduce them."""
        reduces = torch.is_grad_enabled() and self._wrapper.require_backward_grad_sync
        self._wrapper.require_forward_param_sync = reduces
        if reduces:
            self._reduces, self._arrived = True, []

    def _arrival(self, parameter: nn.Parameter) -> Callable[[Any, Any], None]:
        def arrived(*_: Any) -> None:
            if not self._reduces:
                return
            self._arrived.append(parameter)
            self._reduces = len(self._arrived) < len(self._parameters)
            if self._wrapper.gradient_as_bucket_view:
                parameter.grad = self._views[id(parameter)]

        return arrived

    def _make(self, buckets: Sequence[Sequence[nn.Parameter]]) -> None:
        with torch.no_grad():
            for bucket in buckets:
                flat = bucket[0].detach().new_empty(sum(parameter.numel() for parameter in bucket))
                self._recorder.categorise([flat], "gradient", "")
                self._flat.append(flat)
                parts = torch.split(flat, [parameter.numel() for parameter in bucket])
                for parameter, part in zip(bucket, parts, strict=True):
                    view = part.view(parameter.shape)
                    self._views[id(parameter)] = view
                    if self._wrapper.gradient_as_bucket_view and parameter.grad is not None:
                        parameter.grad = view

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Rule 1 of the NOTE."""
        held: list[int] = []
        for bucket in assign(tensors, (_BROADCAST_BYTES, _BROADCAST_BYTES)):
            if len(held) == _BROADCASTS_AT_A_TIME:
                self._recorder.release(held.pop(0))
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in bucket)
            held.append(self._recorder.allocate(num_bytes if len(bucket) > 1 else 0, "temporary", "DDP broadcast"))
        for allocation in held:
            self._recorder.release(allocation)


def assign(tensors: Iterable[_Tensor], limits: tuple[int, int] | None) -> list[list[_Tensor]]:
    """Put tensors into buckets of one type each, in the order of their first members.

    A bucket ends with the tensor that reaches its limit.

    Args:
        tensors: In the order in which they are dealt out.
        limits: Bytes of the first bucket of each type and of its others; None for one bucket a type.
    """
    given = list(tensors)
    open_buckets: dict[torch.dtype, list[int]] = {}
    num_bytes: dict[torch.dtype, int] = {}
    ended: dict[torch.dtype, int] = {}
    filled: list[list[int]] = []
    for index, tensor in enumerate(given):
        dtype = tensor.dtype
        open_buckets.setdefault(dtype, []).append(index)
        num_bytes[dtype] = num_bytes.get(dtype, 0) + tensor.numel() * tensor.element_size()
        if limits is not None and num_bytes[dtype] >= limits[min(ended.get(dtype, 0), 1)]:
            filled.append(open_buckets.pop(dtype))
            num_bytes[dtype] = 0
            ended[dtype] = ended.get(dtype, 0) + 1
    filled.extend(open_buckets.values())
    return [[given[index] for index in bucket] for bucket in sorted(filled)]


def _accumulator(parameter: nn.Parameter) -> Any:
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return node.next_functions[0][0]


def _refusal(what: str, got: str) -> UnsupportedError:
    return UnsupportedError(
        f"DDP with {what} cannot be traced",
        got=got,
        expected="buckets that are reduced as they are",
        hint="trace without it, and add what it holds beside the buckets",
        op="DistributedDataParallel",
    )
