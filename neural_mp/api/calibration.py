"""Calibration in the user's own loop: `with neural_mp.calibration(model) as calibrated`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from neural_mp.adaptors.registry import adaptor_for
from neural_mp.errors import DataError
from neural_mp.util.pytree import batch_size_of
from neural_mp.util.validators import integer_between, optional, validate_option


class CalibrationInputs:
    """The inputs that a model was called with: batches for `calib_dataloader`.

    Args:
        samples: number of samples from which on no further call is recorded; None for all.
    """

    def __init__(self, samples: int | None = None) -> None:
        self.samples = 0
        self._most = validate_option("samples", optional(integer_between(1)), samples)
        self._batches: list[Any] = []

    def add(self, inputs: Any) -> None:
        """Add the inputs of one call."""
        if self._most is None or self.samples < self._most:
            self._batches.append(inputs)
            self.samples += batch_size_of(inputs)

    def __iter__(self) -> Iterator[Any]:
        if not self._batches:
            raise DataError(
                "no call of the model was recorded; run the model on calibration data within "
                "neural_mp.calibration"
            )
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]

    def __repr__(self) -> str:
        return f"CalibrationInputs({len(self)} batches, {self.samples} samples)"


@contextmanager
def calibration(
    model: object, *, samples: int | None = None, framework: str | None = None
) -> Iterator[CalibrationInputs]:
    """Record the inputs of all calls that the user's own code makes to a model.

    The model runs as before. Its recorded inputs are batches for calibration:
    `converter.calib_dataloader = calibrated`.

    Args:
        model: the object that the user's code calls: a `torch.nn.Module` or a Keras model; no other
            framework offers recording so far.
        samples: number of samples from which on no further call is recorded; default: all, which
            are kept in memory.
        framework: framework of the model; default: detected.

    Raises:
        UnknownFrameworkError: no adaptor accepts the model.
        ConversionError: the framework offers no recording.
    """
    adaptor = adaptor_for(model, framework)
    inputs = CalibrationInputs(samples)
    with adaptor.record_calls(model, inputs.add):
        yield inputs
