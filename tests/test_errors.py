import pickle

import pytest
import torch

import snugfit
from snugfit import Engine, Plan
from snugfit.errors import SnugfitError

LEAVES = {
    snugfit.PlanError: ValueError,
    snugfit.BatchError: ValueError,
    snugfit.InfeasibleError: Exception,
    snugfit.UnsupportedError: Exception,
    snugfit.NonFiniteError: Exception,
    snugfit.DeviceMemoryError: RuntimeError,
}


@pytest.mark.parametrize(("leaf", "builtin"), LEAVES.items())
def test_every_leaf_is_caught_as_the_base_and_as_its_builtin(leaf, builtin):
    with pytest.raises(SnugfitError):
        raise leaf("it failed")
    assert issubclass(leaf, builtin)


def test_a_message_has_its_four_parts_each_on_its_line():
    error = SnugfitError("no plan fits", got="26.31 GiB", expected="<= 24.00 GiB", hint="shard the model")
    assert str(error).splitlines() == [
        "no plan fits",
        "  got:      26.31 GiB",
        "  expected: <= 24.00 GiB",
        "hint: shard the model",
    ]


def test_a_part_that_is_not_given_has_no_line():
    assert str(SnugfitError("no plan fits")) == "no plan fits"
    assert str(SnugfitError("no plan fits", hint="shard")) == "no plan fits\nhint: shard"


def test_the_parts_and_the_facts_are_attributes():
    error = snugfit.InfeasibleError("no plan fits", got="a", expected="b", hint="c", budget_bytes=24, smallest="report")
    assert (error.what, error.got, error.expected, error.hint) == ("no plan fits", "a", "b", "c")
    assert error.budget_bytes == 24
    assert error.smallest == "report"


def test_an_error_keeps_its_facts_when_it_crosses_processes():
    error = pickle.loads(pickle.dumps(snugfit.UnsupportedError("no fake kernel", got="x", hint="y", op="aten.item")))
    assert isinstance(error, snugfit.UnsupportedError)
    assert (error.what, error.got, error.expected, error.hint, error.op) == (
        "no fake kernel",
        "x",
        None,
        "y",
        "aten.item",
    )


def test_a_warning_points_at_the_user_s_own_line():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda model, x: model(x).mean(), micro_batch_size=2
    )
    for act in (lambda: engine.step(torch.ones(4, 2)), lambda: Plan(batch_size=2, micro_batch_size=4)):
        with pytest.warns(UserWarning, match=r"BatchNorm|clamped") as caught:
            act()
        assert [one.filename for one in caught] == [__file__]
