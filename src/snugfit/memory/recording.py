"""Records a step under fake tensors: every storage's birth and death, and every kernel's work.

Entry point: ``Recorder.recording_on``. The recorder is a fake-tensor mode itself, so that an operation passes one
Python mode. Its ``recording`` is a plain stream of events; replaying it through an allocator and naming who holds
what at the peak is ``tracing``'s. The two rule sets (CUDA, CPU) are ``cuda_rules``'s and torch's own.

NOTE [How a storage gets its name]
1. A storage is born when an operation returns it for the first time, and dies when torch frees it.
2. Phase: ``backward`` while autograd runs, ``optimizer`` inside ``Optimizer.step``, ``build`` before the first
   window, else ``forward``.
3. Module: the innermost module running; in backward, the module in which the node was made, found by the node's
   sequence number.
4. Category: parameters, buffers, gradients and optimizer state by the objects that hold them; casts of weights by
   autocast; of the rest, what a forward made and left alive when backward began is ``saved``.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_hooks

from snugfit.errors import UnsupportedError
from snugfit.memory import torch_private
from snugfit.memory.events import Birth, Call, Recording, tensors_of, work_of
from snugfit.memory.module_stack import ModuleStack

_HOST = -1
"Stands for a storage that is not on the traced device."


class Recorder(torch_private.FakeMode):  # type: ignore[no-untyped-call]
    """A fake-tensor mode that writes down what it sees.

    Args:
        on_op: ``(call, recorder)``, called after an operation's results are recorded; the rules of a device add
            there what no tensor shows, with ``allocate`` and ``release``.
        host_scalars: Whether 0-dimensional tensors made from Python numbers stay on the host (CUDA), or count
            like any other (CPU).
    """

    def __init__(self, *, on_op: Callable[[Call, "Recorder"], None] | None = None, host_scalars: bool) -> None:
        super().__init__()
        self.recording = Recording()
        self.window = 0
        self._on_op = on_op
        self._host_scalars = host_scalars
        self._live: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._depth = 0
        self._backward_ran = False
        self._in_optimizer = False
        self._in_move = False
        self._naming_device = False
        self._names_device = False
        self._modules = ModuleStack(self.adopt)
        self._owners: dict[int, str] = {}
        self._views: dict[Any, bool] = {}
        self._writes: dict[Any, bool] = {}
        self._cpu = torch.device("cpu")
        self._meta = torch.device("meta")

    @contextmanager
    def recording_on(self) -> Iterator["Recorder"]:
        """Record for as long as the context lasts; also watches every module and optimizer of the process.

        A context of its own: torch enters the mode itself again and again while it runs an operation.
        """
        hooks = [
            *self._modules.watch(),
            optimizer_hooks.register_optimizer_step_pre_hook(self._before_optimizer),
            optimizer_hooks.register_optimizer_step_post_hook(self._after_optimizer),
        ]
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()
            self._watches.clear()

    @property
    def phase(self) -> str:
        """Where the step is now; see the NOTE at the top of this file."""
        if torch_private.in_backward():
            return "backward"
        if self._in_optimizer:
            return "optimizer"
        return "forward" if self.window else "build"

    @property
    def module(self) -> str:
        """The module to which an operation of this moment belongs."""
        return self._modules.current()

    def begin_window(self) -> None:
        """A new window starts: what follows belongs to it."""
        self.window += 1
        self.mark("window")
        self._backward_ran = False

    def end_window(self) -> None:
        """The window is over, its update done."""
        self.mark("step end")

    def categorise(self, tensors: Sequence[Tensor], category: str, module: str | None = None) -> None:
        """Say what already recorded tensors are, and to which module they belong."""
        for tensor in tensors:
            index = self._live.get(tensor.untyped_storage()._cdata)
            if index is not None and index != _HOST:
                birth = self.recording.births[index]
                birth.category = category
                birth.module = birth.module if module is None else module

    def adopt(self, root: nn.Module) -> None:
        """Say that a module's parameters and buffers are such, and which of its modules owns them."""
        for name, module in root.named_modules():
            self.categorise(list(module.buffers(recurse=False)), "buffer", name)
            for parameter in module.parameters(recurse=False):
                if self._owners.setdefault(id(parameter), name) == name:
                    self.categorise([parameter], "parameter", name)

    def adopt_masters(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Say that what an optimizer holds belongs where the parameter of the model is that it stands for."""
        for held, parameter in pairs:
            if held is not parameter and id(parameter) in self._owners:
                self._owners[id(held)] = self._owners[id(parameter)]

    def moved(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor on the traced device: the input of a micro-batch."""
        self._in_move = True
        try:
            with self.on_device():
                return tensor.clone()
        finally:
            self._in_move = False

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """What is made in this context is on the traced device; from now on the rest may be on the host."""
        outer, self._names_device = self._naming_device, True
        self._naming_device = True
        try:
            yield
        finally:
            self._naming_device = outer

    def placed(self, tensor: Tensor) -> Tensor:
        """The tensor on the traced device: itself if it is there, else a copy."""
        return tensor if self._place_of(tensor) == "device" else self.moved(tensor)

    def recording_on_device(self) -> Recording:
        """The recording without what stayed on the host, where the step tells the two apart."""
        recording = self.recording
        hosted = {i + 1 for i, birth in enumerate(recording.births) if birth.place == "host"}
        if not self._names_device or not hosted:
            return recording
        kept_before = [0]
        for event in recording.events:
            kept_before.append(kept_before[-1] + (abs(event) not in hosted))
        return Recording(
            recording.births,
            [event for event in recording.events if abs(event) not in hosted],
            [(kept_before[position], name) for position, name in recording.marks],
            [(kept_before[position], work) for position, work in recording.work],
        )

    def allocate(self, num_bytes: int, category: str, op: str) -> int:
        """Record memory that no tensor holds, such as a library's workspace; the result is for ``release``."""
        return self._birth(num_bytes, category, op)

    def release(self, allocation: int) -> None:
        """Record the end of what ``allocate`` made."""
        self.recording.events.append(-(allocation + 1))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation on fake tensors and record what it made."""
        if torch_private.is_device_query(func):
            return self._meta if self.in_kernel_invocation else self._cpu
        if self._depth:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        self._depth += 1
        try:
            if self._only_writes(func) and self.phase in ("backward", "optimizer") and _has_dimensions(args[0]):
                result = args[0] if func._schema.returns else None
            else:
                result = self.run(func, types, args, kwargs or {})
        except torch_private.FAKE_ERRORS as error:
            raise self._refusal(str(func)) from error
        except RuntimeError as error:  # torch.library.custom_op without register_fake
            if "no fake impl" not in str(error):
                raise
            raise self._refusal(str(func)) from error
        finally:
            self._depth -= 1
        self._record(func, args, kwargs or {}, result)
        return result

    def _record(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        name = func.__name__
        phase = self.phase
        if phase == "backward" and not self._backward_ran:
            self._begin_backward()
        elif phase == "forward" and self._backward_ran:
            self._backward_ran = False
        fresh, place = False, None
        host = self._host_scalars and name == "lift_fresh.default"
        for tensor in tensors_of(result):
            if type(tensor) is not torch_private.Fake:
                continue
            if tensor.layout is not torch.strided:
                raise self._refusal(f"{name} (a {tensor.layout} result)")
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live:
                continue
            if host and tensor.dim() == 0:
                self._watch(storage, key, _HOST)
            else:
                fresh = True
                index = self._birth(storage.nbytes(), self._category(phase), name)
                place = self._place(args) if place is None else place
                self.recording.births[index].place = place
                self._watch(storage, key, index)
        if fresh or not self._is_view(func):
            self.recording.work.append((len(self.recording.events), work_of(func, phase, args, kwargs, result)))
        if self._on_op is not None:
            self._on_op(Call(name, phase, args, kwargs, result), self)

    def _place(self, args: Sequence[Any]) -> str:
        """Where a result is: what names the device or comes from it is there, what is built before, on the host."""
        if self._naming_device:
            return "device"
        inputs = {self._place_of(tensor) for value in args for tensor in tensors_of(value)}
        if not inputs:
            return "" if self.window else "host"
        return "device" if "device" in inputs else "host" if "host" in inputs else ""

    def _place_of(self, tensor: Tensor) -> str:
        index = self._live.get(tensor.untyped_storage()._cdata, _HOST)
        return "host" if index == _HOST else self.recording.births[index].place

    def _watch(self, storage: Any, key: int, index: int) -> None:
        live, watches, events = self._live, self._watches, self.recording.events

        def died(_: Any) -> None:
            if watches.pop(key, None) is not None:
                del live[key]
                if index != _HOST:
                    events.append(-(index + 1))

        live[key] = index
        watches[key] = weakref.ref(storage, died)

    def _birth(self, num_bytes: int, category: str, op: str) -> int:
        births = self.recording.births
        births.append(Birth(num_bytes, category, self.phase, self.module, op, self.window))
        self.recording.events.append(len(births))
        return len(births) - 1

    def _category(self, phase: str) -> str:
        if self._in_move or phase == "build":
            return "input"
        if phase == "backward" and self._modules.is_running:
            return "saved"  # the recomputed tensors of a segment
        return "other" if phase == "forward" else "temporary"

    def _begin_backward(self) -> None:
        """The forward of a micro-batch is over: what it left is saved, what it freed was temporary."""
        self._backward_ran = True
        self.mark("forward end")
        alive = set(self._live.values())
        births = self.recording.births
        for index in range(len(births) - 1, -1, -1):
            birth = births[index]
            if birth.window != self.window:
                break
            if birth.category == "other" and birth.phase == "forward":
                birth.category = "saved" if index in alive else "temporary"

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._in_optimizer:
            self.mark("backward end")
        self._in_optimizer = True
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            owner = self._owners.get(id(parameter))
            self.categorise([parameter], "parameter", owner)
            if parameter.grad is not None:
                self.categorise([parameter.grad], "gradient", owner)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._in_optimizer = False
        for parameter, values in optimizer.state.items():
            state = [value for value in values.values() if isinstance(value, Tensor)]
            self.categorise(state, "optimizer", self._owners.get(id(parameter)))

    def mark(self, name: str) -> None:
        """Name the present position in the event stream."""
        self.recording.marks.append((len(self.recording.events), name))

    def _is_view(self, func: Any) -> bool:
        if func not in self._views:
            self._views[func] = bool(func.is_view) or func.__name__ in ("detach.default", "_unsafe_view.default")
        return self._views[func]

    def _only_writes(self, func: Any) -> bool:
        """Whether an operation need not run: autograd's and the optimizers' in-place ones are a half of all."""
        if func not in self._writes:
            self._writes[func] = torch_private.only_writes(func)
        return self._writes[func]

    def _refusal(self, op: str) -> UnsupportedError:
        module = self.module or "the step itself"
        return UnsupportedError(
            f"the operation {op} cannot be traced without real values",
            got=f"{op} in {module}, phase {self.phase}",
            expected="operations whose result sizes do not depend on tensor values, with a fake (meta) kernel",
            hint="keep .item(), bool(tensor), data-dependent shapes and sparse gradients out of the step (and of the "
            "optimizer); give a custom operator a kernel with torch.library.register_fake",
            op=op,
            module=self.module,
        )


def _has_dimensions(value: Any) -> bool:
    """Whether a tensor, or the first of a list, is no scalar: of scalars fake tensors may know the value."""
    first = next(iter(tensors_of(value)), None)
    return first is not None and first.dim() > 0
