"""Cutting, turning and scaling images in files for PyTorch: torchvision's names, without it.

Pictures, which torchvision gets from Pillow, are uint8 arrays `[H, W]` or `[H, W, C]` here, and its
tensors are arrays of floats `[C, H, W]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from neural_mp.compat.inc.components.registries import TRANSFORMS, registered
from neural_mp.compat.inc.components.transforms.geometry import (
    INTERPOLATIONS,
    RandomTransform,
    central_part,
)
from neural_mp.compat.inc.components.transforms.image_transform import from_low_to_high, two_sizes
from neural_mp.compat.inc.components.transforms.opencv_resize import opencv_resize
from neural_mp.data.images import Resize as PillowResize
from neural_mp.data.option_checks import finite_number, finite_numbers, one_of, whole_number
from neural_mp.data.transforms import InputTransform
from neural_mp.errors import ConfigurationError

PADDING_MODES = ("constant", "edge", "reflect", "symmetric")
_TRIES = 10


def is_picture(image: np.ndarray) -> bool:
    """Whether an array is what Pillow would hold, with channels last, if any."""
    return image.dtype == np.uint8 and (
        image.ndim == 2 or (image.ndim == 3 and image.shape[2] <= 4)
    )


def axes_of(image: np.ndarray) -> tuple[int, int]:
    """The axes of height and width; raises ValueError where there are none."""
    if image.ndim < 2:
        raise ValueError("uint8 [H, W, C], or floats [C, H, W] are expected")
    return (0, 1) if is_picture(image) else (image.ndim - 2, image.ndim - 1)


def height_and_width_of(image: np.ndarray) -> tuple[int, int]:
    """In pixels."""
    rows, columns = axes_of(image)
    return image.shape[rows], image.shape[columns]


def part(image: np.ndarray, top: int, left: int, height: int, width: int) -> np.ndarray:
    """A part; 0 where it lies outside of the image."""
    full_height, full_width = height_and_width_of(image)
    margins = (-left, -top, left + width - full_width, top + height - full_height)
    padded = pad(image, tuple(max(0, margin) for margin in margins))
    rows, columns = axes_of(image)
    index: list[slice] = [slice(None)] * image.ndim
    index[rows] = slice(max(0, top), max(0, top) + height)
    index[columns] = slice(max(0, left), max(0, left) + width)
    return padded[tuple(index)]


def pad(
    image: np.ndarray, margins: tuple[int, ...], fill: Any = (0.0,), mode: str = "constant"
) -> np.ndarray:
    """Put margins (left, top, right, bottom) around an image."""
    left, top, right, bottom = margins
    if not any(margins):
        return image
    widths = [(0, 0)] * image.ndim
    rows, columns = axes_of(image)
    widths[rows], widths[columns] = (top, bottom), (left, right)
    if mode != "constant":
        return np.pad(image, widths, mode=mode)  # type: ignore[call-overload]
    padded = np.pad(image, widths)
    inside = np.pad(np.ones(image.shape, dtype=bool), widths)
    form = [-1] if is_picture(image) else [-1, 1, 1]
    values = np.array(fill if image.ndim == 3 else fill[:1], dtype=image.dtype).reshape(form)
    return np.where(inside, padded, values)


def resized(image: np.ndarray, height: int, width: int, interpolation: str) -> np.ndarray:
    """Scale as Pillow does: what becomes smaller is averaged.

    Raises:
        ValueError: it is neither a picture nor `[C, H, W]`.
    """
    if is_picture(image):
        return PillowResize([height, width], interpolation).apply(image)
    if image.ndim != 3:
        raise ValueError("uint8 [H, W, C], or floats [C, H, W] are expected")
    if interpolation == "nearest":  # PyTorch takes the upper left one of the pixels, as OpenCV does
        return np.stack([opencv_resize(channel, width, height, "nearest") for channel in image])
    channels_last = np.moveaxis(image.astype(np.float32), 0, -1)
    scaled = PillowResize([height, width], interpolation).apply(channels_last)
    return np.moveaxis(scaled, -1, 0)


def _shorter_edge_or_both(option: str, value: object) -> tuple[int, ...]:
    """One size for the shorter edge, or height and width."""
    if isinstance(value, list | tuple) and len(value) == 2:
        return two_sizes(option, value)
    return two_sizes(option, value)[:1]


@registered(TRANSFORMS, "Resize", "pytorch")
@dataclass(frozen=True)
class Resize(InputTransform):
    """Scale an image: one size is its shorter edge, and its shape stays; two are its new edges.

    Attributes:
        size: one number, or `[height, width]`.
        interpolation: `nearest`, `bilinear` or `bicubic`.

    Raises:
        ConfigurationError: an option is wrong.
        MissingFrameworkError: Pillow is not installed.
    """

    size: Any
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _shorter_edge_or_both("Resize: size", self.size))
        PillowResize(self.size * 2 if len(self.size) == 1 else self.size, self.interpolation)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """An image of the same kind."""
        height, width = height_and_width_of(inputs)
        if len(self.size) == 2:
            return resized(inputs, self.size[0], self.size[1], self.interpolation)
        edge, shorter = self.size[0], min(height, width)
        if shorter == edge:
            return inputs
        new = [edge if size == shorter else int(edge * size / shorter) for size in (height, width)]
        return resized(inputs, new[0], new[1], self.interpolation)


@registered(TRANSFORMS, "CropResize", "pytorch")
@dataclass(frozen=True)
class CropResize(InputTransform):
    """Cut out a part, and scale it as `Resize` does.

    Raises:
        ConfigurationError: an option is wrong.
        MissingFrameworkError: Pillow is not installed.
    """

    x: int
    y: int
    width: int
    height: int
    size: Any
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for option, least in (("x", 0), ("y", 0), ("width", 1), ("height", 1)):
            whole_number(f"CropResize: {option}", getattr(self, option), minimum=least)
        Resize(self.size, self.interpolation)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """An image of the same kind."""
        chosen = part(inputs, self.y, self.x, self.height, self.width)
        return Resize(self.size, self.interpolation).apply(chosen)


@registered(TRANSFORMS, "CropToBoundingBox", "pytorch")
@dataclass(frozen=True)
class CropToBoundingBox(InputTransform):
    """Cut out the part with this upper left corner and this size; 0 outside of the image.

    Raises:
        ConfigurationError: an option is no whole number.
    """

    offset_height: int
    offset_width: int
    target_height: int
    target_width: int

    def __post_init__(self) -> None:
        for option in ("offset_height", "offset_width"):
            whole_number(f"CropToBoundingBox: {option}", getattr(self, option))
        for option in ("target_height", "target_width"):
            whole_number(f"CropToBoundingBox: {option}", getattr(self, option), minimum=1)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """The part."""
        return part(
            inputs, self.offset_height, self.offset_width, self.target_height, self.target_width
        )


@registered(TRANSFORMS, "CenterCrop", "pytorch")
@dataclass(frozen=True)
class CenterCrop(InputTransform):
    """Cut `[height, width]` out of the middle; 0 around an image that is smaller.

    Raises:
        ConfigurationError: the size is wrong.
    """

    size: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", two_sizes("CenterCrop: size", self.size))

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Halves of pixels are rounded to even numbers."""
        top, left = (
            round((old - new) / 2) if old >= new else -((new - old) // 2)
            for old, new in zip(height_and_width_of(inputs), self.size, strict=True)
        )
        return part(inputs, top, left, *self.size)


@registered(TRANSFORMS, "Pad", "pytorch")
@dataclass(frozen=True)
class Pad(InputTransform):
    """Put margins around an image.

    Attributes:
        padding: one number, `[left and right, top and bottom]`, or `[left, top, right, bottom]`.
        fill: what margins are filled with, one number or one for each channel.
        padding_mode: `constant` for `fill`, or `edge`, `reflect`, `symmetric`, as in `numpy.pad`.

    Raises:
        ConfigurationError: an option is wrong.
    """

    padding: Any
    fill: Any = 0
    padding_mode: str = "constant"

    def __post_init__(self) -> None:
        given = self.padding if isinstance(self.padding, list | tuple) else [self.padding]
        sizes = tuple(whole_number("Pad: padding", size, minimum=0) for size in given)
        if len(sizes) not in (1, 2, 4):
            raise ConfigurationError(f"Pad: padding must be 1, 2 or 4 numbers, got {self.padding}")
        object.__setattr__(self, "padding", (sizes * 4)[:4])
        object.__setattr__(self, "fill", finite_numbers("Pad: fill", self.fill))
        one_of("Pad: padding_mode", self.padding_mode, PADDING_MODES)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """A larger image of the same kind."""
        return pad(inputs, self.padding, self.fill, self.padding_mode)


@dataclass(frozen=True)
class RandomFlip(RandomTransform):
    """Turn over a share `p` of the images, on average."""

    p: float = 0.5
    of_axes: ClassVar[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        name = f"{type(self).__name__}: p"
        if not 0 <= finite_number(name, self.p) <= 1:
            raise ConfigurationError(f"{name} must be from 0 to 1, got {self.p!r}")

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """The image, or its mirror image."""
        axis = axes_of(inputs)[self.of_axes]
        return np.flip(inputs, axis) if self.random.rand() < self.p else inputs


@registered(TRANSFORMS, "RandomHorizontalFlip", "pytorch")
class RandomHorizontalFlip(RandomFlip):
    """Turn over a share `p` of the images, on average, from left to right."""

    of_axes: ClassVar[int] = 1


@registered(TRANSFORMS, "RandomVerticalFlip", "pytorch")
class RandomVerticalFlip(RandomFlip):
    """Turn over a share `p` of the images, on average, upside down."""

    of_axes: ClassVar[int] = 0


@registered(TRANSFORMS, "RandomCrop", "pytorch")
@dataclass(frozen=True)
class RandomCrop(RandomTransform):
    """Cut `[height, width]` out somewhere.

    Attributes:
        size: one number, or `[height, width]`.
        padding: margins that are put around before, as those of `Pad`.
        pad_if_needed: put margins around where the image is too small.
        fill, padding_mode: as those of `Pad`.

    Raises:
        ConfigurationError: an option is wrong.
    """

    size: Any
    padding: Any = None
    pad_if_needed: bool = False
    fill: Any = 0
    padding_mode: str = "constant"
    margins: tuple[int, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "size", two_sizes("RandomCrop: size", self.size))
        around = Pad(self.padding or 0, self.fill, self.padding_mode)
        object.__setattr__(self, "margins", around.padding)
        object.__setattr__(self, "fill", around.fill)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """A part of that size; raises ValueError where the image is smaller."""
        image = pad(inputs, self.margins, self.fill, self.padding_mode)
        if self.pad_if_needed:
            height, width = height_and_width_of(image)
            rows, columns = max(0, self.size[0] - height), max(0, self.size[1] - width)
            image = pad(image, (columns, rows, columns, rows), self.fill, self.padding_mode)
        down, right = np.subtract(height_and_width_of(image), self.size)
        if down < 0 or right < 0:
            raise ValueError(f"it is smaller than {self.size}; pad_if_needed: true mends that")
        top, left = self.random.randint(0, down + 1), self.random.randint(0, right + 1)
        return part(image, top, left, *self.size)


@registered(TRANSFORMS, "RandomResizedCrop", "pytorch")
@dataclass(frozen=True)
class RandomResizedCrop(RandomTransform):
    """Cut out a part of a random size and shape, and scale it to `[height, width]`.

    Attributes:
        size: one number, or `[height, width]`.
        scale: the least and the largest share of the image that is cut out.
        ratio: the least and the largest width of the part, in heights.
        interpolation: `nearest`, `bilinear` or `bicubic`.

    Raises:
        ConfigurationError: an option is wrong.
    """

    size: Any
    scale: Any = (0.08, 1.0)
    ratio: Any = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "size", two_sizes("RandomResizedCrop: size", self.size))
        for option in ("scale", "ratio"):
            value = from_low_to_high(f"RandomResizedCrop: {option}", getattr(self, option))
            object.__setattr__(self, option, value)
        one_of("RandomResizedCrop: interpolation", self.interpolation, INTERPOLATIONS)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """An image of the same kind."""
        chosen = part(inputs, *self._part(*height_and_width_of(inputs)))
        return resized(chosen, self.size[0], self.size[1], self.interpolation)

    def _part(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Top, left, height and width; the whole width or height, where no part is found."""
        for _ in range(_TRIES):
            area = self.random.uniform(*self.scale) * height * width
            ratio = math.exp(self.random.uniform(*np.log(self.ratio)))
            columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < columns <= width and 0 < rows <= height:
                top = self.random.randint(0, height - rows + 1)
                left = self.random.randint(0, width - columns + 1)
                return top, left, rows, columns
        return central_part(height, width, self.ratio)
