"""`quantization.fit` of INC 2.x."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from neural_mp.api.mixed_precision import MixedPrecision
from neural_mp.compat.inc.config import PostTrainingQuantConfig
from neural_mp.compat.inc.import_aliases import NotHereError
from neural_mp.compat.inc.model import Result, evaluate_on_graphs, list_existing_ports, native
from neural_mp.compat.inc.user_objects import build_user_metric
from neural_mp.config import Settings
from neural_mp.errors import ConfigurationError


def fit(
    model: object,
    conf: PostTrainingQuantConfig | None = None,
    calib_dataloader: object = None,
    calib_func: Callable[[Any], Any] | None = None,
    eval_func: Callable[[Any], float] | None = None,
    eval_dataloader: object = None,
    eval_metric: object = None,
    **ignored: object,
) -> Result:
    """Quantize a trained model.

    Args:
        model: the framework's object, a path, or a `Model`.
        conf: the options; default: INT8 with calibration.
        calib_dataloader: calibration batches.
        calib_func: runs the model on its own data; not supported.
        eval_func: native model → accuracy.
        eval_dataloader: batches of `(inputs, labels)`.
        eval_metric: an object with update, reset and result, a `Metric`, or a dict of names.
        **ignored: other arguments of INC's `fit`.

    Returns:
        Always a usable model; the FP32 model, with a logged warning, if INC would return None.

    Raises:
        NotHereError: `calib_func` is given without `calib_dataloader`.
        NeuralMPError: an option is unknown or does not fit.
    """
    conf = conf or PostTrainingQuantConfig()
    if not isinstance(conf, PostTrainingQuantConfig):
        raise ConfigurationError(
            f"conf must be a PostTrainingQuantConfig, got {type(conf).__name__}"
        )
    if calib_func is not None and calib_dataloader is None:
        raise NotHereError("calib_func is not supported; set calib_dataloader, batches of inputs")
    return tune(model, conf.settings(), calib_dataloader, eval_func, eval_dataloader, eval_metric)


def tune(
    model: object,
    settings: Settings,
    calib_dataloader: object,
    eval_func: Callable[[Any], float] | None,
    eval_dataloader: object,
    eval_metric: object,
) -> Result:
    """Run the tuning loop with the arguments of `fit`."""
    tuning = MixedPrecision()
    tuning.configure(settings)
    tuning.model = native(model)
    tuning.calib_dataloader = calib_dataloader
    tuning.eval_dataloader = eval_dataloader
    tuning.eval_func = evaluate_on_graphs(eval_func, tuning.model, tuning.target)
    tuning.metric = build_user_metric(eval_metric)
    ports = list_existing_ports(tuning.model, tuning.inputs, tuning.outputs)
    tuning.inputs, tuning.outputs = ports
    return Result(skip_accuracy_check(tuning, settings).fit())


def skip_accuracy_check(tuning: MixedPrecision, settings: Settings) -> MixedPrecision:
    """Return the options; without an accuracy check, every eligible op is converted, as in INC."""
    if tuning.eval_func is None and tuning.metric is None and not settings.evaluation.metrics:
        tuning.exit_policy = replace(tuning.exit_policy, performance_only=True)
    return tuning
