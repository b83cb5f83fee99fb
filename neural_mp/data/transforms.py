"""Registry of transforms, and transforms that need only numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from neural_mp.data.option_checks import (
    check_finite_number,
    check_finite_numbers,
    check_one_of,
    check_whole_number,
    check_whole_numbers,
    parse_numeric_dtype,
)
from neural_mp.data.registry import Registry
from neural_mp.errors import ConfigurationError, DataError

Transform = Callable[[Any], Any]
"""A sample `(inputs, label)` → a sample."""

TRANSFORMS = Registry("transform", group="neural_mp.transforms")


class InputTransform:
    """A transform of a sample's inputs, one array; the label stays unchanged.

    A transform is a frozen dataclass that validates its options when created.
    """

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return the changed inputs; raise ValueError with the reason if they do not fit."""
        raise NotImplementedError

    def convert_to_array(self, inputs: object) -> np.ndarray:
        """Convert the inputs of a sample to the argument of `apply`."""
        return np.asarray(inputs)

    def __call__(self, sample: object) -> tuple[np.ndarray, Any]:
        """Transform one sample `(inputs, label)`.

        Raises:
            DataError: the sample is not such a pair, or the inputs do not fit.
        """
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise DataError(
                f"a sample of {type(self).__name__} must be (inputs, label), got "
                f"{type(sample).__name__}"
            )
        inputs, label = sample
        if isinstance(inputs, dict | tuple | list):
            raise DataError(
                f"inputs of {type(self).__name__} must be one array, got "
                f"{type(inputs).__name__}; name a transform of your own as module:attribute"
            )
        array = self.convert_to_array(inputs)
        try:
            return self.apply(array), label
        except ValueError as error:
            raise DataError(
                f"{self} does not accept inputs of shape {array.shape}: {error}"
            ) from error


@TRANSFORMS.register("Rescale")
@dataclass(frozen=True)
class Rescale(InputTransform):
    """Multiply by `scale`, by default from 0…255 to 0…1; return float32.

    Raises:
        ConfigurationError: `scale` is not a number.
    """

    scale: float = 1 / 255

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", check_finite_number("Rescale: scale", self.scale))

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Scale in float64, rounded to float32 once."""
        return (inputs.astype(np.float64) * self.scale).astype(np.float32)


@TRANSFORMS.register("Normalize")
@dataclass(frozen=True)
class Normalize(InputTransform):
    """Compute `(inputs - mean) / std` per channel; return float32.

    Attributes:
        mean: one number, or one per channel.
        std: one number above 0, or one per channel.
        channels: `last` for `[..., C]`, `first` for `[C, ...]`.

    Raises:
        ConfigurationError: an option is wrong.
    """

    mean: Any
    std: Any
    channels: str = "last"

    def __post_init__(self) -> None:
        mean = check_finite_numbers("Normalize: mean", self.mean)
        std = check_finite_numbers("Normalize: std", self.std)
        if min(std) <= 0:
            raise ConfigurationError(f"Normalize: std must be above 0, got {self.std!r}")
        if len(mean) != len(std) and 1 not in (len(mean), len(std)):
            raise ConfigurationError(
                f"Normalize: mean has {len(mean)} channels and std {len(std)}; "
                f"give equally many, or one number for all"
            )
        check_one_of("Normalize: channels", self.channels, ("last", "first"))
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Normalize per channel, in float32."""
        expected = max(len(self.mean), len(self.std))
        axis = -1 if self.channels == "last" else 0
        if expected > 1 and (inputs.ndim == 0 or inputs.shape[axis] != expected):
            raise ValueError(f"{expected} channels are expected {self.channels}")
        form = [1] * inputs.ndim
        form[axis:] = [-1] if axis == -1 else [-1] + [1] * (inputs.ndim - 1)
        mean, std = (np.array(v, dtype=np.float32).reshape(form) for v in (self.mean, self.std))
        return (inputs.astype(np.float32) - mean) / std


@TRANSFORMS.register("Cast")
@dataclass(frozen=True)
class Cast(InputTransform):
    """Change the dtype.

    Raises:
        ConfigurationError: `dtype` is not a numpy dtype of integers or floats.
    """

    dtype: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", parse_numeric_dtype("Cast: dtype", self.dtype))

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Call `numpy.ndarray.astype`."""
        return inputs.astype(self.dtype)


@TRANSFORMS.register("Transpose")
@dataclass(frozen=True)
class Transpose(InputTransform):
    """Permute the axes of one sample (without the batch) to the order `perm`.

    Raises:
        ConfigurationError: `perm` is not a permutation of 0, 1, ….
    """

    perm: Any

    def __post_init__(self) -> None:
        perm = check_whole_numbers("Transpose: perm", self.perm, minimum=0)
        if not perm or sorted(perm) != list(range(len(perm))):
            raise ConfigurationError(
                f"Transpose: perm must hold each of 0, 1, … once, such as [2, 0, 1], "
                f"got {self.perm!r}"
            )
        object.__setattr__(self, "perm", perm)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Call `numpy.transpose`."""
        return np.transpose(inputs, self.perm)


@TRANSFORMS.register("ToCHW", "HWC2CHW")
@dataclass(frozen=True)
class ToCHW(InputTransform):
    """Move channels to the front: `[H, W, C]` → `[C, H, W]`."""

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return a transposed view."""
        if inputs.ndim != 3:
            raise ValueError("the shape must be [H, W, C]; add a channel axis with ExpandDims")
        return np.transpose(inputs, (2, 0, 1))


@TRANSFORMS.register("Reshape")
@dataclass(frozen=True)
class Reshape(InputTransform):
    """Reshape one sample (without the batch); one size may be -1, inferred from the rest.

    Raises:
        ConfigurationError: `shape` is not a list of sizes.
    """

    shape: Any

    def __post_init__(self) -> None:
        shape = check_whole_numbers("Reshape: shape", self.shape, minimum=-1)
        if shape.count(-1) > 1:
            raise ConfigurationError(f"Reshape: only one size may be -1, got {self.shape!r}")
        object.__setattr__(self, "shape", shape)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Call `numpy.reshape`."""
        return inputs.reshape(self.shape)


@TRANSFORMS.register("ExpandDims")
@dataclass(frozen=True)
class ExpandDims(InputTransform):
    """Insert an axis of size 1.

    Raises:
        ConfigurationError: `axis` is not a whole number.
    """

    axis: int = 0

    def __post_init__(self) -> None:
        check_whole_number("ExpandDims: axis", self.axis)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Call `numpy.expand_dims`."""
        return np.expand_dims(inputs, self.axis)
