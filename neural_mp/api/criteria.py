"""Criteria and exit policies as people write them in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neural_mp.config import settings_from
from neural_mp.errors import ConfigurationError
from neural_mp.tuning.criterion import AccuracyCriterion, ExitPolicy

_ORIGIN = "MixedPrecision"


def criterion_of(value: Any) -> AccuracyCriterion:
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


def exit_policy_of(value: Any) -> ExitPolicy:
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
