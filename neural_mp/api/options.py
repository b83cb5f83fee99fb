"""What people are told of the options of a run: what held, and who set it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from neural_mp.config import settings_from
from neural_mp.errors import ConfigurationError
from neural_mp.runs.record import Setting
from neural_mp.tuning.criterion import AccuracyCriterion, ExitPolicy

if TYPE_CHECKING:
    from neural_mp.api.mixed_precision import MixedPrecision

#: The options that decide what a run does, and have a short form in words.
_SHOWN = (
    *("strategy", "precisions", "accuracy_criterion", "objective", "min_speedup"),
    *("exit_policy", "approach"),
    *("sampling_size", "max_batches", "target", "capture"),
    *("exclude", "op_wise", "optype_wise", "model_wise"),
    *("random_seed", "early_stopping", "workers", "resume"),
)


def model_name(model: object) -> str:
    """What the user calls a model: the name of its file, or the class of the object."""
    if isinstance(model, str | Path):
        return Path(model).name
    return type(model).__name__


def describe_settings(options: MixedPrecision) -> dict[str, Setting]:
    """Option → what holds, and who set it, of those that decide what a run does.

    An option that was set to what would have held anyway counts as not set.
    """
    from_file = options.without_python()
    defaults = type(from_file)()
    found = {}
    for name in _SHOWN:
        value = getattr(options, name)
        if value != getattr(from_file, name):
            origin = "Python"
        elif value != getattr(defaults, name):
            origin = "the file"
        else:
            origin = "default"
        words = _in_words(value)
        if words:
            found[name] = Setting(words, origin)
    return found


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
    """A criterion of what a user gives: itself, a share of the baseline, or a dict as in YAML.

    Raises:
        ConfigurationError: it is none of these, or a value is out of range.
    """
    if isinstance(value, AccuracyCriterion):
        return value
    if isinstance(value, Mapping):
        content = {"tuning": {"accuracy_criterion": value}}
        return settings_from(content, _ORIGIN).tuning.criterion
    if isinstance(value, int | float) and not isinstance(value, bool):
        AccuracyCriterion(value)  # refuses what no float can hold
        return AccuracyCriterion(float(value))
    raise ConfigurationError(
        f"accuracy_criterion must be an AccuracyCriterion, a share of the baseline such as 0.01, "
        f"or a dict such as {{'absolute': 0.002}}, got {value!r}"
    )


def exit_policy_of(value: object) -> ExitPolicy:
    """An exit policy of what a user gives: itself, or a dict as in YAML.

    Raises:
        ConfigurationError: it is neither, or a value is out of range.
    """
    if isinstance(value, ExitPolicy):
        return value
    if isinstance(value, Mapping):
        return settings_from({"tuning": {"exit_policy": value}}, _ORIGIN).tuning.exit_policy
    raise ConfigurationError(
        f"exit_policy must be an ExitPolicy, or a dict such as {{'timeout': 600}}, got {value!r}"
    )
