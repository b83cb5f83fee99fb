"""`neural_compressor.experimental` of version 1: `Quantization`, `MixedPrecision`, `Benchmark`.

`experimental.common`, with a model, a metric, a loader and a postprocess by their names, is another
name of this module.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any, ClassVar

from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api.mixed_precision import MixedPrecision as Tuning
from neural_mp.compat.inc import benchmark
from neural_mp.compat.inc.import_aliases import NotHereError, looked_up
from neural_mp.compat.inc.model import Model, Result, native, outputs_there, runnable
from neural_mp.compat.inc.user_objects import (
    DataLoader,
    Metric,
    Postprocess,
    metric_of,
    named_dataset,
    postprocess_of,
    settings_of,
    tensor_names,
)
from neural_mp.core import hardware as machine
from neural_mp.core.precision import Precision

logger = logging.getLogger(__name__)
#: Another name of this module.
common = sys.modules[__name__]


class Configured:
    """What is made from a configuration, and makes datasets for the framework it names.

    Args:
        conf_fname_or_obj: the path of a YAML file, settings by attribute, or None.

    Attributes:
        model: the framework's object, a path, or a `common.Model`.
        metric: an object with update, reset and result, or a `common.Metric`.
        postprocess: a `common.Postprocess`, or what takes `(predictions, labels)`.
    """

    def __init__(self, conf_fname_or_obj: object = None) -> None:
        self.settings = settings_of(conf_fname_or_obj)
        self.model: Any = self.settings.model.name
        self.metric: Any = None
        self.postprocess: Any = None

    def dataset(self, name: str, *shape: object, **options: object) -> Any:
        """A dataset by its name.

        Args:
            name: such as `dummy`.
            *shape: the shape of a `dummy`.
            **options: its options.

        Raises:
            ConfigurationError: there is none of that name, or an option is not its own.
        """
        if shape:
            options["shape"] = shape[0]
        return named_dataset(name, options, self.settings.model.framework)

    def dataloader(self, dataset: object, batch_size: int = 1, **options: Any) -> DataLoader:
        """Batches of a dataset."""
        return DataLoader(dataset, batch_size, **options)

    def __repr__(self) -> str:
        return type(self).__name__


class Benchmark(Configured):
    """Measures accuracy or speed of a model.

    Args:
        conf_fname_or_obj: the path of a YAML file, settings by attribute, or None.

    Attributes:
        model: the framework's object, a path, a `common.Model` or a result.
        b_dataloader: what it is run on; by default what the file names.
        b_func: a function of the model that is timed, or that gives the accuracy.
        results: mode → what was found.
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
            What was found; see `neural_mp.compat.inc.benchmark.Performance`.

        Raises:
            NeuralMPError: there is no model or no data, or the mode is neither.
        """
        metric = metric_of(self.metric, self.settings.model.framework)
        found = benchmark.measured(
            self.settings,
            runnable(self.model),
            mode,
            self.b_dataloader,
            self.b_func,
            metric,
            postprocess_of(self.postprocess),
        )
        self.results[mode] = found
        return self.results

    __call__ = fit


class _Experiment(Configured):
    """What is tuned as a configuration says.

    Args:
        conf_fname_or_obj: the path of a YAML file, settings by attribute, or None.

    Attributes:
        calib_dataloader, eval_dataloader: batches of `(inputs, labels)`.
        eval_func: native model → accuracy.
        objective: what is made small.
        input, output: names of the model's inputs and outputs.
        q_func: what trains in INT8, which is not here.
    """

    #: The precisions where the configuration names none.
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
        self._precisions = sorted(map(str, self.settings.precisions or self.default))

    @property
    def precisions(self) -> list[str]:
        """The precisions by their words, in alphabetical order."""
        return self._precisions

    @precisions.setter
    def precisions(self, words: str | Iterable[str]) -> None:
        listed = words.split(",") if isinstance(words, str) else words
        self._precisions = sorted(str(word).strip() for word in listed)

    def fit(self) -> Result:
        """Tune.

        Returns:
            A usable model, always; where theirs would be None, it is the FP32 one, and a logged
            warning says so.

        Raises:
            NeuralMPError: something asked for does not exist or does not fit.
        """
        if self.q_func is not None:
            raise NotHereError("q_func trains in INT8, which is not here; leave it out")
        tuning = Tuning(self.settings)
        tuning.model = native(self.model)
        tuning.precisions = _without_idle_fp16(self.precisions, tuning.model, tuning.framework)
        tuning.calib_dataloader = self.calib_dataloader
        tuning.eval_dataloader = self.eval_dataloader
        tuning.eval_func = self.eval_func
        tuning.metric = metric_of(self.metric, self.settings.model.framework)
        tuning.postprocess = postprocess_of(self.postprocess)
        tuning.objective = self.objective or tuning.objective
        tuning.inputs = tensor_names(self.input) or tuning.inputs
        tuning.outputs = outputs_there(tuning.model, self.output) or tuning.outputs
        return Result(tuning.fit())

    __call__ = fit


def _without_idle_fp16(words: list[str], model: object, framework: str | None) -> list[str]:
    """The precisions without an FP16 that is forced for ONNX Runtime where it has no kernels.

    Theirs converts nothing then. FP16 would halve the file, and leave time and arithmetic alone.
    """
    support = machine.detect().support(Precision.FP16)
    forced = support.available and not support.native
    if "fp16" not in words or not forced or adaptor_for(model, framework).framework != "onnxrt":
        return words
    logger.warning(
        "ONNX Runtime computes nothing in FP16 on this CPU (%s); FP16 is left out, as in Intel "
        "Neural Compressor. neural_mp.MixedPrecision converts to it",
        support.reason,
    )
    return [word for word in words if word != "fp16"] or ["fp32"]


class GraphOptimization(_Experiment):
    """`GraphOptimization` of theirs, which is mixed precision."""


class MixedPrecision(_Experiment):
    """`MixedPrecision` of theirs: BF16 where nothing else is said."""


class Quantization(_Experiment):
    """`Quantization` of theirs: INT8 where nothing else is said."""

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


def __getattr__(name: str) -> Any:
    return looked_up(__name__, name, globals())
