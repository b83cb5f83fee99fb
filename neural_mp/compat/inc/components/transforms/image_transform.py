"""What the transforms have in common: kinds of images, and checks on options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neural_mp.data.option_checks import finite_numbers, height_and_width
from neural_mp.data.transforms import InputTransform
from neural_mp.errors import ConfigurationError


class TensorImage(np.ndarray):
    """An image that is a tensor of TensorFlow where the file comes from.

    There, images of records are decoded into tensors, and the transforms treat tensors by the rules
    of TensorFlow, but arrays by those of OpenCV and numpy.
    """


def as_tensor_image(image: object) -> TensorImage:
    """The same numbers, marked as a tensor."""
    return np.asarray(image).view(TensorImage)


def is_tensor_image(image: object) -> bool:
    """Whether an image is marked as a tensor, or is one of TensorFlow."""
    return isinstance(image, TensorImage) or type(image).__module__.startswith("tensorflow.")


class ImageTransform(InputTransform):
    """Changes an image; what was a `TensorImage` stays one."""

    def array_of(self, inputs: object) -> np.ndarray:
        """The image as an array; a `TensorImage` for a tensor."""
        return as_tensor_image(inputs) if is_tensor_image(inputs) else np.asarray(inputs)

    def __call__(self, sample: Any) -> tuple[np.ndarray, Any]:
        """Transform one sample `(image, label)`.

        Raises:
            DataError: it is no such pair, or the image does not fit.
        """
        changed, label = super().__call__(sample)
        return (as_tensor_image(changed) if is_tensor_image(sample[0]) else changed), label


def two_sizes(option: str, value: object) -> tuple[int, int]:
    """Two sizes in pixels, in the order given; one number, or a list of one, stands for both."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        value = value[0]
    return height_and_width(option, value)


def numbers(option: str, value: object) -> tuple[float, ...]:
    """One number, a list, or numbers in one text: `123.68 116.78 103.94`."""
    if isinstance(value, str):
        try:
            value = [float(word) for word in value.replace(",", " ").split()]
        except ValueError as error:
            raise ConfigurationError(f"{option} must be numbers, got {value!r}") from error
    return finite_numbers(option, value)


def from_low_to_high(option: str, value: object) -> tuple[float, float]:
    """`[lowest, highest]`, both above 0."""
    found = finite_numbers(option, value)
    if len(found) != 2 or not 0 < found[0] <= found[1]:
        raise ConfigurationError(
            f"{option} must be [lowest, highest] with both above 0, got {value!r}"
        )
    return found[0], found[1]


def checked_rank(image: np.ndarray, *ranks: int) -> np.ndarray:
    """`image`, if it has one of these numbers of axes; raises ValueError otherwise."""
    if image.ndim not in ranks:
        shapes = {2: "[H, W]", 3: "[H, W, C]", 4: "[N, H, W, C]"}
        raise ValueError(f"an image has the shape {' or '.join(shapes[rank] for rank in ranks)}")
    return image


def cut(image: np.ndarray, top: int, left: int, height: int, width: int) -> np.ndarray:
    """A part of an image `[H, W]` or `[H, W, C]`."""
    return image[top : top + height, left : left + width]
