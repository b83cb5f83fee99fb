"""Kinds and colours of images in files for PyTorch: torchvision's names, without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import TRANSFORMS, registered
from neural_mp.compat.inc.components.transforms.geometry import RandomTransform
from neural_mp.compat.inc.components.transforms.image_transform import checked_rank
from neural_mp.compat.inc.components.transforms.torchvision_geometry import is_picture
from neural_mp.data.images import pillow
from neural_mp.data.option_checks import finite_numbers
from neural_mp.data.transforms import InputTransform
from neural_mp.errors import ConfigurationError

_UNBOUNDED = float("inf")
#: Option → what changes nothing, and the bounds of its factor.
_JITTER = {
    "brightness": (1.0, 0.0, _UNBOUNDED),
    "contrast": (1.0, 0.0, _UNBOUNDED),
    "saturation": (1.0, 0.0, _UNBOUNDED),
    "hue": (0.0, -0.5, 0.5),
}
_ENHANCERS = {"brightness": "Brightness", "contrast": "Contrast", "saturation": "Color"}


@registered(TRANSFORMS, "ToTensor")
@dataclass(frozen=True)
class ToTensor(InputTransform):
    """A picture `[H, W]` or `[H, W, C]` → `[C, H, W]`; 0…255 as uint8 become 0…1 as float32."""

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Other numbers keep their values and their dtype."""
        image = checked_rank(inputs, 2, 3)
        image = image[np.newaxis] if image.ndim == 2 else image.transpose(2, 0, 1)
        return image.astype(np.float32) / np.float32(255) if image.dtype == np.uint8 else image


@registered(TRANSFORMS, "ToPILImage", "pytorch")
@dataclass(frozen=True)
class ToPILImage(InputTransform):
    """Floats `[C, H, W]` from 0 to 1 → a picture `[H, W, C]`, uint8; a picture stays as it is."""

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Cut off to whole numbers."""
        if is_picture(inputs):
            return inputs
        if inputs.dtype.kind != "f" or inputs.ndim not in (2, 3):
            raise ValueError("uint8 [H, W, C], or floats [C, H, W] are expected")
        picture = (inputs * 255).astype(np.uint8)
        if picture.ndim == 3:
            picture = picture.transpose(1, 2, 0)
        return picture if picture.ndim == 3 else picture[:, :, np.newaxis]


@registered(TRANSFORMS, "AlignImageChannel", "pytorch")
@dataclass(frozen=True)
class AlignImageChannel(InputTransform):
    """Turn a picture into RGB (`dim: 3`) or into grey (`dim: 1`).

    Raises:
        ConfigurationError: `dim` is neither.
        MissingFrameworkError: Pillow is not installed.
    """

    dim: int = 3

    def __post_init__(self) -> None:
        if self.dim not in (1, 3):
            raise ConfigurationError(f"AlignImageChannel: dim must be 1 or 3, got {self.dim!r}")
        pillow("transform 'AlignImageChannel'")

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """uint8 `[H, W, dim]`."""
        picture = np.array(_in_pillow(inputs).convert("RGB" if self.dim == 3 else "L"))
        return picture if picture.ndim == 3 else picture[:, :, np.newaxis]


def _in_pillow(image: np.ndarray) -> Any:
    if not is_picture(image):
        raise ValueError("a picture is expected, uint8 [H, W] or [H, W, C]; ToTensor comes after")
    one_channel = image.ndim == 3 and image.shape[2] == 1
    return pillow("a transform").fromarray(
        np.ascontiguousarray(image[:, :, 0] if one_channel else image)
    )


@registered(TRANSFORMS, "ColorJitter", "pytorch")
@dataclass(frozen=True)
class ColorJitter(RandomTransform):
    """Change brightness, contrast, saturation and hue of a picture at random, in a random order.

    Attributes:
        brightness, contrast, saturation: how far the factor may be from 1; or `[lowest, highest]`.
        hue: how far it may be turned, in whole turns, up to 0.5; or `[lowest, highest]`.

    Raises:
        ConfigurationError: an option is wrong.
        MissingFrameworkError: Pillow is not installed.
    """

    brightness: Any = 0
    contrast: Any = 0
    saturation: Any = 0
    hue: Any = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        pillow("transform 'ColorJitter'")
        for option, (neutral, least, most) in _JITTER.items():
            found = finite_numbers(f"ColorJitter: {option}", getattr(self, option))
            if len(found) == 1 and found[0] >= 0:
                lowest = neutral - found[0]
                found = (lowest if option == "hue" else max(0.0, lowest), neutral + found[0])
            if len(found) != 2 or not least <= found[0] <= found[1] <= most:
                raise ConfigurationError(
                    f"ColorJitter: {option} must be one number, or [lowest, highest] from {least} "
                    f"to {most}, got {getattr(self, option)!r}"
                )
            object.__setattr__(self, option, found)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """A picture of the same shape."""
        from PIL import ImageEnhance

        order = self.random.permutation(len(_JITTER))
        factors = {option: self.random.uniform(*getattr(self, option)) for option in _JITTER}
        picture = _in_pillow(inputs)
        for option in (list(_JITTER)[place] for place in order):
            if factors[option] == _JITTER[option][0]:
                continue
            if option == "hue":
                picture = _turned(picture, factors[option])
            else:
                enhancer = getattr(ImageEnhance, _ENHANCERS[option])
                picture = enhancer(picture).enhance(factors[option])
        return np.array(picture, dtype=np.uint8).reshape(inputs.shape)


def _turned(picture: Any, turns: float) -> Any:
    """Other hues; grey has none."""
    if picture.mode == "L":
        return picture
    image = pillow("transform 'ColorJitter'")
    hue, saturation, value = picture.convert("HSV").split()
    moved = (np.array(hue, dtype=np.int64) + int(turns * 255)) % 256
    bands = (image.fromarray(moved.astype(np.uint8)), saturation, value)
    return image.merge("HSV", bands).convert(picture.mode)
