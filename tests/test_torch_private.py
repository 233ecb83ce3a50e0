"""Canaries: each private name of torch that the memory room uses still does what it is used for."""

import torch
from torch.optim import optimizer

from snugfit.memory import torch_private
from snugfit.memory.cuda import autocast


def test_fake_mode_makes_tensors_without_data():
    with torch_private.FakeMode():
        tensor = torch.ones(1 << 40)
    assert isinstance(tensor, torch_private.Fake)
    assert tensor.untyped_storage().nbytes() == 4 << 40


def test_backward_is_seen_with_the_sequence_number_of_its_node():
    seen = []
    weight = torch.ones(2, requires_grad=True)
    before = torch_private.next_sequence_number()
    product = weight * 2
    product.register_hook(lambda gradient: seen.append(torch_private.in_backward()))

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch_private.current_sequence_number())
            return gradient

    Probe.apply(product).sum().backward()
    assert not torch_private.in_backward()
    assert torch_private.current_sequence_number() is None
    assert seen == [before + 1, True]


def test_every_operator_of_the_autocast_lists_is_one_of_torch():
    registered = {name.removeprefix("aten::") for name in torch_private.autocast_registrations("AutocastCUDA")}
    named = autocast.LOWER_PRECISION | autocast.PROMOTE | autocast.FLOAT32_OUTPUT | autocast.BANNED
    assert named <= registered
    assert len(registered) > 100


def test_foreach_is_chosen_for_fake_tensors_only_inside_of_the_context():
    with torch_private.FakeMode():
        weight = torch.nn.Parameter(torch.empty(4))
        chosen = []
        for context in (torch_private.foreach_for_fake_tensors, torch.no_grad):
            with context():
                chosen.append(optimizer._default_to_fused_or_foreach([weight], False)[1])
    assert chosen == [True, False]
