"""`Settings` → YAML that reads back to equal settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from neural_mp.amp import AmpDataType, AutoMixedPrecisionOptions
from neural_mp.config.settings import (
    EvaluationSettings,
    Settings,
    TrainSettings,
    TuningSettings,
)
from neural_mp.config.training import TRAINED_APPROACH
from neural_mp.config.values import ANY, EACH, NO_METRICS
from neural_mp.core.enums import Dialect
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError
from neural_mp.space.capability import Constraints, OpConstraint
from neural_mp.util.string_enum import StringEnum

#: `1e-3` is a string in YAML 1.1, which PyYAML writes, but a number for our reader.
_FLOAT_RE = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class _Dumper(yaml.SafeDumper):
    """Quotes strings that our reader would parse as a number."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True: repeat a value instead of referring to its first occurrence."""
        return True


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    # Unquoted, these characters read back as a space.
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _word(dumper: _Dumper, member: StringEnum) -> yaml.Node:
    return _text(dumper, member.value)


_Dumper.add_representer(str, _text)
_Dumper.add_multi_representer(StringEnum, _word)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT_RE, list("-+0123456789."))


def settings_to_yaml(settings: Settings) -> str:
    """Write all settings as YAML, including default values.

    Returns:
        Text that `parse_settings` reads back to equal settings.

    Raises:
        ConfigurationError: an option holds an object that YAML cannot represent, or the metrics
            cannot be distinguished by name.
    """
    data = {
        **({"version": 1.0} if settings.dialect is Dialect.INC else {}),
        "model": _given(vars(settings.model)) or None,
        "device": settings.device,
        "target": settings.target,
        "mixed_precision": {"precisions": _precisions(settings.precisions), **_amp(settings.amp)},
        "quantization": {
            **_given({"approach": _approach(settings), "train": _train(settings.train)}),
            "calibration": _given(vars(settings.calibration)),
            **_constraints(settings.constraints),
        },
        "tuning": _tuning(settings.tuning, settings.dialect),
        "evaluation": _evaluation(settings.evaluation),
    }
    try:
        text = yaml.dump(_given(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"the settings cannot be written as YAML: {error}") from error
    return str(text)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop None, empty tuples and empty lists; return tuples as lists."""
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in fields.items()}
    return {key: v for key, v in plain.items() if v is not None and v != []}


def _amp(options: AutoMixedPrecisionOptions | None) -> dict[str, Any]:
    if options is None:
        return {}
    data_type = AmpDataType(options.data_type).name if options.data_type is not None else None
    return _given({**vars(options), "data_type": data_type})


def _precisions(precisions: tuple[Precision, ...] | None) -> Any:
    return ANY if precisions is None else [str(precision) for precision in precisions]


def _constraints(constraints: Constraints) -> dict[str, Any]:
    wise = {
        "optype_wise": {name: _limit(item) for name, item in constraints.optype_wise.items()},
        "op_wise": {name: _limit(item) for name, item in constraints.op_wise.items()},
    }
    limits = {"model_wise": _limit(constraints.model_wise), **wise}
    return {key: value for key, value in limits.items() if value}


def _limit(limit: OpConstraint) -> dict[str, Any]:
    weight, activation = _given(vars(limit.weight)), _given(vars(limit.activation))
    data = {"weight": weight or None, "activation": activation or None}
    # Without this key, the reader derives the precisions from the dtypes.
    if limit.precisions is not None or "dtype" in {*weight, *activation}:
        return _given({"precisions": _precisions(limit.precisions), **data})
    return _given(data)


def _approach(settings: Settings) -> str | None:
    # In files of INC, other approaches do not train.
    trained = settings.train is not None and settings.dialect is Dialect.INC
    return TRAINED_APPROACH if trained else settings.approach


def _train(train: TrainSettings | None) -> dict[str, Any] | None:
    return None if train is None else _given(vars(train))


def _tuning(tuning: TuningSettings, dialect: Dialect) -> dict[str, Any]:
    criterion = tuning.criterion
    kind = "relative" if criterion.relative else "absolute"
    permissions = ("any_tolerance", "any_baseline") if dialect is Dialect.OWN else ()
    return _given(
        {
            "strategy": None if tuning.strategy is None else {"name": tuning.strategy},
            "accuracy_criterion": _given(
                {
                    kind: criterion.tolerance,
                    "higher_is_better": criterion.higher_is_better,
                    **{name: getattr(criterion, name) or None for name in permissions},
                }
            ),
            "objective": (
                dict(tuning.objective)
                if isinstance(tuning.objective, Mapping)
                else tuning.objective
            ),
            "min_speedup": tuning.min_speedup,
            "max_bytes": tuning.max_bytes,
            "max_bits": tuning.max_bits,
            "workload": None if tuning.workload is None else dict(tuning.workload),
            "exit_policy": dict(vars(tuning.exit_policy)),
            "random_seed": tuning.random_seed,
            "rounding_steps": tuning.rounding_steps,
            "workspace": _given({"path": tuning.workspace, "resume": tuning.resume}),
            "storage": tuning.storage,
            "early_stopping": tuning.early_stopping,
            "cache": tuning.cache,
            "workers": tuning.workers,
        }
    )


def _evaluation(evaluation: EvaluationSettings) -> dict[str, Any]:
    postprocess = evaluation.postprocess
    accuracy = {
        **_metrics(evaluation),
        "dataloader": evaluation.dataloader,
        "max_batches": evaluation.max_batches,
        "label_key": evaluation.label_key,
        "postprocess": None if postprocess is None else {"transform": postprocess},
    }
    sections = {
        "accuracy": _given(accuracy) or None,
        "performance": _given(vars(evaluation.performance)),
    }
    return _given(sections)


def _metrics(evaluation: EvaluationSettings) -> dict[str, Any]:
    metrics = evaluation.metrics
    named = {metric.name: dict(metric.options) for metric in metrics}
    if len(metrics) == 1 and metrics[0].weight == 1.0:
        return {"metric": named}
    if len(named) < len(metrics) or any(name in named for name in NO_METRICS):
        names = ", ".join(metric.name for metric in metrics)
        raise ConfigurationError(
            f"metrics must have unique names, not {' or '.join(NO_METRICS)}, got {names}"
        )
    if not metrics:
        return {}
    if any(metric.weight is None for metric in metrics):
        flags = [metric.higher_is_better for metric in metrics]
        directions = {} if None in flags else {"higher_is_better": flags}
        return {"multi_metrics": {**named, "weight": EACH, **directions}}
    return {"multi_metrics": {**named, "weight": [metric.weight for metric in metrics]}}
