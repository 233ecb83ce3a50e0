import copy
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from models import WIDTH, LinearStack, Transformer, WithDropout, gradients, same_bits, state_of, token_batch, token_loss
from snugfit import Engine, PlanError, Segment, checkpointing, precision, tokens
from snugfit.training.precision import autocast, keep_fp32
from tolerances import EXACT_VALUE

HALVES = [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)]


class Chain(nn.Module):
    """Three 4x4 maps: a fills with 10, b with 500, c with 1 and -1 in turn."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        with torch.no_grad():
            self.a.weight.fill_(10)
            self.b.weight.fill_(500)
            self.c.weight.copy_(torch.tensor([1.0, -1.0]).repeat(4, 2))

    def forward(self, x):
        self.outputs = []
        for layer in (self.a, self.b, self.c):
            x = layer(x)
            self.outputs.append(x)
        return x


def test_c044_with_b_and_c_in_fp32_the_outputs_are_80000_and_0():
    model = Chain()
    with autocast("16-mixed", "cpu"):
        assert model(torch.ones(1, 4)).isnan().all()
        assert model.outputs[1].isinf().all()
        handle = keep_fp32(model, "b", "c")
        result = model(torch.ones(1, 4))
    assert handle.covered == ("b", "c")
    assert [output.dtype for output in model.outputs] == [torch.float16, torch.float32, torch.float32]
    assert (model.outputs[1].unique().item(), result.unique().item()) == (80000.0, 0.0)


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_inputs_are_cast_up_autocast_is_off_inside_and_outputs_stay_fp32(name, dtype):
    seen = {}

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 4))

        def forward(self, pair, *, also):
            seen.update(
                inside=[value.dtype for value in (*pair["both"], also, pair["ids"])],
                autocast=torch.is_autocast_enabled("cpu"),
                product=(also @ self.w).dtype,
            )
            return {"out": also @ self.w, "ids": pair["ids"]}

    model = nn.ModuleDict({"spy": Spy()})
    keep_fp32(model, "spy")
    half, double, ids = torch.ones(1, 4, dtype=dtype), torch.ones(1, 4, dtype=torch.float64), torch.arange(4)
    with autocast(name, "cpu"):
        result = model["spy"]({"both": (half, double), "ids": ids}, also=half)
        assert torch.is_autocast_enabled("cpu")
    assert seen["inside"] == [torch.float32, torch.float64, torch.float32, torch.int64]
    assert (seen["autocast"], seen["product"], result["out"].dtype) == (False, torch.float32, torch.float32)
    assert result["ids"] is ids


def test_without_half_precision_around_it_an_island_changes_nothing():
    model, x = LinearStack(), torch.randn(2, WIDTH)
    expected = model(x)
    keep_fp32(model, "layers.1")
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("patterns", "covered"),
    [
        (("layers.1",), ["layers.1"]),
        (("layers.*",), ["layers.0", "layers.1", "layers.2"]),
        (("layers",), ["layers.0", "layers.1", "layers.2"]),
        (("layers.0", "layers.[12]"), ["layers.0", "layers.1", "layers.2"]),
        ((nn.Linear,), ["layers.0", "layers.1", "layers.2"]),
        (("layers.0", "layers.0"), ["layers.0"]),
        (("",), [""]),
        ((LinearStack,), [""]),
    ],
)
def test_modules_are_named_by_patterns_or_classes(patterns, covered):
    assert list(keep_fp32(LinearStack(), *patterns).covered) == covered


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("layer.*",), "matches no module"),
        (("layers.0", "head"), "matches no module"),
        ((nn.Conv2d,), "Conv2d"),
        ((), "no pattern"),
        ((3,), "3"),
        ((nn.Linear(1, 1),), "Linear"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_and_nothing_is_changed(patterns, message):
    model = LinearStack()
    with pytest.raises(PlanError, match=message):
        keep_fp32(model, *patterns)
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_of_half_precision_are_refused_by_name(dtype, frozen):
    model = LinearStack()
    model.layers[1].to(dtype).requires_grad_(not frozen)
    with pytest.raises(PlanError) as caught:
        keep_fp32(model, "layers.0", "layers.1")
    assert caught.value.parameters == ("layers.1.weight", "layers.1.bias")
    assert "forward" not in model.layers[0].__dict__


def outputs(model, x=None):
    with autocast("bf16-mixed", "cpu"):
        return model(torch.ones(1, WIDTH) if x is None else x)


def test_removing_gives_the_modules_their_own_forward_back_and_twice_does_nothing():
    model = LinearStack()
    before = outputs(model)
    handle = keep_fp32(model, nn.Linear)
    assert outputs(model).dtype == torch.float32
    handle.remove()
    handle.remove()
    assert torch.equal(outputs(model), before)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_second_island_over_the_same_module_is_the_same_island():
    model = LinearStack()
    first, second = keep_fp32(model, "layers.2"), keep_fp32(model, "layers.*")
    assert outputs(model).dtype == torch.float32
    first.remove()
    assert outputs(model).dtype == torch.bfloat16
    second.remove()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_forward_that_somebody_set_is_kept_below():
    model = LinearStack()
    calls = []

    def patched(x):
        calls.append(x.dtype)
        return nn.Linear.forward(model.layers[0], x)

    model.layers[0].forward = patched
    handle = keep_fp32(model, "layers.0")
    outputs(model, torch.ones(1, WIDTH, dtype=torch.bfloat16))
    handle.remove()
    assert calls == [torch.float32]
    assert model.layers[0].forward is patched


def test_a_deep_copy_has_islands_of_its_own():
    model = LinearStack()
    handle = keep_fp32(model, "layers.2")
    twin = copy.deepcopy(model)
    handle.remove()
    with torch.no_grad():
        twin.layers[2].weight.fill_(0.001)
    assert (outputs(model).dtype, outputs(twin).dtype) == (torch.bfloat16, torch.float32)
    assert twin.layers[2].forward.module is twin.layers[2]


# with recomputation

REGIONS = {
    "the island itself": [("layers.1",)],
    "a chain that holds the island": [("layers.0", "layers.1", "layers.2")],
    "a chain that begins with it": [("layers.1", "layers.2")],
    "a chain that ends with it": [("layers.0", "layers.1")],
    "its neighbours": [("layers.0",), ("layers.2",)],
}


@pytest.mark.parametrize("island_first", [True, False])
@pytest.mark.parametrize("region", REGIONS)
def test_recompute_around_an_island_changes_no_bit_in_either_order(region, island_first):
    torch.manual_seed(0)
    model, x = LinearStack(), torch.randn(4, WIDTH)
    plain, apply = copy.deepcopy(model), [Segment(names) for names in REGIONS[region]]
    keep_fp32(plain, "layers.1")
    steps = [lambda: keep_fp32(model, "layers.1"), lambda: checkpointing.apply(model, apply)]
    handles = [step() for step in (steps if island_first else reversed(steps))]
    for one in (plain, model):
        with autocast("bf16-mixed", "cpu"):
            loss = one(x).float().square().mean()
        loss.backward()
    assert same_bits(list(gradients(plain).values()), list(gradients(model).values()))
    for handle in handles:
        handle.remove()
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("island_first", [True, False])
@pytest.mark.parametrize("removed_first", [0, 1])
def test_island_and_recompute_on_one_module_come_off_in_either_order(island_first, removed_first):
    model = LinearStack()
    steps = [lambda: keep_fp32(model, "layers.2"), lambda: checkpointing.apply(model, [Segment("layers.2")])]
    handles = [step() for step in (steps if island_first else reversed(steps))]
    gone = handles[removed_first]
    gone.remove()
    expected = torch.bfloat16 if isinstance(gone, type(keep_fp32(LinearStack(), "layers.2"))) else torch.float32
    assert outputs(model).dtype == expected
    handles[1 - removed_first].remove()
    assert "forward" not in model.layers[2].__dict__


def test_a_recomputed_region_inside_of_an_island_stays_in_fp32():
    model = WithDropout(p=0.0)
    plain, seen = copy.deepcopy(model), []
    for one in (plain, model):
        keep_fp32(one, "")
    checkpointing.apply(model, [Segment("layers.1")])
    model.layers[1][0].register_forward_pre_hook(
        lambda m, a: seen.append((a[0].dtype, torch.is_autocast_enabled("cpu")))
    )
    for one in (plain, model):
        outputs(one).sum().backward()
    assert seen == [(torch.float32, False)] * 2
    assert same_bits(list(gradients(plain).values()), list(gradients(model).values()))


@pytest.mark.parametrize("region", [None, "blocks.0"])
def test_an_engine_trains_a_model_with_islands_under_mixed_precision(region):
    torch.manual_seed(0)
    model = Transformer()
    keep_fp32(model, nn.LayerNorm, "head")
    if region:
        checkpointing.apply(model, [Segment(region)])
    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=token_loss,
        count=tokens(),
        micro_batch_size=2,
        precision="bf16-mixed",
    )
    before = state_of(model)
    assert not engine.step(token_batch(4)).skipped
    assert not same_bits(before, state_of(model))
    with engine.evaluating() as evaluated:
        assert evaluated(token_batch(2)["ids"]).dtype == torch.float32


UNDER_DDP = """
    import os, sys
    sys.path.insert(0, {tests!r})
    import torch
    from torch import distributed as dist
    from models import LinearStack, regression_batch, squared_error
    from snugfit import Engine, precision

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(LinearStack())
    handle = precision.keep_fp32(model, "layers.1")
    seen = []
    model.module.layers[1].register_forward_hook(lambda m, a, out: seen.append(str(out.dtype)))
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=squared_error, precision="bf16-mixed")
    engine.step(regression_batch(4))
    print(handle.covered, seen, model.module.layers[1].weight.dtype, flush=True)
    os._exit(0)  # without waiting for gloo's threads
"""


def test_under_ddp_names_are_those_of_the_plain_module(tmp_path):
    program = textwrap.dedent(UNDER_DDP).format(tests=str(Path(__file__).parent), store=tmp_path / "store")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert run.stdout.strip() == "('layers.1',) ['torch.float32'] torch.float32", run.stderr


# fp32 masters


def test_c034_the_offered_fix_makes_an_exact_master_and_training_runs():
    class Activated(LinearStack):
        def __init__(self):
            super().__init__()
            self.activation = nn.PReLU(init=0.25).half()
            self.frozen = nn.Linear(WIDTH, WIDTH).half().requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.activation(super().forward(x)))

    model = Activated()
    frozen, parameter = state_of(model.frozen), model.activation.weight

    def engine():
        return Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda m, x: m(x).float().square().mean(),
            precision="16-mixed",
        )

    with pytest.raises(PlanError, match=r"activation\.weight") as caught:
        engine()
    assert "to_fp32_masters" in caught.value.hint
    assert precision.to_fp32_masters(model) == ("activation.weight",)
    assert model.activation.weight is parameter
    assert (parameter.dtype, parameter.item()) == (torch.float32, 0.25)
    assert precision.to_fp32_masters(model) == ()
    result = engine().step(torch.randn(4, WIDTH))
    assert not result.skipped
    assert parameter.item() != pytest.approx(0.25, abs=EXACT_VALUE)
    assert same_bits(frozen, state_of(model.frozen))
    assert model.frozen.weight.dtype == torch.float16


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_a_packed_sequence_is_cast_for_an_island(name, dtype):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.lstm = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(self.first(x), torch.tensor([3, 1]), batch_first=True)
            assert packed.data.dtype == dtype
            return self.lstm(packed)[0]

    model = Recurrent()
    keep_fp32(model, "lstm")
    with autocast(name, "cpu"):
        result = model(torch.randn(2, 3, WIDTH))
    assert result.data.dtype == torch.float32
    assert result.batch_sizes.tolist() == [2, 1, 1]
