import gc
import random
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from models import (
    ConvBatchNorm,
    LinearStack,
    Weight,
    WithDropout,
    mean_product,
    regression_batch,
    same_bits,
    squared_error,
    state_of,
)
from snugfit import DeviceMemoryError, Loss
from snugfit.training import random_states
from snugfit.training.engine import Engine
from snugfit.training.recovery import Snapshots, is_out_of_memory
from snugfit.training.splitting import split
from tolerances import CUT_FLOAT32

CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("whatever it says"),
        MemoryError(),
        RuntimeError(CPU_MESSAGE),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_an_allocation_failure_is_recognised_by_type_or_message_and_in_a_cause(error):
    assert is_out_of_memory(error)
    wrapped = ValueError("layer 3 failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the user wrote: CUDA out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError(CPU_MESSAGE),
        DeviceMemoryError("already named"),
    ],
)
def test_other_errors_are_not_taken_for_one(error):
    assert not is_out_of_memory(error)


def test_an_error_that_is_already_named_is_not_retried_whatever_its_cause():
    named = DeviceMemoryError("in the update")
    named.__cause__ = torch.OutOfMemoryError()
    assert not is_out_of_memory(named)


def in_a_child(script):
    """Run a script in a process of its own, whose memory it may limit."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_cpu_allocator_s_real_error_is_recognised():
    in_a_child("""
        import resource, torch
        from snugfit.training.recovery import is_out_of_memory
        resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))
        try:
            torch.empty(2**33, dtype=torch.uint8)
        except RuntimeError as error:
            assert type(error) is RuntimeError, type(error)
            assert is_out_of_memory(error), error
        else:
            raise SystemExit("nothing was refused")
    """)


def test_a_window_that_really_runs_out_of_memory_is_finished_with_smaller_micro_batches():
    in_a_child("""
        import resource, warnings, torch
        from torch import nn
        from snugfit import Engine

        torch.set_num_threads(1)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
        batch = torch.randn(2**14, 64)
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda m, x: m(x).square().mean())
        engine.step_window([batch[:8]])
        with open("/proc/self/status") as status:
            used = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
        # the forward of the whole batch saves 16 tensors of 4 MiB
        resource.setrlimit(resource.RLIMIT_DATA, (used + 24 * 2**20, used + 24 * 2**20))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = engine.step(batch)
        assert caught and result.num_micro_batches >= 4, result
        assert result.step == 2 and result.count == 2**14
    """)


def limited(limit, loss=mean_product, size=len):
    """A loss that runs out of memory with more samples than a limit."""

    def limited_loss(model, micro_batch):
        value = loss(model, micro_batch)
        if size(micro_batch) > limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory with {size(micro_batch)} samples")
        return value

    return limited_loss


def make(model, loss, **settings):
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, **settings)


@pytest.mark.parametrize(("size", "parts"), [(32, [8, 8, 8, 8]), (30, [8, 8, 8, 6])])
def test_c099_the_micro_batch_shrinks_and_the_batch_does_not(size, parts):
    seen = []

    def loss(model, micro_batch):
        seen.append(len(micro_batch["x"]))
        return squared_error(model, micro_batch)

    model, twin = LinearStack(), LinearStack()
    twin.load_state_dict(model.state_dict())
    batch = regression_batch(size)
    engine = make(model, limited(8, loss, lambda batch: len(batch["x"])))
    with pytest.warns(UserWarning, match="same samples"):
        result = engine.step(batch)
    assert seen[-4:] == parts
    assert (result.num_micro_batches, result.count, engine.micro_batch_size) == (4, float(size), 8)
    make(twin, squared_error).step(batch)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **CUT_FLOAT32)


def test_c099_the_size_that_fits_stays_for_the_next_windows():
    engine = make(Weight(), limited(2))
    with pytest.warns(UserWarning, match="out of memory with micro_batch_size=") as caught:
        engine.step(torch.ones(8))
    assert len(caught) == 2
    assert engine.step(torch.ones(8)).num_micro_batches == 4


@pytest.mark.filterwarnings("ignore:out of memory:UserWarning")
def test_c099_one_sample_that_does_not_fit_is_one_named_error():
    model = Weight(3.0)
    engine = make(model, limited(0))
    with pytest.raises(DeviceMemoryError, match="one sample") as caught:
        engine.step(torch.ones(4))
    assert caught.value.micro_batch_size == 1
    assert "CUDA out of memory with 1 samples" in caught.value.got
    assert (model.w.item(), model.w.grad) == (3.0, None)
    assert engine.step_count == 0


@pytest.mark.filterwarnings("ignore:out of memory:UserWarning")
def test_a_list_of_micro_batches_is_cut_further_and_counted_again():
    def total(model, micro_batch):
        return Loss(model(micro_batch).sum())

    engine = make(Weight(0.0), limited(2, total))
    result = engine.step_window([torch.ones(3), torch.full((5,), 2.0)])
    assert result.count == 8.0
    assert result.num_micro_batches == 2 + 3
    assert float(result.grad_norm) == pytest.approx(13 / 8)


def test_c098_nothing_of_the_failed_attempt_is_alive_when_the_next_one_starts():
    alive = []

    def loss(model, micro_batch):
        assert all(ref() is None for ref in alive)
        large = model(torch.ones(1000))
        alive.append(weakref.ref(large))
        if len(micro_batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return large.mean() * micro_batch.mean()

    engine = make(Weight(), loss)
    gc.disable()
    try:
        with pytest.warns(UserWarning, match="out of memory"):
            engine.step(torch.ones(4))
    finally:
        gc.enable()
    assert len(alive) == 1 + 2


@pytest.mark.filterwarnings("ignore:out of memory:UserWarning", "ignore:BatchNorm makes:UserWarning")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_random_states_and_buffers_are_those_of_a_run_that_started_with_the_smaller_size(where):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.drop = ConvBatchNorm(), WithDropout(2)

        def forward(self, x):
            return self.drop(self.body(x))

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, backward):
            ctx.backward = backward
            if not backward:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise torch.OutOfMemoryError("CUDA out of memory")

    def loss(model, micro_batch):
        noise = random.random() + np.random.rand()
        value = squared_error(model, micro_batch) * (1 + noise)
        return Fails.apply(value, where == "backward") if len(micro_batch["x"]) > 2 else value

    def run(micro):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        model = Model()
        batches = [{"x": torch.randn(4, 3, 6, 6), "y": torch.randn(4, 2)} for _ in range(3)]
        engine = make(model, loss, micro_batch_size=micro)
        engine.step_window(split(batches[0], 2))  # the window that fails is not the first
        results = [engine.step(batch).loss for batch in batches[1:]]
        return [*state_of(model), *results, torch.rand(1)]

    assert same_bits(run(4), run(2))


def test_other_errors_of_the_loss_pass_through_unchanged():
    def loss(model, micro_batch):
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        make(Weight(), loss).step(torch.ones(2))


def test_an_error_by_hand_is_named_and_not_retried():
    engine = make(Weight(), mean_product)

    def fail():
        with engine.window(torch.ones(4)) as window:
            for _ in window:
                raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(DeviceMemoryError, match="by hand"):
        fail()
    assert not engine.step(torch.ones(4)).skipped


def test_large_buffers_that_stay_the_same_are_copied_once_and_running_statistics_always():
    model = ConvBatchNorm()
    model.register_buffer("table", torch.zeros(2**17))
    snapshots = Snapshots(model, torch.device("cpu"))
    assert all(kept.copy is not None for kept in snapshots.take()[1])
    model(torch.randn(2, 3, 6, 6))
    assert [kept.name for kept in snapshots.take()[1] if kept.copy is None] == ["table"]
    model.eval()
    assert all(kept.copy is not None for kept in snapshots.take()[1])  # another mode, nothing is known yet


def test_a_buffer_that_changes_for_the_first_time_cannot_be_restored_and_says_so():
    model = Weight()
    model.register_buffer("table", torch.zeros(2**17))
    snapshots = Snapshots(model, torch.device("cpu"))
    snapshots.take()
    snapshot = snapshots.take()
    snapshots.restore(snapshot)
    model.table.add_(1)
    with pytest.raises(DeviceMemoryError, match="table"):
        snapshots.restore(snapshot)


def test_a_replaced_buffer_is_put_back():
    model = Weight()
    model.register_buffer("seen", torch.zeros(()))
    snapshots = Snapshots(model, torch.device("cpu"))
    snapshot = snapshots.take()
    before = model.seen
    model.seen = model.seen + 1
    snapshots.restore(snapshot)
    assert model.seen is before
    assert model.seen == 0


def test_buffers_that_were_resized_or_share_memory_are_put_back():
    model = Weight()
    table = torch.zeros(2, 3)
    model.register_buffer("table", table)
    model.register_buffer("row", table[1])
    model.register_buffer("seen", torch.empty(0))
    snapshots = Snapshots(model, torch.device("cpu"))
    snapshot = snapshots.take()
    model.row.add_(1)
    model.seen.resize_(4).fill_(2)
    snapshots.restore(snapshot)
    assert not model.table.any()
    assert model.seen.shape == (0,)
    model.row.add_(1)
    assert model.table.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_random_states_come_back():
    device = torch.device("cpu")
    states = random_states.take(device)
    drawn = [torch.rand(2).tolist(), random.random(), np.random.rand()]
    random_states.restore(states, device)
    assert [torch.rand(2).tolist(), random.random(), np.random.rand()] == drawn


class Bag:
    """A batch that only its own split understands."""

    def __init__(self, values):
        self.values = values


def split_bag(bag, size):
    return [Bag(part) for part in bag.values.split(size)]


def fitting(limit, calls):
    """Loss that runs out of memory above a number of samples."""

    def loss(model, bag):
        values = bag.values if isinstance(bag, Bag) else bag
        calls.append(len(values))
        if len(values) > limit:
            raise torch.OutOfMemoryError
        return model(values).mean()

    return loss


def weighed(limit, calls, **settings):
    model = Weight(0.0)
    return Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), loss=fitting(limit, calls), **settings)


VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])


@pytest.mark.filterwarnings("ignore:out of memory with")
@pytest.mark.parametrize("step", [Engine.step, lambda engine, bag: engine.step_window([bag])])
def test_batches_that_only_the_users_split_understands_are_halved_by_it(step):
    calls = []
    engine = weighed(2, calls, split=split_bag, count=lambda bag: len(bag.values))
    step(engine, Bag(VALUES))
    assert calls == [8, 4, 2, 2, 2, 2]
    assert engine.model.w.item() == -4.5


@pytest.mark.filterwarnings("ignore:out of memory with")
def test_out_of_memory_with_one_sample_is_said_of_one_sample_only():
    calls = []
    engine = weighed(0, calls, split=split_bag, count=lambda bag: len(bag.values))
    with pytest.raises(DeviceMemoryError, match="a micro-batch of one sample"):
        engine.step(Bag(VALUES))
    assert calls == [8, 4, 2, 1]


@pytest.mark.filterwarnings("ignore:out of memory with")
def test_step_window_keeps_the_size_that_fits_and_cuts_only_what_is_larger():
    calls = []
    engine = weighed(2, calls)
    found = []
    for window in ([VALUES], [VALUES], [VALUES[:2], VALUES[2:3], VALUES[3:]]):
        calls.clear()
        engine.step_window(window)
        found.append(list(calls))
    assert found == [[8, 4, 2, 2, 2, 2], [2, 2, 2, 2], [2, 1, 2, 2, 1]]
    assert engine.model.w.item() == -4.5 * 3
    other = weighed(2, calls)
    other.load_state_dict(engine.state_dict())
    calls.clear()
    other.step_window([VALUES])
    assert calls == [2, 2, 2, 2]


class Masked(nn.Module):
    """A weight beside a buffer that is a view which overlaps itself."""

    def __init__(self, mask, writes):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mask", mask)
        self.writes = writes

    def forward(self, x):
        if self.writes:
            self.mask[(slice(1),) * self.mask.dim()].add_(1)
        return self.linear(x * (self.mask if self.mask.dim() == 1 else self.mask[0]))


@pytest.mark.filterwarnings("ignore:out of memory with")
@pytest.mark.parametrize("failure", ["memory", "gradient", "loss"])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize(("base", "shape"), [((1,), (4,)), ((1, 1), (2, 4)), ((4,), (3, 4)), ((3, 1), (3, 4))])
def test_buffers_that_are_expanded_views_are_taken_back(failure, writes, base, shape):
    mask = torch.ones(base).expand(shape)
    model = Masked(mask, writes)
    calls = []

    def loss(model, x):
        calls.append(len(x))
        value = model(x).square().mean()
        if len(calls) == 1 and failure == "memory":
            raise torch.OutOfMemoryError
        if len(calls) == 1 and failure == "loss":
            raise ValueError("boom")
        return value * float("nan") if failure == "gradient" else value

    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    if failure == "loss":
        with pytest.raises(ValueError, match="boom"):
            engine.step(torch.ones(4, 4))
    else:
        engine.step(torch.ones(4, 4))
    forwards = len(calls) - 1 if failure == "memory" else 0
    wanted = torch.ones(base)
    wanted[(slice(1),) * len(base)] += writes * forwards
    assert model.mask is mask
    assert torch.equal(mask, wanted.expand(shape))
