"""Slices of a loader's batches, if possible without reading the other batches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from neural_mp.common import DataLoader

#: Names of Keras's indexable batch classes.
_KERAS_BATCHES = ("PyDataset", "Sequence")


def part_of(source: Any, part: slice) -> Iterable[Any] | None:
    """Return the batches of a slice; None if the loader can only be read from its start.

    The loader must have a reproducible order of batches; the slice may have no end.
    """
    if _is_indexed(source):
        return (source[index] for index in range(len(source))[part])
    # Subclasses with their own iterator may yield other batches.
    if isinstance(source, DataLoader) and type(source).__iter__ is DataLoader.__iter__:
        return source.part(part.start or 0, part.stop)
    return _torch_part(source, part)


def _is_indexed(source: object) -> bool:
    """Whether `source[i]` is the i-th batch."""
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        return False
    if isinstance(source, Sequence) or not isinstance(source, Iterable):
        return True
    return any(
        kind.__name__ in _KERAS_BATCHES and "keras" in kind.__module__
        for kind in type(source).__mro__
    )


def _torch_part(source: Any, part: slice) -> Iterable[Any] | None:
    """Return a PyTorch loader of the slice's samples only."""
    torch: Any = sys.modules.get("torch")  # imported, if `source` is a loader
    if torch is None or type(source) is not torch.utils.data.DataLoader:
        return None
    walked = isinstance(source.dataset, torch.utils.data.IterableDataset)
    if walked or source.batch_sampler is None:
        return None
    loader: Iterable[Any] = torch.utils.data.DataLoader(
        source.dataset,
        batch_sampler=list(source.batch_sampler)[part],
        num_workers=source.num_workers,
        collate_fn=source.collate_fn,
        pin_memory=source.pin_memory,
        timeout=source.timeout,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.multiprocessing_context,
        generator=source.generator,
        prefetch_factor=source.prefetch_factor,
    )
    return loader
