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
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_hooks

from snugfit.memory import bias_sums, gradient_sums, storage_phases, torch_private
from snugfit.memory.events import Birth, Call, Recording, has_dimensions, tensors_of
from snugfit.memory.host_side import HostSide
from snugfit.memory.known_values import value_sized
from snugfit.memory.known_values.values import Values
from snugfit.memory.module_stack import ModuleStack, Owners
from snugfit.memory.steps import refusals, sparse
from snugfit.memory.steps.outside import Outside
from snugfit.memory.steps.places import DEVICE, HOST, Places, host_result
from snugfit.memory.storages import dense_parts, has_plain, is_plain, parts_of
from snugfit.training import splitting

_CPU, _META = torch.device("cpu"), torch.device("meta")
_PLAIN = frozenset([Tensor, nn.Parameter, torch_private.Fake])
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
        self.places = Places()
        self.values = Values()
        self.outside = Outside()
        self.last_op: Any = ""
        self._host_side = HostSide(self.place_of)
        self._modules = ModuleStack(self.adopt, self.recording)
        self._owners = Owners()

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
            self.outside.restore()

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

    @property
    def is_running(self) -> bool:
        """Whether an operation is being run, so that it is not the step that asks for something."""
        return self._depth > 0

    def name_of(self, module: nn.Module) -> str | None:
        """The fully qualified name of a module that has run; None for others."""
        return self._modules.name_of(module)

    @property
    def assumptions(self) -> Sequence[str]:
        """The sentences of what the recording rests on."""
        return tuple(self.values.assumptions)

    def assume(self, sentence: str) -> None:
        """Name something that the recording rests on."""
        self.values.assumptions[sentence] = None

    def begin_window(self) -> None:
        """A new window starts: what follows belongs to it."""
        self.window += 1
        self.mark("window")
        self._backward_ran = False

    def end_window(self) -> None:
        """The window is over, its update done."""
        for root in self._modules.roots:  # gradients that no optimizer has seen
            self.categorise_gradients(root.parameters())
        self.mark("step end")

    def categorise(self, tensors: Sequence[Tensor], category: str, module: str | None = None) -> None:
        """Say what already recorded tensors are, and to which module they belong."""
        self._depth += 1  # what this asks of tensors is no part of the step
        keys = [part.untyped_storage()._cdata for tensor in tensors for part in parts_of(tensor)]
        self._depth -= 1
        for key in keys:
            index = self._live.get(key)
            if index is not None and index != _HOST:
                birth = self.recording.births[index]
                birth.category = category
                birth.module = birth.module if module is None else module

    def adopt(self, root: nn.Module) -> None:
        """Say that a module's parameters and buffers are such, and which of its modules owns them."""
        for name, module in self._modules.name(root):
            for tensor in (*module.buffers(recurse=False), *module.parameters(recurse=False)):
                if is_plain(tensor):  # made before the trace
                    self.given(tensor)
            self.categorise(list(module.buffers(recurse=False)), "buffer", name)
            for parameter in module.parameters(recurse=False):
                if self._owners.claim(parameter, module, name):
                    self.categorise([parameter], "parameter", name)

    def adopt_masters(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Say that what an optimizer holds belongs where the parameter of the model is that it stands for."""
        for held, parameter in pairs:
            self._owners.stand_in(held, parameter)

    def moved(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor on the traced device: the input of a micro-batch."""
        self._in_move = True
        try:
            with self.on_device():
                return tensor.clone()
        finally:
            self._in_move = False

    def on_device(self) -> AbstractContextManager[None]:
        """What is made in this context is on the traced device; from now on the rest may be on the host."""
        return self.places.naming(DEVICE)

    def placed(self, tensor: Tensor) -> Tensor:
        """The tensor on the traced device: itself if it is there, else a copy."""
        return tensor if self.place_of(tensor) == DEVICE else self.moved(tensor)

    def put_on_device(self, tensor: Tensor) -> None:
        """Say that a recorded tensor has been on the traced device all the time."""
        self.recording.births[self._live[tensor.untyped_storage()._cdata]].place = DEVICE

    def made_by(self, tensor: Tensor) -> str:
        """The operation that made a tensor's storage; empty for what stayed on the host."""
        return "" if (index := self._index_of(tensor)) == _HOST else self.recording.births[index].op

    def _index_of(self, tensor: Tensor) -> int:
        return self._live.get(tensor.untyped_storage()._cdata, _HOST)

    def resize(self, tensor: Tensor, num_bytes: int) -> None:
        """Correct what a recorded tensor's storage takes on the traced device."""
        if (index := self._index_of(tensor)) != _HOST:
            self.recording.births[index].num_bytes = num_bytes

    def allocate(self, num_bytes: int, category: str, op: str) -> int:
        """Record memory that no tensor holds, such as a library's workspace; the result is for ``release``."""
        return self._add(Birth(num_bytes, category, self.phase, self.module, op, self.window))

    def release(self, allocation: int) -> None:
        """Record the end of what ``allocate`` made."""
        self.recording.events.append(-(allocation + 1))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation on fake tensors and record what it made."""
        if func is torch_private.DEVICE_QUERY:  # two of three calls
            return _META if self.in_kernel_invocation else _CPU
        if self._depth:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        if not _PLAIN.issuperset(types):
            return NotImplemented  # a subclass made of other tensors: its own code comes first
        with torch_private.no_torch_function():  # what the recorder asks of tensors is no question of the step
            return self._dispatch(func, types, args, kwargs or {})

    def _dispatch(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        redirected = self.places.redirected(kwargs) if kwargs else None
        if redirected is not None:
            with self, self.places.naming(redirected[0]):
                return func(*args, **redirected[1])
        kernel = sparse.kernel_for(func, args)
        if kernel is not None:
            with self:
                return kernel(self.values, *args, **kwargs)
        if torch_private.is_composite(func):  # called below autograd, by a subclass or in inference mode
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if has_plain(args) and not func.__name__.startswith("lift_fresh"):
            args = [self._twin(value) for value in args]
        self._depth += 1
        before, self.last_op = self.last_op, func
        try:
            result = self._result(func, before, types, args, kwargs)
            self._record(func, args, kwargs, result)
            self.values.follow(func, args, kwargs, result)
        finally:
            self._depth -= 1
        return result

    def _result(
        self, func: Any, before: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        self.recipe = None
        in_backward = torch_private.in_backward()
        # It need not run: autograd's and the optimizers' in-place ones are a half of all.
        if (in_backward or self._in_optimizer) and torch_private.only_writes(func) and has_dimensions(args[0]):
            return args[0] if func._schema.returns else None
        is_sum = in_backward and gradient_sums.is_in_place(func, args, self.made_by)
        if is_sum or bias_sums.is_in_place(func, before, args, self.made_by):
            return args[0]
        try:
            return self.run(func, types, args, kwargs)
        except torch_private.FAKE_ERRORS as error:
            return self._from_values(func, args, kwargs, error)
        except RuntimeError as error:  # torch.library.custom_op without register_fake
            if "no fake impl" not in str(error) and not value_sized.has_kernel(func):
                raise
            return self._from_values(func, args, kwargs, error)

    def faked(self, tensor: Tensor) -> Tensor:
        """The fake twin of a real tensor; it knows the values that the real one has now."""
        if type(tensor) is torch_private.Fake:
            return tensor
        if tensor.layout is torch.sparse_coo:
            return sparse.made_of(tensor, self.faked)
        fake: Tensor = self.from_tensor(tensor)
        self.values.know(fake, tensor)
        return fake

    def given(self, real: Tensor) -> Tensor:
        """The fake twin of a real tensor that was made outside of the trace and takes part in it from now on."""
        fake = self.outside.twin_of(real)
        if fake is None and real.layout is torch.sparse_coo:
            fake = sparse.made_of(real, self.given)
            self.outside.meet(real, fake, lambda: None)
        elif fake is None:
            fake = self.from_tensor(real)
            key = real.untyped_storage()._cdata
            self.outside.meet(real, fake, lambda: self._live.pop(key, None))
            if fake.layout is torch.strided:
                storage = fake.untyped_storage()
                index = self.allocate(real.untyped_storage().nbytes(), "input", "given")
                self.recording.births[index].place = HOST
                self._watch(storage, storage._cdata, index)
                self._live[key] = index
                self.values.know(fake, real)
        return fake

    def _twin(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.given(value) if type(value) is not torch_private.Fake else value
        return [self._twin(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _from_values(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> Any:
        """The result of an operation that fake tensors cannot follow, where the trace knows the values."""
        result = self.values.answer(func, args, kwargs)
        if result is None:
            with self:
                result = value_sized.run(func, args, kwargs, self.values, self.faked)
        if result is None:
            raise refusals.operation(str(func), self.module, self.phase) from error
        return splitting.map_tensors(self.faked, result)

    def _record(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        name, phase = func.__name__, self.phase
        if phase == "backward" and not self._backward_ran:
            self._begin_backward()
        elif phase == "forward" and self._backward_ran:
            self._backward_ran = False
        fresh, place = False, None
        host = self._host_scalars and name == "lift_fresh.default"
        for tensor in dense_parts(result):
            storage = tensor.untyped_storage()
            if (key := storage._cdata) in self._live:
                continue
            if host and tensor.dim() == 0:
                self._watch(storage, key, _HOST)
            else:
                if not fresh:
                    fresh, module = True, self.module
                    if self._host_scalars:  # the CPU is one place
                        place = self.places.of_result(name, args, self.place_of, window=self.window, module=module)
                lies = HOST if tensor is host_result(name, result) else place or ""
                birth = Birth(storage.nbytes(), self._category(phase), phase, module, name, self.window, lies)
                self._watch(storage, key, self._add(birth))
        if fresh or not torch_private.is_view(func):
            work = self._host_side.work(self.recipe, (func, phase, args, kwargs, result), place)
            self.recording.work.append((len(self.recording.events), work))
        if self._on_op is not None:
            self._on_op(Call(name, phase, args, kwargs, result), self)

    def place_of(self, tensor: Tensor) -> str:
        """``device``, ``host``, or empty where the step left it open."""
        if type(tensor) not in _PLAIN or tensor.layout is torch.sparse_coo:
            return DEVICE if DEVICE in {self.place_of(part) for part in parts_of(tensor)} else HOST
        return HOST if (index := self._index_of(tensor)) == _HOST else self.recording.births[index].place

    def _watch(self, storage: Any, key: int, index: int) -> None:
        live, watches, events, forget = self._live, self._watches, self.recording.events, self.values.forget

        def died(_: Any) -> None:
            if watches.pop(key, None) is not None:
                del live[key]
                forget(key)
                if index != _HOST:
                    events.append(-(index + 1))

        live[key] = index
        watches[key] = weakref.ref(storage, died)

    def _add(self, birth: Birth) -> int:
        self.recording.births.append(birth)
        self.recording.events.append(number := len(self.recording.births))
        return number - 1

    def _category(self, phase: str) -> str:
        if self._in_move or phase == "build":
            return "input"
        if phase == "backward" and (self._modules.is_running or torch.is_grad_enabled()):
            return "saved"  # the recomputed tensors of a segment
        return "other" if phase == "forward" else "temporary"

    def _begin_backward(self) -> None:
        self._backward_ran = True
        self.mark("forward end")
        storage_phases.forward_ended(self.recording.births, self.window, set(self._live.values()))

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._in_optimizer:
            self.mark("backward end")
            storage_phases.update_began(self.recording.births, self.window)
        self.outside.meet_optimizer(optimizer)
        self._in_optimizer = self.values.in_update = True
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            self.categorise([parameter], "parameter", self._owners.of(parameter))
        self.categorise_gradients(parameters)

    def categorise_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Say that what parameters hold as their gradients are such."""
        for parameter in parameters:
            if parameter.grad is not None:
                self.categorise([parameter.grad], "gradient", self._owners.of(parameter))

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._in_optimizer = self.values.in_update = False
        for parameter, values in optimizer.state.items():
            state = [tensor for value in values.values() for tensor in tensors_of(value)]
            self.categorise(state, "optimizer", self._owners.of(parameter))

    def mark(self, name: str) -> None:
        """Name the present position in the event stream."""
        self._host_side.mark(name)
        self.recording.marks.append((len(self.recording.events), name))
