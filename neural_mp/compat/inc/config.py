"""The configurations of their version 2, as plain values, and what they come to here."""

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
#: Options of theirs that have no meaning here → why.
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
#: What they are where nobody set them.
_UNSET: tuple[Any, ...] = (None, "", "default", "auto", [], {}, (), False)


@dataclass
class AccuracyCriterion:
    """How much accuracy may be lost.

    Attributes:
        higher_is_better: whether more is better.
        criterion: `relative` or `absolute`.
        tolerable_loss: how much.
    """

    higher_is_better: bool = True
    criterion: str = "relative"
    tolerable_loss: float = 0.01

    def __post_init__(self) -> None:
        one_of("criterion", self.criterion, ("relative", "absolute"))

    @property
    def relative(self) -> float | None:
        """The loss, if it is relative."""
        return self.tolerable_loss if self.criterion == "relative" else None

    @relative.setter
    def relative(self, loss: float) -> None:
        self.criterion, self.tolerable_loss = "relative", loss

    @property
    def absolute(self) -> float | None:
        """The loss, if it is absolute."""
        return self.tolerable_loss if self.criterion == "absolute" else None

    @absolute.setter
    def absolute(self, loss: float) -> None:
        self.criterion, self.tolerable_loss = "absolute", loss


@dataclass
class TuningCriterion:
    """How long to search, and for what.

    Attributes:
        strategy: `basic`, `bayesian`, …
        strategy_kwargs: without meaning here.
        timeout: seconds; 0 for no limit.
        max_trials: how many plans are tried at most.
        objective: `performance`, `footprint` or `modelsize`.
    """

    strategy: str = "basic"
    strategy_kwargs: Any = None
    timeout: int = 0
    max_trials: int = 100
    objective: Any = "performance"


@dataclass
class _Conversion:
    """What both kinds of conversion can be told.

    Attributes:
        device: `cpu` or `gpu`.
        inputs, outputs: names of the model's inputs and outputs.
        op_type_dict, op_name_dict: limits on types of ops, and on single ones.
        excluded_precisions: what may not be used.
        accuracy_criterion, tuning_criterion: see there.
        backend, model_name, example_inputs: without meaning here.
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
        """The same as a tuning file holds it, without a precision."""
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
    """INT8 of a trained model.

    Attributes:
        approach: `static`, `dynamic` or `auto`.
        calibration_sampling_size: samples that ranges are measured on.
        domain, recipes, quant_format, reduce_range, quant_level, diagnosis: without meaning here;
            a logged warning says so where one is set.
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
        """What it comes to here.

        Raises:
            ConfigurationError: a value is not as it should be.
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
    """16 bits of a trained model.

    Attributes:
        precisions: `bf16` or `fp16`, or a list of them.
    """

    precisions: str | Sequence[str] = "bf16"

    def settings(self) -> Settings:
        """What it comes to here.

        Raises:
            ConfigurationError: a value is not as it should be.
        """
        words = tensor_names(self.precisions) or []
        kept = [word for word in words if word not in self.excluded_precisions]
        section = {"precisions": kept or ["fp32"], "op_wise": dict(self.op_name_dict or {})}
        return of_mapping({**self.content(), "mixed_precision": section})


@dataclass
class BenchmarkConfig:
    """How speed is measured.

    Attributes:
        inputs, outputs: names of the model's inputs and outputs.
        warmup: batches that are not counted.
        iteration: batches that are; -1 for as many as there are.
        cores_per_instance: cores of every instance; None for all of them together.
        num_of_instance: instances that run at once.
        backend, device, model_name, inter_num_of_threads, intra_num_of_threads, diagnosis:
            without meaning here.
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
    """How a model is written as ONNX: taken for their sake; the file holds the model as it is.

    Args:
        **options: `dtype`, `opset_version`, `quant_format`, `example_inputs`, names and axes.
    """

    def __init__(self, **options: object) -> None:
        self.options = options


TF2ONNXConfig = Torch2ONNXConfig = ExportConfig


def __getattr__(name: str) -> Any:
    return looked_up(__name__, name, globals())
