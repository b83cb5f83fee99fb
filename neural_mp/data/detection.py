"""Datasets of objects in images, `coco` and `yolo`, and the transform `letterbox`.

A label is a dict of the objects of an image, M of them, in the form of the metric `mAP`:

* `boxes` float32 `[M, 4]`: left, top, right, bottom in pixels of the image;
* `labels` int64 `[M]`: index of the class;
* `area` float32 `[M]` in pixels, and `crowd` int64 `[M]`, 1 for a group that does not count;
* `size` int64 `[2]`: height and width of the image;
* `masks` uint8 `[M, H, W]` or `keypoints` float32 `[M, K, 3]`, if asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.data.annotations import (
    AnnotatedImage,
    box_of_row,
    draw_outlines,
    import_mask_tools,
    keypoints_of,
    outline_of_row,
    read_annotations,
    read_label_rows,
)
from neural_mp.data.datasets import DATASETS
from neural_mp.data.images import IMAGE_SUFFIXES, Resize, import_pillow, read_pixels
from neural_mp.data.option_checks import (
    check_existing_file,
    check_existing_folder,
    check_existing_path,
    check_one_of,
    check_whole_number,
    height_and_width,
    true_or_false,
)
from neural_mp.data.transforms import TRANSFORMS, InputTransform
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.io.readers import read_yaml
from neural_mp.util.validators import anything, mapping_of, preview_value

#: Parts of an object that a mAP may judge.
KINDS = ("boxes", "masks", "keypoints")
_SPLITS = ("train", "val", "test")
Label = dict[str, np.ndarray]


def collate_objects(samples: list[Any]) -> tuple[np.ndarray, list[Any]]:
    """Return images `[N, …]` and a list of N labels.

    Raises:
        DataError: the images differ in size.
    """
    images, labels = zip(*samples, strict=True)
    shapes = {np.shape(image) for image in images}
    if len(shapes) > 1:
        raise DataError(
            f"images of a batch must have one size, got {' and '.join(map(str, sorted(shapes)))}; "
            f"add the transform letterbox, or set batch_size to 1"
        )
    return np.stack(images), list(labels)


class _ObjectImages:
    """A dataset of image files with their objects."""

    def collate_samples(self, samples: list[Any]) -> tuple[np.ndarray, list[Any]]:
        """Return a batch; see `collate_objects`."""
        return collate_objects(samples)


@DATASETS.register("coco")
@dataclass(frozen=True)
class CocoDataset(_ObjectImages):
    """Images with the objects of an annotation file of COCO.

    A sample is a uint8 array `[height, width, 3]`, RGB, and the label of this module. Images
    without objects count; those that do not exist are left out. Classes are in the order of the
    ids of the categories.

    Attributes:
        root: folder of the images.
        annotations: the annotation file.
        kind: `boxes`, or `masks` or `keypoints`, which labels hold besides.
        classes: names of the classes, by index.
        images: the images, in file order.

    Raises:
        ConfigurationError: an option is wrong.
        DataError: the file is no annotation file, or none of the images exists.
        MissingFrameworkError: Pillow, or for masks pycocotools, is not installed.
    """

    root: Any
    annotations: Any
    kind: str = "boxes"
    classes: tuple[str, ...] = field(init=False)
    images: tuple[AnnotatedImage, ...] = field(init=False, repr=False)
    _indices: Mapping[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        import_pillow("dataset 'coco'")
        _check_kind("coco", self.kind)
        folder = check_existing_folder("coco: root", self.root)
        file = check_existing_file("coco: annotations", self.annotations)
        images, names = read_annotations(file)
        present = tuple(image for image in images if (folder / image.name).is_file())
        if not any(image.boxes for image in present):
            raise DataError(
                f"coco: none of the {len(images)} images in {file} has objects and exists in "
                f"{folder}; root must be the folder of the images"
            )
        object.__setattr__(self, "root", folder)
        object.__setattr__(self, "images", present)
        object.__setattr__(self, "classes", tuple(names[key] for key in sorted(names)))
        object.__setattr__(self, "_indices", {key: i for i, key in enumerate(sorted(names))})

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Label]:
        image = self.images[index]
        pixels = read_pixels(self.root / image.name, "RGB", "dataset 'coco'")
        corners = np.array(image.boxes, np.float64).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        entries, size = image.entries, pixels.shape[:2]
        sides = corners[:, 2:] - corners[:, :2]
        areas = [
            float(entry.get("area") or area)
            for entry, area in zip(entries, sides.prod(axis=1), strict=True)
        ]
        label = _make_label(corners, [self._indices[key] for key in image.categories], size)
        label["area"] = np.array(areas, np.float32)
        label["crowd"] = np.array([bool(entry.get("iscrowd")) for entry in entries], np.int64)
        if self.kind == "masks":
            outlines = [entry.get("segmentation") or [] for entry in entries]
            label["masks"] = _stack([draw_outlines(lines, *size) for lines in outlines], *size)
        elif self.kind == "keypoints":
            points = [keypoints_of(entry.get("keypoints", ()), image.name) for entry in entries]
            label["keypoints"] = _stack_points(points, image.name)
        return pixels, label


@DATASETS.register("yolo")
@dataclass(frozen=True)
class YoloDataset(_ObjectImages):
    """Images with label files of YOLO, as `data.yaml` lists them.

    A sample is that of `coco`. The label file of `images/a/1.jpg` is `labels/a/1.txt`; a row is
    `class x y width height` in fractions of the image, an outline `class x1 y1 x2 y2 …`, or with
    `kpt_shape` a box and its keypoints. An image without a file has no objects.

    Attributes:
        data: `data.yaml`, with `names`, `val` (or `train`, `test`) and, if needed, `path`.
        split: `train`, `val` or `test`: a folder, a list of folders, or a file of paths.
        kind: `boxes`, or `masks` or `keypoints`, which labels hold besides.
        classes: names of the classes, by index.
        files: the images, in the order of their names.

    Raises:
        ConfigurationError: an option is wrong.
        DataError: the file lacks an entry, or there are no images.
        MissingFrameworkError: Pillow, or for masks pycocotools, is not installed.
    """

    data: Any
    split: str = "val"
    kind: str = "boxes"
    classes: tuple[str, ...] = field(init=False)
    files: tuple[Path, ...] = field(init=False, repr=False)
    _point_numbers: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        import_pillow("dataset 'yolo'")
        _check_kind("yolo", self.kind)
        check_one_of("yolo: split", self.split, _SPLITS)
        file = check_existing_file("yolo: data", self.data)
        content = read_yaml(file, mapping_of(anything), DataError)
        names = content.get("names")
        listed = list(names.values()) if isinstance(names, Mapping) else names
        if not isinstance(listed, list) or not listed:
            raise DataError(f"{file} must list the classes under names, got {preview_value(names)}")
        shape = content.get("kpt_shape") or (0, 0)
        if self.kind == "keypoints" and not np.prod(shape):
            raise DataError(f"{file} must have kpt_shape for keypoints, e.g. [17, 3]")
        files = tuple(_list_split(file, content, self.split))
        if not files:
            raise DataError(f"yolo: {file} lists no images under {self.split}")
        object.__setattr__(self, "classes", tuple(map(str, listed)))
        object.__setattr__(self, "files", files)
        object.__setattr__(self, "_point_numbers", int(shape[1]))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Label]:
        file = self.files[index]
        pixels = read_pixels(file, "RGB", "dataset 'yolo'")
        height, width = size = pixels.shape[:2]
        scale = np.array([width, height], np.float64)
        rows = read_label_rows(_label_file(file), len(self.classes))
        has_keypoints = self._point_numbers > 0
        boxes = np.array([box_of_row(row, has_keypoints) for row in rows]).reshape(-1, 4)
        label = _make_label(boxes * np.tile(scale, 2), [int(row[0]) for row in rows], size)
        if self.kind == "masks":
            outlines = [(outline_of_row(row) * scale).reshape(1, -1) for row in rows]
            label["masks"] = _stack([draw_outlines(lines, *size) for lines in outlines], *size)
            label["area"] = label["masks"].sum(axis=(1, 2)).astype(np.float32)
        elif self.kind == "keypoints":
            points = [row[5:].reshape(-1, self._point_numbers) for row in rows]
            seen = [np.concatenate([p[:, :2] * scale, _visible(p)], axis=1) for p in points]
            label["keypoints"] = _stack_points(seen, str(file))
        return pixels, label


def _check_kind(name: str, kind: str) -> None:
    check_one_of(f"{name}: kind", kind, KINDS)
    if kind == "masks":
        import_mask_tools(f"dataset {name!r}")


def _make_label(corners: np.ndarray, classes: list[int], size: tuple[int, ...]) -> Label:
    return {
        "boxes": corners.astype(np.float32),
        "labels": np.array(classes, np.int64),
        "area": (corners[:, 2:] - corners[:, :2]).prod(axis=1).astype(np.float32),
        "crowd": np.zeros(len(corners), np.int64),
        "size": np.array(size, np.int64),
    }


def _stack(masks: list[np.ndarray], height: int, width: int) -> np.ndarray:
    return np.array(masks, np.uint8).reshape(-1, height, width)


def _stack_points(points: list[np.ndarray], origin: str) -> np.ndarray:
    if len({len(of_object) for of_object in points}) > 1:
        raise DataError(f"{origin}: all objects must have the same number of keypoints")
    return np.array(points, np.float32) if points else np.zeros((0, 1, 3), np.float32)


def _visible(points: np.ndarray) -> np.ndarray:
    """Return the visibility `[K, 1]`; points without one are labelled unless both are 0."""
    if points.shape[1] > 2:
        return points[:, 2:3]
    return np.where(points[:, :2].any(axis=1, keepdims=True), 2.0, 0.0)


def _list_split(file: Path, content: Mapping[str, Any], split: str) -> Iterator[Path]:
    """Yield the images of a split, in the order of their names.

    Raises:
        DataError: the file does not name the split, or a folder does not exist.
    """
    sources = content.get(split)
    listed = sources if isinstance(sources, list) else [sources]
    names = [source for source in listed if isinstance(source, str) and source]
    if len(names) < len(listed) or not names:
        raise DataError(
            f"{file} must name the images of {split}, a folder, got {preview_value(sources)}"
        )
    base = file.parent / str(content.get("path") or "")
    for source in names:
        path = check_existing_path(f"{file.name}: {split}", base / source)
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
            continue
        try:
            lines = path.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} must be a list of image files: {error}") from error
        for line in lines:
            image = path.parent / line
            if not image.is_file():
                raise DataError(f"{path}: there is no image {image}")
            yield image


def _label_file(image: Path) -> Path:
    """Return the label file: `labels` in place of the last folder `images` of the path."""
    parts = list(image.with_suffix(".txt").parts)
    for index in range(len(parts) - 2, -1, -1):
        if parts[index] == "images":
            parts[index] = "labels"
            break
    return Path(*parts)


@TRANSFORMS.register("letterbox")
@dataclass(frozen=True)
class Letterbox(InputTransform):
    """Resize an image `[H, W, C]` to fit, centered on a canvas; objects in the label move along.

    A label with `boxes`, as of `coco` and `yolo`, is converted to pixels of the canvas: boxes,
    masks, keypoints, areas and `size`. The mAP of boxes is the same there.

    Attributes:
        size: `[height, width]` of the canvas in pixels, or one number for both.
        color: value of the border.
        stretch: whether to fill the canvas instead, without regard to the sides, as for DETR.
        enlarge: whether smaller images are enlarged.

    Raises:
        ConfigurationError: an option is wrong.
        MissingFrameworkError: Pillow is not installed.
    """

    size: Any
    color: int = 114
    stretch: bool = False
    enlarge: bool = True

    def __post_init__(self) -> None:
        import_pillow("transform 'letterbox'")
        object.__setattr__(self, "size", height_and_width("letterbox: size", self.size))
        if check_whole_number("letterbox: color", self.color, minimum=0) > 255:
            raise ConfigurationError(f"letterbox: color must be at most 255, got {self.color}")
        true_or_false("letterbox: stretch", self.stretch)
        true_or_false("letterbox: enlarge", self.enlarge)

    def _fit(self, shape: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return height and width of the resized image, and its top and left on the canvas."""
        if self.stretch:
            return self.size, (0, 0)
        ratio = min(own / side for own, side in zip(self.size, shape, strict=True))
        ratio = ratio if self.enlarge else min(ratio, 1.0)
        height, width = (max(1, round(side * ratio)) for side in shape)
        # Halves are rounded as in ultralytics: down.
        top, left = (
            round((own - inner) / 2 - 0.1)
            for own, inner in zip(self.size, (height, width), strict=True)
        )
        return (height, width), (top, left)

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Return the canvas `[height, width, C]`."""
        if inputs.ndim != 3:
            raise ValueError("the shape must be [H, W, C]; letterbox comes before ToCHW")
        inner, (top, left) = self._fit(inputs.shape[:2])
        canvas = np.full((*self.size, inputs.shape[2]), self.color, inputs.dtype)
        resized = inputs if inputs.shape[:2] == inner else Resize(inner).apply(inputs)
        canvas[top : top + inner[0], left : left + inner[1]] = resized
        return canvas

    def __call__(self, sample: object) -> tuple[np.ndarray, Any]:
        """Transform one sample `(inputs, label)`.

        Raises:
            DataError: the sample is not such a pair, or the inputs do not fit.
        """
        canvas, label = super().__call__(sample)
        if not isinstance(label, Mapping) or "boxes" not in label:
            return canvas, label
        shape: tuple[int, ...] = np.shape(sample[0])[:2]  # type: ignore[index]  # a pair, as checked
        inner, corner = self._fit(shape)
        scale = np.array([inner[1] / shape[1], inner[0] / shape[0]])
        offset = np.array([corner[1], corner[0]])
        moved = dict(label)
        boxes = np.reshape(label["boxes"], (-1, 2, 2)) * scale + offset
        moved["boxes"] = boxes.reshape(-1, 4).astype(np.float32)
        moved["size"] = np.array(self.size, np.int64)
        if "area" in label:
            moved["area"] = (label["area"] * scale.prod()).astype(np.float32)
        if "masks" in label:
            moved["masks"] = self._move_masks(label["masks"], inner, corner)
        if "keypoints" in label:
            points = label["keypoints"]
            places = (points[..., :2] * scale + offset) * (points[..., 2:] > 0)
            moved["keypoints"] = np.concatenate([places, points[..., 2:]], -1).astype(np.float32)
        return canvas, moved

    def _move_masks(
        self, masks: np.ndarray, inner: tuple[int, int], corner: tuple[int, int]
    ) -> np.ndarray:
        placed = np.zeros((len(masks), *self.size), np.uint8)
        for target, mask in zip(placed, masks, strict=True):
            rows, columns = (slice(at, at + side) for at, side in zip(corner, inner, strict=True))
            target[rows, columns] = Resize(inner, "nearest").apply(mask)
        return placed
