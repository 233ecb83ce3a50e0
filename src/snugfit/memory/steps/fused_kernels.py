"""A graph of torch's compiler run kernel by kernel: what is made and freed, and what each kernel reads and writes.

Entry point: ``Kernels``. Left out: where the compiler stores a joined result all the same because many read it.

NOTE [What is allocated]
1. Pointwise operations, reductions, random numbers and indexing are joined. A result of theirs is a tensor only where
   an operation that is not joined reads it, or the graph gives it out (which a saved tensor is).
2. A joined kernel writes into the memory of an input that ends with it, if that is as large and the graph's own.
3. Everything else (matrix products, attention, convolutions, scatters) runs as itself; views are views. Writing at
   indices happens in place where nobody else reads what is written to.
4. Between two operations that are not joined there is one kernel: it reads each of its inputs once.
5. Kernels run in the order of ``kernel_order``.
6. A matrix product that is only added to a matrix is done with the addition, and as late: of tied weights the
   gradient of the logits lives until the embedding's own gradient is there (Inductor's ``post_grad`` passes).
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from snugfit.memory import torch_compiler, torch_private
from snugfit.memory.events import tensors_of
from snugfit.memory.recording import Recorder
from snugfit.memory.steps.kernel_order import Kernel, least_peak_first

aten: Any = torch.ops.aten

_IN_PLACE: dict[str, Any] = {
    "index_put.default": aten.index_put_.default,
    "_unsafe_index_put.default": aten.index_put_.default,
    "scatter.src": aten.scatter_.src,
    "scatter.value": aten.scatter_.value,
    "scatter_add.default": aten.scatter_add_.default,
    "scatter_reduce.two": aten.scatter_reduce_.two,
    "index_add.default": aten.index_add_.default,
}
"Operations that write at indices, and what the compiler makes of them where nobody else reads what they write to."


@dataclass(slots=True)
class _Step:
    """A node whose result is a tensor of its own, or a view."""

    node: fx.Node
    reads: tuple[fx.Node, ...]
    "Those whose tensors it needs."
    ends: list[fx.Node] = field(default_factory=list)
    "Of what was read here for the last time."


class Kernels:
    """Runs a graph on lists of inputs, which it empties.

    Args:
        graph: Of the compiler's decomposed operations.
        recorder: Gives who records what is run; None where nobody does.
    """

    def __init__(self, graph: fx.GraphModule, recorder: Callable[[], Recorder | None]) -> None:
        self._recorder = recorder
        _add_in_products(graph.graph)
        nodes = list(graph.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._results: Sequence[Any] = nodes[-1].args[0]
        needed = _needed(nodes)
        steps = [_Step(node, _reads(node, needed)) for node in nodes if node.op == "call_function" and node in needed]
        self._steps = _ordered(steps, self._inputs, nodes[-1].all_input_nodes)
        self._unread = _note_ends(self._steps, self._inputs, nodes[-1].all_input_nodes)

    def __call__(self, given: list[Any]) -> list[Any]:
        """Run the graph."""
        with torch_private.no_torch_function():  # what the graph says is no question of the step
            return self._run(given)

    def _run(self, given: list[Any]) -> list[Any]:
        values: dict[fx.Node, Any] = dict(zip(self._inputs, given, strict=True))
        given.clear()
        for node in self._unread:
            del values[node]
        kernel = _Joined(self._recorder())
        for step in self._steps:
            if _is_joined(step.node):
                values[step.node] = kernel.write(step)
                for node in self._overwritten(step):
                    del values[node]
                    kernel.end_before()
            else:
                values[step.node] = _run(step, values)
                kernel.end(step.node)
            for node in step.ends:
                values.pop(node, None)
        return [values[result] if isinstance(result, fx.Node) else result for result in self._results]

    def _overwritten(self, step: _Step) -> list[fx.Node]:
        """What a joined kernel writes over, one tensor at most: see rule 2 of the NOTE."""
        size = _bytes(step.node)
        ending = (node for node in step.ends if node is not step.node and _is_own(node, self._inputs))
        return [node for node in ending if _bytes(node) == size][:1]


class _Joined:
    """The kernel that joined operations go into, until an operation comes that is not joined."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._seen: set[fx.Node] = set()
        self._place = -1

    def end(self, node: fx.Node) -> None:
        """Another operation has run; a view is none."""
        if not _is_view(node):
            self._seen.clear()
            self._place = -1

    def write(self, step: _Step) -> Tensor:
        """The tensor of a joined result, and the work of it."""
        kind = step.node.meta["val"]
        made = torch.empty_strided(kind.shape, kind.stride(), dtype=kind.dtype)
        if self._recorder is None:
            return made
        num_bytes = _bytes(step.node) + sum(_bytes(node) for node in step.reads if node not in self._seen)
        self._seen.update(step.reads, [step.node])
        self._note(_name(step.node), num_bytes)
        return made

    def end_before(self) -> None:
        """What has just been freed, if it has been, was so before the last result came into its place."""
        events = [] if self._recorder is None else self._recorder.recording.events
        if events and events[-1] < 0 < events[-2]:
            events[-2:] = events[-1], events[-2]

    def _note(self, op: str, num_bytes: int) -> None:
        """Count what a joined operation moves as part of its kernel, in place of what making its result counts as."""
        assert self._recorder is not None
        recording = self._recorder.recording
        recording.births[-1].op = op
        position, work = recording.work.pop()
        if self._place < 0:
            self._place = len(recording.work)
            recording.work.append((position, work._replace(op=op, bytes=num_bytes)))
        else:
            position, first = recording.work[self._place]
            recording.work[self._place] = position, first._replace(bytes=first.bytes + num_bytes)


def _add_in_products(graph: fx.Graph) -> None:
    """See rule 6 of the NOTE."""
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        for product, other in (node.args[:2], node.args[1::-1]):
            is_product = isinstance(product, fx.Node) and product.target is aten.mm.default and len(product.users) == 1
            if is_product and isinstance(other, fx.Node) and _shape(product) == _shape(node) and _shape(other):
                node.target, node.args = aten.addmm.default, (other, *product.args)
                graph.erase_node(product)
                break


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _is_joined(node: fx.Node) -> bool:
    if _is_part(node):
        return _is_joined(node.all_input_nodes[0])
    return torch_compiler.is_fused(node.target) and not _is_view(node)


def _is_part(node: fx.Node) -> bool:
    """Whether a node is one of several results of another one."""
    return node.target is operator.getitem


def _is_view(node: fx.Node) -> bool:
    if _is_part(node):
        return _is_view(node.all_input_nodes[0])
    return isinstance(node.target, torch_compiler.OPERATION) and torch_private.is_view(node.target)


def _needed(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes whose results are tensors: see rule 1 of the NOTE."""
    needed = set(nodes[-1].all_input_nodes)
    for node in reversed(nodes):
        if node.op != "call_function" or _is_joined(node):
            continue
        if not _is_view(node):
            needed.add(node)  # also for what it does beside its result
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed


def _reads(node: fx.Node, needed: set[fx.Node]) -> tuple[fx.Node, ...]:
    """The nearest nodes before a node that are tensors."""
    found: dict[fx.Node, None] = {}
    waiting = dict.fromkeys(node.all_input_nodes)
    for one in iter(lambda: next(iter(waiting), None), None):
        del waiting[one]
        if one.op == "placeholder" or (one.op == "call_function" and one in needed):
            found[one] = None
        else:
            waiting.update(dict.fromkeys(one.all_input_nodes))
    return tuple(found)


def _ordered(steps: Sequence[_Step], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> list[_Step]:
    """The steps as the compiler's scheduler puts them: see rule 5 of the NOTE."""
    if any(
        isinstance(step.node.target, torch_compiler.OPERATION) and step.node.target._schema.is_mutable for step in steps
    ):
        return list(steps)
    places = {step.node: place for place, step in enumerate(steps)}
    behind: dict[fx.Node, fx.Node] = {node: node for node in inputs}
    kernels: list[Kernel] = []
    for step in steps:
        shares = _is_view(step.node) or (_is_part(step.node) and not _is_joined(step.node))
        behind[step.node] = behind[step.reads[0]] if shares else step.node
        reads = frozenset(behind[node] for node in step.reads)
        after = frozenset(places[node] for node in step.reads if node in places)
        kernels.append(Kernel(None if shares else step.node, reads, after))
    sizes: dict[Hashable, int] = {node: _bytes(node) for node in behind.values() if _is_own(node, inputs)}
    order = least_peak_first(kernels, sizes, frozenset(behind[node] for node in results))
    return [steps[place] for place in order]


def _note_ends(steps: Sequence[_Step], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> list[fx.Node]:
    """Write down at each step what ends there; gives the inputs that nobody reads."""
    last: dict[fx.Node, _Step | None] = dict.fromkeys(inputs)
    for step in steps:
        last[step.node] = step
        last.update(dict.fromkeys(step.reads, step))
    for node, ending in last.items():
        if ending is not None and node not in results:
            ending.ends.append(node)
    return [node for node, ending in last.items() if ending is None and node not in results]


def _is_own(node: fx.Node, inputs: Sequence[fx.Node]) -> bool:
    """Whether a tensor is the graph's: made in it, or in the forward for this backward alone."""
    if node.op == "call_function":
        return True
    is_backward = any(one.name.startswith("tangents") for one in inputs)
    return is_backward and not node.name.startswith(("primals", "tangents"))


def _name(node: fx.Node) -> str:
    return str((node.all_input_nodes[0] if _is_part(node) else node).target.__name__)  # type: ignore[union-attr]


def _bytes(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(node.meta["val"]))


def _run(step: _Step, values: dict[fx.Node, Any]) -> Any:
    target: Any = step.node.target
    args, kwargs = fx.map_arg((step.node.args, step.node.kwargs), values.__getitem__)
    target_in_place = _IN_PLACE.get(_name(step.node))
    changed = step.node.args[0]
    if target_in_place and changed in step.ends and isinstance(changed, fx.Node) and changed.op == "call_function":
        target = target_in_place
    return target(*args, **kwargs)
