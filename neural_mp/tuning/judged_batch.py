"""What a metric is given of one batch, looked at before the user's own code sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from neural_mp.core.shape_words import shape_words
from neural_mp.errors import DataError, MetricError
from neural_mp.util.pytree import float_arrays, leaves
from neural_mp.util.user_calls import UserCodeError, called

#: What Python and numpy raise for values of the wrong form; a class of the user's own says more.
_OF_THE_FORM = (TypeError, ValueError, IndexError, AttributeError, KeyError)


@dataclass(frozen=True)
class JudgedBatch:
    """A batch with what a model makes of it.

    Attributes:
        predictions: what the model returned.
        labels: those of the batch.
        place: which batch of which loader it is, in words.
    """

    predictions: Any
    labels: Any
    place: str

    def check(self, is_first: bool) -> None:
        """Check that there is something to measure.

        Args:
            is_first: whether the values are looked at, too, and not only what holds them.

        Raises:
            MetricError: the model returns nothing that holds numbers, or nothing but NaN.
        """
        found = leaves(self.predictions)
        if not any(hasattr(leaf, "shape") or isinstance(leaf, int | float) for leaf in found):
            raise MetricError(
                f"the model returns {shape_words(self.predictions)} for {self.place}; metrics need "
                f"an array, or several in a tuple, list or dict; to measure something else, give "
                f"eval_func"
            )
        arrays = [array for array in float_arrays(self.predictions) if array.size]
        if is_first and arrays and all(np.isnan(array).all() for array in arrays):
            raise MetricError(
                f"the model returns nothing but NaN for {self.place} "
                f"({shape_words(self.predictions)}); check its weights, and what is done with the "
                f"inputs before"
            )

    def postprocessed(self, postprocess: Callable[[Any], Any]) -> JudgedBatch:
        """The batch as a postprocess of the user's leaves it.

        Raises:
            DataError: it does not return a pair.
            UserCodeError: it raised.
        """
        given = (self.predictions, self.labels)
        form = "postprocess((predictions, labels))"
        found = called(postprocess, given, form=form, kind=DataError)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise DataError(
                f"postprocess must return (predictions, labels), got {shape_words(found)}"
            )
        return JudgedBatch(found[0], found[1], self.place)

    def update(self, update: Callable[[Any, Any], Any], name: str) -> None:
        """Have a metric take in the batch.

        Args:
            update: the metric's method.
            name: of the metric.

        Raises:
            MetricError: the method takes something else.
            DataError: it raised, and what it was given hardly fits together.
            UserCodeError: it raised.
        """
        form = f"{name}.update(predictions, labels)"
        try:
            called(update, self.predictions, self.labels, form=form, kind=MetricError)
        except UserCodeError as failure:
            doubt = self._doubt() if type(failure.error) in _OF_THE_FORM else ""
            if doubt:
                raise DataError(
                    f"{self.place} {doubt}, and {name}.update raised {failure}"
                ) from failure.error
            raise

    def _doubt(self) -> str:
        """Why predictions and labels hardly belong together; empty where nothing is odd."""
        if self.labels is None:
            return f"has None for labels, predictions are {shape_words(self.predictions)}"
        counts = [_first_axis(value) for value in (self.predictions, self.labels)]
        if None not in counts and counts[0] != counts[1]:
            return (
                f"has predictions {shape_words(self.predictions)} and labels "
                f"{shape_words(self.labels)}, of which the first axes should be equal"
            )
        return ""


def _first_axis(value: Any) -> int | None:
    """How many samples an array holds; None for what is no array of samples."""
    if isinstance(value, list) and value and all(isinstance(v, int | float) for v in value):
        return len(value)
    shape: Any = getattr(value, "shape", ())
    return int(shape[0]) if len(shape) else None
