"""Datasets of small images: `MNIST`, `FashionMNIST`, `CIFAR10` and `CIFAR100`.

Files are never downloaded. Pickled files are not read, as they can run code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from neural_mp.compat.inc.components.registries import DATASETS, registered, say_ignored
from neural_mp.data.numpy_files import plain_arrays
from neural_mp.data.option_checks import existing_folder, true_or_false
from neural_mp.errors import DataError, did_you_mean
from neural_mp.io.limits import MAX_DATA_BYTES, RATIO_EXEMPT_ARRAY_BYTES
from neural_mp.io.readers import bytes_of, decompress_bounded, file_context

MNIST_ARCHIVES = {
    "MNIST": ("mnist.npz",),
    "FashionMNIST": ("fashion-mnist.npz", "fashion_mnist.npz"),
}
CIFAR_ARCHIVES = {"CIFAR10": "cifar10.npz", "CIFAR100": "cifar100.npz"}

#: Folders in `root` that are searched in addition to `root`.
FOLDERS = {
    "MNIST": ("MNIST", "MNIST/raw"),
    "FashionMNIST": ("FashionMNIST", "FashionMNIST/raw"),
    "CIFAR10": ("cifar-10-batches-bin",),
    "CIFAR100": ("cifar-100-binary",),
}

#: Binary version: files of the training images, and of the test images.
#: Source of the format: https://www.cs.toronto.edu/~kriz/cifar.html
CIFAR_BINARIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "CIFAR10": (tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",)),
    "CIFAR100": (("train.bin",), ("test.bin",)),
}
#: Bytes of labels before each image; the last byte is the label.
CIFAR_LABEL_BYTES = {"CIFAR10": 1, "CIFAR100": 2}
#: File names of the pickled version, for a message that it is not supported.
CIFAR_PICKLES = {"CIFAR10": "test_batch", "CIFAR100": "test"}


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


def _mnist(
    name: str, root: object, train: bool = False, download: bool = True, filter: object = None
) -> SmallImages:
    """Return images `[28, 28]` of handwritten digits or, for `FashionMNIST`, of clothes.

    Args:
        name: `MNIST` or `FashionMNIST`.
        root: the folder of `mnist.npz` (`fashion-mnist.npz`) or of the four `…-ubyte.gz` files.
        train: whether to read the training images, else the test images.
        download: no effect; nothing is downloaded.
        filter: no effect.

    Returns:
        Samples of a uint8 array `[28, 28]` and the class (int).

    Raises:
        ConfigurationError: an option is invalid.
        DataError: the files are missing or broken.
    """
    say_ignored(name, filter=filter)
    true_or_false(f"{name}: download", download)
    part = "train" if true_or_false(f"{name}: train", train) else "t10k"
    folders = _folders(name, root)
    archives = [folder / file for folder in folders for file in MNIST_ARCHIVES[name]]
    archive = next((file for file in archives if file.is_file()), None)
    if archive is not None:
        return _archive(archive, "train" if train else "test")
    names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
    for folder in folders:
        found = [_plain_or_packed(folder / file) for file in names]
        if found[0] is not None and found[1] is not None:
            images, labels = read_idx(found[0], 3), read_idx(found[1], 1)
            return _checked(found[0], images, labels, 3)
    raise _nothing_there(
        name, folders, f"{names[0]}.gz and {names[1]}.gz, or {MNIST_ARCHIVES[name][0]}"
    )


def _folders(name: str, root: object) -> list[Path]:
    parent = existing_folder(f"{name}: root", root)
    return [parent, *(parent / folder for folder in FOLDERS[name])]


def _nothing_there(name: str, folders: list[Path], files: str) -> DataError:
    inside = " or ".join(str(folder.relative_to(folders[0])) for folder in folders[1:])
    return DataError(
        f"{name}: nothing is downloaded; put {files} into {folders[0]} or its folder {inside}"
    )


def _plain_or_packed(path: Path) -> Path | None:
    packed = path.with_name(f"{path.name}.gz")
    return next((file for file in (packed, path) if file.is_file()), None)


def _read_bytes(path: Path) -> bytes:
    with file_context(str(path), DataError):
        data = bytes_of(path, MAX_DATA_BYTES)
        packed = path.suffix == ".gz"
        return decompress_bounded(data, RATIO_EXEMPT_ARRAY_BYTES) if packed else data


def read_idx(path: Path, rank: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes, optionally gzip-compressed.

    Source of the format: https://yann.lecun.com/exdb/mnist/

    Args:
        path: the file; compressed if the name ends with `.gz`.
        rank: required number of axes.

    Returns:
        A uint8 array.

    Raises:
        DataError: the file is not an IDX file, or the array has another rank.
    """
    data = _read_bytes(path)
    start = 4 + 4 * rank
    if len(data) < start or data[:4] != bytes([0, 0, 0x08, rank]):
        raise DataError(f"{path} is no IDX file of unsigned bytes with {rank} axes")
    shape = tuple(int(size) for size in np.frombuffer(data[4:start], dtype=">u4"))
    values = np.frombuffer(data, dtype=np.uint8, offset=start)
    if values.size != np.prod(shape, dtype=np.int64):
        raise DataError(f"{path} is cut off or too long: {values.size} values for shape {shape}")
    return values.reshape(shape)


def _archive(path: Path, part: str, rank: int = 3) -> SmallImages:
    """Read the arrays `x_train`, `y_train`, `x_test`, `y_test`, named as in Keras."""
    with plain_arrays(path) as archive:
        for key in (f"x_{part}", f"y_{part}"):
            if key not in archive.files:
                raise DataError(f"{path} has no array {key!r}{did_you_mean(key, archive.files)}")
        images, labels = archive[f"x_{part}"], archive[f"y_{part}"]
    return _checked(path, images, labels, rank)


def _checked(path: Path, images: np.ndarray, labels: np.ndarray, rank: int) -> SmallImages:
    labels = labels.reshape(-1)
    if images.ndim != rank or len(images) != len(labels) or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: expected images with {rank} axes and a whole number as the label of each, "
            f"got images of shape {images.shape} and {len(labels)} labels of {labels.dtype}"
        )
    return SmallImages(images, labels)


def _mnist_with_channel(
    name: str, root: object, train: bool = False, download: bool = True, filter: object = None
) -> SmallImages:
    """Return the images of `_mnist` as `[28, 28, 1]`."""
    found = _mnist(name, root, train, download, filter)
    return SmallImages(found.images[..., np.newaxis], found.labels)


def _cifar(
    name: str, root: object, train: bool = False, download: bool = True, filter: object = None
) -> SmallImages:
    """Return small photos of ten or a hundred (fine) classes.

    Args:
        name: `CIFAR10` or `CIFAR100`.
        root: the folder of the `.bin` files of the binary version, or of `cifar10.npz`
            (`cifar100.npz`).
        train: whether to read the training images, else the test images.
        download: no effect; nothing is downloaded.
        filter: no effect.

    Returns:
        Samples of a uint8 array `[32, 32, 3]`, RGB, and the class (int).

    Raises:
        ConfigurationError: an option is invalid.
        DataError: the files are missing, pickled or broken.
    """
    say_ignored(name, filter=filter)
    true_or_false(f"{name}: download", download)
    folders = _folders(name, root)
    chosen = 0 if true_or_false(f"{name}: train", train) else 1
    files, label_bytes = CIFAR_BINARIES[name][chosen], CIFAR_LABEL_BYTES[name]
    for folder in folders:
        archive = folder / CIFAR_ARCHIVES[name]
        if archive.is_file():
            return _archive(archive, ("train", "test")[chosen], rank=4)
        if all((folder / file).is_file() for file in files):
            parts = [_binary(folder / file, label_bytes) for file in files]
            rows = np.concatenate(parts)
            pixels = rows[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            return SmallImages(np.ascontiguousarray(pixels), rows[:, label_bytes - 1])
    problem = _nothing_there(
        name,
        folders,
        f"{', '.join(files)} of the binary version of {name}, or {CIFAR_ARCHIVES[name]} with "
        f"x_train, y_train, x_test, y_test,",
    )
    if (folders[0] / CIFAR_PICKLES[name]).is_file():
        raise DataError(
            f"{problem}; the files that are there are the Python version, which is not read, as "
            f"pickled data can run code"
        )
    raise problem


def _binary(path: Path, label_bytes: int) -> np.ndarray:
    """Return one row per image: labels, then red, green and blue, each `[32, 32]`."""
    values = np.frombuffer(_read_bytes(path), dtype=np.uint8)
    width = label_bytes + 3 * 32 * 32
    if values.size == 0 or values.size % width:
        raise DataError(f"{path} is no file of images of {width} bytes each: {values.size} bytes")
    return values.reshape(-1, width)


for _name in MNIST_ARCHIVES:
    registered(DATASETS, _name, "tensorflow", "onnxrt")(partial(_mnist_with_channel, _name))
    registered(DATASETS, _name, "pytorch")(partial(_mnist, _name))
for _name in CIFAR_ARCHIVES:
    registered(DATASETS, _name)(partial(_cifar, _name))
