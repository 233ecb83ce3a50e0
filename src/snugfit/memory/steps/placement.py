"""Lets code that names a CUDA device run on fake CPU tensors, and tells the recorder where tensors are.

Entry point: ``Placement``, a torch-function mode. A tensor on the card says so when it is asked for its device, so
that code branches as on CUDA. What ``.item()`` and its like return is ``reading``'s; where results are, ``places``'s.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodWrapperType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from snugfit.memory import torch_private
from snugfit.memory.cpu import packed_recurrent
from snugfit.memory.known_values import reading
from snugfit.memory.recording import Recorder
from snugfit.memory.steps import refusals
from snugfit.memory.steps.places import DEVICE, HOST

_CPU = torch.device("cpu")
_MOVES_ELSEWHERE = {getattr(Tensor, name) for name in ("hpu", "ipu", "mtia", "xpu") if hasattr(Tensor, name)}
_TO: Any = Tensor.to
_CUDA: Any = Tensor.cuda
_READING = frozenset([torch.device, torch_private.PARSE_TO])
"Read arguments, move nothing."
_MAY_NAME = (str, torch.device)

_NAMED = ("cuda", "hpu", "mps", "mtia", "xla", "xpu")
"Types of devices by which an argument that is a string is taken for a device."

_FACTORIES = frozenset(
    """arange as_tensor asarray empty empty_strided eye from_numpy frombuffer full linspace logspace ones rand randint
    randn randperm scalar_tensor tensor tril_indices triu_indices zeros""".split()
)


class Placement(TorchFunctionMode):
    """Reads "cuda" as the traced device, and answers questions about devices and values."""

    def __init__(self, recorder: Recorder, *, is_card: bool = True) -> None:
        super().__init__()
        self._recorder = recorder
        self._is_card = is_card
        self._outside = 0
        self._rewrites = False
        "Whether a call runs whose device was rewritten: what it calls is not read once more."
        self._originals: dict[Any, Any] = {}
        self._factories = {getattr(torch, name) for name in _FACTORIES if hasattr(torch, name)}
        self._answers: dict[Any, Callable[..., Any]] = {**reading.answers(recorder), F.one_hot: _one_hot}
        if not is_card:
            self._answers |= packed_recurrent.answers(recorder.values)
        else:
            self._answers |= {
                Tensor.is_cuda.__get__: self._is_cuda,  # type: ignore[attr-defined]
                Tensor.get_device: self._get_device,
                Tensor.cpu: self._cpu,
            }

    @property
    def _is_off(self) -> bool:
        """Whether torch took this mode off, though what runs is the step's own code."""
        return self._outside > 0 and not self._rewrites and not self._recorder.is_running

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Active where torch took this mode off, because a function that went through it is running."""
        if not self._is_off:
            yield
            return
        outer, self._outside = self._outside, 0
        try:
            with self:
                yield
        finally:
            self._outside = outer

    def keep(self, given: Tensor, made: Tensor) -> None:
        """A model that was made before the trace is to become another: it stays, and is on the card if that was asked.

        Raises:
            UnsupportedError: It was to become another type.
        """
        if made.dtype != given.dtype:
            raise refusals.made_outside(str(given.dtype), str(made.dtype))
        self._recorder.given(given)
        if self._recorder.place_of(made) == DEVICE:
            self._recorder.put_on_device(given)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch with "cuda" read as the traced device."""
        if type(func) is MethodWrapperType and func not in self._answers:  # an attribute: it names no device
            return func(*args)
        kwargs = kwargs or {}
        func = self._originals.get(func, func)
        self._outside += 1
        try:
            answer = self._answers.get(func)
            if answer is not None:
                result = answer(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return self._run(func, args, kwargs)
        finally:
            self._outside -= 1

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func in _READING:
            return func(*args, **kwargs)
        is_move = func is _TO
        named = func is _CUDA or self._are_named(args)
        if kwargs and not named:
            named = self._are_named(kwargs.values()) or _is_index(kwargs.get("device"))
        named = named or (is_move and len(args) > 1 and _is_index(args[1]))
        if func in _MOVES_ELSEWHERE:
            raise refusals.other_device(func.__name__)
        if named:
            return self._on_card(func, args, kwargs)
        if is_move and self._is_card:
            return self._moved(func, args, kwargs)
        if func in self._factories and self._is_card:
            return self._made(func, args, kwargs)
        return func(*args, **kwargs)

    def _are_named(self, values: Iterable[object]) -> bool:
        """Whether one of some arguments names the card."""
        for value in values:
            if isinstance(value, _MAY_NAME) and self._names(value):
                return True
        return False

    def _on_card(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self._is_card:
            raise refusals.card_on_cpu()
        is_move = func is _TO
        with self._recorder.on_device():
            indices = [
                value
                for value in (*(args[1:2] if func is _CUDA or is_move else ()), kwargs.get("device"))
                if _is_index(value)
            ]
            for index in indices:
                self._recorder.places.choose(index)
            if func is _CUDA:
                return self._recorder.placed(args[0])
            values = [_CPU if self._names(value) or (is_move and _is_index(value)) else value for value in args]
            named = {
                key: _CPU if self._names(value) or (key == "device" and _is_index(value)) else value
                for key, value in kwargs.items()
            }
            outer, self._rewrites = self._rewrites, True
            try:
                result = func(*values, **named)
            finally:
                self._rewrites = outer
            return self._recorder.placed(result) if is_move else result

    def _moved(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``tensor.to(...)`` without the name of a card: to another tensor's device, to the host, or to a type."""
        result = func(*args, **kwargs)
        if torch_private.is_functorch_wrapper(result):  # inside of vmap, where transformers 4.53 to 4.57 makes masks
            return result
        other = args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("device"))
        if isinstance(other, Tensor):
            if self._recorder.places.names_device and self._recorder.place_of(other) == DEVICE:
                return self._recorder.placed(result)
            return result
        names_host = other == "cpu" or (isinstance(other, torch.device) and other.type == "cpu")
        names_host = names_host or kwargs.get("device") in ("cpu", _CPU)
        return self._cpu(result) if names_host else result

    def _made(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A new tensor without the name of a card: on the host, unless the default device is a card."""
        if kwargs.get("device") is None and self._names(torch_private.default_device()):
            return self._on_card(func, args, {**kwargs, "device": "cuda"})
        if not self._recorder.places.names_device or self._recorder.places.named:
            return func(*args, **kwargs)
        with self._recorder.places.naming(HOST):
            return func(*args, **kwargs)

    def _names(self, value: object) -> bool:
        """Whether an argument names the card; another one, or a device of another kind, is refused."""
        if isinstance(value, str):
            if value.partition(":")[0] not in _NAMED:
                return False
            value = torch.device(value)
        if not isinstance(value, torch.device) or value.type in ("cpu", "meta"):
            return False
        if self._is_card or value.type != "cuda":
            self._recorder.places.choose(value)
        return True

    def _is_on_card(self, tensor: Tensor) -> bool:
        return self._recorder.places.names_device and self._recorder.place_of(tensor) != HOST

    @contextmanager
    def answering_devices(self) -> Iterator[None]:
        """Let fake tensors on the card say so; they have a property of their own for it, which no mode sees."""
        original: Any = torch_private.Fake.device
        recorder = self._recorder

        def device(tensor: Any) -> torch.device:
            found: torch.device = original.fget(tensor)
            is_asked = found == _CPU and not recorder.is_running and self._is_on_card(tensor)
            return recorder.places.card if is_asked else found

        with mock.patch.object(torch_private.Fake, "device", property(device)), ExitStack() as stack:
            for name in ("cpu", "cuda", "to"):  # also where this mode is off, such as in hooks of saved tensors
                stack.enter_context(mock.patch.object(Tensor, name, self._always(name)))
            yield

    def _always(self, name: str) -> Any:
        original = getattr(Tensor, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            if not self._is_off:
                return original(*args, **kwargs)
            with self.entered():
                return original(*args, **kwargs)

        self._originals[method] = original  # torch looks the function up by its name, so it is this one that is seen
        return method

    def _is_cuda(self, tensor: Tensor) -> Any:
        return True if self._is_on_card(tensor) else NotImplemented

    def _get_device(self, tensor: Tensor) -> Any:
        return self._recorder.places.index or 0 if self._is_on_card(tensor) else NotImplemented

    def _cpu(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        if not self._is_on_card(tensor):
            return tensor
        with self._recorder.places.naming(HOST):
            return tensor.clone()


def _is_index(value: object) -> bool:
    return type(value) is int


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Any:
    """As on CUDA, where the classes that are given are not compared with the values."""
    if num_classes < 1:
        return NotImplemented
    ones = tensor.new_zeros((*tensor.shape, num_classes))
    return ones.scatter_(-1, tensor.unsqueeze(-1), 1)
