"""What is done to predictions and labels before a metric sees them, but for questions on text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import TRANSFORMS, registered
from neural_mp.data.option_checks import whole_number
from neural_mp.errors import DataError


@registered(TRANSFORMS, "LabelShift")
@dataclass(frozen=True)
class LabelShift:
    """Take a number away from every label, such as 1 where class 0 is the background.

    Raises:
        ConfigurationError: it is no whole number.
    """

    label_shift: int = 0

    def __post_init__(self) -> None:
        whole_number("LabelShift: label_shift", self.label_shift)

    def __call__(self, sample: object) -> tuple[Any, Any]:
        """`(predictions, labels)` → the same predictions, and labels in the kind that they had.

        Raises:
            DataError: it is no such pair, or labels are no numbers.
        """
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise DataError("LabelShift takes (predictions, labels)")
        predictions, labels = sample
        try:
            return predictions, self._shifted(labels)
        except TypeError as error:
            raise DataError("LabelShift takes labels that are numbers") from error

    def _shifted(self, labels: object) -> Any:
        if not isinstance(labels, list):
            return np.asarray(labels) - self.label_shift
        if labels and isinstance(labels[0], tuple):
            return [tuple(np.array(label) - self.label_shift) for label in labels]
        if labels and isinstance(labels[0], np.ndarray):
            return [label - self.label_shift for label in labels]
        return (np.array(labels) - self.label_shift).tolist()
