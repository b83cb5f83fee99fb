"""What integer layers should compute, in numpy: whole numbers in, whole numbers out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Scale:
    """real = step · (q - zero), q in 0…255."""

    step: float
    zero: int

    @classmethod
    def of(cls, low: float, high: float) -> Scale:
        low, high = min(low, 0.0), max(high, 0.0)
        step = (high - low) / 255 or 1.0
        return cls(step, round(-low / step))

    def quantized(self, real: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(real / self.step) + self.zero, 0, 255).astype(np.int64)

    def real(self, q: np.ndarray) -> np.ndarray:
        return self.step * (q - self.zero)


def quantized_weight(
    weight: np.ndarray, axes: tuple[int, ...], limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers in -limit…limit and the step of every output channel."""
    # In float32, as steps are stored: in more digits, what lies between two steps goes elsewhere.
    weight = weight.astype(np.float32)
    steps = (np.abs(weight).max(axis=axes) / limit).astype(np.float32)
    return np.rint(weight / steps).astype(np.int64), steps.reshape(-1).astype(np.float64)


def padding_of(size: int, window: int, stride: int, dilation: int, padding: str) -> tuple[int, int]:
    """Zeros before and after; SAME as TensorFlow defines it."""
    if padding == "VALID":
        return 0, 0
    reach = (window - 1) * dilation + 1
    total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    return total // 2, total - total // 2


def windows(x, kernel, stride, dilation, pads):
    """[batch, rows, columns, kernel rows, kernel columns, channels] of whole numbers."""
    x = np.pad(x, [(0, 0), *pads, (0, 0)])
    reach = [(k - 1) * dilation + 1 for k in kernel]
    view = np.lib.stride_tricks.sliding_window_view(x, reach, axis=(1, 2))
    view = view[:, ::stride, ::stride, :, ::dilation, ::dilation]
    return view.transpose(0, 1, 2, 4, 5, 3)


def convolution(x, weight, stride, dilation, pads):
    """Of whole numbers, zero where padded: [batch, h, w, in] · [kh, kw, in, out]."""
    view = windows(x, weight.shape[:2], stride, dilation, pads)
    return np.einsum("bhwklc,klco->bhwo", view, weight)


def depthwise(x, weight, stride, dilation, pads):
    """[batch, h, w, in] · [kh, kw, in, multiplier] → [batch, h, w, in·multiplier]."""
    view = windows(x, weight.shape[:2], stride, dilation, pads)
    result = np.einsum("bhwklc,klcm->bhwcm", view, weight)
    return result.reshape(*result.shape[:3], -1)
