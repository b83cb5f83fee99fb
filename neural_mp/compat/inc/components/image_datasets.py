"""Datasets of image files: `COCORaw`, `COCONpy`, `ImageFolder`, `ImagenetRaw`, `style_transfer`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.records import BoxedImages
from neural_mp.compat.inc.components.registries import (
    Options,
    check_optional,
    check_parsed,
    dataset,
    option,
    parse_sizes,
)
from neural_mp.data.annotations import AnnotatedImage, read_annotations
from neural_mp.data.images import ImageFolder, import_pillow, read_pixels
from neural_mp.data.numpy_files import iterate_plain_arrays
from neural_mp.data.option_checks import (
    check_existing_file,
    check_existing_folder,
    check_finite_number,
)
from neural_mp.errors import DataError

ANNOTATIONS = "annotations/instances_val2017.json"


@dataclass(frozen=True)
class CocoImages:
    """Images with boxes.

    Attributes:
        folder: folder of the images or arrays.
        images: the images that exist.
        names: category id → name.
    """

    folder: Path
    images: tuple[AnnotatedImage, ...]
    names: Mapping[int, str]

    def __len__(self) -> int:
        return len(self.images)


class RawImages(BoxedImages, CocoImages):
    """Image files with boxes."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        image = self.images[index]
        pixels = read_pixels(self.folder / image.name, "RGB", "dataset 'COCORaw'")
        left, top, width, height = np.array(image.boxes, dtype=np.float64).T
        left, width = left / image.width, width / image.width
        top, height = top / image.height, height / image.height
        label = (
            np.stack([top, left, top + height, left + width], axis=-1),
            np.array([self.names[category].encode() for category in image.categories]),
            np.array([]),
            np.array(image.name.encode()),
        )
        return pixels, label


def _open_annotations(
    name: str, root: object, option: str, value: str, anno_dir: str
) -> tuple[Path, Path, list[AnnotatedImage], dict[int, str]]:
    """Return the folder, the annotation file, and the images and categories in the file."""
    parent = check_existing_folder(f"{name}: root", root)
    folder = check_existing_folder(f"{name}: {option}", parent / str(value))
    annotations = check_existing_file(f"{name}: anno_dir", parent / str(anno_dir))
    return folder, annotations, *read_annotations(annotations)


@dataset("COCORaw", ignored=("num_cores", "filter"), needs=import_pillow)
def coco_raw(root: object, img_dir: str = "val2017", anno_dir: str = ANNOTATIONS) -> RawImages:
    """Return COCO as image files.

    Images that do not exist or have no boxes are skipped.

    Args:
        root: the dataset folder.
        img_dir: folder of the images, in `root`.
        anno_dir: the annotation file, in `root`.

    Returns:
        Samples of a uint8 array `[height, width, 3]`, RGB, and a label of four parts: the boxes,
        float64 `[N, 4]`, as ymin, xmin, ymax, xmax in fractions of the image's height and width;
        class names, bytes `[N]`; an empty array; and the file name, bytes `[]`.
        Batches are those of `BoxedImages`.
    """
    folder, annotations, images, names = _open_annotations(
        "COCORaw", root, "img_dir", img_dir, anno_dir
    )
    selected = tuple(image for image in images if image.boxes and (folder / image.name).is_file())
    if not selected:
        raise DataError(
            f"COCORaw: none of the {len(images)} images in {annotations} has boxes and exists in "
            f"{folder}"
        )
    if any(image.height <= 0 or image.width <= 0 for image in selected):
        raise DataError(f"COCORaw: {annotations}: each height and width must be above 0 pixels")
    return RawImages(folder, selected, names)


class ImageArrays(CocoImages):
    """Images as arrays, with boxes."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        image = self.images[index]
        path = _make_array_path(self.folder, image)
        with iterate_plain_arrays(path) as pixels:
            if not isinstance(pixels, np.ndarray):
                raise DataError(f"{path} must hold a single array, got an archive")
            pairs = zip(image.categories, image.boxes, strict=True)
            return pixels, [(np.array(category), np.array(box)) for category, box in pairs]


@dataset("COCONpy", ignored=("num_cores", "filter"))
def coco_npy(root: object, npy_dir: str = "val2017", anno_dir: str = ANNOTATIONS) -> ImageArrays:
    """Return COCO as one array per image, ready for the model.

    Options are those of `COCORaw`, with `npy_dir`, the folder of the arrays, named after the
    images: `1.jpg.npy`. Images without an array are skipped.

    Returns:
        Samples of the unchanged array, and a list of one pair per box: the category id, int64
        `[]`, and left, top, width, height in pixels, float64 `[4]`.
    """
    folder, annotations, images, names = _open_annotations(
        "COCONpy", root, "npy_dir", npy_dir, anno_dir
    )
    selected = tuple(image for image in images if _make_array_path(folder, image).is_file())
    if not selected:
        expected = f", e.g. {_make_array_path(folder, images[0])}" if images else ""
        raise DataError(
            f"COCONpy: none of the {len(images)} images in {annotations} has an array{expected}"
        )
    return ImageArrays(folder, selected, names)


def _make_array_path(folder: Path, image: AnnotatedImage) -> Path:
    return folder / f"{image.name}.npy"


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


def _find_default_list(folder: Path) -> Path:
    label_list = next((folder / name for name in LABEL_LISTS if (folder / name).is_file()), None)
    if label_list is None:
        raise DataError(
            f"ImagenetRaw: {folder} has no {' or '.join(LABEL_LISTS)}; set image_list to a file "
            f"with a line 'image label' for each image"
        )
    return label_list


@dataset("ImagenetRaw", needs=import_pillow)
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

    data_path: Any = option(check_existing_folder)
    image_list: Any = option(check_optional(check_existing_file), None)
    files: tuple[tuple[Path, int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        label_list = self.image_list or _find_default_list(self.data_path)
        listed = _read_listed_images(self.data_path, label_list)
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
        self.set_fields(files=existing)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path, label = self.files[index]
        return read_pixels(path, "RGB", "dataset 'ImagenetRaw'"), label


def _read_listed_images(folder: Path, label_list: Path) -> list[tuple[Path, int]]:
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


_WIDTH_AND_HEIGHT = check_parsed(parse_sizes, "[width, height]", lambda found: len(found) == 2)


@dataset("style_transfer", "tensorflow", needs=import_pillow)
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

    content_folder: Any = option(check_existing_folder)
    style_folder: Any = option(check_existing_folder)
    crop_ratio: float = option(check_finite_number, 0.1)
    resize_shape: Any = option(_WIDTH_AND_HEIGHT, (256, 256))
    image_format: str = "jpg"
    pairs: tuple[tuple[Path, Path], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        contents, styles = self._find_images("content_folder"), self._find_images("style_folder")
        self.set_fields(pairs=tuple((content, style) for content in contents for style in styles))

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
        image = import_pillow("dataset 'style_transfer'")
        pixels = read_pixels(path, None, "dataset 'style_transfer'")
        scaled = image.fromarray(pixels).resize(self.resize_shape, image.Resampling.BICUBIC)
        values = np.asarray(scaled, dtype=np.float64)
        # An image with a maximum of 1 is in the range 0…1 already.
        return values / 255 if values.max() > 1 else values
