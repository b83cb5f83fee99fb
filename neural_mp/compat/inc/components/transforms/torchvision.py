"""Image transforms for PyTorch with torchvision's names, without torchvision.

torchvision's Pillow images are uint8 arrays `[H, W]` or `[H, W, C]` here, called pictures, and its
tensors are float arrays `[C, H, W]`. Pillow scales and colors pictures, PyTorch scales floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from neural_mp.compat.inc.components.registries import (
    TRANSFORMS,
    choice,
    option,
    parsed,
    registered,
)
from neural_mp.compat.inc.components.transforms import geometry
from neural_mp.compat.inc.components.transforms.geometry import RandomTransform
from neural_mp.compat.inc.components.transforms.image_transform import (
    ImageTransform,
    axes_of,
    height_and_width_of,
    is_picture,
    two_sizes,
)
from neural_mp.data.images import Resize as PillowResize
from neural_mp.data.images import pillow
from neural_mp.data.option_checks import finite_number, finite_numbers, package, whole_number
from neural_mp.errors import ConfigurationError
from neural_mp.util.validators import MAX_SEED

PADDING_MODES = ("constant", "edge", "reflect", "symmetric")
_UNBOUNDED = float("inf")
#: Option → neutral value, bounds of its factor, and Pillow's name.
_JITTER = {
    "brightness": (1.0, 0.0, _UNBOUNDED, "Brightness"),
    "contrast": (1.0, 0.0, _UNBOUNDED, "Contrast"),
    "saturation": (1.0, 0.0, _UNBOUNDED, "Color"),
    "hue": (0.0, -0.5, 0.5, ""),
}


def part(image: np.ndarray, top: int, left: int, height: int, width: int) -> np.ndarray:
    """Return a part, 0 outside the image."""
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
    """Pad an image by margins (left, top, right, bottom)."""
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
    """Scale as torchvision does: with antialiasing, except for `nearest`.

    Raises:
        ValueError: the image is neither a picture nor `[C, H, W]`.
    """
    if is_picture(image):
        return PillowResize([height, width], interpolation).apply(image)
    if image.ndim != 3:
        raise ValueError(f"expected uint8 [H, W, C] or floats [C, H, W], got shape {image.shape}")
    torch = package("torch", "a transform of floats", "torch")
    nearest = interpolation == "nearest"
    floats = torch.from_numpy(image.astype(np.float64 if nearest else np.float32))
    scaled = torch.nn.functional.interpolate(
        floats[None], (height, width), mode=interpolation, antialias=not nearest
    )[0].numpy()
    return np.asarray(scaled.astype(image.dtype) if nearest else scaled)


@registered(TRANSFORMS, "Resize", "pytorch")
@dataclass(frozen=True)
class Resize(ImageTransform):
    """Scale an image: one size sets the shorter edge and keeps the aspect ratio; two set both.

    Attributes:
        size: one number, or `[height, width]`.
        interpolation: `nearest`, `bilinear` or `bicubic`.
    """

    size: Any
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        is_pair = isinstance(self.size, list | tuple) and len(self.size) == 2
        sizes = two_sizes("Resize: size", self.size)
        PillowResize(sizes, self.interpolation)
        self.put(size=sizes if is_pair else sizes[:1])

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return an image of unchanged type."""
        height, width = height_and_width_of(inputs)
        if len(self.size) == 2:
            return resized(inputs, self.size[0], self.size[1], self.interpolation)
        edge, shorter = self.size[0], min(height, width)
        if shorter == edge:
            return inputs
        new = [edge if size == shorter else int(edge * size / shorter) for size in (height, width)]
        return resized(inputs, new[0], new[1], self.interpolation)


@registered(TRANSFORMS, "CropResize", "pytorch")
class CropResize(geometry.CropResize):
    """Crop a part, 0 outside the image, and scale as `Resize` does."""

    part: ClassVar[Callable[..., np.ndarray]] = staticmethod(part)
    resize: ClassVar[Callable[..., ImageTransform]] = Resize


@registered(TRANSFORMS, "CropToBoundingBox", "pytorch")
class CropToBoundingBox(geometry.CropToBoundingBox):
    """Crop the part with this upper left corner and size; 0 outside the image."""

    part: ClassVar[Callable[..., np.ndarray]] = staticmethod(part)
    least_offset: ClassVar[int] = -MAX_SEED


@registered(TRANSFORMS, "CenterCrop", "pytorch")
@dataclass(frozen=True)
class CenterCrop(ImageTransform):
    """Crop the central `[height, width]`; a smaller image is padded with 0."""

    size: Any = option(two_sizes)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Crop; half pixels are rounded to even numbers."""
        top, left = (
            round((old - new) / 2) if old >= new else -((new - old) // 2)
            for old, new in zip(height_and_width_of(inputs), self.size, strict=True)
        )
        return part(inputs, top, left, *self.size)


def _parse_margins(name: str, value: Any) -> tuple[int, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    sizes = tuple(whole_number(name, size, minimum=0) for size in items)
    if len(sizes) not in (1, 2, 4):
        raise ConfigurationError(f"{name} must be 1, 2 or 4 numbers, got {value!r}")
    return (sizes * 4)[:4]


@registered(TRANSFORMS, "Pad", "pytorch")
@dataclass(frozen=True)
class Pad(ImageTransform):
    """Pad an image.

    Attributes:
        padding: one number, `[left and right, top and bottom]`, or `[left, top, right, bottom]`.
        fill: value of the margins, one number or one per channel.
        padding_mode: `constant` for `fill`, or `edge`, `reflect`, `symmetric`, as in `numpy.pad`.
    """

    padding: Any = option(_parse_margins)
    fill: Any = option(finite_numbers, 0)
    padding_mode: str = option(choice(*PADDING_MODES), "constant")

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return a larger image of unchanged type."""
        return pad(inputs, self.padding, self.fill, self.padding_mode)


_PROBABILITY = parsed(finite_number, "from 0 to 1", lambda found: 0 <= found <= 1)


@dataclass(frozen=True)
class RandomFlip(geometry.RandomFlip):
    """Flip a fraction `p` of the images, on average."""

    p: float = option(_PROBABILITY, 0.5)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return the image or its mirror image."""
        axis = axes_of(inputs)[self.axis]
        return np.flip(inputs, axis) if self.random.rand() < self.p else inputs


@registered(TRANSFORMS, "RandomHorizontalFlip", "pytorch")
class RandomHorizontalFlip(RandomFlip):
    """Flip a fraction `p` of the images horizontally, on average."""

    axis: ClassVar[int] = 1


@registered(TRANSFORMS, "RandomVerticalFlip", "pytorch")
class RandomVerticalFlip(RandomFlip):
    """Flip a fraction `p` of the images vertically, on average."""

    axis: ClassVar[int] = 0


@registered(TRANSFORMS, "RandomCrop", "pytorch")
@dataclass(frozen=True)
class RandomCrop(RandomTransform):
    """Crop `[height, width]` at random.

    Attributes:
        size: one number, or `[height, width]`.
        padding: margins added before the crop, as in `Pad`.
        pad_if_needed: whether to pad an image that is too small.
        fill, padding_mode: as in `Pad`.
    """

    size: Any = option(two_sizes)
    padding: Any = None
    pad_if_needed: bool = False
    fill: Any = 0
    padding_mode: str = "constant"
    around: Pad = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.put(around=Pad(self.padding or 0, self.fill, self.padding_mode))

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return a part of that size; raise ValueError if the image is smaller."""
        image = self.around.apply(inputs)
        if self.pad_if_needed:
            lacking = np.subtract(self.size, height_and_width_of(image)).clip(min=0)
            rows, columns = map(int, lacking)
            margins = columns, rows, columns, rows
            image = pad(image, margins, self.around.fill, self.padding_mode)
        down, right = np.subtract(height_and_width_of(image), self.size)
        if down < 0 or right < 0:
            raise ValueError(f"the image is smaller than {self.size}; set pad_if_needed: true")
        return part(image, *self.corner(down, right), *self.size)


@registered(TRANSFORMS, "RandomResizedCrop", "pytorch")
class RandomResizedCrop(geometry.RandomResizedCrop):
    """Crop a part of random size and aspect ratio, and scale to `[height, width]`."""

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return an image of unchanged type."""
        top, left, rows, columns = self.drawn_part(*height_and_width_of(inputs), whole=True)
        chosen = part(inputs, int(top), int(left), rows, columns)
        return resized(chosen, self.size[0], self.size[1], self.interpolation)


@registered(TRANSFORMS, "AlignImageChannel", "pytorch")
@dataclass(frozen=True)
class AlignImageChannel(ImageTransform):
    """Convert a picture to RGB (`dim: 3`) or grey (`dim: 1`)."""

    dim: int = 3

    def __post_init__(self) -> None:
        if self.dim not in (1, 3):
            raise ConfigurationError(f"AlignImageChannel: dim must be 1 or 3, got {self.dim!r}")
        pillow("transform 'AlignImageChannel'")

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return uint8 `[H, W, dim]`."""
        picture = np.array(_in_pillow(inputs).convert("RGB" if self.dim == 3 else "L"))
        return picture if picture.ndim == 3 else picture[:, :, np.newaxis]


def _in_pillow(image: np.ndarray) -> Any:
    if not is_picture(image):
        raise ValueError(
            f"expected uint8 [H, W] or [H, W, C], got {image.dtype}; move ToTensor after"
        )
    one_channel = image.ndim == 3 and image.shape[2] == 1
    return pillow("a transform").fromarray(
        np.ascontiguousarray(image[:, :, 0] if one_channel else image)
    )


@registered(TRANSFORMS, "ColorJitter", "pytorch")
@dataclass(frozen=True)
class ColorJitter(RandomTransform):
    """Change brightness, contrast, saturation and hue of a picture at random, in random order.

    Attributes:
        brightness, contrast, saturation: maximum distance of the factor from 1; or
            `[lowest, highest]`.
        hue: maximum shift in full turns, up to 0.5; or `[lowest, highest]`.
    """

    brightness: Any = 0
    contrast: Any = 0
    saturation: Any = 0
    hue: Any = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        pillow("transform 'ColorJitter'")
        for name, (neutral, least, most, _) in _JITTER.items():
            value = getattr(self, name)
            bounds = finite_numbers(f"ColorJitter: {name}", value)
            if len(bounds) == 1 and bounds[0] >= 0:
                lowest = neutral - bounds[0]
                bounds = (lowest if name == "hue" else max(0.0, lowest), neutral + bounds[0])
            if len(bounds) != 2 or not least <= bounds[0] <= bounds[1] <= most:
                raise ConfigurationError(
                    f"ColorJitter: {name} must be one number, or [lowest, highest] from {least} "
                    f"to {most}, got {value!r}"
                )
            self.put(**{name: bounds})

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return a picture of unchanged shape."""
        from PIL import ImageEnhance

        order = self.random.permutation(len(_JITTER))
        factors = {name: self.random.uniform(*getattr(self, name)) for name in _JITTER}
        picture = _in_pillow(inputs)
        for name in np.array(list(_JITTER))[order]:
            neutral, *_, enhancer = _JITTER[name]
            if name == "hue" and factors[name] != neutral:
                picture = _shift_hue(picture, factors[name])
            elif factors[name] != neutral:
                picture = getattr(ImageEnhance, enhancer)(picture).enhance(factors[name])
        return np.array(picture, dtype=np.uint8).reshape(inputs.shape)


def _shift_hue(picture: Any, turns: float) -> Any:
    if picture.mode == "L":
        return picture
    image = pillow("transform 'ColorJitter'")
    hue, saturation, value = picture.convert("HSV").split()
    moved = (np.array(hue, dtype=np.int64) + int(turns * 255)) % 256
    bands = (image.fromarray(moved.astype(np.uint8)), saturation, value)
    return image.merge("HSV", bands).convert(picture.mode)
