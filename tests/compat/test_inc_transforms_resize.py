"""Scaling by the rules of TensorFlow and of OpenCV, next to both or to what is known by hand."""

import numpy as np
import pytest

from neural_mp.compat.inc.components.transforms.opencv_resize import opencv_resize
from neural_mp.compat.inc.components.transforms.tensorflow_resize import (
    METHODS,
    crop_and_resize,
    tensorflow_resize,
)

SIZES = [((75, 100), (51, 68)), ((60, 40), (44, 44)), ((20, 30), (47, 61)), ((1, 5), (3, 4))]


def photo(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.mark.parametrize("method", METHODS)
def test_images_are_scaled_as_tensorflow_does_it(method):
    tf = pytest.importorskip("tensorflow")
    for old, new in SIZES:
        image = photo(*old)
        expected = tf.image.resize(image, new, method=method).numpy()
        found = tensorflow_resize(image, *new, method)
        assert found.dtype == expected.dtype
        assert found == pytest.approx(expected, abs=255 * 2e-5)


@pytest.mark.parametrize("method", ["bilinear", "nearest"])
@pytest.mark.parametrize("box", [(0.1, 0.2, 0.8, 0.9), (-0.1, 0.3, 1.2, 0.7)])
def test_boxes_are_cut_and_scaled_as_tensorflow_does_it(method, box):
    tf = pytest.importorskip("tensorflow")
    image = photo(33, 47).astype(np.float32)
    expected = tf.image.crop_and_resize(image[None], [box], [0], (20, 29), method)[0].numpy()
    assert crop_and_resize(image, box, (20, 29), method) == pytest.approx(expected, abs=255 * 2e-5)


@pytest.mark.parametrize("method", ["nearest", "bilinear", "bicubic", "area"])
def test_images_are_scaled_as_opencv_does_it(method):
    cv2 = pytest.importorskip("cv2")
    words = {"nearest": "NEAREST", "bilinear": "LINEAR", "bicubic": "CUBIC", "area": "AREA"}
    for (height, width), (new_height, new_width) in SIZES:
        for image in (photo(height, width), photo(height, width).astype(np.float32)):
            flag = getattr(cv2, f"INTER_{words[method]}")
            expected = cv2.resize(image, (new_width, new_height), interpolation=flag)
            found = opencv_resize(image, new_width, new_height, method)
            assert found.dtype == expected.dtype
            exact = image.dtype == np.uint8 and method in ("nearest", "bilinear")
            let_through = 0 if exact else 1 if image.dtype == np.uint8 else 255 * 2e-5
            difference = np.abs(found.astype(float) - expected.astype(float)).max()
            assert difference <= let_through


def test_bilinear_takes_middles_between_pixels():
    line = np.array([[0.0, 100.0]], dtype=np.float32)
    assert opencv_resize(line, 4, 1, "bilinear").tolist() == [[0, 25, 75, 100]]
    assert opencv_resize(line.astype(np.uint8), 4, 1, "bilinear").tolist() == [[0, 25, 75, 100]]


def test_bilinear_does_not_average_what_becomes_smaller_and_area_does():
    line = np.array([[0, 0, 90, 0, 0, 0]], dtype=np.float32)
    assert opencv_resize(line, 2, 1, "bilinear").tolist() == [[0, 0]]
    assert opencv_resize(line, 2, 1, "area").tolist() == [[pytest.approx(30), 0]]


def test_area_rounds_halves_up_where_four_pixels_become_one():
    square = np.array([[0, 1], [1, 0]], dtype=np.uint8)
    assert opencv_resize(square, 1, 1, "area").tolist() == [[1]]


def test_a_flat_image_stays_flat():
    flat = np.full((13, 17, 3), 77, dtype=np.uint8)
    for method in ("nearest", "bilinear", "bicubic", "area"):
        for size in ((5, 9), (30, 20), (30, 9)):
            assert (opencv_resize(flat, *size, method) == 77).all()
    for method in METHODS:
        assert tensorflow_resize(flat, 9, 30, method) == pytest.approx(77, abs=1e-3)


@pytest.mark.parametrize("dtype", [np.int64, bool, np.float16])
def test_dtypes_that_opencv_does_not_scale_are_refused(dtype):
    with pytest.raises(ValueError, match="Cast it before"):
        opencv_resize(np.zeros((4, 4, 3), dtype=dtype), 2, 2, "bilinear")
