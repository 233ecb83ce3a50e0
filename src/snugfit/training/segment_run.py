"""The modules of one segment, run as one: their forwards are replaced until the segment is taken off again.

Entry points: ``Run`` and ``Forward``, which ``checkpointing`` installs. What a policy keeps is ``keeping``'s, what it
moves to the host ``offloading``'s.

NOTE [Segments inside of segments]
A module that begins or belongs to two segments has two forwards, the outer one over the inner one; the outer one's own
chain calls the inner one. Inner segments are therefore installed first and removed last.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from snugfit.errors import UnsupportedError
from snugfit.plans import Segment
from snugfit.training import containing, offloading
from snugfit.training.buffers import Keeper
from snugfit.training.holders import Holders
from snugfit.training.keeping import Seen, operations
from snugfit.training.recomputation import FirstForward, Recomputation

_last_handed: list[Any] = []
"Weak reference to what the last run handed out before its end; the next run finds it gone, or it was kept."


class Run:
    """The modules of one segment, run as one by the first of them."""

    def __init__(self, segment: Segment, modules: list[nn.Module]) -> None:
        self.segment, self.modules = segment, modules
        self.forwards: list[Callable[..., Any]] = []
        self._keeper = Keeper()
        self._seen = Seen(() if segment.policy == "offload" else operations(segment.policy))
        self._pending: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
        self._result: Any = None
        self._version = 0
        self._handed: list[weakref.ref[Any]] = []

    def begin(self, *args: Any, **kwargs: Any) -> Any:
        """Run all modules; the later ones then only hand the result through."""
        self._refuse_kept(_last_handed)
        self._pending, self._handed = None, []
        if not self._needs_gradient(args, kwargs):
            result = self._chain(*args, **kwargs)  # frozen: nothing is saved, so nothing need be repeated
        elif self.segment.policy == "offload":
            with offloading.saved_on_host(self.modules):
                result = self._chain(*args, **kwargs)
        else:
            result = self._recomputed(args, kwargs)
        if len(self.modules) == 1:
            return result
        self._result, self._version = result, result._version if isinstance(result, Tensor) else 0
        return self._handed_out(args[1:], kwargs)

    def hand_through(self, position: int, *args: Any, **kwargs: Any) -> Any:
        """The result of the whole run, for a later module of it."""
        pending = self._pending
        if position == len(self.modules) - 1:
            self._pending = None
        fits = (
            pending is not None
            and len(args) == 1 + len(pending[1])
            and all(a is b for a, b in zip(args, (pending[0], *pending[1]), strict=True))
            and (not isinstance(args[0], Tensor) or args[0]._version == self._version)
            and kwargs.keys() == pending[2].keys()
            and all(kwargs[key] is pending[2][key] for key in kwargs)
        )
        if not fits:
            raise self._not_a_chain(
                position,
                "a call with other arguments than the first module's, or with another input than the result of the "
                "module before, or one that was written into",
            )
        if position < len(self.modules) - 1:
            return self._handed_out(args[1:], kwargs)
        self._refuse_kept(self._handed[:-1])
        _last_handed[:] = self._handed[-1:]
        result, self._result = self._result, None
        return result

    def _handed_out(self, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result as what comes out of a module before the last: an object of its own, so that keeping it shows."""
        result = self._result
        if isinstance(result, Tensor):
            result = result.view_as(result)
            self._handed.append(weakref.ref(result))
        self._pending = (result, others, kwargs)
        return result

    def _refuse_kept(self, handed: list["weakref.ref[Any]"]) -> None:
        if any(reference() is not None for reference in handed):
            _last_handed.clear()
            raise self._not_a_chain(
                0, "code that keeps what comes out between the modules, which is the end of the run"
            )

    def _recomputed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = FirstForward(self.modules, self._keeper, self._seen)
        number, names = len(args), tuple(kwargs)
        values = (*args, *kwargs.values())
        # A forward may add to a list that it is given; its repetition starts from what the list held before.
        containers = [None if isinstance(value, Tensor) else containing.copied(value) for value in values]
        guard = containing.Guard(self.segment.modules, self.modules, containers)
        if not any(isinstance(value, Tensor) for value in values):
            values += tuple(parameter.detach() for parameter in list(self.modules[0].parameters())[:1])
        is_first = True

        def run(*values: Any) -> Any:
            nonlocal is_first
            if not is_first:
                self._refuse_unfinished()
                guard.check()
                values = tuple(
                    a if isinstance(a, Tensor) else containing.copied(b)
                    for a, b in zip(values, containers, strict=False)
                )
            is_first = False
            return self._chain(*values[:number], **dict(zip(names, values[number:], strict=False)))

        # torch finds the device whose random state it keeps among positional arguments only
        return checkpoint(
            run,
            *values,
            use_reentrant=False,
            context_fn=lambda: (forward, Recomputation(forward, self.segment.modules)),
        )

    def _chain(self, *args: Any, **kwargs: Any) -> Any:
        value = self.forwards[0](*args, **kwargs)
        for position, forward in enumerate(self.forwards[1:], start=1):
            try:
                value = forward(value, *args[1:], **kwargs)
            except (AttributeError, TypeError) as error:
                if isinstance(value, Tensor):
                    raise
                raise self._not_a_chain(position, f"a module before it returns a {type(value).__name__}") from error
        return value

    def _refuse_unfinished(self) -> None:
        self._refuse_kept(self._handed)
        if self._pending is not None:
            raise self._not_a_chain(len(self.modules) - 1, "a forward that ended without calling it")

    def _not_a_chain(self, position: int, got: str) -> UnsupportedError:
        return UnsupportedError(
            f"the modules of a segment are not a chain: {self.segment.modules[position]}",
            got=got,
            expected="output of one module handed to the next as it is, other arguments the same objects",
            hint="make one segment of each module",
            module=self.segment.modules[position],
        )

    def _needs_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if any(parameter.requires_grad for module in self.modules for parameter in module.parameters()):
            return True
        return any(tensor.requires_grad for tensor in containing.tensors((*args, *kwargs.values())))


class Forward:
    """Stands in for ``forward`` of one module; an object, so that a deep copy of the model refers to the copy."""

    def __init__(self, run: Run, position: int, module: nn.Module) -> None:
        self.run, self.position, self.module = run, position, module
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")
        self.holders = Holders()

    @property
    def segment(self) -> Segment:
        """The segment that this forward belongs to."""
        return self.run.segment

    def install(self) -> None:
        """Stand in for the module's forward, over what stands there already."""
        self.run.forwards.append(self.plain)
        self.module.__dict__["forward"] = self

    def uninstall(self) -> None:
        """Take this forward off its module, also from under an outer one."""
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
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        if self.position == 0:
            return self.run.begin(*args, **kwargs)
        return self.run.hand_through(self.position, *args, **kwargs)


def present(module: nn.Module) -> Iterator[Forward]:
    """The forwards that stand in for a module's, the outermost first."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, Forward):
        yield forward
        forward = forward.own
