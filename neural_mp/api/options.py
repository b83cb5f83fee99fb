"""Options of a run for reports: value and source of each."""

from __future__ import annotations

from pathlib import Path

from neural_mp.config import Options, Settings
from neural_mp.config.options import OPTIONS
from neural_mp.runs.record import Setting
from neural_mp.tuning.criterion import ExitPolicy


def model_name(model: object) -> str:
    """Return the display name of a model: the file name, or the class of the object."""
    if isinstance(model, str | Path):
        return Path(model).name
    return type(model).__name__


def describe_settings(options: Options, file: Settings) -> dict[str, Setting]:
    """Return option → value and source, for options that affect the run.

    An option set to its default counts as not set.
    """
    settings = {}
    for name, option in OPTIONS.items():
        value = getattr(options, name)
        if value != getattr(file.options, name):
            origin = "Python"
        elif value != option.default:
            origin = "the file"
        else:
            origin = "default"
        text = _in_words(value)
        if text and option.shown:
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
