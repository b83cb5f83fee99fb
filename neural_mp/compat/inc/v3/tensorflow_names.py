"""Names of `neural_compressor.tensorflow` and its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.dummy import dummy, dummy_v2
from neural_mp.compat.inc.import_aliases import absent_names
from neural_mp.compat.inc.log import logger
from neural_mp.compat.inc.model import BaseModel, Model
from neural_mp.compat.inc.user_objects import DataLoader
from neural_mp.compat.inc.utils import CpuInfo, dump_elapsed_time, iterator_sess_run
from neural_mp.compat.inc.v3.base_tuning import TuningConfig
from neural_mp.compat.inc.v3.tensorflow_configs import (
    SmoothQuantConfig,
    StaticQuantConfig,
    get_default_sq_config,
    get_default_static_quant_config,
)
from neural_mp.compat.inc.v3.tensorflow_flow import autotune, quantize_model

__all__ = [
    "BaseModel",
    "CpuInfo",
    "Model",
    "SmoothQuantConfig",
    "StaticQuantConfig",
    "TuningConfig",
    "autotune",
    "dump_elapsed_time",
    "get_default_sq_config",
    "get_default_static_quant_config",
    "iterator_sess_run",
    "logger",
    "quantize_model",
]

BaseDataLoader = DataLoader
DummyDatasetV2 = dummy_v2
DummyDataset = dummy
TensorflowBaseModel = KerasModel = BaseModel


def default_collate(batch: Any) -> Any:
    """Return samples as one batch: arrays of equal shape are stacked, dicts and lists by item."""
    first = batch[0]
    if isinstance(first, Mapping):
        return {key: default_collate([sample[key] for sample in batch]) for key in first}
    if isinstance(first, Sequence):
        return [default_collate(samples) for samples in zip(*batch, strict=True)]
    if isinstance(first, np.ndarray) and len({sample.shape for sample in batch}) == 1:
        return np.stack(batch)
    return batch


class BatchSampler:
    """Lists of samples from a sampler.

    Args:
        sampler: iterable of indices or samples.
        batch_size: length of a list.
        drop_last: whether an incomplete last list is left out.
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool = True) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        batch: list[Any] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.batch_size:
                yield batch
                batch = []
        if batch and not self.drop_last:
            yield batch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole + (0 if self.drop_last or not rest else 1)


class IterableFetcher:
    """Batches from an iterable dataset, one per call.

    Args:
        dataset: the dataset.
        collate_fn: list of samples → batch.
        drop_last: whether an incomplete last batch is left out.
        distributed: ignored.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any],
        drop_last: bool,
        distributed: bool = False,
    ) -> None:
        self.dataset, self.collate_fn, self.drop_last = dataset, collate_fn, drop_last
        self.dataset_iter = iter(dataset)

    def __call__(self, batched_indices: Sequence[Any]) -> Any:
        """Return the next batch, of as many samples as there are indices.

        Raises:
            StopIteration: there are no more samples.
        """
        samples = [sample for sample, _ in zip(self.dataset_iter, batched_indices, strict=False)]
        if not samples or (self.drop_last and len(samples) < len(batched_indices)):
            raise StopIteration
        return self.collate_fn(samples)


__getattr__ = absent_names(globals())
