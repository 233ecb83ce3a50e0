"""What a repetition of a segment relies on to be as it was: weights, and buffers of which there is no copy.

Entry points: ``Guard``, ``modules_of`` and ``weights_of``. Arguments are watched by ``inputs``.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from snugfit.errors import UnsupportedError
from snugfit.training.buffers import Kept


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


_OF_FSDP1 = "_is_fsdp_managed_module"
"What ``FullyShardedDataParallel`` sets on the modules inside of it."


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

    def check(self, stayed: Sequence[Kept]) -> None:
        """Refuse a repetition with other weights or buffers.

        Args:
            stayed: Buffers that the forward did not change.

        Raises:
            UnsupportedError: Weights or buffers were exchanged or written into.
        """
        weights = weights_of(modules_of(self._module))
        same = len(weights) == len(self._weights) and all(
            now is then and now._version == version for now, (then, version) in zip(weights, self._weights, strict=True)
        )
        if not same and not self.is_sharded:
            raise self._refused(
                "weights were changed or exchanged between forward and backward",
                "call backward before optimizer.step(), and not outside of torch.func.functional_call",
            )
        changed = [kept.name for kept in stayed if not kept.is_untouched]
        if changed:
            raise self._refused(
                f"buffers were changed or exchanged between forward and backward: {', '.join(changed)}",
                "call backward before they are changed, or copy them in the forward",
            )

    @property
    def is_sharded(self) -> bool:
        """Whether its weights are gathered before it runs, so that they are other tensors each time."""
        is_fsdp = any("FSDP" in kind.__name__ for kind in type(self._module).__mro__)
        return is_fsdp or _OF_FSDP1 in self._module.__dict__

    def _refused(self, got: str, hint: str) -> UnsupportedError:
        return UnsupportedError(
            f"the segment {self._name} cannot be computed again as it was",
            got=got,
            expected="weights and buffers as the forward saw them",
            hint=hint,
            names=(self._name,),
        )
