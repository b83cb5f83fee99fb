"""Scaling an image, axis by axis: which pixels are read for a new one, and with which weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Taps:
    """How one axis is scaled.

    Attributes:
        indices: which old positions are read for each new one, int `[new, taps]`.
        weights: what each counts, float `[new, taps]`.
    """

    indices: np.ndarray
    weights: np.ndarray


Rule = Callable[[int, int], Taps]
"""Old and new length of an axis → how it is scaled."""


def along(image: np.ndarray, taps: Taps, axis: int) -> np.ndarray:
    """Scale one axis of an image; gives the dtype that image and weights have together."""
    moved = np.moveaxis(image, axis, 0)
    weights = taps.weights.reshape(*taps.weights.shape, *[1] * (image.ndim - 1))
    scaled = moved[taps.indices[:, 0]] * weights[:, 0]
    for tap in range(1, taps.indices.shape[1]):
        scaled = scaled + moved[taps.indices[:, tap]] * weights[:, tap]
    return np.moveaxis(scaled, 0, axis)


def resampled(image: np.ndarray, height: int, width: int, rule: Rule) -> np.ndarray:
    """Scale an image `[H, W]` or `[H, W, C]` in its own float dtype."""
    rows, columns = rule(image.shape[0], height), rule(image.shape[1], width)
    for axis, taps in ((1, columns), (0, rows)):
        in_dtype = Taps(taps.indices, taps.weights.astype(image.dtype))
        image = along(image, in_dtype, axis)
    return image


def half_pixel_positions(old: int, new: int) -> np.ndarray:
    """Where the middles of new pixels lie, in old pixels, counted between middles; float64."""
    return (np.arange(new) + 0.5) * (old / new) - 0.5


def two_taps(positions: np.ndarray, old: int) -> Taps:
    """The two neighbours of each position, by their nearness; the edge goes on outside."""
    below = np.floor(positions)
    share = positions - below
    first = below.astype(np.int64)
    indices = np.stack([first, first + 1], axis=1).clip(0, old - 1)
    return Taps(indices, np.stack([1 - share, share], axis=1))


def bilinear(old: int, new: int) -> Taps:
    """Between the two neighbours, whatever the factor: nothing is averaged to make it smaller."""
    return two_taps(half_pixel_positions(old, new), old)


def overlaps(starts: np.ndarray, ends: np.ndarray, old: int) -> Taps:
    """Each old pixel by the share of it that lies between a start and an end."""
    first = np.floor(starts).astype(np.int64)
    count = int((np.ceil(ends) - first).max())
    pixels = first[:, None] + np.arange(count)
    parts = np.minimum(ends[:, None], pixels + 1) - np.maximum(starts[:, None], pixels)
    return Taps(pixels.clip(0, old - 1), parts.clip(min=0.0))
