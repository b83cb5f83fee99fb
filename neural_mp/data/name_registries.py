"""What the names in a tuning file stand for."""

from __future__ import annotations

from dataclasses import dataclass, field

from neural_mp.data.datasets import DATASETS
from neural_mp.data.registry import Registry
from neural_mp.data.transforms import TRANSFORMS


@dataclass(frozen=True)
class Vocabulary:
    """The datasets, transforms and metrics that a file can name.

    Attributes:
        datasets, transforms: what builds them; our own by default.
        metrics: the same; None for our own, which `neural_mp.metrics` keeps.
    """

    datasets: Registry = field(default=DATASETS)
    transforms: Registry = field(default=TRANSFORMS)
    metrics: Registry | None = None


#: The names of our own files.
OWN = Vocabulary()
