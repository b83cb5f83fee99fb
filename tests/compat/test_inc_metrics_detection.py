"""Mean average precision, named in a file of Intel Neural Compressor."""

import json
import sys

import numpy as np
import pytest

from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.errors import ConfigurationError, DataError, MetricError, MissingFrameworkError
from neural_mp.metrics import build_metric

KEY = "DetectionBoxes_"
NAMES = {1: b"person", 18: b"dog", 90: b"toothbrush"}
FAMILY = ("mAP", "COCOmAP", "VOCmAP", "COCOmAPv2")


def named(name, options=None, framework="tensorflow"):
    return build_metric(name, options, load_vocabulary(framework).metrics)


@pytest.fixture
def tools():
    return pytest.importorskip("pycocotools", reason="needs the extra coco")


def ordered(boxes):
    """Boxes of which the first corner is the upper left one."""
    first, second = boxes[:, :2], boxes[:, 2:]
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=1)


@pytest.fixture
def data():
    """Ten images of 1 to 4 boxes in pixels, and 20 detections near them."""
    random = np.random.default_rng(0)
    images = []
    for number in range(10):
        count = int(random.integers(1, 5))
        truth, classes = (
            ordered(random.uniform(0, 400, (count, 4))),
            random.choice(list(NAMES), count),
        )
        picked = random.integers(count, size=20)
        images.append(
            {
                "id": number,
                "truth": truth,
                "classes": classes,
                "boxes": ordered(truth[picked] + random.normal(size=(20, 4)) * 12),
                "scores": random.permutation(20 * 10)[:20] / 200 + number / 1e5,
                "found": classes[picked],
            }
        )
    return images


def stats(data, folder, overlaps=None, recalls=None):
    """What pycocotools' own evaluation says, of files in the form of COCO."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def box(corner):
        top, left, bottom, right = map(float, corner)
        return [left, top, right - left, bottom - top]

    truth = [
        {"image_id": image["id"], "category_id": int(kind), "bbox": box(corner), "iscrowd": 0}
        for image in data
        for corner, kind in zip(image["truth"], image["classes"], strict=True)
    ]
    for number, entry in enumerate(truth, start=1):
        entry.update(id=number, area=entry["bbox"][2] * entry["bbox"][3])
    detections = [
        {"image_id": i["id"], "category_id": int(kind), "bbox": box(corner), "score": float(score)}
        for i in data
        for corner, kind, score in zip(i["boxes"], i["found"], i["scores"], strict=True)
    ]
    content = {
        "images": [{"id": image["id"]} for image in data],
        "categories": [{"id": number, "name": name.decode()} for number, name in NAMES.items()],
        "annotations": truth,
    }
    file = folder / "instances.json"
    file.write_text(json.dumps(content))
    coco = COCO(str(file))
    evaluation = COCOeval(coco, coco.loadRes(detections), "bbox")
    if overlaps is not None:
        evaluation.params.iouThrs = overlaps
    if recalls is not None:
        evaluation.params.recThrs = recalls
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats


def labels(images, with_names=False):
    empty = [np.array([])] * len(images)
    names = [np.array([NAMES.get(kind, b"?") for kind in image["classes"]]) for image in images]
    ids = [image["classes"] for image in images]
    return (
        [image["truth"] for image in images],
        names if with_names else empty,
        empty if with_names else ids,
        np.array([f"{image['id']:012}.jpg".encode() for image in images]),
    )


def outputs(images, *order):
    return [np.stack([image[what] for image in images]) for what in order]


def fed(metric, data, *order, with_names=False):
    for start in range(0, len(data), 4):
        batch = data[start : start + 4]
        metric.update(outputs(batch, *order), labels(batch, with_names))
    return metric.result()


@pytest.mark.parametrize("with_names", [False, True])
@pytest.mark.parametrize("name", ["COCOmAP", "COCOmAPv2"])
def test_cocomap_is_what_pycocotools_says_of_coco_files(tools, tmp_path, data, name, with_names):
    value = fed(named(name), data, "boxes", "scores", "found", with_names=with_names)
    assert value == pytest.approx(stats(data, tmp_path)[0], abs=1e-12)
    assert 0.1 < value < 0.9


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("Precision/mAP@.50IOU", 1),
        ("Precision/mAP@.75IOU", 2),
        ("Precision/mAP (small)", 3),
        ("Precision/mAP (large)", 5),
        ("Recall/AR@1", 6),
        ("Recall/AR@100 (medium)", 10),
    ],
)
def test_map_key_chooses_among_the_values_of_the_summary(tools, tmp_path, data, key, place):
    value = fed(named("COCOmAP", {"map_key": KEY + key}), data, "boxes", "scores", "found")
    assert value == pytest.approx(stats(data, tmp_path)[place], abs=1e-12)


@pytest.mark.parametrize("points", [11, 101])
@pytest.mark.parametrize("overlap", [0.5, 0.75])
def test_map_reads_precision_off_at_so_many_recalls(tools, tmp_path, data, points, overlap):
    metric = named("mAP", {"iou_thrs": overlap, "map_points": points})
    expected = stats(data, tmp_path, np.array([overlap]), np.linspace(0, 1, points))[0]
    assert fed(metric, data, "boxes", "scores", "found") == pytest.approx(expected, abs=1e-12)


def area_under_curve(data, overlap):
    """The mean over classes of the area under the curve, matched box by box in plain Python."""

    def share(first, second):
        low, high = np.maximum(first[:2], second[:2]), np.minimum(first[2:], second[2:])
        intersection = np.prod(np.maximum(high - low, 0))
        return intersection / (
            np.prod(first[2:] - first[:2]) + np.prod(second[2:] - second[:2]) - intersection
        )

    areas = []
    for kind in NAMES:
        hits, positives = [], 0
        for image in data:
            unmatched = list(image["truth"][image["classes"] == kind])
            positives += len(unmatched)
            chosen = image["found"] == kind
            for score, box in sorted(
                zip(image["scores"][chosen], image["boxes"][chosen].tolist(), strict=True),
                reverse=True,
            ):
                shares = [share(np.array(box), candidate) for candidate in unmatched]
                hit = bool(shares) and max(shares) >= overlap
                hits.append((score, hit))
                if hit:
                    del unmatched[int(np.argmax(shares))]
        right = np.cumsum([hit for _, hit in sorted(hits, reverse=True)])
        precision = right / np.arange(1, len(right) + 1)
        best = [precision[i:].max() for i in range(len(precision))]
        areas.append(np.sum(np.diff(right, prepend=0) / positives * best))
    return np.mean(areas)


def test_without_points_map_is_the_area_under_the_curve(tools, data):
    expected = area_under_curve(data, 0.5)
    for name in ("mAP", "VOCmAP"):
        value = fed(named(name), data, "boxes", "scores", "found")
        assert value == pytest.approx(expected, abs=1e-9)


def test_the_area_is_that_of_a_curve_drawn_by_hand(tools):
    truth = np.array([[0, 0, 10, 10], [20, 20, 30, 30]])
    boxes = np.array([[0, 0, 10, 10], [50, 50, 60, 60], [20, 20, 30, 30]])
    metric = named("mAP")
    scores, classes = np.array([[0.9, 0.8, 0.7]]), np.array([[1, 1, 1]])
    metric.update((boxes[None], scores, classes), ([truth], [[]], [[1, 1]], [b"a"]))
    # The first is right; the second is not; with the third 2 of 3 are right and all are found.
    assert metric.result() == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)


def test_recall_is_measured_whatever_the_curve_is_read_off_at(tools, tmp_path, data):
    metric = named("mAP", {"map_key": KEY + "Recall/AR@100"})
    expected = stats(data, tmp_path, np.array([0.5]))[8]
    assert fed(metric, data, "boxes", "scores", "found") == pytest.approx(expected)
    assert expected < 1


def test_only_so_many_detections_count_as_the_model_says(tools, tmp_path, data):
    for number, image in enumerate(data):
        image["count"] = np.array([number + 3])
    cut = [
        {**i, **{what: i[what][: int(i["count"][0])] for what in ("boxes", "scores", "found")}}
        for i in data
    ]
    expected = stats(cut, tmp_path)[0]
    assert fed(named("COCOmAP"), data, "count", "boxes", "scores", "found") == pytest.approx(
        expected
    )
    mapping = {"num_detections": 3, "boxes": 1, "scores": 0, "classes": 2}
    metric = named("COCOmAPv2", {"output_index_mapping": mapping}, "onnxrt")
    assert fed(metric, data, "scores", "boxes", "found", "count") == pytest.approx(expected)


def test_an_image_that_comes_again_is_passed_over(tools, data):
    metric = named("COCOmAP")
    once = fed(metric, data, "boxes", "scores", "found")
    assert fed(metric, data[:5], "boxes", "scores", "found") == once
    metric.reset()
    assert metric.result() == 0.0


def test_classes_that_coco_does_not_have_are_left_out(tools, tmp_path, data):
    expected = stats(data, tmp_path)[0]
    for image in data:
        image["truth"] = np.concatenate([image["truth"], image["truth"][:1]])
        image["classes"] = np.append(image["classes"], 12)
        image["found"] = np.append(image["found"], 91)
        image["boxes"] = np.concatenate([image["boxes"], image["truth"][-1:]])
        image["scores"] = np.append(image["scores"], 0.9)
    assert fed(named("COCOmAP"), data, "boxes", "scores", "found") == pytest.approx(expected)


def test_a_file_tells_the_ids_of_names(tools, tmp_path, data):
    file = tmp_path / "label_map.yaml"
    file.write_text("Mensch: 1\nHund: 18\nZahnbürste: 90\n", encoding="utf-8")
    translations = {b"person": "Mensch", b"dog": "Hund", b"toothbrush": "Zahnbürste".encode()}
    metric = named("COCOmAP", {"anno_path": str(file)})
    for image in data:
        boxes, names, ids, image_ids = labels([image], with_names=True)
        names = [[translations[name] for name in row] for row in names]
        metric.update(outputs([image], "boxes", "scores", "found"), (boxes, names, ids, image_ids))
    assert metric.result() == fed(named("COCOmAP"), data, "boxes", "scores", "found")
    with pytest.raises(MetricError, match=r"unknown class 'Hand'.*did you mean 'Hund'"):
        metric.update(
            outputs(data[:1], "boxes", "scores", "found"),
            ([np.ones((1, 4))], [["Hand"]], [[]], ["x"]),
        )


def test_images_without_boxes_only_lower_the_precision(tools, data):
    some = data[0]
    nothing = {**some, "id": 99, "truth": np.zeros((0, 4)), "classes": np.array([], int)}
    single = fed(named("COCOmAP"), [some], "boxes", "scores", "found")
    together = fed(named("COCOmAP"), [nothing, some], "boxes", "scores", "found", with_names=True)
    assert 0 < together <= single
    assert fed(named("COCOmAP"), [nothing], "boxes", "scores", "found") == 0.0


@pytest.mark.parametrize("name", FAMILY)
def test_options_that_are_wrong_are_named(tools, tmp_path, name):
    with pytest.raises(DataError, match=f"{name}: anno_path: .* does not exist"):
        named(name, {"anno_path": str(tmp_path / "none.yaml")})
    (tmp_path / "list.yaml").write_text("- dog\n")
    with pytest.raises(ConfigurationError, match="a line 'name: id' for each class"):
        named(name, {"anno_path": str(tmp_path / "list.yaml")})
    with pytest.raises(ConfigurationError, match=r"map_key.*did you mean"):
        named(name, {"map_key": "DetectionBoxes_Precision/mAP@50"})


def test_overlaps_points_and_positions_that_are_wrong_are_named(tools):
    with pytest.raises(ConfigurationError, match="iou_thrs must be a number from 0 to 1"):
        named("mAP", {"iou_thrs": "0.5:0.95"})
    with pytest.raises(ConfigurationError, match="map_points must be 0, 11 or 101"):
        named("COCOmAPv2", {"map_points": 10})
    with pytest.raises(ConfigurationError, match=r"unknown 'score'; did you mean 'scores'"):
        named("COCOmAPv2", {"output_index_mapping": {"boxes": 0, "score": 1, "classes": 2}})
    with pytest.raises(ConfigurationError, match="must hold the position of 'classes'"):
        named("COCOmAPv2", {"output_index_mapping": {"boxes": 0, "scores": 1}})


def test_predictions_and_labels_of_another_form_are_named(tools, data):
    metric = named("COCOmAP")
    good, right = outputs(data[:2], "boxes", "scores", "found"), labels(data[:2])
    with pytest.raises(MetricError, match="got 2 outputs"):
        metric.update(good[:2], right)
    with pytest.raises(MetricError, match="labels must be .boxes, class names"):
        metric.update(good, right[:3])
    with pytest.raises(MetricError, match="boxes for 2 images and labels of 1"):
        metric.update(good, labels(data[:1]))
    with pytest.raises(MetricError, match=r"boxes \[M, 4\] with M classes and scores"):
        metric.update([good[0][..., :3], *good[1:]], right)
    with pytest.raises(
        MetricError, match=r"labels of an image must .* got boxes \(\d, 4\), classes \(1,\)"
    ):
        metric.update(good, (right[0], right[1], [[1]] * 2, right[3]))
    far = named("COCOmAPv2", {"output_index_mapping": {"boxes": 0, "scores": 1, "classes": 5}})
    with pytest.raises(MetricError, match="classes must be among .* position 5"):
        far.update(good, right)


@pytest.mark.parametrize("name", FAMILY)
def test_without_pycocotools_the_extra_is_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    with pytest.raises(MissingFrameworkError, match=rf"{name} needs pycocotools.*\[coco\]"):
        named(name)
