"""Inputs of layers as rows of matrices: convolutions are products with the values in a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from neural_mp.util.pytree import Array

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Window:
    """The positions of a convolution's window, per spatial axis.

    Attributes:
        strides, dilations: steps of the window, and between its taps.
        pads: zeros before and after; None for as many as an output of input / stride needs, the odd
            zero after.
        odd_before: without `pads`, whether the odd zero is before.
    """

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...] | None
    odd_before: bool = False

    def over(self, values: Array, taps: Sequence[int]) -> Array:
        """Return a view [samples, channels, positions…, taps…] of values [samples, channels, …]."""
        spans = [step * (count - 1) + 1 for step, count in zip(self.dilations, taps, strict=True)]
        pads = self.pads or [
            self._same_padding(size, stride, span)
            for size, stride, span in zip(values.shape[2:], self.strides, spans, strict=True)
        ]
        padded = np.pad(values, ((0, 0), (0, 0), *pads))
        axes = tuple(range(2, values.ndim))
        view = sliding_window_view(padded, spans, axis=axes)
        steps = (*self.strides, *self.dilations)
        windows: Array = view[(slice(None), slice(None), *(slice(None, None, s) for s in steps))]
        return windows

    def _same_padding(self, size: int, stride: int, span: int) -> tuple[int, int]:
        total = max((-(-size // stride) - 1) * stride + span - size, 0)
        leading = total - total // 2 if self.odd_before else total // 2
        return leading, total - leading


def window_rows(
    values: Array,
    window: Window | None,
    taps: Sequence[int],
    groups: int,
    axis: int,
    most: int,
    seed: int = 0,
) -> Floats:
    """Return what a layer multiplies by its weight, float32 [groups, rows, inputs · taps].

    Args:
        values: the input of the layer.
        window: the window of a convolution; None for a dense layer.
        taps: the sizes of the window.
        groups: the number of channel groups.
        axis: the channel axis of the input.
        most: the number of rows; of more, a random choice, the same for the same seed and shape.
        seed: seed of the choice.
    """
    moved = np.moveaxis(values, axis, 1) if values.ndim > 1 else values.reshape(1, -1)
    if window is None:
        flat = np.moveaxis(moved, 1, -1).reshape(-1, moved.shape[1])
        chosen = flat[_choose_positions(len(flat), most, seed)]
        return np.asarray(chosen[None], np.float32)
    view = window.over(moved, taps)
    positions = view.shape[0], *view.shape[2 : 2 + len(taps)]
    picked = np.unravel_index(_choose_positions(int(np.prod(positions)), most, seed), positions)
    rows = np.moveaxis(view, 1, 1 + len(taps))[picked]  # [rows, channels, taps…]
    shaped = np.asarray(rows, np.float32).reshape(len(rows), groups, -1)
    return np.ascontiguousarray(shaped.swapaxes(0, 1))


def _choose_positions(count: int, most: int, seed: int) -> NDArray[np.intp]:
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng([seed, count]).choice(count, most, replace=False))
