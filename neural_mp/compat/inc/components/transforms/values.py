"""Transforms of the values or the dtype of an image or a label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import (
    POSITIVE,
    TRANSFORMS,
    Options,
    above_zero,
    check_choice,
    check_optional,
    check_parsed,
    option,
    parse_numbers,
    predictions_and_labels,
    register_for,
)
from neural_mp.compat.inc.components.transforms.image_transform import (
    ImageTransform,
    TensorImage,
    check_image_rank,
    compute_tensor,
    import_opencv,
    is_picture,
)
from neural_mp.data.option_checks import check_one_of, check_whole_number
from neural_mp.data.transforms import Normalize as OurNormalize
from neural_mp.data.transforms import Transpose as OurTranspose
from neural_mp.errors import ConfigurationError, DataError

_DTYPES = (
    "float32", "float64", "float16", "uint8", "int8", "int16", "int32", "int64",
    "uint16", "uint32", "uint64", "bool", "complex64", "complex128",
)  # fmt: skip
_LEAST_STD = 1e-6
_STD = check_parsed(parse_numbers, f"at least {_LEAST_STD}", lambda found: min(found) >= _LEAST_STD)
_LARGEST_BYTE = np.float32(255)


#: `[divisor, subtrahend]`; None for no change.
_TWO_STEPS = check_optional(
    check_parsed(
        parse_numbers,
        "[divisor, subtrahend] with a divisor other than 0",
        lambda found: len(found) == 2 and found[0] != 0,
    )
)


def _rescale_image(image: np.ndarray, rescale: Sequence[float] | None) -> np.ndarray:
    if rescale is None:
        return image
    return image.astype(np.float32) / np.float32(rescale[0]) - np.float32(rescale[1])


@register_for(TRANSFORMS, "Normalize", "onnxrt")
@dataclass(frozen=True)
class Normalize(ImageTransform, OurNormalize):
    """`(image - mean) / std` for channels last; returns float32.

    Attributes:
        mean, std: one number, or one per channel; no change by default.
        channels: `last`, or `first`.
    """

    mean: Any = option(parse_numbers, (0.0,))
    std: Any = option(_STD, (1.0,))
    channels: str = "last"


@register_for(TRANSFORMS, "Normalize", "tensorflow")
@dataclass(frozen=True)
class NormalizeAndRescale(Normalize):
    """`Normalize`; then `image / rescale[0] - rescale[1]` if `rescale` is set."""

    rescale: Any = option(_TWO_STEPS, None)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return float32."""
        return _rescale_image(super().apply(inputs), self.rescale)


@register_for(TRANSFORMS, "Normalize", "pytorch")
def normalize_channels_first(mean: object = (0.0,), std: object = (1.0,)) -> Normalize:
    """`(image - mean) / std` for channels first, as returned by ToTensor."""
    return Normalize(mean, std, channels="first")


@register_for(TRANSFORMS, "KerasRescale", "tensorflow")
@dataclass(frozen=True)
class KerasRescale(ImageTransform):
    """`image / rescale[0] - rescale[1]`, in float32; no change without `rescale`."""

    rescale: Any = option(_TWO_STEPS, None)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return float32."""
        return _rescale_image(inputs, self.rescale)


@register_for(TRANSFORMS, "Rescale", "tensorflow", "onnxrt")
@dataclass(frozen=True)
class Rescale(ImageTransform):
    """Divide by 255; returns float32."""

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Map 0…255 to 0…1."""
        return inputs.astype(np.float32) / _LARGEST_BYTE


def _parse_numpy_dtype(name: str, value: Any) -> str:
    if value in ("bfloat16", "string"):
        raise ConfigurationError(
            f"{name} must be a numpy dtype, got {value!r}; set float32, and let tuning choose the "
            f"precision"
        )
    return check_one_of(name, value, _DTYPES)


@register_for(TRANSFORMS, "Cast", "onnxrt", "pytorch")
@dataclass(frozen=True)
class Cast(ImageTransform):
    """Change the dtype, not the values."""

    dtype: str = option(_parse_numpy_dtype, "float32")

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Convert with `numpy.ndarray.astype`."""
        return inputs.astype(self.dtype)


@register_for(TRANSFORMS, "Cast", "tensorflow")
@dataclass(frozen=True)
class CastOfTensors(Cast):
    """`Cast` for arrays; also scales images of records to the range of the new dtype."""

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Convert with `numpy.ndarray.astype` or `tf.image.convert_image_dtype`."""
        if isinstance(inputs, TensorImage):
            return convert_image_dtype(np.asarray(inputs), np.dtype(self.dtype))
        return super().apply(inputs)


def convert_image_dtype(image: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Change the dtype with `tf.image.convert_image_dtype`: uint8 255 becomes float 1.

    Raises:
        ValueError: a dtype is neither an integer nor a float type.
    """
    if image.dtype.kind not in "iuf" or dtype.kind not in "iuf":
        raise ValueError(f"images of records must hold integers or floats, got {image.dtype}")
    return compute_tensor(lambda tf: tf.image.convert_image_dtype(image, dtype))


@register_for(TRANSFORMS, "QuantizedInput", "tensorflow")
@dataclass(frozen=True)
class QuantizedInput(ImageTransform):
    """Quantize an image to 8 bits, truncated to integers; no change without `scale`.

    Attributes:
        dtype: `int8`, or `uint8`, which adds 128.
        scale: factor applied to the image.
    """

    dtype: str = option(check_choice("int8", "uint8"), "int8")
    scale: float | None = option(check_optional(above_zero), None)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Quantize; saturate at the range of the dtype."""
        if self.scale is None:
            return inputs
        scaled = inputs.astype(np.float32) * np.float32(self.scale)
        bounds = np.iinfo(self.dtype)
        shifted = scaled + np.float32(128 if self.dtype == "uint8" else 0)
        return shifted.clip(bounds.min, bounds.max).astype(self.dtype)


@register_for(TRANSFORMS, "Transpose")
@dataclass(frozen=True)
class Transpose(ImageTransform, OurTranspose):
    """Permute the axes of one image (without the batch) to the order `perm`."""


@register_for(TRANSFORMS, "ToArray")
@register_for(TRANSFORMS, "ToNDArray")
@dataclass(frozen=True)
class ToArray(ImageTransform):
    """Convert any image, e.g. of Pillow, to an array; arrays are unchanged."""

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return the unchanged values."""
        return inputs


@register_for(TRANSFORMS, "ToTensor")
@dataclass(frozen=True)
class ToTensor(ImageTransform):
    """Convert a picture `[H, W]` or `[H, W, C]` to `[C, H, W]`; uint8 0…255 to float32 0…1."""

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Convert; other dtypes keep their values."""
        image = check_image_rank(inputs, 2, 3)
        image = image[np.newaxis] if image.ndim == 2 else image.transpose(2, 0, 1)
        return image.astype(np.float32) / _LARGEST_BYTE if image.dtype == np.uint8 else image


@register_for(TRANSFORMS, "ToPILImage", "pytorch")
@dataclass(frozen=True)
class ToPILImage(ImageTransform):
    """Convert floats `[C, H, W]` in 0…1 to a uint8 picture `[H, W, C]`; keep a picture as is."""

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Convert; values are truncated to integers."""
        if is_picture(inputs):
            return inputs
        if inputs.dtype.kind != "f" or inputs.ndim not in (2, 3):
            raise ValueError(f"expected uint8 [H, W, C] or floats [C, H, W], got {inputs.dtype}")
        picture = (inputs * 255).astype(np.uint8)
        return picture.transpose(1, 2, 0) if picture.ndim == 3 else picture[:, :, np.newaxis]


@register_for(TRANSFORMS, "AlignImageChannel", "tensorflow", "onnxrt")
@dataclass(frozen=True)
class AlignImageChannel(ImageTransform):
    """Convert an image to `dim` channels: `[H, W]` is repeated, RGBA loses A, RGB becomes grey."""

    dim: int = option(check_parsed(POSITIVE, "at most 4", lambda dim: dim <= 4), 3)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return an array `[H, W, dim]`."""
        if inputs.ndim == 2:
            return np.repeat(inputs[:, :, np.newaxis], self.dim, axis=2)
        if inputs.shape[-1] == self.dim:
            return inputs
        if inputs.shape[-1] == 4 and self.dim == 3:
            return inputs[..., :3]
        if inputs.shape[-1] == 3 and self.dim == 1:
            with import_opencv() as cv2:
                grey = cv2.cvtColor(np.ascontiguousarray(inputs), cv2.COLOR_RGB2GRAY)
            return np.asarray(grey)[..., np.newaxis]
        raise ValueError(f"{inputs.shape[-1]} channels cannot be converted to {self.dim}")


@register_for(TRANSFORMS, "LabelShift")
@dataclass(frozen=True)
class LabelShift(Options):
    """Subtract a number from every label, e.g. 1 if class 0 is the background."""

    label_shift: int = option(check_whole_number, 0)

    def __call__(self, sample: Any) -> tuple[Any, Any]:
        """`(predictions, labels)` → unchanged predictions, and labels of unchanged type."""
        predictions, labels = predictions_and_labels(self, sample)
        try:
            return predictions, self._shift_labels(labels)
        except TypeError as error:
            raise DataError(f"LabelShift: labels must be numbers: {error}") from error

    def _shift_labels(self, labels: Any) -> Any:
        if not isinstance(labels, list):
            return np.asarray(labels) - self.label_shift
        if labels and isinstance(labels[0], tuple):
            return [tuple(np.array(label) - self.label_shift) for label in labels]
        if labels and isinstance(labels[0], np.ndarray):
            return [label - self.label_shift for label in labels]
        return (np.array(labels) - self.label_shift).tolist()
