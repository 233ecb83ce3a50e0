import copy
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from torch.nn.utils.rnn import pack_sequence

from snugfit import BatchError, PlanError, Shared
from snugfit.training.splitting import move, num_samples, resize, split
from strategies import split_sizes

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str = "train"


def column(size):
    return torch.arange(size)


@given(split_sizes())
def test_a_split_covers_each_sample_once_and_in_order(sizes):
    size, micro = sizes
    parts = split({"x": column(size), "deep": [column(size) * 2]}, micro)
    assert torch.equal(torch.cat([part["x"] for part in parts]), column(size))
    assert torch.equal(torch.cat([part["deep"][0] for part in parts]), column(size) * 2)
    assert [num_samples(part) for part in parts[:-1]] == [micro] * (len(parts) - 1)


def test_nothing_is_copied():
    x = column(6)
    assert all(part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in split(x, 4))


def test_a_micro_batch_larger_than_the_batch_is_the_whole_batch():
    (part,) = split(column(3), 8)
    assert part.tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None, "2"])
def test_a_micro_batch_size_that_is_no_count_is_refused(size):
    with pytest.raises(PlanError, match="micro_batch_size"):
        split(column(3), size)


def test_containers_keep_their_types_and_contents():
    batch = {
        "pair": Pair(column(5), column(5) + 1),
        "sample": Sample(column(5)),
        "ordered": OrderedDict(a=column(5)),
        "default": defaultdict(list, a=column(5)),
        "user": UserDict(a=column(5)),
        "view": MappingProxyType({"a": column(5)}),
        "tuple": (column(5), 3),
    }
    before = copy.copy(batch)
    first, last = split(batch, 3)
    assert batch == before
    assert type(first["pair"]) is Pair
    assert last["pair"].y.tolist() == [4, 5]
    assert type(first["sample"]) is Sample
    assert last["sample"].x.tolist() == [3, 4]
    assert last["sample"].name == "train"
    assert type(first["ordered"]) is OrderedDict
    assert type(first["default"]) is defaultdict
    assert first["default"].default_factory is list
    assert type(first["user"]) is UserDict
    for name in ("ordered", "default", "user", "view"):
        assert last[name]["a"].tolist() == [3, 4]
    assert last["tuple"][0].tolist() == [3, 4]
    assert last["tuple"][1] == 3


def test_a_batch_encoding_of_transformers_is_entered_and_stays_one():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.ones(5, 2), "labels": column(5)})
    first, last = split(batch, 3)
    assert type(first) is transformers.BatchEncoding
    assert last["labels"].tolist() == [3, 4]
    assert last.input_ids.shape == (2, 2)


def test_numbers_strings_none_and_scalar_tensors_are_repeated():
    same = {"scale": 2.0, "mode": "train", "nothing": None, "flag": True, "temperature": torch.tensor(3.0)}
    for part in split({"x": column(5), **same}, 2):
        assert {key: part[key] for key in same} == same


def test_shared_values_are_repeated_whole_and_bare():
    table = torch.zeros(7, 7)
    parts = split({"x": column(4), "table": Shared(table), "object": Shared({1, 2})}, 2)
    assert all(part["table"] is table and part["object"] == {1, 2} for part in parts)


def test_lists_without_tensors_are_cut_where_they_have_one_entry_per_sample():
    batch = {"x": column(3), "captions": ["a", "b", "c"], "nested": [[1], [2, 3], []], "sizes": [224, 224]}
    first, last = split(batch, 2)
    assert (first["captions"], last["captions"]) == (["a", "b"], ["c"])
    assert (first["nested"], last["nested"]) == ([[1], [2, 3]], [[]])
    assert last["sizes"] == [224, 224]


def test_a_tuple_of_strings_as_default_collate_makes_it_is_cut_and_a_tuple_of_numbers_is_not():
    first, last = split([column(2), ("a", "b"), (224, 224)], 1)
    assert (first[1], last[1]) == (("a",), ("b",))
    assert first[2] == (224, 224)


def test_unequal_first_dimensions_are_refused_with_both_paths_and_sizes():
    with pytest.raises(BatchError) as caught:
        split({"x": column(4), "deep": [{"y": column(3)}]}, 2)
    assert caught.value.paths == ("batch['x']", "batch['deep'][0]['y']")
    assert caught.value.sizes == (4, 3)
    assert "batch['x'] has 4, batch['deep'][0]['y'] has 3" in str(caught.value)


@pytest.mark.parametrize("batch", [{}, [], "text", 3, None, {"a": torch.tensor(1.0)}, {"a": Shared(column(3))}])
def test_a_batch_without_tensors_is_refused(batch):
    with pytest.raises(BatchError, match="no tensor"):
        split(batch, 2)


def test_a_batch_without_samples_is_refused():
    with pytest.raises(BatchError, match="no sample"):
        split(torch.zeros(0, 3), 2)


@pytest.mark.parametrize(("value", "kind"), [({1, 2}, "set"), (object(), "object"), (len, "builtin")])
def test_other_objects_are_refused_by_type_and_key(value, kind):
    with pytest.raises(BatchError) as caught:
        split({"x": column(4), "odd": [1, value]}, 2)
    assert kind in str(caught.value)
    assert caught.value.path == "batch['odd'][1]"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_batches_are_cut_by_rows_and_what_has_no_rows_to_choose_is_refused_by_name():
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    parts = split({"x": dense.to_sparse(), "y": dense}, 2)
    assert [part["x"].to_dense().tolist() for part in parts] == [[[0.0, 1.0], [2.0, 0.0]], [[0.0, 3.0]]]
    assert resize(dense.to_sparse(), 4).to_dense().tolist() == [*dense.tolist(), [0.0, 1.0]]
    with pytest.raises(BatchError, match=r"sparse_csr tensor, which cannot be cut: batch\['x'\]"):
        split({"x": dense.to_sparse_csr()}, 2)


def test_packed_sequences_and_nested_tensors_are_refused_by_name():
    packed = pack_sequence([torch.zeros(2), torch.zeros(1)])
    with pytest.raises(BatchError, match="PackedSequence"):
        split({"x": column(2), "packed": packed}, 1)
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged)
    with pytest.raises(BatchError, match="nested"):
        split({"x": nested}, 1)


def test_moving_rebuilds_containers_unwraps_shared_and_lets_other_objects_move_themselves():
    class Movable:
        def to(self, device):
            return ("moved", device)

    device = torch.device("meta")
    moved = move({"x": column(2), "pair": Pair(column(2), 1), "s": Shared(column(1)), "m": Movable(), "n": "a"}, device)
    assert moved["x"].device == moved["pair"].x.device == moved["s"].device == device
    assert moved["m"] == ("moved", device)
    assert moved["n"] == "a"


def test_an_example_is_cut_or_repeated_to_another_size():
    table = Shared(torch.zeros(1, 2))
    batch = {"x": column(3), "names": ["a", "b", "c"], "table": table}
    assert resize(batch, 2)["x"].tolist() == [0, 1]
    assert resize(batch, 5)["x"].tolist() == [0, 1, 2, 0, 1]
    assert resize(batch, 5)["names"] == ["a", "b", "c", "a", "b"]
    assert resize(batch, 3) is batch
    assert resize(batch, 5)["table"] is table  # still shared, for the batch is still to be cut


def boxes(num):
    return {"x": torch.ones(num, 2), "labels": [{"boxes": torch.ones(1 + i, 4)} for i in range(num)]}


def test_a_list_of_tensors_with_an_entry_for_each_sample_has_a_hint_that_works():
    with pytest.raises(BatchError, match="disagree") as caught:
        split(boxes(3), 2)
    assert "Shared" not in caught.value.hint
    settings = eval(f"dict({caught.value.hint.partition('pass ')[2]})")
    parts = settings["split"](boxes(3), 2)
    assert [settings["count"](part) for part in parts] == [2, 1] == [len(part["x"]) for part in parts]


@pytest.mark.parametrize("more", [{"scale": Shared(torch.ones(3))}, {"flag": True}, {"t": {"y": torch.ones(3)}}])
def test_a_hint_has_no_code_where_not_every_entry_is_cut_alike(more):
    with pytest.raises(BatchError, match="disagree") as caught:
        split({**boxes(3), **more}, 2)
    assert "split=, a function of (batch, size)" in caught.value.hint


def test_such_a_list_inside_of_a_tuple_has_a_hint_without_keys():
    with pytest.raises(BatchError, match="disagree") as caught:
        split((torch.ones(3, 2), [torch.ones(1, 4), torch.ones(2, 4), torch.ones(1, 4)]), 2)
    assert caught.value.hint.startswith("batch[1] has an entry of tensors for each sample: pass count=lambda")
    assert "len(micro_batch[1])" in caught.value.hint
