"""Metrics of scikit-learn: its functions, its scorers, and their names.

A scorer says what its function takes of a model. What plays the model's part here are predictions:

| the function takes | scores `[N, C]` | floats `[N]`, `[N, 1]` |
|---|---|---|
| classes (`predict`) | the highest counts | 1 above 0.5, else 0; integers are classes |
| numbers (`predict` of a regressor) | as they are | as they are |
| scores (`decision_function`) | of two the difference, else probabilities | as they are |
| probabilities (`predict_proba`) | softmax unless they are some; of two the second | sigmoid |

A function of the user's own that takes predictions is given classes where there are more scores
than labels, and numbers else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from neural_mp.errors import MetricError
from neural_mp.metrics.function_metric import OverAllData
from neural_mp.metrics.predictions import (
    are_probabilities,
    as_array,
    class_pairs,
    number_pairs,
    score_pairs,
)

#: Ends of names of functions whose smaller value is the better one. Source: "Metrics and scoring",
#: section 3.4.1.2 of scikit-learn's user guide.
_LESS_IS_BETTER = ("_error", "_loss", "_deviance")


class Scorer(OverAllData):
    """A scorer, such as `make_scorer(fbeta_score, beta=2)` makes.

    Its value is the function's, with the sign that makes the larger value the better one.

    Args:
        scorer: the object, or `get_scorer(name)`.
        name: what it is called; the function's name where left out.
    """

    def __init__(self, scorer: Any, name: str | None = None) -> None:
        function, self._sign = scorer._score_func, scorer._sign
        prepare = _PREPARED[_takes(function, getattr(scorer, "_response_method", "predict"))]
        super().__init__(function, scorer._kwargs, prepare, higher_is_better=True)
        self.__name__ = name or ("neg_" if self._sign < 0 else "") + function.__name__

    def result(self) -> Any:
        """The score of all that was taken in."""
        return self._sign * super().result()


def sklearn_function(function: Callable[..., Any], options: Mapping[str, Any]) -> OverAllData:
    """A function of `sklearn.metrics` as a metric, whose direction is known."""
    name = function.__name__
    scorer = next((s for s in _scorers().values() if s._score_func is function), None)
    if scorer is not None:
        takes, higher = _takes(function, scorer._response_method), scorer._sign > 0
    else:
        parameters = [*inspect.signature(function).parameters]
        scores = {"y_score", "y_prob", "y_proba", "pred_decision"}.intersection(parameters)
        takes, higher = _takes(function, "predict"), not name.endswith(_LESS_IS_BETTER)
        takes = "decision_function" if scores else takes
    return OverAllData(function, options, _PREPARED[takes], higher_is_better=higher)


def named_scorer(name: str) -> Scorer | None:
    """The scorer that scikit-learn has under a name, whatever its case; None without one."""
    known = {key.casefold(): key for key in scorer_names()}
    word = known.get(name.casefold())
    return None if word is None else Scorer(_scorers()[word], word)


def scorer_names() -> list[str]:
    """The names of all scorers that can be asked of predictions and labels."""
    return [*_scorers()]


def is_sklearn_function(given: object) -> bool:
    """Whether it is a function of `sklearn.metrics`."""
    home = getattr(given, "__module__", None) or ""
    return home.startswith("sklearn.metrics.") and inspect.isfunction(given)


def is_scorer(given: object) -> bool:
    """Whether it is a scorer, made by `make_scorer` or got by its name."""
    return all(hasattr(given, name) for name in ("_score_func", "_sign", "_kwargs"))


@cache
def _scorers() -> dict[str, Any]:
    from sklearn.metrics import get_scorer, get_scorer_names

    found = {name: get_scorer(name) for name in get_scorer_names()}
    return {name: scorer for name, scorer in found.items() if is_scorer(scorer)}


def _takes(function: object, response: str | Sequence[str] | None) -> str:
    """What a function takes of a model, in the words of its scorer."""
    # A metric of its own would need the model, not what it predicts.
    methods = [response] if isinstance(response, str) else list(response or ["predict"])
    if "decision_function" in methods:
        return "decision_function"
    home = str(function.__module__)
    if methods[0] == "predict" and not home.startswith("sklearn."):
        return "either"
    return "numbers" if methods[0] == "predict" and home.endswith("_regression") else methods[0]


def _classes(preds: object, labels: object) -> tuple[Any, Any]:
    return class_pairs(preds, labels, 0.5)


def _either(preds: object, labels: object) -> tuple[Any, Any]:
    scores, truth = as_array(preds, "predictions"), as_array(labels, "labels")
    return _classes(scores, truth) if scores.size > truth.size else _numbers(scores, truth)


def _scores(preds: object, labels: object) -> tuple[Any, Any]:
    scores, truth = score_pairs(preds, labels)
    if scores.ndim == 2 and scores.shape[1] > 2:
        return _probabilities(scores, truth)
    return (scores[:, 1] - scores[:, 0] if scores.ndim == 2 else scores), truth


def _probabilities(preds: object, labels: object) -> tuple[Any, Any]:
    scores, truth = score_pairs(preds, labels)
    scores = scores.astype(np.float64)
    if scores.ndim == 1:
        known = scores[~np.isnan(scores)]
        within = bool(((known >= 0) & (known <= 1)).all())
        return (scores if within else 1 / (1 + np.exp(-scores))), truth
    if not are_probabilities(scores[~np.isnan(scores).any(axis=1)]).all():
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    scores = scores / scores.sum(axis=1, keepdims=True)
    return (scores[:, 1] if scores.shape[1] == 2 else scores), truth


def _numbers(preds: object, labels: object) -> tuple[Any, Any]:
    return number_pairs(preds, labels)


def _of_labels(preds: object, labels: object) -> tuple[Any, Any]:
    raise MetricError(
        f"this scorer needs what a model does not give here, got predictions of shape "
        f"{as_array(preds, 'predictions').shape}; give a function of (predictions, labels)"
    )


_PREPARED: Mapping[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "predict": _classes,
    "either": _either,
    "numbers": _numbers,
    "decision_function": _scores,
    "predict_proba": _probabilities,
    "predict_log_proba": _of_labels,
}
