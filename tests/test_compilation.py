"""Compiled code in a trace keeps what torch's own partitioner keeps, counted on real compiled modules by hooks."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import snugfit
from saved_tensors import saved_bytes
from snugfit import Job, Plan
from snugfit.memory import torch_compiler
from snugfit.memory.steps import compilation
from snugfit.memory.steps.kernel_order import Kernel, least_peak_first
from snugfit.memory.tracing import record
from snugfit.training import checkpointing

CARD = "rtx-3060-12gb"
PARTITIONED = "aot_eager_decomp_partition"
"The compiler's decompositions and partitioner without its code generation, which needs a C++ compiler."
LOSS_AND_SEED = 2 * 4
"In a trace the loss and the gradient that backward starts from are alive as well."

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using `torch.compile"),
]


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(attended), 0.1, self.training)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(100, 32), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).mean((2, 3)))


def block_in_bf16():
    model = Block()
    compiled = torch.compile(model, backend=PARTITIONED)
    x = torch.zeros(4, 16, 32)

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return compiled(x).float().sum()

    return model, run, x


def compiled_blocks():
    model = LanguageModel()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=PARTITIONED)
    ids = torch.zeros(4, 16, dtype=torch.long)
    return model, lambda: model(ids), ids


def compiled_model():
    model = LanguageModel()
    del model.blocks[1]
    model.compile(backend=PARTITIONED)
    ids = torch.zeros(4, 16, dtype=torch.long)
    return model, lambda: model(ids), ids


def compiled_picture():
    model = Picture()
    compiled, x = torch.compile(model, backend=PARTITIONED), torch.zeros(2, 3, 16, 16)
    return model, lambda: compiled(x).sum(), x


def compiled_loss():
    model = nn.Linear(32, 500)
    loss = torch.compile(lambda logits, labels: F.cross_entropy(logits.float(), labels), backend=PARTITIONED)
    x, labels = torch.zeros(64, 32), torch.zeros(64, dtype=torch.long)
    return model, lambda: loss(model(x), labels), (x, labels)


@pytest.mark.parametrize("build", [block_in_bf16, compiled_blocks, compiled_model, compiled_picture, compiled_loss])
def test_saved_bytes_are_those_that_hooks_count_on_the_real_compiled_step(build):
    torch.manual_seed(0)
    model, run, inputs = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run().backward()  # compiles
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        real = saved_bytes(run, (*model.parameters(), *model.buffers(), *inputs))
    torch._dynamo.reset()

    def make_step():
        _, run, _ = build()
        return lambda: run().backward()

    report = snugfit.trace(make_step, "cpu")
    assert compilation.COMPILED in report.assumptions
    assert compilation.EAGER not in report.assumptions
    held = report.at("forward end")
    assert held["saved"] + held.get("autocast", 0) == real + LOSS_AND_SEED


def test_a_compiled_chain_of_pointwise_operations_allocates_its_result_alone():
    def make_step():
        function = torch.compile(lambda x: F.gelu(x * 3 + 1).relu() * 2)
        x = torch.zeros(1024, device="cuda")

        def step():
            with torch.no_grad():
                return function(x).shape

        return step

    assert snugfit.trace(make_step, CARD).peak_allocated_bytes == 2 * 4096


def forward_work(function, *shapes):
    def make_step(_):
        compiled = torch.compile(function)
        tensors = [torch.zeros(shape) for shape in shapes]

        def step():
            with torch.no_grad():
                return compiled(*tensors).shape

        return step

    recording = record(make_step, snugfit.hardware.resolve("cpu"), 1).recording
    return [(work.op, work.bytes) for _, work in recording.work if work.phase == "forward"]


def test_work_of_joined_operations_is_one_pass_over_inputs_and_results():
    assert forward_work(lambda x, y: torch.sin(x * 3 + y) * 2, 1000, 1000) == [("mul.Tensor", 3 * 4000)]


def test_a_product_that_is_only_added_is_done_with_the_addition():
    square = 30 * 30 * 4
    work = forward_work(lambda x, y, z: x @ y + z.exp(), (30, 30), (30, 30), (30, 30))
    assert work == [("exp.default", 2 * square), ("addmm.default", 4 * square)]


def test_products_of_a_compiled_block_are_counted_as_those_of_the_plain_one():
    def flops(compiled):
        def make_step(_):
            model, x = Block(), torch.zeros(4, 16, 32)
            run = torch.compile(model) if compiled else model
            return lambda: run(x).sum().backward()

        recording = record(make_step, snugfit.hardware.resolve("cpu"), 1).recording
        return sum(work.flops for _, work in recording.work)

    assert flops(compiled=True) == flops(compiled=False)


class Unread(nn.Linear):
    pass


class Numbered(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.number


class NumberedByClass(Numbered):
    number = 0


@pytest.mark.parametrize(("kind", "times"), [(Unread, 1), (Numbered, 3), (NumberedByClass, 3)])
def test_layers_that_differ_by_a_number_are_captured_once_if_nobody_reads_it(kind, times, monkeypatch):
    captured = []
    original = torch_compiler.captured
    monkeypatch.setattr(torch_compiler, "captured", lambda *given: captured.append(1) or original(*given))

    def make_step():
        layers = [kind(8, 8) for _ in range(3)]
        for number, layer in enumerate(layers):
            layer.number = number
            layer.compile()
        x = torch.zeros(4, 8, requires_grad=True)
        return lambda: layers[2](layers[1](layers[0](x))).sum().backward()

    snugfit.trace(make_step, "cpu")
    assert len(captured) == times


def test_a_compiled_layer_has_the_name_of_the_layer():
    report = snugfit.trace(lambda: lambda: compiled_blocks()[1]().backward(), "cpu")
    assert "blocks.0" in report.by_module
    assert not any("_orig_mod" in name for name in report.by_module)


def test_a_trace_does_not_depend_on_the_device_of_the_one_before():
    def make_step():
        model = torch.compile(Block())
        x = torch.zeros(4, 16, 32, device="cpu")
        return lambda: model(x).sum().backward()

    first = snugfit.trace(make_step, "cpu")
    snugfit.trace(make_step, CARD)
    assert snugfit.trace(make_step, "cpu").by_category == first.by_category


def test_compiled_layers_of_recomputed_segments_keep_their_inputs():
    def make_step(policy):
        def make():
            model, run, _ = compiled_blocks()
            if policy:
                checkpointing.apply(model, checkpointing.blocks(model))
            return lambda: run().backward()

        return make

    plain, recomputed = (snugfit.trace(make_step(policy), "cpu").at("forward end")["saved"] for policy in (0, 1))
    inputs_and_last = 3 * 4 * 16 * 32 * 4
    probabilities_and_weight = 4 * 16 * 100 * 4 + 4
    random_states = 2 * torch.get_rng_state().nbytes
    assert recomputed == inputs_and_last + probabilities_and_weight + random_states + LOSS_AND_SEED
    assert recomputed < plain


def test_a_model_that_was_compiled_before_it_was_given_to_a_job_is_traced_as_compiled():
    job = Job(
        torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))),
        lambda model, x: model(x).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda n: torch.zeros(n, 8),
    )
    assert compilation.COMPILED in snugfit.estimate(job, Plan(batch_size=4, micro_batch_size=4), CARD).assumptions


def counting():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    return Counting(8, 8)


def recomputed_inside():
    class Recomputed(nn.Linear):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    return Recomputed(8, 8)


def hooked():
    layer = nn.Linear(8, 8)
    layer.register_full_backward_hook(lambda module, inputs, outputs: None)
    return layer


def with_segments():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    checkpointing.apply(model, checkpointing.blocks(model))
    return model


@pytest.mark.parametrize("build", [counting, recomputed_inside, hooked, with_segments, lambda: nn.RNN(8, 8)])
def test_what_is_no_single_graph_runs_as_plain_code_and_the_report_says_so(build):
    def make_step(compiled):
        def make():
            layer = build()
            run = torch.compile(layer) if compiled else layer
            x = torch.zeros(4, 2, 8, requires_grad=True)

            def step():
                out = run(x)
                (out[0] if isinstance(out, tuple) else out).sum().backward()

            return step

        return make

    plain, compiled = (snugfit.trace(make_step(flag), "cpu") for flag in (False, True))
    assert compilation.EAGER in compiled.assumptions
    assert compilation.EAGER not in plain.assumptions
    assert compiled.by_category == plain.by_category


def test_a_compiler_that_is_not_torchs_own_is_traced_as_plain_code():
    def make_step():
        function = torch.compile(torch.nn.functional.gelu, backend=lambda graph, inputs: graph)
        return lambda: function(torch.zeros(4, requires_grad=True)).sum().backward()

    assert compilation.EAGER in snugfit.trace(make_step, "cpu").assumptions


def test_of_kernels_that_can_run_the_one_that_frees_most_comes_first():
    kernels = [
        Kernel("big", frozenset(["saved"]), frozenset()),
        Kernel("small", frozenset(["saved", "large"]), frozenset()),
        Kernel("end", frozenset(["big"]), frozenset([0])),
    ]
    sizes = {"saved": 10, "large": 100, "big": 100, "small": 1, "end": 1}
    assert least_peak_first(kernels, sizes, frozenset(["small", "end"])) == [1, 0, 2]
    assert least_peak_first(kernels, {**sizes, "small": 1000}, frozenset(["small", "end"])) == [0, 2, 1]


kept_outside = []


def stores_in_a_list_of_the_file(x):
    kept_outside.append(x.detach())


def storing(where):
    """A layer that stores a tensor where its user reads it later."""

    class Storing(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.history, self.last, self.inside = [], {}, []

        def forward(self, x):
            x = super().forward(x)
            if where == "list":
                self.history.append(x.detach())
                return x + sum(self.history[-2:])
            if where == "dict":
                self.last["x"] = x.detach()
            if where == "nested":
                self.inside.append({"x": (x.detach(), 1)})
            if where == "file":
                stores_in_a_list_of_the_file(x)
            return x

    return Storing()


@pytest.mark.parametrize("where", ["list", "dict", "nested", "file"])
def test_what_compiled_code_stores_is_no_tensor_of_the_compiler(where):
    layer = storing(where)

    def make_step():
        run = torch.compile(layer)
        x = torch.zeros(4, 8, requires_grad=True)
        return lambda: run(x).sum().backward()

    try:
        traced = snugfit.trace(make_step, "cpu")
        stored = [*layer.history, *layer.last.values(), *(e["x"][0] for e in layer.inside), *kept_outside]
    finally:
        kept_outside.clear()
    assert compilation.EAGER in traced.assumptions
    assert stored
    assert not any(map(torch_compiler.is_captured, stored))


def test_compiled_code_that_counts_its_calls_in_a_list_is_still_one_graph():
    calls = []

    class Noting(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    def make_step():
        run = torch.compile(Noting(8, 8))
        x = torch.zeros(4, 8, requires_grad=True)
        return lambda: run(x).sum().backward()

    traced = snugfit.trace(make_step, "cpu")
    assert compilation.COMPILED in traced.assumptions
    assert compilation.EAGER not in traced.assumptions


def test_a_tensor_that_compiled_code_hides_in_an_object_is_refused_as_that():
    class Hidden:
        tensor = None

    class Hiding(nn.Linear):
        def forward(self, x):
            Hidden.tensor = super().forward(x)
            return Hidden.tensor + 1

    def make_step():
        run = torch.compile(Hiding(8, 8))
        x = torch.zeros(4, 8, requires_grad=True)

        def step():
            (run(x) + Hidden.tensor).sum().backward()

        return step

    with pytest.raises(snugfit.UnsupportedError, match="compiled code has stored outside of itself") as caught:
        snugfit.trace(make_step, "cpu")
    assert "aten" not in str(caught.value)
