"""`neural_compressor.Quantization` and `Benchmark` of INC 1.x, called with the model.

Their namesakes in `experimental` take the model as an attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from neural_mp.compat.inc import experimental
from neural_mp.compat.inc.experimental import Configured
from neural_mp.compat.inc.model import import_graph
from neural_mp.compat.inc.user_objects import DataLoader, Metric, Postprocess
from neural_mp.config.settings import PerformanceSettings


class _TopLevel:
    """Base of classes that are called with a model.

    Args:
        conf_fname_or_obj: path of a YAML file, or settings as attributes.
    """

    _kind: ClassVar[type[Configured]]

    def __init__(self, conf_fname_or_obj: object = None) -> None:
        self._run: Any = self._kind(conf_fname_or_obj)

    def dataset(self, dataset_type: str, *shape: object, **options: object) -> Any:
        """Return a dataset by name."""
        return self._run.dataset(dataset_type, *shape, **options)

    def dataloader(self, dataset: object, batch_size: int = 1, **options: Any) -> DataLoader:
        """Return a loader of a dataset."""
        return self._run.dataloader(dataset, batch_size, **options)

    def metric(self, name: str, metric_cls: Callable[..., Any], **options: object) -> None:
        """Set the metric by class."""
        self._run.metric = Metric(metric_cls, name, **options)

    def postprocess(
        self, name: str, postprocess_cls: Callable[..., Any], **options: object
    ) -> None:
        """Set the postprocess by class."""
        self._run.postprocess = Postprocess(postprocess_cls, name, **options)


class Quantization(_TopLevel):
    """Quantization of the model that the object is called with."""

    _kind = experimental.Quantization

    def __call__(
        self,
        model: object,
        q_dataloader: object = None,
        q_func: Callable[[Any], Any] | None = None,
        eval_dataloader: object = None,
        eval_func: Callable[[Any], float] | None = None,
    ) -> Any:
        """Quantize a model.

        Args:
            model: the framework's object, a path, or a `common.Model`.
            q_dataloader: calibration batches; default: those of the configuration.
            q_func: training, which is not supported.
            eval_dataloader: batches of `(inputs, labels)`.
            eval_func: native model → accuracy.

        Returns:
            The framework's object: a module, an ONNX model, or a graph of TensorFlow.

        Raises:
            NeuralMPError: an option is unknown or does not fit.
        """
        run = self._run
        run.model, run.q_func, run.eval_func = model, q_func, eval_func
        run.calib_dataloader, run.eval_dataloader = q_dataloader, eval_dataloader
        result = run.fit()
        return (
            import_graph(result.graph_def) if result.framework() == "tensorflow" else result.model
        )

    fit = __call__


class Benchmark(_TopLevel):
    """Measurement of the model that the object is called with."""

    _kind = experimental.Benchmark

    def __call__(
        self, model: object, b_dataloader: object = None, b_func: Callable[[Any], Any] | None = None
    ) -> dict[str, Any]:
        """Measure a model's speed, or its accuracy if the configuration has nothing else.

        Args:
            model: the framework's object, a path, a `common.Model` or a result.
            b_dataloader: the batches; default: those of the configuration.
            b_func: ignored, as in INC.

        Returns:
            Mode → result, which unpacks as accuracy, batch size and seconds of every batch.

        Raises:
            NeuralMPError: model or data are missing.
        """
        run = self._run
        run.model, run.b_dataloader = model, b_dataloader
        evaluation = run.settings.evaluation
        has_accuracy_only = evaluation.metrics and evaluation.performance == PerformanceSettings()
        results: dict[str, Any] = run.fit("accuracy" if has_accuracy_only else "performance")
        return results

    fit = __call__
