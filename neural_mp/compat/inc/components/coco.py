"""COCO as images or arrays with an annotation file: `COCORaw` and `COCONpy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.records import stack_images
from neural_mp.compat.inc.components.registries import DATASETS, registered, say_ignored
from neural_mp.data.images import pillow, read_pixels
from neural_mp.data.numpy_files import plain_arrays
from neural_mp.data.option_checks import existing_file, existing_folder
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.io.readers import read_data_json
from neural_mp.util.validators import file_path, validate_option

ANNOTATIONS = "annotations/instances_val2017.json"
#: Numbers per box: left, top, width, height.
_EDGES = 4


@dataclass(frozen=True)
class AnnotatedImage:
    """An image of an annotation file.

    Attributes:
        name: file name.
        height, width: in pixels.
        boxes: left, top, width, height in pixels, in file order.
        categories: category id of each box.
    """

    name: str
    height: float
    width: float
    boxes: tuple[tuple[float, ...], ...]
    categories: tuple[int, ...]


def read_annotations(path: Path) -> tuple[list[AnnotatedImage], dict[int, str]]:
    """Return the images of a COCO annotation file, and the categories: id → name.

    Source of the format: https://cocodataset.org/#format-data

    Raises:
        DataError: the file is not a COCO annotation file.
    """
    try:
        data = read_data_json(path)
        names = {int(item["id"]): str(item["name"]) for item in data["categories"]}
        of_image: dict[Any, list[Mapping[str, Any]]] = {}
        for annotation in data["annotations"]:
            if annotation["category_id"] in names and annotation["bbox"]:
                of_image.setdefault(annotation["image_id"], []).append(annotation)
        # For a duplicate id, the last image counts.
        unique = {item["id"]: item for item in data["images"]}
        images = [_image(item, of_image.get(key, [])) for key, item in unique.items()]
    except ConfigurationError as error:
        raise DataError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path} is no COCO annotation file with images, annotations and categories: "
            f"{type(error).__name__}: {error}"
        ) from error
    return images, names


def _image(item: Mapping[str, Any], annotations: list[Mapping[str, Any]]) -> AnnotatedImage:
    return AnnotatedImage(
        name=str(validate_option("file_name", file_path, item["file_name"])),
        height=float(item["height"]),
        width=float(item["width"]),
        boxes=tuple(_box(annotation["bbox"]) for annotation in annotations),
        categories=tuple(int(annotation["category_id"]) for annotation in annotations),
    )


def _box(edges: Any) -> tuple[float, ...]:
    found = tuple(map(float, edges))
    if len(found) != _EDGES:
        raise TypeError(f"a bbox has {_EDGES} numbers, found {len(found)}")
    return found


@dataclass(frozen=True)
class RawImages:
    """Images with boxes.

    Attributes:
        folder: folder of the images.
        images: the images that exist and have boxes.
        names: category id → name.
    """

    folder: Path
    images: tuple[AnnotatedImage, ...]
    names: Mapping[int, str]

    def __len__(self) -> int:
        return len(self.images)

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

    def collate_samples(self, samples: list[Any]) -> tuple[Any, Any]:
        """Return stacked images; each part of the labels as an array or a list of arrays."""
        return stack_images(samples)


@registered(DATASETS, "COCORaw")
def coco_raw(
    root: object,
    img_dir: str = "val2017",
    anno_dir: str = ANNOTATIONS,
    num_cores: object = None,
    filter: object = None,
) -> RawImages:
    """Return COCO as image files.

    Images that do not exist or have no boxes are skipped.

    Args:
        root: the dataset folder.
        img_dir: folder of the images, in `root`.
        anno_dir: the annotation file, in `root`.
        num_cores: no effect.
        filter: no effect.

    Returns:
        Samples of a uint8 array `[height, width, 3]`, RGB, and a label of four parts: the boxes,
        float64 `[N, 4]`, as ymin, xmin, ymax, xmax in fractions of the image's height and width;
        class names, bytes `[N]`; an empty array; and the file name, bytes `[]`.
        Batches are built by `stack_images`.

    Raises:
        ConfigurationError: an option is invalid.
        DataError: a file or folder is missing or unreadable, or no image is left.
        MissingFrameworkError: Pillow is not installed.
    """
    say_ignored("COCORaw", num_cores=num_cores, filter=filter)
    pillow("dataset 'COCORaw'")
    parent = existing_folder("COCORaw: root", root)
    folder = existing_folder("COCORaw: img_dir", parent / str(img_dir))
    annotations = existing_file("COCORaw: anno_dir", parent / str(anno_dir))
    images, names = read_annotations(annotations)
    kept = tuple(image for image in images if image.boxes and (folder / image.name).is_file())
    if not kept:
        raise DataError(
            f"COCORaw: none of the {len(images)} images in {annotations} has boxes and lies in "
            f"{folder}"
        )
    if any(len(box) != 4 for image in kept for box in image.boxes):
        raise DataError(f"COCORaw: {annotations}: each bbox must hold left, top, width, height")
    if any(image.height <= 0 or image.width <= 0 for image in kept):
        raise DataError(f"COCORaw: {annotations}: each height and width must be above 0")
    return RawImages(folder, kept, names)


@dataclass(frozen=True)
class ImageArrays:
    """Images as arrays, with boxes.

    Attributes:
        folder: folder of the arrays.
        images: the images that exist.
    """

    folder: Path
    images: tuple[AnnotatedImage, ...]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        image = self.images[index]
        path = _array_path(self.folder, image)
        with plain_arrays(path) as pixels:
            pairs = zip(image.categories, image.boxes, strict=True)
            return pixels, [(np.array(category), np.array(box)) for category, box in pairs]


@registered(DATASETS, "COCONpy")
def coco_npy(
    root: object,
    npy_dir: str = "val2017",
    anno_dir: str = ANNOTATIONS,
    num_cores: object = None,
    filter: object = None,
) -> ImageArrays:
    """Return COCO as one array per image, ready for the model.

    Images without an array are skipped.

    Args:
        root: the dataset folder.
        npy_dir: folder of the arrays, in `root`, named after the images: `1.jpg.npy`.
        anno_dir: the annotation file, in `root`.
        num_cores: no effect.
        filter: no effect.

    Returns:
        Samples of the unchanged array, and a list of one pair per box: the category id, int64
        `[]`, and left, top, width, height in pixels, float64 `[4]`.

    Raises:
        ConfigurationError: an option is invalid.
        DataError: a file or folder is missing or unreadable, or no image is left.
    """
    say_ignored("COCONpy", num_cores=num_cores, filter=filter)
    parent = existing_folder("COCONpy: root", root)
    folder = existing_folder("COCONpy: npy_dir", parent / str(npy_dir))
    annotations = existing_file("COCONpy: anno_dir", parent / str(anno_dir))
    images, _ = read_annotations(annotations)
    kept = tuple(image for image in images if _array_path(folder, image).is_file())
    if not kept:
        expected = f", such as {_array_path(folder, images[0])}" if images else ""
        raise DataError(
            f"COCONpy: of none of the {len(images)} images in {annotations} there is an "
            f"array{expected}"
        )
    return ImageArrays(folder, kept)


def _array_path(folder: Path, image: AnnotatedImage) -> Path:
    return folder / f"{image.name}.npy"
