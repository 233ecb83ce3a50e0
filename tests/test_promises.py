"""Promises 1 to 5 of a window, over random batches, cuts, counts, precisions and what is recomputed.

``benchmarks/promises.py`` runs the same properties over many more examples.
"""

import copy
import math
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import snugfit
from models import same_bits, state_of
from snugfit import Engine, Job, Loss, LossScale, Plan, Shared, build, checkpointing
from strategies import cuts
from tolerances import PROMISED

pytestmark = pytest.mark.filterwarnings("ignore:labels hold -100")  # what "samples" counts is meant here

LENGTH, WIDTH, CLASSES = 3, 4, 5
KINDS = ("samples", "tokens", "weights", "sum", "number", "tensor", "two", "two tensors")
STRUCTURES = ("dict", "nested", "tuple", "named tuple", "dataclass", "with more")
PRECISIONS = ("float64", "32-true", "bf16-mixed", "16-mixed", "bf16-true")
RECOMPUTE = ("none", "every block", "every second", "two segments", "a run")


class Layer(nn.Module):
    """A linear layer, a nonlinearity, and dropout on demand."""

    def __init__(self, dropout):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(x)))


class Net(nn.Module):
    """Three layers and a head, which sees each position by itself."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Named(NamedTuple):
    x: torch.Tensor
    labels: torch.Tensor
    w: torch.Tensor


@dataclass
class Data:
    x: torch.Tensor
    labels: torch.Tensor
    w: torch.Tensor


def packed(structure, x, labels, w):
    """A batch, or a micro-batch, as users make them."""
    if structure == "dict":
        return {"x": x, "labels": labels, "w": w}
    if structure == "nested":
        return {"inputs": {"x": x, "w": [w]}, "labels": labels}
    if structure == "tuple":
        return (x, (labels, w))
    if structure == "named tuple":
        return Named(x, labels, w)
    if structure == "dataclass":
        return Data(x, labels, w)
    captions = [f"sample {i}" for i in range(len(x))]
    more = {"captions": captions, "name": "batch", "nothing": None, "rate": 0.5}
    return {"x": x, "labels": labels, "w": w, **more, "factor": Shared(torch.ones(2))}


def unpacked(batch):
    if isinstance(batch, (Named, Data)):
        return batch.x, batch.labels, batch.w
    if isinstance(batch, tuple):
        return batch[0], *batch[1]
    if "inputs" in batch:
        return batch["inputs"]["x"], batch["labels"], batch["inputs"]["w"][0]
    return batch["x"], batch["labels"], batch["w"]


def terms(model, batch):
    """Sum of the losses per sample, sum over valid labels, sum by weight, with the count of each."""
    x, labels, w = unpacked(batch)
    if isinstance(batch, dict) and "captions" in batch:
        assert len(batch["captions"]) == len(x)
        assert (batch["name"], batch["nothing"], batch["rate"]) == ("batch", None, 0.5)
        assert torch.equal(batch["factor"], torch.ones(2))
    losses = F.cross_entropy(model(x).flatten(0, 1).to(w.dtype), labels.flatten(), reduction="none").view(labels.shape)
    each = losses.sum(1)
    valid = (labels != -100).sum()
    return (each.sum(), len(x)), (each.sum(), valid), ((each * w).sum(), w.sum())


def valid_labels(batch):
    return float((unpacked(batch)[1] != -100).sum())


def weights(batch):
    return float(unpacked(batch)[2].sum())


def loss_of(kind):
    """The loss function as its user writes it, and what is counted."""

    def loss(model, batch):
        (samples, number), (by_token, valid), (by_weight, weight) = terms(model, batch)
        return {
            "samples": lambda: samples / number,
            "tokens": lambda: by_token / valid,
            "weights": lambda: by_weight / weight,
            "sum": lambda: Loss(by_token),
            "number": lambda: Loss(by_token, int(valid)),
            "tensor": lambda: Loss(by_token, valid),
            "two": lambda: [Loss(by_token, int(valid)), Loss(0.5 * by_weight, float(weight))],
            "two tensors": lambda: (Loss(by_token, valid), Loss(0.5 * by_weight, weight)),
        }[kind]()

    counts = {"tokens": valid_labels, "sum": valid_labels, "weights": weights}
    return loss, counts.get(kind, "samples")


def wanted_loss(kind, model, batch):
    """Of the full batch; None where it counts nothing."""
    (samples, number), (by_token, valid), (by_weight, weight) = terms(model, batch)
    parts = {
        "samples": [(samples, number)],
        "weights": [(by_weight, weight)],
        "two": [(by_token, valid), (0.5 * by_weight, weight)],
        "two tensors": [(by_token, valid), (0.5 * by_weight, weight)],
    }.get(kind, [(by_token, valid)])
    counted = [total / count for total, count in parts if count > 0]
    return sum(counted[1:], counted[0]) if counted else None


@dataclass(frozen=True)
class Example:
    """One window."""

    size: int
    parts: tuple[int, ...]
    "Samples of each micro-batch; of a batch that the engine cuts, all but the last are of one size."
    is_cut: bool
    "Whether the engine cuts it."
    kind: str
    structure: str
    precision: str
    recompute: str
    labels: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]
    max_grad_norm: float | None
    seed: int


@st.composite
def examples(draw, precisions=PRECISIONS):
    size = draw(st.integers(1, 6))
    is_cut = draw(st.booleans())
    if is_cut:
        micro = draw(st.integers(1, size))
        parts = [min(micro, size - start) for start in range(0, size, micro)]
    else:
        parts = draw(cuts(size))
    label = st.sampled_from([-100, 0, 1, CLASSES - 1])
    return Example(
        size,
        tuple(parts),
        is_cut,
        draw(st.sampled_from(KINDS)),
        draw(st.sampled_from(STRUCTURES)),
        draw(st.sampled_from(precisions)),
        draw(st.sampled_from(RECOMPUTE)),
        tuple(draw(st.lists(st.tuples(*[label] * LENGTH), min_size=size, max_size=size))),
        tuple(draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=size, max_size=size))),
        draw(st.sampled_from([None, None, 1e-3, 1e3])),
        draw(st.integers(0, 99)),
    )


def dtype_of(example):
    return torch.float64 if example.precision == "float64" else torch.float32


def batch_of(example):
    torch.manual_seed(example.seed)
    x = torch.randn(example.size, LENGTH, WIDTH, dtype=dtype_of(example))
    return x, torch.tensor(example.labels), torch.tensor(example.weights, dtype=dtype_of(example))


def beginning(example, model):
    """The model as the engine has it before the first window; building for bf16-true rounds its weights."""
    return copy.deepcopy(model).bfloat16() if example.precision == "bf16-true" else model


def run(example, model, data, recompute=None, structure=None, **more):
    """One window by the engine: its result, the engine, and the gradients that the optimizer was given."""
    loss, count = loss_of(example.kind)
    segments = {
        "none": lambda: (),
        "every block": lambda: checkpointing.every(model, 1),
        "every second": lambda: checkpointing.every(model, 2),
        "two segments": lambda: checkpointing.segments(model, 2),
        "a run": lambda: (snugfit.Segment(("layers.1", "layers.2")),),
    }[example.recompute if recompute is None else recompute]()
    plan = Plan(
        batch_size=example.size,
        micro_batch_size=max(example.parts),
        precision="32-true" if example.precision == "float64" else example.precision,
        recompute=segments,
    )
    scale = LossScale(init_scale=1024.0) if example.precision == "16-mixed" else None
    options = {"max_grad_norm": example.max_grad_norm, "loss_scale": scale, "count": count, **more}
    if example.precision == "bf16-true":
        job = Job(model, loss, lambda model: Keep(model.parameters()), None, scheduler=decay, **options)
        engine = build(job, plan, "cpu")
    else:
        keep = Keep(model.parameters())
        engine = Engine(model, keep, plan, loss=loss, scheduler=decay(keep), **options)
    (keep,) = engine.optimizers
    pack = example.structure if structure is None else structure
    if example.is_cut:
        result = engine.step(packed(pack, *data))
    else:
        pieces = zip(*(part.split(list(example.parts)) for part in data), strict=True)
        result = engine.step_window([packed(pack, *piece) for piece in pieces])
    return result, engine, keep


def decay(optimizer):
    return LambdaLR(optimizer, lambda step: 0.5**step)


class Keep(torch.optim.AdamW):
    """AdamW that keeps the gradients which it was given; it has a state that could move."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.seen = []

    def step(self, closure=None):
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        return super().step(closure)


def norm(tensors):
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def reference(example, model, data):
    """Loss and gradient of the full batch by plain torch, and the size of what is summed in it."""
    twin = copy.deepcopy(model)
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(example.precision)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = wanted_loss(example.kind, twin, packed("dict", *data))
    if loss is None:
        return None
    gradient = torch.autograd.grad(loss, list(twin.parameters()))
    # what is summed may cancel: an error counts against the parts, not against a sum near zero
    sizes = 0.0
    by_weight = example.kind == "weights"
    counted = example.size if example.kind == "samples" else data[2].sum() if by_weight else (data[1] != -100).sum()
    for i in range(example.size):
        total = terms(twin, packed("dict", *(part[i : i + 1] for part in data)))[2 if by_weight else 1][0]
        sizes += norm(torch.autograd.grad(total, list(twin.parameters()))) / (float(counted) or 1.0)
    return loss.detach(), gradient, max(sizes, norm(gradient))


def clipped(gradient, limit):
    total = norm(gradient)
    factor = 1.0 if limit is None else min(1.0, limit / (total + 1e-6))
    return [g * factor for g in gradient], total, factor


def holds_for(example):
    """Promises 1, 2 and 4: gradient, loss and norm are those of the full batch; nothing counted moves nothing."""
    torch.manual_seed(example.seed + 1)
    model, data = Net().to(dtype_of(example)), batch_of(example)
    before = state_of(beginning(example, model))
    wanted = reference(example, model, data)
    result, engine, keep = run(example, model, data)
    assert result.num_micro_batches == len(example.parts)
    assert all(p.grad is None for p in model.parameters())
    if wanted is None:
        assert (result.skipped, result.reason, math.isnan(float(result.loss))) == (True, "empty", True)
        assert same_bits(state_of(model), before)
        assert (engine.step_count, keep.seen, len(keep.state), keep.param_groups[0]["lr"]) == (0, [], 0, 0.1)
        return
    loss, gradient, sizes = wanted
    assert not result.skipped
    tolerance = PROMISED[example.precision]
    gradient, total, factor = clipped(gradient, example.max_grad_norm)
    error = norm([a - b for a, b in zip(keep.seen[0], gradient, strict=True)])
    assert error <= tolerance * sizes * factor
    assert abs(float(result.grad_norm) - total) <= tolerance * sizes
    assert float(result.loss) == pytest.approx(float(loss), rel=tolerance)
    assert (engine.step_count, keep.param_groups[0]["lr"]) == (1, 0.05)


def recomputing_changes_nothing(example):
    """Promise 5, bit for bit, with dropout: gradients, weights after the update, loss, and the random stream."""
    torch.manual_seed(example.seed + 1)
    model, data = Net(dropout=0.4).to(dtype_of(example)), batch_of(example)
    found = []
    for recompute in ("none", example.recompute):
        twin = copy.deepcopy(model)
        torch.manual_seed(5)
        result, engine, keep = run(example, twin, data, recompute)
        stream = torch.rand(1)
        engine.close()
        gradients = keep.seen[0] if keep.seen else []
        found.append([*gradients, *state_of(twin), result.loss.nan_to_num(), result.grad_norm, stream])
    assert same_bits(*found)


def what_is_not_finite_moves_nothing(example, place, value):
    """Promise 3: weights, optimizer, schedule and counters stay; the scale backs off once; the next window is clean."""
    torch.manual_seed(example.seed + 1)
    model, data = Net().to(dtype_of(example)), batch_of(example)
    if wanted_loss(example.kind, model, packed("dict", *data)) is None:
        return
    bad = data[0].clone()
    bad[place % example.size, 0, 0] = value
    hit = copy.deepcopy(model)
    loss = wanted_loss(example.kind, hit, packed("dict", bad, *data[1:]))
    gradient = torch.autograd.grad(loss, list(hit.parameters()))
    before = state_of(beginning(example, model))
    result, engine, keep = run(example, model, (bad, *data[1:]))
    ends = [sum(example.parts[: i + 1]) for i in range(len(example.parts))]
    hit_part = next(i for i, end in enumerate(ends) if place % example.size < end)
    start = ends[hit_part] - example.parts[hit_part]
    part = packed("dict", *(tensor[start : ends[hit_part]] for tensor in data))
    if wanted_loss(example.kind, model, part) is None or all(g.isfinite().all() for g in gradient):
        return  # what counts nothing is not run, and hurts nobody
    assert (result.skipped, result.reason) == (True, "non-finite gradient")
    assert same_bits(state_of(model), before)
    assert (engine.step_count, engine.micro_step_count, engine.sample_count) == (0, 0, 0)
    assert (keep.seen, len(keep.state), keep.param_groups[0]["lr"]) == ([], 0, 0.1)
    assert all(p.grad is None for p in model.parameters())
    if example.precision == "16-mixed":
        assert (result.loss_scale, engine.state_dict()["scaler"]["scale"]) == (1024.0, 512.0)
    fresh, _, clean = run(example, copy.deepcopy(model), data)
    again = engine.step(packed(example.structure, *data)) if example.is_cut else None
    if again is not None:
        assert not again.skipped
        assert not fresh.skipped
        if example.precision != "16-mixed":  # the scale is another one there
            assert same_bits(keep.seen[0], clean.seen[0])


@settings(max_examples=60)
@given(examples())
def test_gradient_loss_and_norm_are_those_of_the_full_batch(example):
    holds_for(example)


@settings(max_examples=40)
@given(examples())
def test_recomputing_changes_no_bit(example):
    recomputing_changes_nothing(example)


@settings(max_examples=40)
@given(examples(), st.integers(0, 9), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_window_that_is_not_finite_moves_nothing(example, place, value):
    what_is_not_finite_moves_nothing(example, place, value)
