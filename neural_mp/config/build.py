"""Content of a tuning file → `Settings`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neural_mp.amp import OPTIONS as AMP_OPTIONS
from neural_mp.amp import AutoMixedPrecisionOptions
from neural_mp.config.inc_dialect import (
    IGNORED,
    METRIC_DIRECTIONS,
    OTHER_STRATEGIES,
    STRATEGIES,
    Ignored,
    detect_file_dialect,
    get_value_at,
    with_target,
    without_ignored,
)
from neural_mp.config.options import OPTIONS, Options
from neural_mp.config.schema import SCHEMAS
from neural_mp.config.settings import (
    EvaluationSettings,
    MetricSettings,
    PerformanceSettings,
    Settings,
    select_used_content,
    train_settings,
)
from neural_mp.config.source import KeyPath, Source
from neural_mp.config.values import (
    EACH,
    NO_METRICS,
    build_section_criterion,
    parse_bool_list,
    parse_number_list,
)
from neural_mp.core.criterion import ExitPolicy
from neural_mp.core.enums import Dialect, QuantDType
from neural_mp.core.precision import INTEGERS, Precision, Precisions
from neural_mp.core.quant_spec import QUANT_CHOICES
from neural_mp.errors import ConfigurationError, error_path
from neural_mp.space.capability import Constraints, OpConstraint, QuantConstraint

_OP_WISE = ("quantization", "mixed_precision", "graph_optimization")
_CONVERSIONS = ("mixed_precision", "graph_optimization")
_ACCURACY: KeyPath = ("evaluation", "accuracy")
_PERFORMANCE: KeyPath = ("evaluation", "performance")


def build_settings(source: Source, dialect: Dialect | None = None) -> Settings:
    """Return the settings of a file.

    Args:
        source: the file as it was read.
        dialect: vocabulary of the file; default: detected from the content.

    Raises:
        ConfigurationError: a key is unknown, a value is of the wrong type or out of range, or
            two keys contradict each other.
    """
    dialect = dialect or detect_file_dialect(source.data)
    ignored = source.warn_ignored
    content: Mapping[str, Any] = source.data
    if dialect is Dialect.INC:
        with source.locate_errors(()):
            content = with_target(select_used_content(content, ignored))
    content = without_ignored(content, ignored)
    source.check_repeated(dialect)
    with source.locate_errors(()):
        data = SCHEMAS[dialect](content)
        quantization = data.get("quantization", {})
        train, epochs = train_settings(quantization.get("train"), dialect)
        options = _read_options(data, dialect, ignored)
        precisions = _resolve_precisions(data, "quantization" in source.data, ignored)
        section = data.get("mixed_precision", {})
        amp = {option: section[option] for option in AMP_OPTIONS if option in section}
        return Settings(
            Options(**options, **_drop_missing_options(precisions=precisions, epochs=epochs)),
            **_drop_missing_options(device=data.get("device")),
            constraints=_merge_constraints(data),
            amp=AutoMixedPrecisionOptions(**amp) if amp else None,
            calibration_dataloader=quantization.get("calibration", {}).get("dataloader"),
            train=train,
            evaluation=_read_evaluation(data.get("evaluation", {}), dialect, ignored),
            dialect=dialect,
            source=source,
        )


def _drop_missing_options(**options: object) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _read_options(data: Mapping[str, Any], dialect: Dialect, ignored: Ignored) -> dict[str, Any]:
    options = {
        name: get_value_at(data, option.path) for name, option in OPTIONS.items() if option.path
    }
    options["strategy"] = _resolve_strategy(options["strategy"], dialect, ignored)
    options["workspace"], options["resume"] = _resolve_workspace(
        options["workspace"], options["resume"], ignored
    )
    if options["exit_policy"] is not None:
        with error_path(*OPTIONS["exit_policy"].path):
            options["exit_policy"] = ExitPolicy(**options["exit_policy"])
    if options["accuracy_criterion"] is not None or dialect is Dialect.INC:
        with error_path(*OPTIONS["accuracy_criterion"].path):
            section = options["accuracy_criterion"] or {}
            options["accuracy_criterion"] = build_section_criterion(section, dialect)
    del options["precisions"], options["epochs"]  # read with further keys
    for name in ("strategy", "workspace", "inputs", "outputs"):
        options[name] = options[name] or None  # an empty value is the default
    return _drop_missing_options(**options)


def _error_at_path(path: KeyPath, message: str) -> ConfigurationError:
    error = ConfigurationError(message)
    error.keys = path
    return error


def _resolve_precisions(
    data: Mapping[str, Any], quantized: bool, ignored: Ignored
) -> tuple[Precision, ...] | None:
    """Return the precisions to search; INT8 by default if there is a quantization section."""
    requested = {
        section: data[section]["precisions"]
        for section in _CONVERSIONS
        if "precisions" in data.get(section, {})
    }
    if len(set(requested.values())) > 1:
        raise _error_at_path(
            ("graph_optimization", "precisions"),
            "differs from mixed_precision.precisions; remove one of the two",
        )
    bf16_keys: tuple[KeyPath, ...] = (("use_bf16",), ("quantization", "use_bf16"))
    bf16_key = next((key for key in bf16_keys if get_value_at(data, key)), None)
    if not requested and quantized:
        return (Precision.INT8, Precision.BF16) if bf16_key else (Precision.INT8,)
    if bf16_key:
        why = "precisions are given" if requested else "there is no quantization section"
        ignored(bf16_key, f"{why}; add bf16 to mixed_precision.precisions instead")
    return next(iter(requested.values()), None)


def _merge_constraints(data: Mapping[str, Any]) -> Constraints:
    quantization = data.get("quantization", {})
    by_name: dict[str, OpConstraint] = {}
    sections: dict[str, str] = {}
    for section in _OP_WISE:
        for name, limits in data.get(section, {}).get("op_wise", {}).items():
            if name in by_name:
                raise _error_at_path(
                    (section, "op_wise", name),
                    f"{sections[name]}.op_wise already limits {name!r}; remove one of the two",
                )
            by_name[name] = _read_op_limits(limits, section, "op_wise", name)
            sections[name] = section
    by_type = quantization.get("optype_wise", {})
    return Constraints(
        _read_op_limits(quantization.get("model_wise", {}), "quantization", "model_wise"),
        {
            name: _read_op_limits(by_type[name], "quantization", "optype_wise", name)
            for name in by_type
        },
        by_name,
    )


def _read_op_limits(limits: Mapping[str, Any], *path: str) -> OpConstraint:
    weight, of_weight = _read_tensor_limits(limits.get("weight", {}))
    activation, of_activation = _read_tensor_limits(limits.get("activation", {}))
    if "precisions" in limits:
        allowed = limits["precisions"]
    elif of_weight is None or of_activation is None:
        allowed = of_weight or of_activation
    else:
        allowed = tuple(p for p in of_weight if p in of_activation)
        if not allowed:
            raise _error_at_path(
                path,
                f"the dtypes of weight ({', '.join(of_weight)}) and activation "
                f"({', '.join(of_activation)}) must have a common precision, got none; add one",
            )
    return OpConstraint(allowed, weight, activation)


def _read_tensor_limits(
    limits: Mapping[str, Any],
) -> tuple[QuantConstraint, tuple[Precision, ...] | None]:
    """Return the limits on a tensor's quantization, and the precisions that its dtypes allow."""
    allowed = {kind: tuple(choices) for kind, choices in limits.items() if kind != "dtype"}
    if "dtype" not in limits:
        return QuantConstraint(**allowed), None
    integers = tuple(name for name in limits["dtype"] if name in QUANT_CHOICES["dtype"])
    floats = [name for name in limits["dtype"] if name not in integers]
    named = {*floats, *(INTEGERS[QuantDType(name).bits] for name in integers)}
    precisions = Precisions(p for p in Precision if p in named)
    return QuantConstraint(dtype=integers or None, **allowed), precisions


def _resolve_strategy(name: str | None, dialect: Dialect, ignored: Ignored) -> str | None:
    if name is None or dialect is Dialect.OWN:
        return name
    key = name.lower()
    if key in OTHER_STRATEGIES:
        ignored(("tuning", "strategy", "name", name), OTHER_STRATEGIES[key])
    return STRATEGIES.get(key, key)


def _resolve_workspace(
    path: str | None, resume: bool | str | None, ignored: Ignored
) -> tuple[str | None, bool | None]:
    """Return the folder of the history, and whether to resume its run."""
    if not isinstance(resume, str):
        return path, resume
    if path is not None and path != resume:
        ignored(("tuning", "workspace", "path"), f"the run in {resume!r} is resumed there")
    return resume, True


def _read_evaluation(
    data: Mapping[str, Any], dialect: Dialect, ignored: Ignored
) -> EvaluationSettings:
    accuracy = data.get("accuracy", {})
    return EvaluationSettings(
        dataloader=accuracy.get("dataloader"),
        postprocess=accuracy.get("postprocess", {}).get("transform"),
        performance=_read_performance(data.get("performance", {}), ignored),
        metrics=_read_metrics(accuracy, dialect, ignored),
    )


def _read_metrics(
    accuracy: Mapping[str, Any], dialect: Dialect, ignored: Ignored
) -> tuple[MetricSettings, ...]:
    several, single = accuracy.get("multi_metrics"), accuracy.get("metric")
    if several is not None and single is not None:
        raise _error_at_path(
            _ACCURACY, "metric and multi_metrics exclude each other; remove one of them"
        )
    if several is not None:
        with error_path(*_ACCURACY, "multi_metrics"):
            return _read_several_metrics(several, dialect, ignored)
    if single is None:
        return ()
    with error_path(*_ACCURACY, "metric"):
        if len(single) != 1:
            raise ConfigurationError(
                f"must name one metric, got {', '.join(single) or 'none'}; name several metrics "
                f"in multi_metrics"
            )
        return tuple(_read_metric(name, options) for name, options in single.items())


def _read_several_metrics(
    value: Mapping[str, Any], dialect: Dialect, ignored: Ignored
) -> tuple[MetricSettings, ...]:
    metrics = [
        _read_metric(name, options) for name, options in value.items() if name not in NO_METRICS
    ]
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names) or not names:
        rule = "must name each metric once" if names else "must name at least one metric"
        raise ConfigurationError(f"{rule}, got {', '.join(names) or 'none'}")
    weights = _read_metric_weights(value.get("weight"), names, dialect)
    directions: Sequence[bool | None] = [None] * len(names)
    higher = value.get("higher_is_better")
    if higher is not None and None in weights:
        with error_path("higher_is_better"):
            directions = parse_bool_list("of each", higher, len(names))
    elif higher is not None:
        ignored(METRIC_DIRECTIONS, IGNORED[".".join(METRIC_DIRECTIONS)])
    rows = zip(metrics, weights, directions, strict=True)
    return tuple(MetricSettings(m.name, m.options, weight, up) for m, weight, up in rows)


def _read_metric(name: str, options: object) -> MetricSettings:
    with error_path(name):
        if not name.strip():
            raise ConfigurationError(f"expected the name of a metric, found {name!r}")
        key = name.strip() if ":" in name else name.strip().lower()
        if options is None or isinstance(options, dict):
            return MetricSettings(key, options or {})
        if key != "topk":
            raise ConfigurationError(f"expected a mapping of its options, found {options!r}")
        if not isinstance(options, int) or isinstance(options, bool) or options < 1:
            raise ConfigurationError(f"expected a whole number from 1, found {options!r}")
        return MetricSettings(key, {"k": options})


def _read_metric_weights(
    value: object, names: list[str], dialect: Dialect
) -> Sequence[float | None]:
    """Return one weight per metric; None for each if every metric has to meet the target."""
    if value == EACH or (value is None and dialect is Dialect.INC):
        return [None if len(names) > 1 else 1.0] * len(names)
    if value is None:
        return [1.0 / len(names)] * len(names)
    with error_path("weight"):
        return parse_number_list(f"one for each of {', '.join(names)}", value, len(names))


def _read_performance(data: Mapping[str, Any], ignored: Ignored) -> PerformanceSettings:
    settings = {key: value for key, value in data.items() if key != "configs"}
    if settings.get("iteration") == -1:
        ignored((*_PERFORMANCE, "iteration"), "-1 has no meaning; the default is used")
        del settings["iteration"]
    configs = data.get("configs", {})
    theirs = configs.get("cores_per_instance")
    ours = settings.setdefault("cores_per_instance", theirs)
    if theirs is not None and ours != theirs:
        raise _error_at_path(
            (*_PERFORMANCE, "cores_per_instance"),
            f"must equal configs.cores_per_instance ({theirs}), got {ours}; remove one of the two",
        )
    settings.setdefault("instances", configs.get("num_of_instance", 1))
    return PerformanceSettings(**settings)
