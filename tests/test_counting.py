import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from snugfit import BatchError, Engine, Loss
from snugfit.jobs import UNSAID
from snugfit.training.counting import is_doubtful, resolve, settled, tokens
from snugfit.training.splitting import num_samples
from tolerances import CUT_FLOAT32

LABELS = torch.tensor([[1, 2, -100, -100], [-100, 3, 4, 5]])


def test_tokens_counts_the_labels_that_are_not_ignored():
    assert tokens()({"labels": LABELS}) == 5.0
    assert tokens(ignore_index=1)({"labels": LABELS}) == 7.0


def test_shifted_tokens_leave_out_the_first_label_of_every_sequence():
    assert tokens(shift=True)({"labels": LABELS}) == 4.0


def test_labels_are_found_by_key_index_or_attribute():
    @dataclass
    class Batch:
        target: torch.Tensor

    assert tokens(key="target")({"target": LABELS}) == 5.0
    assert tokens(key=1)((LABELS, LABELS[:1])) == 2.0
    assert tokens(key="target")(Batch(LABELS)) == 5.0


def test_a_batch_without_labels_is_refused_with_its_keys():
    with pytest.raises(BatchError) as caught:
        tokens()({"ids": LABELS})
    assert "'labels'" in str(caught.value)
    assert "'ids'" in caught.value.got
    with pytest.raises(BatchError, match="key=1"):
        tokens()((LABELS, LABELS))


def test_token_counts_compare_by_value():
    assert tokens(shift=True) == tokens(shift=True) != tokens()


def test_samples_is_the_number_of_samples():
    assert resolve("samples", num_samples)({"x": torch.zeros(3, 2)}) == 3.0


def test_a_count_of_ones_own_may_return_any_number_or_scalar_tensor():
    assert resolve(lambda batch: batch["weight"].sum(), num_samples)({"weight": torch.tensor([0.5, 0.25])}) == 0.75
    assert resolve(lambda batch: 0, num_samples)({}) == 0.0


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "many", None, torch.ones(2), [1, 2]])
def test_a_count_that_cannot_be_divided_by_is_refused(value):
    with pytest.raises(BatchError, match="count"):
        resolve(lambda batch: value, num_samples)({})


PLAIN = nn.Linear(1, 1)


def test_ignored_labels_under_a_count_of_samples_are_doubtful_and_labels_per_sample_are_not():
    assert is_doubtful("samples", {"labels": LABELS})
    assert not is_doubtful(tokens(), {"labels": LABELS})
    for batch in ({"labels": LABELS.clamp(min=0)}, {"labels": torch.tensor([1, -100])}, (LABELS, LABELS)):
        assert not is_doubtful("samples", batch)


@pytest.mark.parametrize("step", ["step", "step_window"])
def test_ignored_labels_are_warned_of_once_and_not_where_the_loss_reports_its_own_count(step):
    batch = {"x": torch.ones(2, 1), "labels": LABELS}

    def reporting(model, batch):
        return Loss(model(batch["x"]).sum(), tokens()(batch))

    def mean(model, batch):
        return model(batch["x"]).mean()

    for loss, expected in ((reporting, 0), (mean, 1)):
        engine = Engine(PLAIN, torch.optim.SGD(PLAIN.parameters(), lr=0.0), loss=loss)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                getattr(engine, step)(batch if step == "step" else [batch])
        assert [str(one.message).startswith("labels hold -100") for one in seen] == [True] * expected


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8, eos_token_id=0, bos_token_id=0)
    )


class Wrapped(nn.Module):
    """What DDP and adapter libraries look like from outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def compiled(model):
    return torch.compile(model, backend="eager")


WRAPPERS = [
    lambda model: model,
    Wrapped,
    compiled,
    lambda model: Wrapped(compiled(model)),
    lambda model: compiled(Wrapped(model)),
]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["plain", "wrapped", "compiled", "wrapped compiled", "compiled wrapped"])
def test_the_tokens_of_a_causal_model_of_transformers_are_inferred_and_said(wrap):
    with pytest.warns(UserWarning, match="count inferred"):
        assert settled(UNSAID, wrap(gpt2()), {"labels": LABELS}) == tokens(shift=True)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("BartForCausalLM", {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "d_model": 8}),
        ("XLNetLMHeadModel", {"n_layer": 1, "n_head": 2, "d_inner": 8, "d_model": 8}),
        ("XLMWithLMHeadModel", {"n_layers": 1, "n_heads": 2, "emb_dim": 8}),
    ],
)
def test_a_model_that_is_called_causal_but_compares_labels_where_they_are_is_not_counted_shifted(kind, config):
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(vocab_size=16, pad_token_id=0, bos_token_id=1, **config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert settled(UNSAID, model, {"labels": LABELS}) == "samples"


def test_an_own_class_of_a_causal_model_is_counted_as_that_model():
    class LossForCausalLM:
        """A part without a forward that is named like a model."""

    class Mixed(LossForCausalLM, GPT2LMHeadModel):
        pass

    with pytest.warns(UserWarning, match="count inferred"):
        assert settled(UNSAID, Mixed(gpt2().config), {"labels": LABELS}) == tokens(shift=True)

    class OwnForCausalLM(GPT2LMHeadModel):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    with pytest.warns(UserWarning, match="count inferred"):
        assert settled(UNSAID, OwnForCausalLM(gpt2().config), {"labels": LABELS}) == tokens(shift=True)


def test_what_was_said_is_never_inferred():
    batch = {"labels": LABELS.clamp(min=0)}
    assert settled("samples", gpt2(), batch) == "samples"
    assert settled(tokens(), gpt2(), batch) == tokens()
    assert settled(UNSAID, PLAIN, batch) == UNSAID == "samples"
    assert settled(UNSAID, gpt2(), {"input_ids": LABELS}) == "samples"


def test_a_causal_model_without_a_count_trains_on_the_mean_over_its_tokens():
    torch.manual_seed(0)
    model = gpt2().eval()
    tokens_ = torch.randint(0, 16, (4, 8))
    labels = tokens_.clone()
    for sample, length in enumerate((1, 7, 3, 5)):
        labels[sample, length:] = -100
    batch = {"input_ids": tokens_, "labels": labels}
    whole = torch.autograd.grad(model(**batch).loss, list(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = Engine(model, optimizer, loss=lambda model, batch: model(**batch).loss, micro_batch_size=1)
    with pytest.warns(UserWarning, match="count inferred"):
        result = engine.step(batch)
    assert result.count == 12
    for old, new, gradient in zip(before, model.parameters(), whole, strict=True):
        torch.testing.assert_close(old - new, gradient, **CUT_FLOAT32)


def clean_then_ignored():
    """Windows whose labels hold -100 from the second on, and there in the last micro-batch only."""
    clean = torch.tensor([[1, 2], [3, 1]])
    return [clean, torch.tensor([[1, 2], [3, -100]]), torch.tensor([[1, -100], [3, -100]])]


@pytest.mark.parametrize(
    "step",
    [Engine.step, lambda engine, batch: engine.step_window([{"labels": row[None]} for row in batch["labels"]])],
)
@pytest.mark.parametrize("is_reported", [False, True])
def test_labels_that_are_ignored_from_a_later_batch_on_are_warned_of_once(step, is_reported):
    model = nn.Embedding(4, 4)

    def loss(model, micro_batch):
        labels = micro_batch["labels"].flatten()
        value = nn.functional.cross_entropy(model(labels.clamp(min=0)), labels, reduction="sum")
        return Loss(value, (labels >= 0).sum()) if is_reported else value / 4

    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, micro_batch_size=1)
    warned = []
    for labels in clean_then_ignored():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(engine, {"labels": labels})
        warned.append(sum(str(one.message).startswith("labels hold -100") for one in caught))
    assert warned == [0, int(not is_reported), 0]


@pytest.mark.parametrize("error", [KeyError("mask"), ZeroDivisionError("of nothing"), AttributeError("sum")])
def test_an_error_inside_of_a_count_says_that_it_was_the_count(error):
    def count(micro_batch):
        raise error

    with pytest.raises(BatchError, match="the function given as count failed") as caught:
        resolve(count, num_samples)({"x": torch.ones(2)})
    assert caught.value.__cause__ is error
    assert type(error).__name__ in caught.value.got
    assert "'x'" in caught.value.expected


def test_a_count_that_is_refused_by_name_keeps_its_name():
    with pytest.raises(BatchError, match="no labels to count tokens in"):
        resolve(tokens(), num_samples)({"x": torch.ones(2)})
