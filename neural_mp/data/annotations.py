"""Annotations of objects in images: files of COCO, and label files of YOLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from neural_mp.data.option_checks import import_package
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.io.readers import read_data_json
from neural_mp.util.validators import file_path, preview_value, validate_option

#: Numbers per box: left, top, width, height.
_EDGES = 4
#: Numbers of a row of a label file that is a box: class, center, width, height.
_BOX_ROW = 5


@dataclass(frozen=True)
class AnnotatedImage:
    """An image of an annotation file.

    Attributes:
        name: file name.
        height, width: in pixels.
        boxes: left, top, width, height in pixels, in file order.
        categories: category id of each box.
        entries: the annotation of each box, as in the file.
    """

    name: str
    height: float
    width: float
    boxes: tuple[tuple[float, ...], ...]
    categories: tuple[int, ...]
    entries: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)


def read_annotations(path: Path) -> tuple[list[AnnotatedImage], dict[int, str]]:
    """Return the images of a COCO annotation file, and the categories: id → name.

    Source of the format: https://cocodataset.org/#format-data

    Raises:
        DataError: the file is no annotation file of COCO.
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
        entries=tuple(annotations),
    )


def _parse_box(edges: Any) -> tuple[float, ...]:
    box = tuple(map(float, edges))
    if len(box) != _EDGES:
        raise TypeError(f"a bbox must hold {_EDGES} numbers, got {len(box)}")
    return box


def read_label_rows(file: Path, classes: int) -> list[np.ndarray]:
    """Return the rows of a label file of YOLO: class, then fractions of width and height.

    A file that does not exist has no rows, as ultralytics writes none for an empty image.

    Raises:
        DataError: a row is none of numbers, or the class is none of `classes`.
    """
    if not file.exists():
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as text in UTF-8: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = np.array(line.split(), np.float64)
        except ValueError:
            row = np.zeros(1)
        if not row.size and not line.strip():
            continue
        if row.size < _BOX_ROW or not np.isfinite(row).all() or row[0] not in range(classes):
            raise DataError(
                f"{file}, line {number}: expected a class from 0 to {classes - 1}, then center, "
                f"width and height of a box as fractions of the image, or the corners of an "
                f"outline, got {preview_value(line)}"
            )
        rows.append(row)
    return rows


def box_of_row(row: np.ndarray, has_keypoints: bool) -> np.ndarray:
    """Return left, top, right, bottom `[4]` of a row of a label file, in fractions."""
    if row.size == _BOX_ROW or has_keypoints:
        center, size = row[1:3], row[3:_BOX_ROW]
        return np.concatenate([center - size / 2, center + size / 2])
    points = outline_of_row(row)
    return np.concatenate([points.min(axis=0), points.max(axis=0)])


def outline_of_row(row: np.ndarray) -> np.ndarray:
    """Return the corners `[P, 2]` of an outline, x and y in fractions; those of a box if given."""
    if row.size == _BOX_ROW:
        left, top, right, bottom = box_of_row(row, has_keypoints=False)
        return np.array([[left, top], [right, top], [right, bottom], [left, bottom]])
    return row[1 : 1 + (row.size - 1) // 2 * 2].reshape(-1, 2)


def draw_outlines(outlines: Any, height: int, width: int) -> np.ndarray:
    """Return the pixels `[H, W]` inside, 0 or 1.

    Args:
        outlines: a list of lists of x and y in pixels; or runs of COCO, a dict.
        height: height of the image in pixels.
        width: width of the image in pixels.

    Raises:
        DataError: these are no outlines.
        MissingFrameworkError: pycocotools is not installed.
    """
    tools = import_mask_tools("masks of objects")
    try:
        if not isinstance(outlines, Mapping):
            polygons = [list(points) for points in outlines]
            runs = tools.merge(tools.frPyObjects(polygons, height, width))
        elif isinstance(outlines["counts"], list):
            runs = tools.frPyObjects(outlines, height, width)
        else:
            runs = outlines
        pixels: np.ndarray = tools.decode(runs)
    except Exception as error:  # pycocotools raises bare types
        raise DataError(f"an outline must be a list of x and y, or runs: {error}") from error
    if pixels.shape != (height, width):
        raise DataError(f"runs must be of {height} × {width} pixels, got {list(pixels.shape)}")
    return pixels


def import_mask_tools(needed_by: str) -> ModuleType:
    """Return the module `pycocotools.mask`.

    Raises:
        MissingFrameworkError: pycocotools is not installed.
    """
    module: ModuleType = import_package("pycocotools.mask", needed_by, "coco", "pycocotools")
    return module


def keypoints_of(numbers: Sequence[float], origin: str) -> np.ndarray:
    """Return keypoints `[K, 3]`: x, y, and whether the point is labelled (0 for no).

    Raises:
        DataError: the numbers are no triples.
    """
    try:
        return np.array(numbers, np.float64).reshape(-1, 3)
    except (TypeError, ValueError) as error:
        raise DataError(f"{origin}: keypoints must be triples of x, y, visibility") from error
