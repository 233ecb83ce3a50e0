"""Ways out that are by hand: their printed lines run, and train as the plan that their numbers rest on says."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn

import snugfit
from snugfit import InfeasibleError, Job, Plan, PlanError, checkpointing, cli, hardware, sizes
from snugfit.planning.ways import fsdp
from snugfit.planning.ways_out import NAMES, RUN, sentences, ways_out

CARD = hardware.resolve("rtx-3090")
LR = 0.01


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, 4)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch["x"]).float(), batch["y"])


def batch(num_samples):
    made = torch.Generator().manual_seed(0)
    return {"x": torch.randn(num_samples, 64, generator=made), "y": torch.randn(num_samples, 4, generator=made)}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)


def sgd(model):
    """Unlike Adam it tells gradients of another scale."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def job(**changed):
    return replace(Job(Net, loss_fn, adamw, batch, scheduler=schedule, max_grad_norm=0.05), **changed)


def way(name, plan, budget="24GiB", **changed):
    (found,) = ways_out(job(**changed), plan, CARD, sizes.parse(budget), allow=[name], runs_in_half=False)
    return found


def plan(**values):
    return Plan(**{"batch_size": 6, "micro_batch_size": 2, "recompute": checkpointing.blocks(Net()), **values})


def run(lines, model, steps=2, after=""):
    """Run printed lines on the host: what is done once, what a user makes beside, and the loop for each batch."""
    text = [line.replace('.to("cuda")', "").replace('"cuda"', '"cpu"') for line in lines]
    start = next(i for i, line in enumerate(text) if line.startswith("# for each batch"))
    names = {"model": model, "loss_fn": loss_fn, "batch": batch(6), "torch": torch, "schedule": schedule}
    exec("\n".join([*text[:start], after]), names)
    for _ in range(steps):
        exec("\n".join(text[start:]), names)
    return names


def trained_plainly(steps=2, *, clips=True):
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model)
    scheduler = schedule(optimizer)
    for _ in range(steps):
        loss_fn(model, batch(6)).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def assert_same(model, other):
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_lines_of_state_on_the_host_sum_clip_and_schedule_as_the_job_does():
    found = way("host-offload", plan(), optimizer=sgd)
    torch.manual_seed(0)
    names = run(found.by_hand, Net(), after="scheduler = schedule(optimizer)")
    assert_same(names["model"], trained_plainly())
    assert all(p.grad is None for p in names["model"].parameters())


def test_state_on_the_host_of_bf16_weights_is_updated_in_fp32_masters():
    low = {"precision": "bf16-true", "gradient_dtype": "parameter", "bf16_update": "stochastic-rounding"}
    found = way("host-offload", plan(**low))
    model = Net()
    names = run(found.by_hand, model, after="scheduler = schedule(optimizer)")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {h.dtype for h in names["host"].values()} == {torch.float32}
    assert not any("is lost" in line for line in found.by_hand)


def test_the_lines_of_a_fused_backward_make_the_update_of_the_whole_batch():
    found = way("fused-backward", plan(), optimizer=sgd)
    assert found.plan.accumulation_steps == 1
    torch.manual_seed(0)
    names = run(found.by_hand, Net(), after="schedulers = [schedule(o) for o in optimizers.values()]")
    assert_same(names["model"], trained_plainly(clips=False))  # which its notes say
    assert any("no clipping" in note for note in found.notes)


def test_the_update_of_bf16_weights_in_backward_loses_nothing_on_average():
    low = {"precision": "bf16-true", "gradient_dtype": "parameter", "bf16_update": "stochastic-rounding"}

    def plain(model):
        return torch.optim.AdamW(model.parameters(), lr=0.0005, weight_decay=0.0)

    found = way("fused-backward", plan(micro_batch_size=6, **low), scheduler=None, optimizer=plain)
    model, steps = Net(), 20
    weight = model.blocks[0].weight
    nn.init.ones_(weight)
    weight.register_hook(torch.ones_like)  # with equal gradients a step of Adam's is its learning rate
    torch.manual_seed(0)
    names = run(found.by_hand, model, steps)
    assert weight.dtype == torch.bfloat16
    # Below 1 bf16 numbers lie 2^-8 = 0.0039 apart: to the nearest, every one of these steps would be lost.
    assert weight.float().mean().item() == pytest.approx(1 - steps * 0.0005, abs=0.001)
    assert all(held.numel() == 0 for held in names["wide"].values())


def test_the_lines_of_8_bit_state_say_precision_rounding_segments_and_micro_batches():
    pytest.importorskip("torchao")
    given = plan(recompute=checkpointing.blocks(deep_job().model()))
    (found,) = ways_out(deep_job(), given, CARD, DEEP_BUDGET, allow=["8bit-optimizer"])
    text = "\n".join(found.by_hand)
    assert (found.plan.precision, found.plan.bf16_update) == ("bf16-true", "stochastic-rounding")
    assert "p.data = p.data.to(torch.bfloat16)" in text
    assert "with torch.autocast(" in text
    assert "optimizer = AdamW8bit(model.parameters(), lr=0.01, weight_decay=0.1, bf16_stochastic_round=True)" in text
    assert "functools.partial(checkpoint" in text
    assert "6 samples as 3 x 2" in text
    compile(text, "lines", "exec")
    assert found.to_dict()["by_hand"] == list(found.by_hand)


def test_the_lines_of_more_cards_are_code_with_the_jobs_own_optimizer():
    found = way("fsdp", plan())
    text = "\n".join(found.by_hand)
    compile(text, "lines", "exec")
    assert text.count("torchrun") == 1
    assert (
        text.index("fully_shard(model") < text.index("optimizer = torch.optim.AdamW(") < text.index("# for each batch")
    )


def test_segments_that_only_snugfit_runs_are_written_out_since_no_plan_was():
    found = way("host-offload", plan(recompute=(snugfit.Segment(("blocks.0", "blocks.1", "blocks.2")),)), optimizer=sgd)
    text = "\n".join(found.by_hand)
    assert "Plan.load" not in text
    assert "snugfit.Segment(['blocks.0', 'blocks.1', 'blocks.2'], 'full')" in text
    torch.manual_seed(0)
    names = run(found.by_hand, Net(), after="scheduler = schedule(optimizer)")
    assert_same(names["model"], trained_plainly())


def test_frozen_weights_are_neither_reduced_nor_gathered_as_gradients():
    weights = [fsdp.Weight("a.w", "a", (8, 8), 4, True), fsdp.Weight("b.w", "b", (8, 8), 4, False)]
    trained = [weight for weight in weights if weight.is_trained]
    assert fsdp.units(weights, Net()) == (128, 0)
    assert fsdp.units(trained, Net()) == (64, 0)


def deep_job():
    """AdamW over 40 million weights takes 0.6 GiB beside 0.5 of context and 0.6 of margin."""
    return Job(
        lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(40))),
        lambda model, batch: model(batch["x"]).float().square().mean(),
        adamw,
        lambda num_samples: {"x": torch.randn(num_samples, 1024)},
        max_grad_norm=1.0,
    )


DEEP_BUDGET = 1560 * sizes.MIB


def refused(allow):
    with pytest.raises(InfeasibleError) as raised:
        snugfit.plan(deep_job(), "rtx-3090", 8, DEEP_BUDGET, allow=allow)
    return raised.value


def test_a_way_that_snugfit_does_not_run_is_answered_with_all_its_lines_at_once():
    error = refused(("host-offload",))
    assert "snugfit does not run host-offload itself" in error.what
    assert all(name in error.expected for name in RUN)
    assert "x the time of the smallest candidate" in error.got
    assert "optimizer = torch.optim.AdamW(host.values(), lr=0.01, weight_decay=0.1)" in error.hint
    assert "clip_grad_norm_(host.values(), 1.0)" in error.hint
    assert "--allow" not in error.hint
    assert error.smallest.needed_bytes > error.budget_bytes
    assert [one.name for one in error.ways] == ["host-offload"]


def test_a_way_whose_library_is_missing_is_answered_with_its_install_line(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name))
    error = refused(("8bit-optimizer",))
    assert "only with torchao, which is not installed" in error.what
    assert 'pip install "snugfit[torchao]"' in error.hint


def test_the_help_says_which_ways_snugfit_runs_itself(capsys):
    assert {*RUN} < {*NAMES}
    assert cli.main(["plan", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "plans and runs 8bit-optimizer and lora itself" in text


def test_more_cards_that_do_not_do_are_a_line_only_where_they_were_asked_for():
    given = (job(), plan(), CARD, sizes.parse("520MiB"))
    found = ways_out(*given)
    assert {row.name for row in found} == {*NAMES}
    assert not any(line.startswith("fsdp") for line in sentences(found))
    (row,) = ways_out(*given, allow=["fsdp"])
    assert not row.fits
    assert any(line.startswith("fsdp: does not fit") for line in sentences([row]))


def test_times_are_said_to_be_relative_to_the_plan_that_does_not_fit():
    (heading, line) = sentences([way("host-offload", plan())])
    assert "relative to the smallest candidate, which does not fit" in heading
    assert " x the time" in line


def test_a_field_that_a_change_decides_otherwise_is_refused_by_name():
    pytest.importorskip("peft")
    with pytest.raises(PlanError, match="lora is allowed, but with it: its precision must be another"):
        snugfit.plan(deep_job(), "rtx-3090", 8, DEEP_BUDGET, fixed={"precision": "32-true"}, allow=("lora",))
