"""The examples are jobs that can be trained; the larger ones are only described here."""

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch

from snugfit import Job, Loss
from snugfit.targets import load_target

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def python_lm(monkeypatch):
    load_target(str(EXAMPLES / "python_lm.py"))
    module = sys.modules["snugfit_target_python_lm"]
    monkeypatch.setattr(module, "WIDTH", 16)
    monkeypatch.setattr(module, "LAYERS", 1)
    return module


@pytest.mark.parametrize(("name", "length"), [("bert_base", 128), ("bert_large", 512)])
def test_a_bert_example_describes_its_model_at_its_length(name, length):
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    job = load_target(str(EXAMPLES / f"{name}.py"))
    with torch.device("meta"):
        model = job.model()
    assert isinstance(job, Job)
    assert job.batch(2)["input_ids"].shape == (2, length)
    assert model.config.num_hidden_layers == {"bert_base": 12, "bert_large": 24}[name]


def test_the_language_model_never_trains_on_validation_files(python_lm):
    training = python_lm.source_files(validation=False)
    validation = python_lm.source_files(validation=True)
    assert not set(training) & set(validation)
    assert len(training) > len(validation) > 0


def test_the_data_of_the_language_model_are_full_batches_and_the_same_on_every_run(python_lm):
    data = python_lm.job(batch_size=3).data
    first, again = (list(itertools.islice(data(), 2)) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert a["input_ids"].shape == (3, python_lm.CONTEXT)
        assert torch.equal(a["input_ids"][:, 1:], a["labels"][:, :-1])
        assert torch.equal(a["input_ids"], b["input_ids"])
    assert not torch.equal(first[0]["input_ids"], first[1]["input_ids"])


def test_the_language_model_learns_and_its_metric_is_the_loss_in_bits(python_lm):
    job = python_lm.job(batch_size=2)
    batch = job.batch(2)
    num_bytes = job.count(batch)
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.optimizer(model)
    losses = []
    for _ in range(8):
        result = job.loss(model, batch)
        assert isinstance(result, Loss)
        (result.total / num_bytes).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.total.item() / num_bytes)
    bits, count = result.metrics["bits_per_byte"]
    assert num_bytes == count == 2 * python_lm.CONTEXT
    assert float(bits) / count == pytest.approx(losses[-1] / math.log(2))
    assert losses[-1] < losses[0]


def test_the_language_model_sees_nothing_of_later_bytes(python_lm):
    model = python_lm.ByteGPT().eval()
    input_ids = python_lm.job().batch(1)["input_ids"][:, :16]
    changed = input_ids.clone()
    changed[:, 8:] = 0
    assert torch.equal(model(input_ids)[:, :8], model(changed)[:, :8])


def test_validation_leaves_the_model_s_mode_and_gives_bits_per_byte(python_lm):
    model = python_lm.ByteGPT()
    bits = python_lm.validation_bits_per_byte(model, num_batches=1)
    assert model.training
    assert 7 < bits < 9  # an untrained model knows nothing: 8 bits
