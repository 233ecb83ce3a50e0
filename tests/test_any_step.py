"""Any step: the families of models, scripts as users write them, loaders, torch.cuda, and what is refused by name."""

import copy
import random
import time

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import any_steps
import snugfit
from any_steps import FAMILIES
from snugfit.memory import tracing
from snugfit.memory.known_values import assumed_values
from snugfit.memory.steps import compilation, cuda_functions, torchao_rules
from snugfit.sizes import GIB

CARD = "rtx-3090"
WORKSPACE = 8519680
NEEDS = {
    "lora": ("transformers", "peft"),
    "unet": ("diffusers",),
    "nn.Transformer": (),
    "recurrent": (),
    "convolutions": (),
}
PLANS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")


def block(num_bytes):
    return -(-num_bytes // 512) * 512


def blocks_of(tensors):
    return sum(block(tensor.numel() * tensor.element_size()) for tensor in tensors)


def require(name):
    for library in NEEDS.get(name, ("transformers",)):
        pytest.importorskip(library, reason=f"the extra {library} is not installed")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_script_of_every_family_is_traced_and_its_static_memory_is_that_of_its_parameters(name):
    require(name)
    scaled = name in ("bert", "llama", "resnet")
    dtype = torch.float16 if scaled else torch.bfloat16
    report = snugfit.trace(any_steps.script(name, dtype=dtype, scaled=scaled), CARD)
    model = FAMILIES[name][0]()
    trainable = blocks_of(parameter for parameter in model.parameters() if parameter.requires_grad)
    held = report.at("step end")
    assert held["parameter"] == blocks_of(model.parameters())
    gradient = report.at("backward end")["gradient"]
    raw = sum(parameter.numel() * 4 for parameter in model.parameters() if parameter.requires_grad)
    assert raw <= gradient <= trainable if name == "recurrent" else gradient == trainable  # cuDNN makes one buffer
    assert held["optimizer"] == 2 * trainable


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.filterwarnings("ignore:config.use_cache")
@pytest.mark.parametrize(("name", "precision"), list(zip(FAMILIES, 4 * PLANS, strict=False)))
def test_a_job_of_every_family_is_estimated_with_accumulation_and_recompute(name, precision):
    require(name)
    make_model, make_batch, loss = FAMILIES[name]
    model = make_model()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    job = snugfit.Job(
        make_model,
        loss,
        lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
        make_batch,
        max_grad_norm=1.0,
    )
    has_blocks = name not in ("nn.Transformer", "recurrent", "convolutions")
    segments = snugfit.checkpointing.blocks(model) if has_blocks else ()
    plan = snugfit.Plan(batch_size=5, micro_batch_size=2, precision=precision, recompute=segments)
    report = snugfit.estimate(job, plan, CARD)
    gradient, raw = report.at("backward end")["gradient"], 4 * sum(parameter.numel() for parameter in trainable)
    if name == "recurrent":  # cuDNN makes the gradients of a layer in one buffer
        assert raw <= gradient <= blocks_of(trainable)
    else:
        assert gradient == blocks_of(trainable)  # float32 also for weights in bfloat16
    if precision != "bf16-true":
        assert report.at("step end")["parameter"] == blocks_of(model.parameters())
        assert report.at("step end")["optimizer"] == 2 * blocks_of(trainable)


def test_a_model_larger_than_the_memory_of_any_host_is_built_and_traced():
    width, depth = 65536, 40

    def make_step():
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.zeros(8, width, device="cuda")

        def step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        return step

    assert snugfit.trace(make_step, CARD).at("step end")["parameter"] == depth * 16 * GIB


# --- data ---


class Sentences(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"ids": [1] * (index % 5 + 1), "label": index % 2}


def padded(samples):
    ids = [torch.tensor(sample["ids"]) for sample in samples]
    return nn.utils.rnn.pad_sequence(ids, batch_first=True), torch.tensor([sample["label"] for sample in samples])


class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.full((16,), float(i)), i % 4) for i in range(32))


def of_tensors(**options):
    return DataLoader(TensorDataset(torch.randn(64, 16), torch.zeros(64, dtype=torch.long)), batch_size=8, **options)


@pytest.mark.parametrize(
    "options",
    [{"shuffle": True}, {"pin_memory": True}, {"num_workers": 2}, {"collate_fn": torch.utils.data.default_collate}],
)
@pytest.mark.parametrize("is_made_inside", [True, False])
def test_a_step_that_pulls_batches_from_a_loader_holds_one_batch_on_the_card(options, is_made_inside):
    outside = of_tensors(**options)

    def make_step():
        batches = iter(of_tensors(**options) if is_made_inside else outside)
        model = nn.Linear(16, 4).cuda()

        def step():
            x, y = next(batches)
            F.cross_entropy(model(x.cuda(non_blocking=True)), y.to("cuda")).backward()

        return step

    assert snugfit.trace(make_step, CARD).at("forward end")["input"] == 8 * 16 * 4 + 512  # and 8 labels


def test_loaders_of_streams_and_of_padded_sentences_are_read():
    def make_step():
        streamed, sentences = (
            iter(DataLoader(Stream(), batch_size=8)),
            iter(DataLoader(Sentences(), 8, collate_fn=padded)),
        )
        model, embedding = nn.Linear(16, 4).cuda(), nn.Embedding(8, 256).cuda()

        def step():
            x, y = next(streamed)
            ids, _ = next(sentences)
            assert ids.shape == (8, 5)
            (F.cross_entropy(model(x.cuda()), y.cuda()) + embedding(ids.cuda()).mean()).backward()

        return step

    assert snugfit.trace(make_step, CARD).at("step end")["parameter"] == 8 * 256 * 4 + 2 * 512


def test_arrays_lists_and_files_are_read_for_real(tmp_path):
    array = numpy.ones((8, 16), dtype=numpy.float32)
    torch.save(nn.Linear(16, 4).state_dict(), tmp_path / "weights.pt")

    def make_step():
        model = nn.Linear(16, 4)
        model.load_state_dict(torch.load(tmp_path / "weights.pt"))
        model = model.cuda()

        def step():
            assert (tmp_path / "weights.pt").read_bytes()
            time.sleep(0)
            for x in (torch.from_numpy(array), torch.tensor(array), torch.as_tensor(array), torch.tensor([[1.0] * 16])):
                model(x.pin_memory().to("cuda", non_blocking=True)).mean().backward()

        return step

    assert snugfit.trace(make_step, CARD).at("backward end")["gradient"] == 2 * 512


def test_c094_the_longest_batch_of_a_loader_is_planned_for():
    lengths = [10 + i % 5 for i in range(100)]
    lengths[95] = 100

    class Tokens(Dataset):
        def __len__(self):
            return 800

        def __getitem__(self, index):
            return torch.ones(lengths[index // 8], dtype=torch.long)

    def job(batch):
        return snugfit.Job(
            lambda: nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50)),
            lambda model, x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()),
            lambda model: torch.optim.SGD(model.parameters(), 0.1),
            batch,
        )

    plan = snugfit.Plan(batch_size=8, micro_batch_size=4)
    found = snugfit.estimate(job(DataLoader(Tokens(), batch_size=8)), plan, CARD)
    longest = snugfit.estimate(job(torch.ones(8, 100, dtype=torch.long)), plan, CARD)
    assert found.peak_allocated_bytes == longest.peak_allocated_bytes
    assert found.at("forward end")["input"] == block(4 * 100 * 8)


def test_a_tensor_made_without_a_device_stays_on_the_host_of_a_script_that_names_the_card():
    def make_step():
        model = nn.Linear(1024, 4, bias=False).cuda()

        def step():
            host = torch.zeros(64, 1024)
            assert host.device.type == "cpu"
            model(host.to("cuda")).sum().backward()

        return step

    assert snugfit.trace(make_step, CARD).at("forward end")["input"] == 64 * 1024 * 4


@pytest.mark.parametrize("is_global", [True, False])
def test_the_default_device_counts_as_naming_the_card(is_global):
    def make_step():
        if is_global:
            torch.set_default_device("cuda")
        try:
            with torch.device("cuda"):
                model, x = nn.Linear(64, 64, bias=False), torch.zeros(8, 64)
        finally:
            torch.set_default_device(None)
        assert model.weight.is_cuda
        return lambda: model(x).sum().backward()

    held = snugfit.trace(make_step, CARD).at("forward end")
    assert (held["parameter"], held["input"]) == (64 * 64 * 4, 8 * 64 * 4)


def test_a_model_of_the_meta_device_takes_memory_where_it_is_put():
    def make_step():
        with torch.device("meta"):
            model = nn.Linear(256, 256, bias=False)
        model = model.to_empty(device="cuda")
        x = torch.zeros(8, 256, device="cuda")
        return lambda: model(x).sum().backward()

    assert snugfit.trace(make_step, CARD).at("backward end")["parameter"] == 256 * 256 * 4


# --- models and batches from outside ---


def test_a_model_made_outside_counts_like_one_made_inside_and_is_left_as_it_was():
    def parts():
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.BatchNorm1d(256))
        return model, torch.optim.Adam(model.parameters()), torch.randn(8, 256)

    def step_of(model, optimizer, x):
        def step():
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

        return step

    model, optimizer, x = parts()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outside = snugfit.trace(lambda: step_of(model, optimizer, x), CARD)
    inside = snugfit.trace(lambda: step_of(*parts()), CARD)
    for category in ("parameter", "gradient", "optimizer", "input"):
        assert outside.at("backward end")[category] == inside.at("backward end")[category]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step_of(model, optimizer, x)()  # and it still trains
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_a_model_made_outside_may_be_moved_and_not_converted():
    model = nn.Linear(64, 64, bias=False)
    model.weight.grad = torch.ones(64, 64)

    def moved():
        model.to("cuda")
        x = torch.zeros(8, 64, device="cuda")
        return lambda: model(x).sum().backward()

    assert snugfit.trace(moved, CARD).at("step end")["parameter"] == 64 * 64 * 4
    assert model.weight.device.type == "cpu"
    assert torch.equal(model.weight.grad, torch.ones(64, 64))
    with pytest.raises(snugfit.UnsupportedError, match="made outside of make_step") as caught:
        snugfit.trace(lambda: model.half(), CARD)
    assert "build the model inside of make_step" in caught.value.hint


@pytest.mark.parametrize(("model_moves", "batch_moves"), [(True, False), (False, True)])
def test_a_host_tensor_that_meets_the_card_is_refused_as_cuda_does(model_moves, batch_moves):
    def make_step():
        model, x = nn.Sequential(nn.Linear(8, 8)), torch.zeros(4, 8)
        model = model.cuda() if model_moves else model
        x = x.cuda() if batch_moves else x
        return lambda: model(x)

    with pytest.raises(snugfit.UnsupportedError, match="a tensor on the host meets one on the card") as caught:
        snugfit.trace(make_step, CARD)
    assert caught.value.module == "0"
    assert "test_any_step.py" in caught.value.line


def test_a_rank_uses_the_targets_card():
    def make_step():
        torch.cuda.set_device(0)
        assert torch.cuda.current_device() == 0
        model, x = nn.Linear(64, 64, bias=False).cuda(), torch.zeros(8, 64).to(0)
        assert model.weight.device == x.device == torch.device("cuda:0")
        assert x.get_device() == 0

        def step():
            model(x).sum().backward()
            torch.zeros(8, 64, device=f"cuda:{torch.cuda.current_device()}")

        return step

    assert snugfit.trace(make_step, CARD).at("backward end")["gradient"] == 64 * 64 * 4


def test_a_second_card_and_a_card_on_the_cpu_are_refused():
    for name_it in (
        lambda: torch.zeros(2, device="cuda:1"),
        lambda: torch.zeros(2, device=torch.device("cuda", 1)),
        lambda: torch.zeros(2, device=1),
        lambda: torch.zeros(2).to(1),
        lambda: torch.zeros(2).cuda(1),
        lambda: nn.Linear(2, 2).cuda(1),
        lambda: torch.cuda.set_device(1),
        lambda: torch.cuda.device(1).__enter__(),
    ):
        with pytest.raises(snugfit.UnsupportedError, match="for one card"):
            snugfit.trace(name_it, CARD)
    with pytest.raises(snugfit.UnsupportedError, match="traced for the CPU"):
        snugfit.trace(lambda: nn.Linear(2, 2).cuda(), "cpu")


# --- torch.cuda and its like ---


def test_questions_to_the_card_are_answered_for_the_target():
    seen = {}

    def make_step():
        assert torch.cuda.is_available()
        assert torch.accelerator.is_available()
        seen["name"] = torch.cuda.get_device_name()
        seen["capability"] = torch.cuda.get_device_capability()
        seen["properties"] = torch.cuda.get_device_properties(0).total_memory
        seen["free"], seen["total"] = torch.cuda.mem_get_info()
        seen["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
        seen["count"] = torch.cuda.device_count(), torch.cuda.current_device()
        device = torch.accelerator.current_accelerator()
        model = nn.Linear(512, 512, bias=False).to(device)
        seen["before"] = torch.cuda.memory_allocated()

        def step():
            model(torch.zeros(8, 512, device=device)).sum().backward()
            torch.cuda.synchronize()
            seen["peak"] = torch.cuda.max_memory_allocated()

        return step

    report = snugfit.trace(make_step, CARD)
    card = tracing.hardware.resolve(CARD)
    assert (seen["name"], seen["capability"], seen["bf16"]) == (CARD, (8, 6), True)
    assert seen["properties"] == seen["total"] == card.memory_bytes
    assert 0 < seen["total"] - seen["free"] < 2 * GIB
    assert seen["count"] == (1, 0)
    assert seen["before"] == 512 * 512 * 4
    assert seen["peak"] >= 2 * 512 * 512 * 4
    assert cuda_functions.COUNTERS in report.assumptions


def test_an_old_card_and_the_cpu_are_answered_for_too():
    answers = []

    def make_step():
        answers.append((torch.cuda.is_available(), torch.cuda.is_available() and torch.cuda.get_device_capability()))
        return lambda: None

    snugfit.trace(make_step, "gtx-1080")
    snugfit.trace(make_step, "cpu")
    assert answers == [(True, (6, 1)), (False, False)]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: torch.cuda.CUDAGraph(), "torch.cuda.CUDAGraph"),
        (lambda: torch.cuda.temperature(), "torch.cuda.temperature"),
        (lambda: torch.cuda.FloatTensor(2), "torch.cuda.FloatTensor"),
        (lambda: torch.cuda.get_device_properties(0).multi_processor_count, "multi_processor_count"),
        (lambda: torch.cuda.memory_snapshot(), "torch.cuda.memory_snapshot"),
    ],
)
def test_what_only_a_card_can_answer_is_refused_by_name_and_line(call, named):
    with pytest.raises(snugfit.UnsupportedError) as caught:
        snugfit.trace(call, CARD)
    assert named in caught.value.op
    assert "test_any_step.py" in caught.value.line


def test_events_and_streams_have_happened_and_their_times_are_unknown(capsys):
    def make_step():
        model = nn.Linear(8, 8).cuda()
        start, end, side = (
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Stream(),
        )

        def step():
            start.record()
            with torch.cuda.stream(side):
                y = model(torch.zeros(4, 8, device="cuda"))
            torch.cuda.current_stream().wait_stream(side)
            y.record_stream(torch.cuda.current_stream())
            y.sum().backward()
            end.record()
            end.synchronize()
            print(f"{start.elapsed_time(end):.1f} ms")

        return step

    assert cuda_functions.STREAMS in snugfit.trace(make_step, CARD).assumptions
    assert "nan ms" in capsys.readouterr().out


def test_generators_seeds_and_old_amp_names_work():
    def make_step():
        torch.manual_seed(1)
        generator = torch.Generator(device="cuda").manual_seed(2)
        assert isinstance(generator, torch.Generator)
        model, scaler = nn.Linear(8, 8).cuda(), torch.amp.GradScaler("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step():
            with torch.amp.autocast("cuda"):
                loss = model(torch.randn(4, 8, device="cuda", generator=generator)).float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    report = snugfit.trace(make_step, CARD)
    assert assumed_values.FINITE in report.assumptions
    assert report.at("backward end")["gradient"] == 2 * 512


def test_a_function_compiled_before_the_trace_runs_eagerly_too():
    @torch.compile
    def activated(x):
        return F.gelu(x) * 2

    def make_step():
        model = nn.Linear(8, 8).cuda()
        return lambda: activated(model(torch.zeros(4, 8, device="cuda"))).sum().backward()

    assert compilation.EAGER in snugfit.trace(make_step, CARD).assumptions


# --- optimizers and weights of other kinds ---


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("name", "num_states"), [("SGD", 0), ("SparseAdam", 2), ("Adagrad", 1)])
def test_sparse_gradients_hold_rows_and_indices(name, num_states):
    rows, width = 24, 32

    def make_step():
        embedding = nn.Embedding(1000, width, sparse=True).cuda()
        optimizer = getattr(torch.optim, name)(embedding.parameters(), lr=0.1)
        ids = torch.arange(rows).cuda()

        def step():
            optimizer.zero_grad()
            embedding(ids).sum().backward()
            optimizer.step()

        return step

    held = snugfit.trace(make_step, CARD).at("backward end")
    assert held["gradient"] == rows * width * 4 + 512  # a value per row and column; an index per row
    assert held.get("optimizer", 0) == num_states * 1000 * width * 4


class Graph(nn.Module):
    """Two layers over a graph, as graph networks are written: a sparse adjacency times dense features."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x, adjacency):
        return self.outer(torch.sparse.mm(adjacency, self.inner(x)).relu())


def graph(num_nodes):
    """Every node has an edge to the next three."""
    edges = torch.arange(num_nodes).repeat(3), (torch.arange(3 * num_nodes) + 1) % num_nodes
    adjacency = torch.sparse_coo_tensor(torch.stack(edges), torch.ones(3 * num_nodes), check_invariants=True)
    return adjacency.coalesce()


def test_a_sparse_adjacency_in_a_batch_needs_on_the_cpu_what_is_measured_and_is_planned_for_a_card():
    shared = snugfit.Shared(graph(64))
    job = snugfit.Job(
        Graph,
        lambda model, batch: F.cross_entropy(model(batch["x"], batch["graph"]), batch["y"]),
        lambda model: torch.optim.AdamW(model.parameters()),
        {"x": torch.randn(64, 16), "y": torch.zeros(64, dtype=torch.long), "graph": shared},
    )
    plan = snugfit.Plan(batch_size=64, micro_batch_size=64)
    predicted, measured = (run(job, plan, "cpu") for run in (snugfit.estimate, snugfit.measure))
    assert abs(predicted.peak_allocated_bytes - measured.peak_allocated_bytes) <= 128
    held = 3 * 64 * (2 * 8 + 4)  # indices and values
    assert predicted.by_category["input"] == measured.by_category["input"] == 64 * (16 * 4 + 8) + held
    assert snugfit.estimate(job, plan, CARD).peak_allocated_bytes > held


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_sparse_adjacency_is_multiplied_in_mixed_precision_and_stays_coalesced(precision):
    def loss(model, batch):
        out = batch["graph"] @ model(batch["x"])
        return out.float().square().mean() + batch["graph"].values().sum()

    example = {"x": torch.randn(64, 16), "graph": snugfit.Shared(graph(64))}
    job = snugfit.Job(lambda: nn.Linear(16, 8), loss, lambda m: torch.optim.SGD(m.parameters(), 0.1), example)
    plan = snugfit.Plan(batch_size=64, micro_batch_size=64, precision=precision)
    assert snugfit.estimate(job, plan, CARD).peak_allocated_bytes > 0


@pytest.mark.parametrize("turn", [lambda a: a.t(), lambda a: a.transpose(0, 1)], ids=["t", "transpose"])
def test_a_transposed_adjacency_is_a_copy(turn):
    job = snugfit.Job(
        lambda: nn.Linear(16, 8),
        lambda model, batch: torch.sparse.mm(turn(batch["graph"]), model(batch["x"])).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        {"x": torch.randn(64, 16), "graph": snugfit.Shared(graph(64))},
    )
    plan = snugfit.Plan(batch_size=64, micro_batch_size=64)
    predicted, measured = (run(job, plan, "cpu") for run in (snugfit.estimate, snugfit.measure))
    assert abs(predicted.peak_allocated_bytes - measured.peak_allocated_bytes) <= 128


def test_equal_rows_of_a_sparse_gradient_become_one_where_the_indices_are_known():
    sizes = []

    def make_step():
        embedding = nn.EmbeddingBag(100, 8, sparse=True, mode="sum").cuda()
        ids = torch.tensor([[1, 2], [2, 1], [1, 1]]).cuda()

        def step():
            embedding(ids).sum().backward()
            sizes.append((embedding.weight.grad._nnz(), embedding.weight.grad.coalesce()._nnz()))
            embedding.weight.grad = None

        return step

    snugfit.trace(make_step, CARD)
    assert sizes == [(6, 2), (6, 2)]


def make_eight_bit_step(*_):
    optimizers = pytest.importorskip("torchao.optim", reason="the extra torchao is not installed")
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).cuda()
    optimizer = optimizers.AdamW8bit(model.parameters())

    def step():
        model(torch.zeros(8, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_eight_bit_optimizer_states_count_their_codes_scales_and_tables():
    state = 256 * 256 + 256 * 4 + 256 * 4  # a code per weight, a scale per 256 of them, the table of 256 values
    found = snugfit.trace(make_eight_bit_step, CARD).at("step end")["optimizer"]
    assert found == 2 * 2 * (state + 1024)  # biases stay float32


def test_the_update_of_eight_bit_states_is_compiled_code_once_and_small_moments_are_written_in_place():
    traced = tracing.record(make_eight_bit_step, snugfit.hardware.resolve(CARD))
    update = [birth for birth in traced.recording.births if (birth.window, birth.phase) == (2, "optimizer")]
    # For each of two moments of two weights an array in fp32 and its scales; for the biases nothing.
    assert sorted(birth.num_bytes for birth in update) == 4 * [256 * 4] + 4 * [256 * 256 * 4]
    assert traced.assumptions == (torchao_rules.COMPILED,)


def test_quantised_weights_of_a_given_model_count_their_parts():
    quantization = pytest.importorskip("torchao.quantization", reason="the extra torchao is not installed")
    frozen = nn.Sequential(nn.Linear(256, 256, bias=False)).requires_grad_(False)
    quantization.quantize_(frozen, quantization.Int8WeightOnlyConfig())
    job = snugfit.Job(
        nn.Sequential(frozen, nn.Linear(256, 8, bias=False)),
        lambda model, x: model(x).mean(),
        lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1),
        lambda n: torch.zeros(n, 256),
    )
    report = snugfit.estimate(job, snugfit.Plan(batch_size=4, micro_batch_size=4), CARD)
    assert (
        0 <= report.at("step end")["parameter"] - (256 * 256 + 256 * 4 + 256 * 8 * 4) <= 512
    )  # torchao 0.13 has zeros


class Packed(nn.Module):
    """A frozen matrix of 4-bit codes, two in a byte, with a scale per row, and a small adapter beside it."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(5000, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("scales", torch.ones(100))
        self.down, self.up = nn.Linear(100, 4, bias=False), nn.Linear(4, 100, bias=False)

    def forward(self, x):
        codes = torch.stack([self.codes & 15, self.codes >> 4], 1).view(100, 100)
        return x @ ((codes.float() - 8) * self.scales[:, None]).t() + self.up(self.down(x))


@pytest.mark.parametrize("is_given", [True, False])
def test_c085_packed_frozen_weights_are_their_bytes_without_gradient_and_state(is_given):
    job = snugfit.Job(
        Packed() if is_given else Packed,
        lambda model, x: model(x).pow(2).mean(),
        lambda model: torch.optim.Adam(model.parameters()),
        lambda n: torch.zeros(n, 100),
    )
    report = snugfit.estimate(job, snugfit.Plan(batch_size=8, micro_batch_size=4), "cpu")
    adapter = 2 * 400 * 4
    assert report.at("step end")["parameter"] == 5000 + adapter
    assert report.at("backward end")["gradient"] == adapter
    assert report.at("step end")["optimizer"] == 2 * adapter + 2 * 4  # and a counter for each of two
    assert report.at("step end")["buffer"] == 400


def test_an_optimizer_with_line_search_or_factored_state_runs_to_its_last_iteration():
    def make_step(make_optimizer):
        def make():
            model = nn.Linear(16, 1).cuda()
            optimizer = make_optimizer(model.parameters())
            x = torch.zeros(8, 16, device="cuda")

            def closure():
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            return lambda: optimizer.step(closure)

        return make

    for make_optimizer in (
        lambda p: torch.optim.LBFGS(p, max_iter=3),
        lambda p: torch.optim.LBFGS(p, max_iter=2, line_search_fn="strong_wolfe"),
        lambda p: torch.optim.Adafactor(p),
    ):
        report = snugfit.trace(make_step(make_optimizer), CARD)
        assert assumed_values.COMPARED in report.assumptions


# --- what depends on values ---


def test_a_mask_of_the_batch_selects_as_many_rows_as_it_really_does():
    seen = []

    def make_step():
        model, head = nn.Embedding(10, 64).cuda(), nn.Linear(64, 10, bias=False).cuda()
        labels = torch.full((4, 8), -100)
        labels[:, :3] = 5

        def step():
            target = labels.to("cuda")
            chosen = model(target.clamp(min=0))[target != -100]
            seen.append((tuple(chosen.shape), int((target != -100).sum())))
            F.cross_entropy(head(chosen), target[target != -100]).backward()

        return step

    snugfit.trace(make_step, CARD)
    assert seen == [((12, 64), 12)] * 2


def test_what_a_masked_step_needs_is_what_it_really_needs():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 512), nn.Linear(512, 1)

        def forward(self, x, kept):
            return self.last(self.first(x)[kept].relu())

    job = snugfit.Job(
        Masked,
        lambda model, batch: model(batch["x"], batch["kept"]).mean(),
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        lambda n: {"x": torch.randn(n, 64), "kept": torch.arange(n) % 4 == 0},
    )
    plan = snugfit.Plan(batch_size=2048, micro_batch_size=1024)
    predicted, measured = (run(job, plan, "cpu") for run in (snugfit.estimate, snugfit.measure))
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.01)


def test_experts_are_loaded_equally_and_the_report_says_so():
    loads = []

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(32, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, x):
            weights, chosen = self.router(x).softmax(-1).topk(2, -1)
            mask = F.one_hot(chosen, num_classes=4).permute(2, 1, 0)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rank, token = torch.where(mask[index])
                loads.append(len(token))
                out.index_add_(0, token, expert(x[token]) * weights[token, rank, None])
            return out

    def make_step():
        model = Experts().cuda()
        x = torch.zeros(16, 32, device="cuda")
        return lambda: model(x).sum().backward()

    report = snugfit.trace(make_step, CARD)
    assert loads == [8] * 8  # 16 tokens, 2 experts each, 4 experts, 2 windows
    assert assumed_values.BALANCED in report.assumptions


def test_packed_sequences_and_ctc_follow_the_lengths_of_the_batch():
    shapes = []

    def make_step():
        lstm, head = nn.LSTM(8, 16, batch_first=True).cuda(), nn.Linear(16, 5).cuda()
        lengths = torch.tensor([6, 4, 3])

        def step():
            x = torch.zeros(3, 6, 8, device="cuda")
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            shapes.append(tuple(packed.data.shape))
            out, _ = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)
            shapes.append(tuple(out.shape))
            scores = head(out).log_softmax(-1).transpose(0, 1)
            F.ctc_loss(
                scores, torch.ones(3, 2, dtype=torch.long, device="cuda"), lengths, torch.tensor([2, 1, 2])
            ).backward()

        return step

    snugfit.trace(make_step, CARD)
    assert shapes == [(13, 8), (3, 6, 16)] * 2


@pytest.mark.parametrize("device", ["cpu", CARD])
def test_a_copy_of_a_model_with_counters_is_traced_as_such(device):
    """BatchNorm counts in a tensor whose number torch remembers: averages of weights, teachers, twins are copies."""
    counts = []

    def make_step():
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        average = copy.deepcopy(model)

        def step():
            model(torch.zeros(4, 8)).sum().backward()
            counts.append([int(each[1].num_batches_tracked) for each in (model, average)])

        return step

    assert snugfit.trace(make_step, device).static_bytes > 0
    assert counts == [[1, 0], [2, 0]]


def test_numbers_that_are_only_logged_are_unknown_and_named(capsys):
    def make_step():
        model, total, history = nn.Linear(8, 8).cuda(), [0.0], []

        def step():
            loss = model(torch.zeros(4, 8, device="cuda")).square().mean()
            loss.backward()
            total[0] += loss.item()
            history.append(loss.detach().cpu().numpy())
            print(f"{loss.item():.3f} {loss} {2 * total[0]:.2e}", loss.tolist())

        return step

    report = snugfit.trace(make_step, CARD)
    assert capsys.readouterr().out == 2 * "nan nan nan nan\n"
    assert any("test_any_step.py" in sentence and "nobody knows" in sentence for sentence in report.assumptions)


@pytest.mark.parametrize(
    "decide",
    [
        lambda loss: loss.item() > 3,
        lambda loss: min(loss.item(), 1.0),
        lambda loss: bool(loss > 3),
        lambda loss: range(int(loss.item())),
        lambda loss: torch.zeros(4, device="cuda")[loss.expand(4) > 0],
        lambda loss: loss.expand(4).nonzero(),
        lambda loss: loss.expand(4).unique(),
    ],
)
def test_a_step_that_decides_by_what_it_computes_is_refused_with_the_line_and_the_way_on(decide):
    def make_step():
        model = nn.Linear(8, 8).cuda()
        return lambda: decide(model(torch.zeros(4, 8, device="cuda")).mean())

    with pytest.raises(snugfit.UnsupportedError) as caught:
        snugfit.trace(make_step, CARD)
    assert "test_any_step.py" in str(caught.value)
    assert "snugfit.opaque" in caught.value.hint


def test_a_test_for_finite_numbers_passes_and_is_named():
    def make_step():
        model = nn.Linear(8, 8).cuda()

        def step():
            loss = model(torch.zeros(4, 8, device="cuda")).mean()
            if torch.isnan(loss) or not torch.isfinite(loss) or loss.isinf().any():
                raise RuntimeError("diverged")
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

        return step

    report = snugfit.trace(make_step, CARD)
    assert assumed_values.FINITE in report.assumptions
    assert report.at("backward end")["gradient"] == 2 * 512


def test_random_control_flow_is_recorded_as_it_ran_and_named():
    def make_step():
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)).cuda()

        def step():
            x = torch.zeros(4, 8, device="cuda")
            for layer in layers:
                if random.random() < 0.5 or torch.rand([]) < 0.5:
                    x = layer(x)
            x.sum().backward() if x.requires_grad else None

        return step

    first, second = snugfit.trace(make_step, CARD), snugfit.trace(make_step, CARD)
    assert first == second
    assert any("random numbers in Python" in sentence for sentence in first.assumptions)
    assert any("drawn as with seed 0" in sentence for sentence in first.assumptions)


# --- errors ---


def test_an_exception_of_the_users_own_stays_theirs():
    def make_step():
        model = nn.Linear(8, 8).cuda()

        def step():
            model(torch.zeros(4, 8, device="cuda"))
            raise KeyError("mine")

        return step

    with pytest.raises(KeyError, match="mine"):
        snugfit.trace(make_step, CARD)
    with pytest.raises(ZeroDivisionError):
        snugfit.trace(lambda: 1 / 0, CARD)


def test_an_operation_that_fails_is_explained_with_its_module_and_line(capfd):
    def make_step():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 8)).cuda()
        return lambda: model(torch.zeros(4, 8, device="cuda"))

    with pytest.raises(snugfit.UnsupportedError, match="raised RuntimeError in the trace") as caught:
        snugfit.trace(make_step, CARD)
    assert caught.value.module == "1"
    assert "[4, 8] X [9, 8]" in str(caught.value)
    assert "test_any_step.py" in caught.value.line
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "Traceback" not in capfd.readouterr().err  # torch logs what fake tensors cannot do


def test_a_trace_puts_back_everything_that_it_replaced():
    names = [(torch.cuda, name) for name in torch.cuda.__all__ if hasattr(torch.cuda, name)]
    names += [(torch, "compile"), (torch, "Generator"), (torch.accelerator, "current_accelerator")]
    names += [(DataLoader, "__iter__"), (torch.Tensor, "record_stream"), (nn.init, "kaiming_uniform_")]
    before = [getattr(owner, name) for owner, name in names]

    def failing():
        nn.Linear(2, 2).cuda()
        raise KeyError("in the middle")

    with pytest.raises(KeyError):
        snugfit.trace(failing, CARD)
    snugfit.trace(any_steps.script("convolutions"), CARD)
    assert [getattr(owner, name) for owner, name in names] == before
    assert torch.ones(2).device.type == "cpu"
    assert torch.cuda.is_available() == (torch.cuda.device_count() > 0)


def test_code_that_names_the_card_is_read_in_a_recomputation_too():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return self.layer(x) + torch.arange(64, device="cuda") + torch.ones(64, device=x.device)

    def make_step():
        blocks = nn.ModuleList(Positions() for _ in range(2)).cuda()

        def step():
            x = torch.zeros(8, 64, device="cuda")
            for block in blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            x.sum().backward()

        return step

    assert snugfit.trace(make_step, CARD).at("backward end")["gradient"] == 2 * (64 * 64 * 4 + 512)


@pytest.mark.parametrize("shape", [(8, 4, 4, 256), (16, 32, 256)])
def test_a_linear_layer_adds_its_bias_in_place_as_on_real_tensors(shape):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(256, 512)

        def forward(self, x):
            return self.layer(x if x.dim() == 4 else x.transpose(0, 1)).relu()

    job = snugfit.Job(
        Turned,
        lambda model, x: model(x).mean(),
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        lambda n: torch.randn(n, *shape[1:]),
    )
    plan = snugfit.Plan(batch_size=shape[0], micro_batch_size=shape[0])
    predicted, measured = (run(job, plan, "cpu") for run in (snugfit.estimate, snugfit.measure))
    assert predicted.peak_allocated_bytes == measured.peak_allocated_bytes
