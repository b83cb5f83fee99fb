"""`neural_compressor.training` of INC 2.x: training with the rounding of INT8."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from neural_mp.adaptors.common.simulation import inputs_and_targets
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api.loading import resolve_source
from neural_mp.api.quantization_aware import finish, quantization_aware, untrainable_message
from neural_mp.api.replay import Conversion, convert_by_rules
from neural_mp.compat.inc.config import QuantizationAwareTrainingConfig
from neural_mp.compat.inc.import_aliases import NotHereError, make_absent_getter
from neural_mp.compat.inc.model import Model, Result, native
from neural_mp.compat.inc.script_log import logger
from neural_mp.core.enums import Capture
from neural_mp.errors import CaptureError, ConfigurationError, ConversionError
from neural_mp.space import ConversionRules

if TYPE_CHECKING:
    from torch.nn import Module

    from neural_mp.adaptors.pytorch.training.in_place import InPlaceTraining

L = TypeVar("L")
#: Ranges follow the data and batch norms the batches in every step, as in INC.
_ALWAYS = sys.maxsize


def train_in_place(module: Module, rules: ConversionRules) -> InPlaceTraining:
    """Let the calls of a module run with the rounding of INT8, from its first call on.

    The module keeps its parameters, so that an optimizer made before trains them.
    """
    from neural_mp.adaptors.pytorch.training.in_place import InPlaceTraining

    def make_simulation(target: Module, batch: object) -> Any:
        try:
            return _build_simulation(target, rules, batch, Capture.WHOLE)
        except CaptureError:
            return _build_simulation(target, rules, batch, Capture.MODULES)

    return InPlaceTraining(module, make_simulation)


def _build_simulation(
    module: Module, rules: ConversionRules, batch: object, capture: Capture
) -> Any:
    result = convert_by_rules(module, Conversion(rules, capture), [batch])
    return quantization_aware(
        module,
        result,
        calibration=[batch],
        observe_steps=_ALWAYS,
        learn_scales=False,
        norm_steps=_ALWAYS,
        capture=capture,
    )


class CallBacks:
    """The callbacks of INC's training loop; only the first and the last have an effect.

    Args:
        begin: called with the loader, or None, at the beginning of the training.
        end: called at the end.
    """

    def __init__(self, begin: Callable[[Any], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def on_train_begin(self, dataloader: Iterable[Any] | None = None) -> None:
        """Prepare the model for training."""
        self._begin(dataloader)

    def on_train_end(self) -> None:
        """Convert the trained model."""
        self._end()

    def on_epoch_begin(self, epoch: int) -> None:
        """Have no effect."""

    def on_step_begin(self, batch_id: int) -> list[Any]:
        """Return no results of a step."""
        return []

    def on_after_compute_loss(
        self, input: object, student_output: object, student_loss: L, teacher_output: object = None
    ) -> L:
        """Return the loss unchanged."""
        return student_loss

    def on_before_optimizer_step(self) -> None:
        """Have no effect."""

    def on_after_optimizer_step(self) -> None:
        """Have no effect."""

    def on_before_eval(self) -> None:
        """Have no effect."""

    def on_after_eval(self) -> None:
        """Have no effect."""

    def on_step_end(self) -> list[Any]:
        """Return no results of a step."""
        return []

    def on_epoch_end(self) -> list[Any]:
        """Return no results of an epoch."""
        return []


class CompressionManager:
    """A model in training, its callbacks, and its result.

    Args:
        model: a PyTorch module, which is trained in place; or a Keras model, object or path.
        conf: a `QuantizationAwareTrainingConfig`, alone or in a list.

    Attributes:
        model: the model to train: the given module, or a `Model` with the simulation of a Keras
            model; after `on_train_end` the `Result`.
        callbacks: the callbacks.
        conf: the configuration.

    Raises:
        NotHereError: the configuration is of another kind, or there are several.
        ConversionError: the framework of the model has no training.
    """

    def __init__(self, model: object, conf: object) -> None:
        confs = conf if isinstance(conf, list | tuple) else [conf]
        if len(confs) != 1 or not isinstance(confs[0], QuantizationAwareTrainingConfig):
            kinds = ", ".join(type(item).__name__ for item in confs)
            raise NotHereError(
                f"prepare_compression requires one QuantizationAwareTrainingConfig, got {kinds}; "
                f"nothing is pruned or distilled here"
            )
        self.conf: QuantizationAwareTrainingConfig = confs[0]
        self._rules = self.conf.rules()
        self._source = native(model)
        adaptor = adaptor_for(resolve_source(self._source), None)
        if adaptor.simulation is None:
            raise ConversionError(untrainable_message(adaptor.framework))
        self._is_torch = adaptor.framework == "pytorch"
        self._in_place: InPlaceTraining | None = None
        self._simulation: Any = None
        # Scripts read the framework's object as `model` of the model.
        if self._is_torch and not hasattr(self._source, "model"):
            vars(self._source)["model"] = self._source
        self.model: Any = self._source if self._is_torch else Model(self._source)
        self.callbacks = CallBacks(self._begin, self._end)

    def save(self, root: str | Path | None = None) -> None:
        """Save the converted model; see `Result.save`."""
        self.result().save(root)

    def export(self, save_path: str | Path, conf: object = None) -> None:
        """Write the converted model as an ONNX file; see `Result.export`."""
        self.result().export(save_path, conf)

    def result(self) -> Result:
        """Return the converted model; end the training first, if that was not done."""
        if not isinstance(self.model, Result):
            self._end()
        converted: Result = self.model
        return converted

    def _begin(self, dataloader: Iterable[Any] | None) -> None:
        if self._is_torch:
            if self._in_place is None:
                self._in_place = train_in_place(self._source, self._rules)
            self.model = self._source
            return
        if self._simulation is None:
            if dataloader is None:
                raise NotHereError(
                    "training of a Keras model requires batches for calibration, got none; call "
                    "callbacks.on_train_begin(dataloader) with batches of (inputs, labels)"
                )
            batches = [inputs_and_targets(batch, True)[0] for batch in dataloader]
            result = convert_by_rules(self._source, Conversion(self._rules), batches)
            self._simulation = quantization_aware(self._source, result, calibration=batches)
        self.model = Model(self._simulation)

    def _end(self) -> None:
        if self._in_place is None and self._simulation is None:
            raise ConfigurationError(
                "the training must begin before it ends; call callbacks.on_train_begin() first"
            )
        self.model = Result(
            finish(
                self._simulation if self._in_place is None else self._in_place.simulated_module()
            )
        )


def prepare_compression(model: object, confs: object, **ignored: object) -> CompressionManager:
    """Return the manager of the training of a model; see `CompressionManager`."""
    return CompressionManager(model, confs)


def fit(
    compression_manager: CompressionManager,
    train_func: Callable[[Any], Any],
    eval_func: Callable[[Any], float] | None = None,
    eval_dataloader: object = None,
    eval_metric: object = None,
    dataloader: Iterable[Any] | None = None,
    **ignored: object,
) -> Result:
    """Train a model by a function and convert it; compare accuracy before and after.

    Args:
        compression_manager: the manager.
        train_func: trains the model in place.
        eval_func: the framework's object → accuracy.
        eval_dataloader: not supported; set `eval_func`.
        eval_metric: likewise.
        dataloader: batches to calibrate a Keras model with; see `CallBacks.on_train_begin`.
        **ignored: ignored.

    Returns:
        The trained and converted model; a warning is logged if it misses the criterion, where INC
        returns None.

    Raises:
        NotHereError: `eval_dataloader` or `eval_metric` is given without `eval_func`.
    """
    if eval_func is None and (eval_dataloader is not None or eval_metric is not None):
        raise NotHereError(
            "eval_dataloader and eval_metric of training.fit are not supported; set eval_func, a "
            "function of the model that returns its accuracy"
        )
    manager = compression_manager
    baseline = None if eval_func is None else float(eval_func(manager.model))
    manager.callbacks.on_train_begin(dataloader)
    train_func(manager.model)
    result = manager.result()
    if eval_func is None or baseline is None:
        return result
    accuracy, criterion = float(eval_func(result.model)), manager.conf.criterion()
    if not criterion.met(baseline, accuracy):
        logger.warning(
            "the trained model misses the accuracy criterion: %.6g in FP32, %.6g in INT8, where "
            "Intel Neural Compressor returns None; train longer, or keep layers in FP32 by "
            "op_name_dict",
            baseline,
            accuracy,
        )
    return result


__getattr__ = make_absent_getter(globals())
