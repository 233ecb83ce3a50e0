"""CUDA's autocast on traced tensors: torch's own lists, the cache of casts, and what code is told that asks."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from snugfit.memory import torch_private
from snugfit.memory.cuda import autocast, semantics

CUDNN = {"cudnn_convolution", "cudnn_convolution_transpose"}  # registered beside the list
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        (
            "AT_FORALL_LOWER_PRECISION_FP",
            autocast.LOWER_PRECISION - CUDNN,
        ),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", autocast.FLOAT32_OUTPUT),
        ("AT_FORALL_PROMOTE", autocast.PROMOTE),
        ("AT_FORALL_FP32", None),
    ],
)
def test_the_lists_are_those_of_the_installed_torch(macro, ours):
    if not HEADER.exists():
        pytest.skip("this torch comes without headers")
    text = HEADER.read_text()
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", text)[1]
    named = {".".join(part.strip() for part in entry.split(",")) for entry in re.findall(r"_\(([^)]*)\)", body)}
    if ours is None:  # what is in no other list
        registered = set(torch_private.autocast_registrations("AutocastCUDA"))
        ours = registered - autocast.LOWER_PRECISION - autocast.FLOAT32_OUTPUT - autocast.PROMOTE
        ours -= autocast.BANNED | set(autocast.FLOAT32_NORM) | autocast.NOT_IMPOSED
        ours -= {"linalg_matrix_sqrth"}  # registered beside the list in 2.14
    assert named == ours


def under_autocast(function, dtype=torch.bfloat16, **options):
    casts = []
    with semantics.cuda_semantics((8, 0), casts.append), torch_private.FakeMode():
        with torch.autocast("cuda", dtype, **options):
            result = function()
    return result, casts


@pytest.fixture
def another_library():
    """Operators of another library, each with its own rule for autocast: the input is cast to float64."""
    with torch.library._scoped_library("snugfit_other", "FRAGMENT") as library:
        for name, keys in (("both", ("CPU", "CUDA")), ("on_cpu", ("CPU",)), ("on_cuda", ("CUDA",))):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x.clone(), "CompositeExplicitAutograd")
            for key in keys:
                library.impl(name, lambda x: x.double(), f"Autocast{key}")
        yield torch.ops.snugfit_other


def test_operators_of_other_libraries_keep_their_rules_for_autocast(another_library):
    """torchvision brings such operators; any import of it is enough."""
    value, assumed = torch.zeros(2, dtype=torch.bfloat16), []
    operators = [getattr(another_library, name) for name in ("both", "on_cpu", "on_cuda")]
    for _ in range(2):  # what is imposed is taken back
        with semantics.cuda_semantics((8, 0), assume=assumed.append), torch.autocast("cuda", torch.bfloat16):
            kinds = [operator(value).dtype for operator in operators]
        assert kinds == [torch.float64, torch.bfloat16, torch.bfloat16]
        with torch.autocast("cpu", torch.bfloat16):
            assert [operator(value).dtype for operator in operators] == [torch.float64, torch.float64, torch.bfloat16]
    assert len(set(assumed)) == 1
    assert assumed[0].startswith("snugfit_other::on_cuda")


def test_without_its_cache_a_weight_is_cast_at_every_use():
    def forward():
        linear = nn.Linear(4, 4, bias=False)
        return linear(linear(torch.zeros(2, 4)))

    assert len(under_autocast(forward)[1]) == 1
    assert len(under_autocast(forward, cache_enabled=False)[1]) == 0


def test_only_single_precision_leaves_that_need_a_gradient_are_kept():
    def forward():
        frozen, view, double = torch.zeros(4, 4), torch.zeros(8, 4, requires_grad=True)[:4], torch.zeros(4, 4).double()
        value = torch.zeros(2, 4)
        return value @ frozen, value @ view, value.double() @ double

    results, casts = under_autocast(forward)
    assert [result.dtype for result in results] == [torch.bfloat16, torch.bfloat16, torch.float64]
    assert casts == []


def test_a_region_without_autocast_inside_keeps_the_casts_of_the_outer_one():
    def forward():
        linear = nn.Linear(4, 4, bias=False)
        linear(torch.zeros(2, 4))
        with torch.autocast("cuda", enabled=False):
            inner = linear(torch.zeros(2, 4)).dtype
        linear(torch.zeros(2, 4))
        return inner

    inner, casts = under_autocast(forward)
    assert inner == torch.float32
    assert len(casts) == 1


def test_code_that_asks_for_the_autocast_of_cuda_is_told():
    def ask():
        return torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

    assert under_autocast(ask)[0] == (True, True, torch.bfloat16)
    with semantics.cuda_semantics((8, 0)):
        assert ask() == (False, False, torch.float16)
    assert torch.is_autocast_enabled("cpu") is False


def test_a_custom_function_runs_backward_in_the_state_of_its_forward():
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, value):
            ctx.save_for_backward(value)
            return value @ value

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            seen.append((gradient @ ctx.saved_tensors[0]).dtype)
            return gradient

    class Cast(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
        def forward(ctx, value):
            seen.append((value.dtype, torch.is_autocast_enabled()))
            return value.float()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            return gradient

    with semantics.cuda_semantics((8, 0)), torch_private.FakeMode():
        with torch.autocast("cuda", torch.bfloat16):
            value = torch.zeros(4, 4, requires_grad=True)
            result = Product.apply(value).float() + Cast.apply(value)
        result.sum().backward()
    assert seen == [(torch.float16, False), torch.bfloat16]


def test_the_norm_of_half_precision_makes_no_copy_in_single_precision():
    class Operations(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    names = []

    def norm():
        value = torch.zeros(4, 4, dtype=torch.bfloat16)
        with Operations():
            return value.norm(), value.norm(dim=0)

    results, _ = under_autocast(norm)
    assert [result.dtype for result in results] == [torch.float32, torch.float32]
    assert "_to_copy.default" not in names


def test_binary_cross_entropy_is_refused_as_on_the_card():
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        under_autocast(lambda: nn.functional.binary_cross_entropy(torch.zeros(4), torch.zeros(4)))


def test_a_loss_of_several_operations_sees_autocast_in_each_of_them_as_on_the_card():
    """CUDA has no rule for cross entropy itself: its log-softmax keeps the scores' type, its likelihood is float32."""

    class Operations(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            first = result[0] if isinstance(result, tuple) else result
            if isinstance(first, torch.Tensor):
                seen.append((func._schema.name.removeprefix("aten::"), str(first.dtype)[6:]))
            return result

    seen = []

    def loss():
        scores, labels = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.long)
        with Operations():
            return (nn.functional.cross_entropy(scores, labels),)

    (value,), _ = under_autocast(loss)
    assert value.dtype == torch.float32
    assert seen == [("_log_softmax", "bfloat16"), ("_to_copy", "float32"), ("nll_loss_forward", "float32")]
