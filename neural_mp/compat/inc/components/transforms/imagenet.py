"""Complete preprocessing pipelines from a decoded photo to a model input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import (
    NON_NEGATIVE,
    POSITIVE,
    TRANSFORMS,
    above_zero,
    check_choice,
    check_parsed,
    option,
    parse_numbers,
    register_for,
)
from neural_mp.compat.inc.components.transforms.geometry import RandomTransform
from neural_mp.compat.inc.components.transforms.image_transform import (
    OPENCV_METHODS,
    ImageTransform,
    TensorImage,
    as_tensor_image,
    check_image_rank,
    cut_part,
    resize_with_opencv,
    resize_with_tensorflow,
)
from neural_mp.compat.inc.components.transforms.values import convert_image_dtype
from neural_mp.data.option_checks import check_finite_number, check_one_of
from neural_mp.errors import ConfigurationError, DataError

#: Methods of `tf.image.resize`.
_METHODS = (
    "nearest",
    "bilinear",
    "bicubic",
    "area",
    "lanczos3",
    "lanczos5",
    "gaussian",
    "mitchellcubic",
)


_THREE = check_parsed(parse_numbers, "one number or three", lambda found: len(found) in (1, 3))
_DEVIATIONS = check_parsed(_THREE, "above 0", lambda found: min(found) > 0)
_FRACTION = check_parsed(check_finite_number, "above 0 and at most 1", lambda found: 0 < found <= 1)


@register_for(TRANSFORMS, "BilinearImagenet", "onnxrt")
@dataclass(frozen=True)
class BilinearImagenet(ImageTransform):
    """Crop the center, scale, and map 0…255, also as floats, to -1…1, as for Inception.

    Attributes:
        height, width: size of the result.
        central_fraction: fraction of height and width that is kept.
        mean_value: subtracted at the end, one number or one per channel.
        scale: factor applied after `mean_value`.
    """

    height: int = option(POSITIVE)
    width: int = option(POSITIVE)
    central_fraction: float = option(_FRACTION, 0.875)
    mean_value: Any = option(_THREE, (0.0, 0.0, 0.0))
    scale: float = option(check_finite_number, 1.0)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return float32 `[height, width, C]`."""
        image = self.in_floats(np.asarray(check_image_rank(inputs, 3)))
        height, width = image.shape[:2]
        # Equal margins, rounded down, are cut off on both sides.
        top, left = (int((size - size * self.central_fraction) / 2) for size in (height, width))
        image = self.scale_image(cut_part(image, top, left, height - 2 * top, width - 2 * left))
        mean = np.array(self.mean_value, dtype=np.float32)
        return ((image - np.float32(0.5)) * np.float32(2) - mean) * np.float32(self.scale)

    def in_floats(self, image: np.ndarray) -> np.ndarray:
        """Return float32 from 0 to 1."""
        return image.astype(np.float32) / np.float32(255)

    def scale_image(self, image: np.ndarray) -> np.ndarray:
        """Return `[height, width, C]`."""
        resized = resize_with_opencv(image, self.width, self.height, "bilinear")
        return resized if resized.ndim == 3 else resized[:, :, np.newaxis]


@register_for(TRANSFORMS, "BilinearImagenet", "tensorflow")
class TensorFlowBilinearImagenet(BilinearImagenet):
    """`BilinearImagenet` that expects floats in 0…1, and integers in the range of their dtype."""

    def in_floats(self, image: np.ndarray) -> np.ndarray:
        """Return float32 from 0 to 1."""
        return convert_image_dtype(image, np.dtype(np.float32))

    def scale_image(self, image: np.ndarray) -> np.ndarray:
        """Return `[height, width, C]`."""
        return resize_with_tensorflow(image, self.height, self.width, "bilinear")


@dataclass(frozen=True)
class CroppedToSize(RandomTransform):
    """Base of ResizeCropImagenet for both frameworks.

    Attributes:
        height, width: size of the result.
        random_crop: whether to crop at random, not centrally.
        resize_side: length of the shorter edge after scaling, before the crop.
        mean_value: subtracted value, one number or one per channel.
        resize_method: interpolation method.
        data_format: `channels_last`, or `channels_first`.
        subpixels: `BGR` reverses the channels.
    """

    height: int = option(POSITIVE)
    width: int = option(POSITIVE)
    random_crop: bool = False
    resize_side: int = option(POSITIVE, 256)
    mean_value: Any = option(_THREE, (0.0, 0.0, 0.0))
    resize_method: str = option(check_choice(*_METHODS), "bilinear")
    data_format: str = option(check_choice("channels_last", "channels_first"), "channels_last")
    subpixels: str = option(check_choice("RGB", "BGR"), "RGB")

    def cut_to_size(self, image: np.ndarray) -> np.ndarray:
        """Return a part of `height` and `width`; raise ValueError if the image is smaller."""
        down, right = image.shape[0] - self.height, image.shape[1] - self.width
        if down < 0 or right < 0:
            raise ValueError(
                f"the scaled image, {image.shape[0]} × {image.shape[1]}, is smaller than the crop, "
                f"{self.height} × {self.width}; set a larger resize_side"
            )
        if not self.random_crop:
            return cut_part(image, down // 2, right // 2, self.height, self.width)
        return cut_part(image, *self.random_offset(down, right), self.height, self.width)


@register_for(TRANSFORMS, "ResizeCropImagenet", "tensorflow")
@dataclass(frozen=True)
class TensorFlowResizeCropImagenet(CroppedToSize):
    """Scale the shorter edge, crop; then `(image - mean_value) * scale`.

    Attributes:
        random_flip_left_right: whether to flip half of the images, on average.
        scale: factor applied at the end.
    """

    random_flip_left_right: bool = False
    scale: float = option(check_finite_number, 1.0)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return float32 `[height, width, C]`; channels are always last."""
        image = np.asarray(check_image_rank(inputs, 3))
        if self.data_format == "channels_first":
            image = np.moveaxis(image, 0, -1)
        if self.subpixels == "BGR":
            image = image[..., ::-1]
        edges = np.array(image.shape[:2], dtype=np.float32)
        new = np.rint(edges * (np.float32(self.resize_side) / edges.min())).astype(int)
        image = resize_with_tensorflow(image, int(new[0]), int(new[1]), self.resize_method)
        image = self.cut_to_size(image)
        if self.random_flip_left_right and self.random.rand() > 0.5:
            image = image[:, ::-1]
        mean = np.array(self.mean_value, dtype=np.float32)
        return (image.astype(np.float32) - mean) * np.float32(self.scale)


@register_for(TRANSFORMS, "ResizeCropImagenet", "onnxrt")
@dataclass(frozen=True)
class ArrayResizeCropImagenet(CroppedToSize):
    """Scale, crop, map 0…255 to 0…1; then `(image - mean_value) / std_value`.

    Scaling is always bilinear, from RGB with channels last. As in INC, the two new edges are
    swapped: a non-square image is stretched.
    """

    std_value: Any = option(_DEVIATIONS, (0.229, 0.224, 0.225))

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return float32 `[3, height, width]`."""
        height, width = check_image_rank(inputs, 2, 3).shape[:2]
        factor = self.resize_side / min(height, width)
        width_there, height_there = int(height * factor), int(width * factor)
        image = resize_with_opencv(inputs, width_there, height_there, "bilinear")
        if image.ndim == 2:
            image = np.repeat(image[:, :, np.newaxis], 3, axis=2)
        image = self.cut_to_size(image) / 255.0
        normal = (image - np.array(self.mean_value)) / np.array(self.std_value)
        return normal.astype(np.float32).transpose(2, 0, 1)


@register_for(TRANSFORMS, "ResizeWithAspectRatio", "onnxrt")
@dataclass(frozen=True)
class ResizeWithAspectRatio(ImageTransform):
    """Scale so that the shorter edge is `100 / scale` times the size of a later crop.

    Attributes:
        height, width: size of the later crop.
        scale: percentage of the scaled edge that the crop keeps.
        inter_pol: `area`, `bilinear`, `bicubic` or `nearest`, or OpenCV's number of the method.
    """

    height: int = option(POSITIVE)
    width: int = option(POSITIVE)
    scale: float = option(above_zero, 87.5)
    inter_pol: Any = option(
        lambda name, value: check_one_of(
            name, dict(enumerate(OPENCV_METHODS)).get(value, value), [*OPENCV_METHODS]
        ),
        "area",
    )

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return an array of unchanged dtype."""
        old_height, old_width = check_image_rank(inputs, 3).shape[:2]
        height, width = (int(100.0 * size / self.scale) for size in (self.height, self.width))
        if old_height > old_width:
            height = int(height * old_height / old_width)
        else:
            width = int(width * old_width / old_height)
        return resize_with_opencv(inputs, width, height, self.inter_pol)


@register_for(TRANSFORMS, "ResizeWithRatio")
@dataclass(frozen=True)
class ResizeWithRatio(ImageTransform):
    """Scale the shorter edge to `min_dim`, with the longer edge limited to `max_dim`.

    `min_dim` never shrinks an image. A padded image is centered, and the boxes of its label are
    shifted. For arrays the two new edges are swapped, as in INC: a non-square image is stretched.

    Attributes:
        min_dim, max_dim: in pixels; 0 for no bound.
        padding: whether to pad to `max_dim` × `max_dim`.
        constant_value: the padding value.
    """

    min_dim: int = option(NON_NEGATIVE, 800)
    max_dim: int = option(NON_NEGATIVE, 1365)
    padding: bool = False
    constant_value: float = option(check_finite_number, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.padding and not self.max_dim:
            raise ConfigurationError("ResizeWithRatio: padding needs max_dim above 0, got 0")

    def __call__(self, sample: Any) -> tuple[np.ndarray, Any]:
        """Transform one sample `(image, (boxes, names, classes, image id))`.

        Boxes are fractions `[top, left, bottom, right]` of height and width.
        """
        image, label = super().__call__(sample)
        if not isinstance(label, tuple | list) or len(label) != 4:
            raise DataError(
                "ResizeWithRatio: labels must be (boxes, names, classes, image id), as in the COCO "
                f"datasets, got {type(label).__name__}"
            )
        if not self.padding:
            return image, tuple(label)
        old = self.convert_to_array(sample[0]).shape[:2]
        margins = [self.max_dim - size for size in image.shape[:2]]
        offsets = [margin // 2 for margin in margins]
        around = [(low, margin - low) for low, margin in zip(offsets, margins, strict=True)]
        padded = np.pad(
            np.asarray(image), [*around, (0, 0)][: image.ndim], constant_values=self.constant_value
        )
        moved = np.asarray(label[0]) * [*old, *old] * self._scale_factor(*old) + [
            *offsets,
            *offsets,
        ]
        tensor = isinstance(image, TensorImage)
        return (as_tensor_image(padded) if tensor else padded), (moved / self.max_dim, *label[1:])

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return the scaled image, without padding."""
        height, width = check_image_rank(inputs, 2, 3).shape[:2]
        scale = self._scale_factor(height, width)
        new_height, new_width = round(height * scale), round(width * scale)
        if isinstance(inputs, TensorImage):
            return resize_with_tensorflow(np.asarray(inputs), new_height, new_width, "bilinear")
        if scale == 1:
            return inputs
        scaled = resize_with_opencv(inputs, new_height, new_width, "bilinear")
        return scaled if scaled.ndim == inputs.ndim else scaled[:, :, np.newaxis]

    def _scale_factor(self, height: int, width: int) -> float:
        scale = max(1, self.min_dim / min(height, width)) if self.min_dim else 1
        longer = max(height, width)
        if self.max_dim and round(longer * scale) > self.max_dim:
            scale = self.max_dim / longer
        return scale
