"""Folders of images and masks, for segmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.data.datasets import DATASETS
from neural_mp.data.images import (
    IMAGE_SUFFIXES,
    Resize,
    import_pillow,
    read_pixels,
    read_size,
)
from neural_mp.data.option_checks import (
    check_existing_folder,
    check_one_of,
    check_whole_numbers,
    height_and_width,
)
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.util.text import format_count, with_article

_NAME = "dataset 'ImageMaskFolder'"
#: The number of file names in a message.
_MAX_NAMES = 3


@DATASETS.register("ImageMaskFolder")
@dataclass(frozen=True)
class ImageMaskFolder:
    """Images, each with a mask of the same name: `images/a/1.jpg` and `masks/a/1.png`.

    A sample is a uint8 array `[height, width, channels]` and the class of each pixel, int64
    `[height, width]`. Image and mask have the same path within their folders, apart from the
    ending; the samples are in the order of these paths.

    Attributes:
        images: the folder of images; folders inside belong to the path.
        masks: the folder of masks, with one channel or a palette.
        mode: `RGB` for images of three channels, `L` for one grayscale channel.
        size: `[height, width]` in pixels, or one number for both, to which images are resized
            bilinearly and masks to the nearest pixel; None leaves the sizes of the files.
        values: the values of mask pixels in the order of their classes, e.g. `[0, 255]` for
            classes 0 and 1; None if the values are the classes.
        files: the images with their masks, in the order of the samples.

    Raises:
        ConfigurationError: an option is wrong.
        DataError: a folder is missing or holds no images; an image or a mask lacks its partner,
            shares its name or is of another size; or (when read) a file is broken, or a mask has
            several channels or a value that is not in `values`.
        MissingFrameworkError: Pillow is not installed.
    """

    images: Any
    masks: Any
    mode: str = "RGB"
    size: Any = None
    values: Any = None
    files: tuple[tuple[Path, Path], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        import_pillow(_NAME)
        check_one_of("ImageMaskFolder: mode", self.mode, ("RGB", "L"))
        size = None if self.size is None else height_and_width("ImageMaskFolder: size", self.size)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "values", _check_values(self.values))
        images = _list_by_stem("images", self.images)
        masks = _list_by_stem("masks", self.masks)
        _check_partners("image", images, "mask", masks, self.masks)
        _check_partners("mask", masks, "image", images, self.images)
        files = tuple((images[stem], masks[stem]) for stem in sorted(images))
        for image, mask in files:
            _check_equal_sizes(image, mask)
        object.__setattr__(self, "files", files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image, mask = self.files[index]
        pixels = read_pixels(image, self.mode, _NAME)
        pixels = pixels if pixels.ndim == 3 else pixels[:, :, np.newaxis]
        classes = self._read_classes(mask)
        if self.size is None:
            return pixels, classes
        rows, columns = (  # the pixels at the centres of equal parts
            ((np.arange(new) + 0.5) * old / new).astype(np.int64)
            for old, new in zip(classes.shape, self.size, strict=True)
        )
        return Resize(self.size).apply(pixels), classes[rows[:, np.newaxis], columns]

    def _read_classes(self, mask: Path) -> np.ndarray:
        pixels = read_pixels(mask, None, _NAME)
        if pixels.ndim != 2 or pixels.dtype.kind not in "uib":
            raise DataError(
                f"the mask {mask} must hold one whole number per pixel, got {pixels.dtype} of "
                f"shape {pixels.shape}; save the classes as a grayscale or palette image"
            )
        pixels = pixels.astype(np.int64)
        return pixels if self.values is None else _number_values(pixels, self.values, mask)


def _number_values(pixels: np.ndarray, values: Sequence[int], mask: Path) -> np.ndarray:
    """Return the position of each pixel's value in `values`."""
    order = np.argsort(values)
    ordered = np.asarray(values, np.int64)[order]
    positions = np.searchsorted(ordered, pixels).clip(max=len(ordered) - 1)
    is_other = ordered[positions] != pixels
    if is_other.any():
        others = ", ".join(map(str, np.unique(pixels[is_other])[:_MAX_NAMES]))
        raise DataError(
            f"ImageMaskFolder: values {list(values)} do not hold {others}, the value of "
            f"{format_count(int(is_other.sum()), 'pixel')} in the mask {mask}"
        )
    classes: np.ndarray = order[positions]
    return classes


def _check_values(values: Any) -> tuple[int, ...] | None:
    if values is None:
        return None
    numbers = check_whole_numbers("ImageMaskFolder: values", values, minimum=0)
    if len(set(numbers)) < max(len(numbers), 2):
        raise ConfigurationError(
            f"ImageMaskFolder: values must be two or more different numbers, such as [0, 255], "
            f"got {list(numbers)}"
        )
    return numbers


def _list_by_stem(option: str, folder: object) -> dict[str, Path]:
    """Return the image files of a folder, by their paths within without the ending."""
    root = check_existing_folder(f"ImageMaskFolder: {option}", folder)
    files: dict[str, Path] = {}
    for path in sorted(root.rglob("*")):
        if path.suffix.lower() not in IMAGE_SUFFIXES or path.name.startswith("."):
            continue
        stem = path.relative_to(root).with_suffix("").as_posix()
        if stem in files:
            raise DataError(
                f"ImageMaskFolder: {option}: {files[stem]} and {path.name} differ in the ending "
                f"only; keep one of the two"
            )
        files[stem] = path
    if not files:
        raise DataError(
            f"ImageMaskFolder: {option}: {root} holds no images, which end in "
            f"{', '.join(IMAGE_SUFFIXES)}"
        )
    return files


def _check_partners(
    kind: str, files: Mapping[str, Path], other: str, others: Mapping[str, Path], folder: object
) -> None:
    alone = [stem for stem in files if stem not in others]
    if alone:
        names = ", ".join(files[stem].name for stem in alone[:_MAX_NAMES])
        more = "" if len(alone) <= _MAX_NAMES else ", …"
        raise DataError(
            f"ImageMaskFolder: {len(alone)} of {format_count(len(files), kind)} without "
            f"{with_article(other)} in {folder}: {names}{more}; image and mask must have the same "
            f"name, apart from the ending, e.g. {alone[0]}.jpg and {alone[0]}.png"
        )


def _check_equal_sizes(image: Path, mask: Path) -> None:
    """Compare the sizes that the headers of the two files name."""
    sizes = [read_size(path, _NAME) for path in (image, mask)]
    if sizes[0] != sizes[1]:
        (height, width), (mask_height, mask_width) = sizes
        raise DataError(
            f"ImageMaskFolder: the image {image} has {height} x {width} pixels, its mask {mask} "
            f"{mask_height} x {mask_width} (height x width); the sizes must be equal"
        )
