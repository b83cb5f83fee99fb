"""Noise of single tensors and weights by width, and work of ops, for plans of accelerators."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from neural_mp.core.enums import CalibrationAlgorithm
from neural_mp.core.precision import OpConfig
from neural_mp.util.json_fields import JsonFields, NonNegative
from neural_mp.util.validators import mapping_of, non_negative_float

#: Bits as text, or calibration algorithm → NSR at the outputs.
NoiseBy = Annotated[Mapping[str, float], mapping_of(non_negative_float)]


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

    def op_noise(self, op: str, config: OpConfig) -> float:
        """Return the noise of an op's tensors and weight, if these alone are in a config."""
        noise = self.weight_noise(op, None if config.weight is None else config.weight.dtype.bits)
        if config.activation is None:
            return noise
        bits = config.activation.dtype.bits
        return noise + sum(
            tensor.noise_at_bits(bits) for tensor in self.tensors if op in tensor.ops
        )
