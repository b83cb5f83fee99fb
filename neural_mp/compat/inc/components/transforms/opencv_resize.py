"""Scaling as OpenCV's `resize` does it, without OpenCV.

8-bit pixels are scaled with `INTER_LINEAR` in whole numbers, exactly as there. Everything else is
computed in floats: results in floats agree as far as float32 goes, 8-bit ones of the other
methods may differ by 1, as they do between OpenCV's own builds.
"""

from __future__ import annotations

import numpy as np

from neural_mp.compat.inc.components.transforms.resampling import (
    Rule,
    Taps,
    along,
    bilinear,
    half_pixel_positions,
    overlaps,
    resampled,
    two_taps,
)

_FIXED_BITS = 11
_SHARPNESS = -0.75  # of the cubic curve; TensorFlow and Pillow have -0.5


def opencv_resize(image: np.ndarray, width: int, height: int, method: str) -> np.ndarray:
    """Scale an image.

    Args:
        image: `[H, W]` or `[H, W, C]`, of 8 or 16 bits, float32 or float64.
        width: of the result; OpenCV's order is width first.
        height: of the result.
        method: `nearest`, `bilinear`, `bicubic` or `area`.

    Returns:
        An array of the same dtype; a single channel loses its axis, as it does there.

    Raises:
        ValueError: the dtype or the rank does not fit.
    """
    if image.dtype.name not in ("uint8", "uint16", "int16", "float32", "float64"):
        raise ValueError(f"it takes uint8, float32 or float64, not {image.dtype}; Cast it before")
    if image.ndim not in (2, 3) or 0 in image.shape:
        raise ValueError("an image has the shape [H, W] or [H, W, C], with a pixel at least")
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    if method == "nearest":
        return image[_nearest(image.shape[0], height)][:, _nearest(image.shape[1], width)]
    shrinks = image.shape[0] >= height and image.shape[1] >= width
    if method == "area" and image.dtype == np.uint8 and image.shape[:2] == (2 * height, 2 * width):
        fours = np.array([image[top::2, left::2] for top in (0, 1) for left in (0, 1)])
        sums = fours.astype(np.int64).sum(axis=0)
        return ((sums + 2) >> 2).astype(np.uint8)  # here alone, halves are rounded up
    if method == "area":
        return _scaled(image, height, width, _area if shrinks else _area_enlarged)
    return _scaled(image, height, width, {"bilinear": bilinear, "bicubic": _bicubic}[method])


def _scaled(image: np.ndarray, height: int, width: int, rule: Rule) -> np.ndarray:
    if image.dtype.kind == "f":
        return resampled(image, height, width, rule)
    if image.dtype == np.uint8 and rule in (bilinear, _area_enlarged):
        return _in_whole_numbers(image, height, width, rule)
    precise = resampled(image.astype(np.float64), height, width, rule)
    bounds = np.iinfo(image.dtype)
    return np.rint(precise.round(6)).clip(bounds.min, bounds.max).astype(image.dtype)


def _in_whole_numbers(image: np.ndarray, height: int, width: int, rule: Rule) -> np.ndarray:
    """Two taps with weights of 11 bits; the bits of the rows' products are dropped in two steps."""
    rows, columns = (
        _fixed(_float32_bilinear(old, new) if rule is bilinear else rule(old, new))
        for old, new in zip(image.shape, (height, width), strict=False)
    )
    lines = along(image.astype(np.int64), columns, axis=1) >> 4
    weights = rows.weights.reshape(height, 2, *[1] * (image.ndim - 1))
    upper, lower = (lines[rows.indices[:, tap]] * weights[:, tap] >> 16 for tap in (0, 1))
    return ((upper + lower + 2) >> 2).astype(np.uint8)


def _fixed(taps: Taps) -> Taps:
    weights = taps.weights.astype(np.float32) * np.float32(1 << _FIXED_BITS)
    return Taps(taps.indices, np.rint(weights).astype(np.int64))


def _float32_bilinear(old: int, new: int) -> Taps:
    return two_taps(half_pixel_positions(old, new).astype(np.float32), old)


def _nearest(old: int, new: int) -> np.ndarray:
    return np.floor(np.arange(new) * (1 / (new / old))).astype(np.int64).clip(0, old - 1)


def _bicubic(old: int, new: int) -> Taps:
    positions = half_pixel_positions(old, new)
    below = np.floor(positions)
    share = positions - below
    distances = np.abs(share[:, None] - np.arange(-1, 3))
    weights = cubic_curve(distances, _SHARPNESS)
    indices = below.astype(np.int64)[:, None] + np.arange(-1, 3)
    return Taps(indices.clip(0, old - 1), weights)


def cubic_curve(distance: np.ndarray, sharpness: float) -> np.ndarray:
    """Keys' cubic convolution: https://doi.org/10.1109/TASSP.1981.1163711, with `a` = sharpness."""
    a, x = sharpness, distance
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _area(old: int, new: int) -> Taps:
    """The mean of what a new pixel covers."""
    factor = old / new
    starts = np.arange(new) * factor
    taps = overlaps(starts, np.minimum(starts + factor, old), old)
    return Taps(taps.indices, taps.weights / taps.weights.sum(axis=1, keepdims=True))


def _area_enlarged(old: int, new: int) -> Taps:
    """One pixel, but between two of them at the borders that a new pixel lies over."""
    factor = 1 / (new / old)  # as there, which is not old / new to the last bit
    first = np.floor(np.arange(new) * factor)
    beyond = ((np.arange(new) + 1) - (first + 1) / factor).astype(np.float32)
    share = np.where(beyond <= 0, 0.0, beyond - np.floor(beyond))
    return two_taps(first + share, old)
