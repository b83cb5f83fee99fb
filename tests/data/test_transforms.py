import importlib
import pickle
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from neural_mp.data import TRANSFORMS, build_transforms
from neural_mp.errors import ConfigurationError, DataError, MissingFrameworkError

IMAGE = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def apply(spec, inputs=IMAGE):
    result, label = build_transforms(spec)((inputs, "label"))
    assert label == "label"
    return result


def test_nothing_named_is_no_transform():
    assert build_transforms({}) is None
    assert build_transforms(None) is None


def test_rescale_brings_bytes_to_zero_to_one():
    result = apply({"Rescale": {}})
    np.testing.assert_array_equal(result, IMAGE.astype(np.float32) / np.float32(255))
    assert result.dtype == np.float32
    np.testing.assert_array_equal(apply({"Rescale": {"scale": 2}}), IMAGE * np.float32(2))


@pytest.mark.parametrize("channels", ["last", "first"])
def test_normalize_treats_each_channel_on_its_own(channels):
    mean, std = [10, 20, 30.5], [1, 2, 4]
    expected = (IMAGE - np.array(mean)) / np.array(std)
    if channels == "last":
        result = apply({"Normalize": {"mean": mean, "std": std}})
    else:
        options = {"mean": mean, "std": std, "channels": "first"}
        result = apply({"ToCHW": {}, "Normalize": options}).transpose(1, 2, 0)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert result.dtype == np.float32


def test_normalize_takes_one_number_for_all_channels():
    digits = load_digits().images[0]
    result = apply({"normalize": {"mean": 8, "std": [4]}}, digits)
    np.testing.assert_allclose(result, (digits - 8) / 4)


def test_layout_transforms_do_as_numpy_does():
    chw = IMAGE.transpose(2, 0, 1)
    np.testing.assert_array_equal(apply({"ToCHW": {}}), chw)
    np.testing.assert_array_equal(apply({"HWC2CHW": None}), chw)
    np.testing.assert_array_equal(apply({"Transpose": {"perm": [2, 0, 1]}}), chw)
    np.testing.assert_array_equal(apply({"Reshape": {"shape": [-1, 27]}}), IMAGE.reshape(6, 27))
    np.testing.assert_array_equal(apply({"ExpandDims": {}}), IMAGE[np.newaxis])
    assert apply({"expand_dims": {"axis": -1}}).shape == (6, 9, 3, 1)
    assert apply({"Cast": {"dtype": "float16"}}).dtype == np.float16


def test_transforms_run_in_the_order_written():
    first = apply({"Rescale": {"scale": 2}, "Normalize": {"mean": 1, "std": 1}})
    second = apply({"Normalize": {"mean": 1, "std": 1}, "Rescale": {"scale": 2}})
    np.testing.assert_array_equal(first, IMAGE * 2.0 - 1)
    np.testing.assert_array_equal(second, (IMAGE - 1.0) * 2)


def test_center_crop_keeps_the_middle():
    np.testing.assert_array_equal(apply({"CenterCrop": {"size": [4, 3]}}), IMAGE[1:5, 3:6])
    np.testing.assert_array_equal(
        apply({"CenterCrop": {"size": 4}}, IMAGE[:, :, 0]), IMAGE[1:5, 2:6, 0]
    )


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_resize_is_pillows(interpolation):
    pil = pytest.importorskip("PIL.Image")
    method = pil.Resampling[interpolation.upper()]
    result = apply({"Resize": {"size": [12, 5], "interpolation": interpolation}})
    np.testing.assert_array_equal(result, np.array(pil.fromarray(IMAGE).resize((5, 12), method)))
    assert result.dtype == np.uint8


def test_resize_of_floats_and_grey_images_keeps_dtype_and_axes():
    pytest.importorskip("PIL")
    grey = load_digits().images[3].astype(np.float32)
    result = apply({"Resize": {"size": 16}}, grey)
    assert result.shape == (16, 16)
    assert result.dtype == np.float32
    with_axis = apply({"Resize": {"size": 16}}, grey[:, :, np.newaxis])
    np.testing.assert_array_equal(with_axis[:, :, 0], result)
    flat = apply({"Resize": {"size": 3}}, np.full((7, 7), 0.25, np.float32))
    np.testing.assert_allclose(flat, 0.25)


def test_resize_without_pillow_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingFrameworkError, match=r"pip install .*\[images\]"):
        build_transforms({"Resize": {"size": 4}})


def test_transforms_can_be_sent_to_another_process():
    transform = build_transforms({"Rescale": {}, "Cast": {"dtype": "float16"}, "ToCHW": {}})
    again = pickle.loads(pickle.dumps(transform))
    np.testing.assert_array_equal(again((IMAGE, 1))[0], transform((IMAGE, 1))[0])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"Rescale": {"scale": "x"}}, "Rescale: scale must be a finite number, got 'x'"),
        (
            {"Rescale": {"scael": 1}},
            "transform 'Rescale' has no option 'scael'; did you mean 'scale'",
        ),
        ({"Normalize": {"mean": 1}}, "transform 'Normalize' needs the option 'std'"),
        ({"Normalize": {"mean": 1, "std": 0}}, "std must be above 0"),
        ({"Normalize": {"mean": [1, 2], "std": [1, 2, 3]}}, "mean has 2 channels and std 3"),
        ({"Normalize": {"mean": [], "std": 1}}, "mean must be a finite number"),
        ({"Normalize": {"mean": 1, "std": 1, "channels": "frist"}}, "did you mean 'first'"),
        ({"Transpose": {"perm": [0, 0, 1]}}, "perm must hold each of"),
        ({"Transpose": {"perm": "HWC"}}, "perm must be a list of whole numbers"),
        ({"Reshape": {"shape": [-1, -1]}}, "only one size may be -1"),
        ({"Reshape": {"shape": [-2]}}, "whole number from -1"),
        ({"Cast": {"dtype": "text"}}, "must be the name of a numpy dtype"),
        ({"Cast": {"dtype": None}}, "must be the name of a numpy dtype"),
        ({"CenterCrop": {"size": [1, 2, 3]}}, r"one number or \[height, width\]"),
        ({"CenterCrop": {"size": 0}}, "whole number from 1"),
        ({"ExpandDims": {"axis": 0.5}}, "axis must be a whole number"),
        ({"ToCHW": {"axis": 1}}, "no option 'axis'; it takes no options"),
        ({"Rescal": {}}, "unknown transform 'Rescal'; did you mean 'Rescale'"),
        ({"Rescale": 3}, "must be written as option: value"),
        (["Rescale"], "transform must hold names with their options"),
    ],
)
def test_a_wrong_option_is_refused_when_built(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        build_transforms(spec)


def test_a_wrong_interpolation_is_refused():
    pytest.importorskip("PIL")
    with pytest.raises(ConfigurationError, match="did you mean 'bilinear'"):
        build_transforms({"Resize": {"size": 4, "interpolation": "bilinaer"}})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"Normalize": {"mean": [1, 2], "std": 1}}, r"shape \(6, 9, 3\): 2 channels are expected"),
        ({"Transpose": {"perm": [1, 0]}}, r"Transpose\(perm=\(1, 0\)\) does not accept inputs of"),
        ({"Reshape": {"shape": [5, 5]}}, r"shape \(6, 9, 3\)"),
        ({"ExpandDims": {"axis": 7}}, "ExpandDims"),
        ({"CenterCrop": {"size": 8}}, "the image is smaller"),
        ({"Reshape": {"shape": [-1]}, "CenterCrop": {"size": 1}}, r"\[H, W\] or \[H, W, C\]"),
        ({"Reshape": {"shape": [-1]}, "ToCHW": {}}, r"must be \[H, W, C\]"),
    ],
)
def test_inputs_that_do_not_fit_are_named_with_their_shape(spec, message):
    with pytest.raises(DataError, match=message):
        apply(spec)


def test_resize_refuses_what_is_no_image():
    pytest.importorskip("PIL")
    with pytest.raises(DataError, match="must be uint8 or float32, got float64"):
        apply({"Resize": {"size": 4}}, np.zeros((3, 3)))
    with pytest.raises(DataError, match=r"\[H, W\] or \[H, W, C\]"):
        apply({"Resize": {"size": 4}}, np.zeros(3, np.float32))


def test_what_is_no_sample_is_refused():
    rescale = build_transforms({"Rescale": {}})
    with pytest.raises(DataError, match=r"must be \(inputs, label\), got ndarray"):
        rescale(IMAGE)
    with pytest.raises(DataError, match="must be one array, got dict"):
        rescale(({"a": IMAGE}, 0))


def test_every_transform_is_listed():
    importlib.import_module("neural_mp.metrics")  # has that of predictions
    assert sorted(TRANSFORMS) == [
        "Cast", "CenterCrop", "ExpandDims", "Normalize", "Rescale", "Reshape", "Resize", "ToCHW",
        "Transpose", "decode", "letterbox",
    ]  # fmt: skip
