"""What the names of datasets stand for in files of Intel Neural Compressor: images and numbers."""

import sys

import numpy as np
import pytest
from inc_datasets import dataset, pixels

from neural_mp.api.config_objects import ACCURACY, build_loader
from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.compat.inc.components.dummy import SAMPLES
from neural_mp.compat.inc.components.image_datasets import DatasetWarning
from neural_mp.config import parse_settings
from neural_mp.config.source import IgnoredSettingWarning
from neural_mp.data import DATASETS, build_dataloader, build_dataset
from neural_mp.errors import ConfigurationError, DataError, MissingFrameworkError

FRAMEWORKS = ("pytorch", "tensorflow", "onnxrt")


def batches(framework, name, batch_size, **options):
    spec = {"dataset": {name: options}, "batch_size": batch_size}
    return list(build_dataloader(spec, load_vocabulary(framework)))


@pytest.fixture
def image():
    return pytest.importorskip("PIL.Image")


# dummy


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_first_number_of_a_dummy_shape_is_how_many_samples_there_are(framework):
    samples = dataset(framework, "dummy", shape=[6, 3, 4, 5])
    assert len(samples) == 6
    inputs, label = samples[5]
    assert inputs.shape == (3, 4, 5)
    assert inputs.dtype == np.float32
    assert label == 0


def test_dummy_samples_are_the_numbers_that_numpy_draws_after_the_same_seed():
    samples = dataset("onnxrt", "dummy", shape=[[4, 2, 3], [4, 5]], low=[0, -1], high=[1, 10])
    np.random.seed(9527)
    first = np.random.uniform(0, 1, (4, 2, 3)).astype(np.float32)
    second = np.random.uniform(-1, 10, (4, 5)).astype(np.float32)
    for index in range(4):
        inputs, label = samples[index]
        np.testing.assert_array_equal(inputs[0], first[index])
        np.testing.assert_array_equal(inputs[1], second[index])
        assert label == 0


def test_a_dummy_batch_of_several_inputs_is_a_tuple_of_arrays():
    (inputs, labels), *_ = batches(
        "pytorch", "dummy", 2, shape=[[4, 8], [4, 8]], dtype=["int64", "float32"]
    )
    assert [array.shape for array in inputs] == [(2, 8), (2, 8)]
    assert [array.dtype for array in inputs] == [np.int64, np.float32]
    assert labels.tolist() == [0, 0]


def test_dummy_options_are_also_understood_as_text():
    written = dataset("tensorflow", "dummy", shape="5, 2", low="0.5", high="1.5", dtype="float16, ")
    inputs, _ = written[0]
    assert (len(written), inputs.shape, inputs.dtype) == (5, (2,), np.float16)
    assert all(0.5 <= value <= 1.5 for value in inputs)


def test_a_dummy_without_labels_has_the_label_none():
    inputs, label = dataset("onnxrt", "dummy", shape=[2, 3], label=False, dtype="uint8")[1]
    assert label is None
    assert inputs.dtype == np.uint8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": [[4, 2], [3, 2]]}, "must be the same"),
        ({"shape": [4, 0]}, "each of dummy: shape must be a whole number from 1"),
        ({"shape": [4, 2], "low": [0, 1]}, "dummy: low must be one value or 1"),
        ({"shape": [4, 2], "dtype": "flaot32"}, "did you mean 'float32'"),
        ({"shape": [4, 2], "label": "yes"}, "dummy: label must be true or false"),
        ({"shape": [4, 2], "size": 3}, "has no option 'size'"),
    ],
)
def test_a_wrong_dummy_option_is_said(options, message):
    with pytest.raises(ConfigurationError, match=message):
        dataset("pytorch", "dummy", **options)


def test_in_our_own_files_dummy_means_what_it_did():
    own = build_dataset({"dummy": {"shape": [3, 4], "size": 2}})
    assert (len(own), own[0][0].shape) == (2, (3, 4))
    assert DATASETS.find_factory("dummy") is not load_vocabulary("onnxrt").datasets.find_factory("dummy")


def test_dummy_v2_gives_samples_of_the_shape_with_labels_and_comes_to_an_end():
    samples = dataset("tensorflow", "dummy_v2", input_shape=[2, 3])
    np.random.seed(9527)
    expected = [(np.random.uniform(-128, 127, (2, 3)), np.random.uniform(-128, 127, (1,)))]
    inputs, label = next(iter(samples))
    np.testing.assert_array_equal(inputs, expected[0][0].astype(np.float32))
    np.testing.assert_array_equal(label, expected[0][1].astype(np.float32))
    assert sum(1 for _ in samples) == SAMPLES


def test_dummy_v2_gives_the_same_samples_at_every_walk():
    samples = dataset("tensorflow", "dummy_v2", input_shape=[2])
    first, second = ([next(walk)[0] for _ in range(3)] for walk in (iter(samples), iter(samples)))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first[0], first[1])


def test_dummy_v2_takes_ranges_and_dtypes_for_inputs_and_then_labels():
    samples = dataset(
        "pytorch",
        "dummy_v2",
        input_shape=[[3], [2, 2]],
        label_shape=[4],
        low=[0.0, 10.0, 0.0],
        high=[1.0, 20.0, 5.0],
        dtype=["float32", "int32", "int64"],
    )
    (first, second), label = next(iter(samples))
    assert (first.shape, second.shape, label.shape) == ((3,), (2, 2), (4,))
    assert (first.dtype, second.dtype, label.dtype) == (np.float32, np.int32, np.int64)
    assert first.min() >= 0
    assert first.max() <= 1
    assert second.min() >= 10
    assert label.max() < 5


def test_sparse_dummy_v2_gives_places_and_values_of_that_part_that_is_not_sparse():
    samples = dataset(
        "tensorflow",
        "sparse_dummy_v2",
        dense_shape=[[10, 20], [5, 3]],
        label_shape=[[1]],
        sparse_ratio=[0.98, 0.8],
    )
    ((indices, values), (more_indices, more_values)), labels = next(iter(samples))
    assert indices.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert more_indices.tolist() == [[0, 0], [0, 1], [0, 2]]
    assert (values.shape, more_values.shape) == ((4,), (3,))
    assert [label.shape for label in labels] == [(1,), (1,)]


# Images in folders and lists


@pytest.fixture
def class_folders(tmp_path, image):
    """A colour and a grey image of `cat`, a colour image of `dog`; PNG, so that nothing is lost."""
    written = {}
    for name, mode, shape in (
        ("cat/1.png", "RGB", (5, 7, 3)),
        ("cat/2.png", "L", (5, 7)),
        ("dog/1.png", "RGB", (4, 4, 3)),
    ):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        written[name] = pixels(len(written), *shape)
        image.fromarray(written[name], mode=mode).save(path)
    return tmp_path / "images", written


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_an_image_folder_is_rgb(framework, class_folders):
    root, written = class_folders
    samples = dataset(framework, "ImageFolder", root=str(root))
    assert [label for _, label in samples] == [0, 0, 1]
    np.testing.assert_array_equal(samples[0][0], written["cat/1.png"])
    np.testing.assert_array_equal(samples[1][0], np.stack([written["cat/2.png"]] * 3, axis=-1))


def test_for_onnx_runtime_an_image_folder_gives_images_as_they_are(class_folders):
    root, written = class_folders
    samples = dataset("onnxrt", "ImageFolder", root=str(root))
    np.testing.assert_array_equal(samples[1][0], written["cat/2.png"])
    np.testing.assert_array_equal(samples[2][0], written["dog/1.png"])
    assert samples[2][1] == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_imagenet_raw_takes_names_and_labels_from_the_list(framework, class_folders):
    root, written = class_folders
    labels = root.parent / "labels.txt"
    labels.write_text("dog/1.png 207\ncat/2.png\t281\n\n")
    samples = dataset(framework, "ImagenetRaw", data_path=str(root), image_list=str(labels))
    assert [label for _, label in samples] == [207, 281]
    np.testing.assert_array_equal(samples[0][0], written["dog/1.png"])
    np.testing.assert_array_equal(samples[1][0], np.stack([written["cat/2.png"]] * 3, axis=-1))


@pytest.mark.parametrize("name", ["val.txt", "val_map.txt"])
def test_imagenet_raw_finds_the_list_beside_the_images(name, class_folders):
    root, _ = class_folders
    (root / name).write_text("cat/1.png 3\n")
    assert dataset("onnxrt", "ImagenetRaw", data_path=str(root))[0][1] == 3


def test_imagenet_raw_says_which_images_are_left_out(class_folders):
    root, _ = class_folders
    (root / "val.txt").write_text("cat/1.png 3\ncat/9.png 3\n")
    with pytest.warns(DatasetWarning, match=r"1 of 2 images .*cat/9\.png"):
        assert len(dataset("onnxrt", "ImagenetRaw", data_path=str(root))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cat/1.png three\n", r"line 1: expected an image and its label"),
        ("cat/1.png\n", r"line 1: expected an image and its label"),
        ("nothing.png 1\n", "none of the 1 images"),
        ("", "none of the 0 images"),
    ],
)
def test_imagenet_raw_says_what_is_wrong_with_the_list(text, message, class_folders):
    root, _ = class_folders
    (root / "val.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        dataset("onnxrt", "ImagenetRaw", data_path=str(root))


def test_imagenet_raw_without_a_list_says_what_one_looks_like(class_folders):
    with pytest.raises(DataError, match=r"has no val\.txt or val_map\.txt; set image_list"):
        dataset("onnxrt", "ImagenetRaw", data_path=str(class_folders[0]))


def test_without_pillow_the_error_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingFrameworkError, match=r"pip install .*\[images\]"):
        dataset("onnxrt", "ImagenetRaw", data_path=str(tmp_path))


def test_a_filter_is_said_to_have_no_effect(class_folders):
    with pytest.warns(IgnoredSettingWarning, match="'ImageFolder': filter is ignored"):
        dataset("pytorch", "ImageFolder", root=str(class_folders[0]), filter=lambda *_: False)


def test_a_file_of_theirs_gives_batches_of_its_dataset(class_folders):
    root, written = class_folders
    (root / "val.txt").write_text("cat/1.png 8\ncat/2.png 9\n")
    settings = parse_settings(f"""
version: 1.0
model: {{name: resnet50, framework: onnxrt_qlinearops}}
evaluation:
  accuracy:
    metric: {{topk: 1}}
    dataloader:
      batch_size: 2
      dataset:
        ImagenetRaw:
          data_path: {root}
          image_list: {root}/val.txt
""")
    ((inputs, labels),) = build_loader(settings, ACCURACY)
    assert inputs.shape == (2, 5, 7, 3)
    np.testing.assert_array_equal(inputs[0], written["cat/1.png"])
    assert labels.tolist() == [8, 9]


# style_transfer


def test_style_transfer_pairs_every_content_with_every_style(tmp_path, image):
    for name in ("content/a.png", "content/b.png", "style/c.png", "style/d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        image.fromarray(pixels(ord(name[-5]), 20, 30, 3)).save(tmp_path / name)
    samples = dataset(
        "tensorflow",
        "style_transfer",
        content_folder=str(tmp_path / "content"),
        style_folder=str(tmp_path / "style"),
        resize_shape=[16, 8],
        image_format="png",
    )
    assert len(samples) == 4
    (content, style), label = samples[2]
    with image.open(tmp_path / "content/b.png") as b, image.open(tmp_path / "style/c.png") as c:
        expected = [np.asarray(picture.resize((16, 8))) / 255 for picture in (b, c)]
    assert content.shape == (8, 16, 3)
    np.testing.assert_allclose(content, expected[0])
    np.testing.assert_allclose(style, expected[1])
    assert label == 0


def test_style_transfer_says_where_it_found_no_images(tmp_path):
    pytest.importorskip("PIL")
    with pytest.raises(DataError, match="has no files ending in 'jpg'"):
        dataset("tensorflow", "style_transfer", content_folder=".", style_folder=".")
