"""Datasets of small images: `MNIST`, `FashionMNIST`, `CIFAR10` and `CIFAR100`.

Files are never downloaded. Pickled files are not read, as they can run code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from neural_mp.compat.inc.components.registries import dataset
from neural_mp.data.numpy_files import iterate_plain_arrays
from neural_mp.data.option_checks import check_existing_folder, true_or_false
from neural_mp.errors import DataError, did_you_mean
from neural_mp.io.limits import MAX_DATA_BYTES, RATIO_EXEMPT_ARRAY_BYTES
from neural_mp.io.readers import (
    decompress_bounded,
    decompress_start,
    prefix_file_errors,
    read_file_bytes,
)


@dataclass(frozen=True, eq=False)
class SmallImages:
    """Images of equal size with classes.

    Attributes:
        images: uint8 `[N, ...]`.
        labels: `[N]`; the label of a sample is an int.
    """

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index], int(self.labels[index])


@dataclass(frozen=True)
class PublishedFiles:
    """Files of a dataset.

    Attributes:
        archives: names of the Keras archive.
        folders: folders in `root` that are searched in addition to `root`.
        train, test: files of the published version.
        read: paths of these files → the images.
        rank: number of axes of the images in the archive.
        pickle: a file of the pickled version, which is not supported.
    """

    archives: tuple[str, ...]
    folders: tuple[str, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[Sequence[Path]], SmallImages]
    rank: int = 3
    pickle: str | None = None


def _read_bytes(path: Path) -> bytes:
    with prefix_file_errors(str(path), DataError):
        return read_file_bytes(path, MAX_DATA_BYTES)


def _unpack_content(path: Path, data: bytes, length: int | None = None) -> bytes:
    """Return the content of a file, given its bytes; at most `length` of it if compressed."""
    if path.suffix != ".gz":
        return data
    with prefix_file_errors(str(path), DataError):
        if length is not None and length <= RATIO_EXEMPT_ARRAY_BYTES:
            return decompress_start(data, length)
        return decompress_bounded(data, RATIO_EXEMPT_ARRAY_BYTES)


def read_idx(path: Path, rank: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes, optionally gzip-compressed.

    Source of the format: https://yann.lecun.com/exdb/mnist/

    Args:
        path: the file; compressed if the name ends with `.gz`.
        rank: required number of axes.

    Returns:
        A uint8 array.
    """
    start, data = 4 + 4 * rank, _read_bytes(path)
    head = _unpack_content(path, data, start)
    if len(head) < start or head[:4] != bytes([0, 0, 0x08, rank]):
        raise DataError(f"{path} must be an IDX file of unsigned bytes with {rank} axes")
    shape = tuple(int(size) for size in np.frombuffer(head[4:start], dtype=">u4"))
    size = math.prod(shape)
    values = np.frombuffer(
        _unpack_content(path, data, start + size + 1), dtype=np.uint8, offset=start
    )
    if values.size != size:
        actual = "more" if values.size > size else f"{values.size} bytes"
        raise DataError(
            f"{path} is damaged: its shape {shape} requires {size} bytes of values, got {actual}"
        )
    return values.reshape(shape)


def _read_cifar(paths: Sequence[Path], label_bytes: int) -> SmallImages:
    """Read rows of labels, then red, green and blue, each `[32, 32]`.

    Source of the format: https://www.cs.toronto.edu/~kriz/cifar.html

    Args:
        paths: the files.
        label_bytes: number of labels before each image; the last is the class.
    """
    width = label_bytes + 3 * 32 * 32
    parts = [
        np.frombuffer(_unpack_content(path, _read_bytes(path)), dtype=np.uint8) for path in paths
    ]
    for path, part in zip(paths, parts, strict=True):
        if part.size == 0 or part.size % width:
            raise DataError(
                f"{path} must hold images of {width} bytes each, got {part.size} bytes in total"
            )
    rows = np.concatenate(parts).reshape(-1, width)
    pixels = rows[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return SmallImages(np.ascontiguousarray(pixels), rows[:, label_bytes - 1])


def _list_mnist_files(folder: str, *archives: str) -> PublishedFiles:
    train, test = (
        tuple(f"{part}-{content}-ubyte" for content in ("images-idx3", "labels-idx1"))
        for part in ("train", "t10k")
    )
    return PublishedFiles(
        archives,
        (folder, f"{folder}/raw"),
        train,
        test,
        lambda paths: _validate_images(paths[0], read_idx(paths[0], 3), read_idx(paths[1], 1), 3),
    )


FILES = {
    "MNIST": _list_mnist_files("MNIST", "mnist.npz"),
    "FashionMNIST": _list_mnist_files("FashionMNIST", "fashion-mnist.npz", "fashion_mnist.npz"),
    "CIFAR10": PublishedFiles(
        ("cifar10.npz",),
        ("cifar-10-batches-bin",),
        tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        ("test_batch.bin",),
        partial(_read_cifar, label_bytes=1),
        rank=4,
        pickle="test_batch",
    ),
    "CIFAR100": PublishedFiles(
        ("cifar100.npz",),
        ("cifar-100-binary",),
        ("train.bin",),
        ("test.bin",),
        partial(_read_cifar, label_bytes=2),
        rank=4,
        pickle="test",
    ),
}


def small_images(
    name: str, root: object, train: bool = False, download: bool = True
) -> SmallImages:
    """Return images of handwritten digits, clothes, or ten or a hundred (fine) classes of objects.

    Args:
        name: a name in `FILES`.
        root: the folder of the published files, maybe gzip-compressed (CIFAR: of the binary
            version), or of the Keras archive.
        train: whether to read the training images, else the test images.
        download: no effect; nothing is downloaded.

    Returns:
        Samples of a uint8 array `[28, 28]`, or RGB `[32, 32, 3]`, and the class (int).
    """
    true_or_false(f"{name}: download", download)
    files, part = FILES[name], "train" if true_or_false(f"{name}: train", train) else "test"
    parent = check_existing_folder(f"{name}: root", root)
    folders = [parent, *(parent / folder for folder in files.folders)]
    for archive in (folder / file for folder in folders for file in files.archives):
        if archive.is_file():
            return _read_archive(archive, part, files.rank)
    required: tuple[str, ...] = getattr(files, part)
    for folder in folders:
        paths: list[Path] = []
        for file in required:
            variants = folder / f"{file}.gz", folder / file
            paths += [path for path in variants if path.is_file()][:1]
        if len(paths) == len(required):
            return files.read(paths)
    is_pickled = files.pickle is not None and (parent / files.pickle).is_file()
    pickled = "; pickled files of the Python version can run code and are not read"
    raise DataError(
        f"{name}: nothing is downloaded; put {', '.join(required)} or {files.archives[0]} into "
        f"{parent} or its folder {' or '.join(files.folders)}{pickled if is_pickled else ''}"
    )


def _add_channel_axis(
    name: str, root: object, train: bool = False, download: bool = True
) -> SmallImages:
    """Return `small_images` as `[28, 28, 1]`."""
    images = small_images(name, root, train, download)
    return SmallImages(images.images[..., np.newaxis], images.labels)


def _read_archive(path: Path, part: str, rank: int) -> SmallImages:
    """Read the arrays `x_train`, `y_train`, `x_test`, `y_test`, named as in Keras."""
    with iterate_plain_arrays(path) as archive:
        if isinstance(archive, np.ndarray):
            raise DataError(f"{path} must be an archive of named arrays, got a single array")
        for key in (f"x_{part}", f"y_{part}"):
            if key not in archive.files:
                raise DataError(f"{path} has no array {key!r}{did_you_mean(key, archive.files)}")
        images, labels = archive[f"x_{part}"], archive[f"y_{part}"]
    return _validate_images(path, images, labels, rank)


def _validate_images(path: Path, images: np.ndarray, labels: np.ndarray, rank: int) -> SmallImages:
    labels = labels.reshape(-1)
    if images.ndim != rank or len(images) != len(labels) or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path} must hold images with {rank} axes and a whole number as the label of each, "
            f"got images of shape {images.shape} and {len(labels)} labels of {labels.dtype}"
        )
    return SmallImages(images, labels)


for _name in FILES:
    _has_channels = _name.startswith("CIFAR")
    dataset(_name, "tensorflow", "onnxrt")(
        partial(small_images if _has_channels else _add_channel_axis, _name)
    )
    dataset(_name, "pytorch")(partial(small_images, _name))
