"""A metric computed by a function of all predictions and labels.

Batches are concatenated along their first axis, as numpy arrays; several outputs are
concatenated separately and keep the model's container type.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from neural_mp.errors import MetricError
from neural_mp.metrics.base import nothing_taken_in
from neural_mp.metrics.predictions import map_named_outputs
from neural_mp.util.pytree import convert_to_numpy

_TRUTH_NAMES = """
    y_true true truth truths label labels label_ids target targets y_target reference references
    ref refs actual actuals expected gt ground_truth ground_truths gold golds
"""
_PREDICTION_NAMES = """
    y_pred y_hat y_score y_prob y_proba pred preds predicted prediction predictions output outputs
    score scores logit logits probs probabilities input
"""
#: Parameter names of labels.
_TRUTH = frozenset(_TRUTH_NAMES.split())
#: Parameter names of predictions.
_PREDICTIONS = frozenset(_PREDICTION_NAMES.split())
#: Names of the only parameter of a function of a model.
_MODELS = frozenset({"model", "net", "network", "module", "graph", "session"})
#: Packages whose functions expect torch tensors.
_OF_TENSORS = frozenset({"torch", "torchmetrics", "torcheval"})
#: Outputs of models of `transformers` that are no predictions.
_NOT_PREDICTIONS = frozenset({"loss", "past_key_values", "mems"})
#: Names of the only parameter of a function of `Predicted`.
_BOTH = frozenset({"eval_pred", "eval_preds", "eval_prediction", "p"})


class Predicted(NamedTuple):
    """The argument of a function with one parameter, e.g. `compute_metrics` of `transformers`.

    As an `EvalPrediction` of its trainer: a single output is an array, several are a tuple.

    Attributes:
        predictions: all predictions.
        label_ids: all labels.
    """

    predictions: Any
    label_ids: Any


class OverAllData:
    """A metric that is a function of all predictions and labels.

    Args:
        function: returns a number, or several by name. Labels come first if its first parameter
            is called `y_true`, `labels`, `targets`, `references` or the like, or if only the
            second is called `y_pred`, `predictions` or the like; else predictions come first. A
            function with one parameter receives `(predictions, label_ids)`.
        options: further keyword arguments.
        prepare: applied to `(predictions, labels)` before the function is called.
        higher_is_better: the direction; None if the function defines it.

    Raises:
        MetricError: the function takes neither one nor two arguments, or takes a model.
    """

    running: ClassVar[bool] = False  # may be slow, and need not be a mean over samples

    def __init__(
        self,
        function: Callable[..., Any],
        options: Mapping[str, Any] | None = None,
        prepare: Callable[[Any, Any], tuple[Any, Any]] | None = None,
        higher_is_better: bool | None = None,
    ) -> None:
        self.__wrapped__ = function
        self.higher_is_better = higher_is_better
        self._options = dict(options or {})
        self._order = _order_arguments(function, self._options)
        if prepare is None and _find_defining_package(function) in _OF_TENSORS:
            prepare = _as_tensors
        self._prepare = prepare
        self.reset()

    def reset(self) -> None:
        """Discard all batches."""
        self._preds: list[Any] = []
        self._labels: list[Any] = []

    def update(self, preds: object, labels: object) -> None:
        """Store one batch."""
        # Copies: frameworks reuse the memory of their results.
        self._preds.append(join_batches([preds], "predictions"))
        self._labels.append(join_batches([labels], "labels"))

    def merge(self, other: OverAllData) -> None:
        """Append the batches of another instance."""
        self._preds += other._preds
        self._labels += other._labels

    def result(self) -> Any:
        """Return the function's result for all batches.

        Raises:
            MetricError: there are no batches, or they cannot be concatenated.
        """
        if not self._preds:
            raise nothing_taken_in(self.__wrapped__)
        preds = join_batches(self._preds, "predictions")
        labels = join_batches(self._labels, "labels")
        if self._prepare is not None:
            preds, labels = self._prepare(preds, labels)
        return self.__wrapped__(*self._order(Predicted(preds, labels)), **self._options)


def join_batches(batches: Sequence[Any], what: str) -> Any:
    """Concatenate batches of arrays; several outputs separately, in their container.

    Raises:
        MetricError: their shapes differ beyond the first axis.
    """
    first = batches[0]
    if first is None:
        return None
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        parts = ([getattr(batch, name) for batch in batches] for name in names)
        return dataclasses.replace(
            first, **dict(zip(names, (join_batches(part, what) for part in parts), strict=True))
        )
    if isinstance(first, Mapping):
        return {key: join_batches([batch[key] for batch in batches], what) for key in first}
    if isinstance(first, list | tuple) and map_named_outputs(first) is not None:
        columns = [join_batches(part, what) for part in zip(*batches, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    try:
        return np.concatenate([np.atleast_1d(convert_to_numpy(batch)) for batch in batches])
    except ValueError as error:
        shapes = sorted({str(list(np.shape(batch))) for batch in batches})
        raise MetricError(
            f"the {what} of {len(batches)} batches must have one shape except for the first axis, "
            f"got {', '.join(shapes[:4])}: {error}; give an object with update, reset and result"
        ) from error


def list_function_parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of a function or class; None for C code without a signature."""
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return None


def _order_arguments(
    function: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[[Predicted], tuple[Any, ...]]:
    parameters = list_function_parameters(function)
    if parameters is None:
        return _predictions_first
    open_ = [p for p in parameters if p.name not in options]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in open_)
    by_place = [p for p in open_ if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in by_place[2:] if p.default is p.empty]
    needed += [p.name for p in open_ if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if needed or (not by_place and not any_number):
        raise _make_parameters_error(function, [p.name for p in open_])
    names = [p.name.lower() for p in by_place[:2]]
    if any_number or len(names) == 2:
        first, second = [*names, "", ""][:2]
        labels_first = first in _TRUTH or (second in _PREDICTIONS and first not in _PREDICTIONS)
        return _truth_first if labels_first else _predictions_first
    if names[0] in _MODELS:
        raise MetricError(
            f"the metric {_name_of(function)} must take (predictions, labels), got a function of a "
            f"model; set a function model → number as eval_func"
        )
    return _as_one


def takes_data(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether a function takes predictions and labels, judged by its parameter names."""
    parameters = list_function_parameters(function) or ()
    needed = [p.name.lower() for p in parameters if p.default is p.empty and p.name not in options]
    pair = len(needed) == 2 and any(name in _TRUTH | _PREDICTIONS for name in needed)
    return pair or (len(needed) == 1 and needed[0] in _BOTH)


def _truth_first(pair: Predicted) -> tuple[Any, ...]:
    return pair.label_ids, pair.predictions


def _predictions_first(pair: Predicted) -> tuple[Any, ...]:
    return pair.predictions, pair.label_ids


def _as_one(pair: Predicted) -> tuple[Any, ...]:
    return (Predicted(*map(_as_trainer_gives, pair)),)


def _as_trainer_gives(values: object) -> Any:
    """Return named outputs as a tuple, or the only one as an array, without the loss.

    `Trainer.prediction_step` of `transformers` drops the loss, and caches, likewise.
    """
    if not isinstance(values, Mapping) and not dataclasses.is_dataclass(values):
        return values
    outputs = map_named_outputs(values) or {}
    retained = tuple(value for name, value in outputs.items() if name not in _NOT_PREDICTIONS)
    return retained[0] if len(retained) == 1 else retained


def _make_parameters_error(function: Callable[..., Any], names: Sequence[str]) -> MetricError:
    signature = f"({', '.join(names)})"
    return MetricError(
        f"the metric {_name_of(function)} must take (predictions, labels) or (y_true, y_pred), got "
        f"{signature}; bind other arguments with functools.partial, or give them as "
        f"(function, {{name: value}})"
    )


def _name_of(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _find_defining_package(function: object) -> str:
    while isinstance(function, partial):
        function = function.func
    home = function if hasattr(function, "__qualname__") else type(function)
    return str(home.__module__).partition(".")[0]


def _as_tensors(preds: object, labels: object) -> tuple[Any, Any]:
    return to_torch_tensors(preds), to_torch_tensors(labels)


def to_torch_tensors(values: object) -> Any:
    """Convert arrays to torch tensors; the caller must have imported torch."""
    torch = sys.modules["torch"]
    if isinstance(values, Mapping):
        return {key: to_torch_tensors(value) for key, value in values.items()}
    if isinstance(values, list | tuple) and (not values or not np.isscalar(values[0])):
        return type(values)(to_torch_tensors(value) for value in values)
    if values is None or isinstance(values, str):
        return values
    return torch.as_tensor(values if hasattr(values, "detach") else convert_to_numpy(values))
