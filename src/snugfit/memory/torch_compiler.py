"""What of torch's compiler is not public: its capture of a function as two graphs, without any code of theirs.

Entry points: ``captured`` and ``called_instead``. A part of ``torch_private`` in a file of its own, because importing
the compiler takes seconds: it happens where a step asks for it, and nowhere else.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules import module as _module
from torch.utils import _pytree

from snugfit.memory import torch_private

_WATCHING = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)
_REDUCTIONS = frozenset(
    """all amax amin any argmax argmin logsumexp mean prod std std_mean sum var var_mean xor_sum
    prepare_softmax_online""".split()
)
_INDEXING = frozenset(
    ["cat", "constant_pad_nd", "embedding", "fill", "flip", "gather", "index", "index_select", "rand"]
)
_RANDOM = frozenset("rand inductor_seed inductor_seeds inductor_lookup_seed inductor_random inductor_randint".split())
_FUSED = _REDUCTIONS | _INDEXING | _RANDOM
OPERATION = torch._ops.OpOverload

Execute = Callable[[torch.fx.GraphModule], Callable[[list[Any]], Sequence[Any]]]
"""Makes what runs a graph: a function of the list of its inputs, which it may empty."""


def flattened(value: Any) -> tuple[list[Any], Any]:
    """What nested containers hold in their order, and the containers themselves."""
    leaves, containers = _pytree.tree_flatten(value)
    return leaves, containers


def unflattened(leaves: Sequence[Any], containers: Any) -> Any:
    """The nested containers of ``flattened`` around other leaves."""
    return _pytree.tree_unflatten(leaves, containers)


def captured(
    function: Callable[..., list[Tensor]], inputs: Sequence[Tensor], num_weights: int, execute: Execute
) -> Callable[..., list[Tensor]]:
    """A function as torch's compiler would run it: forward and backward as graphs, cut by its partitioner.

    Args:
        function: Of tensors, giving tensors.
        inputs: Of the kinds that it will be called with.
        num_weights: How many of them, at the front, are parameters and buffers.
        execute: Called with each graph, of operations in the compiler's decomposition.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

    def partition(graph: Any, given: Any, **options: Any) -> Any:
        options["static_lifetime_input_indices"] = list(range(num_weights))
        return partition_fn(graph, given, **options)

    refused: list[Exception] = []

    def compiler(gm: Any, example_inputs: Any) -> Any:
        try:
            execution = execute(gm)
        except Exception as error:  # of a backward torch would try once more when it runs
            refused.append(error)
            raise

        def run(given: list[Any]) -> Sequence[Any]:
            return execution(given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    mode = FakeTensorMode()
    with _apart(), mode, V.set_fake_mode(mode):
        examples = [_example(tensor) for tensor in inputs]
        made: Callable[..., list[Tensor]] = aot_function(
            function,
            compiler,
            partition_fn=partition,
            decompositions=select_decomp_table(),
            num_params_buffers=num_weights,
            keep_inference_input_mutations=True,
            enable_log=False,
        )
        made(*examples)
    if refused:
        raise refused[0]
    return made


def _example(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def _apart() -> Iterator[None]:
    """Nothing that is set up around a trace sees what runs here: modes, hooks of modules and of saved tensors."""
    with ExitStack() as stack:
        stack.enter_context(torch_private.no_modes())
        stack.enter_context(_no_function_modes())
        stack.enter_context(_no_saved_tensor_hooks())
        for name in _WATCHING:
            stack.enter_context(mock.patch.dict(getattr(_module, name), clear=True))
        stack.enter_context(_kernels_looked_up_anew())
        stack.enter_context(_OnHost())
        yield


class _OnHost(torch.overrides.TorchFunctionMode):
    """Reads the name of a card as the host, where all fake tensors of a trace are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            return args[0]
        if func in (torch.device, torch_private.PARSE_TO):
            return func(*args, **(kwargs or {}))
        return func(*map(_host, args), **{key: _host(value) for key, value in (kwargs or {}).items()})


def _host(value: Any) -> Any:
    is_card = isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"
    return torch.device("cpu") if is_card else value


@contextmanager
def _kernels_looked_up_anew() -> Iterator[None]:
    """A trace has kernels of its own for a while, and the compiler remembers where it has found which."""
    _forget_kernels()
    try:
        yield
    finally:
        _forget_kernels()


def _forget_kernels() -> None:
    operations: Any = torch._ops
    for operation in operations.get_cached_ops():
        operation._dispatch_cache.clear()
    operations.reset_cached_ops()


@contextmanager
def _no_function_modes() -> Iterator[None]:
    taken = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(taken):
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def _no_saved_tensor_hooks() -> Iterator[None]:
    """Hooks that are set meanwhile raise: what they keep, a graph of the compiler's does not know."""
    hooks: Any = torch._C._autograd
    taken = []
    while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
        taken.append(top)
        hooks._pop_saved_tensors_default_hooks()
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("recomputed or offloaded inside of compiled code"):
            yield
    finally:
        for pack, unpack in reversed(taken):
            hooks._push_saved_tensors_default_hooks(pack, unpack)


def is_captured(tensor: Any) -> bool:
    """Whether a tensor stands for one while a function of it is captured."""
    return isinstance(tensor, FunctionalTensor)


# --- graphs ---


@functools.cache
def is_fused(operation: Any) -> bool:
    """Whether the compiler makes an operation part of a kernel of its own, without a tensor for each result."""
    from torch._functorch.partitioners import get_default_op_list

    if not isinstance(operation, OPERATION) or operation._schema.is_mutable:
        return False
    packet = operation._overloadpacket
    known = torch.Tag.pointwise in operation.tags or packet in get_default_op_list().fusible_ops
    return known or packet.__name__ in _FUSED


def writes(operation: Any) -> bool:
    """Whether an operation writes into its arguments."""
    return isinstance(operation, OPERATION) and operation._schema.is_mutable


# --- what torch.compile makes ---

_COMPILED = "snugfit_is_compiled"


def taken_as_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Say that a function allocates what compiled code does, so that compiling it gives itself."""
    setattr(function, _COMPILED, True)
    return function


@contextmanager
def called_instead(instead: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> Iterator[None]:
    """Let what is compiled from now on be another function, also inside of compiled modules.

    Args:
        instead: Called with a function that is to be compiled and the name of the backend.
    """
    original: Callable[..., Any] = torch.compile
    with ExitStack() as stack:
        if "torch._dynamo.eval_frame" in sys.modules:
            _replace_context(stack, instead)

        def compile(*args: Any, **kwargs: Any) -> Any:
            if args and hasattr(args[0], _COMPILED):
                return args[0]
            if not is_replaced():
                _replace_context(stack, instead)
            return original(*args, **kwargs)

        def is_replaced() -> bool:
            frames = sys.modules.get("torch._dynamo.eval_frame")
            return frames is not None and hasattr(frames.OptimizeContext.__call__, "snugfit_replaced")

        stack.enter_context(mock.patch.object(torch, "compile", compile))
        yield


def _replace_context(stack: ExitStack, instead: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> None:
    from torch._dynamo import eval_frame

    original: Any = eval_frame.OptimizeContext.__call__
    module_call: Any = eval_frame.OptimizedModule.__call__

    def call(context: Any, function: Any) -> Any:
        if isinstance(function, (nn.Module, type)):
            return original(context, function)
        return instead(function, backend(context))

    def backend(context: Any) -> str:
        return str(getattr(eval_frame.innermost_backend(context.callback), "compiler_name", ""))

    def call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
        forward = module.__dict__.get("forward")
        if hasattr(forward, "_torchdynamo_orig_callable"):  # it was compiled before
            replaced = instead(forward._torchdynamo_orig_callable, backend(module.dynamo_ctx))
            stack.enter_context(mock.patch.dict(module.__dict__, forward=replaced))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using `torch.compile")  # of hooks, which are the trace's
            return module_call(module, *args, **kwargs)

    call.snugfit_replaced = True  # type: ignore[attr-defined]
    stack.enter_context(mock.patch.object(eval_frame.OptimizeContext, "__call__", call))
    stack.enter_context(mock.patch.object(eval_frame.OptimizedModule, "__call__", call_module))
