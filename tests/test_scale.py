"""Advice on accumulation, cards, learning rates, noise and running statistics: only what applies, with its numbers."""

import math

import pytest
import torch
from torch import nn

import snugfit
from snugfit import Job, Plan, hardware, sizes
from snugfit.planning import links, scale

CARD = hardware.resolve("a100-sxm-80gb")
WIDTH = 64


class Normed(nn.Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(self.norm(x))


def plain():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def report_of(plan, make_model=plain):
    job = Job(
        make_model,
        lambda model, micro_batch: model(micro_batch["x"]).pow(2).mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda num_samples: {"x": torch.ones(num_samples, WIDTH)},
    )
    alone = Plan(batch_size=plan.samples_per_rank, micro_batch_size=plan.micro_batch_size)
    return snugfit.estimate(job, alone, CARD)


def advice_on(make_model=plain, *, options=None, **fields):
    plan = Plan(**fields)
    found = scale.advice(plan, report_of(plan, make_model), CARD, make_model(), **(options or {}))
    return {one.topic: one for one in found}, found


def test_a_plan_of_one_micro_batch_on_one_card_needs_no_advice():
    assert advice_on(batch_size=8, micro_batch_size=8)[1] == ()


@pytest.mark.parametrize(
    ("cards", "steps", "words"),
    [
        (1, 2, "2-8 are usual on a card short of memory"),
        (1, 8, "2-8 are usual on a card short of memory"),
        (1, 16, "outside of the usual 2-8 on a card short of memory and 32-128 for very large batches"),
        (2, 8, "2-8 are usual on a card short of memory, 4-16 are usual to save synchronisations between cards"),
        (2, 16, "4-16 are usual to save synchronisations between cards"),
        (1, 64, "32-128 are usual for very large batches"),
    ],
)
def test_steps_are_put_into_the_usual_ranges_and_those_between_cards_where_there_are_several(cards, steps, words):
    text = advice_on(batch_size=2 * cards * steps, micro_batch_size=2, world_size=cards)[0]["accumulation"].text
    assert text.startswith(f"{steps} steps ({words}): ")


def test_accumulation_keeps_one_micro_batch_of_the_activations_of_the_whole_batch():
    numbers = advice_on(batch_size=32, micro_batch_size=8)[0]["accumulation"].numbers
    assert numbers["saved_bytes_of_batch"] == 4 * numbers["saved_bytes"] > 0  # F7: four times those of a quarter


@pytest.mark.parametrize("steps", [16, 17])
def test_beyond_16_steps_checkpointing_is_advised_where_nothing_is_recomputed(steps):
    topics, _ = advice_on(batch_size=steps, micro_batch_size=1)
    assert ("checkpointing" in topics) == ("update_ratio" in topics["batch size"].numbers) == (steps == 17)
    if steps == 17:
        recomputed, _ = advice_on(batch_size=17, micro_batch_size=1, recompute=(snugfit.Segment("0"),))
        assert "checkpointing" not in recomputed
        assert recomputed["batch size"].numbers["update_ratio"] == 1 / 17


@pytest.mark.parametrize(("steps", "limit", "expected"), [(8, None, False), (9, None, True), (9, 1.0, False)])
def test_beyond_8_steps_clipping_is_advised_where_nothing_is_clipped(steps, limit, expected):
    topics, _ = advice_on(batch_size=steps, micro_batch_size=1, options={"max_grad_norm": limit})
    assert ("clipping" in topics) == expected
    if expected:
        assert f"{steps} times as large" in topics["clipping"].text


def test_a_ring_sends_twice_all_but_one_part_once_per_window_or_in_every_micro_step():
    plan = Plan(batch_size=64, micro_batch_size=2, world_size=4)
    found = scale.wire(plan, 4000, 4000, cards=4, sharded=False)
    assert (found.per_window, found.per_micro_step) == (6000, 8 * 6000)
    assert found.gradients_per_window == found.gradients_per_micro_step == 4000


def test_fsdp_gathers_in_every_micro_step_and_pays_with_whole_gradients_for_reducing_once():
    plan = Plan(batch_size=64, micro_batch_size=2, world_size=4)
    found = scale.wire(plan, 4000, 2000, cards=4, sharded=True)
    gathered = 8 * 2 * 1500
    assert (found.per_window, found.per_micro_step) == (gathered + 3000, gathered + 8 * 3000)
    assert (found.gradients_per_window, found.gradients_per_micro_step) == (4000, 1000)


def test_cards_are_told_bytes_and_seconds_on_their_link():
    gradient_bytes = 4 * 2 * (WIDTH * WIDTH + WIDTH)
    _, found = advice_on(batch_size=32, micro_batch_size=2, world_size=4)
    (on_cards,) = [one for one in found if "cards" in one.numbers]
    sent = on_cards.numbers["wire_bytes_per_window"]
    assert sent == pytest.approx(2 * 3 / 4 * gradient_bytes, rel=0.05)  # blocks of 512 bytes
    assert on_cards.numbers["wire_bytes_per_micro_step"] == 4 * sent
    assert on_cards.numbers["seconds_per_window"] == pytest.approx(sent / (300e9 * links.FRACTION))
    assert "NVLink 3" in on_cards.text
    slow = advice_on(batch_size=32, micro_batch_size=2, world_size=4, options={"link": links.LINKS["ethernet-10g"]})[1]
    (on_slow,) = [one for one in slow if "cards" in one.numbers]
    assert on_slow.numbers["seconds_per_window"] == pytest.approx(240 * on_cards.numbers["seconds_per_window"])


@pytest.mark.parametrize(
    ("batch_size", "words"),
    [(32, "by 4 (linear) or 2 (square root, "), (1024, "by 128 (linear) or 11.3 (square root, ")],
)
def test_the_rate_of_a_larger_batch_is_given_by_both_rules(batch_size, words):
    topics, _ = advice_on(batch_size=batch_size, micro_batch_size=8, options={"reference_batch_size": 8})
    numbers = topics["learning rate"].numbers
    assert numbers["linear"] == numbers["factor"] == batch_size / 8
    assert numbers["sqrt"] == math.sqrt(batch_size / 8)
    assert words in topics["learning rate"].text


def test_a_rate_that_was_found_at_this_batch_size_stays():
    topics, _ = advice_on(batch_size=32, micro_batch_size=8, options={"reference_batch_size": 32})
    assert "learning rate" not in topics


def test_a_batch_of_32_scatters_half_as_much_as_one_of_8():
    topics, _ = advice_on(batch_size=32, micro_batch_size=8)
    assert topics["batch size"].numbers["scatter_ratio"] == 2.0


def test_a_measured_noise_scale_says_what_the_batch_costs():
    _, found = advice_on(batch_size=32, micro_batch_size=32, options={"noise_scale": 32.0})
    (noise,) = [one for one in found if "noise_scale" in one.numbers]
    assert (noise.numbers["updates"], noise.numbers["samples"]) == (2.0, 2.0)  # at B = N both are twice the fewest
    assert advice_on(batch_size=32, micro_batch_size=32, options={"noise_scale": math.nan})[1] == ()


def test_batchnorm_is_told_how_few_samples_it_sees_and_which_momentum_moves_as_far():
    topics, _ = advice_on(Normed, batch_size=32, micro_batch_size=8)
    numbers = topics["BatchNorm"].numbers
    assert (numbers["samples"], numbers["scatter_ratio"]) == (8, 2.0)
    same = numbers["momentum_per_micro_step"]
    assert (1 - same) ** 4 == pytest.approx(1 - 0.1)


def test_the_momentum_of_099_belongs_to_about_ten_steps():
    topics, _ = advice_on(Normed, batch_size=20, micro_batch_size=2, norm_policy="micro")
    # F11: 0.9 to 0.99 in weights of the old value; 0.99^10 = 0.904.
    assert 1 - topics["BatchNorm"].numbers["momentum_per_micro_step"] == pytest.approx(0.99, abs=1e-3)


@pytest.mark.parametrize("policy", ["frozen", "window"])
def test_a_policy_for_batchnorm_settles_what_it_settles(policy):
    topics, _ = advice_on(Normed, batch_size=32, micro_batch_size=8, norm_policy=policy)
    assert ("BatchNorm" in topics) == (policy == "window")
    if policy == "window":  # statistics are put right; what the layers see in a micro-batch stays
        assert set(topics["BatchNorm"].numbers) == {"samples", "scatter_ratio"}


def test_links_follow_the_card():
    assert links.between(hardware.resolve("rtx-3090")).name == "PCIe 4.0 x16"
    assert links.between(CARD).name == "NVLink 3"
    # 16 GT/s a lane, 16 lanes, 128 of 130 bits: 31.5 GB/s.
    assert links.to_host(CARD).bandwidth == pytest.approx(31.5e9, rel=1e-3)
    assert links.LINKS["ethernet-10g"].seconds(1e9) == pytest.approx(1e9 / 1.25e9 / links.FRACTION)


SLOW = links.Link("slow", 1e9 / links.FRACTION, 1e-5, "a gigabyte a second")


def test_reducing_takes_the_ring_s_bytes_and_the_latency_of_every_bucket():
    plan = Plan(batch_size=48, micro_batch_size=2, world_size=4)  # 12 samples a card: 6 micro-steps
    gradient_bytes = 100 * sizes.MIB  # four buckets of 25 MiB
    found = links.reduction(plan, gradient_bytes, SLOW)
    on_the_wire = 2 * 3 / 4 * gradient_bytes / 1e9  # 0.1573 s
    latency = 4 * (8.4e-6 + 6 * 1e-5)  # each bucket: the call, and 2 x 3 rounds of a hop
    assert found.once_s == pytest.approx(on_the_wire + latency)
    assert found.per_window_s == found.once_s
    assert found.per_micro_step_s == pytest.approx(6 * found.once_s)


@pytest.mark.parametrize(
    ("backward_s", "shown"),
    [
        (0.04, 0.1 - 0.04 * 3 / 4),  # the link is slower: begins with the first quarter, and never waits again
        (0.2, 0.1 / 4),  # backward is slower: the last bucket alone is left
    ],
)
def test_backward_hides_all_of_a_reduction_but_what_the_link_is_late_with(backward_s, shown):
    four_buckets = 100 * sizes.MIB
    fast_hops = links.Link("", 2 * 3 / 4 * four_buckets / 0.1 / links.FRACTION, 0.0, "0.1 s for all of them")
    plan = Plan(batch_size=32, micro_batch_size=4, world_size=4)
    found = links.reduction(plan, four_buckets, fast_hops, backward_s=backward_s)
    assert found.per_window_s == pytest.approx(shown, abs=4 * links.CALL_S)
    assert found.per_micro_step_s == 2 * found.per_window_s


def test_one_card_reduces_nothing():
    found = links.reduction(Plan(batch_size=4, micro_batch_size=1), 10**9, SLOW)
    assert (found.once_s, found.per_window_s, found.per_micro_step_s) == (0.0, 0.0, 0.0)


def test_sizes_in_sentences_are_those_of_the_numbers():
    _, found = advice_on(batch_size=32, micro_batch_size=2, world_size=4)
    for one in found:
        for name in ("wire_bytes_per_window", "saved_bytes"):
            if name in one.numbers:
                assert sizes.text(int(one.numbers[name])) in one.text
