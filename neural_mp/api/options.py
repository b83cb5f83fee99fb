"""Options of a run for reports: value and source of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from neural_mp.config import settings_from
from neural_mp.core.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.errors import ConfigurationError
from neural_mp.runs.report import Setting

if TYPE_CHECKING:
    from neural_mp.api.mixed_precision import MixedPrecision

#: Options that affect the run and have a short text.
_SHOWN = (
    "strategy",
    "precisions",
    "accuracy_criterion",
    "objective",
    "min_speedup",
    "max_bytes",
    "max_bits",
    "workload",
    "exit_policy",
    "approach",
    "sampling_size",
    "max_batches",
    "target",
    "runtime",
    "capture",
    "exclude",
    "op_wise",
    "optype_wise",
    "model_wise",
    "random_seed",
    "rounding_steps",
    "early_stopping",
    "workers",
    "resume",
)


def model_name(model: object) -> str:
    """Return the display name of a model: the file name, or the class of the object."""
    if isinstance(model, str | Path):
        return Path(model).name
    return type(model).__name__


def describe_settings(options: MixedPrecision) -> dict[str, Setting]:
    """Return option → value and source, for options that affect the run.

    An option set to its default counts as not set.
    """
    from_file = options.without_python()
    defaults = type(from_file)()
    settings = {}
    for name in _SHOWN:
        value = getattr(options, name)
        if value != getattr(from_file, name):
            origin = "Python"
        elif value != getattr(defaults, name):
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


_ORIGIN = "MixedPrecision"


def parse_criterion(value: object) -> AccuracyCriterion:
    """Return a criterion from a criterion, a fraction of the baseline, or a dict as in YAML.

    Raises:
        ConfigurationError: the type is wrong, or a value is out of range.
    """
    if isinstance(value, AccuracyCriterion):
        return value
    if isinstance(value, Mapping):
        content = {"tuning": {"accuracy_criterion": value}}
        return settings_from(content, _ORIGIN).tuning.criterion
    if isinstance(value, int | float) and not isinstance(value, bool):
        AccuracyCriterion(value)  # raises if the value does not fit a float
        return AccuracyCriterion(float(value))
    raise ConfigurationError(
        f"accuracy_criterion must be an AccuracyCriterion, a fraction of the baseline, e.g. 0.01, "
        f"or a dict, e.g. {{'absolute': 0.002}}, got {value!r}"
    )


def exit_policy_of(value: object) -> ExitPolicy:
    """Return an exit policy from an exit policy or a dict as in YAML.

    Raises:
        ConfigurationError: the type is wrong, or a value is out of range.
    """
    if isinstance(value, ExitPolicy):
        return value
    if isinstance(value, Mapping):
        return settings_from({"tuning": {"exit_policy": value}}, _ORIGIN).tuning.exit_policy
    raise ConfigurationError(
        f"exit_policy must be an ExitPolicy, or a dict, e.g. {{'timeout': 600}}, got {value!r}"
    )
