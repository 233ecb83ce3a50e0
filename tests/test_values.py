"""Values that a trace follows: what it knows of a fake tensor is what the real one would hold."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snugfit.memory.known_values import assumed_values, values
from snugfit.memory.recording import Recorder


def in_place(ids):
    labels = ids.clone()
    labels[:, :2] = -100
    labels[labels == 3] = 7
    labels.add_(1)
    return labels


def counters(ids):
    steps = [torch.tensor(float(i)) for i in range(3)]
    torch._foreach_add_(steps, 2)
    return torch.stack(steps)


def through_views(ids):
    table = torch.zeros(4, 6, dtype=torch.long)
    table.t()[1] = 5
    table.view(-1)[::5].mul_(3)
    return table


PROGRAMS = {
    "positions": lambda ids: torch.arange(ids.shape[1]).expand(2, -1).cumsum(-1),
    "causal mask": lambda ids: torch.tril(torch.ones(6, 6)).bool() & (ids[0] > 0)[None],
    "schedule": lambda ids: torch.linspace(0, 0.1, 5).flip(0),
    "frequencies": lambda ids: 1 / 10000 ** (torch.arange(0, 16, 2).float() / 16),
    "shifted": lambda ids: F.pad(ids[:, :-1], (1, 0), value=9),
    "sorted": lambda ids: ids.flatten().sort().values.unique(),
    "one hot": lambda ids: F.one_hot(ids, 12).sum((0, 1)),
    "in place": in_place,
    "counters": counters,
    "through views": through_views,
    "nested lists": lambda ids: torch.cat([ids, torch.stack([ids[0], ids[1] * 2])]).float().log1p(),
    "chosen": lambda ids: ids[ids > 2],
    "where": lambda ids: torch.stack(torch.where(ids > 2)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_can_be_computed_without_weights_is_known(name):
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [3, 3, 0, 1, 9, 11]])
    recorder = Recorder(host_scalars=True)
    with recorder.recording_on():
        fake = PROGRAMS[name](recorder.faked(ids))
        known = recorder.values.read(fake)
    expected = PROGRAMS[name](ids)
    assert known is not None
    assert (known.dtype, known.shape) == (expected.dtype, expected.shape) == (fake.dtype, fake.shape)
    assert torch.equal(known, expected)


def known_of(make):
    recorder = Recorder(host_scalars=True)
    with recorder.recording_on():
        return [recorder.values.read(tensor) for tensor in make()]


def test_nothing_that_depends_on_a_weight_or_on_garbage_is_known():
    def make():
        weight = nn.Parameter(torch.ones(4))
        buffer = torch.zeros(4)
        buffer.copy_(weight.detach() * torch.empty(4))
        written = torch.ones(4)
        written[1:3] = torch.empty(2)
        return [
            weight,
            weight * 2,
            torch.empty(4),
            buffer,
            written,
            torch.zeros(values._MAX_COMPUTED_FLOATS + 1),
            torch.ones(4) + torch.empty(4),
        ]

    assert known_of(make) == [None] * 7


def test_a_value_is_forgotten_with_its_storage():
    recorder = Recorder(host_scalars=True)
    with recorder.recording_on():
        for _ in range(50):  # storages are made again at the same address
            known = torch.ones(4)
            assert recorder.values.read(known) is not None
            recorder.faked(torch.ones(4))
            del known
            unknown = torch.empty(4)
            assert recorder.values.read(unknown) is None
            del unknown


def test_reading_says_what_was_assumed_and_only_then():
    recorder = Recorder(host_scalars=True)
    with recorder.recording_on():
        drawn = torch.randint(0, 9, (3,))
        chosen = torch.empty(8, 4).topk(2).indices
        assert recorder.assumptions == ()
        first = recorder.values.read(drawn + 1)
        assert recorder.assumptions == (values.RANDOM,)
        picked = recorder.values.read(chosen)
    assert assumed_values.BALANCED in recorder.assumptions
    assert isinstance(first, Tensor)
    assert torch.equal(picked.flatten().bincount(), torch.full((4,), 4))  # 8 rows, 2 picks, 4 candidates
    assert all(len(set(row.tolist())) == 2 for row in picked)


def test_large_floats_are_known_where_they_are_computed_from_little():
    """As filter banks and anchors are, whose values a model looks at; not where many are given or drawn."""
    recorder, given = Recorder(host_scalars=True), torch.zeros(1 << 13)
    with recorder.recording_on():
        corners = torch.arange(0, 1 << 14).float()
        overlaps = (corners[:, None] - torch.tensor([3.0, 5.0])).abs()
        assert recorder.values._nodes[overlaps.untyped_storage()._cdata].value is None  # nobody has read it
        assert overlaps.min(0).indices.tolist() == [3, 5]
        assert recorder.values.read(torch.rand(1 << 13)) is None
        assert recorder.values.read(recorder.faked(given)) is None


def test_large_integers_are_computed_only_when_they_are_read():
    recorder = Recorder(host_scalars=True)
    with recorder.recording_on():
        mask = torch.ones(4096, 4096, dtype=torch.bool).tril()
        node = recorder.values._nodes[mask.untyped_storage()._cdata]
        assert node.value is None
        assert int(mask.sum()) == 4096 * 4097 // 2
        assert node.value is not None
