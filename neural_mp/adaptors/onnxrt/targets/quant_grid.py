"""Integer grids of activations and weights by the rules of a target."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.core.enums import QuantDType, Scheme
from neural_mp.core.observations import Range
from neural_mp.targets.profile import Activations

#: Storage type → element type of ONNX.
ELEMENT_TYPES = {
    QuantDType.INT8: ir.DataType.INT8,
    QuantDType.UINT8: ir.DataType.UINT8,
    QuantDType.INT16: ir.DataType.INT16,
    QuantDType.UINT16: ir.DataType.UINT16,
}
#: Narrowest range of an activation: ONNX Runtime's preset for QNN, `MinimumRealRange`.
MIN_RANGE_WIDTH = 1e-4
#: Smallest scale of a weight: float32 cannot divide by far smaller ones.
_MIN_WEIGHT_SCALE = 1e-12


def get_type_limits(dtype: QuantDType) -> tuple[int, int]:
    """Return the least and the largest integer of a storage type."""
    info = np.iinfo(ELEMENT_TYPES[dtype].numpy())
    return int(info.min), int(info.max)


#: Bounds of values that may be of any size.
UNBOUNDED: Range = (-math.inf, math.inf)
#: Range of a grid of 16 bits over the calibrated range.
_RANGE_RATIO_16_BITS = 2.0


@dataclass(frozen=True)
class Grid:
    """Quantization parameters of a tensor: float = scale · (integer - zero point).

    Attributes:
        scale: one number, or one for each index of `axis`; float32.
        zero_point: the integer at 0, of the same shape.
        axis: the axis of the channels; None for one scale.
    """

    dtype: QuantDType
    scale: Array
    zero_point: Array
    axis: int | None = None

    def quantize_values(self, values: Array) -> Array:
        """Return the nearest integers, ties to even, clipped to the storage type."""
        shape = [1] * values.ndim
        if self.axis is not None:
            shape[self.axis] = -1
        scale, zero = (part.reshape(shape) for part in (self.scale, self.zero_point))
        low, high = get_type_limits(self.dtype)
        steps = np.rint(values / scale) + zero.astype(np.float64)
        return np.clip(steps, low, high).astype(ELEMENT_TYPES[self.dtype].numpy())

    def dequantize_integers(self, integers: Array) -> Array:
        """Return the floats of integers, float32."""
        shape = [1] * integers.ndim
        if self.axis is not None:
            shape[self.axis] = -1
        scale, zero = (part.reshape(shape) for part in (self.scale, self.zero_point))
        return ((integers.astype(np.float64) - zero) * scale).astype(np.float32)


def make_observed_grid(
    observed: Range, dtype: QuantDType, activation: Activations, bounds: Range = UNBOUNDED
) -> Grid:
    """Return the grid of a tensor with a calibrated range; in 16 bits, of twice the range.

    Values of other data exceed the range and saturate; one bit of 16 for them costs 6 of 98 dB.
    `bounds` are those of the values on any data. A grid beyond them gains nothing, and QNN computes
    a Clip wrongly that writes such a grid (2 dB behind an Add).
    """
    low, high = observed
    if dtype in (QuantDType.INT16, QuantDType.UINT16):
        low = min(low, max(_RANGE_RATIO_16_BITS * low, bounds[0]))
        high = max(high, min(_RANGE_RATIO_16_BITS * high, bounds[1]))
    is_power = activation.needs_power_of_two
    return make_activation_grid(low, high, dtype, activation.scheme, is_power)


def make_activation_grid(
    low: float, high: float, dtype: QuantDType, scheme: Scheme, power_of_two: bool
) -> Grid:
    """Return the grid that covers a range, with an exact zero.

    The zero point of a symmetric grid is 0, or the middle of an unsigned type.
    """
    least, largest = get_type_limits(dtype)
    low, high = min(low, 0.0), max(high, 0.0)
    high = max(high, low + MIN_RANGE_WIDTH)
    if scheme is Scheme.SYMMETRIC:
        scale, zero = max(-low, high) / ((largest - least) // 2), (least + largest + 1) // 2
    else:
        scale = (high - low) / (largest - least)
        zero = round(least - low / scale)
    if power_of_two:
        scale = 2.0 ** float(np.ceil(np.log2(scale)))
        zero = zero if scheme is Scheme.SYMMETRIC else round(least - low / scale)
    return make_fixed_grid(scale, int(np.clip(zero, least, largest)), dtype)


def make_fixed_grid(scale: float, zero_point: int, dtype: QuantDType) -> Grid:
    """Return the grid of one scale and zero point."""
    zero = np.asarray(zero_point, ELEMENT_TYPES[dtype].numpy())
    return Grid(dtype, np.asarray(scale, np.float32), zero)


def make_weight_grid(
    weight: Array,
    dtype: QuantDType,
    axis: int | None,
    power_of_two: bool,
    least_scale: Array | float = 0.0,
) -> Grid:
    """Return the grid of a weight: symmetric for a signed type, asymmetric for an unsigned one.

    `least_scale` is the smallest scale of each channel, or of the whole weight.
    """
    if dtype in (QuantDType.UINT8, QuantDType.UINT16):
        low, high = float(weight.min(initial=0)), float(weight.max(initial=0))
        steps = get_type_limits(dtype)[1]
        high = max(high, low + steps * float(np.max(least_scale)))
        return make_activation_grid(low, high, dtype, Scheme.ASYMMETRIC, power_of_two)
    axes = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)
    magnitude = np.abs(weight).max(axis=axes, initial=0)
    scale = np.maximum(
        magnitude / get_type_limits(dtype)[1], np.maximum(least_scale, _MIN_WEIGHT_SCALE)
    )
    if power_of_two:
        scale = np.exp2(np.ceil(np.log2(scale)))
    scale = scale.astype(np.float32)
    return Grid(dtype, scale, np.zeros_like(scale, ELEMENT_TYPES[dtype].numpy()), axis)
