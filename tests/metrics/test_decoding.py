"""`decode` beside other decoders, and the mAP of masks and keypoints beside pycocotools' own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from pycocotools import mask as mask_tools
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from neural_mp.data import build_transforms
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.metrics import build_metric
from neural_mp.metrics.decoding import Decode, suppress_overlaps

CLASSES, ANCHORS, SIDE = 3, 60, 64


def draw_boxes(random, count=ANCHORS):
    """Boxes within the image, as left, top, right, bottom."""
    corners = np.sort(random.uniform(0, SIDE, (2, count, 2)), axis=0)
    return np.concatenate([corners[0], corners[1] + 2], axis=1)


def centered(boxes):
    return np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1)


@pytest.mark.parametrize("seed", range(5))
def test_suppression_is_that_of_opencv(seed):
    cv2 = pytest.importorskip("cv2")
    random = np.random.default_rng(seed)
    boxes, classes = draw_boxes(random), random.integers(0, CLASSES, ANCHORS)
    scores = np.sort(random.uniform(size=ANCHORS))[::-1]
    sizes = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)
    expected = cv2.dnn.NMSBoxesBatched(sizes, scores, classes, 0.0, 0.3)
    assert suppress_overlaps(boxes, classes, 0.3).tolist() == sorted(np.ravel(expected).tolist())


def test_yolo_in_both_orders_and_with_objectness():
    random = np.random.default_rng(0)
    boxes, scores = draw_boxes(random), random.uniform(size=(ANCHORS, CLASSES))
    rows = np.concatenate([centered(boxes), scores], 1)[None].astype(np.float32)
    (first,), labels = Decode("yolo", nms=1.0, score=0.4)((rows.transpose(0, 2, 1), "labels"))
    assert labels == "labels"
    keys = sorted(scores[scores >= 0.4], reverse=True)
    np.testing.assert_allclose(first["scores"], keys, rtol=1e-6)
    at, kind = np.unravel_index(np.argmax(scores), scores.shape)
    np.testing.assert_allclose(first["boxes"][0], boxes[at], rtol=1e-5)
    assert first["labels"][0] == kind
    objects = random.uniform(size=(ANCHORS, 1))
    with_objects = np.concatenate([centered(boxes), objects, scores], 1)[None]
    (second,), _ = Decode("yolo", nms=1.0, score=0.0, objectness=True)((with_objects, None))
    np.testing.assert_allclose(second["scores"][0], (objects * scores).max(), rtol=1e-6)


def test_end2end_returns_the_rows_above_the_score():
    random = np.random.default_rng(1)
    boxes, scores = draw_boxes(random), np.sort(random.uniform(size=ANCHORS))[::-1]
    classes = random.integers(0, CLASSES, ANCHORS)
    rows = np.concatenate([boxes, scores[:, None], classes[:, None]], 1)[None]
    (image,), _ = Decode("end2end", score=0.5, max_boxes=10)(([rows], None))
    np.testing.assert_allclose(image["boxes"], boxes[:10].astype(np.float32))
    assert image["labels"].tolist() == classes[:10].tolist()


def test_detr_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    random = np.random.default_rng(2)
    logits = random.normal(size=(2, ANCHORS, CLASSES + 1)).astype(np.float32)
    boxes = random.uniform(0.1, 0.5, (2, ANCHORS, 4)).astype(np.float32)
    outputs = SimpleNamespace(logits=torch.tensor(logits), pred_boxes=torch.tensor(boxes))
    processor = transformers.DetrImageProcessor()
    expected = processor.post_process_object_detection(outputs, 0.0, [(SIDE, 2 * SIDE)] * 2)
    labels = [{"size": np.array([SIDE, 2 * SIDE])}] * 2
    images, _ = Decode("detr", score=0.0, max_boxes=9999)(
        ({"logits": logits, "pred_boxes": boxes}, labels)
    )
    for image, reference in zip(images, expected, strict=True):
        order = np.argsort(-reference["scores"].numpy(), kind="stable")
        for key in ("scores", "labels", "boxes"):
            np.testing.assert_allclose(image[key], reference[key].numpy()[order], atol=1e-4)
    with pytest.raises(DataError, match="size of the input"):
        Decode("detr")(({"logits": logits, "pred_boxes": boxes}, None))


def test_ssd_leaves_the_background_out():
    scores = np.array([[[0.9, 0.05, 0.05], [0.1, 0.2, 0.7]]])
    boxes = np.array([[[0, 0, 1, 1], [2.0, 2, 8, 8]]])
    (image,), _ = Decode("ssd", score=0.5)(((boxes, scores), None))
    assert image["boxes"].tolist() == [[2, 2, 8, 8]]
    assert image["labels"].tolist() == [1]


def test_masks_of_prototypes_lie_in_their_boxes():
    prototypes = np.zeros((1, 2, 16, 16))
    prototypes[0, 0, :, 8:] = 1  # the right half
    prototypes[0, 1] = -0.5
    rows = np.zeros((1, 20, 7))
    rows[0, 5] = 32, 32, 64, 32, 0.9, 1, 1
    (image,), _ = Decode("yolo")(((rows.transpose(0, 2, 1), prototypes), None))
    expected = np.zeros((64, 64), np.uint8)
    expected[16:48, 32:] = 1
    assert (image["masks"][0] != expected).mean() < 0.02
    assert not image["masks"][0, :16].any()


def test_keypoints_follow_the_classes():
    rows = np.zeros((1, 20, 11))
    rows[0, 5] = 32, 32, 8, 8, 0.9, 1, 2, 0.5, 3, 4, 0.25
    (image,), _ = Decode("yolo", keypoints=2)((rows.transpose(0, 2, 1), None))
    assert image["keypoints"].tolist() == [[[1, 2, 0.5], [3, 4, 0.25]]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "yolov8"}, "format"),
        ({"format": "yolo", "nms": 2}, "nms"),
        ({"format": "yolo", "score": 3}, "score must be from 0 to 1, got 3"),
        ({"format": "yolo", "box": "ltrb"}, "box"),
        ({"format": "yolo", "outputs": {"box": 0}}, "outputs"),
        ({"format": "detr", "activation": "relu"}, "activation"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ConfigurationError, match=message):
        build_transforms({"decode": options})


@pytest.mark.parametrize("kind", ["yolo", "end2end", "detr", "ssd"])
def test_outputs_of_another_format_are_listed(kind):
    with pytest.raises(DataError, match=f"format {kind} must be"):
        Decode(kind)((np.zeros((2, 4), np.float32), None))


def draw_scene(random, kind):
    """Labels and noisy predictions of an image, as parts of `mAP`."""
    count = 4
    centers = random.uniform(12, SIDE - 12, (count, 2))
    rows, columns = np.mgrid[:SIDE, :SIDE]

    def part(shift, scores):
        places = centers + shift
        half = 8.0
        boxes = np.concatenate([places - half, places + half], 1)
        discs = [(columns - x) ** 2 + (rows - y) ** 2 < half**2 for x, y in places]
        points = np.stack([places, places + 5, places - 5], 1)
        points = np.concatenate([points, np.full((count, 3, 1), 2.0)], 2)
        shape = {"masks": np.array(discs, np.uint8)} if kind == "masks" else {"keypoints": points}
        classes = np.arange(count) % 2
        return {"boxes": boxes, "labels": classes, "area": np.full(count, 150.0), **shape, **scores}

    noise = random.normal(0, 1.5, (count, 2))
    return part(noise, {"scores": random.uniform(size=count)}), part(0, {})


def entries_of(images, kind):
    for number, image in enumerate(images):
        for index, label in enumerate(image["labels"]):
            left, top, right, bottom = image["boxes"][index].tolist()
            entry = {
                "image_id": number,
                "category_id": int(label),
                "bbox": [left, top, right - left, bottom - top],
                "area": 150.0,
                "iscrowd": 0,
            }
            if "scores" in image:
                entry["score"] = float(image["scores"][index])
            if kind == "masks":
                entry["segmentation"] = mask_tools.encode(np.asfortranarray(image["masks"][index]))
            else:
                points = image["keypoints"][index].ravel().tolist()
                entry |= {"keypoints": points, "num_keypoints": 3}
            yield entry


@pytest.mark.parametrize(("kind", "name"), [("masks", "segm"), ("keypoints", "keypoints")])
def test_map_of_masks_and_keypoints_is_that_of_pycocotools(kind, name, capsys):
    random = np.random.default_rng(3)
    scenes = [draw_scene(random, kind) for _ in range(6)]
    sigmas = [0.1, 0.05, 0.05]
    metric = build_metric("mAP", {"kind": kind, "sigmas": sigmas})
    for preds, labels in scenes:
        metric.update([preds], [labels])

    truth = COCO()
    truth.dataset = {
        "images": [{"id": n, "height": SIDE, "width": SIDE} for n in range(len(scenes))],
        "categories": [{"id": 0, "name": "a"}, {"id": 1, "name": "b"}],
        "annotations": [
            {"id": n, **entry}
            for n, entry in enumerate(entries_of([labels for _, labels in scenes], kind), 1)
        ],
    }
    truth.createIndex()
    detections = truth.loadRes(list(entries_of([preds for preds, _ in scenes], kind)))
    evaluation = COCOeval(truth, detections, name)
    if kind == "keypoints":
        evaluation.params.kpt_oks_sigmas = np.array(sigmas)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert 0.05 < evaluation.stats[0] < 0.95
    assert metric.result() == pytest.approx(evaluation.stats[0])


def test_detections_in_a_crowd_do_not_count():
    random = np.random.default_rng(4)
    preds, labels = draw_scene(random, "masks")
    exact = {**labels, "scores": np.full(4, 0.9)}
    more = {key: np.concatenate([value, value[:1]]) for key, value in exact.items()}
    more["boxes"][-1] = [0, 0, 5, 5]
    crowd = {
        "boxes": np.concatenate([labels["boxes"], [[0, 0, 6, 6]]]),
        "labels": np.concatenate([labels["labels"], labels["labels"][:1]]),
        "crowd": np.array([0, 0, 0, 0, 1]),
    }
    values = []
    for truth in (labels, crowd):
        metric = build_metric("mAP")
        metric.update([more], [truth])
        values.append(metric.result())
    assert values[1] == pytest.approx(1.0)
    assert preds["boxes"].shape == (4, 4)
