"""What `COCORaw` and `COCONpy` stand for in files of Intel Neural Compressor."""

import json

import numpy as np
import pytest

from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.config.source import IgnoredSettingWarning
from neural_mp.data import build_dataloader, build_dataset
from neural_mp.errors import DataError

FRAMEWORKS = ("pytorch", "tensorflow", "onnxrt")

#: image id → boxes (left, top, width, height in pixels) with category ids.
BOXES = {
    139: [((2.0, 3.0, 4.0, 5.0), 18), ((0.0, 0.0, 16.0, 12.0), 1)],
    285: [((8.0, 6.0, 8.0, 6.0), 1)],
    632: [],
}


def pixels(image_id):
    return np.random.default_rng(image_id).integers(0, 256, (12, 16, 3), dtype=np.uint8)


@pytest.fixture
def coco(tmp_path):
    """Annotations of three images: with two boxes, with one box, with none."""
    (tmp_path / "annotations").mkdir()
    annotations = [
        {"id": number, "image_id": image_id, "category_id": category, "bbox": list(box)}
        for number, (image_id, category, box) in enumerate(
            (image_id, category, box) for image_id in BOXES for box, category in BOXES[image_id]
        )
    ]
    content = {
        "images": [
            {"id": image_id, "file_name": f"{image_id:012}.png", "height": 12, "width": 16}
            for image_id in BOXES
        ],
        # Out of order: what stands together belongs together by its id only.
        "annotations": [annotations[2], *annotations[:2]],
        "categories": [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}],
    }
    (tmp_path / "annotations/instances_val2017.json").write_text(json.dumps(content))
    (tmp_path / "val2017").mkdir()
    return tmp_path


@pytest.fixture
def coco_images(coco):
    image = pytest.importorskip("PIL.Image")
    for image_id in BOXES:
        image.fromarray(pixels(image_id)).save(coco / f"val2017/{image_id:012}.png")
    return coco


@pytest.fixture
def coco_arrays(coco):
    for image_id in (139, 632):
        array = pixels(image_id).transpose(2, 0, 1).astype(np.float32)
        np.save(coco / f"val2017/{image_id:012}.png.npy", array)
    return coco


def dataset(framework, name, **options):
    return build_dataset({name: options}, load_vocabulary(framework))


def batches(name, batch_size, **options):
    spec = {"dataset": {name: options}, "batch_size": batch_size}
    return list(build_dataloader(spec, load_vocabulary("onnxrt")))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_coco_raw_leaves_out_images_without_boxes(framework, coco_images):
    samples = dataset(framework, "COCORaw", root=str(coco_images))
    assert [label[3].item() for _, label in samples] == [b"000000000139.png", b"000000000285.png"]


def test_coco_raw_has_rgb_images_with_boxes_in_parts_of_the_image(coco_images):
    image, (boxes, names, classes, _) = dataset("onnxrt", "COCORaw", root=str(coco_images))[0]
    np.testing.assert_array_equal(image, pixels(139))
    np.testing.assert_allclose(boxes, [[3 / 12, 2 / 16, 8 / 12, 6 / 16], [0, 0, 1, 1]])
    assert names.tolist() == [b"dog", b"person"]
    assert classes.size == 0


def test_coco_raw_images_with_different_numbers_of_boxes_form_a_batch(coco_images):
    ((images, (boxes, names, _, files)),) = batches("COCORaw", 2, root=str(coco_images))
    np.testing.assert_array_equal(images[1], pixels(285))
    assert [item.shape for item in boxes] == [(2, 4), (1, 4)]
    assert [item.tolist() for item in names] == [[b"dog", b"person"], [b"person"]]
    assert files.tolist() == [b"000000000139.png", b"000000000285.png"]


def test_coco_raw_leaves_out_images_that_do_not_exist(coco_images):
    (coco_images / "val2017/000000000139.png").unlink()
    assert len(dataset("pytorch", "COCORaw", root=str(coco_images))) == 1


def test_coco_raw_takes_folders_and_annotations_of_other_names(coco_images):
    (coco_images / "val2017").rename(coco_images / "images")
    (coco_images / "annotations/instances_val2017.json").rename(coco_images / "boxes.json")
    with pytest.warns(IgnoredSettingWarning, match="num_cores is ignored"):
        samples = dataset(
            "tensorflow",
            "COCORaw",
            root=str(coco_images),
            img_dir="images",
            anno_dir="boxes.json",
            num_cores=2,
        )
    assert len(samples) == 2


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_coco_npy_has_arrays_as_they_are_with_categories_and_boxes(framework, coco_arrays):
    samples = dataset(framework, "COCONpy", root=str(coco_arrays))
    assert len(samples) == 2
    array, label = samples[0]
    np.testing.assert_array_equal(array, pixels(139).transpose(2, 0, 1).astype(np.float32))
    assert [(int(category), box.tolist()) for category, box in label] == [
        (18, [2.0, 3.0, 4.0, 5.0]),
        (1, [0.0, 0.0, 16.0, 12.0]),
    ]
    assert samples[1][1] == []


def test_coco_npy_images_with_different_numbers_of_boxes_need_a_batch_each(coco_arrays):
    with pytest.raises(DataError, match="stacked samples must have equal lengths, got 0, 2"):
        batches("COCONpy", 2, root=str(coco_arrays))
    assert len(batches("COCONpy", 1, root=str(coco_arrays))) == 2


@pytest.mark.parametrize("name", ["COCORaw", "COCONpy"])
def test_images_that_are_elsewhere_are_said(name, coco):
    pytest.importorskip("PIL")
    with pytest.raises(DataError, match="none of the 3 images"):
        dataset("onnxrt", name, root=str(coco))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must be a COCO annotation file"),
        ('{"images": [], "categories": []}', "must be a COCO annotation file .*'annotations'"),
    ],
)
def test_a_file_that_holds_no_annotations_is_said(content, message, coco):
    (coco / "annotations/instances_val2017.json").write_text(content)
    with pytest.raises(DataError, match=message):
        dataset("onnxrt", "COCONpy", root=str(coco))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "file_name",
            "x" * 5000,
            "file_name must be a path of at most 4096 bytes, with names of at most 255",
        ),
        ("file_name", "\ud800", "file_name must be a path of valid Unicode"),
        ("bbox", [1], "a bbox must hold 4 numbers, got 1"),
        ("bbox", "12345", "a bbox must hold 4 numbers, got 5"),
    ],
)
def test_annotations_that_nothing_can_be_read_by_are_said(key, value, message, coco):
    fields = {"id": 1, "image_id": 1, "category_id": 1, "name": "x", "file_name": "x.png"}
    item = {**fields, "height": 1, "width": 1, "bbox": [0, 0, 1, 1], key: value}
    content = {part: [item] for part in ("images", "categories", "annotations")}
    (coco / "annotations/instances_val2017.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"instances_val2017.json.*{message}"):
        dataset("onnxrt", "COCORaw", root=str(coco))
