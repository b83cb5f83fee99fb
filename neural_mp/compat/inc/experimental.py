"""`neural_compressor.experimental` of INC 1.x: `Quantization`, `MixedPrecision`, `Benchmark`.

`experimental.common`, with `Model`, `Metric`, `DataLoader` and `Postprocess`, is an alias of this
module.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any, ClassVar

from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api import config_objects
from neural_mp.api.mixed_precision import MixedPrecision as Tuning
from neural_mp.compat.inc import benchmark
from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.compat.inc.import_aliases import NotHereError, make_absent_getter
from neural_mp.compat.inc.model import (
    Model,
    Result,
    evaluate_on_graphs,
    list_existing_ports,
    native,
    runnable,
)
from neural_mp.compat.inc.quantization import skip_accuracy_check
from neural_mp.compat.inc.user_objects import (
    DataLoader,
    Metric,
    Postprocess,
    build_user_metric,
    build_user_postprocess,
    convert_to_settings,
)
from neural_mp.core import hardware as machine
from neural_mp.core.precision import Precision
from neural_mp.data import build_dataset
from neural_mp.errors import ConfigurationError, DataError

logger = logging.getLogger(__name__)
#: Alias of this module.
common = sys.modules[__name__]


class Configured:
    """Base of classes with a configuration; creates datasets for the framework of the latter.

    Args:
        conf_fname_or_obj: path of a YAML file, settings as attributes, or None.

    Attributes:
        model: the framework's object, a path, or a `common.Model`.
        metric: an object with update, reset and result, or a `common.Metric`.
        postprocess: a `common.Postprocess`, or a function of `(predictions, labels)`.
    """

    def __init__(self, conf_fname_or_obj: object = None) -> None:
        self.settings = convert_to_settings(conf_fname_or_obj)
        self.model: Any = self.settings.options.model
        self.metric: Any = None
        self.postprocess: Any = None

    def dataset(self, name: str, *shape: object, **options: object) -> Any:
        """Return a dataset by name.

        Args:
            name: e.g. `dummy`.
            *shape: the shape of `dummy`.
            **options: options of the dataset.

        Raises:
            ConfigurationError: the name or an option is unknown.
        """
        if shape:
            options["shape"] = shape[0]
        return build_dataset({name: options}, load_vocabulary(self.settings.options.framework))

    def dataloader(self, dataset: object, batch_size: int = 1, **options: Any) -> DataLoader:
        """Return a loader of a dataset."""
        return DataLoader(dataset, batch_size, **options)

    def __repr__(self) -> str:
        return type(self).__name__


class Benchmark(Configured):
    """Measurement of a model's accuracy or speed.

    Attributes:
        model: the framework's object, a path, a `common.Model` or a result.
        b_dataloader: the batches; default: those of the configuration.
        b_func: a function of the model that is timed, or that returns the accuracy.
        results: mode → result.
    """

    def __init__(self, conf_fname_or_obj: object = None) -> None:
        super().__init__(conf_fname_or_obj)
        self.b_dataloader: Any = None
        self.b_func: Any = None
        self.results: dict[str, Any] = {}

    def fit(self, mode: str = "performance") -> dict[str, Any]:
        """Measure.

        Args:
            mode: `performance` or `accuracy`.

        Returns:
            Mode → result, which unpacks as INC's accuracy, batch size and seconds of every batch;
            see `neural_mp.compat.inc.benchmark.Performance` and `Accuracy`. The result is logged.

        Raises:
            NeuralMPError: model or data are missing, or the mode is neither.
        """
        if mode not in ("performance", "accuracy"):
            raise ConfigurationError(f"mode must be performance or accuracy, got {mode!r}")
        result = self._measure_model(mode == "accuracy")
        if self.b_func is None:
            benchmark.log_result(result, f"{mode} mode benchmark result:")
        self.results[mode] = result
        return self.results

    def _measure_model(self, is_accuracy: bool) -> Any:
        model, settings, loader = runnable(self.model), self.settings, self.b_dataloader
        if self.b_func is not None:
            return self.b_func(model)
        if loader is None and not is_accuracy:
            loader = config_objects.build_loader(settings, config_objects.PERFORMANCE)
        if loader is None:
            loader = config_objects.build_loader(settings, config_objects.ACCURACY)
        if loader is None:
            raise DataError("b_dataloader must be set, as the configuration has no dataloader")
        if is_accuracy:
            metric = build_user_metric(self.metric, settings.options.framework)
            postprocess = build_user_postprocess(self.postprocess)
            return benchmark.measure_accuracy(settings, model, loader, metric, postprocess)
        speed = settings.evaluation.performance
        cores, instances = benchmark.limit_instances(speed.cores_per_instance, speed.instances)
        ports = list_existing_ports(model, settings.options.inputs, settings.options.outputs)
        return benchmark.measure_speed(
            model, loader, speed.warmup, speed.iteration, cores, instances, ports
        )

    __call__ = fit


class _Experiment(Configured):
    """Tuning by a configuration.

    Attributes:
        calib_dataloader, eval_dataloader: batches of `(inputs, labels)`.
        eval_func: native model → accuracy.
        objective: the quantity to minimize.
        input, output: names of the model's inputs and outputs.
        q_func: quantization-aware training, which is not supported.
    """

    #: Default precisions.
    default: ClassVar[tuple[Precision, ...]] = (Precision.BF16,)

    def __init__(self, conf_fname_or_obj: object = None) -> None:
        super().__init__(conf_fname_or_obj)
        self.calib_dataloader: Any = None
        self.eval_dataloader: Any = None
        self.eval_func: Any = None
        self.objective: Any = None
        self.input: Any = None
        self.output: Any = None
        self.q_func: Any = None
        options = self.settings.options
        precisions = options.precisions if options.is_set("precisions") else self.default
        self._precisions = sorted(map(str, precisions))

    @property
    def precisions(self) -> list[str]:
        """Names of the precisions, sorted."""
        return self._precisions

    @precisions.setter
    def precisions(self, words: str | Iterable[str]) -> None:
        listed = words.split(",") if isinstance(words, str) else words
        self._precisions = sorted(str(name).strip() for name in listed)

    def fit(self) -> Result:
        """Tune.

        Returns:
            Always a usable model; the FP32 model, with a logged warning, if INC would return None.

        Raises:
            NeuralMPError: an option is unknown or does not fit.
        """
        if self.q_func is not None:
            raise NotHereError("q_func must be None, as training in INT8 is not supported")
        tuning = Tuning()
        tuning.configure(self.settings)
        tuning.model = native(self.model)
        tuning.precisions = _without_idle_fp16(self.precisions, tuning.model, tuning.framework)
        tuning.calib_dataloader = self.calib_dataloader
        tuning.eval_dataloader = self.eval_dataloader
        tuning.eval_func = evaluate_on_graphs(self.eval_func, tuning.model, tuning.target)
        tuning.metric = build_user_metric(self.metric, self.settings.options.framework)
        tuning.postprocess = build_user_postprocess(self.postprocess)
        tuning.objective = self.objective or tuning.objective
        tuning.inputs, tuning.outputs = list_existing_ports(
            tuning.model, self.input or tuning.inputs, self.output or tuning.outputs
        )
        return Result(skip_accuracy_check(tuning, self.settings).fit())

    __call__ = fit


def _without_idle_fp16(precisions: list[str], model: object, framework: str | None) -> list[str]:
    """Return the precisions without a forced FP16 if ONNX Runtime lacks FP16 kernels.

    INC converts nothing in this case. FP16 would halve the file without any speedup.
    """
    support = machine.detect().support(Precision.FP16)
    is_forced = "fp16" in precisions and support.available and not support.native
    if not is_forced or adaptor_for(model, framework).framework != "onnxrt":
        return precisions
    logger.warning(
        "FP16 is excluded, as in Intel Neural Compressor: ONNX Runtime has no FP16 kernels for "
        "this CPU (%s); use neural_mp.MixedPrecision to convert to FP16",
        support.reason,
    )
    return [precision for precision in precisions if precision != "fp16"] or ["fp32"]


class GraphOptimization(_Experiment):
    """INC's `GraphOptimization`: mixed precision."""


class MixedPrecision(_Experiment):
    """INC's `MixedPrecision`: BF16 by default."""


class Quantization(_Experiment):
    """INC's `Quantization`: INT8 by default."""

    default = (Precision.INT8,)


Graph_Optimization = GraphOptimization

__all__ = [
    "Benchmark",
    "DataLoader",
    "GraphOptimization",
    "Graph_Optimization",
    "Metric",
    "MixedPrecision",
    "Model",
    "Postprocess",
    "Quantization",
    "common",
]


__getattr__ = make_absent_getter(globals())
