"""Datasets of image files: `ImageFolder`, `ImagenetRaw` and `style_transfer`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import (
    Options,
    dataset,
    option,
    optional,
    parsed,
    sizes,
)
from neural_mp.data.images import ImageFolder, pillow, read_pixels
from neural_mp.data.option_checks import existing_file, existing_folder, finite_number
from neural_mp.errors import DataError

#: Files that list images with labels, in search order within the image folder.
LABEL_LISTS = ("val.txt", "val_map.txt")


class DatasetWarning(UserWarning):
    """A possible problem of a dataset that is not an error."""


@dataset("ImageFolder", "pytorch", "tensorflow")
def image_folder(root: object) -> ImageFolder:
    """Return the images of one folder per class in `root`, as RGB."""
    return ImageFolder(root)


class _UnconvertedImageFolder(ImageFolder):
    """Images from one folder per class, with the channels of the files."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path, label = self.files[index]
        return read_pixels(path, None, "dataset 'ImageFolder'"), label


@dataset("ImageFolder", "onnxrt")
def unconverted_image_folder(root: object) -> ImageFolder:
    """Return `image_folder` with the channels of the files: a grey image is `[height, width]`."""
    return _UnconvertedImageFolder(root)


def _default_list(folder: Path) -> Path:
    label_list = next((folder / name for name in LABEL_LISTS if (folder / name).is_file()), None)
    if label_list is None:
        raise DataError(
            f"ImagenetRaw: {folder} has no {' or '.join(LABEL_LISTS)}; set image_list to a file "
            f"with a line 'image label' for each image"
        )
    return label_list


@dataset("ImagenetRaw", needs=pillow)
@dataclass(frozen=True)
class ImagenetRaw(Options):
    """Image files with labels from a list.

    A sample is a uint8 array `[height, width, 3]`, RGB, and the label (int) in the list.

    Attributes:
        data_path: the folder of images.
        image_list: a file with a line `image label` for each image, with paths relative to
            `data_path`. Default: `val.txt`, or else `val_map.txt`, in `data_path`.
        files: the images with their labels, in list order. Listed images that do not exist are
            skipped with a warning.
    """

    data_path: Any = option(existing_folder)
    image_list: Any = option(optional(existing_file), None)
    files: tuple[tuple[Path, int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        label_list = self.image_list or _default_list(self.data_path)
        listed = _listed_images(self.data_path, label_list)
        existing = tuple((path, label) for path, label in listed if path.is_file())
        missing = [path for path, _ in listed if not path.is_file()]
        if not existing:
            first = f", e.g. {missing[0]}" if missing else ""
            raise DataError(
                f"ImagenetRaw: none of the {len(listed)} images in {label_list} exists{first}"
            )
        if missing:
            warnings.warn(
                f"ImagenetRaw: {len(missing)} of {len(listed)} images in {label_list} do not exist "
                f"and are skipped, e.g. {missing[0]}",
                DatasetWarning,
                stacklevel=3,
            )
        self.put(files=existing)

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
                f"e.g. 'ILSVRC2012_val_00000001.JPEG 65', got {line!r}"
            ) from error
    return listed


_WIDTH_AND_HEIGHT = parsed(sizes, "[width, height]", lambda found: len(found) == 2)


@dataset("style_transfer", "tensorflow", needs=pillow)
@dataclass(frozen=True)
class StyleTransfer(Options):
    """All pairs of a content image and a style image.

    A sample is `((content, style), 0)` with two float64 arrays `[height, width, channels]` from
    0 to 1.

    Attributes:
        content_folder: folder of content images.
        style_folder: folder of style images.
        crop_ratio: ignored: as in Intel Neural Compressor, images are scaled whole, not cropped.
        resize_shape: `[width, height]` after bicubic scaling.
        image_format: ending of the images' file names.
        pairs: the image pairs, in sample order.
    """

    content_folder: Any = option(existing_folder)
    style_folder: Any = option(existing_folder)
    crop_ratio: float = option(finite_number, 0.1)
    resize_shape: Any = option(_WIDTH_AND_HEIGHT, (256, 256))
    image_format: str = "jpg"
    pairs: tuple[tuple[Path, Path], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        contents, styles = self._find_images("content_folder"), self._find_images("style_folder")
        self.put(pairs=tuple((content, style) for content in contents for style in styles))

    def _find_images(self, option: str) -> list[Path]:
        folder: Path = getattr(self, option)
        paths = sorted(
            path
            for path in folder.iterdir()
            if path.name.endswith(str(self.image_format)) and not path.name.startswith(".")
        )
        if not paths:
            raise DataError(
                f"style_transfer: {option}: {folder} has no files ending in "
                f"{self.image_format!r}; set image_format to the ending of the images"
            )
        return paths

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[tuple[np.ndarray, np.ndarray], int]:
        content, style = self.pairs[index]
        return (self._load_scaled(content), self._load_scaled(style)), 0

    def _load_scaled(self, path: Path) -> np.ndarray:
        image = pillow("dataset 'style_transfer'")
        pixels = read_pixels(path, None, "dataset 'style_transfer'")
        scaled = image.fromarray(pixels).resize(self.resize_shape, image.Resampling.BICUBIC)
        values = np.asarray(scaled, dtype=np.float64)
        # An image with a maximum of 1 is in the range 0…1 already.
        return values / 255 if values.max() > 1 else values
