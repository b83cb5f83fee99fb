"""`quantize_model` and `autotune` of `neural_compressor.tensorflow`."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from neural_mp.api.by_rules import Conversion, converted_by_rules
from neural_mp.api.mixed_precision import MixedPrecision
from neural_mp.compat.inc.model import Model, Result, native, node_name, on_graphs
from neural_mp.compat.inc.v3.base_config import BaseConfig, ComposableConfig
from neural_mp.compat.inc.v3.base_tuning import EvaluationFuncWrapper, OrderedTrials, TuningConfig
from neural_mp.compat.inc.v3.conversion import algorithms_of, parsed_config, rules_of
from neural_mp.compat.inc.v3.tensorflow_configs import TENSORFLOW_CONFIGS
from neural_mp.core.criterion import ExitPolicy
from neural_mp.errors import DataError
from neural_mp.tuning.evaluation.batch_reading import inputs_of_batch

_ITERATIONS = 100


@dataclass(frozen=True)
class _LoaderInputs:
    """The inputs of the first batches of a loader; batches are pairs of inputs and labels."""

    loader: Iterable[Any]
    most: int

    def __iter__(self) -> Iterator[Any]:
        for batch in itertools.islice(self.loader, self.most):
            yield inputs_of_batch(batch)


class _RecordedSession:
    """A session whose feeds are recorded, as dicts of input names."""

    def __init__(self, session: Any, batches: list[Any]) -> None:
        self._session = session
        self._batches = batches

    def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None, *arguments: Any) -> Any:
        """Run the session."""
        if feed_dict:
            named = {node_name(getattr(k, "name", k)): value for k, value in feed_dict.items()}
            self._batches.append(named)
        return self._session.run(fetches, feed_dict, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def quantize_model(
    model: Any,
    quant_config: Any,
    calib_dataloader: Any = None,
    calib_iteration: int = _ITERATIONS,
    calib_func: Callable[[Any], Any] | None = None,
) -> Result:
    """Return a model converted by a configuration.

    Args:
        model: the framework's object, a path, or a `Model`.
        quant_config: a configuration, a list of configurations, or a dict.
        calib_dataloader: batches of `(inputs, labels)`.
        calib_iteration: number of batches.
        calib_func: runs a `Model` with its own data, if there is no loader.

    Raises:
        DataError: neither a loader nor a function is given, or the function runs nothing.
    """
    configs = quant_config if isinstance(quant_config, list) else [quant_config]
    parsed = [parsed_config(config, TENSORFLOW_CONFIGS) for config in configs]
    algorithms = algorithms_of(ComposableConfig(m for c in parsed for m in c.members()))
    for algorithm in algorithms:
        algorithm.warn_without_effect()
    conversion = Conversion(
        rules_of(algorithms),
        corrects=any(algorithm.corrects for algorithm in algorithms),
        inputs=getattr(model, "_input_names", None),
        outputs=getattr(model, "_output_names", None),
    )
    data = _calibration_batches(model, calib_dataloader, calib_iteration, calib_func)
    return Result(converted_by_rules(native(model), conversion, data))


def _calibration_batches(
    model: Any, loader: Any, most: int, function: Callable[[Any], Any] | None
) -> Iterable[Any] | None:
    if loader is not None:
        return _LoaderInputs(loader, most)
    if function is None:
        return None
    batches: list[Any] = []
    observed = model if isinstance(model, Model) else Model(model)
    plain = observed.sess
    vars(observed)["sess"] = _RecordedSession(plain, batches)
    try:
        function(observed)
    finally:
        vars(observed)["sess"] = plain
    if not batches:
        raise DataError(
            "calib_func must run the session of the model (model.sess.run) with a feed_dict, no "
            "run was seen; give calib_dataloader"
        )
    return batches[:most]


def autotune(
    model: Any,
    tune_config: TuningConfig,
    eval_fn: Callable[..., Any],
    eval_args: Any = None,
    calib_dataloader: Any = None,
    calib_iteration: int = _ITERATIONS,
    calib_func: Callable[[Any], Any] | None = None,
) -> Result | Model:
    """Return a converted model that meets the target; the given one, in FP32, if none does.

    Args:
        model: the framework's object, a path, or a `Model`.
        tune_config: configurations to try, or a tolerance alone; see `TuningConfig`.
        eval_fn: model, `*eval_args` → accuracy.
        eval_args: further arguments of `eval_fn`.
        calib_dataloader: as in `quantize_model`.
        calib_iteration: as in `quantize_model`.
        calib_func: as in `quantize_model`.

    Raises:
        ConfigurationError: the direction of `eval_fn` is unclear.
        NeuralMPError: a configuration is invalid, or the model cannot be converted.
    """
    evaluation = EvaluationFuncWrapper(eval_fn, eval_args)
    wrapped = model if isinstance(model, Model) else Model(model)
    if tune_config.searches:
        return _search_model(wrapped, tune_config, evaluation, calib_dataloader, calib_iteration)

    def convert_model(config: BaseConfig) -> Result:
        return quantize_model(
            model, copy.deepcopy(config), calib_dataloader, calib_iteration, calib_func
        )

    result: Result | Model = OrderedTrials(tune_config, evaluation).chosen(wrapped, convert_model)
    return result


def _search_model(
    model: Model, options: TuningConfig, evaluation: EvaluationFuncWrapper, loader: Any, most: int
) -> Result:
    tuning = MixedPrecision()
    tuning.model = native(model)
    tuning.accuracy_criterion = options.criterion(evaluation.eval_fn)
    tuning.exit_policy = ExitPolicy(max_trials=options.max_trials)
    tuning.eval_func = on_graphs(evaluation.evaluate, tuning.model)
    tuning.calib_dataloader = None if loader is None else _LoaderInputs(loader, most)
    return Result(tuning.fit())
