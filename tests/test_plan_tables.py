"""What ``snugfit plan`` prints: it fits a terminal, says what to change in a script, and that is the same training."""

import io
import re

import pytest
import torch
from rich.console import Console
from torch import nn

import snugfit
from snugfit import Plan, Segment, plan_tables
from snugfit.planning.ladder import blocks_of, short_line
from snugfit.planning.script import script
from snugfit.sizes import GIB, MIB

WIDTH = 100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def job(classes=10):
    return snugfit.Job(
        lambda: nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, classes)),
        lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: {"x": torch.randn(n, 64), "y": torch.zeros(n, dtype=torch.long)},
    )


def printed(report, width=WIDTH):
    out = io.StringIO()
    plan_tables.show(Console(file=out, width=width, highlight=False, markup=False, emoji=False), report)
    return out.getvalue()


@pytest.fixture(scope="module")
def cut():
    """A plan in several micro-batches on the CPU."""
    return snugfit.plan(job(), "cpu", 2048, budget="12MiB")


def test_a_small_job_is_shown_in_mib_and_a_large_one_in_gib(cut):
    heads = printed(cut).partition("full batch, fp32")[0]
    assert "MiB" in heads
    assert "GiB" not in heads
    assert plan_tables.unit_for([GIB, 4 * GIB - 1]) == "MiB"
    assert plan_tables.unit_for([1, 4 * GIB]) == "GiB"
    assert (plan_tables.in_unit(3 * MIB // 2, "MiB"), plan_tables.in_unit(3 * GIB // 2, "GiB")) == ("1.5", "1.50")


def test_a_hundred_columns_hold_every_rung_on_a_line_of_its_own(cut):
    lines = printed(cut).splitlines()
    assert max(map(len, lines)) <= WIDTH
    for rung in cut.ladder:
        words = (short_line(rung.plan, blocks_of(cut.ladder)), f"{rung.relative_time:.2f}")
        assert any(all(word in line for word in words) for line in lines), rung.name


BLOCKS = (Segment(("0",)), Segment(("1",)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "2 x 43 + 42, fp32"),
        ({"precision": "bf16-mixed", "recompute": BLOCKS}, "2 x 43 + 42, bf16, every block"),
        ({"precision": "16-mixed", "recompute": BLOCKS[:1]}, "2 x 43 + 42, fp16, 1 segment"),
        (
            {"recompute": (Segment(("0",), "keep-matmul"), Segment(("1",)))},
            "2 x 43 + 42, fp32, every block full + keep-matmul",
        ),
        ({"optimizer_impl": "fused", "loss_chunks": 4}, "2 x 43 + 42, fp32, fused update, loss in 4"),
        ({"precision": "bf16-true"}, "2 x 43 + 42, bf16 weights"),
    ],
)
def test_a_plan_is_a_few_words_in_a_column(fields, words):
    assert short_line(Plan(batch_size=128, micro_batch_size=43, **fields), BLOCKS) == words


def test_what_is_printed_begins_with_the_script_and_speaks_of_no_list_of_claims(cut):
    text = printed(cut)
    order = ["plan:", "what to change in your script", "\nreasons\n", "\nworth knowing\n", "fits (modelled)"]
    assert sorted(order, key=text.index) == order
    assert not re.search(r"\b[TF]\d{1,2}\b", text)
    assert text.rstrip().endswith("(modelled)")
    document = plan_tables.document(cut)
    assert document["script"]["pytorch"][-1] == "optimizer.zero_grad()"
    assert all("claim" not in one for one in document["advice"])


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_ends_in_blanks_and_no_code_is_wider_than_a_terminal(cut, width):
    lines = printed(cut, width).splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert max(map(len, lines)) <= width


def test_a_batch_size_that_nobody_gave_is_said_to_be_a_default_and_norms_only_where_there_are_any(cut):
    assert "given" not in cut.reasons["batch_size"]
    assert "norm_policy" not in cut.reasons


@pytest.mark.parametrize(
    ("fields", "kind", "codes"),
    [
        ({"precision": "bf16-mixed"}, "cuda", ['with torch.autocast("cuda", torch.bfloat16):', "share.backward()"]),
        ({"precision": "16-mixed"}, "cuda", ["scaler.scale(share).backward()", "scaler.update()"]),
        ({"precision": "bf16-mixed"}, "cpu", ['with torch.autocast("cpu", torch.bfloat16):']),
        ({"optimizer_impl": "fused"}, "cuda", ["fused=True"]),
        (
            {"loss_chunks": 4},
            "cuda",
            ["rows.chunk(4)", "checkpoint(summed, some, weight, theirs"],
        ),
        ({"recompute": BLOCKS}, "cuda", ["functools.partial(checkpoint, use_reentrant=False)", "range(2)"]),
        ({"recompute": (Segment(("0",), "offload"),)}, "cuda", ["save_on_cpu(pin_memory=True)"]),
        ({"norm_policy": "frozen"}, "cuda", ["layer.eval()"]),
        ({"world_size": 2, "batch_size": 256}, "cuda", ["model.no_sync()"]),
        ({"precision": "bf16-true"}, "cuda", ["model.to(torch.bfloat16)"]),
    ],
)
def test_each_field_of_a_plan_is_a_line_of_the_script(fields, kind, codes):
    plan = Plan(**{"batch_size": 128, "micro_batch_size": 43, **fields})
    text = "\n".join(script(plan, kind).pytorch)
    assert all(code in text for code in codes)
    bare = "\n".join(script(Plan(batch_size=128, micro_batch_size=43), kind).pytorch)
    assert not all(code in bare for code in codes)


def test_a_loss_over_many_classes_is_told_of_the_one_in_chunks_with_its_share():
    found = snugfit.plan(job(classes=2000), "cpu", 2048, budget="40MiB", fixed={"recompute": ()})
    (note,) = [note for note in found.notes if "chunked_cross_entropy" in note]
    micro = found.plan.micro_batch_size
    share = int(re.search(r"(\d+)%", note)[1]) / 100
    scores = 4 * 2000 * micro / found.memory.peak_allocated_bytes  # of one such tensor in fp32
    assert scores - 0.01 <= share <= 3 * scores + 0.01  # log-probabilities and up to two gradients
    assert not [note for note in snugfit.plan(job(), "cpu", 2048, budget="12MiB").notes if "class scores" in note]


def of_sequences(model, batch):
    scores = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    lengths = (torch.full((len(batch["x"]),), size, dtype=torch.long) for size in (50, 4))
    return nn.functional.ctc_loss(scores, batch["y"], *lengths)


def of_distributions(model, batch):
    scores = model(batch["x"]).log_softmax(-1)
    return nn.functional.kl_div(scores, torch.ones_like(scores).softmax(-1), reduction="batchmean")


@pytest.mark.parametrize("loss", [of_sequences, of_distributions])
def test_scores_of_a_loss_without_labels_of_classes_are_not_those_of_a_cross_entropy(loss):
    sequences = snugfit.Job(
        lambda: nn.Linear(8, 2000),
        loss,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda n: {"x": torch.zeros(n, 50, 8), "y": torch.ones(n, 4, dtype=torch.long)},
    )
    found = snugfit.plan(sequences, "rtx-3060-12gb", 2048, budget="3GiB")
    assert found.plan.accumulation_steps > 1
    assert not [note for note in (*found.notes, *found.memory.advice) if "chunked_cross_entropy" in note]


@pytest.mark.parametrize("is_contrastive", [True, False])
def test_micro_batches_that_compute_less_than_the_whole_batch_are_said_to_be_another_loss(is_contrastive):
    def loss(model, batch):
        x = nn.functional.normalize(model(batch["x"]), dim=1)
        if not is_contrastive:
            return x.square().mean()
        return nn.functional.cross_entropy(x @ x.T / 0.1, torch.arange(len(x), device=x.device))

    pairs = snugfit.Job(
        lambda: nn.Sequential(*(Block() for _ in range(4))),
        loss,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda n: {"x": torch.zeros(n, 64)},
    )
    found = snugfit.plan(pairs, "cpu", 4096, budget="24MiB")
    assert found.plan.accumulation_steps > 1
    said = [note for note in found.notes if "is another loss" in note]
    assert len(said) == is_contrastive


def test_a_cpu_says_what_its_budget_is_for(cut):
    assert any("Python, torch" in note for note in cut.notes)


def test_a_budget_without_its_unit_is_asked_about():
    with pytest.raises(snugfit.InfeasibleError) as caught:
        snugfit.plan(job(), "cpu", 8, budget=160)
    assert '"160MiB"' in caught.value.hint


def test_the_reasons_for_no_recomputation_and_for_the_micro_batch_do_not_contradict_each_other(cut):
    assert cut.plan.recompute == ()
    size = cut.plan.micro_batch_size
    assert cut.reasons["recompute"] == f"micro-batches of {size} fit without: recomputing would only cost time"
    assert "not needed" not in printed(cut)


def test_lines_that_need_snugfit_are_headed_so():
    run = Plan(batch_size=128, micro_batch_size=64, recompute=(Segment(("0", "1")),))
    lines = script(run, "cuda")
    assert lines.by_hand == "or without it, as far as plain PyTorch goes"
    assert "# (plan with --recompute blocks for lines of plain PyTorch)" in lines.pytorch
    assert script(Plan(batch_size=128, micro_batch_size=64), "cuda").by_hand == "or without it"
