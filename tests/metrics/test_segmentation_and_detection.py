"""mIoU and mAP beside what is computed another way."""

import numpy as np
import pytest
import sklearn.metrics
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from neural_mp.errors import ConfigurationError, MetricError
from neural_mp.metrics import build_metric

CLASSES = 4


@pytest.fixture(scope="module")
def masks():
    """Scores `[N, C, H, W]` that are right mostly, and labels `[N, H, W]` with 255 at the rim."""
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, (10, 8, 8))
    scores = random.normal(size=(10, CLASSES, 8, 8)) + 2 * np.moveaxis(
        np.eye(CLASSES)[labels], -1, 1
    )
    labels[:, 0] = 255
    return scores.astype(np.float32), labels


def in_batches(metric, preds, labels, size=4):
    for start in range(0, len(labels), size):
        metric.update(preds[start : start + size], labels[start : start + size])
    return metric.result()


def jaccard(scores, labels):
    """The same by scikit-learn, which takes flat arrays."""
    valid = labels != 255
    return sklearn.metrics.jaccard_score(labels[valid], scores.argmax(1)[valid], average="macro")


def test_miou_is_the_mean_jaccard_index_of_scikit_learn(masks):
    scores, labels = masks
    metric = build_metric("mIoU", {"num_classes": CLASSES, "ignore_index": 255})
    assert in_batches(metric, scores, labels) == pytest.approx(jaccard(*masks))
    metric.reset()
    classes = scores.argmax(1)
    assert in_batches(metric, classes, labels) == pytest.approx(jaccard(*masks))


def test_miou_takes_channels_last_and_an_unknown_number_of_classes(masks):
    scores, labels = masks
    last = build_metric("mean_iou", {"ignore_index": 255, "axis": -1})
    value = in_batches(last, np.moveaxis(scores, 1, -1), labels[..., None])
    assert value == pytest.approx(jaccard(*masks))


def test_miou_of_two_classes_takes_one_score_above_a_threshold():
    random = np.random.default_rng(1)
    labels = random.integers(0, 2, (6, 5, 5))
    logits = random.normal(size=(6, 1, 5, 5)) + labels[:, None]
    expected = sklearn.metrics.jaccard_score(
        labels.ravel(), (logits > 0).ravel().astype(int), average="macro"
    )
    assert in_batches(build_metric("mIoU", {"threshold": 0}), logits, labels) == pytest.approx(
        expected
    )


def test_miou_counts_nan_as_wrong_and_classes_that_never_appear_not_at_all():
    labels = np.array([[0, 0, 1, 1]])
    metric = build_metric("mIoU", {"num_classes": 5})
    metric.update(labels, labels)
    assert metric.result() == 1
    scores = np.moveaxis(np.eye(2)[labels], -1, 1).astype(np.float32)
    scores[0, 1, 3] = np.nan
    metric = build_metric("mIoU")
    metric.update(scores, labels)
    assert metric.result() == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_miou_names_a_label_that_is_no_class(masks):
    with pytest.raises(MetricError, match="labels from 0 to 3, got 255; set ignore_index"):
        build_metric("mIoU").update(*masks)


def boxes_of(random, count):
    corners = random.uniform(0, 60, (count, 2))
    return np.concatenate([corners, corners + random.uniform(8, 40, (count, 2))], axis=1)


@pytest.fixture(scope="module")
def detections():
    """Images with boxes `xyxy`, and what was found: moved a little, some missed, some made up."""
    random = np.random.default_rng(2)
    truth, predictions = [], []
    for _ in range(12):
        count = int(random.integers(1, 6))
        boxes, labels = boxes_of(random, count), random.integers(0, 3, count)
        truth.append({"boxes": boxes, "labels": labels})
        mask = random.random(count) < 0.8
        guesses = np.concatenate(
            [boxes[mask] + random.normal(0, 2, (mask.sum(), 4)), boxes_of(random, 2)]
        )
        predictions.append(
            {
                "boxes": guesses,
                "labels": np.concatenate([labels[mask], random.integers(0, 3, 2)]),
                "scores": random.random(len(guesses)),
            }
        )
    return predictions, truth


def by_pycocotools(predictions, truth):
    """`stats` of pycocotools, which takes `xywh` and ids from 1."""

    def loaded(images, with_scores):
        coco = COCO()
        entries = [
            {
                "id": 0,
                "image_id": image,
                "category_id": int(label) + 1,
                "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
                "area": (box[2] - box[0]) * (box[3] - box[1]),
                "iscrowd": 0,
                **({"score": item["scores"][index]} if with_scores else {}),
            }
            for image, item in enumerate(images)
            for index, (box, label) in enumerate(zip(item["boxes"], item["labels"], strict=True))
        ]
        for number, entry in enumerate(entries, start=1):
            entry["id"] = number
        coco.dataset = {
            "images": [{"id": image} for image in range(len(images))],
            "categories": [{"id": kind + 1, "name": str(kind)} for kind in range(3)],
            "annotations": entries,
        }
        coco.createIndex()
        return coco

    evaluation = COCOeval(loaded(truth, False), loaded(predictions, True), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats


def test_map_is_that_of_pycocotools(detections, capsys):
    stats = by_pycocotools(*detections)
    assert 0.1 < stats[0] < 0.9
    assert in_batches(build_metric("mAP"), *detections) == pytest.approx(stats[0])
    assert in_batches(build_metric("mAP", {"iou": 0.5}), *detections) == pytest.approx(stats[1])
    assert in_batches(build_metric("mAP", {"iou": 0.75}), *detections) == pytest.approx(stats[2])


def padded(images, key, shape, fill):
    most = max(len(image["labels"]) for image in images)
    result = np.full((len(images), most, *shape), fill, dtype=np.float32)
    for row, image in zip(result, images, strict=True):
        row[: len(image[key])] = image[key]
    return result


@pytest.mark.parametrize("form", ["dict", "tuple", "named", "count", "xywh"])
def test_map_takes_whole_batches_in_any_form(form, detections):
    predictions, truth = detections
    expected = in_batches(build_metric("mAP"), predictions, truth)
    labels = {"boxes": padded(truth, "boxes", (4,), 0), "labels": padded(truth, "labels", (), -1)}
    fill = 0 if form == "count" else -1
    parts = {
        "boxes": padded(predictions, "boxes", (4,), 0),
        "scores": padded(predictions, "scores", (), 0),
        "labels": padded(predictions, "labels", (), fill),
    }
    options = {}
    if form == "tuple":
        parts = tuple(parts.values())
    elif form == "named":
        options = {"outputs": {"boxes": "where", "scores": "how_sure", "labels": "what"}}
        names = options["outputs"]
        parts = {names[part]: value for part, value in parts.items()}
    elif form == "count":
        parts["count"] = np.array([len(image["labels"]) for image in predictions])
    elif form == "xywh":
        options = {"box": "xywh"}
        for boxes in (parts["boxes"], labels["boxes"]):
            boxes[..., 2:] -= boxes[..., :2]
    metric = build_metric("mAP", options)
    metric.update(parts, labels)
    assert metric.result() == pytest.approx(expected, abs=1e-4)  # float32


def test_map_names_what_it_misses(detections):
    predictions, truth = detections
    metric = build_metric("mAP")
    with pytest.raises(MetricError, match="no result before the first sample"):
        metric.result()
    with pytest.raises(MetricError, match="requires scores among the predictions, got 'boxes'"):
        metric.update(truth, truth)
    with pytest.raises(MetricError, match=r"got one float64 \[4, 3\]"):
        metric.update(np.zeros((4, 3)), truth)
    with pytest.raises(MetricError, match="predictions for 12 images and labels for 3"):
        metric.update(predictions, truth[:3])
    with pytest.raises(ConfigurationError, match="unknown part 'score'.*did you mean 'scores'"):
        build_metric("mAP", {"outputs": {"score": 1}})


def test_map_of_a_case_done_by_hand():
    """Two boxes of one class: the best guess is right, the second invented, the third right."""
    truth = [{"boxes": [[0, 0, 10, 10], [20, 20, 30, 30]], "labels": [4, 4]}]
    boxes = [[0, 0, 10, 10], [50, 50, 60, 60], [20, 20, 30, 30]]
    metric = build_metric("mAP", {"iou": 0.5})
    metric.update([{"boxes": boxes, "labels": [4, 4, 4], "scores": [0.9, 0.8, 0.7]}], truth)
    # Precision is 1 at the 51 recalls up to a half, and 2/3 at the 50 above.
    assert metric.result() == pytest.approx((51 + 50 * 2 / 3) / 101)
