"""Common parts of the image transforms: image types, checks, and scaling libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import Options, check_parsed
from neural_mp.data.option_checks import check_finite_numbers, height_and_width, import_package
from neural_mp.data.transforms import InputTransform
from neural_mp.errors import one_line

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
#: Method → OpenCV's name, in the order of OpenCV's numbers.
OPENCV_METHODS = {
    "nearest": "INTER_NEAREST",
    "bilinear": "INTER_LINEAR",
    "bicubic": "INTER_CUBIC",
    "area": "INTER_AREA",
}
_OPENCV_DTYPES = ("uint8", "uint16", "int16", "float32", "float64")


class TensorImage(np.ndarray):
    """An image that is a TensorFlow tensor in INC.

    INC decodes images of records into tensors; its transforms treat tensors by the rules of
    TensorFlow, and arrays by those of OpenCV and numpy.
    """


def as_tensor_image(image: object) -> TensorImage:
    """Return a view of the image, marked as a tensor."""
    return np.asarray(image).view(TensorImage)


def is_tensor_image(image: object) -> bool:
    """Whether an image is marked as a tensor, or is a TensorFlow tensor."""
    return isinstance(image, TensorImage) or type(image).__module__.startswith("tensorflow.")


def is_picture(image: np.ndarray) -> bool:
    """Whether an array is a Pillow-like image: uint8, with channels, if any, last."""
    return image.dtype == np.uint8 and (
        image.ndim == 2 or (image.ndim == 3 and image.shape[2] <= 4)
    )


def find_image_axes(image: np.ndarray) -> tuple[int, int]:
    """Return the axes of height and width; raise ValueError if there are none."""
    if image.ndim < 2:
        raise ValueError(f"expected uint8 [H, W, C] or floats [C, H, W], got shape {image.shape}")
    return (0, 1) if is_picture(image) else (image.ndim - 2, image.ndim - 1)


def height_and_width_of(image: np.ndarray) -> tuple[int, int]:
    """Return height and width in pixels."""
    rows, columns = find_image_axes(image)
    return image.shape[rows], image.shape[columns]


class ImageTransform(Options, InputTransform):
    """Base of image transforms; a `TensorImage` remains a `TensorImage`."""

    def convert_to_array(self, inputs: object) -> np.ndarray:
        """Return the image as an array; a `TensorImage` for a tensor."""
        return as_tensor_image(inputs) if is_tensor_image(inputs) else np.asarray(inputs)

    def __call__(self, sample: Any) -> tuple[np.ndarray, Any]:
        """Transform one sample `(image, label)`."""
        changed, label = super().__call__(sample)
        return (as_tensor_image(changed) if is_tensor_image(sample[0]) else changed), label


def parse_two_sizes(option: str, value: object) -> tuple[int, int]:
    """Parse two sizes in pixels, in the given order; a single number sets both."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        value = value[0]
    return height_and_width(option, value)


#: `[lowest, highest]`, both above 0.
FROM_LOW_TO_HIGH = check_parsed(
    check_finite_numbers,
    "[lowest, highest] with both above 0",
    lambda found: len(found) == 2 and 0 < found[0] <= found[1],
)


def check_image_rank(image: np.ndarray, *ranks: int) -> np.ndarray:
    """Return `image`; raise ValueError unless its number of axes is in `ranks`."""
    if image.ndim not in ranks:
        shapes = {2: "[H, W]", 3: "[H, W, C]", 4: "[N, H, W, C]"}
        raise ValueError(f"shape must be {' or '.join(shapes[rank] for rank in ranks)}")
    return image


def cut_part(image: np.ndarray, top: int, left: int, height: int, width: int) -> np.ndarray:
    """Return a part of an image `[H, W]` or `[H, W, C]`."""
    return image[top : top + height, left : left + width]


def compute_tensor(function: Callable[[Any], Any]) -> np.ndarray:
    """Return the tensor that a TensorFlow function computes, on the CPU.

    Raises:
        ValueError: TensorFlow rejects the image.
    """
    tf = import_package("tensorflow", "a transform of images", "tensorflow")
    from tensorflow.python.eager import context

    try:
        # Scripts for TensorFlow 1 read data inside a graph, or with eager execution disabled. A
        # session for every image would take thirty times as long as a small image does.
        with context.eager_mode(), tf.device("CPU"):
            return np.asarray(function(tf).numpy())
    except (tf.errors.OpError, TypeError) as error:
        raise ValueError(one_line(error)) from error


def resize_with_tensorflow(image: np.ndarray, height: int, width: int, method: str) -> np.ndarray:
    """Scale `[H, W, C]` with `tf.image.resize`; returns float32, or for `nearest` the same dtype.

    Raises:
        ValueError: the shape or the dtype does not fit.
    """
    pixels = np.asarray(check_image_rank(image, 3))
    pixels = pixels if method == "nearest" else pixels.astype(np.float32)
    return compute_tensor(lambda tf: tf.image.resize(pixels, (height, width), method))


@contextmanager
def import_opencv() -> Iterator[Any]:
    """Yield the OpenCV module; convert its errors to ValueError."""
    cv2 = import_package("cv2", "a transform of arrays", "opencv")
    try:
        yield cv2
    except cv2.error as error:
        raise ValueError(f"{one_line(error)}; Cast to uint8 or float32 before") from error


def resize_with_opencv(image: np.ndarray, width: int, height: int, method: str) -> np.ndarray:
    """Scale `[H, W]` or `[H, W, C]` with OpenCV's `resize`, with the width first.

    Returns:
        An array of unchanged dtype; a single channel loses its axis.

    Raises:
        ValueError: the shape or the dtype does not fit.
    """
    check_image_rank(image, 2, 3)
    if image.dtype.name not in _OPENCV_DTYPES:  # results of others depend on OpenCV's version
        supported = ", ".join(_OPENCV_DTYPES)
        raise ValueError(f"dtype must be one of {supported}, got {image.dtype}; add a Cast before")
    with import_opencv() as cv2:
        how = getattr(cv2, OPENCV_METHODS[method])
        return np.asarray(cv2.resize(np.asarray(image), (width, height), interpolation=how))
