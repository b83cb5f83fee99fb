"""Observations of one pass over the calibration data.

For plans of accelerators: noise of single tensors and weights by width, and work of ops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import numpy as np

from neural_mp.core.enums import CalibrationAlgorithm
from neural_mp.core.precision import OpConfig
from neural_mp.util.fingerprint import compute_data_digest
from neural_mp.util.json_fields import Count, JsonFields, NonNegative
from neural_mp.util.pytree import Array
from neural_mp.util.text import format_count
from neural_mp.util.validators import (
    InvalidValueError,
    finite_numbers,
    integer_between,
    invalid_value_error,
    mapping_of,
    non_negative_float,
    one_of,
)

Range = tuple[float, float]
_Numbers = Annotated[tuple[float, ...], finite_numbers]
_Positive = Annotated[int, integer_between(1)]
#: Bits as text, or calibration algorithm → NSR at the outputs.
NoiseBy = Annotated[Mapping[str, float], mapping_of(non_negative_float)]


class ChannelRange(tuple[float, float]):
    """A range, with that of every channel, for kernels that read one scale per channel.

    Attributes:
        channels: the range of every channel, within this one.
    """

    channels: tuple[Range, ...]

    def __new__(cls, span: Range, channels: Iterable[Range]) -> ChannelRange:
        """Return a range with those of its channels."""
        instance = super().__new__(cls, span)
        instance.channels = tuple(channels)
        return instance


@dataclass(frozen=True)
class ChannelStats(JsonFields):
    """Statistics of a tensor, one number per channel, in the tensor's own units.

    Attributes:
        low, high: minimum and maximum.
        power: mean square.
    """

    refuses_unknown_keys: ClassVar[bool] = True

    low: _Numbers
    high: _Numbers
    power: _Numbers
    mean: _Numbers

    @classmethod
    def from_dict(cls, data: object) -> ChannelStats:
        """Reverse `to_dict`.

        Raises:
            NeuralMPError: the data are invalid, or their lengths differ.
        """
        stats = super().from_dict(data)
        if len({len(numbers) for numbers in vars(stats).values()}) != 1:
            lengths = ", ".join(f"{name}: {len(numbers)}" for name, numbers in vars(stats).items())
            raise InvalidValueError(f"expected lists of equal length, found {lengths}")
        return stats


@dataclass(frozen=True)
class NonFiniteTensor(JsonFields):
    """A tensor that held NaN or Inf in calibration and therefore stays float.

    Attributes:
        value: `NaN` or `Inf`; `NaN` if the tensor held both.
        batch: number of the first such batch, from 1.
    """

    refuses_unknown_keys: ClassVar[bool] = True

    value: Annotated[str, one_of(("NaN", "Inf"))]
    batch: _Positive

    def __str__(self) -> str:
        return f"{self.value} in batch {self.batch} of the calibration data"


@dataclass(frozen=True)
class NaNSamples(JsonFields):
    """Samples that calibration left out: NaN in an input of theirs made their outputs NaN.

    Attributes:
        batch: number of the first batch with such samples, from 1.
        samples: their number in all batches.
    """

    refuses_unknown_keys: ClassVar[bool] = True

    batch: _Positive
    samples: _Positive


@dataclass(frozen=True)
class Observations(JsonFields):
    """Ranges and scores of the tensors that may be quantized.

    Attributes:
        ranges: tensor name → calibration algorithm → (low, high), in the tensor's own units.
        nsr: tensor name → noise-to-signal ratio of quantizing the tensor to 8 bits with its full
            range, per channel and averaged over channels: 0 is lossless; at 1, noise and signal of
            a typical channel have equal power.
        channels: tensor name → channel statistics, of tensors noisy enough that corrections may pay
            off.
        elements: tensor name → mean number of elements per sample.
        corrected_nsr: tensor name → correction (`core.precision.CORRECTIONS`) → resulting NSR.
        non_finite: tensor name → the NaN or Inf that it held; such tensors have no ranges.
        nan_samples: input name → the samples left out for NaN in this input.
    """

    ranges: Mapping[str, Mapping[str, Annotated[Range, _parse_range]]] = field(default_factory=dict)
    nsr: Mapping[str, NonNegative] = field(default_factory=dict)
    samples: Count = 0
    channels: Mapping[str, ChannelStats] = field(default_factory=dict)
    corrected_nsr: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    elements: Mapping[str, NonNegative] = field(default_factory=dict)
    non_finite: Mapping[str, NonFiniteTensor] = field(default_factory=dict)
    nan_samples: Mapping[str, NaNSamples] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self) if item.name != "samples"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[Any, ...]:
        return Observations.from_dict, (self.to_dict(),)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to the user on NaN and Inf in the calibration data and in the model."""
        notes = [
            f"calibration left out {format_count(skipped.samples, 'sample')} with NaN in input "
            f"{name!r} (first in batch {skipped.batch} of the calibration data), whose outputs "
            "are NaN; remove or repair these samples"
            for name, skipped in self.nan_samples.items()
        ]
        if self.non_finite:
            name, value = next(iter(self.non_finite.items()))
            number = len(self.non_finite)
            notes.append(
                f"{format_count(number, 'tensor')} ({name!r}{', …' if number > 1 else ''}) held "
                f"{value}; INT8 has neither NaN nor Inf, so the ops that read them stay float"
            )
        return tuple(notes)

    @classmethod
    def from_dict(cls, data: object) -> Observations:
        """Reverse `to_dict`.

        Raises:
            NeuralMPError: the data are invalid.
        """
        if isinstance(data, Mapping):  # YAML written by hand has empty entries
            data = {k: value for k, value in data.items() if value is not None or k == "samples"}
        return super().from_dict({} if data is None else data)


def _parse_range(value: object) -> Range:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise invalid_value_error("a range: [low, high]", value)
    low, high = finite_numbers(value)
    if low > high:
        raise invalid_value_error("a range: [low, high], low ≤ high", [low, high])
    return low, high


#: Maximum bytes of all kept outputs.
MAX_KEPT_BYTES = 32 << 20


@dataclass
class KeptOutputs:
    """Floating-point outputs by the content of their batch, until they exceed a size.

    Attributes:
        limit: maximum bytes.
    """

    limit: int = MAX_KEPT_BYTES
    _size: int = 0
    _parts: list[list[Array]] = field(default_factory=list)
    _kept: dict[str, list[Array]] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether further outputs are wanted."""
        return self._size < self.limit

    def add_outputs(self, outputs: list[Array]) -> None:
        """Keep the outputs of the next part of a batch: consecutive samples on the first axis."""
        self._size += sum(array.nbytes for array in outputs)
        self._parts.append(outputs)

    def end_batch(self, inputs: object) -> None:
        """Join the parts of a batch."""
        parts, self._parts = self._parts, []
        digest = compute_data_digest(inputs) if self.is_open and parts else None
        if digest is not None:
            whole = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            self._kept[digest] = parts[0] if len(parts) == 1 else list(whole)

    def get_outputs(self, inputs: object) -> list[Array] | None:
        """Return the outputs of a batch with these values; None if they were not kept."""
        digest = compute_data_digest(inputs) if self._kept else None
        return None if digest is None else self._kept.get(digest)


@dataclass(frozen=True)
class TensorNoise(JsonFields):
    """Noise of one tensor in integers, whatever ops only move its values.

    Attributes:
        tensor: the op or graph input that computes the tensor.
        ops: the ops that a plan decides on, and that write or read the tensor.
        noise: bits → NSR at the outputs if this tensor alone is in integers, by `minmax`.
        typical: calibration algorithm → NSR at the outputs of a typical sample if this tensor alone
            is in the fewest bits: the mean over samples, of which each counts as 1 at most, so that
            an outlier in one sample does not hide the others. Empty if not measured.
    """

    refuses_unknown_keys: ClassVar[bool] = True

    tensor: str
    ops: tuple[str, ...]
    noise: NoiseBy
    typical: NoiseBy = field(default_factory=dict)

    def typical_noise_by(self, algorithm: str) -> float:
        """Return the typical noise by a calibration algorithm; that of `minmax` if not measured."""
        return self.typical.get(algorithm, self.typical.get(CalibrationAlgorithm.MINMAX, 0.0))

    def scale_by(self, ratio: float) -> TensorNoise:
        """Return the noise times a ratio in the fewest bits."""
        fewest = min(self.noise, key=int)
        return replace(self, noise={**self.noise, fewest: ratio * self.noise[fewest]})

    def noise_at_bits(self, bits: int) -> float:
        """Return the noise in a number of bits; 0 in float."""
        return self.noise.get(str(bits), 0.0)


@dataclass(frozen=True)
class WidthFigures(JsonFields):
    """Measured noise and computed work of the ops of a model.

    Attributes:
        tensors: the noise of every tensor that a plan may store in integers.
        weights: op → bits → NSR at the outputs if the weight of this op alone is in integers.
        macs: op → multiplications with one sample.
        elements: op → elements that the op writes with one sample.
        biases: the ops whose bias can be corrected for the rounding of their weight.
    """

    refuses_unknown_keys: ClassVar[bool] = True

    tensors: tuple[TensorNoise, ...] = ()
    weights: Annotated[
        Mapping[str, Mapping[str, float]], mapping_of(mapping_of(non_negative_float))
    ] = field(default_factory=dict)
    macs: Mapping[str, NonNegative] = field(default_factory=dict)
    elements: Mapping[str, NonNegative] = field(default_factory=dict)
    biases: tuple[str, ...] = ()

    def restricted_to(self, ops: Collection[str]) -> WidthFigures:
        """Return the noise of some ops, the others staying in float."""
        tensors = (
            replace(tensor, ops=tuple(op for op in tensor.ops if op in ops))
            for tensor in self.tensors
        )
        return replace(
            self,
            tensors=tuple(tensor for tensor in tensors if tensor.ops),
            weights={op: noise for op, noise in self.weights.items() if op in ops},
            biases=tuple(op for op in self.biases if op in ops),
        )

    def weight_noise(self, op: str, bits: int | None) -> float:
        """Return the noise of an op's weight in a number of bits; 0 in float."""
        return 0.0 if bits is None else self.weights.get(op, {}).get(str(bits), 0.0)

    def is_measured(self, op: str, config: OpConfig) -> bool:
        """Whether the noise of an op's weight in a config is known; that of no weight is."""
        known = self.weights.get(op, {})
        return config.weight is None or not known or str(config.weight.dtype.bits) in known

    def op_noise(self, op: str, config: OpConfig) -> float:
        """Return the noise of an op's tensors and weight, if these alone are in a config."""
        noise = self.weight_noise(op, None if config.weight is None else config.weight.dtype.bits)
        if config.activation is None:
            return noise
        bits = config.activation.dtype.bits
        return noise + sum(
            tensor.noise_at_bits(bits) for tensor in self.tensors if op in tensor.ops
        )
