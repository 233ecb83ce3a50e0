"""The example batch of a job at any number of samples: for tracing and measuring, which have no data of their own.

Entry point: ``example_batch``. Never on a device and never of the training data's order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from snugfit.errors import BatchError, PlanError, SnugfitError
from snugfit.jobs import Job
from snugfit.training import splitting


def example_batch(job: Job, num_samples: int) -> Any:
    """The job's example with a given number of samples: made, or cut or repeated from the one it holds.

    Of a DataLoader the batch with the most elements is taken, so the longest one.

    Args:
        job: Its ``batch`` is a batch, a function of the number of samples, or a DataLoader.
        num_samples: Samples of one rank per update.

    Raises:
        PlanError: The function raises, or the loader is empty.
        BatchError: The batch cannot be cut.
    """
    batch = job.batch
    if isinstance(batch, DataLoader):
        batch = _longest(batch)
    elif callable(batch) and not isinstance(batch, torch.Tensor):
        try:
            made = batch(num_samples)
        except SnugfitError:
            raise
        except Exception as error:
            raise PlanError(
                "Job.batch raised while it made an example",
                got=f"{type(error).__name__}: {error} (called with {num_samples} samples)",
                expected="a batch of that many samples",
                hint="call job.batch(2) by itself to see where it fails",
            ) from error
        if job.split is None and splitting.num_samples(made) != num_samples:
            raise BatchError(
                "Job.batch made a batch of another size",
                got=f"{splitting.num_samples(made)} samples",
                expected=f"the {num_samples} samples that it was asked for",
                hint="use the function's argument as the first dimension of every tensor",
            )
        return made
    if job.split is not None:
        return batch
    return splitting.resize(batch, num_samples)


@contextmanager
def _generators_kept(loader: "DataLoader[Any]") -> Iterator[None]:
    """Generators of a loader's own are left as they were."""
    owners = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    states = [(one, one.get_state()) for one in found if isinstance(one, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _longest(loader: "DataLoader[Any]") -> Any:
    with _generators_kept(loader):
        longest = max(loader, key=_num_elements, default=None)
    if longest is None:
        raise PlanError(
            "the DataLoader of Job.batch is empty",
            got=f"{type(loader.dataset).__name__}, no batch",
            expected="at least one batch",
            hint="check the dataset, and drop_last",
        )
    return longest


def _num_elements(batch: Any) -> int:
    sizes: list[int] = []
    splitting.map_tensors(lambda tensor: sizes.append(tensor.numel()), batch)
    return sum(sizes)
