"""Validated plain data → `Settings`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from neural_mp.amp import OPTIONS, AutoMixedPrecisionOptions
from neural_mp.config.evaluation import evaluation
from neural_mp.config.inc_dialect import (
    FRAMEWORKS,
    IGNORED_APPROACHES,
    IGNORED_OBJECTIVES,
    IGNORED_QUANT_WORDS,
    INT8_APPROACHES,
    OTHER_STRATEGIES,
    QUANT_WORDS,
    STRATEGIES,
    dialect_of,
)
from neural_mp.config.schema import ANY, validated
from neural_mp.config.settings import (
    CalibrationSettings,
    ModelSettings,
    Settings,
    TuningSettings,
)
from neural_mp.config.source import KeyPath, Source
from neural_mp.config.values import split
from neural_mp.core.enums import Dialect
from neural_mp.core.precision import QUANT_CHOICES, Precision, parse_precisions
from neural_mp.errors import did_you_mean
from neural_mp.space.capability import Constraints, OpConstraint, QuantConstraint
from neural_mp.tuning.criterion import AccuracyCriterion, ExitPolicy, check_min_speedup
from neural_mp.tuning.executors import read_workers

_OP_WISE = ("quantization", "mixed_precision", "graph_optimization")


def constraints(source: Source, data: Mapping[str, Any]) -> Constraints:
    """Merge the limits of all sections.

    Raises:
        ConfigurationError: limits contradict each other, or two sections limit the same op.
    """
    quantization = data.get("quantization", {})
    path: KeyPath = ("quantization", "optype_wise")
    by_type = {
        name: _limit(source, limits, (*path, name))
        for name, limits in quantization.get("optype_wise", {}).items()
    }
    model_wise = quantization.get("model_wise", {})
    return Constraints(
        model_wise=_limit(source, model_wise, ("quantization", "model_wise")),
        optype_wise=by_type,
        op_wise=_op_wise(source, data),
    )


def precisions(source: Source, value: object, path: KeyPath) -> tuple[Precision, ...] | None:
    """Return the precisions at a key; None for `any`.

    Raises:
        UnknownPrecisionError: a precision does not exist, or none is given.
    """
    words = [part for word in split(value) for part in split(word)]
    if [word.lower() for word in words] == [ANY]:
        return None
    with source.at(path):
        return parse_precisions(words)


def _op_wise(source: Source, data: Mapping[str, Any]) -> dict[str, OpConstraint]:
    found: dict[str, OpConstraint] = {}
    first: dict[str, str] = {}
    for section in _OP_WISE:
        for name, limits in data.get(section, {}).get("op_wise", {}).items():
            path: KeyPath = (section, "op_wise", name)
            if name in found:
                raise source.error(path, f"{first[name]}.op_wise already limits {name!r}")
            found[name] = _limit(source, limits, path)
            first[name] = section
    return found


def _limit(source: Source, limits: Mapping[str, Any], path: KeyPath) -> OpConstraint:
    weight, of_weight = _tensor(source, limits.get("weight", {}), (*path, "weight"))
    activation, of_activation = _tensor(source, limits.get("activation", {}), (*path, "activation"))
    if "precisions" in limits:
        allowed = precisions(source, limits["precisions"], (*path, "precisions"))
    elif of_weight is None or of_activation is None:
        allowed = of_weight or of_activation
    else:
        allowed = tuple(p for p in of_weight if p in of_activation)
        if not allowed:
            words = f"{', '.join(of_weight)} and the activation {', '.join(of_activation)}"
            raise source.error(
                path, f"no precision is left: the dtype of the weight allows {words}"
            )
    return OpConstraint(allowed, weight, activation)


def _tensor(
    source: Source, limits: Mapping[str, Any], path: KeyPath
) -> tuple[QuantConstraint, tuple[Precision, ...] | None]:
    """Return the limits on a tensor's quantization, and the precisions that its dtypes allow."""
    allowed = {
        kind: _words(source, words, (*path, kind))
        for kind, words in limits.items()
        if kind != "dtype"
    }
    dtypes = limits.get("dtype")
    if dtypes is None:
        return QuantConstraint(**allowed), None
    whole = tuple(dict.fromkeys(word for word in dtypes if word in QUANT_CHOICES["dtype"]))
    real = [word for word in dtypes if word not in QUANT_CHOICES["dtype"]]
    left = parse_precisions([*real, *([Precision.INT8] if whole else [])])
    return QuantConstraint(dtype=whole or None, **allowed), left


def _words(source: Source, words: list[str], path: KeyPath) -> tuple[str, ...] | None:
    without_meaning = IGNORED_QUANT_WORDS.get(str(path[-1]), {})
    for word in words:
        if word in without_meaning:
            source.ignored((*path, word), without_meaning[word])
    ours = (QUANT_WORDS.get(word, word) for word in words if word not in without_meaning)
    return tuple(dict.fromkeys(ours)) or None


_CONVERSIONS = ("mixed_precision", "graph_optimization")


def build(source: Source, dialect: Dialect | None = None) -> Settings:
    """Return the settings of a file.

    Args:
        source: the file as it was read.
        dialect: vocabulary of the file; default: detected from the content.

    Raises:
        ConfigurationError: a key is unknown, a value is of the wrong type or out of range, or
            two keys contradict each other.
    """
    dialect = dialect or dialect_of(source.data)
    source.check_repeated(dialect)
    data = validated(source, dialect)
    calibration = data.get("quantization", {}).get("calibration", {})
    return Settings(
        model=_model(source, data.get("model", {})),
        device=data.get("device", "cpu"),
        target=data.get("target", Settings.target),
        precisions=_precisions(source, data),
        constraints=constraints(source, data),
        amp=_amp(data.get("mixed_precision", {})),
        approach=_approach(source, data.get("quantization", {})),
        calibration=CalibrationSettings(**calibration),
        tuning=_tuning(source, data.get("tuning", {}), dialect),
        evaluation=evaluation(source, data.get("evaluation", {}), dialect),
        dialect=dialect,
        source=source,
    )


def _model(source: Source, data: Mapping[str, Any]) -> ModelSettings:
    framework = data.get("framework")
    if framework is not None:
        plug_ins = {entry.name for entry in metadata.entry_points(group="neural_mp.adaptors")}
        known = {**FRAMEWORKS, **{name: name for name in plug_ins}}
        if framework not in known and framework.lower() not in known:
            raise source.error(
                ("model", "framework"),
                f"{framework!r} is no framework we have{did_you_mean(framework, known)}",
            )
        framework = known.get(framework) or known[framework.lower()]
    return ModelSettings(
        name=data.get("name"),
        framework=framework,
        inputs=tuple(data.get("inputs", ())),
        outputs=tuple(data.get("outputs", ())),
        capture=data.get("capture", ModelSettings.capture),
    )


def _approach(source: Source, data: Mapping[str, Any]) -> str | None:
    word = data.get("approach")
    if word is None:
        return None
    if word in IGNORED_APPROACHES:
        source.ignored(("quantization", "approach", word), IGNORED_APPROACHES[word])
        return None
    return INT8_APPROACHES.get(word, word)


def _precisions(source: Source, data: Mapping[str, Any]) -> tuple[Precision, ...] | None:
    given = {
        section: precisions(source, data[section]["precisions"], (section, "precisions"))
        for section in _CONVERSIONS
        if "precisions" in data.get(section, {})
    }
    if len(set(given.values())) > 1:
        raise source.error(
            ("graph_optimization", "precisions"),
            "mixed_precision.precisions says something else; keep one of the two",
        )
    wants_bf16 = _bf16_key(data)
    if not given and "quantization" in source.data:
        extra = (Precision.BF16,) if wants_bf16 else ()
        return (Precision.INT8, *extra)
    if wants_bf16:
        why = "precisions are given" if given else "there is no quantization section"
        source.ignored(wants_bf16, f"{why}; write bf16 in mixed_precision.precisions instead")
    return next(iter(given.values()), None)


def _amp(data: Mapping[str, Any]) -> AutoMixedPrecisionOptions | None:
    given = {option: data[option] for option in OPTIONS if option in data}
    return AutoMixedPrecisionOptions(**given) if given else None


def _bf16_key(data: Mapping[str, Any]) -> KeyPath:
    """Return the path of a `use_bf16: true`; empty if there is none."""
    if data.get("use_bf16"):
        return ("use_bf16",)
    return ("quantization", "use_bf16") if data.get("quantization", {}).get("use_bf16") else ()


def _tuning(source: Source, data: Mapping[str, Any], dialect: Dialect) -> TuningSettings:
    objective = data.get("objective", TuningSettings.objective)
    if isinstance(objective, str) and objective in IGNORED_OBJECTIVES:
        source.ignored(("tuning", "objective", objective), IGNORED_OBJECTIVES[objective])
        objective = TuningSettings.objective
    workspace, resume = _workspace(source, data.get("workspace", {}))
    with source.at(("tuning", "exit_policy")):
        exit_policy = ExitPolicy(**data.get("exit_policy", {}))
    min_speedup = data.get("min_speedup", TuningSettings.min_speedup)
    with source.at(("tuning", "min_speedup")):
        check_min_speedup(min_speedup)
    workers = data.get("workers", TuningSettings.workers)
    with source.at(("tuning", "workers")):
        read_workers(workers)
    return TuningSettings(
        strategy=_strategy(source, data.get("strategy", {}), dialect),
        criterion=_criterion(source, data.get("accuracy_criterion", {}), dialect),
        objective=objective,
        min_speedup=min_speedup,
        exit_policy=exit_policy,
        random_seed=data.get("random_seed", TuningSettings.random_seed),
        workspace=workspace,
        resume=resume,
        storage=data.get("storage"),
        early_stopping=data.get("early_stopping", TuningSettings.early_stopping),
        cache=data.get("cache", TuningSettings.cache),
        workers=workers,
    )


def _strategy(source: Source, data: Mapping[str, Any], dialect: Dialect) -> str | None:
    name: str | None = data.get("name")
    if name is None or dialect is Dialect.OWN:
        return name
    word = name.lower()
    if word in OTHER_STRATEGIES:
        source.ignored(("tuning", "strategy", "name", name), OTHER_STRATEGIES[word])
    return STRATEGIES.get(word, word)


def _criterion(source: Source, data: Mapping[str, Any], dialect: Dialect) -> AccuracyCriterion:
    path: KeyPath = ("tuning", "accuracy_criterion")
    if "relative" in data and "absolute" in data:
        raise source.error(
            path,
            f"relative ({data['relative']}) and absolute ({data['absolute']}) are both given; "
            f"keep one of the two",
        )
    default = AccuracyCriterion.tolerance
    with source.at(path):
        return AccuracyCriterion(
            tolerance=data.get("relative", data.get("absolute", default)),
            relative="absolute" not in data,
            higher_is_better=data.get("higher_is_better"),
            any_tolerance=dialect is Dialect.INC,
        )


def _workspace(source: Source, data: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the folder of the history, and whether to resume its run."""
    path, resume = data.get("path"), data.get("resume", False)
    if isinstance(resume, bool):
        return path, resume
    if path is not None and path != resume:
        source.ignored(("tuning", "workspace", "path"), f"the run in {resume!r} is resumed there")
    return resume, True
