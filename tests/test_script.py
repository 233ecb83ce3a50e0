"""The lines that a plan comes to: they run as they are printed, and train as the full batch does."""

import copy
import io
import textwrap
from collections import UserDict
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch import nn

import snugfit
from snugfit import Plan, Segment, plan_tables
from snugfit.planning.own_loop import OwnLoop, own_loop
from snugfit.planning.script import script

WIDTH, CLASSES, LIMIT = 16, 5, 0.05
NAMED = ("encoder.layers.0", "encoder.layers.1", "encoder.layers.2")


class Model(nn.Module):
    """Blocks as most models have them, with attention, a module before them and one behind."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x)))


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def loss_fn(model, batch):
    inner = batch["inputs"] if "inputs" in batch else batch
    x, y = (inner["x"], inner["y"]) if hasattr(inner, "keys") else inner
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def batch(form, num_samples=10):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 3, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (num_samples, 3), generator=generator)
    y[:4, 1:] = -100
    named = {"x": x, "y": y}
    return {
        "dict": named,
        "tuple": (x, y),
        "list": [x, y],
        "pair": Pair(x, y),
        "encoding": UserDict(named),
        "nested": {"inputs": named, "scale": torch.tensor(2.0), "name": "words", "nothing": None},
    }[form]


def labels_of(form):
    """What a job says of its count."""
    if form == "nested":
        return lambda one: (one["inputs"]["y"] != -100).sum()
    return snugfit.tokens(key=1 if form in ("tuple", "list") else "y")


def job(form="dict", **options):
    return snugfit.Job(
        lambda: Model().double(),
        loss_fn,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batch(form),
        **{"count": labels_of(form), **options},
    )


def trained(code, form):
    """Two updates by printed lines, with nothing but what a script has: parameters, what is logged, the rate left."""
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loss_fn": loss_fn, "batch": batch(form)}
    names |= {"count": labels_of(form)} if form == "nested" else {}
    once, head, each = "\n".join(code).partition("# for each batch")
    exec(once, names)
    logged = []
    for _ in range(2):
        exec(head + each, names)
        logged.append(names["loss"].item())
    return list(model.parameters()), logged, scheduler.get_last_lr()


def full_batch(form):
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    logged = []
    for step in range(2):
        loss = loss_fn(model, batch(form))
        loss.backward()
        logged.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (step + 1)
    return list(model.parameters()), logged


BATCHES = ("tuple", "list", "pair", "encoding", "nested")
FORMS = {
    "nothing": (),
    "blocks": tuple(Segment((name,)) for name in NAMED),
    "kept": (Segment(("embed",)), Segment(NAMED[:1], "keep-matmul"), Segment(("encoder.layers.3",), "keep:mm")),
    "attention": (Segment(("encoder.layers.1",), "keep-attention"), Segment(("head",), "offload")),
    "parts": (Segment(("encoder.layers.2.self_attn",)), Segment(("encoder.layers.3.linear1",), "keep-attention")),
    "nested": (Segment(("encoder",)), Segment(("encoder.layers.2",))),
    "a run": (Segment(NAMED[:2]), Segment(("encoder.layers.3",), "keep-last")),
}


@pytest.mark.filterwarnings("ignore:segments are offloaded to the host")
@pytest.mark.parametrize(
    ("form", "recompute"),
    [*((form, ()) for form in BATCHES), *(("dict", segments) for segments in FORMS.values())],
    ids=[*BATCHES, *FORMS],
)
def test_the_lines_with_snugfit_and_those_without_train_as_the_full_batch(form, recompute, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = Plan(batch_size=10, micro_batch_size=4, recompute=recompute)
    plan.save("kept.json")
    options = {"max_grad_norm": LIMIT, "scheduler": lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.5)}
    given = own_loop(job(form, **options), Model().double())
    lines = script(plan, "cpu", given, "kept.json")
    whole, whole_losses = full_batch(form)
    assert max(map(len, (*lines.snugfit, *lines.pytorch))) <= 76  # and four in front of them
    for code in (lines.snugfit, lines.pytorch):
        parameters, logged, rate = trained(code, form)
        assert rate == [0.1 * 0.25]
        assert logged == pytest.approx(whole_losses, rel=1e-10)
        for mine, theirs in zip(parameters, whole, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)
    needs_snugfit = any(len(one.modules) > 1 for one in recompute)
    assert any("only with snugfit" in line for line in lines.pytorch) == needs_snugfit
    assert any("snugfit." in line for line in lines.pytorch) == needs_snugfit
    assert lines.by_hand == ("or without it, as far as plain PyTorch goes" if needs_snugfit else "or without it")


def test_a_loss_in_parts_by_hand_has_the_loss_and_the_gradients_of_the_whole():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 7, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (4, 7), generator=generator)
    labels[:, 5:] = -100
    code = script(Plan(batch_size=8, micro_batch_size=8, loss_chunks=3), "cpu").pytorch
    names = {}
    exec("\n".join(code).partition("# for each batch")[0], names)
    loss = names["chunked_cross_entropy"](hidden, weight, labels)
    whole = nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)
    for mine, theirs in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(whole, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)


def test_frozen_statistics_by_hand_stay_as_they_are():
    code = script(Plan(batch_size=8, micro_batch_size=8, norm_policy="frozen"), "cpu").pytorch
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    exec("\n".join(code).partition("# for each batch")[0], {"model": model})
    model(torch.randn(2, 3, 4, 4))
    assert model[1].num_batches_tracked == 0
    assert model[0].training


def test_the_lines_say_what_they_replace_and_what_a_batch_is():
    options = {"max_grad_norm": LIMIT, "scheduler": lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.5)}
    lines = script(Plan(batch_size=10, micro_batch_size=4), "cpu", own_loop(job(**options), Model()))
    for code in (lines.snugfit, lines.pytorch):
        assert '# batch: {"x": tensor, "y": tensor}, as in your job' in code
        replaced = "zero_grad, loss, backward, clip_grad_norm_, step and scheduler.step"
        assert f"# replaces your lines of {replaced}" in " ".join(code).replace(" # and", " and")


def test_a_batch_that_slices_do_not_cut_is_left_to_a_function_of_the_user_s():
    captions = ["a", "b"]
    found = own_loop(snugfit.Job(Model, loss_fn, torch.optim.SGD, {"x": torch.zeros(2, 3), "c": captions}), Model())
    code = script(Plan(batch_size=10, micro_batch_size=4), "cpu", found).pytorch
    assert "for micro in cut(batch, 4):" in code
    assert "# cut: a function of yours that gives a batch in parts of 4 samples" in code


def test_what_is_recomputed_by_hand_runs_its_forward_again():
    plan = Plan(batch_size=10, micro_batch_size=10, recompute=tuple(Segment((name,)) for name in NAMED))
    once = "\n".join(script(plan, "cpu").pytorch).partition("# for each batch")[0]
    model = Model().double()
    calls = []
    for name in (*NAMED, "encoder.layers.3"):
        model.get_submodule(name).linear1.register_forward_hook(lambda *_, name=name: calls.append(name))
    exec(once, {"torch": torch, "model": model})
    loss_fn(model, batch("dict")).backward()
    assert {name: calls.count(name) for name in calls} == {**dict.fromkeys(NAMED, 2), "encoder.layers.3": 1}


def test_fp16_is_unscaled_before_it_is_clipped_and_the_schedule_follows_the_update():
    loop = OwnLoop(max_grad_norm=1.0, has_scheduler=True)
    code = script(Plan(batch_size=8, micro_batch_size=4, precision="16-mixed"), "cuda", loop).pytorch
    order = ["scaler.unscale_(optimizer)", "grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"]
    order += ["scaler.step(optimizer)", "scaler.update()", "scheduler.step()", "optimizer.zero_grad()"]
    assert [line for line in code if line in order] == order


def test_ranks_reduce_once_and_are_told_what_they_must_count_alike():
    loop = own_loop(job(), Model())
    code = script(Plan(batch_size=20, micro_batch_size=4, world_size=2), "cpu", loop).pytorch
    assert "# exact where all ranks have as many tokens; snugfit weights them" in code
    synced = []

    class Wrapped(nn.Module):
        """As much of DDP as the lines use."""

        def __init__(self):
            super().__init__()
            self.inner, self.syncs = Model().double(), True

        def no_sync(self):
            return mock.patch.object(self, "syncs", False)

        def forward(self, x):
            synced.append(self.syncs)
            return self.inner(x)

    model = Wrapped()
    names = {"torch": torch, "model": model, "loss_fn": loss_fn, "batch": batch("dict")}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    exec("\n".join(code), names)
    assert synced == [False, False, True]


def test_an_optimizer_is_made_as_the_job_makes_it_with_its_new_form():
    plan = Plan(batch_size=10, micro_batch_size=10, optimizer_impl="fused")
    made = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)"
    lines = script(plan, "cuda", own_loop(job(), Model()))
    for code in (lines.snugfit, lines.pytorch):
        text = " ".join(line.strip() for line in code)
        assert made in text.replace("( ", "(").replace(", )", ")")
    assert "# make your optimizer with fused=True" in script(plan, "cuda").pytorch


@pytest.mark.parametrize(
    ("form", "moved"),
    [
        ("dict", 'micro = {k: t[start : start + 4].to("cuda") for k, t in batch.items()}'),
        ("tuple", 'micro = tuple(t[start : start + 4].to("cuda") for t in batch)'),
        ("other", "# bring the tensors of micro to the card here"),
    ],
)
def test_a_micro_batch_comes_to_the_card_by_itself(form, moved):
    plan = Plan(batch_size=10, micro_batch_size=4)
    assert f"    {moved}" in script(plan, "cuda", OwnLoop(form=form)).pytorch
    assert not any("cuda" in line for line in script(plan, "cpu", OwnLoop(form=form)).pytorch)


def test_samples_are_counted_where_the_batch_has_them():
    def count(example, **options):
        before, behind = own_loop(snugfit.Job(Model, loss_fn, torch.optim.SGD, example, **options), Model()).count
        return f"{before}micro{behind}"

    assert count({"x": torch.zeros(4, 2)}) == 'len(micro["x"])'
    assert count((torch.zeros(4, 2), torch.zeros(4))) == "len(micro[0])"
    assert count(torch.zeros(4, 2)) == "len(micro)"
    assert count(lambda n: {"a": {"b": torch.zeros(n)}}) == 'len(micro["a"]["b"])'
    tokens = snugfit.tokens(shift=True, ignore_index=0)
    assert count({"labels": torch.zeros(4, 2)}, count=tokens) == '(micro["labels"][..., 1:] != 0).sum()'
    assert count(torch.zeros(4, 2), count=len) == "count(micro)"
    assert (
        "    # num_samples: how many samples a batch holds"
        in script(Plan(batch_size=8, micro_batch_size=4), "cpu").pytorch
    )


def test_a_job_is_not_changed_by_reading_its_loop():
    model = Model()
    before = copy.deepcopy(model.state_dict())

    def optimizer(made):
        made.requires_grad_(False)
        made.head.requires_grad_(True)
        return torch.optim.SGD(made.head.parameters(), lr=0.1)

    found = own_loop(snugfit.Job(model, loss_fn, optimizer, batch("dict")), model)
    assert found.optimizer == "torch.optim.SGD"
    assert all(parameter.requires_grad and parameter.device.type == "cpu" for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_file_of_a_plan_is_named_as_it_was_given():
    plan = Plan(batch_size=8, micro_batch_size=8)
    assert 'plan = snugfit.Plan.load("cpu2.json")' in script(plan, "cpu", plan_file="cpu2.json").snugfit
    assert any("-o plan.json" in line for line in script(plan, "cpu").snugfit)
    assert not any("-o" in line for line in script(plan, "cpu", plan_file="cpu2.json").snugfit)


def test_lines_can_be_copied_from_what_is_printed():
    small = snugfit.plan(
        job(), "cpu", 10, fixed={"micro_batch_size": 4, "recompute": (Segment(("encoder.layers.1",)),)}
    )
    out = io.StringIO()
    plan_tables.show(Console(file=out, width=80, highlight=False, markup=False, emoji=False), small, "kept.json")
    by_hand = out.getvalue().partition("or without it\n")[2].partition("\nreasons")[0]
    compile(textwrap.dedent(by_hand), "printed", "exec")
    assert "segment: a module" in out.getvalue()


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        (["keep-last"] * 2, "only the last product of each module is kept"),
        (["keep-attention-last", "full", "keep-last"], "in 2 of 3 segments only the last product"),
    ],
)
def test_the_reason_for_snugfit_counts_the_segments_that_need_it(policies, said):
    segments = tuple(Segment((f"{number}",), policy) for number, policy in enumerate(policies))
    lines = script(Plan(batch_size=8, micro_batch_size=8, recompute=segments), "cuda").pytorch
    assert any(line.startswith(f"# recomputation, only with snugfit: {said}") for line in lines)
