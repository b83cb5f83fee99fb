"""COCO as images or arrays with an annotation file: `COCORaw` and `COCONpy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.records import BoxedImages
from neural_mp.compat.inc.components.registries import dataset
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
        images = [_parse_image(item, of_image.get(key, [])) for key, item in unique.items()]
    except ConfigurationError as error:
        raise DataError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path} must be a COCO annotation file with images, annotations and categories; "
            f"{type(error).__name__}: {error}"
        ) from error
    return images, names


def _parse_image(item: Mapping[str, Any], annotations: list[Mapping[str, Any]]) -> AnnotatedImage:
    return AnnotatedImage(
        name=str(validate_option("file_name", file_path, item["file_name"])),
        height=float(item["height"]),
        width=float(item["width"]),
        boxes=tuple(_parse_box(annotation["bbox"]) for annotation in annotations),
        categories=tuple(int(annotation["category_id"]) for annotation in annotations),
    )


def _parse_box(edges: Any) -> tuple[float, ...]:
    box = tuple(map(float, edges))
    if len(box) != _EDGES:
        raise TypeError(f"a bbox must hold {_EDGES} numbers, got {len(box)}")
    return box


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
    parent = existing_folder(f"{name}: root", root)
    folder = existing_folder(f"{name}: {option}", parent / str(value))
    annotations = existing_file(f"{name}: anno_dir", parent / str(anno_dir))
    return folder, annotations, *read_annotations(annotations)


@dataset("COCORaw", ignored=("num_cores", "filter"), needs=pillow)
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
        with plain_arrays(_array_path(self.folder, image)) as pixels:
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
    selected = tuple(image for image in images if _array_path(folder, image).is_file())
    if not selected:
        expected = f", e.g. {_array_path(folder, images[0])}" if images else ""
        raise DataError(
            f"COCONpy: none of the {len(images)} images in {annotations} has an array{expected}"
        )
    return ImageArrays(folder, selected, names)


def _array_path(folder: Path, image: AnnotatedImage) -> Path:
    return folder / f"{image.name}.npy"
