"""Our own torch ops: quantize and dequantize, the portable form of an INT8 model.

They are ours, with fake kernels, so that graphs that hold them export, save and compile whatever
becomes of torch's own experimental ones.
"""

from __future__ import annotations

import numpy as np
import torch

from neural_mp.adaptors.common.calibration import affine_parameters
from neural_mp.adaptors.common.integer_encoding import rounded_to_int8, weight_scales

_library = torch.library.Library("neural_mp", "FRAGMENT")

#: Reals to uint8: `clamp(floor(x / scale + zero_point + ½), 0, 255)`.
_library.define("quantize(Tensor x, float scale, int zero_point) -> Tensor")
#: uint8 to reals of a float dtype: `(q - zero_point) · scale`.
_library.define("dequantize(Tensor q, float scale, int zero_point, ScalarType dtype) -> Tensor")
#: int8 weights to float32, one scale for each index of the first axis.
_library.define("dequantize_weight(Tensor q, Tensor scales) -> Tensor")
#: Reals to uint8 with the range they have now, widened to hold 0; the scale and zero point too.
_library.define("quantize_dynamic(Tensor x) -> (Tensor, Tensor, Tensor)")
#: The way back, as `dequantize`.
_library.define(
    "dequantize_dynamic(Tensor q, Tensor scale, Tensor zero_point, ScalarType dtype) -> Tensor"
)


def _quantize(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    # One fused multiply-add, in place from there on: 2-3 times as fast as round and add.
    offset = torch.tensor(zero_point + 0.5, dtype=torch.float32)
    return torch.add(offset, x.float(), alpha=1 / scale).clamp_(0, 255).to(torch.uint8)


def _dequantize(q: torch.Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> torch.Tensor:
    return (q.float() - zero_point).mul_(scale).to(dtype)


def _dequantize_weight(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return q.float() * scales.reshape(-1, *[1] * (q.ndim - 1))


def _quantize_dynamic(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low, high = (end.item() for end in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
    scale, zero_point = affine_parameters(low, high)
    return (
        _quantize(x, scale, zero_point),
        torch.tensor(scale),
        torch.tensor(zero_point, dtype=torch.int32),
    )


def _dequantize_dynamic(
    q: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return _dequantize(q, scale.item(), int(zero_point.item()), dtype)


_library.impl("quantize", _quantize, "CompositeExplicitAutograd")
_library.impl("dequantize", _dequantize, "CompositeExplicitAutograd")
_library.impl("dequantize_weight", _dequantize_weight, "CompositeExplicitAutograd")
_library.impl("quantize_dynamic", _quantize_dynamic, "CompositeExplicitAutograd")
_library.impl("dequantize_dynamic", _dequantize_dynamic, "CompositeExplicitAutograd")


@torch.library.register_fake("neural_mp::quantize")
def _(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.uint8)


@torch.library.register_fake("neural_mp::dequantize")
def _(q: torch.Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(q, dtype=dtype)


@torch.library.register_fake("neural_mp::dequantize_weight")
def _(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q, dtype=torch.float32)


@torch.library.register_fake("neural_mp::quantize_dynamic")
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x, dtype=torch.uint8),
        x.new_empty((), dtype=torch.float32),
        x.new_empty((), dtype=torch.int32),
    )


@torch.library.register_fake("neural_mp::dequantize_dynamic")
def _(
    q: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_like(q, dtype=dtype)


quantize = torch.ops.neural_mp.quantize.default
dequantize = torch.ops.neural_mp.dequantize.default
dequantize_weight = torch.ops.neural_mp.dequantize_weight.default
quantize_dynamic = torch.ops.neural_mp.quantize_dynamic.default
dequantize_dynamic = torch.ops.neural_mp.dequantize_dynamic.default


def quantize_weight(weight: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric per-channel int8: one scale for each index of the first axis, range ±`limit`."""
    values = weight.float().numpy()
    scales = weight_scales(values, tuple(range(1, values.ndim)), limit)
    integers = np.ascontiguousarray(rounded_to_int8(values, scales, limit))
    return torch.from_numpy(integers), torch.from_numpy(scales.reshape(-1))
