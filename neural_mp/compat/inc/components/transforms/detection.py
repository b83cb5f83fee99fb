"""Scaling photos whose labels are boxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import TRANSFORMS, registered
from neural_mp.compat.inc.components.transforms.image_transform import (
    ImageTransform,
    TensorImage,
    as_tensor_image,
    checked_rank,
)
from neural_mp.compat.inc.components.transforms.opencv_resize import opencv_resize
from neural_mp.compat.inc.components.transforms.tensorflow_resize import tensorflow_resize
from neural_mp.data.option_checks import finite_number, whole_number
from neural_mp.errors import ConfigurationError, DataError


@registered(TRANSFORMS, "ResizeWithRatio")
@dataclass(frozen=True)
class ResizeWithRatio(ImageTransform):
    """Scale an image so that its shorter edge is `min_dim`, but its longer one `max_dim` at most.

    An image is never made smaller for `min_dim`. Padded, it lies in the middle, and so do the boxes
    of its label. For arrays the two new edges are swapped, as they are there: an image that is no
    square is stretched.

    Attributes:
        min_dim, max_dim: in pixels; 0 for no such bound.
        padding: whether to pad to `max_dim` × `max_dim`.
        constant_value: what to pad with.

    Raises:
        ConfigurationError: an option is wrong.
    """

    min_dim: int = 800
    max_dim: int = 1365
    padding: bool = False
    constant_value: float = 0

    def __post_init__(self) -> None:
        whole_number("ResizeWithRatio: min_dim", self.min_dim, minimum=0)
        whole_number("ResizeWithRatio: max_dim", self.max_dim, minimum=0)
        finite_number("ResizeWithRatio: constant_value", self.constant_value)
        if self.padding and not self.max_dim:
            raise ConfigurationError("ResizeWithRatio: padding needs max_dim")

    def __call__(self, sample: Any) -> tuple[np.ndarray, Any]:
        """Transform one sample `(image, (boxes, names, classes, image id))`.

        Boxes are shares `[top, left, bottom, right]` of height and width.

        Raises:
            DataError: it is no such sample, or the image does not fit.
        """
        image, label = super().__call__(sample)
        if not isinstance(label, tuple | list) or len(label) != 4:
            raise DataError(
                "ResizeWithRatio takes labels (boxes, names, classes, image id), as the COCO "
                f"datasets give them, got {type(label).__name__}"
            )
        if not self.padding:
            return image, tuple(label)
        old = self.array_of(sample[0]).shape[:2]
        margins = [self.max_dim - size for size in image.shape[:2]]
        before = [margin // 2 for margin in margins]
        around = [(low, margin - low) for low, margin in zip(before, margins, strict=True)]
        padded = np.pad(
            np.asarray(image), [*around, (0, 0)][: image.ndim], constant_values=self.constant_value
        )
        moved = np.asarray(label[0]) * [*old, *old] * self._scale(*old) + [*before, *before]
        tensor = isinstance(image, TensorImage)
        return (as_tensor_image(padded) if tensor else padded), (moved / self.max_dim, *label[1:])

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """The scaled image, before it is padded."""
        height, width = checked_rank(inputs, 2, 3).shape[:2]
        scale = self._scale(height, width)
        new_height, new_width = round(height * scale), round(width * scale)
        if isinstance(inputs, TensorImage):
            return tensorflow_resize(np.asarray(inputs), new_height, new_width, "bilinear")
        if scale == 1:
            return inputs
        scaled = opencv_resize(inputs, new_height, new_width, "bilinear")
        return scaled if scaled.ndim == inputs.ndim else scaled[:, :, np.newaxis]

    def _scale(self, height: int, width: int) -> float:
        scale = max(1, self.min_dim / min(height, width)) if self.min_dim else 1
        longer = max(height, width)
        if self.max_dim and round(longer * scale) > self.max_dim:
            scale = self.max_dim / longer
        return scale
