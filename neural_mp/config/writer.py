"""`Settings` → YAML that reads back to equal settings."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from neural_mp.amp import AmpDataType, AutoMixedPrecisionOptions
from neural_mp.config.options import OPTIONS, Options
from neural_mp.config.settings import (
    TRAINED_APPROACH,
    EvaluationSettings,
    MetricSettings,
    Settings,
)
from neural_mp.config.source import KeyPath
from neural_mp.config.values import ANY, EACH, NO_METRICS
from neural_mp.core.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.core.enums import Dialect
from neural_mp.data.loader import DescribedLoader
from neural_mp.errors import ConfigurationError
from neural_mp.runs.report import RunSource, Setting
from neural_mp.space.capability import Constraints, OpConstraint
from neural_mp.util.string_enum import StringEnum

logger = logging.getLogger(__name__)

#: Options that do not describe the run: its history, and the rights and displays of a process.
_OF_THE_PROCESS = frozenset({"workspace", "storage", "resume", "trust", "listener", "track"})
#: Options of Python alone that a tuning file has in another form.
_EVALUATION = frozenset({"metric", "eval_dataloader"})
#: `1e-3` is a string in YAML 1.1, which PyYAML writes, but a number for our reader.
_FLOAT_RE = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class _Dumper(yaml.SafeDumper):
    """Quotes strings that our reader would parse as a number."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True: repeat a value instead of referring to its first occurrence."""
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    # Unquoted, these characters read back as a space.
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_multi_representer(
    StringEnum, lambda dumper, member: _represent_text(dumper, member.value)
)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT_RE, list("-+0123456789."))


def settings_to_yaml(settings: Settings) -> str:
    """Write settings as YAML; options that are not set are left out.

    Returns:
        Text that `parse_settings` reads back to equal settings.

    Raises:
        ConfigurationError: an option holds an object that YAML cannot represent, or the metrics
            cannot be distinguished by name.
    """
    quantization = {
        **({} if settings.train is None else {"train": _drop_unset(vars(settings.train))}),
        "calibration": _drop_unset({"dataloader": settings.calibration_dataloader}),
        **_dump_constraints(settings.constraints),
    }
    data: dict[str, Any] = {
        **({"version": 1.0} if settings.dialect is Dialect.INC else {}),
        "device": settings.device,
        "mixed_precision": {"precisions": ANY, **_dump_amp_options(settings.amp)},
        "quantization": quantization,
        "evaluation": _dump_evaluation(settings.evaluation),
    }
    for name, option in OPTIONS.items():
        value = getattr(settings.options, name)
        if option.path and (settings.options.is_set(name) or value != option.default):
            _set_value_at(data, option.path, _dump_option_value(value, settings.dialect))
    if settings.train is not None and settings.dialect is Dialect.INC:
        quantization["approach"] = TRAINED_APPROACH  # other approaches do not train there
    try:
        text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"the settings cannot be written as YAML: {error}") from error
    return str(text)


def _drop_unset(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop None, empty tuples and empty lists; return tuples as lists."""
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in fields.items()}
    return {key: v for key, v in plain.items() if v is not None and v != []}


def _dump_amp_options(options: AutoMixedPrecisionOptions | None) -> dict[str, Any]:
    if options is None:
        return {}
    data_type = AmpDataType(options.data_type).name if options.data_type is not None else None
    return _drop_unset({**vars(options), "data_type": data_type})


def _dump_constraints(constraints: Constraints) -> dict[str, Any]:
    limits: dict[str, dict[str, Any]] = {
        "model_wise": _dump_op_limits(constraints.model_wise),
        "optype_wise": {kind: _dump_op_limits(o) for kind, o in constraints.optype_wise.items()},
        "op_wise": {name: _dump_op_limits(item) for name, item in constraints.op_wise.items()},
    }
    return {key: value for key, value in limits.items() if value}


def _dump_op_limits(limit: OpConstraint) -> dict[str, Any]:
    weight, activation = _drop_unset(vars(limit.weight)), _drop_unset(vars(limit.activation))
    data = {"weight": weight or None, "activation": activation or None}
    # Without this key, the reader derives the precisions from the dtypes.
    if limit.precisions is not None or "dtype" in {*weight, *activation}:
        precisions = ANY if limit.precisions is None else list(map(str, limit.precisions))
        return _drop_unset({"precisions": precisions, **data})
    return _drop_unset(data)


def _set_value_at(data: dict[str, Any], path: KeyPath, value: object) -> None:
    *sections, key = map(str, path)
    for section in sections:
        data = data.setdefault(section, {})
    data[key] = value


def _dump_option_value(value: object, dialect: Dialect) -> Any:
    if isinstance(value, AccuracyCriterion):
        kind = "relative" if value.relative else "absolute"
        permissions = ("any_tolerance", "any_baseline") if dialect is Dialect.OWN else ()
        granted = {name: True for name in permissions if getattr(value, name)}
        direction = {"higher_is_better": value.higher_is_better}
        return _drop_unset({kind: value.tolerance, **direction, **granted})
    if isinstance(value, ExitPolicy):
        return dict(vars(value))
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _dump_evaluation(evaluation: EvaluationSettings) -> dict[str, Any]:
    postprocess = evaluation.postprocess
    accuracy = {
        **_dump_metrics(evaluation),
        "dataloader": evaluation.dataloader,
        "postprocess": None if postprocess is None else {"transform": postprocess},
    }
    sections = {
        "accuracy": _drop_unset(accuracy),
        "performance": _drop_unset(vars(evaluation.performance)),
    }
    return _drop_unset(sections)


def _dump_metrics(evaluation: EvaluationSettings) -> dict[str, Any]:
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


def describe_source(options: Options, settings: Settings) -> RunSource | None:
    """Return the options of a run as text; None if one of them is an object in Python.

    `settings` are those of the tuning file, on top of which `options` were set.
    """
    written = Options()
    for name, value in vars(options).items():
        if name in OPTIONS and name not in _OF_THE_PROCESS | _EVALUATION and not _is_unset(value):
            if not OPTIONS[name].path:
                return None
            vars(written)[name] = str(value) if isinstance(value, Path) else value
    evaluation = _evaluation_of(options, settings)
    if evaluation is None or not isinstance(written.model, str):
        return None
    try:
        text = settings_to_yaml(replace(settings, options=written, evaluation=evaluation))
    except ConfigurationError:
        logger.debug("the options cannot be stored with the run", exc_info=True)
        return None
    return RunSource(text, str(Path.cwd()))


def describe_settings(options: Options, file: Settings) -> dict[str, Setting]:
    """Return option → value and source, for options that affect the run.

    An option set to its default counts as not set.
    """
    settings = {}
    for name, option in OPTIONS.items():
        if not option.shown:
            continue  # arrays, for example, do not compare
        value = getattr(options, name)
        if value != getattr(file.options, name):
            origin = "Python"
        elif value != option.default:
            origin = "the file"
        else:
            origin = "default"
        text = _in_words(value)
        if text:
            settings[name] = Setting(text, origin)
    return settings


def _in_words(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, ExitPolicy):
        limit = f"{value.timeout:g} s" if value.timeout else "no time limit"
        return f"at most {value.max_trials} trials, {limit}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_in_words(part)}" for name, part in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(_in_words(part) for part in value)
    return str(value)


def _is_unset(value: object) -> bool:
    return value is None or (isinstance(value, dict | tuple | str) and not value)


def _evaluation_of(options: Options, settings: Settings) -> EvaluationSettings | None:
    """Return the section with metric and data of `options`; None if these are objects."""
    evaluation = settings.evaluation
    is_own = settings.dialect is Dialect.OWN
    if options.metric is not None:
        if not (is_own and isinstance(options.metric, str)):
            return None
        evaluation = replace(evaluation, metrics=(MetricSettings(options.metric),))
    if options.eval_dataloader is not None:
        if not (is_own and isinstance(options.eval_dataloader, DescribedLoader)):
            return None
        evaluation = replace(evaluation, dataloader=options.eval_dataloader.spec)
    return evaluation
