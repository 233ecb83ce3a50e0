import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import snugfit
from snugfit.memory import torch_private
from snugfit.memory.cuda import semantics


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch_private.DEVICE_QUERY:
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def operations_of(function, capability=(8, 6)):
    with semantics.cuda_semantics(capability), torch_private.FakeMode(), Operations() as seen:
        result = function()
    return seen.names, result


def attention(dtype=torch.bfloat16, head_dim=64, mask=None, **options):
    query = torch.zeros(2, 4, 32, head_dim, dtype=dtype, requires_grad=True)
    return F.scaled_dot_product_attention(query, query, query, attn_mask=mask() if mask else None, **options)


@pytest.mark.parametrize(
    ("kernel", "options", "capability"),
    [
        ("_scaled_dot_product_flash_attention", {}, (8, 0)),
        ("_scaled_dot_product_flash_attention", {"is_causal": True, "dropout_p": 0.1}, (9, 0)),
        ("_scaled_dot_product_efficient_attention", {"dtype": torch.float32}, (8, 6)),
        ("_scaled_dot_product_efficient_attention", {"mask": lambda: torch.ones(32, 32, dtype=torch.bool)}, (8, 6)),
        ("_scaled_dot_product_efficient_attention", {"dtype": torch.float16}, (7, 5)),
        ("bmm", {"dtype": torch.bfloat16}, (7, 5)),
        ("bmm", {"dtype": torch.float64}, (9, 0)),
        ("bmm", {"head_dim": 257, "mask": None}, (8, 0)),
    ],
)
def test_attention_takes_the_kernel_that_cuda_would_take(kernel, options, capability):
    names, output = operations_of(lambda: attention(**options), capability)
    assert kernel in names
    assert output.shape[:3] == (2, 4, 32)


def test_c095_attention_keeps_scores_only_where_no_fused_kernel_runs():
    def saved_bytes(mask, capability):
        saved = []
        with (
            semantics.cuda_semantics(capability),
            torch_private.FakeMode(),
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        ):
            query = torch.zeros(1, 8, 2048, 64, dtype=torch.float16, requires_grad=True)
            F.scaled_dot_product_attention(query, query, query, attn_mask=mask)
        return sum(t.untyped_storage().nbytes() for t in saved if t.shape[-2:] == (2048, 2048))

    assert saved_bytes(None, (8, 0)) == 0
    assert saved_bytes(None, (4, 0)) >= 67108864


def test_dropout_saves_a_bool_mask_and_runs_as_one_kernel():
    names, _ = operations_of(lambda: F.dropout(torch.zeros(8, requires_grad=True), 0.1))
    assert names[-1] == "native_dropout"
    names, _ = operations_of(lambda: F.dropout(torch.zeros(8), 0.1, training=False))
    assert "native_dropout" not in names


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_of_half_precision_to_float32_is_made_of_what_torch_makes_it_of_on_cuda(function, dtype):
    """Of float16 it is one kernel, of bfloat16 there is a float32 copy: torch itself says so, of a fake CUDA tensor."""

    def softmax(device):
        return function(torch.zeros(4, 4, dtype=dtype, device=device), -1, dtype=torch.float32)

    names, result = operations_of(lambda: softmax("cpu"))
    with FakeTensorMode(), Operations() as of_torch:
        softmax("cuda")
    assert names == of_torch.names
    assert ("_to_copy" in names) == (dtype == torch.bfloat16)
    assert result.dtype == torch.float32


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_a_log_softmax_runs_in_every_precision(precision):
    job = snugfit.Job(
        lambda: nn.Linear(8, 4),
        lambda model, x: F.log_softmax(model(x), -1).square().mean(),
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: torch.randn(n, 8),
    )
    plan = snugfit.Plan(batch_size=4, micro_batch_size=2, precision=precision)
    assert snugfit.estimate(job, plan, "a100-80gb").peak_allocated_bytes > 0


def autocast_dtype(function, dtype=torch.bfloat16, argument=torch.float32):
    with semantics.cuda_semantics((8, 0)), torch_private.FakeMode():
        value = torch.ones(4, 4, dtype=argument)
        with torch.autocast("cuda", dtype):
            return function(value).dtype


@pytest.mark.parametrize(
    ("function", "argument", "expected"),
    [
        (lambda x: x @ x, torch.float32, torch.bfloat16),
        (lambda x: F.linear(x, x), torch.float32, torch.bfloat16),
        (lambda x: torch.einsum("ij,jk->ik", x, x), torch.float32, torch.bfloat16),
        (torch.exp, torch.bfloat16, torch.float32),
        (lambda x: F.layer_norm(x, (4,)), torch.bfloat16, torch.float32),
        (lambda x: x.sum(), torch.bfloat16, torch.float32),
        (lambda x: torch.softmax(x, -1), torch.bfloat16, torch.float32),
        (lambda x: x.pow(2), torch.bfloat16, torch.float32),
        (F.gelu, torch.bfloat16, torch.bfloat16),
        (lambda x: torch.cat([x, x]), torch.bfloat16, torch.bfloat16),
        (lambda x: torch.addcmul(x, x, x.float()), torch.bfloat16, torch.float32),
        (lambda x: x @ x, torch.float64, torch.float64),
    ],
)
def test_autocast_gives_the_types_of_cuda(function, argument, expected):
    assert autocast_dtype(function, argument=argument) == expected


def test_autocast_on_cuda_defaults_to_fp16_and_can_be_switched_off_inside():
    with semantics.cuda_semantics((8, 0)), torch_private.FakeMode(), torch.autocast("cuda"):
        value = torch.ones(4, 4)
        assert (value @ value).dtype == torch.float16
        with torch.autocast("cuda", enabled=False):
            assert (value @ value).dtype == torch.float32


def test_a_cast_weight_is_kept_until_the_outermost_autocast_ends():
    casts = []
    with semantics.cuda_semantics((8, 0), casts.append), torch_private.FakeMode():
        linear = torch.nn.Linear(4, 4, bias=False)
        with torch.autocast("cuda", torch.bfloat16):
            linear(torch.zeros(2, 4))
            linear(torch.zeros(2, 4))
            assert len(casts) == 1
        with torch.autocast("cuda", torch.bfloat16):
            linear(torch.zeros(2, 4))
    assert [cast.dtype for cast in casts] == [torch.bfloat16, torch.bfloat16]


def test_everything_is_undone_at_the_end():
    def types():
        with torch.autocast("cpu", torch.bfloat16):
            value = torch.ones(2, 2, dtype=torch.bfloat16)
            return value.exp().dtype, (value.float() @ value.float()).dtype, F.dropout(torch.ones(4), 0.5).dtype

    before = types()
    init = torch.autocast.__init__
    with semantics.cuda_semantics((8, 0)):
        pass
    assert types() == before == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert torch.autocast.__init__ is init
