"""Tuning files: validated YAML ⇄ `Settings`, including files of Intel Neural Compressor 1.x."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from neural_mp.config.build import build_settings
from neural_mp.config.options import Options
from neural_mp.config.settings import (
    EvaluationSettings,
    MetricSettings,
    PerformanceSettings,
    Settings,
    TrainSettings,
)
from neural_mp.config.source import IgnoredSettingWarning, read_file, read_mapping, read_text
from neural_mp.config.writer import describe_settings, describe_source, settings_to_yaml
from neural_mp.core.enums import Dialect
from neural_mp.errors import ConfigurationError
from neural_mp.util.validators import file_path, preview_value, validate_option

__all__ = [
    "EvaluationSettings",
    "IgnoredSettingWarning",
    "MetricSettings",
    "Options",
    "PerformanceSettings",
    "Settings",
    "TrainSettings",
    "describe_settings",
    "describe_source",
    "load_settings",
    "parse_settings",
    "settings_from",
    "settings_to_yaml",
    "trust_of",
]


#: Suffixes of tuning files, which have any name without a suffix.
_SUFFIXES = ("", ".yaml", ".yml", ".json", ".conf", ".cfg", ".txt")


def load_settings(
    path: str | Path, dialect: Dialect | None = None, trust: Iterable[str] = ()
) -> Settings:
    """Read a tuning file.

    Args:
        path: the file.
        dialect: vocabulary of the file; default: detected from the content.
        trust: further modules whose classes and functions the file may name, besides modules in
            the working directory or next to the file.

    Warns:
        IgnoredSettingWarning: a setting of Intel Neural Compressor has no effect.

    Raises:
        ConfigurationError: the file cannot be read, or its content is invalid; the message names
            the file, the line and the key.
    """
    file = Path(validate_option("conf", file_path, path))
    if file.is_file() and file.suffix not in _SUFFIXES:
        raise ConfigurationError(
            f"{str(path)!r} must be a tuning file in YAML, whose name ends in .yaml or .yml; give "
            f"a model as MixedPrecision(model={str(path)!r})"
        )
    settings = build_settings(read_file(file), dialect)
    return replace(settings, folder=Path(path).parent, trust=trust_of(trust))


def parse_settings(text: str, origin: str = "<text>", dialect: Dialect | None = None) -> Settings:
    """Read the text of a tuning file.

    Args:
        text: YAML.
        origin: name of the text in messages.
        dialect: see `load_settings`, as for warnings and errors.
    """
    return build_settings(read_text(text, origin), dialect)


def settings_from(
    content: Mapping[str, Any], origin: str = "the configuration", dialect: Dialect | None = None
) -> Settings:
    """Read the content of a tuning file from a mapping.

    Args:
        content: sections such as `model` and `tuning`.
        origin: name of the mapping in messages.
        dialect: see `load_settings`, as for warnings and errors.
    """
    return build_settings(read_mapping(content, origin), dialect)


def trust_of(names: str | Iterable[str]) -> tuple[str, ...]:
    """Validate the module names that a user trusts.

    Raises:
        ConfigurationError: a name is not a module name, or is in the standard library.
    """
    if not isinstance(names, Iterable):
        raise ConfigurationError(
            "trust must be a module name, e.g. sklearn, or a list of names, got "
            f"{preview_value(names)}"
        )
    trusted = (names,) if isinstance(names, str) else tuple(names)
    for name in trusted:
        if not isinstance(name, str) or not all(p.isidentifier() for p in name.split(".")):
            raise ConfigurationError(
                f"trust must be names of modules, e.g. sklearn, or of ops, e.g. ReadFile, got "
                f"{name!r}"
            )
        if name.partition(".")[0] in sys.stdlib_module_names:
            raise ConfigurationError(
                f"trust must not name a module of the standard library, got {name!r}; call the "
                f"module in a function of your own"
            )
    return trusted
