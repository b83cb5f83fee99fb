"""Small data in the forms that the example scripts read: image folders, TFRecords, IDX files.

An image shows one bright field of a grid of 2 × 5; its class is the place of the field. So the
small nets of `models` are right under every normalization that the scripts apply.
"""

from __future__ import annotations

import gzip
import io
import struct
from pathlib import Path

import numpy as np

CLASSES = 10
ROWS, COLUMNS = 2, 5


def pictures(count: int, height: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 images `[N, height, width, 3]` and classes, int64 `[N]`."""
    rng = np.random.default_rng(seed)
    classes = np.arange(count) % CLASSES
    images = rng.integers(0, 60, (count, height, width, 3))
    tall, wide = height // ROWS, width // COLUMNS
    for image, label in zip(images, classes, strict=True):
        top, left = (label // COLUMNS) * tall, (label % COLUMNS) * wide
        image[top : top + tall, left : left + wide] += 150
    return images.astype(np.uint8), classes


def _jpeg(image: np.ndarray) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(image).save(stream, format="JPEG", quality=95)
    return stream.getvalue()


def image_list(folder: Path, count: int = 40) -> None:
    """Write JPEG files into `images/` and the list `val_map.txt`, as for `ImagenetRaw`."""
    images, classes = pictures(count, 256, 256)
    (folder / "images").mkdir()
    lines = []
    for number, (image, label) in enumerate(zip(images, classes, strict=True)):
        (folder / f"images/{number:04d}.jpg").write_bytes(_jpeg(image))
        lines.append(f"{number:04d}.jpg {label}\n")
    (folder / "val_map.txt").write_text("".join(lines))


def class_folders(folder: Path, count: int = 40) -> None:
    """Write JPEG files into a folder per class, as for `ImageFolder`."""
    for number, (image, label) in enumerate(zip(*pictures(count, 256, 256), strict=True)):
        target = folder / f"n{label:08d}"
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{number:04d}.jpg").write_bytes(_jpeg(image))


def image_records(folder: Path, count: int = 40) -> None:
    """Write TFRecords into `records/`, as for `ImageRecord`; classes start at 1."""
    import tensorflow as tf

    (folder / "records").mkdir()
    path = folder / "records/validation-00000-of-00001"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for image, label in zip(*pictures(count, 256, 256), strict=True):
            features = {
                "image/encoded": tf.train.Feature(
                    bytes_list=tf.train.BytesList(value=[_jpeg(image)])
                ),
                "image/class/label": tf.train.Feature(
                    int64_list=tf.train.Int64List(value=[int(label) + 1])
                ),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())


def idx_files(folder: Path, count: int = 200) -> None:
    """Write the four compressed files of MNIST and Fashion-MNIST."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, seed in (("train", 1), ("t10k", 2)):
        images, classes = pictures(count, 28, 28, seed)
        head = struct.pack(">HBBI", 0, 8, 1, count)
        labels = head + classes.astype(np.uint8).tobytes()
        shape = struct.pack(">HBBIII", 0, 8, 3, count, 28, 28)
        for name, content in (
            (f"{part}-images-idx3-ubyte.gz", shape + images[..., 0].tobytes()),
            (f"{part}-labels-idx1-ubyte.gz", labels),
        ):
            (folder / name).write_bytes(gzip.compress(content))
