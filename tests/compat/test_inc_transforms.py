"""What the names of transforms mean in files for TensorFlow and ONNX Runtime."""

import sys

import numpy as np
import pytest
from close_arrays import assert_close

from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.compat.inc.components.transforms.image_transform import TensorImage, as_tensor_image
from neural_mp.data import OWN, build_transforms
from neural_mp.errors import ConfigurationError, DataError, MissingFrameworkError

cv2 = pytest.importorskip("cv2")
DRAW = np.random.default_rng(0)
PHOTO = DRAW.integers(0, 256, (40, 60, 3)).astype(np.uint8)
ARRAYS = ("tensorflow", "onnxrt")


def made(framework, **spec):
    return build_transforms(spec, load_vocabulary(framework))


def applied(framework, image, label=0, **spec):
    return made(framework, **spec)((image, label))[0]


def test_one_name_means_another_thing_in_each_framework():
    tall = np.moveaxis(PHOTO, 0, 1)
    assert applied("pytorch", tall, Resize=20).shape == (30, 20, 3)
    assert applied("onnxrt", tall, Resize=20).shape == (20, 20, 3)
    assert applied("onnxrt", tall, Resize={"size": [20, 30]}).shape == (30, 20, 3)
    tensor = as_tensor_image(tall)
    assert applied("tensorflow", tensor, Resize={"size": [20, 30]}).shape == (20, 30, 3)


def test_in_our_own_files_nothing_changes():
    scaled = build_transforms({"Resize": {"size": [20, 30]}}, OWN)((PHOTO, 0))[0]
    assert scaled.shape == (20, 30, 3)
    with pytest.raises(ConfigurationError, match="option: value"):
        build_transforms({"Resize": 20}, OWN)


def test_a_value_alone_is_the_first_option():
    transform = made("tensorflow", LabelShift=-1)
    assert transform((None, np.array([3])))[1].tolist() == [4]
    with pytest.raises(ConfigurationError, match="must be a whole number"):
        made("tensorflow", LabelShift="one")


def test_images_of_records_are_scaled_by_tensorflow_and_arrays_by_opencv():
    tf = pytest.importorskip("tensorflow")
    expected = tf.image.resize(PHOTO, [20, 25]).numpy()
    output = applied("tensorflow", as_tensor_image(PHOTO), Resize={"size": [20, 25]})
    assert isinstance(output, TensorImage)
    assert_close(output, expected, abs=1e-2)
    from_tensor = applied("tensorflow", tf.constant(PHOTO), Resize={"size": [20, 25]})
    assert_close(from_tensor, expected, abs=1e-2)
    assert applied("tensorflow", PHOTO, Resize={"size": [20, 25]}).dtype == np.uint8


@pytest.mark.parametrize(
    ("method", "flag"), [("nearest", 0), ("bilinear", 1), ("bicubic", 2), ("area", 3)]
)
def test_a_method_is_the_one_that_opencv_calls_so(method, flag):
    expected = cv2.resize(PHOTO, (24, 16), interpolation=flag)
    for interpolation in (method, flag):
        options = {"height": 14, "width": 14, "inter_pol": interpolation}
        assert (applied("onnxrt", PHOTO, ResizeWithAspectRatio=options) == expected).all()


def test_a_random_part_of_a_tensor_lies_between_pixels_as_in_tensorflow():
    tf = pytest.importorskip("tensorflow")
    options = {"size": [20, 25], "scale": [1.0, 1.0], "ratio": [1.0, 1.0]}
    box = [0, 10 / 60, 1, 50 / 60]  # the square in the middle, since no whole one fits
    expected = tf.image.crop_and_resize(PHOTO[None], [box], [0], [20, 25])[0].numpy()
    output = applied("tensorflow", as_tensor_image(PHOTO), RandomResizedCrop=options)
    assert_close(output, expected, abs=1e-4)


def test_without_opencv_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(MissingFrameworkError, match=r"pip install .*\[opencv\]"):
        applied("onnxrt", PHOTO, Resize=20)


def test_cast_scales_images_of_records_only():
    output = applied("tensorflow", as_tensor_image(PHOTO), Cast={"dtype": "float32"})
    assert_close(output, PHOTO / 255, abs=1e-6)
    for framework in ("tensorflow", "onnxrt", "pytorch"):
        plain = applied(framework, PHOTO, Cast={"dtype": "float32"})
        assert plain.dtype == np.float32
        assert (plain == PHOTO).all()


@pytest.mark.parametrize("old", ["uint8", "int16", "int32", "float32", "float64"])
@pytest.mark.parametrize("new", ["uint8", "uint16", "int32", "float16", "float32"])
def test_images_of_records_are_cast_as_tensorflow_does_it(old, new):
    tf = pytest.importorskip("tensorflow")
    image = PHOTO / 256 if old.startswith("f") else PHOTO.astype(np.int64) // 2
    image = image.astype(old)
    expected = tf.image.convert_image_dtype(image, new).numpy()
    output = applied("tensorflow", as_tensor_image(image), Cast=new)
    assert output.dtype == expected.dtype
    assert_close(np.asarray(output).astype(float), expected.astype(float), rel=1e-3)


@pytest.mark.parametrize("framework", ARRAYS)
def test_normalize_takes_channels_last(framework):
    options = {"mean": [10.0, 20.0, 30.0], "std": [2.0, 3.0, 4.0]}
    expected = (PHOTO - np.array([10, 20, 30])) / np.array([2, 3, 4])
    output = applied(framework, PHOTO, Normalize=options)
    assert_close(output, expected, abs=1e-4)
    assert_close(applied(framework, PHOTO, Normalize={}), PHOTO)
    with pytest.raises(ConfigurationError, match="std must be"):
        made(framework, Normalize={"std": [0.0]})


def test_rescale_in_two_steps():
    expected = PHOTO / 127.5 - 1
    options = {"rescale": [127.5, 1.0]}
    assert_close(applied("tensorflow", PHOTO, KerasRescale=options), expected, abs=1e-6)
    assert_close(applied("tensorflow", PHOTO, Normalize=options), expected, abs=1e-6)
    assert_close(applied("tensorflow", PHOTO, Rescale={}), PHOTO / 255, abs=1e-6)


@pytest.mark.parametrize("framework", ARRAYS)
def test_cutting_out_the_middle(framework):
    assert (applied(framework, PHOTO, CenterCrop=[21, 30]) == PHOTO[9:30, 15:45]).all()
    with pytest.raises(DataError, match="smaller"):
        applied(framework, PHOTO, CenterCrop=50)


def test_padded_center_crop_keeps_a_share_of_the_shorter_edge():
    output = applied("tensorflow", PHOTO, PaddedCenterCrop={"size": 224, "crop_padding": 32})
    assert (output == PHOTO[3:38, 13:48]).all()  # 40 × 224 / 256 = 35


def test_a_box_that_is_not_in_the_image_is_refused():
    box = {"offset_height": 5, "offset_width": 10, "target_height": 20, "target_width": 30}
    assert (applied("onnxrt", PHOTO, CropToBoundingBox=box) == PHOTO[5:25, 10:40]).all()
    with pytest.raises(DataError, match="exceeds the image"):
        applied("onnxrt", PHOTO, CropToBoundingBox={**box, "offset_height": 30})


@pytest.mark.parametrize("framework", [*ARRAYS, "pytorch"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("RandomCrop", {"size": [20, 30]}),
        ("RandomResizedCrop", {"size": [20, 30]}),
        ("RandomHorizontalFlip", {}),
        ("RandomVerticalFlip", {}),
    ],
)
def test_the_same_seed_gives_the_same_images(framework, name, options):
    def run(seed):
        transform = made(framework, **{name: {**options, "seed": seed}})
        return [transform((PHOTO, 0))[0] for _ in range(12)]

    first, second, third = run(3), run(3), run(4)
    assert all((lhs == rhs).all() for lhs, rhs in zip(first, second, strict=True))
    assert any((lhs != rhs).any() for lhs, rhs in zip(first, third, strict=True))
    assert len({image.tobytes() for image in first}) > 1


def test_random_crops_are_parts_and_flips_are_mirror_images():
    numbered = np.arange(40 * 60).reshape(40, 60, 1)
    for _ in range(5):
        part = applied("onnxrt", numbered, RandomCrop={"size": [7, 9]})
        top, left = divmod(int(part[0, 0, 0]), 60)
        assert (part == numbered[top : top + 7, left : left + 9]).all()
    flip = made("onnxrt", RandomHorizontalFlip={})
    corners = {int(flip((numbered, 0))[0][0, 0, 0]) for _ in range(20)}
    assert corners == {0, 59}


def test_images_of_records_are_cropped_in_the_middle():
    output = applied("tensorflow", as_tensor_image(PHOTO), RandomCrop={"size": [20, 30]})
    assert (output == PHOTO[10:30, 15:45]).all()


def test_the_whole_way_of_inception_nets_is_that_of_tensorflow():
    tf = pytest.importorskip("tensorflow")
    image = tf.image.central_crop(tf.image.convert_image_dtype(PHOTO, tf.float32), 0.875)
    expected = (tf.image.resize(image, [24, 28]).numpy() - 0.5) * 2
    output = applied("tensorflow", PHOTO, BilinearImagenet={"height": 24, "width": 28})
    assert_close(output, expected, abs=1e-5)
    for_onnx = applied("onnxrt", PHOTO, BilinearImagenet={"height": 24, "width": 28})
    assert for_onnx.dtype == np.float32
    assert_close(for_onnx, expected, abs=1e-5)


def test_the_shorter_edge_is_scaled_and_the_middle_cut_out():
    tf = pytest.importorskip("tensorflow")
    options = {
        "height": 24,
        "width": 28,
        "resize_side": 30,
        "mean_value": "123.68 116.78 103.94",
        "scale": 0.017,
    }
    scaled = tf.image.resize(PHOTO, [30, 45]).numpy()[3:27, 8:36]
    expected = (scaled - np.array([123.68, 116.78, 103.94])) * 0.017
    output = applied("tensorflow", PHOTO, ResizeCropImagenet=options)
    assert_close(output, expected, abs=1e-3)
    rgb = applied("tensorflow", PHOTO, ResizeCropImagenet={**options, "mean_value": [0.0]})
    swapped = {**options, "mean_value": [0.0], "subpixels": "BGR"}
    assert (applied("tensorflow", PHOTO, ResizeCropImagenet=swapped) == rgb[..., ::-1]).all()


def test_for_onnx_the_result_has_channels_first_and_is_normalized():
    square = DRAW.integers(0, 256, (30, 30, 3)).astype(np.uint8)
    options = {"height": 24, "width": 20, "resize_side": 30}
    output = applied("onnxrt", square, ResizeCropImagenet=options)
    expected = square[3:27, 5:25] / 255 / np.array([0.229, 0.224, 0.225])
    assert_close(output, expected.transpose(2, 0, 1), abs=1e-5)


def test_an_image_too_small_to_cut_from_is_refused_with_the_option_to_change():
    with pytest.raises(DataError, match="set a larger resize_side"):
        applied("onnxrt", PHOTO, ResizeCropImagenet={"height": 224, "width": 224, "resize_side": 9})


def test_the_shorter_edge_leaves_a_margin_for_what_is_cut_out():
    output = applied("onnxrt", PHOTO, ResizeWithAspectRatio={"height": 14, "width": 14})
    assert output.shape == (16, 24, 3)  # 14 / 87.5 %


@pytest.mark.parametrize("framework", [*ARRAYS, "pytorch"])
def test_boxes_move_with_the_padded_image(framework):
    square = np.full((20, 20, 3), 9, dtype=np.uint8)
    label = (np.array([[0.0, 0.0, 0.5, 1.0]]), ["cat"], [1], "1.jpg")
    options = {"min_dim": 40, "max_dim": 80, "padding": True, "constant_value": 5}
    image, labels = made(framework, ResizeWithRatio=options)((square, label))
    assert image.shape == (80, 80, 3)
    assert (image[20:60, 20:60] == 9).all()
    assert (image == 9).sum() == 40 * 40 * 3
    assert set(np.unique(image)) == {5, 9}
    assert labels[0].tolist() == [[0.25, 0.25, 0.5, 0.75]]
    assert labels[1:] == label[1:]


def test_labels_without_boxes_are_refused():
    with pytest.raises(DataError, match="boxes"):
        applied("onnxrt", PHOTO, ResizeWithRatio={})


@pytest.mark.parametrize("framework", ARRAYS)
def test_channels_are_aligned(framework):
    assert applied(framework, PHOTO[..., 0], AlignImageChannel=3).shape == (40, 60, 3)
    with_alpha = np.dstack([PHOTO, PHOTO[..., 0]])
    assert (applied(framework, with_alpha, AlignImageChannel={"dim": 3}) == PHOTO).all()
    grey = applied(framework, PHOTO, AlignImageChannel={"dim": 1})
    assert grey.shape == (40, 60, 1)
    assert np.abs(grey[..., 0] - PHOTO @ np.array([0.299, 0.587, 0.114])).max() <= 0.51
    with pytest.raises(DataError, match="channels cannot be converted"):
        applied(framework, PHOTO[..., :2], AlignImageChannel={"dim": 3})


def test_quantized_input_is_cut_off_and_stays_in_its_range():
    image = np.array([[-400.0, -1.7, 0.0, 1.7, 400.0]], dtype=np.float32)
    signed = applied("tensorflow", image, QuantizedInput={"dtype": "int8", "scale": 1.0})
    assert signed.tolist() == [[-128, -1, 0, 1, 127]]
    unsigned = applied("tensorflow", image, QuantizedInput={"dtype": "uint8", "scale": 1.0})
    assert unsigned.tolist() == [[0, 126, 128, 129, 255]]
    assert applied("tensorflow", image, QuantizedInput={"dtype": "int8"}) is not None
    assert (applied("tensorflow", image, QuantizedInput={}) == image).all()


def test_labels_are_shifted_in_the_kind_that_they_have():
    shift = made("onnxrt", LabelShift=1)
    assert shift((None, [1, 2]))[1] == [0, 1]
    assert shift((None, [(1, 2), (3, 4)]))[1] == [(0, 1), (2, 3)]
    assert shift((None, np.array([[5]])))[1].tolist() == [[4]]
    with pytest.raises(DataError, match="labels must be numbers"):
        shift((None, None))


@pytest.mark.parametrize(
    ("framework", "spec", "message"),
    [
        ("onnxrt", {"Resize": {"size": [1, 2, 3]}}, "one number or"),
        ("onnxrt", {"Resize": {"size": 4, "interpolation": "cubic"}}, "did you mean"),
        ("onnxrt", {"RandomResizedCrop": {"size": 4, "scale": [1.0, 0.5]}}, "lowest, highest"),
        ("tensorflow", {"Normalize": {"rescale": [1.0]}}, "divisor"),
        ("tensorflow", {"BilinearImagenet": {"height": 4, "width": 4, "central_fraction": 2.0}},
         "central_fraction"),
        ("tensorflow", {"ResizeCropImagenet": {"height": 4, "width": 4, "mean_value": "a b"}},
         "must be a finite number"),
        ("tensorflow", {"PaddedCenterCrop": {"size": [3, 4]}}, "the same"),
        ("pytorch", {"Cast": {"dtype": "bfloat16"}}, "bfloat16"),
    ],
)  # fmt: skip
def test_a_mistake_is_said_with_its_option(framework, spec, message):
    with pytest.raises(ConfigurationError, match=message):
        made(framework, **spec)


def test_a_tuning_file_of_theirs_runs_its_transforms(tmp_path):
    from neural_mp.api import config_objects
    from neural_mp.config import parse_settings

    image = pytest.importorskip("PIL.Image")
    (tmp_path / "cat").mkdir()
    image.fromarray(PHOTO).save(tmp_path / "cat" / "1.png")
    settings = parse_settings(f"""
version: 1.0
model: {{name: net, framework: onnxrt_integerops}}
evaluation:
  accuracy:
    metric: {{topk: 1}}
    dataloader:
      batch_size: 1
      dataset: {{ImageFolder: {{root: {tmp_path}}}}}
      transform:
        Rescale: {{}}
        Resize: {{size: 30}}
        CenterCrop: {{size: 20}}
        Normalize: {{mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25]}}
        Transpose: {{perm: [2, 0, 1]}}
        Cast: {{dtype: float32}}
    postprocess:
      transform:
        LabelShift: 1
""")
    images, labels = next(iter(config_objects.build_loader(settings, config_objects.ACCURACY)))
    assert images.shape == (1, 3, 20, 20)
    assert images.dtype == np.float32
    assert (
        config_objects.build_postprocess(settings)((None, labels + 1))[1].tolist()
        == labels.tolist()
    )
