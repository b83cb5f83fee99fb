"""Datasets of image files and of small images in one file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COUNT, CLASSES = 12, 3
#: Height and width; larger than what is cut out of images, and no square.
SIZE = (80, 96)
_NAMES = ("person", "bicycle", "car")


def pixels(seed: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """An RGB image, uint8 `[height, width, 3]`."""
    rough = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return np.asarray(Image.fromarray(rough).resize(size[::-1], Image.Resampling.BILINEAR))


def encoded(array: np.ndarray, kind: str = "JPEG") -> bytes:
    """An image as a file holds it."""
    file = BytesIO()
    Image.fromarray(array).save(file, kind)
    return file.getvalue()


def folders_of_classes(folder: Path) -> Mapping[str, Any]:
    """`CLASS/NAME.jpg`."""
    for index in range(COUNT):
        parent = folder / f"n{index % CLASSES:08d}"
        parent.mkdir(exist_ok=True)
        (parent / f"{index}.jpg").write_bytes(encoded(pixels(index)))
    return {"root": folder}


def with_a_list(folder: Path) -> Mapping[str, Any]:
    """`NAME.jpg`, and a file with a line `NAME.jpg LABEL` for each."""
    lines = []
    for index in range(COUNT):
        (folder / f"{index}.jpg").write_bytes(encoded(pixels(index)))
        lines.append(f"{index}.jpg {index % CLASSES}\n")
    (folder / "val.txt").write_text("".join(lines))
    return {"data_path": folder, "image_list": folder / "val.txt"}


def annotations() -> dict[str, Any]:
    """One box in each image, in the form of COCO."""
    height, width = SIZE
    return {
        "images": [
            {"id": i + 1, "file_name": f"{i + 1:012d}.jpg", "height": height, "width": width}
            for i in range(COUNT)
        ],
        "annotations": [
            {
                "id": i + 1,
                "image_id": i + 1,
                "category_id": i % CLASSES + 1,
                "bbox": [8.0, 8.0, 32.0, 24.0],
                "area": 768.0,
                "iscrowd": 0,
            }
            for i in range(COUNT)
        ],
        "categories": [{"id": i + 1, "name": name} for i, name in enumerate(_NAMES)],
    }


def with_boxes(folder: Path) -> Mapping[str, Any]:
    """`val2017/NAME.jpg` and `annotations/instances_val2017.json`."""
    _annotated(folder)
    (folder / "val2017").mkdir()
    for image in annotations()["images"]:
        file = folder / "val2017" / image["file_name"]
        file.write_bytes(encoded(pixels(image["id"])))
    return {"root": folder}


def arrays_with_boxes(folder: Path) -> Mapping[str, Any]:
    """`val2017/NAME.jpg.npy`, float32 `[3, height, width]`, and the annotations."""
    _annotated(folder)
    (folder / "val2017").mkdir()
    for image in annotations()["images"]:
        array = pixels(image["id"]).transpose(2, 0, 1).astype(np.float32) / 255
        np.save(folder / "val2017" / f"{image['file_name']}.npy", array)
    return {
        "root": folder,
        "npy_dir": "val2017",
        "anno_dir": "annotations/instances_val2017.json",
    }


def _annotated(folder: Path) -> None:
    (folder / "annotations").mkdir()
    (folder / "annotations" / "instances_val2017.json").write_text(json.dumps(annotations()))


def small_images_in_one_file(folder: Path) -> Mapping[str, Any]:
    """`mnist.npz`."""
    images, labels = _small_images()
    arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    np.savez(folder / "mnist.npz", **arrays)
    return {"root": folder}


def small_images_packed(folder: Path) -> Mapping[str, Any]:
    """The four files of bytes behind a header, packed."""
    images, labels = _small_images()
    for part in ("train", "t10k"):
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            packed = gzip.compress(header + array.tobytes())
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(packed)
    return {"root": folder}


def _small_images() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (COUNT, 28, 28), np.uint8)
    return images, np.arange(COUNT, dtype=np.uint8) % 10


def contents_and_styles(folder: Path) -> Mapping[str, Any]:
    """Two folders of images."""
    folders = {}
    for number, kind in enumerate(("content", "style")):
        folders[f"{kind}_folder"] = folder / kind
        (folder / kind).mkdir()
        for index in range(2):
            file = folder / kind / f"{index}.jpg"
            file.write_bytes(encoded(pixels(10 * number + index)))
    return folders
