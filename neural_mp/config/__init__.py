"""Tuning files: YAML ⇄ `Settings`, checked, also those of Intel Neural Compressor 1.x."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from neural_mp.config.build import build
from neural_mp.config.settings import (
    CalibrationSettings,
    EvaluationSettings,
    MetricSettings,
    ModelSettings,
    PerformanceSettings,
    Settings,
    TuningSettings,
)
from neural_mp.config.source import IgnoredSettingWarning, read_file, read_mapping, read_text
from neural_mp.config.writer import settings_to_yaml
from neural_mp.core.enums import Dialect
from neural_mp.errors import ConfigurationError
from neural_mp.util.argument_checks import brief, path_of

__all__ = [
    "CalibrationSettings",
    "EvaluationSettings",
    "IgnoredSettingWarning",
    "MetricSettings",
    "ModelSettings",
    "PerformanceSettings",
    "Settings",
    "TuningSettings",
    "load_settings",
    "parse_settings",
    "settings_from",
    "settings_to_yaml",
    "trust_of",
]


def load_settings(
    path: str | Path, dialect: Dialect | None = None, trust: Iterable[str] = ()
) -> Settings:
    """Read a tuning file.

    Args:
        path: the file.
        dialect: whose words it is written in; by default found by what it holds.
        trust: modules that it may name classes and functions of, beside those that lie in the
            working directory or beside the file.

    Warns:
        IgnoredSettingWarning: a setting of Intel Neural Compressor has no effect here.

    Raises:
        ConfigurationError: the file cannot be read, or its content is not as it should be; the
            message names the file, the line and the key.
    """
    settings = build(read_file(path_of("conf", path)), dialect)
    return replace(settings, folder=Path(path).parent, trust=trust_of(trust))


def parse_settings(text: str, origin: str = "<text>", dialect: Dialect | None = None) -> Settings:
    """Read the text of a tuning file.

    Args:
        text: YAML.
        origin: what to call it in messages.
        dialect: whose words it is written in; by default found by what it holds.

    Warns:
        IgnoredSettingWarning: a setting of Intel Neural Compressor has no effect here.

    Raises:
        ConfigurationError: the content is not as it should be; the message names the origin, the
            line and the key.
    """
    return build(read_text(text, origin), dialect)


def settings_from(
    content: Mapping[str, Any], origin: str = "the configuration", dialect: Dialect | None = None
) -> Settings:
    """Read what a tuning file would hold from a mapping.

    Args:
        content: sections such as `model` and `tuning`.
        origin: what to call it in messages.
        dialect: whose words it is written in; by default found by what it holds.

    Warns:
        IgnoredSettingWarning: a setting of Intel Neural Compressor has no effect here.

    Raises:
        ConfigurationError: the content is not as it should be; the message names the key.
    """
    return build(read_mapping(content, origin), dialect)


def trust_of(names: str | Iterable[str]) -> tuple[str, ...]:
    """The names that a user trusts, checked.

    Raises:
        ConfigurationError: one is no name of a module, or one of Python's own.
    """
    if not isinstance(names, Iterable):
        raise ConfigurationError(
            f"trust must be a name of a module, such as sklearn, or a list of such names, got "
            f"{brief(names)}"
        )
    found = (names,) if isinstance(names, str) else tuple(names)
    for word in found:
        if not isinstance(word, str) or not all(p.isidentifier() for p in word.split(".")):
            raise ConfigurationError(
                f"trust takes names of modules, such as sklearn, or of ops, such as "
                f"ReadFile; got {word!r}"
            )
        if word.partition(".")[0] in sys.stdlib_module_names:
            raise ConfigurationError(
                f"trust names {word!r}, a module of Python's own, which no file may name; write a "
                f"function of your own that calls what you need"
            )
    return found
