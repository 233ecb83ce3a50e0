"""The modules of one segment: their forwards are replaced until the segment is taken off again.

Entry points: ``Run`` and ``Forward``, which ``checkpointing`` installs. What a policy keeps is ``keeping``'s, what it
moves to the host ``offloading``'s, how saved tensors are dropped and made again ``regions``'s.

NOTE [A run of several modules]
1. Every module runs when it is called and returns what is its own. Code between the modules, hooks included, runs once,
   and what it saves stays saved.
2. What a later module is called with is not kept where it is what an earlier one returned, untouched; all else is.
   So a chain keeps the input of its first module, and code that puts something in between keeps that.
3. Backward repeats the calls in their order, each from what was kept or made just now, with its own random state.
4. A pass begins with the first of the modules that is called and ends with the last one. A module that is called again,
   or before one that has run, or after a backward has repeated the pass, begins another one.

NOTE [Segments inside of segments]
A module that begins or belongs to two segments has two forwards, the outer one over the inner one; the outer one's own
chain calls the inner one. Inner segments are therefore installed first and removed last.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from snugfit.errors import UnsupportedError, warn
from snugfit.plans import Segment
from snugfit.training import containing, offloading, random_states, recomputation, torch_private
from snugfit.training.guarding import Guard, modules_of, weights_of
from snugfit.training.held_tensors import HeldTensors
from snugfit.training.holders import Holders
from snugfit.training.inputs import ForwardModeError, Inputs, Made
from snugfit.training.keeping import Seen, seen_under
from snugfit.training.recomputation import FirstForward
from snugfit.training.regions import Region


class Run:
    """The modules of one segment, which are repeated together."""

    def __init__(self, segment: Segment, modules: list[nn.Module]) -> None:
        self.segment, self.modules = segment, modules
        self.has_warned = False
        self.called: set[int] = set()
        "Positions of the modules that have been called."
        self.longest = 0
        "Most calls of one pass so far."

    def begin(self, position: int) -> "_Pass":
        """The pass that a call of a module belongs to."""
        reference = _open.passes.get(self)
        found = None if reference is None else reference()
        if found is None or found.was_repeated or position <= found.position:
            found = _Pass(self.segment.modules)
            _open.passes[self] = weakref.ref(found)
        found.position = position
        return found

    def end(self, position: int | None = None) -> None:
        """A module has run, or the pass is given up."""
        if position is None or position == len(self.modules) - 1:
            reference = _open.passes.pop(self, None)
            found = None if reference is None else reference()
            if found is not None:
                found.close()

    def warn_once(self, message: str) -> None:
        """Warn of something about the segment, the first time."""
        if not self.has_warned:
            self.has_warned = True
            warn(message)


class _Open(threading.local):
    """The pass through each run that a thread is in the middle of, as long as it has saved anything."""

    def __init__(self) -> None:
        self.passes: weakref.WeakKeyDictionary[Run, weakref.ref[_Pass]] = weakref.WeakKeyDictionary()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A repetition begins passes of its own: of runs inside of the one that is repeated."""
        own, self.passes = self.passes, weakref.WeakKeyDictionary()
        try:
            yield
        finally:
            self.passes = own


_open = _Open()


class _Pass:
    """One pass through the modules of a segment."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.position = -1
        "Of the module that ran last."
        self.was_repeated = False
        "Whether a backward has come to it: modules that are called alone later are not joined to it."
        self._calls: list[_Call] = []
        self._left: random_states.TorchStates = ()
        "Random states behind the module that ran last."
        self._results: dict[int, tuple[weakref.ref[Tensor], int, Made]] = {}
        self._names = names
        self._region: weakref.ref[Region] | None = None
        "Refers to this pass, and lives as long as the graph that it is part of."

    def run(
        self,
        forward: "Forward",
        modules: list[nn.Module],
        parameters: list[nn.Parameter],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a module, and keep what its repetition needs."""
        devices = recomputation.devices_of((*containing.tensors((args, kwargs)), *parameters[:1]))
        states = random_states.of_torch(devices)
        earlier = [call.first for call in self._calls]
        first = FirstForward(modules, parameters, forward.held, forward.seen, devices, earlier, (args, kwargs))
        is_same = random_states.are_same(states, self._left)
        inputs = Inputs(args, kwargs, torch_private.cached_weights(modules), self._made_by)
        call = _Call(forward, inputs, first, parameters, () if is_same else states)
        self._calls.append(call)
        forward.run.longest = max(forward.run.longest, len(self._calls))
        after = torch_private.watched(forward.module, (*args, *kwargs.values()))
        region = None if self._region is None else self._region()
        if region is None:
            region = Region(self.repeat, self._names)
            self._region = weakref.ref(region)
        with region.forward(), first:
            result = forward.plain(*args, **kwargs)
        after()
        call.settle(modules)
        if len(forward.run.modules) > 1:
            self._left = random_states.of_torch(devices)
        number = len(self._calls) - 1
        for index, tensor in enumerate(containing.tensors(result)):
            if not tensor.is_inference():  # such a tensor has no version
                self._results[id(tensor)] = weakref.ref(tensor), tensor._version, Made(number, index)
        return result

    def close(self) -> None:
        """No module of this pass will run any more."""
        self._left = ()
        self._results.clear()

    def repeat(self) -> None:
        """Run all calls again; what one makes is held until the last call that takes it has begun."""
        self.was_repeated = True
        calls = self._calls
        last_use = {made: number for number, call in enumerate(calls) for made in call.inputs.made}
        made: dict[Made, Tensor] = {}
        devices = {device for call in calls for device, _ in call.states if device.type != "cpu"}
        with _open.apart(), random_states.of_torch_kept(devices):
            for number, call in enumerate(calls):
                needed = {one: made[one] for one in call.inputs.made}
                made = {one: tensor for one, tensor in made.items() if last_use[one] > number}
                result = call.again(needed)
                for index, tensor in enumerate(containing.tensors(result)):
                    if Made(number, index) in last_use:
                        made[Made(number, index)] = tensor
                del needed, result

    def _made_by(self, tensor: Tensor) -> Made | None:
        reference, version, made = self._results.get(id(tensor), (None, 0, None))
        is_it = reference is not None and reference() is tensor and tensor._version == version
        return made if is_it else None


class _Call:
    """One call of one module.

    Args:
        forward: Of the module.
        inputs: Of the call.
        first: The context of the call.
        parameters: Of the module.
        states: torch's random states before it, unless those are what the call before left.
    """

    def __init__(
        self,
        forward: "Forward",
        inputs: Inputs,
        first: FirstForward,
        parameters: list[nn.Parameter],
        states: random_states.TorchStates,
    ) -> None:
        self.inputs, self.states = inputs, states
        self._forward, self.first = forward, first
        self._guard = Guard(forward.name, forward.module, parameters)

    def settle(self, modules: list[nn.Module]) -> None:
        """The module, and those inside of it, have run for the first time."""
        self._guard.settle(modules)

    def again(self, made: Mapping[Made, Tensor]) -> Any:
        """Run the module as it ran, with what earlier calls have made."""
        if self._guard.is_sharded:
            unshard: Any = getattr(self._forward.module, "unshard", None)
            if unshard is not None:
                unshard()  # FSDP2's own hooks have done so for the last module of a run only
        self._guard.check(self.first.stayed)
        args, kwargs, cached = self.inputs.again(made, self._forward.name)
        random_states.set_torch(self.states)
        with (
            self._guard.shortened(),
            torch_private.weights_cached(cached),
            recomputation.repetition(self.first, self._forward.segment.modules),
        ):
            return self._forward.plain(*args, **kwargs)


class Forward:
    """Stands in for ``forward`` of one module; an object, so that a deep copy of the model refers to the copy."""

    def __init__(self, run: Run, position: int, module: nn.Module) -> None:
        self.run, self.position, self.module = run, position, module
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")
        self.holders = Holders()
        self.held = HeldTensors()
        self.seen = Seen(()) if run.segment.policy == "offload" else seen_under(run.segment.policy)

    @property
    def segment(self) -> Segment:
        """The segment that this forward belongs to."""
        return self.run.segment

    @property
    def name(self) -> str:
        """Of the module."""
        return self.segment.modules[self.position]

    def install(self) -> None:
        """Stand in for the module's forward, over what stands there already."""
        self.module.__dict__["forward"] = self
        self._hook = self.module.register_forward_pre_hook(self._refuse_copy)

    def uninstall(self) -> None:
        """Take this forward off its module, also from under an outer one."""
        self._hook.remove()
        above = [other for other in present(self.module) if other.own is self]
        if above:
            above[0].own = self.own
        elif self.module.__dict__.get("forward") is self:
            if self.own is None:
                del self.module.__dict__["forward"]
            else:
                self.module.__dict__["forward"] = self.own

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.own(*args, **kwargs) if self.own else type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, as part of its segment where gradients are recorded."""
        if torch.compiler.is_compiling():
            return _uncompiled(self, args, kwargs)
        self.run.called.add(self.position)
        if not torch.is_grad_enabled():
            self.run.end()
            return self.plain(*args, **kwargs)
        modules = modules_of(self.module)
        if any(isinstance(one, LazyModuleMixin) and one.has_uninitialized_params() for one in modules):
            self.run.warn_once(
                "lazy modules make their weights in their first forward, which a repetition would not do again: that "
                "forward is not recomputed; run one batch under torch.no_grad() before to have all of them recomputed"
            )
            return self.plain(*args, **kwargs)
        parameters = weights_of(modules)
        if not any(tensor.requires_grad for tensor in (*parameters, *containing.tensors((args, kwargs)))):
            return self.plain(*args, **kwargs)  # frozen: nothing is saved, so nothing need be repeated
        if torch_private.transforms_are_active():
            raise self._refused(f"{self.name} called under torch.func: grad, vmap, jvp or another transform of it")
        try:
            return self._saving_less(modules, parameters, args, kwargs)
        except BaseException as error:
            self.run.end()
            if isinstance(error, ForwardModeError):
                got = f"{self.name} called under forward-mode differentiation: torch.autograd.forward_ad"
            elif isinstance(error, RuntimeError) and torch_private.REFUSES_HOOKS in str(error):
                got = f"torch.func.grad, vjp, jacrev or hessian called inside of {self.name}"
            else:
                raise
            raise self._refused(got) from error

    def _saving_less(
        self, modules: list[nn.Module], parameters: list[nn.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The module's forward, with what it saves dropped, or kept on the host."""
        if self.segment.policy != "offload":
            result = self.run.begin(self.position).run(self, modules, parameters, args, kwargs)
            self.run.end(self.position)
            return result
        if parameters and offloading.is_on_host(parameters[0]):
            self.run.warn_once(
                "segments are offloaded to the host, where their tensors are already: nothing is moved, and no "
                "memory saved; leave them out on the CPU, or recompute them"
            )
        with offloading.saved_on_host([self.module]):
            return self.plain(*args, **kwargs)

    def _refuse_copy(self, module: nn.Module, _: tuple[Any, ...]) -> None:
        """A shallow copy of a module has its attributes, and so this forward: of the original, with its weights."""
        if module is not self.module:
            raise UnsupportedError(
                "a copy of a module of a segment runs, and would compute with the weights of the original",
                got=f"a {type(module).__name__} with the attributes of {self.name}, as nn.DataParallel and copy.copy "
                "make them",
                expected=f"{self.name} itself, or a deep copy of it",
                hint="use DistributedDataParallel or copy.deepcopy, or call remove() on the handle of "
                "checkpointing.apply first",
                names=(self.name,),
            )

    def _refused(self, got: str) -> UnsupportedError:
        return UnsupportedError(
            "segments are recomputed in an ordinary backward, and this is none",
            got=got,
            expected="backward() or torch.autograd.grad, where torch has hooks on saved tensors",
            hint="call remove() on the handle of checkpointing.apply, or leave recompute out; where no gradient "
            "is wanted, use torch.no_grad(): segments then do nothing",
            names=self.segment.modules,
        )


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _uncompiled(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module of a segment as it is, from within what is compiled."""
    forward.run.warn_once(
        "segments that are recomputed run uncompiled inside of a compiled model; compile the modules themselves, "
        "model.layers[0] = torch.compile(model.layers[0]), or leave recompute out where the compiler is to decide"
    )
    return forward(*args, **kwargs)


def present(module: nn.Module) -> Iterator[Forward]:
    """The forwards that stand in for a module's, the outermost first."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, Forward):
        yield forward
        forward = forward.own
