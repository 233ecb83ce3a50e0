"""What a repetition of a segment relies on to be as it was: weights, and buffers of which there is no copy.

Entry point: ``Guard``. Arguments are watched by ``inputs``.
"""

from collections.abc import Sequence

from torch import nn

from snugfit.errors import UnsupportedError
from snugfit.training.buffers import Kept


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
        weights = list(self._module.parameters())
        same = len(weights) == len(self._weights) and all(
            now is then and (now._version == version or self.is_sharded)
            for now, (then, version) in zip(weights, self._weights, strict=True)
        )
        if not same:
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
        return any("FSDP" in kind.__name__ for kind in type(self._module).__mro__)

    def _refused(self, got: str, hint: str) -> UnsupportedError:
        return UnsupportedError(
            f"the segment {self._name} cannot be computed again as it was",
            got=got,
            expected="weights and buffers as the forward saw them",
            hint=hint,
            names=(self._name,),
        )
