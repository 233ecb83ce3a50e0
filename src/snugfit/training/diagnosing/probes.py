"""Watches a window for the first value that is not finite: which operation of which module made it, and when.

Entry point: ``Watch``. Only public hooks are used: a ``TorchFunctionMode`` in the forward; gradients are
``backward``'s. A fused operation is one operation here; what to do about a finding is ``remedies``'s.

NOTE [Whose fault a value is]
1. A value is finite (0), infinite (1) or NaN (2). An operation is an origin if its output is worse than the worst of
   its inputs. A mask that is filled with the number -inf on purpose is none.
2. What an origin made is tainted, and so is what is computed from it as long as it is not finite. Only an origin
   whose taint reaches the loss is to blame: -inf that softmax takes away is harmless. The earliest is reported.
3. Non-finite data, weights and buffers taint like origins, and so does NaN in a tensor that no operation of the window
   made. A buffer in which only -inf is not finite is a mask, and taints nothing.
4. A recomputation repeats a forward that was watched: only the outputs of its modules are looked at, and one that is
   worse than the first time is to blame.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.weak import WeakTensorKeyDictionary

from snugfit.jobs import Loss
from snugfit.training import splitting
from snugfit.training.diagnosing import operands, operations, ranges, user_hooks
from snugfit.training.diagnosing.backward import Gradients
from snugfit.training.diagnosing.origins import LOSS_FUNCTION, WORDS, Evidence, Origin
from snugfit.training.diagnosing.ranges import HeadRoom, badness, largest, num_bad, type_name
from snugfit.training.recomputation import is_recomputing
from snugfit.training.regions import repeated_to_the_end
from snugfit.training.torch_private import in_backward

_MAX_OPERANDS = 3


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
        self._unwritten: Any = WeakTensorKeyDictionary()
        self._forward: list[Origin] = []
        self._gradients = Gradients(model, self._forward)
        self._levels: dict[str, int] = {}
        self._batch: Any = None
        self._of_loss: Origin | None = None
        self._operands = operands.Operands(model)
        self._handles: list[Any] = []
        self._replaced: list[tuple[Any, Any]] = []
        self._rooms: dict[tuple[str, str], HeadRoom] = {}
        self._weights = self._bad_weights()

    # ---- what the window calls, in this order

    @contextmanager
    def installed(self) -> Iterator["Watch"]:
        """Hooks on all modules, taken off again."""
        try:
            for name, module in self._model.named_modules():
                self._handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
                self._handles.append(module.register_forward_hook(self._leaving(name), always_call=True))
                self._stand_below(name, module)
            yield self
        finally:
            for holder, own in reversed(self._replaced):
                holder.own = own
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._gradients.remove()

    def begin(self, micro_batch: int) -> None:
        """A micro-batch begins.

        Raises:
            Enough: The one before failed.
        """
        self._gradients.look()
        if self.found is not None:
            raise Enough
        self._micro_batch, self._of_loss = micro_batch, None
        self._forward.clear()
        self._levels.clear()
        self._gradients.begin(micro_batch)

    def moved(self, micro_batch: Any) -> Any:
        """The micro-batch is on the device: what is not finite in it is tainted."""
        self._batch = micro_batch
        for path, tensor in splitting.named_tensors(micro_batch):
            level = badness(tensor)
            if level:
                share = f"{num_bad(tensor)} of {tensor.numel()} values, {WORDS[level]}"
                cause = f"the input of micro-batch {self._micro_batch} is not finite: {path} ({share})"
                self._taint(tensor, (Origin("data", "", f"input {path}", "forward", self._micro_batch, cause),))
        return micro_batch

    def loss(self, model: nn.Module, micro_batch: Any) -> Any:
        """Run the loss function under watch."""
        self._is_forward = True
        try:
            with self, set_checkpoint_early_stop(False), repeated_to_the_end():  # there is an output to look at
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
        self._gradients.look()

    # ---- what was seen

    @property
    def found(self) -> Origin | None:
        """Who is to blame, if the present micro-batch is the one that fails."""
        return self._of_loss or self._gradients.found

    @property
    def suspected(self) -> Origin | None:
        """Who made the first gradient that is not finite, should the window fail for no other reason."""
        return self._gradients.first

    @property
    def bad_parameters(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient is not finite."""
        return self._gradients.bad_parameters

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
        if op == "register_hook":
            user_hooks.noted(args[0], args[1])
            return func(*args, **kwargs)
        inputs = list(operations.leaves((args, kwargs)))
        tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        if not all(map(ranges.is_readable, tensors)):
            return func(*args, **kwargs)
        levels = [badness(tensor) for tensor in tensors]
        before = max(levels, default=0)
        is_meant = op in operations.FILLS
        if is_meant and any(isinstance(leaf, float) and math.isinf(leaf) for leaf in inputs):
            before = max(before, 1)
        taint = self._merged(tensors)
        worst = [] if taint else self._worst(inputs, is_meant)
        known = operands.evidence(func, op, args, kwargs, lambda: self._batch)
        is_in_place = getattr(func, "__name__", "").endswith("_")
        size = largest(tensors) if is_in_place else None
        result = func(*args, **kwargs)
        given = args[0] if op == "setitem" else kwargs.get("out")
        target = result if given is None else given
        outputs = [leaf for leaf in operations.leaves(target) if isinstance(leaf, Tensor)]
        if op in operations.UNWRITTEN:
            for output in outputs:
                self._unwritten[output] = True
            return result
        self._measure(op, args, kwargs, outputs)
        number, known = operands.reduced(known, op, args, outputs)
        for output in outputs:
            self._gradients.tag(output, *self._here(), known)
            after = badness(output)
            if after == 0:
                self._taints.pop(output, None)
            elif taint:
                self._taint(output, taint)
            elif after > before or (after == 2 and worst):
                size = largest(tensors) if size is None else size
                self._taint(output, (self._new(op, output, before, after, size, worst, known, number),))
        return result

    def _worst(self, inputs: Sequence[Any], is_meant: bool) -> list[str]:
        """Operands that nothing in the window made and that are not finite, in words; NaN alone where inf is meant."""
        found = []
        for position, leaf in enumerate(inputs, start=1):
            if isinstance(leaf, Tensor):
                level = badness(leaf)
                if level and leaf not in self._unwritten and not (level == 1 and operands.is_mask(leaf)):
                    made = "" if leaf.grad_fn is None else f" made by {leaf.grad_fn.name()}"
                    found.append(self._operands.tensor(position, leaf, made))
            elif isinstance(leaf, float) and (math.isnan(leaf) or (math.isinf(leaf) and not is_meant)):
                found.append(self._operands.number(leaf, self._stack[-1] if self._stack else ""))
        return list(dict.fromkeys(found))[:_MAX_OPERANDS]

    def _here(self) -> tuple[str, str]:
        """The innermost module that runs, and what to call it; the model itself has no name either."""
        if not self._stack:
            return "", f"the {LOSS_FUNCTION}"
        return self._stack[-1], f"module {self._stack[-1]!r}" if self._stack[-1] else "the model itself"

    def _new(
        self,
        op: str,
        output: Tensor,
        before: int,
        after: int,
        size: float,
        worst: Sequence[str],
        known: Evidence | None,
        number: int,
    ) -> Origin:
        module, where = self._here()
        given = " and ".join(worst) or f"inputs that are {'at worst inf' if before else 'finite'}"
        cause = (
            f"{op} in {where} made {WORDS[after]} out of {given}: {num_bad(output)} of {output.numel()} outputs in "
            f"{type_name(output)} (largest {torch.finfo(output.dtype).max:.5g}), largest finite input {size:.4g}"
        )
        if known is not None and known.counted:
            cause += f"; it is {known.counted}"
        if number:
            cause += f"; each output is over {number} value{'' if number == 1 else 's'}"
        kind = "operand" if worst and not any(" made by " in one for one in worst) else "operation"
        return Origin(kind, module, op, "forward", self._micro_batch, cause, known)

    def _unseen(self, what: str, tensor: Tensor) -> Origin:
        if self._forward:
            return self._forward[0]
        op = LOSS_FUNCTION if tensor.grad_fn is None else tensor.grad_fn.name()
        cause = (
            f"the {what} is {WORDS[badness(tensor)]}, out of {op}: a value such as -inf that was put in on purpose "
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
        for kind, what, named in (
            ("weights", "weights are", self._model.named_parameters()),
            ("buffers", "a buffer is", self._model.named_buffers()),
        ):
            for name, tensor in named:
                if badness(tensor) and not (kind == "buffers" and operands.is_mask(tensor)):
                    cause = f"{what} not finite before the window: {name}, {num_bad(tensor)} of {tensor.numel()} values"
                    op = f"{kind.removesuffix('s')} {name}"
                    found[id(tensor)] = Origin(kind, name.rpartition(".")[0], op, "forward", None, cause)
        return found

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            if self._is_forward and not is_recomputing():
                self._look_at(args)
                self._stack.append(name)

        return enter

    def _is_repeating(self) -> bool:
        return is_recomputing() or (not self._is_forward and in_backward())

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
                result = own(*args, **kwargs) if own is not None else type(module).forward(module, *args, **kwargs)
                self._note_level(name, result)
                return result
            finally:
                self._stack.pop()

        self._replaced.append((holder, own))
        holder.own = forward

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._is_forward and not is_recomputing():
                self._look_at(output)
            self._note_level(name, output)
            if self._is_forward and not is_recomputing():
                self._stack.pop()

        return leave

    def _note_level(self, name: str, output: Any) -> None:
        """How bad a module's output is: remembered in its forward, compared with that in a repeated one."""
        was_forward, self._is_forward = self._is_forward, False
        level = max((badness(one) for one in operations.leaves(output) if isinstance(one, Tensor)), default=0)
        self._is_forward = was_forward
        if not self._is_repeating():
            self._levels[name] = max(level, self._levels.get(name, 0))
        elif level > self._levels.get(name, 0):
            self._gradients.repeated(name, f"module {name!r}" if name else "the model itself", level)

    def _look_at(self, value: Any) -> None:
        """See what operations made that cannot be watched, such as custom autograd functions, where modules meet."""
        self._is_forward = False  # what is asked here is no operation of the forward
        for tensor in operations.leaves(value):
            if not isinstance(tensor, Tensor):
                continue
            self._gradients.tag(tensor, *self._here())
            if badness(tensor) == 2 and not self._taints.get(tensor) and not self._of_weight(tensor):
                module, where = self._here()
                op = "an operation that cannot be watched" if tensor.grad_fn is None else tensor.grad_fn.name()
                cause = f"{op} in {where} made NaN: {num_bad(tensor)} of {tensor.numel()} values"
                self._taint(tensor, (Origin("operation", module, op, "forward", self._micro_batch, cause),))
        self._is_forward = True
