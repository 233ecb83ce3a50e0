import math
from dataclasses import dataclass

import pytest
import torch

from snugfit import BatchError
from snugfit.training.counting import resolve, tokens, warn_of_ignored_labels
from snugfit.training.splitting import num_samples

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


def test_ignored_labels_are_warned_of_and_labels_per_sample_are_not():
    with pytest.warns(UserWarning, match="-100"):
        assert warn_of_ignored_labels({"labels": LABELS})
    assert not warn_of_ignored_labels({"labels": LABELS.clamp(min=0)})
    assert not warn_of_ignored_labels({"labels": torch.tensor([1, -100])})
    assert not warn_of_ignored_labels((LABELS, LABELS))
