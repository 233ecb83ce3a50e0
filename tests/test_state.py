"""What an engine saves is a copy, and what it loads is checked before anything is changed."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from models import LinearStack, Transformer, Weight, mean_product, regression_batch, same_bits, squared_error, state_of
from snugfit import Engine, Job, Plan, PlanError, build


def trained(groups=1, optimizer=torch.optim.AdamW, scheduled=True, model=None, **settings):
    torch.manual_seed(0)
    model = LinearStack(depth=2) if model is None else model
    parameters = list(model.parameters())
    made = optimizer([{"params": parameters[i::groups]} for i in range(groups)], lr=0.01)
    engine = Engine(
        model, made, loss=squared_error, scheduler=StepLR(made, 1, gamma=0.9) if scheduled else None, **settings
    )
    engine.step(regression_batch(4))
    return engine


def everything(engine):
    return [*state_of(engine.model, *engine.optimizers, *engine.schedulers), torch.get_rng_state()]


def bf16():
    torch.manual_seed(0)
    job = Job(
        LinearStack(depth=2),
        squared_error,
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        regression_batch(4),
    )
    engine = build(job, Plan(batch_size=4, micro_batch_size=2, precision="bf16-true"), "cpu")
    engine.step(regression_batch(4))
    return engine


@pytest.mark.parametrize("make", [trained, lambda: trained(optimizer=torch.optim.SGD), bf16])
def test_a_state_in_memory_can_be_loaded_again_and_again(make):
    engine = make()
    before, state = everything(engine), engine.state_dict()
    kept = copy.deepcopy(state)
    batch = regression_batch(4)
    for _ in range(2):
        for _ in range(2):
            engine.step(batch)
        assert not same_bits(before[:-1], everything(engine)[:-1])
        engine.load_state_dict(state)
        torch.set_rng_state(before[-1])
        assert same_bits(before, everything(engine))
    assert torch.equal(kept["random"].pop("torch"), state["random"].pop("torch"))
    assert same_bits(flat(kept), flat(state))


def flat(value):
    class Holder:
        def state_dict(self):
            return value

    return state_of(Holder())


def test_tied_weights_are_saved_once_and_what_torch_hangs_on_a_state_is_kept():
    model = Transformer(tied=True)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_product)
    state = engine.state_dict()["model"]
    assert state["embedding.weight"] is state["head.weight"]
    assert state["embedding.weight"].data_ptr() != model.embedding.weight.data_ptr()
    assert state._metadata == model.state_dict()._metadata


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_state_fits_the_model_compiled_or_not():
    plain = trained()
    compiled = trained(model=torch.compile(LinearStack(depth=2), backend="eager"))
    assert list(compiled.state_dict()["model"]) == list(plain.model.state_dict())
    compiled.load_state_dict(plain.state_dict())
    assert same_bits(state_of(plain.model), state_of(compiled.close()))
    plain.load_state_dict(compiled.state_dict())


def without(state, *path):
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return state


def replaced(state, value, *path):
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return state


def cosine():
    return CosineAnnealingLR(torch.optim.SGD([torch.ones(1, requires_grad=True)]), 9)


NAME = "layers.0.weight"
BROKEN = {
    "None": lambda s: None,
    "a list": lambda s: [s],
    "nothing": lambda s: {},
    "a model's state": lambda s: s["model"],
    "an optimizer's state": lambda s: s["optimizers"][0],
    **{f"no {key}": lambda s, key=key: without(s, key) for key in ("optimizers", "schedulers", "scaler", "random")},
    "no progress": lambda s: without(s, "progress"),
    "half of progress": lambda s: without(s, "progress", "steps"),
    "half of random": lambda s: without(s, "random", "python"),
    "optimizers that are none": lambda s: replaced(s, None, "optimizers"),
    "an optimizer that is none": lambda s: replaced(s, None, "optimizers", 0),
    "an optimizer without groups": lambda s: without(s, "optimizers", 0, "param_groups"),
    "two optimizers": lambda s: replaced(s, s["optimizers"] * 2, "optimizers"),
    "no scheduler": lambda s: replaced(s, [], "schedulers"),
    "no masters": lambda s: replaced(s, [], "weights"),
    "a model that is none": lambda s: replaced(s, 3, "model"),
    "a missing weight": lambda s: without(s, "model", NAME),
    "a weight too many": lambda s: replaced(s, torch.ones(1), "model", "extra"),
    "a weight of another shape": lambda s: replaced(s, torch.ones(2, 2), "model", NAME),
    "other groups": lambda s: trained(groups=2).state_dict(),
    **{
        f"{'.'.join(map(str, path))} of the wrong kind": lambda s, path=path, value=value: replaced(s, value, *path)
        for *path, value in (
            ("random", "torch", torch.zeros(3)),
            ("random", "torch", None),
            ("random", "python", 3),
            ("random", "numpy", "x"),
            ("progress", "steps", "x"),
            ("weights", None),
            ("schedulers", 0, {}),
            ("schedulers", 0, "last_epoch", "x"),
            ("optimizers", 0, "state", 3),
            ("optimizers", 0, "state", 0, 3),
            ("optimizers", 0, "param_groups", 3),
            ("optimizers", 0, "param_groups", 0, 3),
        )
    },
    "another optimizer": lambda s: trained(optimizer=torch.optim.SGD).state_dict(),
    "another scheduler": lambda s: replaced(
        s, CosineAnnealingLR(torch.optim.SGD([torch.ones(1)]), 9).state_dict(), "schedulers", 0
    ),
    "another model": lambda s: trained(model=LinearStack(depth=1), scheduled=True).state_dict(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_state_of_this_engine_is_refused_and_changes_nothing(name):
    other = trained()
    other.step(regression_batch(4))
    broken = BROKEN[name](other.state_dict())
    engine = trained()
    before, steps = everything(engine), engine.step_count
    with pytest.raises(PlanError, match=r"a saved state has another|not the state of an engine"):
        engine.load_state_dict(broken)
    assert same_bits(before, everything(engine))
    assert engine.step_count == steps


@pytest.mark.parametrize(
    "scaler", [3, {}, {"scale": "x", "clean_windows": 0}, {"scale": torch.nan, "clean_windows": 0}]
)
def test_what_is_no_loss_scale_is_refused_and_changes_nothing(scaler):
    engine = trained(precision="16-mixed")
    before, steps = everything(engine), engine.step_count
    with pytest.raises(PlanError, match=r"a saved loss scale|not the state of an engine"):
        engine.load_state_dict({**trained(precision="16-mixed").state_dict(), "scaler": scaler})
    assert same_bits(before, everything(engine))
    assert engine.step(regression_batch(4)).loss_scale == 65536
    assert engine.step_count == steps + 1


def test_a_model_that_renames_entries_itself_is_loaded():
    class Renamed(LinearStack):
        def _load_from_state_dict(self, state, prefix, *arguments):
            if "old" in state:
                state[NAME] = state.pop("old")
            super()._load_from_state_dict(state, prefix, *arguments)

    engine = trained(model=Renamed(depth=2))
    state = engine.state_dict()
    state["model"]["old"] = state["model"].pop(NAME)
    wanted = state["model"]["old"].clone()
    engine.step(regression_batch(4))
    engine.load_state_dict(state)
    assert torch.equal(dict(engine.model.named_parameters())[NAME], wanted)


@pytest.mark.parametrize(("given", "after"), [(2, 2), (None, 4)])
def test_a_micro_batch_size_that_was_given_stays_when_a_state_is_loaded(given, after):
    state = trained(micro_batch_size=4).state_dict()
    engine = trained(micro_batch_size=given)
    engine.load_state_dict(state)
    assert engine.micro_batch_size == after


def test_a_state_of_before_the_limit_of_step_window_is_loaded():
    engine = trained()
    state = engine.state_dict()
    del state["progress"]["micro_batch_limit"]
    engine.load_state_dict(state)
    assert engine.step_count == 1


def test_a_scheduler_that_cannot_be_saved_is_named():
    class Bare:
        def step(self):
            pass

    model = Weight(0.0)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), loss=mean_product, scheduler=Bare())
    engine.step(torch.ones(2))
    with pytest.raises(PlanError, match="the scheduler Bare cannot be saved"):
        engine.state_dict()


def test_sparse_entries_and_extra_state_are_copied_or_passed_on():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return "anything"

        def set_extra_state(self, state):
            assert state == "anything"

    model = Extra(2, 2)
    model.register_buffer("rows", torch.eye(2).to_sparse())
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda m, x: m(x).square().mean())
    state = engine.state_dict()
    assert state["model"]["rows"].is_sparse
    assert state["model"]["rows"] is not model.rows
    assert state["model"]["_extra_state"] == "anything"
    engine.load_state_dict(state)
