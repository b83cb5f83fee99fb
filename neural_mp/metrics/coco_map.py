"""Mean average precision of boxes, masks and keypoints, as pycocotools computes it for COCO."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from neural_mp.data.annotations import import_mask_tools
from neural_mp.data.option_checks import import_package
from neural_mp.errors import ConfigurationError, MetricError

#: The values of the summary, in the order of pycocotools' `stats`.
SUMMARY = (
    "Precision/mAP",
    "Precision/mAP@.50IOU",
    "Precision/mAP@.75IOU",
    "Precision/mAP (small)",
    "Precision/mAP (medium)",
    "Precision/mAP (large)",
    "Recall/AR@1",
    "Recall/AR@10",
    "Recall/AR@100",
    "Recall/AR@100 (small)",
    "Recall/AR@100 (medium)",
    "Recall/AR@100 (large)",
)
#: The ten overlaps of COCO's mean.
ALL_OVERLAPS = "0.5:0.05:0.95"


@dataclass(frozen=True)
class Boxes:
    """The boxes of one image.

    Attributes:
        corners: `[N, 4]`, each `[ymin, xmin, ymax, xmax]`.
        classes: `[N]`, class ids.
        scores: `[N]` for predicted boxes; None for ground truth.
        masks: run lengths of the mask of each, for a mAP of masks.
        keypoints: `[N, K, 3]`, x, y, visibility, for a mAP of keypoints.
        areas: `[N]` in pixels; None for those of boxes or masks.
        crowds: `[N]`, 1 for a group whose detections do not count.
    """

    corners: np.ndarray
    classes: np.ndarray
    scores: np.ndarray | None = None
    masks: Sequence[Mapping[str, Any]] | None = None
    keypoints: np.ndarray | None = None
    areas: np.ndarray | None = None
    crowds: np.ndarray | None = None


#: Part that is judged → name in pycocotools.
_KINDS = {"boxes": "bbox", "masks": "segm", "keypoints": "keypoints"}
#: Tolerance of a keypoint, where COCO has none of its own.
_SIGMA = 0.05


def parse_overlaps(option: str, value: object) -> np.ndarray:
    """Return the overlaps of a setting, `[T]`.

    Args:
        option: name of the setting, for messages.
        value: a number from 0 to 1, or `ALL_OVERLAPS`.

    Raises:
        ConfigurationError: the value is neither.
    """
    if value == ALL_OVERLAPS:
        return np.linspace(0.5, 0.95, 10)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigurationError(
            f"{option} must be a number from 0 to 1 or {ALL_OVERLAPS!r}, got {value!r}"
        )
    return np.array([float(value)])


def import_coco_tools(needed_by: str) -> ModuleType:
    """Return the package pycocotools with its modules `coco` and `cocoeval` loaded.

    Raises:
        MissingFrameworkError: pycocotools is not installed.
    """
    for name in ("pycocotools.coco", "pycocotools.cocoeval"):
        import_package(name, needed_by, "coco", "pycocotools")
    return sys.modules["pycocotools"]


def summarize_detections(
    truth: Mapping[str, Boxes],
    detections: Mapping[str, Boxes],
    overlaps: np.ndarray,
    recalls: np.ndarray | None,
    categories: Mapping[int, str],
    kind: str = "boxes",
    sigmas: Sequence[float] | None = None,
) -> dict[str, float]:
    """Compute precision and recall over all images, classes and overlaps.

    Args:
        truth: image → ground-truth boxes; boxes of other classes are ignored.
        detections: image → boxes with scores; the 100 best per image and class count.
        overlaps: minimum intersections over union of detected boxes, `[T]`.
        recalls: recall values at which precision is sampled, `[R]`; None for the area under the
            curve.
        categories: class id → class name.
        kind: `boxes`, `masks` or `keypoints`, of which the overlap is.
        sigmas: tolerance of each keypoint; see `MeanAveragePrecision`.

    Returns:
        A value for each name in `SUMMARY`, 0 to 1; -1 if undefined, as in pycocotools. Keypoints
        have the mAP alone.

    Raises:
        MissingFrameworkError: pycocotools is not installed.
    """
    tools = import_coco_tools("mAP")
    with redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        evaluation = tools.cocoeval.COCOeval(
            _build_coco(tools, truth, list(truth), categories),
            _build_coco(tools, detections, list(truth), categories),
            _KINDS[kind],
        )
        evaluation.params.iouThrs = overlaps
        evaluation.params.recThrs = np.array([-1.0]) if recalls is None else recalls
        if kind == "keypoints":
            evaluation.params.kpt_oks_sigmas = _choose_sigmas(truth, sigmas, evaluation)
        evaluation.evaluate()
        evaluation.accumulate()
        if recalls is None:
            _replace_with_areas(evaluation)
        if kind == "keypoints":  # whose summary has other limits
            return {SUMMARY[0]: _mean_precision(evaluation)}
        evaluation.summarize()
    return dict(zip(SUMMARY, map(float, evaluation.stats), strict=True))


def encode_masks(masks: np.ndarray) -> list[Mapping[str, Any]]:
    """Return the run lengths of masks `[N, H, W]`."""
    tools = import_mask_tools("mAP")
    ordered = np.asfortranarray(np.moveaxis(masks != 0, 0, -1).astype(np.uint8))
    return list(tools.encode(ordered))


def _choose_sigmas(
    truth: Mapping[str, Boxes], sigmas: Sequence[float] | None, evaluation: Any
) -> np.ndarray:
    """Return the tolerance of each keypoint.

    Raises:
        MetricError: there is another number of keypoints.
    """
    counts = {boxes.keypoints.shape[1] for boxes in truth.values() if boxes.keypoints is not None}
    count = max(counts, default=0)
    usual = evaluation.params.kpt_oks_sigmas
    if sigmas is None:
        return np.asarray(usual if count == len(usual) else np.full(count, _SIGMA))
    if len(sigmas) != count:
        raise MetricError(
            f"mAP: sigmas must be {count} numbers, one per keypoint, got {len(sigmas)}"
        )
    return np.array(sigmas)


def _mean_precision(evaluation: Any) -> float:
    """Return the mean over overlaps, recalls and classes, of objects of any size."""
    precision = evaluation.eval["precision"][:, :, :, 0, -1]
    defined = precision[precision > -1]
    return float(defined.mean()) if defined.size else -1.0


def _build_coco(
    tools: ModuleType, images: Mapping[str, Boxes], names: list[str], categories: Mapping[int, str]
) -> Any:
    """Convert boxes for pycocotools; ids start from 1, since 0 means no match."""
    annotations = (
        entry
        for name, boxes in images.items()
        for entry in _make_coco_entries(name, boxes, categories)
    )
    coco = tools.coco.COCO()
    coco.dataset = {
        # pycocotools reads sizes also where run lengths have their own.
        "images": [{"id": name, "height": 0, "width": 0} for name in names],
        "categories": [{"id": number, "name": name} for number, name in categories.items()],
        "annotations": [{"id": i, **entry} for i, entry in enumerate(annotations, start=1)],
    }
    coco.createIndex()
    return coco


def _make_coco_entries(
    image: str, boxes: Boxes, categories: Mapping[int, str]
) -> Iterator[dict[str, Any]]:
    tops_lefts, bottoms_rights = boxes.corners[:, :2], boxes.corners[:, 2:]
    positions = tops_lefts[:, ::-1].astype(np.float64).tolist()
    sizes = (bottoms_rights - tops_lefts)[:, ::-1].astype(np.float64).tolist()
    for index, (kind, position, size) in enumerate(
        zip(boxes.classes.tolist(), positions, sizes, strict=True)
    ):
        if kind not in categories:
            continue
        entry = {
            "image_id": image,
            "category_id": int(kind),
            "bbox": [*position, *size],
            "area": size[0] * size[1] if boxes.areas is None else float(boxes.areas[index]),
            "iscrowd": 0 if boxes.crowds is None else int(boxes.crowds[index]),
        }
        if boxes.scores is not None:
            entry["score"] = float(boxes.scores[index])
        if boxes.masks is not None:
            entry["segmentation"] = boxes.masks[index]
        if boxes.keypoints is not None:
            points = boxes.keypoints[index].astype(np.float64)
            entry |= {"keypoints": points.ravel().tolist(), "num_keypoints": _count_seen(points)}
        yield entry


def _count_seen(points: np.ndarray) -> int:
    return int((points[:, 2] > 0).sum())


def _replace_with_areas(evaluation: Any) -> None:
    """Replace the sampled points of each precision-recall curve by the area under the curve."""
    limits = evaluation._paramsEval
    shape = (len(limits.catIds), len(limits.areaRng), len(limits.imgIds))
    precision = evaluation.eval["precision"]  # [T, 1, K, A, M]
    for kind in range(shape[0]):
        for size in range(shape[1]):
            start = (kind * shape[1] + size) * shape[2]
            images = [e for e in evaluation.evalImgs[start : start + shape[2]] if e is not None]
            positives = sum(int(np.sum(np.asarray(e["gtIgnore"]) == 0)) for e in images)
            if positives:
                for index, most in enumerate(limits.maxDets):
                    precision[:, 0, kind, size, index] = _areas_under_curves(
                        images, most, positives
                    )


def _areas_under_curves(images: list[dict[str, Any]], most: int, positives: int) -> list[float]:
    """Return the area for each overlap, of pycocotools' results for one class and box size.

    The `most` best boxes per image count; `positives` is the number of ground-truth boxes.
    """
    scores = np.concatenate([np.asarray(e["dtScores"][:most]) for e in images])
    order = np.argsort(-scores, kind="stable")
    ignored = np.concatenate([e["dtIgnore"][:, :most] for e in images], axis=1)[:, order] != 0
    matched = np.concatenate([e["dtMatches"][:, :most] for e in images], axis=1)[:, order] != 0
    right = np.cumsum(matched & ~ignored, axis=1)
    wrong = np.cumsum(~matched & ~ignored, axis=1)
    precisions = right / (right + wrong + np.spacing(1))
    # Interpolated precision: the maximum at this or any higher recall.
    envelopes = np.maximum.accumulate(precisions[:, ::-1], axis=1)[:, ::-1]
    steps = np.diff(right / positives, axis=1, prepend=0.0)
    return (steps * envelopes).sum(axis=1).tolist()
