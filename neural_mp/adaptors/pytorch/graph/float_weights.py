"""Weights in float formats of fewer bits: FP8 (E4M3) by output, and MXFP4 in blocks of 32 inputs.

No CPU computes in them: a layer expands its weight in every run. Codes and scales are those of
compressed-tensors (schemes FP8 by channel and MXFP4A16) and torchao, bit for bit: a block of MXFP4
has a power of two as its scale, that of its largest magnitude rounded to 1 or 1.5 times a power,
over that of the largest element (`ScaleCalculationMode.EVEN` of torchao). Elements are rounded to
nearest, ties to even, and saturate. Reference: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import torch

from neural_mp.adaptors.pytorch.graph.qdq_ops import register_op
from neural_mp.core.quant_spec import MX_BLOCK

_E4M3_LIMIT = 448.0
#: Magnitudes of the codes 0 to 7 of E2M1, and the bounds between neighbours.
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_BOUNDS = (_E2M1[1:] + _E2M1[:-1]) / 2
#: Exponent of the largest element, and bits of the mantissa of elements and of float32.
_LARGEST_EXPONENT, _ELEMENT_MANTISSA = 2, 1
_MANTISSA = 23


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, uint8 [outputs, inputs], and scales, float32 [outputs].

    Scales are rounded to the type of the weight.
    """
    scales = weight.abs().amax(1, keepdim=True) / _E4M3_LIMIT
    smallest = torch.finfo(weight.dtype).eps
    scales = torch.where(scales == 0, smallest, scales.float())
    values = (weight.float() / scales).clamp_(-_E4M3_LIMIT, _E4M3_LIMIT)
    return values.to(torch.float8_e4m3fn).view(torch.uint8), scales[:, 0].contiguous()


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, uint8 [outputs, inputs / 2], and exponents, uint8 [outputs, inputs / 32].

    The lower bits of a byte hold the first code.
    """
    blocks = weight.float().unflatten(1, (-1, MX_BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True).view(torch.int32)
    rounded = largest + (1 << (_MANTISSA - _ELEMENT_MANTISSA - 1))
    exponents = ((rounded >> _MANTISSA) - _LARGEST_EXPONENT).clamp_(min=0)
    values = blocks / _restore_scales(exponents)
    magnitudes = values.abs()
    # The even one of two neighbours has an even code.
    codes = torch.bucketize(magnitudes, _BOUNDS)
    upper = torch.bucketize(magnitudes, _BOUNDS, right=True)
    codes = torch.where((codes != upper) & (codes % 2 == 1), upper, codes)
    codes = (codes | (torch.signbit(values).long() << 3)).to(torch.uint8).flatten(1)
    return codes[:, ::2] | (codes[:, 1::2] << 4), exponents.to(torch.uint8).squeeze(-1)


def _restore_scales(exponents: torch.Tensor) -> torch.Tensor:
    bits = exponents.to(torch.int32) << _MANTISSA
    # The smallest is below the normal numbers.
    return torch.where(bits == 0, 1 << (_MANTISSA - 1), bits).view(torch.float32)


def _dequantize_mxfp4(q: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    codes = torch.stack((q & 15, q >> 4), -1).flatten(1).long()
    values = torch.cat((_E2M1, -_E2M1))[codes].unflatten(1, (-1, MX_BLOCK))
    return values.mul_(_restore_scales(exponents).unsqueeze(-1)).flatten(1)


#: Codes of `quantize_fp8` with their scales to float32 [outputs, inputs].
dequantize_fp8 = register_op(
    "dequantize_fp8(Tensor q, Tensor scales) -> Tensor",
    lambda q, scales: q.view(torch.float8_e4m3fn).float() * scales[:, None],
    lambda q, scales: torch.empty_like(q, dtype=torch.float32),
)
#: Codes of `quantize_mxfp4` with their exponents to float32 [outputs, inputs].
dequantize_mxfp4 = register_op(
    "dequantize_mxfp4(Tensor q, Tensor exponents) -> Tensor",
    _dequantize_mxfp4,
    lambda q, exponents: q.new_empty((q.shape[0], 2 * q.shape[1]), dtype=torch.float32),
)
#: The ops that restore such a weight.
RESTORING = (dequantize_fp8, dequantize_mxfp4)
