"""What torch's partitioner keeps and recomputes of a GPT-2 under ``activation_memory_budget``, at its real shape.

Entry point: ``partitioned``. The model is compiled up to the partition and no further, so nothing is executed.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch._functorch.config
from gpt2 import GPT, Shape
from operations import nanoseconds
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Partition:
    """One answer of the partitioner."""

    budget: float
    saved_bytes: int
    "Without parameters and inputs; casts of weights count where they are saved, as they do in eager mode."
    recomputed: tuple[str, ...]
    "Operations that are in both halves."
    backward_bytes: int
    "Most alive of activations and their gradients while its backward runs in its order."
    extra_ns: int
    "Their time, each by itself: that a compiler fuses them is left out."


class _Found(Exception):
    """Ends the compilation: all that is wanted is known."""


@cache
def partitioned(shape: Shape, batch: int, budget: float) -> Partition:
    """Partition forward and backward of a GPT's blocks for a budget between 0 and 1."""
    found: list[tuple[Any, Any]] = []

    def partition(joint: Any, inputs: Any, **given: Any) -> tuple[Any, Any]:
        found.append(min_cut_rematerialization_partition(joint, inputs, **given))
        raise _Found

    def unreached(graph: Any, inputs: Any) -> Any:
        return graph

    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = budget
    torch._functorch.config.activation_memory_budget_solver = "dp"
    model = GPT(shape)
    backend = aot_autograd(fw_compiler=unreached, bw_compiler=unreached, partition_fn=partition)
    ids = torch.zeros(batch, shape.context, dtype=torch.long)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.compile(model, backend=backend)(ids)
    except Exception as error:
        if not found:
            raise error
    return _read(budget, *found[0])


def _read(budget: float, forward: Any, backward: Any) -> Partition:
    made = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    saved = {}
    for node in backward.graph.nodes:
        if node.op == "placeholder" and not node.name.startswith(("primals", "tangents")):
            origin = next((one for one in forward.graph.nodes if one.name == node.name), None)
            if origin is not None and _storage(origin).op != "placeholder":
                kept = _storage(origin)
                saved[kept.name] = _size(kept)
    again = [node for node in backward.graph.nodes if node.op == "call_function" and node.name in made]
    spent = [(str(node.target), _nanoseconds(node)) for node in again]
    return Partition(
        budget,
        sum(saved.values()),
        tuple(name for name, ns in spent if ns),
        _most_alive(backward),
        sum(ns for _, ns in spent),
    )


def _of_weights_only(node: Any) -> bool:
    """Whether a node is a parameter, or a view or cast of one."""
    if node.op == "placeholder":
        return True
    sources = node.all_input_nodes
    return len(sources) == 1 and str(node.target) in _SAME and _of_weights_only(sources[0])


_VIEWS = {"aten.view.default", "aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.detach.default"}
_SAME = _VIEWS | {"aten._to_copy.default"}


def _storage(node: Any) -> Any:
    """The node whose memory a node shows: views of one tensor count once, and keep all of it alive."""
    while str(node.target) in _VIEWS or _is_part(node):
        node = node.all_input_nodes[0]
    return node


def _most_alive(backward: Any) -> int:
    """Most bytes of saved and made tensors alive in a graph; parameters, their casts and gradients are others' part."""
    nodes = list(backward.graph.nodes)
    last: dict[Any, int] = {}
    for place, node in enumerate(nodes[:-1]):
        for one in [node, *node.all_input_nodes]:
            last[_storage(one)] = place
    outside = {_storage(one) for one in nodes[-1].all_input_nodes}
    alive = most = 0
    dies: dict[int, int] = {}
    for place, node in enumerate(nodes[:-1]):
        counts = _storage(node) is node and not node.name.startswith("primals") and not _of_weights_only(node)
        saved = node.op == "placeholder" and not node.name.startswith("primals")
        if node not in outside and (counts or saved):
            size = 0 if isinstance(node.meta.get("val"), tuple | list) else _size(node)  # its parts follow, one by one
            alive += size
            dies[last[node]] = dies.get(last[node], 0) + size
        most = max(most, alive)
        alive -= dies.pop(place, 0)
    return most


def _size(node: Any) -> int:
    value = node.meta.get("val")
    return _num_bytes(value) if isinstance(value, Tensor) else 0


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_part(node: Any) -> bool:
    """Whether a node is, or picks, one of the equal parts of a tensor."""
    if node.op != "call_function":
        return False
    made_by = node.all_input_nodes[0] if "getitem" in str(node.target) else node
    return str(made_by.target) == "aten.unbind.int"


def _nanoseconds(node: Any) -> int:
    """Time of an operation, by its FLOPs and the tensors that it reads and writes."""
    if str(node.target) in _VIEWS or "getitem" in str(node.target) or str(node.target) == "aten.unbind.int":
        return 0
    inputs = [one.meta["val"] for one in node.all_input_nodes]
    outputs = pytree.tree_leaves(node.meta["val"])
    tensors = [one for one in [*pytree.tree_leaves(inputs), *outputs] if isinstance(one, Tensor)]
    flops = 0
    if "mm" in str(node.target):
        left, right = [one for one in inputs if one.dim() == 2][-2:]
        flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    if "attention" in str(node.target):
        batch, heads, length, size = inputs[0].shape
        flops = 4 * batch * heads * length * length * size  # as torch counts them, causal or not
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32"
    return nanoseconds(str(node.target).removeprefix("aten."), dtype, flops, sum(map(_num_bytes, tensors)))
