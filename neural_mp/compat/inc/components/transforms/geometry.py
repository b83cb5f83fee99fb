"""Cropping, flipping and scaling of images for TensorFlow and ONNX Runtime.

OpenCV scales arrays, with sizes `[width, height]`; TensorFlow scales images of records, with sizes
`[height, width]`. Existing files were tuned with these conventions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from neural_mp.compat.inc.components.registries import (
    NON_NEGATIVE,
    POSITIVE,
    TRANSFORMS,
    check_choice,
    option,
    register_for,
)
from neural_mp.compat.inc.components.transforms.image_transform import (
    FROM_LOW_TO_HIGH,
    INTERPOLATIONS,
    ImageTransform,
    TensorImage,
    check_image_rank,
    compute_tensor,
    cut_part,
    parse_two_sizes,
    resize_with_opencv,
    resize_with_tensorflow,
)
from neural_mp.data.images import CenterCrop as OurCenterCrop
from neural_mp.data.option_checks import check_whole_number
from neural_mp.errors import ConfigurationError

_TRIES = 10


@register_for(TRANSFORMS, "Resize", "tensorflow")
@dataclass(frozen=True)
class Resize(ImageTransform):
    """Scale an image to two sizes, regardless of its aspect ratio.

    Attributes:
        size: one number for both sizes; `[width, height]` for an array, `[height, width]` for an
            image of a record.
        interpolation: `nearest`, `bilinear` or `bicubic`.
    """

    size: Any = option(parse_two_sizes)
    interpolation: str = option(check_choice(*INTERPOLATIONS), "bilinear")

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return float32 for an image of a record, an unchanged dtype for an array."""
        if isinstance(inputs, TensorImage):
            height, width = self.size
            return resize_with_tensorflow(np.asarray(inputs), height, width, self.interpolation)
        width, height = self.size
        return resize_with_opencv(inputs, width, height, self.interpolation)


@register_for(TRANSFORMS, "Resize", "onnxrt")
@dataclass(frozen=True)
class ResizeWithChannels(Resize):
    """`Resize` with a result that always has a channel axis."""

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return `[H, W, C]`."""
        scaled = super().apply(inputs)
        return scaled[:, :, np.newaxis] if scaled.ndim == 2 else scaled


def _cut_inside(image: np.ndarray, top: int, left: int, height: int, width: int) -> np.ndarray:
    check_image_rank(image, 2, 3)
    if image.shape[0] < top + height or image.shape[1] < left + width:
        raise ValueError(
            f"the part of rows {top}…{top + height} and columns {left}…{left + width} exceeds the "
            f"image"
        )
    return cut_part(image, top, left, height, width)


@register_for(TRANSFORMS, "CropResize", "tensorflow", "onnxrt")
@dataclass(frozen=True)
class CropResize(ImageTransform):
    """Crop a part and scale the part.

    Attributes:
        x, y: left and upper edge of the part.
        width, height: size of the part.
        size, interpolation: as in `Resize`.
    """

    x: int = option(NON_NEGATIVE)
    y: int = option(NON_NEGATIVE)
    width: int = option(POSITIVE)
    height: int = option(POSITIVE)
    size: Any = option(lambda _, value: value)  # checked by `resize`
    interpolation: str = "bilinear"
    part: ClassVar[Callable[..., np.ndarray]] = staticmethod(_cut_inside)
    resize: ClassVar[Callable[..., ImageTransform]] = Resize

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resize(self.size, self.interpolation)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return the result of `Resize`."""
        part = self.part(inputs, self.y, self.x, self.height, self.width)
        return self.resize(self.size, self.interpolation).apply(part)


@register_for(TRANSFORMS, "CropToBoundingBox", "tensorflow", "onnxrt")
@dataclass(frozen=True)
class CropToBoundingBox(ImageTransform):
    """Crop the part with this upper left corner and size."""

    offset_height: int
    offset_width: int
    target_height: int = option(POSITIVE)
    target_width: int = option(POSITIVE)
    part: ClassVar[Callable[..., np.ndarray]] = staticmethod(_cut_inside)
    least_offset: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("offset_height", "offset_width"):
            check_whole_number(f"{self.label}: {name}", getattr(self, name), self.least_offset)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return the part."""
        return self.part(
            inputs, self.offset_height, self.offset_width, self.target_height, self.target_width
        )


@register_for(TRANSFORMS, "CenterCrop", "tensorflow", "onnxrt")
@dataclass(frozen=True)
class CenterCrop(ImageTransform, OurCenterCrop):
    """Crop the center of an image: `[height, width]`, or one number for both."""

    size: Any = option(parse_two_sizes)


def _parse_square_edge(name: str, value: object) -> int:
    height, width = parse_two_sizes(name, value)
    if height != width:
        raise ConfigurationError(f"{name} must be the same for height and width, got {value!r}")
    return height


@register_for(TRANSFORMS, "PaddedCenterCrop", "tensorflow")
@dataclass(frozen=True)
class PaddedCenterCrop(ImageTransform):
    """Crop the central square with `size / (size + crop_padding)` of the shorter edge.

    The result is not scaled; a Resize must follow.
    """

    size: Any = option(_parse_square_edge)
    crop_padding: int = option(NON_NEGATIVE, 0)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Crop; an odd margin is larger above and on the left."""
        height, width = check_image_rank(inputs, 2, 3).shape[:2]
        edge = int((self.size / (self.size + self.crop_padding)) * min(height, width))
        return cut_part(inputs, (height - edge + 1) // 2, (width - edge + 1) // 2, edge, edge)


@dataclass(frozen=True)
class RandomTransform(ImageTransform):
    """Random transform; an equal `seed` reproduces the sequence of random numbers."""

    seed: int = option(NON_NEGATIVE, 0, kw_only=True)
    random: np.random.RandomState = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_fields(random=np.random.RandomState(self.seed))

    def random_offset(self, down: int, right: int) -> tuple[int, int]:
        """Return a random offset up to `down` rows and `right` columns."""
        return self.random.randint(0, down + 1), self.random.randint(0, right + 1)


@dataclass(frozen=True)
class RandomFlip(RandomTransform):
    """Flip half of the images, on average."""

    axis: ClassVar[int]

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return the image or its mirror image."""
        return np.flip(inputs, self.axis) if self.random.rand(1)[0] > 0.5 else inputs


@register_for(TRANSFORMS, "RandomHorizontalFlip", "tensorflow", "onnxrt")
@dataclass(frozen=True)
class RandomHorizontalFlip(RandomFlip):
    """Flip half of the images horizontally, on average."""

    axis: ClassVar[int] = 1


@register_for(TRANSFORMS, "RandomVerticalFlip", "tensorflow", "onnxrt")
@dataclass(frozen=True)
class RandomVerticalFlip(RandomFlip):
    """Flip half of the images vertically, on average."""

    axis: ClassVar[int] = 0


@register_for(TRANSFORMS, "RandomCrop", "tensorflow", "onnxrt")
@dataclass(frozen=True)
class RandomCrop(RandomTransform):
    """Crop `[height, width]`: at random from an array, centrally from an image of a record."""

    size: Any = option(parse_two_sizes)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return the cropped part."""
        height, width = self.size
        down, right = np.subtract(check_image_rank(inputs, 2, 3).shape[:2], self.size)
        if down < 0 or right < 0:
            raise ValueError(f"the image is smaller than {height} × {width}; add a Resize before")
        if isinstance(inputs, TensorImage) or (down == 0 and right == 0):
            return cut_part(inputs, down // 2, right // 2, height, width)
        return cut_part(inputs, *self.random_offset(down, right), height, width)


@register_for(TRANSFORMS, "RandomResizedCrop", "tensorflow", "onnxrt")
@dataclass(frozen=True)
class RandomResizedCrop(RandomTransform):
    """Crop a part of random size and aspect ratio, and scale the part.

    Attributes:
        size: as in `Resize`.
        scale: smallest and largest fraction of the image's area.
        ratio: smallest and largest ratio of width to height.
        interpolation: `nearest`, `bilinear`, or for arrays also `bicubic`.
    """

    size: Any = option(parse_two_sizes)
    scale: Any = option(FROM_LOW_TO_HIGH, (0.08, 1.0))
    ratio: Any = option(FROM_LOW_TO_HIGH, (3 / 4, 4 / 3))
    interpolation: str = option(check_choice(*INTERPOLATIONS), "bilinear")

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return float32 for an image of a record, an unchanged dtype for an array."""
        height, width = check_image_rank(inputs, 3).shape[:2]
        tensor = isinstance(inputs, TensorImage)
        top, left, rows, columns = self.draw_random_part(height, width, False, tensor)
        if not tensor:
            part = cut_part(inputs, int(top), int(left), rows, columns)
            return resize_with_opencv(part, self.size[0], self.size[1], self.interpolation)
        if self.interpolation == "bicubic":
            raise ValueError(
                "interpolation must be bilinear or nearest for images of records, got bicubic"
            )
        box = (top / height, left / width, (top + rows) / height, (left + columns) / width)
        image = np.asarray(inputs)[np.newaxis].astype(np.float32)
        how = [box], [0], self.size, self.interpolation
        return compute_tensor(lambda tf: tf.image.crop_and_resize(image, *how)[0])

    def draw_random_part(
        self, height: int, width: int, whole: bool, between_pixels: bool = False
    ) -> tuple[float, float, int, int]:
        """Return top, left, height and width; of the largest central part if no draw fits.

        Args:
            height: image height.
            width: image width.
            whole: whether a part may reach the far edges of the image.
            between_pixels: whether a part may start at a fraction of a pixel.
        """
        for _ in range(_TRIES):
            area = self.random.uniform(*self.scale) * height * width
            ratio = np.exp(self.random.uniform(*np.log(self.ratio)))
            rows, columns = round(np.sqrt(area / ratio)), round(np.sqrt(area * ratio))
            down, right = height - rows + whole, width - columns + whole
            if rows and columns and down > 0 and right > 0:
                draw = self.random.uniform if between_pixels else self.random.randint
                left, top = draw(0, right), draw(0, down)
                return top, left, rows, columns
        lowest, highest = self.ratio
        rows, columns = height, width
        if width / height < lowest:
            rows = round(width / lowest)
        elif width / height > highest:
            columns = round(height * highest)
        return (height - rows) // 2, (width - columns) // 2, rows, columns
