"""Watches a window for the first value that is not finite: which operation of which module made it, and when.

Entry point: ``Watch``. Only public hooks are used: a ``TorchFunctionMode`` in the forward, hooks on nodes of the
graph in backward. A fused operation is one operation here; what to do about a finding is ``remedies``'s.

NOTE [Whose fault a value is]
1. A value is finite (0), infinite (1) or NaN (2). An operation is an origin if its output is worse than the worst of
   its inputs. A mask that is filled with the number -inf on purpose is none.
2. What an origin made is tainted, and so is what is computed from it as long as it is not finite. Only an origin
   whose taint reaches the loss is to blame: -inf that softmax takes away is harmless. The earliest is reported.
3. Non-finite data and weights taint like origins. Where the loss is finite, the origin is the first node of backward
   that turned a finite gradient into another; where no node did, it was a sum of gradients.
4. A recomputation repeats a forward that was watched: nothing is recorded in it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from snugfit.jobs import Loss
from snugfit.training import splitting
from snugfit.training.diagnosing import operations, ranges
from snugfit.training.diagnosing.ranges import HeadRoom, badness, largest, num_bad, type_name
from snugfit.training.recomputation import is_recomputing

LOSS_FUNCTION = "loss function"
_WORDS = ("finite", "inf", "NaN")
_TAG = "snugfit module"


@dataclass(frozen=True, slots=True)
class Origin:
    """What made the first value that is not finite."""

    kind: str
    '``"operation" "data" "weights" "sum" "norm"``.'
    module: str
    'Fully qualified; ``""`` for the loss function.'
    op: str
    phase: str
    '``"forward"`` or ``"backward"``.'
    micro_batch: int | None
    cause: str


class Enough(Exception):
    """Ends a run in which a micro-batch was found to fail; later ones are not asked."""


class Watch(TorchFunctionMode):
    """What happens in one run of a window.

    Args:
        model: The plain module, whose names are reported.
        loss: The loss function of the run.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._model, self._loss = model, loss
        self._stack: list[str] = []
        self._is_forward = False
        self._micro_batch: int | None = None
        self._taints: Any = WeakTensorKeyDictionary()
        self._forward: list[Origin] = []
        self._backward: Origin | None = None
        self._of_loss: Origin | None = None
        self._is_broken = False
        self._handles: list[Any] = []
        self._replaced: list[tuple[Any, Any]] = []
        self._rooms: dict[tuple[str, str], HeadRoom] = {}
        self.bad_parameters: tuple[str, ...] = ()
        self._weights = self._bad_weights()

    # ---- what the window calls, in this order

    @contextmanager
    def installed(self) -> Iterator["Watch"]:
        """Hooks on all modules, taken off again."""
        try:
            for name, module in self._model.named_modules():
                self._handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
                self._handles.append(module.register_forward_hook(self._leaving, always_call=True))
                self._stand_below(name, module)
            yield self
        finally:
            for holder, own in reversed(self._replaced):
                holder.own = own
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def begin(self, micro_batch: int) -> None:
        """A micro-batch begins.

        Raises:
            Enough: The one before failed.
        """
        self._look_at_gradients()
        if self.found is not None:
            raise Enough
        self._micro_batch = micro_batch
        self._forward, self._backward, self._of_loss, self._is_broken = [], None, None, False

    def moved(self, micro_batch: Any) -> Any:
        """The micro-batch is on the device: what is not finite in it is tainted."""
        for path, tensor in splitting.named_tensors(micro_batch):
            level = badness(tensor)
            if level:
                share = f"{num_bad(tensor)} of {tensor.numel()} values, {_WORDS[level]}"
                cause = f"the input of micro-batch {self._micro_batch} is not finite: {path} ({share})"
                self._taint(tensor, (Origin("data", "", f"input {path}", "forward", self._micro_batch, cause),))
        return micro_batch

    def loss(self, model: nn.Module, micro_batch: Any) -> Any:
        """Run the loss function under watch."""
        self._is_forward = True
        try:
            with self:
                value = self._loss(model, micro_batch)
        finally:
            self._is_forward = False
        for one in value if isinstance(value, (list, tuple)) else [value]:
            tensor, count = (one.total, one.count) if isinstance(one, Loss) else (one, None)
            if count is not None and bool(count == 0):
                continue  # not back-propagated, whatever its value
            if isinstance(tensor, Tensor) and badness(tensor):
                self._of_loss = self._earliest(self._taints.get(tensor, ())) or self._unseen("loss", tensor)
        return value

    def end(self) -> None:
        """All micro-batches ran; their gradients are there, summed."""
        self._look_at_gradients()

    # ---- what was seen

    @property
    def found(self) -> Origin | None:
        """Who is to blame, if the present micro-batch is the one that fails."""
        return self._of_loss or self._backward

    @property
    def head_room(self) -> tuple[HeadRoom, ...]:
        """Of each exponential and softmax, nearest to its limit first."""
        return tuple(sorted(self._rooms.values(), key=lambda room: room.limit - room.largest))

    # ---- forward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_forward or is_recomputing():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # one operation of many: with its own question answered by no, the operations inside of it are seen
            with mock.patch.object(F, "has_torch_function", return_value=False), self:
                return func(*args, **kwargs)
        op = operations.name(func)
        inputs = list(operations.leaves((args, kwargs)))
        tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        before = max((badness(tensor) for tensor in tensors), default=0)
        if op in operations.FILLS and any(isinstance(leaf, float) and math.isinf(leaf) for leaf in inputs):
            before = max(before, 1)
        taint = self._merged(tensors)
        is_in_place = getattr(func, "__name__", "").endswith("_")
        size = largest(tensors) if is_in_place else None
        result = func(*args, **kwargs)
        if op in operations.UNWRITTEN:
            return result
        target = args[0] if op == "setitem" else kwargs.get("out", result)
        outputs = [leaf for leaf in operations.leaves(target) if isinstance(leaf, Tensor)]
        self._measure(op, args, kwargs, outputs)
        for output in outputs:
            self._tag(output)
            after = badness(output)
            if after == 0:
                self._taints.pop(output, None)
            elif taint:
                self._taint(output, taint)
            elif after > before:
                size = largest(tensors) if size is None else size
                self._taint(output, (self._new(op, output, before, after, size),))
        return result

    def _here(self) -> tuple[str, str]:
        """The innermost module that runs, and what to call it; the model itself has no name either."""
        if not self._stack:
            return "", f"the {LOSS_FUNCTION}"
        return self._stack[-1], f"module {self._stack[-1]!r}" if self._stack[-1] else "the model itself"

    def _new(self, op: str, output: Tensor, before: int, after: int, size: float) -> Origin:
        module, where = self._here()
        number = num_bad(output)
        cause = (
            f"{op} in {where} made {_WORDS[after]} out of inputs that are {'' if before == 0 else 'at worst '}"
            f"{_WORDS[before]}: {number} of {output.numel()} outputs in {type_name(output)} (largest "
            f"{torch.finfo(output.dtype).max:.5g}), largest finite input {size:.4g}"
        )
        return Origin("operation", module, op, "forward", self._micro_batch, cause)

    def _unseen(self, what: str, tensor: Tensor) -> Origin:
        if self._forward:
            return self._forward[0]
        op = LOSS_FUNCTION if tensor.grad_fn is None else tensor.grad_fn.name()
        cause = (
            f"the {what} is {_WORDS[badness(tensor)]}, out of {op}: a value such as -inf that was put in on purpose "
            "reached it, or an operation that cannot be watched made it"
        )
        return Origin("operation", "", op, "forward", self._micro_batch, cause)

    def _measure(self, op: str, args: Any, kwargs: Any, outputs: Sequence[Tensor]) -> None:
        module, _ = self._here()
        room = ranges.head_room(module, op, args, kwargs, outputs)
        if room is not None:
            seen = self._rooms.get((module, op))
            self._rooms[module, op] = room if seen is None else seen.joined(room)

    def _taint(self, tensor: Tensor, origins: tuple[Origin, ...]) -> None:
        self._taints[tensor] = origins
        self._forward += [origin for origin in origins if origin not in self._forward]

    def _merged(self, tensors: Iterable[Tensor]) -> tuple[Origin, ...]:
        found: list[Origin] = []
        for tensor in tensors:
            mine = self._taints.get(tensor) or self._of_weight(tensor)
            found += [origin for origin in mine if origin not in found]
        return tuple(found)

    def _earliest(self, origins: Sequence[Origin]) -> Origin | None:
        return min(origins, key=self._forward.index, default=None)

    def _of_weight(self, leaf: Tensor) -> tuple[Origin, ...]:
        origin = self._weights.get(id(leaf))
        if origin is None:
            return ()
        return (replace(origin, micro_batch=self._micro_batch),)

    def _bad_weights(self) -> dict[int, Origin]:
        found = {}
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            if badness(tensor):
                number = num_bad(tensor)
                cause = f"weights are not finite before the window: {name}, {number} of {tensor.numel()} values"
                found[id(tensor)] = Origin("weights", name.rpartition(".")[0], f"weight {name}", "forward", None, cause)
        return found

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            if self._is_forward and not is_recomputing():
                self._look_at(args)
                self._stack.append(name)

        return enter

    def _stand_below(self, name: str, module: nn.Module) -> None:
        """Also see a module's own forward where a recomputed segment runs it without calling its hooks."""
        holder: Any = module.__dict__.get("forward")
        if not hasattr(holder, "own"):
            return
        while hasattr(holder.own, "own"):
            holder = holder.own
        own = holder.own

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._stack.append(name)
            try:
                return own(*args, **kwargs) if own is not None else type(module).forward(module, *args, **kwargs)
            finally:
                self._stack.pop()

        self._replaced.append((holder, own))
        holder.own = forward

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_forward and not is_recomputing():
            self._look_at(output)
            self._stack.pop()

    def _look_at(self, value: Any) -> None:
        """See what operations made that cannot be watched, such as custom autograd functions, where modules meet."""
        self._is_forward = False  # what is asked here is no operation of the forward
        for tensor in operations.leaves(value):
            if not isinstance(tensor, Tensor):
                continue
            self._tag(tensor)
            if badness(tensor) == 2 and not self._taints.get(tensor) and not self._of_weight(tensor):
                module, where = self._here()
                op = "an operation that cannot be watched" if tensor.grad_fn is None else tensor.grad_fn.name()
                cause = f"{op} in {where} made NaN: {num_bad(tensor)} of {tensor.numel()} values"
                self._taint(tensor, (Origin("operation", module, op, "forward", self._micro_batch, cause),))
        self._is_forward = True

    # ---- backward

    def _tag(self, output: Tensor) -> None:
        """Hook the nodes of the graph that the operation at hand made; others are hooked already."""
        waiting: list[Any] = [output.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or hasattr(node, "variable") or node.metadata.get(_TAG) is self:
                continue
            node.metadata[_TAG] = self
            self._handles.append(node.register_hook(self._passing(node.name(), *self._here())))
            waiting += [before for before, _ in node.next_functions]

    def _passing(self, op: str, module: str, where: str) -> Callable[..., None]:
        def passed(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
            if self._is_broken:
                return
            before = max((badness(gradient) for gradient in outputs if gradient is not None), default=0)
            after = max((badness(gradient) for gradient in inputs if gradient is not None), default=0)
            if before == after == 0:
                return
            self._is_broken = True
            size = largest(gradient for gradient in outputs if gradient is not None)
            if before:
                kind = "sum"
                what = (
                    f"the gradient that reaches {op} in {where} is {_WORDS[before]}, though no operation made it so: a "
                    "sum of gradients, or a hook, did"
                )
            else:
                kind = "operation"
                types = {type_name(gradient) for gradient in inputs if gradient is not None}
                what = f"{op} in {where} made {_WORDS[after]} out of a finite gradient"
                what += f" (largest value {size:.4g}, results in {', '.join(sorted(types))})"
            if self._forward:
                first = self._forward[0]
                what += f"; the forward made a value there that is not finite but did not reach the loss: {first.cause}"
            self._backward = Origin(kind, module, op, "backward", self._micro_batch, what)

        return passed

    def _look_at_gradients(self) -> None:
        """After a micro-batch: a gradient that is not finite although all of its backward was, is a sum that is not."""
        if self._micro_batch is None:
            return
        bad = [name for name, p in self._model.named_parameters() if p.grad is not None and badness(p.grad)]
        self.bad_parameters = tuple(bad)
        if bad and not self._is_broken:
            self._is_broken = True
            cause = (
                f"the gradient of {bad[0]} is not finite, though no operation made it so: its sum over the "
                "micro-batches, or a hook of the parameter, did"
            )
            module = bad[0].rpartition(".")[0]
            self._backward = Origin("sum", module, "gradient accumulation", "backward", self._micro_batch, cause)
