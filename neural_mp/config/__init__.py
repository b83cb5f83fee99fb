"""Tuning files: YAML ⇄ `Settings`, checked, also those of Intel Neural Compressor 1.x."""

from __future__ import annotations

from collections.abc import Mapping
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
from neural_mp.config.source import IgnoredSettingWarning, read_mapping, read_text
from neural_mp.config.writer import settings_to_yaml
from neural_mp.core.words import Dialect
from neural_mp.errors import ConfigurationError

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
]


def load_settings(path: str | Path, dialect: Dialect | None = None) -> Settings:
    """Read a tuning file.

    Args:
        path: the file.
        dialect: whose words it is written in; by default found by what it holds.

    Warns:
        IgnoredSettingWarning: a setting of Intel Neural Compressor has no effect here.

    Raises:
        ConfigurationError: the file cannot be read, or its content is not as it should be; the
            message names the file, the line and the key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigurationError(
            f"{path}: the tuning file cannot be read: {error.strerror or error}"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}, line {line}: not readable YAML: the text is not UTF-8"
        ) from error
    return parse_settings(text, str(path), dialect)


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
