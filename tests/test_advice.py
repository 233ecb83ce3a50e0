"""What a step holds without needing it: said where it is so, with the bytes that another trace confirms."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snugfit
from snugfit import sizes

CARD = "rtx-3060-12gb"
CLASSES, TOKENS, WIDTH = 8000, 2048, 256
LOGITS = 4 * TOKENS * CLASSES


def step_of(act):
    """A step of an embedding, deep layers and a head; ``act(model, ids, kept)`` runs forward and backward."""

    def make_step():
        layers = [layer for _ in range(40) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        model = nn.Sequential(nn.Embedding(CLASSES, WIDTH), *layers, nn.Linear(WIDTH, CLASSES, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = torch.zeros(TOKENS, dtype=torch.long)
        kept = []

        def step():
            act(model, ids, kept)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make_step


def plain(model, ids, kept):
    F.cross_entropy(model(ids), ids).backward()


def in_a_variable(model, ids, kept):
    logits = model(ids)
    F.cross_entropy(logits, ids).backward()


def of_the_step_before(model, ids, kept):
    F.cross_entropy(model(ids), ids).backward()
    kept[:] = [torch.zeros(TOKENS, CLASSES)]


def ever_more(model, ids, kept):
    F.cross_entropy(model(ids), ids).backward()
    kept.append(torch.zeros(TOKENS, CLASSES))


def made_once(model, ids, kept):
    F.cross_entropy(model(ids), ids).backward()
    kept[:] = kept or [torch.zeros(TOKENS, CLASSES)]


def all_that_modules_make(model, ids, kept):
    """The outputs of the last layers are held, and the peak lies in the first, whose hidden state is large."""
    made = []
    hidden = model[0](ids)
    for layer in model[1:-1]:
        hidden = layer(hidden)
    for _ in range(4):
        hidden = hidden.repeat(1, 2)[:, :WIDTH].exp()
        made.append(hidden)
    made.append(model[-1](hidden))
    made[-1].mean().backward()


def advice(act):
    return snugfit.trace(step_of(act), CARD)


def test_a_step_that_holds_nothing_gets_no_advice():
    assert advice(plain).advice == ()


def test_outputs_in_a_variable_are_named_with_the_bytes_that_they_cost():
    held, free = advice(in_a_variable), advice(plain)
    (sentence,) = held.advice
    assert held.peak_allocated_bytes - free.peak_allocated_bytes == LOGITS
    assert f"up to {sizes.text(LOGITS)} lower" in sentence
    assert "mm.default of 81" in sentence


def test_what_the_step_before_made_is_named_with_the_bytes_that_it_costs():
    held, free = advice(of_the_step_before), advice(plain)
    (sentence,) = held.advice
    assert held.peak_allocated_bytes - free.peak_allocated_bytes == LOGITS
    assert f"the peak is {sizes.text(LOGITS)} lower" in sentence
    assert "step before" in sentence


def test_a_list_that_grows_is_named_with_the_bytes_of_each_step():
    (sentence,) = advice(ever_more).advice
    assert f"every step leaves {sizes.text(LOGITS)} more behind" in sentence


def test_what_is_made_once_and_kept_is_nobodys_fault():
    assert advice(made_once).advice == ()


@pytest.mark.parametrize("where", ["after the forward", "never to none"])
def test_gradients_of_the_step_before_are_named(where):
    def make_step():
        model = nn.Sequential(nn.Linear(4096, 4096, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad(set_to_none=where != "never to none")
            if where == "after the forward":
                loss = model(torch.zeros(8192, 4096)).exp().sum()
                loss = loss + model(torch.zeros(8192, 4096)).sum()
                optimizer.zero_grad()
            else:
                loss = model(torch.zeros(8192, 4096)).exp().sum()
            loss.backward()
            optimizer.step()

        return step

    sentences = snugfit.trace(make_step, CARD).advice
    named = [sentence for sentence in sentences if "gradients of the step before" in sentence]
    # The first loop sets them to None before its forward begins, so nothing is there at its peak.
    assert len(named) == (where == "never to none")
    assert all(f"up to {sizes.text(4 * 4096 * 4096)}" in sentence for sentence in named)


def test_what_backward_has_passed_and_the_step_still_holds_is_replayed_without():
    """The head's output is held; its backward is the first, the peak the last: nothing there can need it."""

    def make_step(hold):
        def make():
            first = nn.Linear(WIDTH, 16 * WIDTH, bias=False)
            last = nn.Linear(16 * WIDTH, CLASSES, bias=False)
            model = nn.ModuleDict({"first": first, "last": last})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            inputs = torch.zeros(TOKENS, WIDTH)

            def step():
                hidden = first(inputs).repeat(64, 1)[:TOKENS]
                outputs = last(hidden)
                loss = outputs.mean()
                if not hold:
                    del outputs
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        return make

    held, free = (snugfit.trace(make_step(hold), CARD) for hold in (True, False))
    assert held.peak_at.phase == free.peak_at.phase == "backward"
    assert held.peak_at.module == ""
    assert held.peak_allocated_bytes - free.peak_allocated_bytes == LOGITS
    assert free.advice == ()
    assert any(sizes.text(LOGITS) in sentence for sentence in held.advice)


def test_a_peak_in_the_optimizer_is_said_not_to_depend_on_the_forward():
    def make_step():
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def step():
            model(torch.zeros(1, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    report = snugfit.trace(make_step, CARD)
    assert report.peak_at.phase == "optimizer"
    assert any("recomputing more and smaller micro-batches do not lower it" in line for line in report.advice)
    assert not any("optimizer's step" in line for line in advice(plain).advice)
