"""A model of the zoo with its inputs, whatever package has defined the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class NotBuiltError(Exception):
    """No small instance builds and runs; the message has the reason."""


@dataclass(frozen=True)
class ZooCase:
    """A model with inputs that the model runs on.

    Attributes:
        model: source that `MixedPrecision.model` takes.
        batches: inputs for calibration and comparison.
        run: returns the framework's own FP32 outputs for a batch.
        way: how the model was made small.
        options: further options of `MixedPrecision`.
    """

    model: Any
    batches: list[Any]
    run: Callable[[Any], Any]
    way: str = ""
    options: dict[str, Any] = field(default_factory=dict)
