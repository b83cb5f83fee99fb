"""What people are told of the options of a run: what held, and who set it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from neural_mp.runs.record import Setting
from neural_mp.tuning.criterion import ExitPolicy

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


def model_name(model: Any) -> str:
    """What the user calls a model: the name of its file, or the class of the object."""
    if isinstance(model, str | Path):
        return Path(model).name
    return type(model).__name__


def settings_in_words(options: MixedPrecision) -> dict[str, Setting]:
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


def _in_words(value: Any) -> str:
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
