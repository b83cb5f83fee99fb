"""Scaling as `tf.image.resize` does it, half-pixel centers and no antialiasing, without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from neural_mp.compat.inc.components.transforms.opencv_resize import cubic_curve
from neural_mp.compat.inc.components.transforms.resampling import (
    Rule,
    Taps,
    overlaps,
    resampled,
    two_taps,
)

_TABLE_STEPS = 1024  # the cubic curve is looked up in a table there
_SHARPNESS = -0.5


def tensorflow_resize(image: np.ndarray, height: int, width: int, method: str) -> np.ndarray:
    """Scale an image.

    Args:
        image: `[H, W, C]`, numbers of any kind.
        height: of the result.
        width: of the result.
        method: one of `METHODS`.

    Returns:
        float32, but for `nearest` the dtype of the image.

    Raises:
        ValueError: the rank does not fit.
    """
    if image.ndim != 3 or 0 in image.shape:
        raise ValueError("an image has the shape [H, W, C], with a pixel at least")
    if method == "nearest":
        return image[_nearest(image.shape[0], height)][:, _nearest(image.shape[1], width)]
    return resampled(image.astype(np.float32), height, width, _RULES[method])


def _middles(old: int, new: int) -> np.ndarray:
    """Where the middles of new pixels lie; float32 at every step, which shows in large images."""
    scale = np.float32(old) / np.float32(new)
    return (np.arange(new, dtype=np.float32) + np.float32(0.5)) * scale


def _positions(old: int, new: int) -> np.ndarray:
    return (_middles(old, new) - np.float32(0.5)).astype(np.float64)


def _nearest(old: int, new: int) -> np.ndarray:
    return np.floor(_middles(old, new)).astype(np.int64).clip(0, old - 1)


def _bilinear(old: int, new: int) -> Taps:
    return two_taps(_positions(old, new), old)


def _bicubic(old: int, new: int) -> Taps:
    """Pixels outside do not count, instead of the edge going on."""
    positions = _positions(old, new)
    below = np.floor(positions)
    share = np.rint((positions - below) * _TABLE_STEPS) / _TABLE_STEPS
    weights = cubic_curve(np.abs(share[:, None] - np.arange(-1, 3)), _SHARPNESS)
    return _inside(below.astype(np.int64)[:, None] + np.arange(-1, 3), weights, old)


def _inside(indices: np.ndarray, weights: np.ndarray, old: int) -> Taps:
    """Nothing for pixels outside; the weights of the others make 1 together."""
    weights = np.where((indices >= 0) & (indices < old), weights, 0.0)
    return Taps(indices.clip(0, old - 1), weights / weights.sum(axis=1, keepdims=True))


def _area(old: int, new: int) -> Taps:
    factor = np.float32(old) / np.float32(new)
    borders = (np.arange(new + 1, dtype=np.float32) * factor).astype(np.float64)
    taps = overlaps(borders[:-1], borders[1:], old)
    return Taps(taps.indices, taps.weights / factor)


def _kernel(curve: Callable[[np.ndarray], np.ndarray], radius: float, old: int, new: int) -> Taps:
    half = np.float32(0.5)
    step = np.float32(1) / (np.float32(new) / np.float32(old))
    middles = (np.arange(new, dtype=np.float32) + half) * step
    first = np.ceil(middles - np.float32(radius) - half).astype(np.int64)
    indices = first[:, None] + np.arange(int(2 * radius) + 1)
    distances = np.abs(indices.astype(np.float32) + half - middles[:, None])
    return _inside(indices, np.where(distances < radius, curve(distances), 0.0), old)


def _lanczos(radius: int, distance: np.ndarray) -> np.ndarray:
    return np.sinc(distance) * np.sinc(distance / radius)


def _gaussian(distance: np.ndarray) -> np.ndarray:
    return np.exp(-2 * distance**2)  # a deviation of half a pixel


def _mitchell(distance: np.ndarray) -> np.ndarray:
    """The cubic of Mitchell and Netravali with B = C = 1/3."""
    x = distance
    near = (7 * x - 12) * x * x / 6 + 16 / 18
    far = ((-7 * x / 18 + 2) * x - 10 / 3) * x + 16 / 9
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


_RULES: Mapping[str, Rule] = {
    "bilinear": _bilinear,
    "bicubic": _bicubic,
    "area": _area,
    "lanczos3": partial(_kernel, partial(_lanczos, 3), 3.0),
    "lanczos5": partial(_kernel, partial(_lanczos, 5), 5.0),
    "gaussian": partial(_kernel, _gaussian, 1.5),
    "mitchellcubic": partial(_kernel, _mitchell, 2.0),
}

#: The words for `method`.
METHODS = ("nearest", *_RULES)


def crop_and_resize(
    image: np.ndarray, box: tuple[float, float, float, float], size: tuple[int, int], method: str
) -> np.ndarray:
    """Cut and scale an image as `tf.image.crop_and_resize` does.

    The corners of the box are put on the middles of the corner pixels.

    Args:
        image: `[H, W, C]`.
        box: top, left, bottom and right as shares of the height and the width.
        size: height and width of the result.
        method: `bilinear` or `nearest`.

    Returns:
        float32; 0 where the box lies outside of the image.
    """
    if image.ndim != 3:
        raise ValueError("an image has the shape [H, W, C]")
    image = image.astype(np.float32)
    for axis, (start, end) in enumerate(((box[0], box[2]), (box[1], box[3]))):
        last, new = image.shape[axis] - 1, size[axis]
        positions = _box_positions(np.float32(start), np.float32(end), np.float32(last), new)
        below = np.floor(positions) if method == "bilinear" else np.floor(positions + 0.5)
        above = positions - below if method == "bilinear" else np.zeros(new)
        first = below.astype(np.int64)
        inside = ((positions >= 0) & (positions <= last)).astype(np.float32)
        moved = np.moveaxis(image, axis, 0)
        form = (-1, *[1] * (image.ndim - 1))
        share, inside = above.astype(np.float32).reshape(form), inside.reshape(form)
        lower, upper = moved[first.clip(0, last)], moved[(first + 1).clip(0, last)]
        image = np.moveaxis((lower + (upper - lower) * share) * inside, 0, axis)
    return image


def _box_positions(start: np.float32, end: np.float32, last: np.float32, new: int) -> np.ndarray:
    if new == 1:
        return np.array([0.5 * (start + end) * last], dtype=np.float64)
    step = (end - start) * last / np.float32(new - 1)
    return (start * last + np.arange(new, dtype=np.float32) * step).astype(np.float64)
