"""The jobs, plans and models that several of the tests of ``check`` share."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snugfit
from models import WIDTH, regression_batch, squared_error
from snugfit import Job, Plan, check


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def regression(model, loss=squared_error, size=4, micro_batch_size=2, batch=None, **plan):
    job = Job(model, loss, sgd, regression_batch(size) if batch is None else batch)
    return job, Plan(batch_size=size, micro_batch_size=micro_batch_size, **plan)


def found(job, plan):
    report = check(job, plan, "cpu")
    assert report.ok == (not report.hazards)
    return [hazard.kind for hazard in report.hazards]


def image_batch(size=8):
    return torch.randn(size, 3, 8, 8), torch.randint(2, (size,))


def image_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def transformers_model(name, **settings):
    transformers = pytest.importorskip("transformers")
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **settings
        )
        config.loss_type = "ForCausalLM"
        return lambda: transformers.GPT2LMHeadModel(config)
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **settings
    )
    return lambda: transformers.BertForSequenceClassification(config)


def own_loss(model, batch):
    return model(**batch).loss


def language_batch(size=4):
    ids = torch.randint(32, (size, 8))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, 5:], labels[1, 3:], mask[0, 5:] = -100, -100, 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.inner(x))


class Counts(nn.Module):
    """A layer with every kind of side effect."""

    def __init__(self, asks):
        super().__init__()
        self.linear, self.asks, self.calls = nn.Linear(WIDTH, WIDTH), asks, 0
        self.log, self.sums = [], {"x": 0.0}
        self.register_buffer("metric", torch.zeros(()))

    def forward(self, x):
        if not (self.asks and snugfit.is_recomputing()):
            self.calls += 1
            self.log.append(float(x.detach().mean()))
            self.sums["x"] += 1.0
        self.metric = self.metric + x.detach().mean()
        return torch.tanh(self.linear(x))
