"""The lines that a plan comes to: they run as they are printed, and train as the full batch does."""

import copy
import io
import textwrap
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


def loss_fn(model, batch):
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def batch(form, num_samples=10):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 3, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (num_samples, 3), generator=generator)
    y[:4, 1:] = -100
    return {"dict": {"x": x, "y": y}, "tuple": (x, y), "list": [x, y]}[form]


def job(form="dict", **options):
    return snugfit.Job(
        lambda: Model().double(),
        loss_fn,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batch(form),
        **{"count": snugfit.tokens(key="y" if form == "dict" else 1), **options},
    )


def trained(code, form):
    """Parameters after two updates by printed lines, and the rate that a schedule left."""
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    names = {"snugfit": snugfit, "torch": torch, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    names |= {"loss_fn": loss_fn, "batch": batch(form)}
    once, head, each = "\n".join(code).partition("# for each batch")
    exec(once, names)
    for _ in range(2):
        exec(head + each, names)
    return [parameter.detach() for parameter in model.parameters()], scheduler.get_last_lr()


def full_batch(form):
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        loss_fn(model, batch(form)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (step + 1)
    return list(model.parameters())


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
    [("tuple", ()), ("list", ()), *(("dict", segments) for segments in FORMS.values())],
    ids=["tuple", "list", *FORMS],
)
def test_the_lines_with_snugfit_and_those_without_train_as_the_full_batch(form, recompute, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = Plan(batch_size=10, micro_batch_size=4, recompute=recompute)
    plan.save("kept.json")
    options = {"max_grad_norm": LIMIT, "scheduler": lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.5)}
    given = own_loop(job(form, **options), Model().double())
    lines = script(plan, "cpu", given, "kept.json")
    for code in (lines.snugfit, lines.pytorch):
        parameters, rate = trained(code, form)
        assert rate == [0.1 * 0.25]
        for mine, whole in zip(parameters, full_batch(form), strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-13)
    is_by_hand = not any("only with snugfit" in line for line in lines.pytorch)
    assert is_by_hand == (not any(len(one.modules) > 1 for one in recompute))


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
    order = ["scaler.unscale_(optimizer)", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"]
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
        ("dict", 'micro = {k: t.to("cuda") for k, t in zip(batch, part)}'),
        ("tuple", 'micro = tuple(t.to("cuda") for t in part)'),
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
