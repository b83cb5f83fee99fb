"""Adapters for metric objects of other libraries, detected by their methods.

None of these libraries is imported: an existing object implies an imported library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np

from neural_mp.errors import ConfigurationError, MetricError, did_you_mean
from neural_mp.metrics.function_metric import OverAllData, to_torch_tensors
from neural_mp.metrics.predictions import (
    are_probabilities,
    convert_class_pairs,
    convert_number_pairs,
    convert_to_array,
    score_pairs,
)
from neural_mp.util.pytree import convert_to_numpy

#: Values of `_direction` of a Keras metric → higher is better.
_KERAS_DIRECTIONS = {"up": True, "down": False}


class KerasMetric:
    """A Keras metric: `update_state(y_true, y_pred)`, `result()`, `reset_state()`.

    Predictions and labels are passed unchanged, as Keras does.
    """

    running: ClassVar[bool] = False  # may be slow, and need not be a mean

    def __init__(self, metric: Any) -> None:
        self.__wrapped__ = metric
        self.higher_is_better = _KERAS_DIRECTIONS.get(str(getattr(metric, "_direction", None)))

    def reset(self) -> None:
        """Discard all batches."""
        metric = self.__wrapped__
        (metric.reset_state if hasattr(metric, "reset_state") else metric.reset_states)()

    def update(self, preds: object, labels: object) -> None:
        """Add one batch."""
        self.__wrapped__.update_state(labels, preds)

    def result(self) -> Any:
        """Return the value, or several by name."""
        return _convert_plain_result(self.__wrapped__.result())


class TorchMetric:
    """A torchmetrics metric: `update(preds, target)`, `compute()`, `reset()`.

    Batches are converted to tensors.
    """

    running: ClassVar[bool] = False

    def __init__(self, metric: Any) -> None:
        self.__wrapped__ = metric

    @property
    def higher_is_better(self) -> Any:
        """The direction of the metric; None if undefined."""
        return getattr(self.__wrapped__, "higher_is_better", None)

    def reset(self) -> None:
        """Discard all batches."""
        self.__wrapped__.reset()

    def update(self, preds: object, labels: object) -> None:
        """Add one batch."""
        self.__wrapped__.update(to_torch_tensors(preds), to_torch_tensors(labels))

    def result(self) -> Any:
        """Return the value, or several by name."""
        return _convert_plain_result(self.__wrapped__.compute())


class EvaluateMetric:
    """A metric of Hugging Face's `evaluate`: `add_batch(predictions=, references=)`, `compute()`.

    If predictions have one axis more than the labels, the argmax along the last axis is the
    class, since these metrics take classes.

    Args:
        options: keyword arguments of `compute`, e.g. `average`.
    """

    running: ClassVar[bool] = False  # compute discards the batches

    def __init__(self, metric: Any, options: Mapping[str, Any] | None = None) -> None:
        self.__wrapped__ = metric
        self.__name__ = str(getattr(metric, "name", type(metric).__name__))
        self._options = dict(options or {})
        self.reset()

    def reset(self) -> None:
        """Discard all batches."""
        self._batches: list[tuple[Any, Any]] = []

    def update(self, preds: object, labels: object) -> None:
        """Store one batch.

        Raises:
            MetricError: predictions or labels are several arrays.
        """
        predicted, truth = (
            convert_to_array(preds, "predictions"),
            convert_to_array(labels, "labels"),
        )
        if predicted.ndim == truth.ndim + 1:
            predicted = predicted[..., 0] if predicted.shape[-1] == 1 else predicted.argmax(axis=-1)
        self._batches.append((predicted.copy(), truth.copy()))

    def merge(self, other: EvaluateMetric) -> None:
        """Append the batches of another instance."""
        self._batches += other._batches

    def result(self) -> Any:
        """Return the value, or several by name."""
        for predictions, references in self._batches:
            self.__wrapped__.add_batch(predictions=predictions, references=references)
        value = _convert_plain_result(self.__wrapped__.compute(**self._options))
        return next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else value


def wrap_metric(given: Any, options: Mapping[str, Any]) -> Any:
    """Wrap a metric object of another library, or a function; return None if not recognized.

    Args:
        given: the object or function.
        options: keyword arguments of the function, or of `compute` of `evaluate`.

    Raises:
        MetricError: an object that is configured already has options, or the function takes
            neither one nor two arguments, or takes a model.
    """

    def has_methods(*names: str) -> bool:
        return all(callable(getattr(given, name, None)) for name in names)

    kind: Callable[[Any], Any] | None = None
    if has_methods("update_state", "result") and (
        has_methods("reset_state") or has_methods("reset_states")
    ):
        kind = KerasMetric
    elif has_methods("update", "compute", "reset"):
        kind = TorchMetric
    elif has_methods("add_batch", "compute"):
        return EvaluateMetric(given, options)
    elif _is_sklearn_scorer(given):
        kind = Scorer
    if kind is not None:
        if options:
            raise options_too_late(given, options)
        return kind(given)
    home = getattr(given, "__module__", None) or ""
    if home.startswith("sklearn.metrics.") and inspect.isfunction(given):
        return _wrap_sklearn_function(given, options)
    is_function = callable(given) and not any(map(has_methods, ("update", "reset", "result")))
    return OverAllData(given, options) if is_function else None


def options_too_late(given: object, options: Mapping[str, Any]) -> MetricError:
    """Return the error for options of a metric object that is configured already."""
    return MetricError(
        f"options of the metric object {type(given).__name__} must be output, label or value, got "
        f"{', '.join(options)}; set other options when creating the object"
    )


def _convert_plain_result(result: object) -> Any:
    """Return a result as numpy value, or its scalar parts by name."""
    if isinstance(result, Mapping):
        parts = {str(name): _convert_plain_result(value) for name, value in result.items()}
        return {name: value for name, value in parts.items() if np.ndim(value) == 0}
    return convert_to_numpy(result) if hasattr(result, "shape") else result


#: Suffixes of functions for which smaller values are better. Source: "Metrics and scoring",
#: section 3.4.1.2 of scikit-learn's user guide.
_LESS_IS_BETTER = ("_error", "_loss", "_deviance")


class Scorer(OverAllData):
    """A scikit-learn scorer, e.g. `make_scorer(fbeta_score, beta=2)`.

    The value is that of the function, with its sign set so that larger values are better.

    Args:
        scorer: the object, or `get_scorer(name)`.
        name: display name; default: the function's name.
    """

    def __init__(self, scorer: Any, name: str | None = None) -> None:
        function, self._sign = scorer._score_func, scorer._sign
        prepare = _PREPARED[
            _find_response_method(function, getattr(scorer, "_response_method", "predict"))
        ]
        super().__init__(function, scorer._kwargs, prepare, higher_is_better=True)
        self.__name__ = name or ("neg_" if self._sign < 0 else "") + function.__name__

    def result(self) -> Any:
        """Return the score over all batches."""
        return self._sign * super().result()


def _wrap_sklearn_function(function: Callable[..., Any], options: Mapping[str, Any]) -> OverAllData:
    name = function.__name__
    scorer = next((s for s in _list_sklearn_scorers().values() if s._score_func is function), None)
    if scorer is not None:
        takes, higher = _find_response_method(function, scorer._response_method), scorer._sign > 0
    else:
        parameters = [*inspect.signature(function).parameters]
        scores = {"y_score", "y_prob", "y_proba", "pred_decision"}.intersection(parameters)
        takes, higher = (
            _find_response_method(function, "predict"),
            not name.endswith(_LESS_IS_BETTER),
        )
        takes = "decision_function" if scores else takes
    return OverAllData(function, options, _PREPARED[takes], higher_is_better=higher)


def find_named_scorer(name: str, known: Iterable[str]) -> Scorer:
    """Return the scikit-learn scorer of a name, ignoring case.

    Args:
        name: name of a scorer that needs only predictions and labels.
        known: other metric names, for the message.

    Raises:
        ConfigurationError: there is no scorer of this name.
    """
    scorers = {key.casefold(): key for key in _list_sklearn_scorers()}
    canonical = scorers.get(name.casefold())
    if canonical is None:
        hint = did_you_mean(name, [*known, *_list_sklearn_scorers()])
        hint = hint if "did you mean" in hint else did_you_mean(name, known)
        raise ConfigurationError(
            f"unknown metric {name!r}{hint} (name your own metric as module:attribute)"
        )
    return Scorer(_list_sklearn_scorers()[canonical], canonical)


def _is_sklearn_scorer(given: object) -> bool:
    return all(hasattr(given, name) for name in ("_score_func", "_sign", "_kwargs"))


@cache
def _list_sklearn_scorers() -> dict[str, Any]:
    from sklearn.metrics import get_scorer, get_scorer_names

    scorers = {name: get_scorer(name) for name in get_scorer_names()}
    return {name: scorer for name, scorer in scorers.items() if _is_sklearn_scorer(scorer)}


def _find_response_method(function: object, response: str | Sequence[str] | None) -> str:
    """Return the response method of a function, in the terms of its scorer."""
    # `make_scorer` without a response method uses predict.
    methods = [response] if isinstance(response, str) else list(response or ["predict"])
    if "decision_function" in methods:
        return "decision_function"
    home = str(function.__module__)
    if methods[0] == "predict" and not home.startswith("sklearn."):
        return "either"
    return "numbers" if methods[0] == "predict" and home.endswith("_regression") else methods[0]


def _prepare_classes(preds: object, labels: object) -> tuple[Any, Any]:
    return convert_class_pairs(preds, labels, 0.5)


def _prepare_either(preds: object, labels: object) -> tuple[Any, Any]:
    scores, truth = convert_to_array(preds, "predictions"), convert_to_array(labels, "labels")
    return (
        _prepare_classes(scores, truth)
        if scores.size > truth.size
        else convert_number_pairs(scores, truth)
    )


def _prepare_scores(preds: object, labels: object) -> tuple[Any, Any]:
    scores, truth = score_pairs(preds, labels)
    if scores.ndim == 2 and scores.shape[1] > 2:
        return _prepare_probabilities(scores, truth)
    return (scores[:, 1] - scores[:, 0] if scores.ndim == 2 else scores), truth


def _prepare_probabilities(preds: object, labels: object) -> tuple[Any, Any]:
    scores, truth = score_pairs(preds, labels)
    scores = scores.astype(np.float64)
    if scores.ndim == 1:
        valid = scores[~np.isnan(scores)]
        within = bool(((valid >= 0) & (valid <= 1)).all())
        return (scores if within else 1 / (1 + np.exp(-scores))), truth
    if not are_probabilities(scores[~np.isnan(scores).any(axis=1)]).all():
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    scores = scores / scores.sum(axis=1, keepdims=True)
    return (scores[:, 1] if scores.shape[1] == 2 else scores), truth


def _refuse_log_probabilities(preds: object, labels: object) -> tuple[Any, Any]:
    raise MetricError(
        f"scorers of log-probabilities are not supported, got predictions of shape "
        f"{convert_to_array(preds, 'predictions').shape}; give a function of (predictions, labels)"
    )


_PREPARED: Mapping[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "predict": _prepare_classes,
    "either": _prepare_either,
    "numbers": convert_number_pairs,
    "decision_function": _prepare_scores,
    "predict_proba": _prepare_probabilities,
    "predict_log_proba": _refuse_log_probabilities,
}
