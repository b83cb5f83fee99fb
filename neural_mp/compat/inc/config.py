"""Configuration classes of INC 2.x, and their conversion to settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neural_mp.compat.inc.import_aliases import looked_up
from neural_mp.compat.inc.user_objects import of_mapping, tensor_names
from neural_mp.config import Settings
from neural_mp.config.inc_dialect import IGNORED
from neural_mp.data.option_checks import one_of

logger = logging.getLogger(__name__)

_APPROACHES = {
    "static": "post_training_static_quant",
    "dynamic": "post_training_dynamic_quant",
    "auto": "post_training_auto_quant",
}
_FITTED = IGNORED["quantization.recipes"]
#: INC options without effect → reason.
_WITHOUT_MEANING: Mapping[str, str] = {
    "backend": "the framework chooses its own backend",
    "domain": _FITTED,
    "recipes": _FITTED,
    "quant_format": "the adaptor chooses the format",
    "reduce_range": IGNORED["reduce_range"],
    "quant_level": _FITTED,
    "diagnosis": "results are shown as tables and kept in an Optuna storage",
    "model_name": "it is a label",
    "strategy_kwargs": "a strategy has its own settings",
}
#: Values that count as not set.
_UNSET: tuple[Any, ...] = (None, "", "default", "auto", [], {}, (), False)


@dataclass
class AccuracyCriterion:
    """Tolerable accuracy loss.

    Attributes:
        higher_is_better: whether a higher metric is better.
        criterion: `relative` or `absolute`.
        tolerable_loss: the largest accepted loss.
    """

    higher_is_better: bool = True
    criterion: str = "relative"
    tolerable_loss: float = 0.01

    def __post_init__(self) -> None:
        one_of("criterion", self.criterion, ("relative", "absolute"))

    @property
    def relative(self) -> float | None:
        """The loss if relative, else None."""
        return self.tolerable_loss if self.criterion == "relative" else None

    @relative.setter
    def relative(self, loss: float) -> None:
        self.criterion, self.tolerable_loss = "relative", loss

    @property
    def absolute(self) -> float | None:
        """The loss if absolute, else None."""
        return self.tolerable_loss if self.criterion == "absolute" else None

    @absolute.setter
    def absolute(self, loss: float) -> None:
        self.criterion, self.tolerable_loss = "absolute", loss


@dataclass
class TuningCriterion:
    """Budget and goal of the search.

    Attributes:
        strategy: `basic`, `bayesian`, …
        strategy_kwargs: no effect.
        timeout: seconds; 0 for no limit.
        max_trials: maximum number of trials.
        objective: `performance`, `footprint` or `modelsize`.
    """

    strategy: str = "basic"
    strategy_kwargs: Any = None
    timeout: int = 0
    max_trials: int = 100
    objective: Any = "performance"


@dataclass
class _Conversion:
    """Options common to quantization and 16-bit conversion.

    Attributes:
        device: `cpu` or `gpu`.
        inputs, outputs: names of the model's inputs and outputs.
        op_type_dict, op_name_dict: constraints on op types, and on single ops.
        excluded_precisions: precisions that must not be used.
        accuracy_criterion, tuning_criterion: see these classes.
        backend, model_name, example_inputs: no effect.
    """

    device: str = "cpu"
    backend: str = "default"
    inputs: Sequence[str] | str = ()
    outputs: Sequence[str] | str = ()
    op_type_dict: Mapping[str, Any] | None = None
    op_name_dict: Mapping[str, Any] | None = None
    excluded_precisions: Sequence[str] = ()
    example_inputs: Any = None
    model_name: str = ""
    accuracy_criterion: AccuracyCriterion = field(default_factory=AccuracyCriterion)
    tuning_criterion: TuningCriterion = field(default_factory=TuningCriterion)

    def content(self) -> dict[str, Any]:
        """Return the content of an equivalent tuning file, without the precision."""
        for name, why in _WITHOUT_MEANING.items():
            holder = self.tuning_criterion if name == "strategy_kwargs" else self
            if getattr(holder, name, None) not in _UNSET:
                logger.warning("%s=%r has no effect: %s", name, getattr(holder, name), why)
        loss, search = self.accuracy_criterion, self.tuning_criterion
        model = {"inputs": tensor_names(self.inputs), "outputs": tensor_names(self.outputs)}
        exit_policy = {"timeout": search.timeout, "max_trials": search.max_trials}
        return {
            "model": {key: value for key, value in model.items() if value},
            "device": self.device,
            "tuning": {
                "strategy": {"name": search.strategy},
                "accuracy_criterion": {
                    loss.criterion: loss.tolerable_loss,
                    "higher_is_better": loss.higher_is_better,
                },
                "objective": search.objective,
                "exit_policy": exit_policy,
            },
        }


@dataclass
class PostTrainingQuantConfig(_Conversion):
    """Post-training quantization to INT8.

    Attributes:
        approach: `static`, `dynamic` or `auto`.
        calibration_sampling_size: number of calibration samples.
        domain, recipes, quant_format, reduce_range, quant_level, diagnosis: no effect; a warning
            is logged if set.
    """

    domain: str = "auto"
    recipes: Mapping[str, Any] = field(default_factory=dict)
    quant_format: str = "default"
    approach: str = "static"
    calibration_sampling_size: int | Sequence[int] = (100,)
    reduce_range: bool | None = None
    quant_level: str | int = "auto"
    diagnosis: bool = False

    def __post_init__(self) -> None:
        for word in _APPROACHES:
            if word in str(self.approach):
                self.approach = word
        one_of("approach", self.approach, tuple(_APPROACHES))

    def settings(self) -> Settings:
        """Return the equivalent settings.

        Raises:
            ConfigurationError: a value is invalid.
        """
        sizes = self.calibration_sampling_size
        listed = [sizes] if isinstance(sizes, int) else list(sizes)
        wanted = [word for word in ("int8", "bf16") if word not in self.excluded_precisions]
        quantization = {
            "approach": _APPROACHES[self.approach],
            "calibration": {"sampling_size": listed},
            "op_wise": dict(self.op_name_dict or {}),
            "optype_wise": dict(self.op_type_dict or {}),
        }
        content = self.content()
        if wanted != ["int8", "bf16"]:
            content["mixed_precision"] = {"precisions": wanted or ["fp32"]}
        return of_mapping({**content, "quantization": quantization})


@dataclass
class MixedPrecisionConfig(_Conversion):
    """Conversion of a trained model to 16 bits.

    Attributes:
        precisions: `bf16` or `fp16`, or a list of both.
    """

    precisions: str | Sequence[str] = "bf16"

    def settings(self) -> Settings:
        """Return the equivalent settings.

        Raises:
            ConfigurationError: a value is invalid.
        """
        words = tensor_names(self.precisions) or []
        kept = [word for word in words if word not in self.excluded_precisions]
        section = {"precisions": kept or ["fp32"], "op_wise": dict(self.op_name_dict or {})}
        return of_mapping({**self.content(), "mixed_precision": section})


@dataclass
class BenchmarkConfig:
    """Options of a benchmark.

    Attributes:
        inputs, outputs: names of the model's inputs and outputs.
        warmup: number of untimed batches.
        iteration: number of timed batches; -1 for all.
        cores_per_instance: cores per instance; None to divide all of them.
        num_of_instance: number of concurrent instances.
        backend, device, model_name, inter_num_of_threads, intra_num_of_threads, diagnosis:
            no effect.
    """

    inputs: Sequence[str] | str = ()
    outputs: Sequence[str] | str = ()
    backend: str = "default"
    device: str = "cpu"
    warmup: int = 5
    iteration: int = -1
    model_name: str = ""
    cores_per_instance: int | None = None
    num_of_instance: int | None = 1
    inter_num_of_threads: int | None = None
    intra_num_of_threads: int | None = None
    diagnosis: bool = False


class ExportConfig:
    """Options of the ONNX export: accepted but ignored; the file holds the model unchanged.

    Args:
        **options: `dtype`, `opset_version`, `quant_format`, `example_inputs`, names and axes.
    """

    def __init__(self, **options: object) -> None:
        self.options = options


TF2ONNXConfig = Torch2ONNXConfig = ExportConfig


def __getattr__(name: str) -> Any:
    return looked_up(__name__, name, globals())
