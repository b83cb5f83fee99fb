"""Custom quantize and dequantize ops: the portable form of an INT8 model.

Custom ops with fake kernels make graphs exportable, storable and compilable independently of
torch's experimental quantization ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from neural_mp.adaptors.common.quant_params import (
    MIN_RANGE_WIDTH,
    STEPS,
    round_to_int8,
    weight_scales,
)
from neural_mp.adaptors.common.weights.grouped_weight import (
    BitOrder,
    GroupedWeight,
    iterate_row_parts,
    max_code,
    middle_code,
    pack_codes,
)

aten = torch.ops.aten

#: Largest quantized activation; the smallest is 0.
QMAX = 255
#: Zero point + ½ of each zero point: on small tensors, making one takes as long as adding it.
_OFFSETS = (torch.arange(QMAX + 1, dtype=torch.float32) + 0.5).unbind()
#: Name of the custom op library.
LIBRARY = "neural_mp"
_library = torch.library.Library(LIBRARY, "FRAGMENT")


def register_op(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register a custom op with its kernel and its fake kernel."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"neural_mp::{name}", fake)
    return getattr(torch.ops.neural_mp, name).default


def in_steps(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Return `x / scale + zero_point + ½` in float32, whose integer part is the quantized `x`."""
    # Fused multiply-add: 2-3 times as fast as round and add.
    return torch.add(_OFFSETS[zero_point], x.float(), alpha=1 / scale)


def _cast_wraps_around() -> bool:
    """Whether a cast of floats from 128 to 255 to int8 keeps the bits of the integer."""
    values = torch.tensor([*(step / 4 for step in range(4 * (QMAX + 1))), float("nan")])
    pairs = torch.stack((values, values), 1)[:, 0]  # not contiguous: cast one by one
    return all(
        torch.equal(some.to(torch.int8).to(torch.uint8), some.to(torch.uint8))
        for some in (values, pairs, values.flip(0)[:1])
    )


#: Type in which floats become bytes: torch casts float to uint8 by way of int64, which takes two
#: to four times as long.
_BYTES = torch.int8 if _cast_wraps_around() else torch.int16


def to_uint8(values: torch.Tensor) -> torch.Tensor:
    """Truncate floats from 0 to 255 to uint8."""
    # Ops of the dispatcher: calls of this function are replaced by them in `kernels.programs`.
    narrow = aten._to_copy.default(values, dtype=_BYTES)
    if _BYTES is torch.int8:
        # The same bytes without a copy; torch's interpreter has no view as another dtype.
        nothing = aten.new_empty.default(values, [0], dtype=torch.uint8)
        result: torch.Tensor = aten.set_.source_Tensor(nothing, narrow)
    else:
        result = aten._to_copy.default(narrow, dtype=torch.uint8)
    return result


def _quantize_tensor(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    return to_uint8(in_steps(x, scale, zero_point).clamp_(0, QMAX))


def dequantize_integers(q: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Return `(q - zero_point) · scale` of integers in float32, in place."""
    # Exact without the call, too; after a ReLU it is 0.
    shifted = q if isinstance(zero_point, int) and zero_point == 0 else q.sub_(zero_point)
    return shifted.mul_(scale)


def _dequantize_tensor(
    q: torch.Tensor, scale: float, zero_point: int, dtype: torch.dtype
) -> torch.Tensor:
    return dequantize_integers(q.float(), scale, zero_point).to(dtype)


def _quantize_dynamic(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return integers, scales and zero points, as `compute_affine_parameters` for every row."""
    wide = x.float()
    if not x.numel():
        rows = wide.new_zeros((*x.shape[:-1], 1))
        return x.to(torch.uint8), rows + 1, rows
    # Two passes take a third of the time of `aminmax` along an axis.
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    low, width = low.clamp_(max=0), high.clamp_(min=0).sub_(low)
    # For an all-zero row, any scale is correct.
    scales = torch.where(width > MIN_RANGE_WIDTH, width / STEPS, torch.ones_like(width))
    zeros = low.div_(scales).neg_().round_().clamp_(0, QMAX)
    steps = torch.mul(wide, scales.reciprocal()).add_(zeros + 0.5)
    return to_uint8(steps.clamp_(0, QMAX)), scales, zeros


def unpack_stored_codes(q: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Return the codes [outputs, inputs] of packed weights as uint8."""
    if 8 % bits:  # three bytes hold eight codes of 3 bits
        first, second, third = q.unflatten(-1, (-1, 3)).to(torch.int32).unbind(-1)
        q = (first << 16) | (second << 8) | third
    width = 8 if 8 % bits == 0 else 24
    parts = [(q >> shift) & max_code(bits) for shift in range(width - bits, -1, -bits)]
    return torch.stack(parts, dim=-1).flatten(-2).to(torch.uint8)


def _dequantize_grouped(
    q: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, bits: int = 4
) -> torch.Tensor:
    grouped = unpack_stored_codes(q, bits).unflatten(-1, (scales.shape[-1], -1)).float()
    grouped = grouped.sub_(middle_code(bits)).mul_(scales.unsqueeze(-1))
    return grouped.add_(offsets.unsqueeze(-1)).flatten(-2)


#: Float to uint8: `clamp(floor(x / scale + zero_point + ½), 0, 255)`.
quantize = register_op(
    "quantize(Tensor x, float scale, int zero_point) -> Tensor",
    _quantize_tensor,
    lambda x, scale, zero_point: torch.empty_like(x, dtype=torch.uint8),
)
#: uint8 to a float dtype: `(q - zero_point) · scale`.
dequantize = register_op(
    "dequantize(Tensor q, float scale, int zero_point, ScalarType dtype) -> Tensor",
    _dequantize_tensor,
    lambda q, scale, zero_point, dtype: torch.empty_like(q, dtype=dtype),
)
#: int8 weights to float32, one scale per index of the first axis.
dequantize_weight = register_op(
    "dequantize_weight(Tensor q, Tensor scales) -> Tensor",
    lambda q, scales: q.float() * scales.reshape(-1, *[1] * (q.ndim - 1)),
    lambda q, scales: torch.empty_like(q, dtype=torch.float32),
)
#: Float to uint8 over the range of each row, the last axis, extended to hold 0; also returns
#: scales and zero points, float32 with a last axis of one.
quantize_dynamic = register_op(
    "quantize_dynamic(Tensor x) -> (Tensor, Tensor, Tensor)",
    _quantize_dynamic,
    lambda x: (
        torch.empty_like(x, dtype=torch.uint8),
        x.new_empty((*x.shape[:-1], 1), dtype=torch.float32),
        x.new_empty((*x.shape[:-1], 1), dtype=torch.float32),
    ),
)
#: Inverse of `quantize_dynamic`, computed like `dequantize`.
dequantize_dynamic = register_op(
    "dequantize_dynamic(Tensor q, Tensor scale, Tensor zero_point, ScalarType dtype) -> Tensor",
    lambda q, scale, zero_point, dtype: q.float().sub_(zero_point).mul_(scale).to(dtype),
    lambda q, scale, zero_point, dtype: torch.empty_like(q, dtype=dtype),
)


#: Packed weights [outputs, inputs · bits / 8] to float32 [outputs, inputs]; scales and offsets
#: [outputs, groups] (see `adaptors.common.weights.grouped_weight`).
dequantize_grouped = register_op(
    "dequantize_grouped(Tensor q, Tensor scales, Tensor offsets, int bits=4) -> Tensor",
    _dequantize_grouped,
    lambda q, scales, offsets, bits=4: scales.new_empty(
        (*q.shape[:-1], 8 * q.shape[-1] // bits), dtype=torch.float32
    ),
)


def pack_stored_parts(weight: GroupedWeight) -> tuple[torch.Tensor, ...]:
    """Return packed codes of a weight, and its scales and offsets in bfloat16."""
    codes, *parameters = (
        torch.from_numpy(np.ascontiguousarray(part))
        for part in (
            pack_codes(weight.codes, weight.bits, BitOrder.UPPER_FIRST),
            weight.scales,
            weight.offsets,
        )
    )
    return codes, *(part.to(torch.bfloat16) for part in parameters)


def quantize_weight(weight: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to symmetric int8: one scale per index of the first axis, range ±`limit`."""
    integers, scales = np.empty(weight.shape, np.int8), np.empty(len(weight), np.float32)
    for part in iterate_row_parts((len(weight), weight[:1].numel())):
        values = weight[part].float().numpy()
        steps = weight_scales(values, tuple(range(1, values.ndim)), limit)
        integers[part], scales[part] = round_to_int8(values, steps, limit), steps.reshape(-1)
    return torch.from_numpy(integers), torch.from_numpy(scales)
