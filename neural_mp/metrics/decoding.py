"""The transform `decode`: outputs of detectors → boxes, scores and classes of each image.

N is the number of images, A of anchors or queries, C of classes, K of keypoints, P of prototypes of
masks, M of the objects of an image. Boxes are in pixels of the input, scores from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from neural_mp.data.annotations import import_mask_tools
from neural_mp.data.option_checks import (
    check_finite_number,
    check_one_of,
    check_whole_number,
    true_or_false,
)
from neural_mp.data.transforms import TRANSFORMS
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.metrics.predictions import (
    choose_output,
    format_output_list,
    log_softmax,
    map_named_outputs,
)
from neural_mp.util.pytree import convert_to_numpy

#: Best candidates of an image that compete in the suppression.
MAX_CANDIDATES = 3000
#: Side of the square in which boxes of one class lie, for the suppression within classes.
_CLASS_OFFSET = 1e5
#: Layout of boxes → conversion to left, top, right, bottom, along the last axis.
CORNERS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "xyxy": lambda box: box,
    "yxyx": lambda box: box[..., [1, 0, 3, 2]],
    "xywh": lambda box: np.concatenate([box[..., :2], box[..., :2] + box[..., 2:]], -1),
    "cxcywh": lambda box: np.concatenate(
        [box[..., :2] - box[..., 2:] / 2, box[..., :2] + box[..., 2:] / 2], -1
    ),
}
#: Format → layout of its boxes.
_LAYOUTS = {"yolo": "cxcywh", "end2end": "xyxy", "detr": "cxcywh", "ssd": "xyxy"}


@dataclass(frozen=True)
class _Candidates:
    """Candidates of a batch.

    Attributes:
        boxes: `[N, A, 4]`, left, top, right, bottom in pixels of the input.
        scores: `[N, A, C]`; or `[N, A]` if `classes` are given.
        extras: `[N, A, E]`, keypoints or coefficients of masks.
        classes: `[N, A]` of each candidate; None if scores are those of all classes.
        prototypes: `[N, P, h, w]` of masks; or None.
    """

    boxes: np.ndarray
    scores: np.ndarray
    extras: np.ndarray
    classes: np.ndarray | None = None
    prototypes: np.ndarray | None = None


@TRANSFORMS.register("decode")
@dataclass(frozen=True)
class Decode:
    """Decoding of a detector's outputs to the form of `mAP`: a list of N dicts.

    Formats, by the models that write them:

    * `yolo`: `[N, 4 + C, A]` (YOLOv8 to 11, also `[N, A, 4 + C]`), with `objectness` `[N, A, 5 +
      C]` (YOLOv5); keypoints, or coefficients of the prototypes `[N, P, h, w]`, follow the classes.
    * `end2end`: `[N, A, 6]`: box, score, class (YOLOv10, YOLO26); followed as above. Without
      suppression.
    * `detr`: boxes `[N, A, 4]` in fractions of the input, and logits `[N, A, C]` or `[N, A, C + 1]`
      with a last class for none (`activation: softmax`). Without suppression.
    * `ssd`: boxes `[N, A, 4]` and probabilities `[N, A, C + 1]`, the first class for none.

    The result of an image has `boxes` `[M, 4]`, `scores` `[M]`, `labels` `[M]` and, if the model
    has these, `masks` `[M, H, W]` or `keypoints` `[M, K, 3]`.

    Attributes:
        format: `yolo`, `end2end`, `detr` or `ssd`.
        nms: overlap (intersection over union) above which the box of the lower score of one class
            is suppressed; for `yolo` and `ssd`.
        score: least score of a box.
        max_boxes: the best boxes of an image that are returned.
        box: layout of the boxes: `xyxy`, `yxyx`, `xywh` or `cxcywh`; by default that of the format.
        fractions: whether boxes are fractions of the input, which the label's `size` gives; by
            default for `detr`.
        objectness: whether `yolo` has a score of any object ahead of the classes.
        activation: `sigmoid`, `softmax` or `none`, from scores of the model to probabilities; by
            default `softmax` for `detr`.
        keypoints: number K of keypoints of an object.
        outputs: names or positions of the outputs `boxes`, `scores` and `prototypes`, if these are
            not told by their shapes.

    Raises:
        ConfigurationError: an option is wrong.
    """

    applies_to_reference: ClassVar[bool] = True

    format: str
    nms: float = 0.7
    score: float = 0.001
    max_boxes: int = 300
    box: str | None = None
    fractions: bool | None = None
    objectness: bool = False
    activation: str | None = None
    keypoints: int = 0
    outputs: Mapping[str, str | int] | None = None

    def __post_init__(self) -> None:
        check_one_of("decode: format", self.format, [*_LAYOUTS])
        for name in ("nms", "score"):
            value = check_finite_number(f"decode: {name}", getattr(self, name))
            if not 0 <= value <= 1:
                raise ConfigurationError(f"decode: {name} must be from 0 to 1, got {value}")
        check_whole_number("decode: max_boxes", self.max_boxes, minimum=1)
        check_whole_number("decode: keypoints", self.keypoints, minimum=0)
        true_or_false("decode: objectness", self.objectness)
        is_detr = self.format == "detr"
        defaults = {
            "box": _LAYOUTS[self.format],
            "fractions": is_detr,
            "activation": "softmax" if is_detr else "none",
            "outputs": {},
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        check_one_of("decode: box", self.box, [*CORNERS])
        true_or_false("decode: fractions", self.fractions)
        check_one_of("decode: activation", self.activation, ["sigmoid", "softmax", "none"])
        if not isinstance(self.outputs, Mapping) or set(self.outputs) - _PARTS:
            raise ConfigurationError(
                f"decode: outputs must name {', '.join(sorted(_PARTS))}, got {self.outputs!r}"
            )

    def __call__(self, pair: tuple[Any, Any]) -> tuple[list[dict[str, np.ndarray]], Any]:
        """Return the objects of each image, and the labels unchanged.

        Raises:
            DataError: the outputs are none of the format.
        """
        predictions, labels = pair
        outputs = map_named_outputs(predictions) or {"0": predictions}
        arrays = {
            name: np.asarray(convert_to_numpy(value))
            for name, value in outputs.items()
            if hasattr(value, "shape")
        }
        sizes = _input_sizes(labels)
        candidates = self._read_candidates(predictions, arrays)
        if self.fractions:
            if sizes is None:
                raise DataError(
                    "decode: boxes in fractions need the size of the input, the key size of the "
                    "labels, as the datasets coco and yolo with letterbox give"
                )
            scale = np.array([np.tile(size[::-1], 2) for size in sizes], np.float64)
            candidates = _scale_boxes(candidates, scale)
        count = len(candidates.boxes)
        return [
            self._select_objects(candidates, i, None if sizes is None else sizes[i])
            for i in range(count)
        ], labels

    def _choose(
        self,
        predictions: Any,
        arrays: Mapping[str, np.ndarray],
        part: str,
        fits: Callable[..., bool],
    ) -> np.ndarray | None:
        if self.outputs and part in self.outputs:
            chosen = convert_to_numpy(choose_output(predictions, self.outputs[part], "predictions"))
            return np.asarray(chosen)
        fitting = {name: array for name, array in arrays.items() if fits(array)}
        named = [name for name in fitting if any(word in name for word in _WORDS[part])]
        return next((fitting[name] for name in (*named, *fitting)), None)

    def _read_candidates(self, predictions: Any, arrays: Mapping[str, np.ndarray]) -> _Candidates:
        read = self._read_joined if self.format in ("yolo", "end2end") else self._read_pair
        candidates = read(predictions, arrays)
        if candidates is None:
            raise DataError(
                f"decode: outputs of the format {self.format} must be {_EXPECTED[self.format]}, "
                f"got {format_output_list(arrays)}; set the option outputs or format"
            )
        return candidates

    def _read_joined(
        self, predictions: Any, arrays: Mapping[str, np.ndarray]
    ) -> _Candidates | None:
        """Return the candidates of one array of boxes and scores."""
        whole = self._choose(predictions, arrays, "boxes", lambda a: a.ndim == 3)
        if whole is None:
            return None
        prototypes = self._choose(predictions, arrays, "prototypes", lambda a: a.ndim == 4)
        rows = whole.astype(np.float64)
        if self.format == "yolo" and not self.objectness and rows.shape[1] < rows.shape[2]:
            rows = rows.transpose(0, 2, 1)
        masks = 0 if prototypes is None else prototypes.shape[1]
        points = rows.shape[2] - 4 - (2 if self.format == "end2end" else 1)
        extras = masks or (points if self.keypoints else 0)
        if self.keypoints and extras % self.keypoints:
            extras = 3 * self.keypoints
        end = rows.shape[2] - extras
        if end < 5 + (self.format == "end2end" or self.objectness):
            return None
        boxes, scores, rest = np.split(rows, [4, end], axis=2)
        boxes = CORNERS[str(self.box)](boxes)
        if self.format == "end2end":
            classes = scores[..., 1].astype(np.int64)
            return _Candidates(boxes, scores[..., 0], rest, classes, prototypes)
        scores = self._activate(scores)
        scores = scores[..., 1:] * scores[..., :1] if self.objectness else scores
        return _Candidates(boxes, scores, rest, None, prototypes)

    def _read_pair(self, predictions: Any, arrays: Mapping[str, np.ndarray]) -> _Candidates | None:
        """Return the candidates of boxes and scores in arrays of their own."""
        boxes = self._choose(
            predictions, arrays, "boxes", lambda a: a.ndim == 3 and a.shape[2] == 4
        )
        scores = self._choose(
            predictions,
            arrays,
            "scores",
            lambda a: a.ndim == 3 and a is not boxes,
        )
        if boxes is None or scores is None or boxes.shape[:2] != scores.shape[:2]:
            return None
        chances = self._activate(scores.astype(np.float64))
        if self.format == "ssd":
            chances = chances[..., 1:]
        corners = CORNERS[str(self.box)](boxes.astype(np.float64))
        if self.format == "detr" and self.activation == "softmax":
            chances = chances[..., :-1]
            best = chances.argmax(axis=-1)  # a query is of one class, as in `transformers`
            return _Candidates(corners, chances.max(axis=-1), corners[..., :0], best)
        return _Candidates(corners, chances, corners[..., :0])

    def _activate(self, scores: np.ndarray) -> np.ndarray:
        if self.activation == "sigmoid":
            return np.asarray(1 / (1 + np.exp(-scores)))
        return np.exp(log_softmax(scores)) if self.activation == "softmax" else scores

    def _select_objects(
        self, candidates: _Candidates, index: int, size: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        scores = candidates.scores[index]
        if candidates.classes is None:
            rows, classes = np.nonzero(scores >= self.score)
            chosen = scores[rows, classes]
        else:
            rows = np.flatnonzero(scores >= self.score)
            classes, chosen = candidates.classes[index][rows], scores[rows]
        best = np.argsort(-chosen, kind="stable")[:MAX_CANDIDATES]
        if self.format in ("yolo", "ssd"):
            boxes = candidates.boxes[index][rows[best]]
            best = best[suppress_overlaps(boxes, classes[best], self.nms)]
        best = best[: self.max_boxes]
        rows = rows[best]
        objects = {
            "boxes": candidates.boxes[index][rows].astype(np.float32),
            "scores": chosen[best].astype(np.float32),
            "labels": classes[best].astype(np.int64),
        }
        extras = candidates.extras[index][rows]
        if self.keypoints:
            objects["keypoints"] = _read_points(extras, self.keypoints)
        elif candidates.prototypes is not None:
            prototypes = candidates.prototypes[index].astype(np.float64)
            objects["masks"] = draw_masks(prototypes, extras, objects["boxes"], size)
        return objects


#: Part → parts of names of outputs, which decide where shapes do not.
_WORDS = {"boxes": ("box",), "scores": ("score", "logit", "prob"), "prototypes": ("proto",)}
_PARTS = frozenset(_WORDS)
_EXPECTED = {
    "yolo": "[N, 4 + C, A]",
    "end2end": "[N, A, 6]",
    "detr": "boxes [N, A, 4] and logits [N, A, C]",
    "ssd": "boxes [N, A, 4] and scores [N, A, C + 1]",
}


def _input_sizes(labels: Any) -> list[np.ndarray] | None:
    """Return the key `size` of the label of each image; None if a label has none."""
    if not isinstance(labels, Sequence) or not labels:
        return None
    if not all(isinstance(label, Mapping) and "size" in label for label in labels):
        return None
    return [np.asarray(label["size"]) for label in labels]


def _scale_boxes(candidates: _Candidates, scale: np.ndarray) -> _Candidates:
    return replace(candidates, boxes=candidates.boxes * scale[:, None])


def suppress_overlaps(boxes: np.ndarray, classes: np.ndarray, overlap: float) -> np.ndarray:
    """Return the positions that greedy non-maximum suppression within classes keeps, in order.

    Args:
        boxes: `[M, 4]`, left, top, right, bottom, best score first.
        classes: `[M]`.
        overlap: intersection over union above which the later box is suppressed.

    Raises:
        MissingFrameworkError: pycocotools, which computes the overlaps, is not installed.
    """
    tools = import_mask_tools("suppression of overlapping boxes")
    if not len(boxes):
        return np.zeros(0, np.int64)
    sides = (boxes[:, 2:] - boxes[:, :2]).clip(0)
    placed = np.concatenate([boxes[:, :2] + _CLASS_OFFSET * classes[:, None], sides], axis=1)
    overlaps = np.asarray(tools.iou(placed, placed, np.zeros(len(placed), np.uint8)))
    alive = np.ones(len(boxes), bool)
    for position in range(len(boxes)):
        if alive[position]:
            alive[position + 1 :] &= overlaps[position, position + 1 :] <= overlap
    return np.flatnonzero(alive)


def _read_points(extras: np.ndarray, count: int) -> np.ndarray:
    """Return keypoints `[M, K, 3]`; those without a visibility count as visible."""
    points = extras.reshape(len(extras), count, extras.shape[1] // count)
    if points.shape[2] == 2:
        points = np.concatenate([points, np.ones((*points.shape[:2], 1))], axis=2)
    return points.astype(np.float32)


def draw_masks(
    prototypes: np.ndarray, coefficients: np.ndarray, boxes: np.ndarray, size: np.ndarray | None
) -> np.ndarray:
    """Return masks `[M, H, W]`: where the sum of prototypes is above 0, within the boxes.

    Args:
        prototypes: `[P, h, w]`.
        coefficients: `[M, P]`.
        boxes: `[M, 4]` in pixels of the input.
        size: height and width of the input; None for four times the prototypes, as in YOLO.
    """
    from scipy.ndimage import zoom

    inner = np.array(prototypes.shape[1:])
    height, width = (4 * inner if size is None else np.asarray(size)).tolist()
    logits = np.tensordot(coefficients, prototypes, axes=1)
    factors = (height / inner[0], width / inner[1])
    rows, columns = np.arange(height)[:, None], np.arange(width)[None]
    masks = np.zeros((len(logits), height, width), np.uint8)
    for mask, values, (left, top, right, bottom) in zip(masks, logits, boxes, strict=True):
        whole = zoom(values, factors, order=1, grid_mode=True, mode="nearest") > 0
        inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
        mask[:] = whole & inside
    return masks
