"""Scaling with TensorFlow and with OpenCV, next to what is known by hand."""

import numpy as np
import pytest

from neural_mp.compat.inc.components.transforms.image_transform import (
    resize_with_opencv,
    resize_with_tensorflow,
)

OPENCV_METHODS = ("nearest", "bilinear", "bicubic", "area")


@pytest.fixture
def cv2():
    return pytest.importorskip("cv2")


@pytest.mark.usefixtures("cv2")
def test_opencv_takes_middles_between_pixels():
    line = np.array([[0.0, 100.0]], dtype=np.float32)
    assert resize_with_opencv(line, 4, 1, "bilinear").tolist() == [[0, 25, 75, 100]]
    assert resize_with_opencv(line.astype(np.uint8), 4, 1, "bilinear").tolist() == [
        [0, 25, 75, 100]
    ]


@pytest.mark.usefixtures("cv2")
def test_bilinear_does_not_average_what_becomes_smaller_and_area_does():
    line = np.array([[0, 0, 90, 0, 0, 0]], dtype=np.float32)
    assert resize_with_opencv(line, 2, 1, "bilinear").tolist() == [[0, 0]]
    assert resize_with_opencv(line, 2, 1, "area").tolist() == [[pytest.approx(30), 0]]


@pytest.mark.usefixtures("cv2")
@pytest.mark.parametrize("method", OPENCV_METHODS)
def test_a_flat_image_stays_flat_in_opencv(method):
    flat = np.full((13, 17, 3), 77, dtype=np.uint8)
    for size in ((5, 9), (30, 20), (30, 9)):
        resized = resize_with_opencv(flat, *size, method)
        assert resized.shape == (size[1], size[0], 3)
        assert resized.dtype == np.uint8
        assert (resized == 77).all()


@pytest.mark.usefixtures("cv2")
@pytest.mark.parametrize("dtype", [np.int64, bool, np.float16])
def test_dtypes_that_opencv_does_not_scale_are_refused(dtype):
    with pytest.raises(ValueError, match="add a Cast before"):
        resize_with_opencv(np.zeros((4, 4, 3), dtype=dtype), 2, 2, "bilinear")


@pytest.mark.parametrize("method", ["nearest", "bilinear", "bicubic", "area", "lanczos5"])
def test_a_flat_image_stays_flat_in_tensorflow(method):
    pytest.importorskip("tensorflow")
    flat = np.full((13, 17, 3), 77, dtype=np.uint8)
    resized = resize_with_tensorflow(flat, 9, 30, method)
    assert resized.dtype == (np.uint8 if method == "nearest" else np.float32)
    assert resized.shape == (9, 30, 3)
    assert resized == pytest.approx(77, abs=1e-3)


def test_tensorflow_takes_middles_between_pixels():
    pytest.importorskip("tensorflow")
    line = np.array([[[0], [100]]], dtype=np.uint8)
    assert resize_with_tensorflow(line, 1, 4, "bilinear").tolist() == [[[0], [25], [75], [100]]]
    same = resize_with_tensorflow(line, 1, 2, "bilinear")
    assert same.dtype == np.float32
    assert same.tolist() == line.tolist()


def test_tensorflow_scales_in_scripts_for_its_first_version_too(monkeypatch):
    tf = pytest.importorskip("tensorflow")
    line = np.array([[[0], [100]]], dtype=np.uint8)
    expected = resize_with_tensorflow(line, 1, 4, "bilinear")
    with tf.Graph().as_default():
        assert (resize_with_tensorflow(line, 1, 4, "bilinear") == expected).all()
    monkeypatch.setattr(tf, "executing_eagerly", lambda: False)
    assert (resize_with_tensorflow(line, 1, 4, "bilinear") == expected).all()


@pytest.mark.parametrize("shape", [(4, 4), (0, 4, 3)])
def test_images_that_tensorflow_does_not_scale_are_refused(shape):
    pytest.importorskip("tensorflow")
    with pytest.raises(ValueError):
        resize_with_tensorflow(np.zeros(shape, np.uint8), 2, 2, "bilinear")
