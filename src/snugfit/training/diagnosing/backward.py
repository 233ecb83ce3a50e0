"""Watches the gradients of a window on their way back: the first node that makes one not finite.

Entry point: ``Gradients``. What ran forward is ``probes``'s; only public hooks on nodes of the graph are used.

NOTE [Who is to blame in backward]
1. The first node that turned a finite gradient into another; where no node did, it was a hook of the user's or, if
   there is none, a sum of gradients.
2. A gradient that is not finite and reaches no parameter is harmless: clamp and where take it away.
3. A module whose repeated forward is worse than its first one made it: the graph's saved tensors are those of the
   repetition.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from snugfit.training.diagnosing import ranges, user_hooks
from snugfit.training.diagnosing.origins import WORDS, Evidence, Origin
from snugfit.training.diagnosing.ranges import badness, largest, type_name

_TAG, _MODULE = "snugfit watch", "snugfit module"


class Gradients:
    """What became of the gradients of one run of a window.

    Args:
        model: The plain module, whose names are reported.
        forward: Origins of the present micro-batch's forward, kept up to date by who owns them.
    """

    def __init__(self, model: nn.Module, forward: list[Origin]) -> None:
        self._model, self._forward = model, forward
        self._modules = dict(model.named_modules())
        self._micro_batch: int | None = None
        self._is_broken = False
        self._found: Origin | None = None
        self._repeated: Origin | None = None
        self._handles: list[Any] = []
        self.bad_parameters: tuple[str, ...] = ()
        self.first: Origin | None = None
        "Of all micro-batches, harmless or not."

    @property
    def found(self) -> Origin | None:
        """Who is to blame, if the present micro-batch is the one that fails."""
        return self._found if self.bad_parameters else None

    def begin(self, micro_batch: int) -> None:
        """A micro-batch begins."""
        self._micro_batch = micro_batch
        self._found, self._repeated, self._is_broken = None, None, False

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def tag(self, output: Tensor, module: str, where: str, evidence: Evidence | None = None) -> None:
        """Hook the nodes of the graph that the operation at hand made; others are hooked already."""
        if not ranges.is_readable(output):
            return
        waiting: list[Any] = [output.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or hasattr(node, "variable") or node.metadata.get(_TAG) is self:
                continue
            node.metadata[_TAG], node.metadata[_MODULE] = self, module
            self._handles.append(node.register_hook(self._passing(node, module, where, evidence)))
            waiting += [before for before, _ in node.next_functions]

    def repeated(self, module: str, where: str, level: int) -> None:
        """A module's repeated forward is not finite, though its first one was better."""
        if self._repeated is None and not self._is_broken:
            cause = (
                f"the recomputation of {where} made {WORDS[level]}, which its first forward did not: the forward is "
                "not the same when it is repeated"
            )
            self._repeated = Origin("recomputation", module, "recomputation", "backward", self._micro_batch, cause)

    def _passing(self, node: Any, module: str, where: str, evidence: Evidence | None) -> Callable[..., None]:
        op, metadata = node.name(), node.metadata  # not the node itself, which would hold its own hook
        nodes = (before for before, _ in node.next_functions if before is not None)
        below = next((before.metadata.get(_MODULE) for before in nodes if not hasattr(before, "variable")), None)

        def passed(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
            if self._is_broken:
                return
            before = max((badness(gradient) for gradient in outputs if gradient is not None), default=0)
            after = max((badness(gradient) for gradient in inputs if gradient is not None), default=0)
            if before == after == 0:
                return
            self._is_broken = True
            hooks = user_hooks.of_node(metadata)
            its, place = module, where
            if op.startswith(user_hooks.OF_MODULES):
                if below and below.rpartition(".")[0] == module:  # torch put it behind the module that it is for
                    its, place = below, f"module {below!r}"
                hooks = user_hooks.of_module(self._modules[its])
            kind = "operation"
            if self._repeated is not None:
                self._found = self._repeated
            elif hooks:
                kind = "hook"
                what = f"a hook of {place} made the gradient {WORDS[before or after]} at {op}: {hooks}"
            elif before:
                kind = "sum"
                what = (
                    f"the gradient that reaches {op} in {where} is {WORDS[before]}, though no operation made it so: a "
                    "sum of gradients, or a hook, did"
                )
            else:
                size = largest(gradient for gradient in outputs if gradient is not None)
                types = {type_name(gradient) for gradient in inputs if gradient is not None}
                what = f"{op} in {where} made {WORDS[after]} out of a finite gradient"
                what += f" (largest value {size:.4g}, results in {', '.join(sorted(types))})"
            if self._found is None:
                if self._forward:
                    what += "; the forward made a value there that is not finite but did not reach the loss: "
                    what += self._forward[0].cause
                self._found = Origin(kind, its, op, "backward", self._micro_batch, what, evidence)
            self.first = self.first or self._found

        return passed

    def look(self) -> None:
        """After a micro-batch: a gradient that is not finite although all of its backward was, is a sum that is not."""
        if self._micro_batch is None:
            return
        bad = {name: p for name, p in self._model.named_parameters() if p.grad is not None and badness(p.grad)}
        self.bad_parameters = tuple(bad)
        if bad and not self._is_broken:
            self._is_broken = True
            name, parameter = next(iter(bad.items()))
            hooks = user_hooks.of_parameter(parameter)
            kind = "hook" if hooks else "sum"
            who = f"a hook of the parameter did: {hooks}" if hooks else "its sum over the micro-batches did"
            cause = f"the gradient of {name} is not finite, though no operation made it so: {who}"
            module = name.rpartition(".")[0]
            self._found = Origin(kind, module, "gradient accumulation", "backward", self._micro_batch, cause)
            self.first = self.first or self._found
