"""The names MNIST, FashionMNIST and CIFAR in files of Intel Neural Compressor."""

import gzip
from dataclasses import dataclass

import numpy as np
import pytest
from inc_datasets import dataset, pixels

from neural_mp.errors import DataError


@dataclass
class Digits:
    images: np.ndarray
    labels: np.ndarray


@pytest.fixture
def digits():
    return Digits(pixels(0, 6, 28, 28), np.array([5, 0, 4, 1, 9, 2], dtype=np.uint8))


def idx(array):
    """An IDX file: two zeros, the code of unsigned bytes, the rank, sizes, then the values."""
    return (
        bytes([0, 0, 8, array.ndim])
        + b"".join(size.to_bytes(4, "big") for size in array.shape)
        + array.tobytes()
    )


def write_idx(folder, part, digits, packed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for kind, array in (("images-idx3", digits.images), ("labels-idx1", digits.labels)):
        path = folder / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))


def test_mnist_is_read_from_the_archive(tmp_path, digits):
    np.savez(
        tmp_path / "mnist.npz",
        x_train=digits.images[:4],
        y_train=digits.labels[:4],
        x_test=digits.images[4:],
        y_test=digits.labels[4:],
    )
    test = dataset("onnxrt", "MNIST", root=str(tmp_path))
    train = dataset("onnxrt", "MNIST", root=str(tmp_path), train=True)
    assert (len(test), len(train)) == (2, 4)
    np.testing.assert_array_equal(test[1][0], digits.images[5][:, :, np.newaxis])
    assert (test[1][1], train[0][1]) == (2, 5)
    assert type(test[1][1]) is int


def test_for_pytorch_mnist_has_no_axis_of_channels(tmp_path, digits):
    write_idx(tmp_path, "t10k", digits)
    np.testing.assert_array_equal(
        dataset("pytorch", "MNIST", root=str(tmp_path))[3][0], digits.images[3]
    )


@pytest.mark.parametrize(
    ("folder", "packed"), [(".", True), ("FashionMNIST", True), ("FashionMNIST/raw", False)]
)
def test_fashion_mnist_is_read_from_the_published_files(folder, packed, tmp_path, digits):
    write_idx(tmp_path / folder, "train", digits, packed)
    samples = dataset("tensorflow", "FashionMNIST", root=str(tmp_path), train=True)
    images, labels = zip(*samples, strict=True)
    np.testing.assert_array_equal(np.stack(images), digits.images[..., np.newaxis])
    assert list(labels) == digits.labels.tolist()


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST", "CIFAR10", "CIFAR100"])
def test_nothing_is_downloaded_and_the_place_of_the_files_is_said(name, tmp_path):
    with pytest.raises(DataError, match=rf"nothing is downloaded; put .* into {tmp_path}"):
        dataset("tensorflow", name, root=str(tmp_path), download=True)


def test_a_file_that_is_cut_off_is_said(tmp_path, digits):
    write_idx(tmp_path, "t10k", digits, packed=False)
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="is damaged: its shape"):
        dataset("tensorflow", "FashionMNIST", root=str(tmp_path))


def test_a_packed_file_that_is_cut_off_is_said(tmp_path, digits):
    write_idx(tmp_path, "t10k", digits)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="truncated"):
        dataset("tensorflow", "MNIST", root=str(tmp_path))


def test_a_packed_file_with_more_values_than_its_shape_is_damaged(tmp_path, digits):
    write_idx(tmp_path, "t10k", digits)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes() + gzip.compress(bytes(1)))
    with pytest.raises(DataError, match=r"requires 4704 bytes of values, got more"):
        dataset("tensorflow", "MNIST", root=str(tmp_path))


def cifar_rows(images, *labels):
    """The published binary form: labels, then the planes red, green and blue."""
    planes = np.moveaxis(images, -1, 1).reshape(len(images), -1)
    return np.concatenate([np.stack(labels, axis=1), planes], axis=1).tobytes()


def test_cifar_10_is_read_from_the_binary_version(tmp_path):
    images, labels = pixels(1, 10, 32, 32, 3), np.arange(10, dtype=np.uint8)
    for batch in range(5):
        part = slice(2 * batch, 2 * batch + 2)
        (tmp_path / f"data_batch_{batch + 1}.bin").write_bytes(
            cifar_rows(images[part], labels[part])
        )
    samples = dataset("tensorflow", "CIFAR10", root=str(tmp_path), train=True)
    actual, classes = zip(*samples, strict=True)
    np.testing.assert_array_equal(np.stack(actual), images)
    assert list(classes) == labels.tolist()


def test_cifar_100_has_the_fine_classes(tmp_path):
    images = pixels(2, 2, 32, 32, 3)
    coarse, fine = np.array([1, 2], np.uint8), np.array([71, 99], np.uint8)
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "test.bin").write_bytes(cifar_rows(images, coarse, fine))
    samples = dataset("pytorch", "CIFAR100", root=str(tmp_path))
    assert [label for _, label in samples] == [71, 99]
    np.testing.assert_array_equal(samples[1][0], images[1])


def test_cifar_is_read_from_an_archive_with_the_labels_of_keras(tmp_path):
    images = pixels(3, 2, 32, 32, 3)
    np.savez(tmp_path / "cifar10.npz", x_test=images, y_test=np.array([[3], [8]], np.uint8))
    samples = dataset("onnxrt", "CIFAR10", root=str(tmp_path))
    assert [label for _, label in samples] == [3, 8]
    np.testing.assert_array_equal(samples[0][0], images[0])


def test_pickled_cifar_files_are_refused_with_the_reason(tmp_path):
    (tmp_path / "test_batch").write_bytes(b"\x80\x02}")
    with pytest.raises(
        DataError, match="pickled files of the Python version can run code and are not read"
    ):
        dataset("onnxrt", "CIFAR10", root=str(tmp_path))


def test_an_archive_that_holds_objects_is_refused(tmp_path):
    objects = np.array([{"a": 1}], dtype=object)
    np.savez(tmp_path / "mnist.npz", x_test=objects, y_test=objects)
    with pytest.raises(DataError, match="pickled objects are refused"):
        dataset("onnxrt", "MNIST", root=str(tmp_path))
