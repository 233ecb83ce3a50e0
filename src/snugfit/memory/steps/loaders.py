"""DataLoaders inside of a traced step: batches are loaded for real, in this process, and become fake on the way out.

Entry point: ``loaded_for_real``. A loader's own code decides by values (shuffling, lengths), which are small, so it
runs as always; its worker processes are left out, and pinned memory, which is the host's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from snugfit.memory import torch_private
from snugfit.training import splitting


@contextmanager
def loaded_for_real(faked: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let DataLoaders give batches of fake tensors that know the values of the real ones.

    Args:
        faked: Makes the fake twin of a real tensor.
    """

    def iterate(loader: "DataLoader[Any]") -> Iterator[Any]:
        with torch_private.no_modes():
            batches = _batches(loader)
        while True:
            with torch_private.no_modes():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield splitting.map_tensors(faked, batch)

    with mock.patch.object(DataLoader, "__iter__", iterate):
        yield


def _batches(loader: "DataLoader[Any]") -> Iterator[Any]:
    dataset: Any = loader.dataset
    sampler: Any = loader.batch_sampler
    if isinstance(dataset, IterableDataset):
        samples = iter(dataset)
        if sampler is None:
            yield from (loader.collate_fn(sample) for sample in samples)
            return
        for indices in sampler:
            found = [sample for _, sample in zip(indices, samples, strict=False)]
            if not found or (len(found) < len(indices) and loader.drop_last):
                return
            yield loader.collate_fn(found)
        return
    if sampler is None:
        yield from (loader.collate_fn(dataset[index]) for index in loader.sampler)
        return
    for indices in sampler:
        many = getattr(dataset, "__getitems__", None)
        yield loader.collate_fn(many(indices) if many else [dataset[index] for index in indices])
