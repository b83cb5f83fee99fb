"""What the names of datasets stand for in files of Intel Neural Compressor: TFRecord files."""

import io
import json
import sys

import numpy as np
import pytest

from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.config.source import IgnoredSettingWarning
from neural_mp.data import build_dataloader, build_dataset
from neural_mp.errors import ConfigurationError, DataError, MissingFrameworkError

tf = pytest.importorskip("tensorflow")
Image = pytest.importorskip("PIL.Image")


def dataset(name, **options):
    return build_dataset({name: options}, load_vocabulary("tensorflow"))


def batches(name, batch_size, **options):
    spec = {"dataset": {name: options}, "batch_size": batch_size}
    return list(build_dataloader(spec, load_vocabulary("tensorflow")))


def example(**features):
    """A serialized tf.train.Example; `__` stands for `/` in a feature's name."""
    kinds = {bytes: ("bytes_list", "BytesList"), int: ("int64_list", "Int64List")}
    entries = {}
    for name, values in features.items():
        field, kind = kinds.get(type(values[0]), ("float_list", "FloatList"))
        value = getattr(tf.train, kind)(value=values)
        entries[name.replace("__", "/")] = tf.train.Feature(**{field: value})
    return tf.train.Example(features=tf.train.Features(feature=entries)).SerializeToString()


def write(path, *records):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return str(path)


def pixels(seed, *shape):
    """Smooth, as a photo is, so that ways of decoding differ by little."""
    ramp = np.linspace(0, 200, num=int(np.prod(shape))).reshape(shape)
    return (ramp + np.random.default_rng(seed).integers(0, 20, shape)).astype(np.uint8)


def encoded(array, form):
    stream = io.BytesIO()
    Image.fromarray(array.squeeze()).save(stream, format=form)
    return stream.getvalue()


# ImageRecord


@pytest.fixture
def imagenet(tmp_path):
    """Two files with three and one images of another size each; the classes are 10 to 13."""
    photos = [encoded(pixels(i, 40 + i, 30, 3), "JPEG") for i in range(4)]
    records = [
        example(image__encoded=[photo], image__class__label=[10 + i])
        for i, photo in enumerate(photos)
    ]
    write(tmp_path / "validation-00000-of-00002", *records[:3])
    write(tmp_path / "validation-00001-of-00002", records[3])
    (tmp_path / "labels.txt").write_text("not a record")
    return tmp_path, photos


def test_an_image_record_is_decoded_as_tensorflow_does_with_the_fast_transform(imagenet):
    root, photos = imagenet
    image, label = next(iter(dataset("ImageRecord", root=str(root))))
    expected = tf.io.decode_jpeg(
        photos[0], channels=3, fancy_upscaling=False, dct_method="INTEGER_FAST"
    )
    np.testing.assert_array_equal(image, expected.numpy())
    assert (image.dtype, image.shape) == (np.uint8, (40, 30, 3))
    with Image.open(io.BytesIO(photos[0])) as photo:
        assert np.abs(np.asarray(photo).astype(int) - image).mean() < 4  # red is red
    assert (label.tolist(), label.dtype) == ([10], np.int32)


def test_files_of_image_records_take_turns_the_same_way_at_every_walk(imagenet):
    samples = dataset("ImageRecord", root=str(imagenet[0]))
    for _ in range(2):
        assert [int(label[0]) for _, label in samples] == [10, 13, 11, 12]


def test_an_image_record_without_a_class_has_the_class_minus_one(tmp_path):
    record = example(image__encoded=[encoded(pixels(0, 8, 8, 3), "JPEG")])
    write(tmp_path / "train-0-of-1", record)
    ((_, labels),) = batches("ImageRecord", 4, root=str(tmp_path))
    assert labels.tolist() == [[-1]]


def test_a_folder_without_image_records_is_said(tmp_path):
    with pytest.raises(DataError, match=r"has no files named \*-\*-of-\*"):
        dataset("ImageRecord", root=str(tmp_path))


def test_a_broken_record_is_said_with_its_number_and_file(imagenet):
    root, _ = imagenet
    path = root / "validation-00000-of-00002"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"ImageRecord: record 4 of .*00000-of-00002 and 1 more"):
        list(dataset("ImageRecord", root=str(root)))


def test_an_image_that_cannot_be_decoded_is_said(tmp_path):
    write(tmp_path / "a-0-of-1", example(image__encoded=[b"no image"], image__class__label=[1]))
    with pytest.raises(DataError, match="record 1 of .* cannot be read"):
        list(dataset("ImageRecord", root=str(tmp_path)))


def test_a_record_that_is_no_example_is_said(tmp_path):
    write(tmp_path / "a-0-of-1", b"\xff\xff\xff")
    with pytest.raises(DataError, match=r"expected a tf\.train\.Example"):
        list(dataset("ImageRecord", root=str(tmp_path)))


@pytest.mark.parametrize(
    "name", ["ImageRecord", "COCORecord", "VOCRecord", "TFRecordDataset", "bert", "mzbert"]
)
def test_without_tensorflow_the_error_names_what_to_install(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    more = {"label_file": "dev.json"} if name.endswith("bert") else {}
    with pytest.raises(MissingFrameworkError, match=r"pip install .*\[tensorflow\]"):
        dataset(name, root=str(tmp_path), **more)


# COCORecord


def coco_record(number, image_id, boxes):
    """boxes: rows of ymin, xmin, ymax, xmax."""
    edges = np.array(boxes, dtype=np.float32).reshape(-1, 4)
    return example(
        image__encoded=[encoded(pixels(number, 12, 16, 3), "PNG")],
        image__source_id=[image_id],
        image__object__class__text=[b"cat", b"dog"][: len(edges)],
        image__object__class__label=[17, 18][: len(edges)],
        **{
            f"image__object__bbox__{edge}": edges[:, column].tolist()
            for column, edge in enumerate(["ymin", "xmin", "ymax", "xmax"])
        },
    )


ONE_BOX = [[0.1, 0.2, 0.5, 0.75]]
TWO_BOXES = [[0.1, 0.2, 0.5, 0.75], [0.0, 0.25, 1.0, 0.5]]


def test_a_coco_record_has_boxes_names_classes_and_an_image_id(tmp_path):
    root = write(tmp_path / "coco.record", coco_record(0, b"139", TWO_BOXES))
    ((image, (boxes, names, classes, image_id)),) = dataset("COCORecord", root=root)
    np.testing.assert_array_equal(image, pixels(0, 12, 16, 3))
    np.testing.assert_allclose(boxes, TWO_BOXES)
    assert boxes.dtype == np.float32
    assert names.tolist() == [b"cat", b"dog"]
    assert (classes.tolist(), classes.dtype) == ([17, 18], np.int64)
    assert image_id.item() == b"139"


def test_a_batch_of_one_coco_record_has_an_axis_for_the_batch_everywhere(tmp_path):
    root = write(tmp_path / "coco.record", coco_record(0, b"139", TWO_BOXES))
    ((images, (boxes, names, classes, image_ids)),) = batches("COCORecord", 1, root=root)
    assert images.shape == (1, 12, 16, 3)
    assert (boxes.shape, names.shape, classes.shape) == ((1, 2, 4), (1, 2), (1, 2))
    assert image_ids.tolist() == [b"139"]


def test_images_with_different_numbers_of_boxes_form_a_batch(tmp_path):
    records = coco_record(0, b"1", ONE_BOX), coco_record(1, b"2", TWO_BOXES)
    root = write(tmp_path / "coco.record", *records)
    ((images, (boxes, names, classes, image_ids)),) = batches("COCORecord", 2, root=root)
    assert images.shape == (2, 12, 16, 3)
    assert [item.shape for item in boxes] == [(1, 4), (2, 4)]
    assert [item.tolist() for item in names] == [[b"cat"], [b"cat", b"dog"]]
    assert [item.tolist() for item in classes] == [[17], [17, 18]]
    assert image_ids.tolist() == [b"1", b"2"]


def test_a_record_without_classes_is_no_coco_record(tmp_path):
    root = write(tmp_path / "coco.record", example(image__encoded=[b"x"]))
    with pytest.raises(DataError, match="has no classes of objects; expected the features"):
        dataset("COCORecord", root=root)


def test_options_without_an_effect_are_said(tmp_path):
    root = write(tmp_path / "coco.record", coco_record(0, b"1", ONE_BOX))
    with pytest.warns(IgnoredSettingWarning, match="'COCORecord': num_cores is ignored"):
        dataset("COCORecord", root=root, num_cores=28)


# VOCRecord and TFRecordDataset


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_a_voc_record_is_an_image_with_the_class_of_every_pixel(form, tmp_path):
    photo = encoded(pixels(0, 20, 10, 3), form)
    classes = np.random.default_rng(0).integers(0, 21, (20, 10, 1), dtype=np.uint8)
    features = {
        "image__encoded": [photo],
        "image__segmentation__class__encoded": [encoded(classes, "PNG")],
    }
    write(tmp_path / "val-00000-of-00001.tfrecord", example(**features))
    write(tmp_path / "train-00000-of-00001.tfrecord", example(**features))
    ((image, label),) = dataset("VOCRecord", root=str(tmp_path))
    np.testing.assert_array_equal(image, tf.io.decode_image(photo, channels=3).numpy())
    np.testing.assert_array_equal(label, classes)
    assert (image.dtype, label.dtype) == (np.uint8, np.uint8)


def test_a_tf_record_dataset_gives_records_as_they_are(tmp_path):
    write(tmp_path / "a.tfrecord", b"one", b"three")
    write(tmp_path / "b.tfrecord", b"two")
    assert list(dataset("TFRecordDataset", root=str(tmp_path / "*.tfrecord"))) == [
        b"one",
        b"two",
        b"three",
    ]
    assert list(dataset("TFRecordDataset", root=str(tmp_path / "b.tfrecord"))) == [b"two"]


def test_a_pattern_that_nothing_matches_is_said(tmp_path):
    with pytest.raises(DataError, match="no file matches"):
        dataset("TFRecordDataset", root=str(tmp_path / "*.tfrecord"))


# bert and mzbert


ARTICLES = [{"title": "Oak", "paragraphs": [{"context": "An oak is a tree.", "qas": []}]}]


@pytest.fixture
def squad(tmp_path):
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 100, (3, 8))
    records = [
        example(
            unique_ids=[1_000_000_000 + number],
            input_ids=row.tolist(),
            input_mask=[1] * 5 + [0] * 3,
            segment_ids=[0] * 3 + [1] * 5,
        )
        for number, row in enumerate(ids)
    ]
    labels = tmp_path / "dev-v1.1.json"
    labels.write_text(json.dumps({"version": "1.1", "data": ARTICLES}))
    return {"root": write(tmp_path / "eval.tf_record", *records), "label_file": str(labels)}, ids


def test_bert_gives_the_four_features_by_name_and_the_articles(squad):
    options, ids = squad
    first, second = batches("bert", 2, **options)
    inputs, label = first
    assert {name: array.shape for name, array in inputs.items()} == {
        "unique_ids": (2,),
        "input_ids": (2, 8),
        "input_mask": (2, 8),
        "segment_ids": (2, 8),
    }
    assert {array.dtype for array in inputs.values()} == {np.dtype(np.int32)}
    np.testing.assert_array_equal(inputs["input_ids"], ids[:2])
    assert second[0]["unique_ids"].tolist() == [1_000_000_002]
    assert label == ARTICLES


def test_mzbert_gives_three_inputs_and_the_articles(squad):
    options, ids = squad
    with pytest.warns(IgnoredSettingWarning, match="num_cores"):
        ((inputs, label),) = batches("mzbert", 3, num_cores=4, **options)
    np.testing.assert_array_equal(inputs[0], ids)
    assert inputs[1].tolist() == [[1] * 5 + [0] * 3] * 3
    assert inputs[2].tolist() == [[0] * 3 + [1] * 5] * 3
    assert label == ARTICLES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"version": "2.0", "data": []}',
            r"must be a file of SQuAD 1\.1, got .* of version '2\.0'",
        ),
        ("[]", r"must be a file of SQuAD 1\.1"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_a_label_file_that_is_not_squad_is_said(content, message, squad, tmp_path):
    (tmp_path / "dev-v1.1.json").write_text(content)
    with pytest.raises(DataError, match=message):
        dataset("bert", **squad[0])


def test_records_without_the_features_are_said(squad, tmp_path):
    options = {**squad[0], "root": write(tmp_path / "other.tf_record", example(input_ids=[1]))}
    with pytest.raises(DataError, match="must have the features input_ids, input_mask"):
        dataset("mzbert", **options)


def test_an_unknown_task_is_said(squad):
    with pytest.raises(ConfigurationError, match="bert: task must be 'classifier' or 'squad'"):
        dataset("bert", task="squat", **squad[0])
