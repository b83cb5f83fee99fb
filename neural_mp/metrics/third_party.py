"""Metric objects of other libraries, known by their methods, as ours.

None of these libraries is imported: who has such an object has its library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from neural_mp.metrics.function_metric import tensors
from neural_mp.metrics.predictions import as_array
from neural_mp.util.pytree import as_numpy

#: Keras's word for the direction of a metric, in its `_direction`.
_KERAS_DIRECTIONS = {"up": True, "down": False}


class KerasMetric:
    """A metric of Keras: `update_state(y_true, y_pred)`, `result()`, `reset_state()`.

    It is given what the model predicts and the labels as they are, as Keras gives them.

    Args:
        metric: the object.
    """

    running: ClassVar[bool] = False  # a result may take long, and need not be a mean

    def __init__(self, metric: Any) -> None:
        self.__wrapped__ = metric
        self.higher_is_better = _KERAS_DIRECTIONS.get(str(getattr(metric, "_direction", None)))

    def reset(self) -> None:
        """Forget everything."""
        metric = self.__wrapped__
        (metric.reset_state if hasattr(metric, "reset_state") else metric.reset_states)()

    def update(self, preds: object, labels: object) -> None:
        """Take in one batch."""
        self.__wrapped__.update_state(labels, preds)

    def result(self) -> Any:
        """The value, or several by name."""
        return _plain(self.__wrapped__.result())


class TorchMetric:
    """A metric of torchmetrics: `update(preds, target)`, `compute()`, `reset()`.

    It is given tensors, also where the batches are arrays.

    Args:
        metric: the object.
    """

    running: ClassVar[bool] = False

    def __init__(self, metric: Any) -> None:
        self.__wrapped__ = metric

    @property
    def higher_is_better(self) -> Any:
        """What the metric says; None where it does not."""
        return getattr(self.__wrapped__, "higher_is_better", None)

    def reset(self) -> None:
        """Forget everything."""
        self.__wrapped__.reset()

    def update(self, preds: object, labels: object) -> None:
        """Take in one batch."""
        self.__wrapped__.update(tensors(preds), tensors(labels))

    def result(self) -> Any:
        """The value, or several by name."""
        return _plain(self.__wrapped__.compute())


class EvaluateMetric:
    """A metric of Hugging Face's `evaluate`: `add_batch(predictions=, references=)`, `compute()`.

    Where predictions have one axis more than the labels, the highest score along the last one
    counts as the class, since these metrics take classes.

    Args:
        metric: the object.
        options: what `compute` is given, by name, such as `average`.
    """

    running: ClassVar[bool] = False  # compute forgets what was added

    def __init__(self, metric: Any, options: Mapping[str, Any] | None = None) -> None:
        self.__wrapped__ = metric
        self.__name__ = str(getattr(metric, "name", type(metric).__name__))
        self._options = dict(options or {})
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._batches: list[tuple[Any, Any]] = []

    def update(self, preds: object, labels: object) -> None:
        """Keep one batch.

        Raises:
            MetricError: predictions or labels are several arrays.
        """
        predicted, truth = as_array(preds, "predictions"), as_array(labels, "labels")
        if predicted.ndim == truth.ndim + 1:
            predicted = predicted[..., 0] if predicted.shape[-1] == 1 else predicted.argmax(axis=-1)
        self._batches.append((predicted.copy(), truth.copy()))

    def merge(self, other: EvaluateMetric) -> None:
        """Take in all that another of its kind has taken in, after what is here."""
        self._batches += other._batches

    def result(self) -> Any:
        """The value, or several by name."""
        for predictions, references in self._batches:
            self.__wrapped__.add_batch(predictions=predictions, references=references)
        found = _plain(self.__wrapped__.compute(**self._options))
        return next(iter(found.values())) if isinstance(found, dict) and len(found) == 1 else found


def foreign(given: object, options: Mapping[str, Any] | None = None) -> Any:
    """An object of another library as a metric of ours; None where it is none that is known.

    Args:
        given: the object.
        options: further options; only `evaluate`'s take some.
    """

    def has(*names: str) -> bool:
        return all(callable(getattr(given, name, None)) for name in names)

    if has("update_state", "result") and (has("reset_state") or has("reset_states")):
        return KerasMetric(given) if not options else None
    if has("update", "compute", "reset"):
        return TorchMetric(given) if not options else None
    if has("add_batch", "compute"):
        return EvaluateMetric(given, options)
    return None


def _plain(result: object) -> Any:
    """A result as numpy has it, or its parts by name, of which arrays are left out."""
    if isinstance(result, Mapping):
        parts = {str(name): _plain(value) for name, value in result.items()}
        return {name: value for name, value in parts.items() if np.ndim(value) == 0}
    return as_numpy(result) if hasattr(result, "shape") else result
