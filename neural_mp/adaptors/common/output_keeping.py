"""An optional part of an adaptor: outputs of the model from the pass of calibration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from neural_mp.adaptors.common.calibration import BatchStats
from neural_mp.core.kept_outputs import KeptOutputs

M = TypeVar("M")


@dataclass(frozen=True)
class OutputKeeping(Generic[M]):
    """Calibration that keeps the outputs of the model, equal to those of any run up to rounding.

    Attributes:
        observe_tensors: as in `Adaptor`, with an object that keeps the outputs of every batch.
    """

    observe_tensors: Callable[
        [M, Iterable[Any], Collection[str], KeptOutputs], Iterator[tuple[str, BatchStats]]
    ]
