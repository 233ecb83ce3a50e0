"""What a repetition of a segment relies on to be as it was: weights, and buffers of which there is no copy.

Entry points: ``Guard``, ``modules_of`` and ``weights_of``. Arguments are watched by ``inputs``.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from snugfit.errors import UnsupportedError
from snugfit.training.attributes import OF_FSDP1
from snugfit.training.held_tensors import Held


def modules_of(module: nn.Module) -> list[nn.Module]:
    """A module and those inside of it, each once: ``modules()`` without making their names."""
    found, ahead = {module: None}, [module]
    while ahead:
        for child in ahead.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                ahead.append(child)
    return list(found)


def weights_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that modules themselves hold, each once."""
    return list(dict.fromkeys(one for module in modules for one in module._parameters.values() if one is not None))


class Guard:
    """Refuses a repetition where what it relies on has changed.

    Args:
        name: Of a module of a segment.
        module: That module.
        parameters: Of the module, when it runs.
    """

    def __init__(self, name: str, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._name, self._module = name, module
        self._weights = [(parameter, parameter._version) for parameter in parameters]
        self._is_of_itself = False
        "Whether the forward changed the weights that it began with."
        self._limited: list[Any] = []
        "Embeddings that have shortened rows of their weight to ``max_norm``."

    def settle(self, modules: Sequence[nn.Module]) -> None:
        """The forward of some modules has run: see what it did to its own weights."""
        if self._are_same(modules) or self.is_sharded:
            return
        embeddings = [one for one in modules if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
        self._limited = [one for one in embeddings if one.max_norm is not None]
        limited = {one.weight for one in self._limited}
        self._weights = [(one, one._version if one in limited else version) for one, version in self._weights]
        self._is_of_itself = not self._are_same(modules)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Context of a repetition: embeddings take the rows that the forward has shortened as they are."""
        limits = [one.max_norm for one in self._limited]
        try:
            for one in self._limited:
                one.max_norm = None
            yield
        finally:
            for one, limit in zip(self._limited, limits, strict=True):
                one.max_norm = limit

    def check(self, stayed: Sequence[Held]) -> None:
        """Refuse a repetition with other weights or buffers.

        Args:
            stayed: Buffers and attributes of which there is no copy.

        Raises:
            UnsupportedError: Weights or buffers were exchanged or written into.
        """
        if self._is_of_itself:
            raise self._refused(
                "weights that its own forward made, exchanged or wrote into",
                "change weights outside of the segment and before it, leave this module out of recompute, or, where "
                "they are made in the first forward, run that under torch.no_grad()",
            )
        if not self._are_same(modules_of(self._module)) and not self.is_sharded:
            raise self._refused(
                "weights were changed or exchanged between forward and backward",
                "call backward before optimizer.step(), and not outside of torch.func.functional_call",
            )
        changed = [held.name for held in stayed if not held.is_untouched]
        if changed:
            raise self._refused(
                f"buffers were changed or exchanged between forward and backward: {', '.join(changed)}",
                "call backward before they are changed, or copy them in the forward",
            )

    def _are_same(self, modules: Sequence[nn.Module]) -> bool:
        weights = weights_of(modules)
        return len(weights) == len(self._weights) and all(
            now is then and now._version == version for now, (then, version) in zip(weights, self._weights, strict=True)
        )

    @property
    def is_sharded(self) -> bool:
        """Whether its weights are gathered before it runs, so that they are other tensors each time."""
        is_fsdp = any("FSDP" in kind.__name__ for kind in type(self._module).__mro__)
        return is_fsdp or OF_FSDP1 in self._module.__dict__

    def _refused(self, got: str, hint: str) -> UnsupportedError:
        return UnsupportedError(
            f"the segment {self._name} cannot be computed again as it was",
            got=got,
            expected="weights and buffers as the forward saw them",
            hint=hint,
            names=(self._name,),
        )
