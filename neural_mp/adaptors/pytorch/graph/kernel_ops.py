"""Ops of the lowered graph besides oneDNN's own integer kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import nn
from torch.nn import functional as F

from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph.float_weights import dequantize_fp8, dequantize_mxfp4

aten = torch.ops.aten

#: Maximum number of rows for which the int8-weight kernel beats a product with expanded weights.
_FEW_ROWS = 32
#: Block size of that kernel; it reads past the end of weights that are not a multiple.
_BLOCK = 32
#: Likewise for the 4-bit kernel.
_FEW_ROWS_OF_4_BITS = 64
#: Weights that are expanded at a time: a part stays in the cache, and its memory is used again.
_EXPANDED = 1 << 19
#: Outputs of which a part holds a multiple: blocks of oneDNN's product in bfloat16.
_PRODUCT_BLOCK = 64
#: The 4-bit kernel computes blocks of this many outputs.
OUTPUT_BLOCK = 16


_CODES_OF_BYTES = ops.unpack_stored_codes(
    torch.arange(256, dtype=torch.uint8).unsqueeze(-1)
).float()
#: Byte → its two codes, minus the middle one, as bfloat16 in one int32.
_STEPS_OF_BYTES = (
    (_CODES_OF_BYTES - ops.middle_code(4)).to(torch.bfloat16).view(torch.int32).flatten()
)


def quantize_uint8(x: torch.Tensor, offset: torch.Tensor, inverse_scale: float) -> torch.Tensor:
    """Compute `ops.quantize` with a precomputed tensor `offset`: zero point + ½."""
    wide = aten.to.dtype(x, torch.float32)
    steps = aten.add.Tensor(offset, wide, alpha=inverse_scale)
    return ops.to_uint8(aten.clamp_.default(steps, 0, ops.QMAX))


def quantize_rgb(x: torch.Tensor, offset: torch.Tensor, inverse_scale: float) -> torch.Tensor:
    """Compute `quantize_uint8` of images with 3 channels, and a fourth of zeros, channels last.

    The channels of a pixel become the bytes of an integer, the lowest first, as on all CPUs with
    integer kernels: this takes a third of the time of torch's conversion of the layout.
    """
    wide = aten.to.dtype(x, torch.float32)
    steps = aten.clamp_.default(aten.add.Tensor(offset, wide, alpha=inverse_scale), 0, ops.QMAX)
    whole = aten._to_copy.default(steps, dtype=torch.int32)
    red, green, blue = (aten.select.int(whole, 1, channel) for channel in range(3))
    pixels = aten.add_.Tensor(aten.add.Tensor(red, green, alpha=1 << 8), blue, alpha=1 << 16)
    # A copy, since torch's interpreter has no view as another dtype.
    values = aten.view_copy.dtype(aten.unsqueeze.default(pixels, -1), torch.uint8)
    return aten.permute.default(values, [0, 3, 1, 2])


def dequantize_uint8(
    q: torch.Tensor, scale: float, zero_point: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Compute `ops.dequantize` with the zero point as a float tensor, which also converts."""
    return aten.to.dtype(aten.mul_.Scalar(aten.sub.Tensor(q, zero_point), scale), dtype)


def quantize_gated(
    x: torch.Tensor, gate: torch.Tensor, offset: torch.Tensor, inverse_scale: float
) -> torch.Tensor:
    """Compute `quantize_uint8` of a float32 product, up to rounding of the product."""
    steps = aten.addcmul.default(offset, x, gate, value=inverse_scale)
    return ops.to_uint8(aten.clamp_.default(steps, 0, ops.QMAX))


def run_pixel_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, inputs: int, outputs: int
) -> torch.Tensor:
    """Run a 1×1 convolution of images of one pixel as a product; the weight is [in, out]."""
    rows = aten.reshape.default(x, [-1, inputs])
    plain = bias is None
    product = aten.mm.default(rows, weight) if plain else aten.addmm.default(bias, rows, weight)
    return aten.view.default(product, [-1, outputs, 1, 1])


#: Kernels made of ops of the dispatcher alone, whatever their arguments.
COMPOSED = frozenset(
    {quantize_uint8, quantize_rgb, quantize_gated, dequantize_uint8, run_pixel_product}
)


def max_pool2d_uint8(
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    dilation: list[int] | None = None,
    ceil_mode: bool = False,
) -> torch.Tensor:
    """Max-pool uint8 images [batch, channels, height, width], or one image without a batch.

    Pools one axis after the other, as a maximum of slices: torch has no channels-last uint8 max
    pooling, and a detour through int16 costs up to twice as long.
    """
    if ceil_mode:
        pooled = aten.max_pool2d.default(
            x.to(torch.int16), kernel, stride or [], padding or 0, dilation or 1, ceil_mode
        )
        return pooled.to(torch.uint8)
    for axis in (0, 1):
        window, gap = _value_of_axis(kernel, axis), _value_of_axis(dilation or [1], axis)
        sides, step = _value_of_axis(padding or [0], axis), _value_of_axis(stride or kernel, axis)
        x = _max_pool_axis(x, axis - 2, window, step, sides, gap)
    return x


def _value_of_axis(values: list[int], axis: int) -> int:
    return values[axis if len(values) > 1 else 0]


def _max_pool_axis(
    x: torch.Tensor, axis: int, window: int, step: int, sides: int, gap: int
) -> torch.Tensor:
    """Max-pool along axis -2 or -1; zero padding never exceeds a uint8 value."""
    size, extent = x.shape[axis], gap * (window - 1) + 1
    count = (size + 2 * sides - extent) // step + 1
    parts: list[tuple[int, torch.Tensor]] = []
    for offset in range(-sides, extent - sides, gap):
        # Windows that have a value at this offset; the others have padding there.
        low, high = max(0, -(offset // step)), min(count, (size - 1 - offset) // step + 1)
        if sides and low >= high:
            continue
        values = x.narrow(axis, low * step + offset, (high - low - 1) * step + 1)
        parts.append((low, values[..., ::step, :] if axis == -2 else values[..., ::step]))
    whole = [values for _, values in parts if values.shape[axis] == count]
    if sides and len(whole) < 2:
        x = F.pad(x, (0, 0, sides, sides) if axis == -2 else (sides, sides))
        return _max_pool_axis(x, axis, window, step, 0, gap)
    # Padding would copy all images: the windows with padding get their maxima in place instead.
    maxima = reduce(torch.maximum, whole)
    for low, values in parts:
        if values.shape[axis] < count:
            view = maxima.narrow(axis, low, values.shape[axis])
            torch.maximum(view, values, out=view)
    return maxima


def weight_only_linear(
    x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Run a dense layer with int8 weights [outputs, inputs] and one scale per output.

    For few rows, as in token-by-token generation, reading weights dominates: weights are then read
    as int8, and `x` is rounded to bfloat16. Many rows reuse a weight, which is then expanded.
    """
    features = x.shape[-1]
    if features % _BLOCK or x.numel() > _FEW_ROWS * features or not x.numel():
        # Integers up to 127 are exact in bfloat16.
        result = _run_expanded_product(x, lambda part, dtype: part.to(dtype), q)
        result = result.mul_(scales).to(x.dtype)
        return result if bias is None else result + bias
    rows = x.reshape(-1, features).to(torch.bfloat16)
    result = aten._weight_int8pack_mm(rows, q, scales.to(torch.bfloat16)).to(x.dtype)
    result = result.reshape(*x.shape[:-1], len(q))
    return result if bias is None else result + bias


def scale_rows(
    product: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    sums: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the result of a dense layer from the product of its integers and its weight.

    Args:
        product: float32, written to.
        scales: scale of each row of the inputs.
        zero_points: zero point of each row.
        sums: sum of the weights of each output.
        bias: the bias of the layer.
    """
    product = product.view(*scales.shape[:-1], len(sums))
    scaled = product.mul_(scales) if bias is None else torch.addcmul(bias, product, scales)
    return scaled.addcmul_(zero_points * scales, sums, value=-1)


class KernelWeight(nn.Module):
    """A packed weight as the 4-bit kernel reads it, made for the first call with few rows.

    It takes as many bytes as the stored weight, which calls with many rows and saving never need.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None

    def pack_weight(self, *stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `four_bit_weight` of the stored weight, scales and offsets."""
        if self._made is None:
            self._made = four_bit_weight(*stored)
        return self._made


def four_bit_linear(
    x: torch.Tensor,
    kernel_weight: KernelWeight,
    q: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Run a dense layer with 4-bit weights, `x` rounded to bfloat16 for few rows."""
    features = x.shape[-1]
    if x.numel() > _FEW_ROWS_OF_4_BITS * features or not x.numel():
        return low_bit_linear(x, q, scales, offsets, 4, bias)
    rows = x.reshape(-1, features).to(torch.bfloat16)
    group = features // scales.shape[1]
    weight, scales_and_offsets = kernel_weight.pack_weight(q, scales, offsets)
    result = aten._weight_int4pack_mm_for_cpu(rows, weight, group, scales_and_offsets)
    result = result.to(x.dtype).reshape(*x.shape[:-1], len(q))
    return result if bias is None else result + bias


def _run_expanded_product(
    x: torch.Tensor, expand: Callable[..., torch.Tensor], *stored: torch.Tensor
) -> torch.Tensor:
    """Return the product with a weight that is expanded some outputs at a time, in float32.

    Computes in bfloat16 where the CPU has instructions for that, unless `x` is float16.

    Args:
        x: the inputs.
        expand: tensors of some outputs, and a dtype → their weight.
        stored: the tensors, one row per output.
    """
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    is_float16 = x.dtype is torch.float16
    dtype = torch.bfloat16 if has_bfloat16 and not is_float16 else torch.float32
    count = _round_to_blocks(_EXPANDED // max(x.shape[-1], 1))
    rows = x.to(dtype)
    parts = zip(*(tensor.split(count) for tensor in stored), strict=True)
    return torch.cat([F.linear(rows, expand(*part, dtype)) for part in parts], dim=-1).float()


def _round_to_blocks(outputs: int) -> int:
    """Return a number of outputs that the product divides into blocks without a rest."""
    return max(1, outputs // _PRODUCT_BLOCK) * _PRODUCT_BLOCK


def low_bit_linear(
    x: torch.Tensor,
    q: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    bits: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Run a dense layer with packed weights, which are expanded in every run."""

    def dequantize_weight_part(
        q: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        if bits != 4 or dtype is not torch.bfloat16:
            return ops.dequantize_grouped(q, scales, offsets, bits).to(dtype)
        # In bfloat16, two codes at a time.
        steps = _STEPS_OF_BYTES.index_select(0, q.flatten().int()).view(torch.bfloat16)
        steps = steps.view(*scales.shape, -1)
        return steps.mul_(scales.unsqueeze(-1)).add_(offsets.unsqueeze(-1)).flatten(-2)

    result = _run_expanded_product(x, dequantize_weight_part, q, scales, offsets).to(x.dtype)
    return result if bias is None else result + bias


def float_format_linear(
    x: torch.Tensor,
    q: torch.Tensor,
    scales: torch.Tensor,
    is_mxfp4: bool,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Run a dense layer with a weight in a float format, expanded to float32 in every run."""
    weight = (dequantize_mxfp4 if is_mxfp4 else dequantize_fp8)(q, scales)
    return F.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


def four_bit_weight(
    q: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a packed weight as the kernel reads it, with its scales and offsets.

    Scales and offsets are one tensor, bfloat16 [groups, outputs, 2].
    """
    # The layout takes whole blocks of outputs, and an int32 per code.
    count = _round_to_blocks(_EXPANDED // max(2 * q.shape[-1], 1))
    laid_out = torch.empty_like(q)
    for part, target in zip(q.split(count), laid_out.split(count), strict=True):
        codes = ops.unpack_stored_codes(part).to(torch.int32)
        target.copy_(aten._convert_weight_to_int4pack_for_cpu(codes, 1))
    pairs = torch.stack((scales, offsets), dim=-1).transpose(0, 1)
    return laid_out, pairs.to(torch.bfloat16).contiguous()


def low_bit_embedding(
    q: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, bits: int, indices: torch.Tensor
) -> torch.Tensor:
    """Return rows of a table of packed weights, as float32."""
    gathered = (F.embedding(indices, values) for values in (q, scales, offsets))
    return ops.dequantize_grouped(*gathered, bits)


def weight_only_embedding(
    q: torch.Tensor, scales: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    """Return rows of an int8 table [rows, features], one scale per row, as float32."""
    # An embedding copies whole rows; indexing, value by value, takes ten times as long.
    rows = F.embedding(indices, q).float()
    return rows.mul_(scales[indices].unsqueeze(-1))
