"""Datasets of image files: `ImageFolder`, `ImagenetRaw` and `style_transfer`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import DATASETS, registered, say_ignored, sizes
from neural_mp.data.images import ImageFolder, pillow, read_pixels
from neural_mp.data.option_checks import existing_file, existing_folder, finite_number
from neural_mp.errors import ConfigurationError, DataError

#: Files that list images with labels, in search order within the image folder.
LABEL_LISTS = ("val.txt", "val_map.txt")


class DatasetWarning(UserWarning):
    """A possible problem of a dataset that is not an error."""


@registered(DATASETS, "ImageFolder", "pytorch", "tensorflow")
def image_folder(root: object, filter: object = None) -> ImageFolder:
    """Return images from one folder per class, as RGB.

    Args:
        root: the folder of class folders.
        filter: no effect.

    Returns:
        Samples of a uint8 array `[height, width, 3]` and the class index (int) in the sorted
        names of the class folders.

    Raises:
        ConfigurationError: an option is invalid.
        DataError: `root` is missing or contains no images, or (when read) an image is broken.
        MissingFrameworkError: Pillow is not installed.
    """
    say_ignored("ImageFolder", filter=filter)
    return ImageFolder(root)


class _UnconvertedImageFolder(ImageFolder):
    """Images from one folder per class, with the channels of the files."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path, label = self.files[index]
        return read_pixels(path, None, "dataset 'ImageFolder'"), label


@registered(DATASETS, "ImageFolder", "onnxrt")
def unconverted_image_folder(root: object, filter: object = None) -> ImageFolder:
    """Return images from one folder per class, unconverted: a grey image is `[height, width]`.

    Arguments, samples and errors are otherwise those of `image_folder`.
    """
    say_ignored("ImageFolder", filter=filter)
    return _UnconvertedImageFolder(root)


@registered(DATASETS, "ImagenetRaw")
@dataclass(frozen=True)
class ImagenetRaw:
    """Image files with labels from a list.

    A sample is a uint8 array `[height, width, 3]`, RGB, and the label (int) in the list.

    Attributes:
        data_path: the folder of images.
        image_list: a file with a line `image label` for each image, with paths relative to
            `data_path`. Default: `val.txt`, or else `val_map.txt`, in `data_path`.
        filter: no effect.
        files: the images with their labels, in list order. Listed images that do not exist are
            skipped with a warning.

    Raises:
        ConfigurationError: an option is invalid.
        DataError: the folder or the list is missing, a line is malformed, or no listed image
            exists; or (when read) an image is broken.
        MissingFrameworkError: Pillow is not installed.
    """

    data_path: Any
    image_list: Any = None
    filter: Any = None
    files: tuple[tuple[Path, int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        say_ignored("ImagenetRaw", filter=self.filter)
        pillow("dataset 'ImagenetRaw'")
        folder = existing_folder("ImagenetRaw: data_path", self.data_path)
        label_list = self._label_list(folder)
        listed = _listed_images(folder, label_list)
        found = tuple((path, label) for path, label in listed if path.is_file())
        if not found:
            first = f", such as {listed[0][0]}" if listed else ""
            raise DataError(
                f"ImagenetRaw: none of the {len(listed)} images in {label_list} exists{first}"
            )
        if len(found) < len(listed):
            missing = next(path for path, _ in listed if not path.is_file())
            warnings.warn(
                f"ImagenetRaw: {len(listed) - len(found)} of {len(listed)} images in {label_list} "
                f"do not exist and are left out, such as {missing}",
                DatasetWarning,
                stacklevel=3,
            )
        object.__setattr__(self, "files", found)

    def _label_list(self, folder: Path) -> Path:
        if self.image_list is not None:
            return existing_file("ImagenetRaw: image_list", self.image_list)
        for name in LABEL_LISTS:
            if (folder / name).is_file():
                return folder / name
        raise DataError(
            f"ImagenetRaw: {folder} has no {' or '.join(LABEL_LISTS)}; set image_list to a file "
            f"with a line 'image label' for each image"
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path, label = self.files[index]
        return read_pixels(path, "RGB", "dataset 'ImagenetRaw'"), label


def _listed_images(folder: Path, label_list: Path) -> list[tuple[Path, int]]:
    try:
        lines = label_list.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{label_list} cannot be read as text in UTF-8: {error}") from error
    listed = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            name, label = line.rsplit(maxsplit=1)
            listed.append((folder / name.strip(), int(label)))
        except ValueError as error:
            raise DataError(
                f"{label_list}, line {number}: expected an image and its label, a whole number, "
                f"such as 'ILSVRC2012_val_00000001.JPEG 65', got {line!r}"
            ) from error
    return listed


@registered(DATASETS, "style_transfer", "tensorflow")
@dataclass(frozen=True)
class StyleTransfer:
    """All pairs of a content image and a style image.

    A sample is `((content, style), 0)` with two float64 arrays `[height, width, channels]` from
    0 to 1.

    Attributes:
        content_folder: folder of content images.
        style_folder: folder of style images.
        crop_ratio: ignored: as in Intel Neural Compressor, images are scaled whole, not cropped.
        resize_shape: `[width, height]` after bicubic scaling.
        image_format: ending of the images' file names.
        filter: no effect.
        pairs: the image pairs, in sample order.

    Raises:
        ConfigurationError: an option is invalid.
        DataError: a folder is missing or contains no such images, or (when read) one is broken.
        MissingFrameworkError: Pillow is not installed.
    """

    content_folder: Any
    style_folder: Any
    crop_ratio: float = 0.1
    resize_shape: Any = (256, 256)
    image_format: str = "jpg"
    filter: Any = None
    pairs: tuple[tuple[Path, Path], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        say_ignored("style_transfer", filter=self.filter)
        pillow("dataset 'style_transfer'")
        finite_number("style_transfer: crop_ratio", self.crop_ratio)
        shape = sizes("style_transfer: resize_shape", self.resize_shape)
        if len(shape) != 2:
            raise ConfigurationError(
                f"style_transfer: resize_shape must be [width, height], got {self.resize_shape!r}"
            )
        contents = self._images("content_folder", self.content_folder)
        styles = self._images("style_folder", self.style_folder)
        pairs = tuple((content, style) for content in contents for style in styles)
        object.__setattr__(self, "resize_shape", shape)
        object.__setattr__(self, "pairs", pairs)

    def _images(self, option: str, value: object) -> list[Path]:
        folder = existing_folder(f"style_transfer: {option}", value)
        found = sorted(
            path
            for path in folder.iterdir()
            if path.name.endswith(str(self.image_format)) and not path.name.startswith(".")
        )
        if not found:
            raise DataError(
                f"style_transfer: {option}: {folder} has no files ending in "
                f"{self.image_format!r}; image_format sets the ending"
            )
        return found

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[tuple[np.ndarray, np.ndarray], int]:
        content, style = self.pairs[index]
        return (self._scaled(content), self._scaled(style)), 0

    def _scaled(self, path: Path) -> np.ndarray:
        image = pillow("dataset 'style_transfer'")
        pixels = read_pixels(path, None, "dataset 'style_transfer'")
        scaled = image.fromarray(pixels).resize(self.resize_shape, image.Resampling.BICUBIC)
        values = np.asarray(scaled, dtype=np.float64)
        # An image with a maximum of 1 is in the range 0…1 already.
        return values / 255 if values.max() > 1 else values
