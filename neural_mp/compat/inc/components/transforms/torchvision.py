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
    check_choice,
    check_parsed,
    option,
    register_for,
)
from neural_mp.compat.inc.components.transforms import geometry
from neural_mp.compat.inc.components.transforms.geometry import RandomTransform
from neural_mp.compat.inc.components.transforms.image_transform import (
    ImageTransform,
    find_image_axes,
    height_and_width_of,
    is_picture,
    parse_two_sizes,
)
from neural_mp.data.images import Resize as PillowResize
from neural_mp.data.images import import_pillow
from neural_mp.data.option_checks import (
    check_finite_number,
    check_finite_numbers,
    check_whole_number,
    import_package,
)
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


def cut_part(image: np.ndarray, top: int, left: int, height: int, width: int) -> np.ndarray:
    """Return a part, 0 outside the image."""
    full_height, full_width = height_and_width_of(image)
    margins = (-left, -top, left + width - full_width, top + height - full_height)
    padded = pad_image(image, tuple(max(0, margin) for margin in margins))
    rows, columns = find_image_axes(image)
    index: list[slice] = [slice(None)] * image.ndim
    index[rows] = slice(max(0, top), max(0, top) + height)
    index[columns] = slice(max(0, left), max(0, left) + width)
    return padded[tuple(index)]


def pad_image(
    image: np.ndarray, margins: tuple[int, ...], fill: Any = (0.0,), mode: str = "constant"
) -> np.ndarray:
    """Pad an image by margins (left, top, right, bottom)."""
    left, top, right, bottom = margins
    if not any(margins):
        return image
    widths = [(0, 0)] * image.ndim
    rows, columns = find_image_axes(image)
    widths[rows], widths[columns] = (top, bottom), (left, right)
    if mode != "constant":
        return np.pad(image, widths, mode=mode)  # type: ignore[call-overload]
    padded = np.pad(image, widths)
    inside = np.pad(np.ones(image.shape, dtype=bool), widths)
    form = [-1] if is_picture(image) else [-1, 1, 1]
    values = np.array(fill if image.ndim == 3 else fill[:1], dtype=image.dtype).reshape(form)
    return np.where(inside, padded, values)


def resize_image(image: np.ndarray, height: int, width: int, interpolation: str) -> np.ndarray:
    """Scale as torchvision does: with antialiasing, except for `nearest`.

    Raises:
        ValueError: the image is neither a picture nor `[C, H, W]`.
    """
    if is_picture(image):
        return PillowResize([height, width], interpolation).apply(image)
    if image.ndim != 3:
        raise ValueError(f"expected uint8 [H, W, C] or floats [C, H, W], got shape {image.shape}")
    torch = import_package("torch", "a transform of floats", "torch")
    nearest = interpolation == "nearest"
    floats = torch.from_numpy(image.astype(np.float64 if nearest else np.float32))
    scaled = torch.nn.functional.interpolate(
        floats[None], (height, width), mode=interpolation, antialias=not nearest
    )[0].numpy()
    return np.asarray(scaled.astype(image.dtype) if nearest else scaled)


@register_for(TRANSFORMS, "Resize", "pytorch")
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
        sizes = parse_two_sizes("Resize: size", self.size)
        PillowResize(sizes, self.interpolation)
        self.set_fields(size=sizes if is_pair else sizes[:1])

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return an image of unchanged type."""
        height, width = height_and_width_of(inputs)
        if len(self.size) == 2:
            return resize_image(inputs, self.size[0], self.size[1], self.interpolation)
        edge, shorter = self.size[0], min(height, width)
        if shorter == edge:
            return inputs
        new = [edge if size == shorter else int(edge * size / shorter) for size in (height, width)]
        return resize_image(inputs, new[0], new[1], self.interpolation)


@register_for(TRANSFORMS, "CropResize", "pytorch")
class CropResize(geometry.CropResize):
    """Crop a part, 0 outside the image, and scale as `Resize` does."""

    part: ClassVar[Callable[..., np.ndarray]] = staticmethod(cut_part)
    resize: ClassVar[Callable[..., ImageTransform]] = Resize


@register_for(TRANSFORMS, "CropToBoundingBox", "pytorch")
class CropToBoundingBox(geometry.CropToBoundingBox):
    """Crop the part with this upper left corner and size; 0 outside the image."""

    part: ClassVar[Callable[..., np.ndarray]] = staticmethod(cut_part)
    least_offset: ClassVar[int] = -MAX_SEED


@register_for(TRANSFORMS, "CenterCrop", "pytorch")
@dataclass(frozen=True)
class CenterCrop(ImageTransform):
    """Crop the central `[height, width]`; a smaller image is padded with 0."""

    size: Any = option(parse_two_sizes)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Crop; half pixels are rounded to even numbers."""
        top, left = (
            round((old - new) / 2) if old >= new else -((new - old) // 2)
            for old, new in zip(height_and_width_of(inputs), self.size, strict=True)
        )
        return cut_part(inputs, top, left, *self.size)


def _parse_margins(name: str, value: Any) -> tuple[int, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    sizes = tuple(check_whole_number(name, size, minimum=0) for size in items)
    if len(sizes) not in (1, 2, 4):
        raise ConfigurationError(f"{name} must be 1, 2 or 4 numbers, got {value!r}")
    return (sizes * 4)[:4]


@register_for(TRANSFORMS, "Pad", "pytorch")
@dataclass(frozen=True)
class Pad(ImageTransform):
    """Pad an image.

    Attributes:
        padding: one number, `[left and right, top and bottom]`, or `[left, top, right, bottom]`.
        fill: value of the margins, one number or one per channel.
        padding_mode: `constant` for `fill`, or `edge`, `reflect`, `symmetric`, as in `numpy.pad`.
    """

    padding: Any = option(_parse_margins)
    fill: Any = option(check_finite_numbers, 0)
    padding_mode: str = option(check_choice(*PADDING_MODES), "constant")

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return a larger image of unchanged type."""
        return pad_image(inputs, self.padding, self.fill, self.padding_mode)


_PROBABILITY = check_parsed(check_finite_number, "from 0 to 1", lambda found: 0 <= found <= 1)


@dataclass(frozen=True)
class RandomFlip(geometry.RandomFlip):
    """Flip a fraction `p` of the images, on average."""

    p: float = option(_PROBABILITY, 0.5)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return the image or its mirror image."""
        axis = find_image_axes(inputs)[self.axis]
        return np.flip(inputs, axis) if self.random.rand() < self.p else inputs


@register_for(TRANSFORMS, "RandomHorizontalFlip", "pytorch")
class RandomHorizontalFlip(RandomFlip):
    """Flip a fraction `p` of the images horizontally, on average."""

    axis: ClassVar[int] = 1


@register_for(TRANSFORMS, "RandomVerticalFlip", "pytorch")
class RandomVerticalFlip(RandomFlip):
    """Flip a fraction `p` of the images vertically, on average."""

    axis: ClassVar[int] = 0


@register_for(TRANSFORMS, "RandomCrop", "pytorch")
@dataclass(frozen=True)
class RandomCrop(RandomTransform):
    """Crop `[height, width]` at random.

    Attributes:
        size: one number, or `[height, width]`.
        padding: margins added before the crop, as in `Pad`.
        pad_if_needed: whether to pad an image that is too small.
        fill, padding_mode: as in `Pad`.
    """

    size: Any = option(parse_two_sizes)
    padding: Any = None
    pad_if_needed: bool = False
    fill: Any = 0
    padding_mode: str = "constant"
    around: Pad = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_fields(around=Pad(self.padding or 0, self.fill, self.padding_mode))

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return a part of that size; raise ValueError if the image is smaller."""
        image = self.around.apply(inputs)
        if self.pad_if_needed:
            lacking = np.subtract(self.size, height_and_width_of(image)).clip(min=0)
            rows, columns = map(int, lacking)
            margins = columns, rows, columns, rows
            image = pad_image(image, margins, self.around.fill, self.padding_mode)
        down, right = np.subtract(height_and_width_of(image), self.size)
        if down < 0 or right < 0:
            raise ValueError(f"the image is smaller than {self.size}; set pad_if_needed: true")
        return cut_part(image, *self.random_offset(down, right), *self.size)


@register_for(TRANSFORMS, "RandomResizedCrop", "pytorch")
class RandomResizedCrop(geometry.RandomResizedCrop):
    """Crop a part of random size and aspect ratio, and scale to `[height, width]`."""

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return an image of unchanged type."""
        top, left, rows, columns = self.draw_random_part(*height_and_width_of(inputs), whole=True)
        chosen = cut_part(inputs, int(top), int(left), rows, columns)
        return resize_image(chosen, self.size[0], self.size[1], self.interpolation)


@register_for(TRANSFORMS, "AlignImageChannel", "pytorch")
@dataclass(frozen=True)
class AlignImageChannel(ImageTransform):
    """Convert a picture to RGB (`dim: 3`) or grey (`dim: 1`)."""

    dim: int = 3

    def __post_init__(self) -> None:
        if self.dim not in (1, 3):
            raise ConfigurationError(f"AlignImageChannel: dim must be 1 or 3, got {self.dim!r}")
        import_pillow("transform 'AlignImageChannel'")

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
    return import_pillow("a transform").fromarray(
        np.ascontiguousarray(image[:, :, 0] if one_channel else image)
    )


@register_for(TRANSFORMS, "ColorJitter", "pytorch")
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
        import_pillow("transform 'ColorJitter'")
        for name, (neutral, least, most, _) in _JITTER.items():
            value = getattr(self, name)
            bounds = check_finite_numbers(f"ColorJitter: {name}", value)
            if len(bounds) == 1 and bounds[0] >= 0:
                lowest = neutral - bounds[0]
                bounds = (lowest if name == "hue" else max(0.0, lowest), neutral + bounds[0])
            if len(bounds) != 2 or not least <= bounds[0] <= bounds[1] <= most:
                raise ConfigurationError(
                    f"ColorJitter: {name} must be one number, or [lowest, highest] from {least} "
                    f"to {most}, got {value!r}"
                )
            self.set_fields(**{name: bounds})

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
    image = import_pillow("transform 'ColorJitter'")
    hue, saturation, value = picture.convert("HSV").split()
    moved = (np.array(hue, dtype=np.int64) + int(turns * 255)) % 256
    bands = (image.fromarray(moved.astype(np.uint8)), saturation, value)
    return image.merge("HSV", bands).convert(picture.mode)
