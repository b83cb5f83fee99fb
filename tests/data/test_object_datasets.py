"""Datasets of objects in images: files of COCO and YOLO agree, and move with their images."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from pycocotools.coco import COCO

from neural_mp.data import build_dataloader, build_dataset
from neural_mp.data.detection import Letterbox
from neural_mp.errors import ConfigurationError, DataError

Image = pytest.importorskip("PIL.Image")
SIZES = [(40, 60), (50, 30), (32, 32)]
#: Outline of each object, x and y in pixels, by image.
OUTLINES = [
    [[4, 4, 20, 4, 20, 16, 4, 16], [30, 10, 50, 10, 40, 35]],
    [[2, 3, 12, 3, 12, 40, 2, 40]],
    [],
]
POINTS = [[[5, 6, 2, 9, 9, 1], [40, 30, 2, 0, 0, 0]], [[3, 4, 2, 11, 39, 2]], []]


@pytest.fixture
def folder(tmp_path):
    """The same three images, the last without objects, in the forms of COCO and of YOLO."""
    random = np.random.default_rng(0)
    (tmp_path / "images" / "val").mkdir(parents=True)
    (tmp_path / "labels" / "val").mkdir(parents=True)
    images, annotations = [], []
    for number, ((height, width), outlines) in enumerate(zip(SIZES, OUTLINES, strict=True)):
        name = f"{number}.png"
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / "val" / name)
        images.append({"id": 7 + number, "file_name": name, "height": height, "width": width})
        rows = []
        for index, outline in enumerate(outlines):
            points = np.reshape(outline, (-1, 2))
            low, high = points.min(0), points.max(0)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": 7 + number,
                    "category_id": 10 if index else 3,
                    "bbox": [*low.tolist(), *(high - low).tolist()],
                    "segmentation": [outline],
                    "keypoints": POINTS[number][index],
                    "area": float(index + 50),
                    "iscrowd": 0,
                }
            )
            row = [index, *(points / [width, height]).ravel().tolist()]
            rows.append(" ".join(map(str, row)))
        if rows:
            (tmp_path / "labels" / "val" / f"{number}.txt").write_text("\n".join(rows) + "\n")
    categories = [{"id": 10, "name": "cat"}, {"id": 3, "name": "dog"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (tmp_path / "coco.json").write_text(json.dumps(content))
    data = {"path": str(tmp_path), "val": "images/val", "names": {0: "dog", 1: "cat"}}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(data))
    return tmp_path


def coco(folder, **options):
    files = {"root": str(folder / "images" / "val"), "annotations": str(folder / "coco.json")}
    return build_dataset({"coco": files | options})


def yolo(folder, **options):
    return build_dataset({"yolo": {"data": str(folder / "data.yaml")} | options})


@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_files_of_coco_and_of_yolo_hold_the_same_objects(folder, kind):
    ours, theirs = coco(folder, kind=kind), yolo(folder, kind=kind)
    assert ours.classes == theirs.classes == ("dog", "cat")
    assert len(ours) == len(theirs) == 3
    for (pixels, label), (other_pixels, other) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(pixels, other_pixels)
        for name in ("boxes", "labels", "size", *(["masks"] if kind == "masks" else [])):
            np.testing.assert_allclose(label[name], other[name], atol=1e-4)


def test_masks_and_areas_are_those_of_pycocotools(folder):
    reference = COCO(str(folder / "coco.json"))
    for number, (_, label) in enumerate(coco(folder, kind="masks")):
        entries = reference.loadAnns(reference.getAnnIds(imgIds=7 + number))
        assert label["area"].tolist() == [entry["area"] for entry in entries]
        for mask, entry in zip(label["masks"], entries, strict=True):
            np.testing.assert_array_equal(mask, reference.annToMask(entry))


def test_keypoints_of_coco_and_of_yolo(folder):
    _, label = coco(folder, kind="keypoints")[0]
    np.testing.assert_array_equal(label["keypoints"], np.reshape(POINTS[0], (2, 2, 3)))
    data = yaml.safe_load((folder / "data.yaml").read_text()) | {"kpt_shape": [2, 3]}
    (folder / "data.yaml").write_text(yaml.safe_dump(data))
    row = [0, 0.5, 0.5, 0.2, 0.4, 0.1, 0.2, 2, 0.3, 0.4, 1]
    (folder / "labels" / "val" / "0.txt").write_text(" ".join(map(str, row)))
    _, label = yolo(folder, kind="keypoints")[0]
    np.testing.assert_allclose(label["boxes"], [[24, 12, 36, 28]], atol=1e-4)
    np.testing.assert_allclose(label["keypoints"], [[[6, 8, 2], [18, 16, 1]]], atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"stretch": True}, {"enlarge": False}])
@pytest.mark.parametrize("size", [(64, 64), (33, 47)])
def test_the_pixels_in_a_box_are_those_of_the_letterboxed_box(size, options):
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[8:24, 12:48] = 255
    mask = (pixels[None, :, :, 0] > 0).astype(np.uint8)
    points = np.array([[[12, 8, 2], [0, 0, 0]]], np.float32)
    label = {"boxes": np.array([[12, 8, 48, 24]], np.float32), "area": np.array([576.0])}
    canvas, moved = Letterbox(size, color=0, **options)(
        (pixels, label | {"masks": mask, "keypoints": points, "size": np.array([40, 60])})
    )
    rows, columns = np.nonzero(canvas[:, :, 0] > 127)
    edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    np.testing.assert_allclose(moved["boxes"][0], edges, atol=1.0)
    assert (moved["masks"][0] != (canvas[:, :, 0] > 127)).mean() < 0.05
    np.testing.assert_allclose(moved["keypoints"][0, 0, :2], moved["boxes"][0, :2], atol=1e-4)
    assert not moved["keypoints"][0, 1].any()
    assert moved["area"][0] == pytest.approx(np.prod(moved["boxes"][0, 2:] - moved["boxes"][0, :2]))
    assert canvas.shape == (*size, 3)
    assert moved["size"].tolist() == list(size)


def test_a_loader_stacks_images_and_lists_labels(folder):
    files = {"root": str(folder / "images" / "val"), "annotations": str(folder / "coco.json")}
    transform = {"letterbox": {"size": 64}, "Rescale": {}, "ToCHW": {}}
    spec = {"batch_size": 2, "dataset": {"coco": files}, "transform": transform}
    batches = list(build_dataloader(spec))
    assert [len(images) for images, _ in batches] == [2, 1]
    assert batches[0][0].shape == (2, 3, 64, 64)
    assert [len(label["labels"]) for label in batches[0][1]] == [2, 1]
    del spec["transform"]
    with pytest.raises(DataError, match="add the transform letterbox"):
        list(build_dataloader(spec))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2 .5 .5 .1 .1", "a class from 0 to 1"),
        ("0 .5 .5", "line 1"),
        ("zero .5 .5 .1 .1", "line 1"),
        ("0 nan .5 .1 .1", "line 1"),
    ],
)
def test_a_wrong_row_of_a_label_file_is_named(folder, row, message):
    (folder / "labels" / "val" / "0.txt").write_text(row)
    with pytest.raises(DataError, match=message):
        yolo(folder)[0]


def test_wrong_files_and_options_are_named(folder):
    with pytest.raises(ConfigurationError, match="kind"):
        coco(folder, kind="boxs")
    with pytest.raises(DataError, match="root must be the folder of the images"):
        build_dataset({"coco": {"root": str(folder), "annotations": str(folder / "coco.json")}})
    with pytest.raises(DataError, match="must name the images of test"):
        yolo(folder, split="test")
    with pytest.raises(DataError, match="kpt_shape"):
        yolo(folder, kind="keypoints")
    (folder / "data.yaml").write_text("val: images/val")
    with pytest.raises(DataError, match="names"):
        yolo(folder)
