"""Configuration classes of INC 2.x, and their conversion to settings."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from neural_mp.compat.inc.constraints import weight_only_limits
from neural_mp.compat.inc.import_aliases import make_absent_getter
from neural_mp.compat.inc.user_objects import list_tensor_names
from neural_mp.config import Options, Settings, settings_from, values
from neural_mp.config.inc_dialect import (
    IGNORED,
    IGNORED_OBJECTIVES,
    INT8_APPROACHES,
    OTHER_STRATEGIES,
    STRATEGIES,
    target_of_backend,
)
from neural_mp.config.source import Source
from neural_mp.core import criterion
from neural_mp.core import hardware as machine
from neural_mp.core.enums import Approach, Dialect
from neural_mp.core.precision import Precision, parse_precisions
from neural_mp.data.option_checks import check_one_of
from neural_mp.space import ConversionRules, OpConstraint
from neural_mp.space.capability import Constraints
from neural_mp.util import validators
from neural_mp.util.validators import Validator, validate_option

logger = logging.getLogger(__name__)

_APPROACHES = {
    "static": "post_training_static_quant",
    "dynamic": "post_training_dynamic_quant",
    "weight_only": "post_training_weight_only",
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
_SOURCE = Source("the configuration")
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
        check_one_of("criterion", self.criterion, ("relative", "absolute"))

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
        backend: `onnxrt_trt_ep` for the target `tensorrt`; `onnxrt_dnnl_ep`, `default` and others
            for this CPU.
        model_name, example_inputs: no effect.
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

    def convert_to_settings(
        self, precisions: tuple[Precision, ...], constraints: Constraints, **options: Any
    ) -> Settings:
        """Return the equivalent settings.

        Raises:
            ConfigurationError: a value is invalid, or the backend runs kernels of a GPU.
        """
        target = target_of_backend(self.backend)
        self._warn_without_effect(("backend",) if target else ())
        tuning = _convert_tuning_options(self.accuracy_criterion, self.tuning_criterion)
        if target not in (None, machine.HOST_TARGET):
            if self.tuning_criterion.strategy == TuningCriterion.strategy:
                del tuning["strategy"]  # accelerators have a strategy of their own
            options["target"] = target
        return Settings(
            Options(
                inputs=tuple(list_tensor_names(self.inputs) or ()) or None,
                outputs=tuple(list_tensor_names(self.outputs) or ()) or None,
                precisions=precisions,
                **tuning,
                **options,
            ),
            device=_validate_attribute(self, "device", validators.one_of(("cpu", "gpu"))),
            constraints=constraints,
            dialect=Dialect.INC,
        )

    def _warn_without_effect(self, heeded: Collection[str] = ()) -> None:
        for name, why in _WITHOUT_MEANING.items():
            if name in heeded:
                continue
            holder = self.tuning_criterion if name == "strategy_kwargs" else self
            value = getattr(holder, name, None)
            if value not in _UNSET:
                logger.warning("%s=%r has no effect: %s", name, value, why)


def _validate_attribute(holder: object, name: str, validator: Validator[Any]) -> Any:
    """Return a validated attribute; None counts as not set."""
    value = getattr(holder, name)
    return validate_option(name, validator, getattr(type(holder), name) if value is None else value)


def _resolve_strategy(name: str | None) -> str | None:
    if name is None:
        return None
    strategy = validate_option("strategy", values.TEXT, name).lower()
    if strategy in OTHER_STRATEGIES:
        _SOURCE.warn_ignored(("strategy", name), OTHER_STRATEGIES[strategy])
    return STRATEGIES.get(strategy, strategy)


def _convert_criterion(loss: AccuracyCriterion) -> criterion.AccuracyCriterion:
    return criterion.AccuracyCriterion(
        _validate_attribute(loss, "tolerable_loss", values.ANY_SHARE),
        relative=loss.criterion == "relative",
        higher_is_better=loss.higher_is_better,
        any_tolerance=True,
        any_baseline=True,
    )


def _convert_tuning_options(loss: AccuracyCriterion, search: TuningCriterion) -> dict[str, Any]:
    objective = _validate_attribute(search, "objective", values.OBJECTIVE)
    if isinstance(objective, str) and objective in IGNORED_OBJECTIVES:
        _SOURCE.warn_ignored(("objective", objective), IGNORED_OBJECTIVES[objective])
        objective = None
    options = dict(
        strategy=_resolve_strategy(search.strategy),
        accuracy_criterion=_convert_criterion(loss),
        objective=objective,
        exit_policy=criterion.ExitPolicy(
            timeout=_validate_attribute(search, "timeout", values.ANY_SECONDS),
            max_trials=_validate_attribute(search, "max_trials", values.validate_raised_integer(1)),
        ),
    )
    return {name: value for name, value in options.items() if value is not None}


def _parse_constraints(section: str, **limits: Mapping[str, Any] | None) -> Constraints:
    options = {name: limit for name, limit in limits.items() if limit}
    return settings_from({section: options}, _SOURCE.origin, Dialect.INC).constraints


@dataclass
class PostTrainingQuantConfig(_Conversion):
    """Post-training quantization to INT8.

    Attributes:
        approach: `static`, `dynamic`, `weight_only` or `auto`.
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
        for approach in _APPROACHES:
            if approach in str(self.approach):
                self.approach = approach
        check_one_of("approach", self.approach, tuple(_APPROACHES))

    def settings(self) -> Settings:
        """Return the equivalent settings; raise ConfigurationError for an invalid value."""
        sizes = self.calibration_sampling_size
        listed = [sizes] if isinstance(sizes, int) else list(sizes)
        allowed = [
            precision for precision in ("int8", "bf16") if precision not in self.excluded_precisions
        ]
        # BF16 is searched only if INT8 is excluded, as without `use_bf16` in a tuning file.
        precisions: Sequence[str] = ("int8",) if len(allowed) == 2 else allowed or ("fp32",)
        if self.approach == "weight_only":
            limits, bits = weight_only_limits(self.op_type_dict, self.op_name_dict)
            precisions = bits or precisions
        else:
            limits = _parse_constraints(
                "quantization", op_wise=self.op_name_dict, optype_wise=self.op_type_dict
            )
        return self.convert_to_settings(
            parse_precisions(precisions),
            approach=INT8_APPROACHES[_APPROACHES[self.approach]],
            sampling_size=validate_option("calibration_sampling_size", values.SIZES, listed),
            constraints=limits,
        )


@dataclass
class MixedPrecisionConfig(_Conversion):
    """Conversion of a trained model to 16 bits.

    Attributes:
        precisions: `bf16` or `fp16`, or a list of both.
    """

    precisions: str | Sequence[str] = "bf16"

    def settings(self) -> Settings:
        """Return the equivalent settings; raise ConfigurationError for an invalid value."""
        limits = _parse_constraints("mixed_precision", op_wise=self.op_name_dict)
        requested = parse_precisions(self.precisions or "fp32")
        allowed = tuple(
            precision for precision in requested if precision not in self.excluded_precisions
        )
        return self.convert_to_settings(allowed or (Precision.FP32,), constraints=limits)


@dataclass
class QuantizationAwareTrainingConfig(_Conversion):
    """Training with the rounding of INT8.

    Attributes:
        quant_format, reduce_range, quant_level: no effect; a warning is logged if set.
    """

    reduce_range: bool | None = None
    quant_format: str = "default"
    quant_level: str | int = "auto"

    #: The approach, as scripts read it.
    approach: ClassVar[str] = "quant_aware_training"

    def rules(self) -> ConversionRules:
        """Return the rules of INT8 ops; raise ConfigurationError for an invalid value."""
        self._warn_without_effect()
        constraints = _parse_constraints(
            "quantization", op_wise=self.op_name_dict, optype_wise=self.op_type_dict
        )
        int8 = OpConstraint((Precision.INT8,), approaches=(Approach.STATIC,), is_lenient=True)
        allows_int8 = "int8" not in self.excluded_precisions
        named = {rf"(?:{pattern})\Z": limit for pattern, limit in constraints.op_wise.items()}
        return ConversionRules(
            ((frozenset(), int8),) if allows_int8 else (),
            by_type=constraints.optype_wise,
            by_name=named,
        )

    def criterion(self) -> criterion.AccuracyCriterion:
        """Return the tolerable loss; raise ConfigurationError for an invalid tuning criterion."""
        options = _convert_tuning_options(self.accuracy_criterion, self.tuning_criterion)
        loss: criterion.AccuracyCriterion = options["accuracy_criterion"]
        return loss


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


__getattr__ = make_absent_getter(globals())
