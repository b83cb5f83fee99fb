"""Mean average precision (mAP) of boxes, masks and keypoints.

Predictions and labels have one of these formats; N counts images per batch, M counts boxes.

* Per image: a list of N dicts with `boxes` `[M, 4]`, `labels` `[M]` and, for predictions,
  `scores` `[M]`, as returned by detection models of torchvision.
* Per batch: a dict, or several outputs, with `boxes` `[N, M, 4]`, `labels` `[N, M]` and
  `scores` `[N, M]`, padded to one M. Rows with a negative class are ignored, and so are rows from
  `count` `[N]` on, if there is such an output.

With `kind: masks`, both have `masks` `[M, H, W]` besides, and with `kind: keypoints` `keypoints`
`[M, K, 3]` (x, y, visibility). Labels may have `area` `[M]` and `crowd` `[M]`, as in COCO.

Classes are whole numbers from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from neural_mp.data.detection import KINDS
from neural_mp.data.option_checks import check_finite_numbers, check_one_of
from neural_mp.errors import ConfigurationError, MetricError, did_you_mean
from neural_mp.metrics.base import METRICS, nothing_taken_in
from neural_mp.metrics.coco_map import (
    ALL_OVERLAPS,
    Boxes,
    encode_masks,
    import_coco_tools,
    parse_overlaps,
    summarize_detections,
)
from neural_mp.metrics.decoding import CORNERS
from neural_mp.metrics.predictions import (
    choose_output,
    describe_value,
    format_output_list,
    map_named_outputs,
)
from neural_mp.util.pytree import convert_to_numpy
from neural_mp.util.text import format_count

_PARTS = ("boxes", "scores", "labels", "count")
#: Parts by name only: of both sides, and of labels.
_SHAPES = ("masks", "keypoints")
_DETAILS = ("area", "crowd")
#: Output names that are recognized automatically.
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "boxes": ("boxes", "detection_boxes", "bboxes"),
    "scores": ("scores", "detection_scores"),
    "labels": ("labels", "classes", "detection_classes"),
    "count": ("count", "num_detections"),
}


@METRICS.register("mAP", "mean_average_precision")
class MeanAveragePrecision:
    """COCO's mean average precision over the classes that occur in the labels.

    The 100 best boxes per image and class count; precision is sampled at 101 recall values.

    Args:
        iou: minimum overlap (intersection over union) of a detected box, 0 to 1; or
            `0.5:0.05:0.95`, the mean over these values.
        box: box format: `xyxy` (left, top, right, bottom), `yxyx`, `xywh` (left, top, width,
            height) or `cxcywh` (center, width, height).
        outputs: names or positions of the model's outputs `boxes`, `scores`, `labels` and
            `count`, if they have other names.
        kind: `boxes`, `masks` or `keypoints`, of which the overlap (for keypoints the similarity)
            is.
        sigmas: tolerance of each keypoint, as a fraction of the object's size; by default those of
            COCO for 17 keypoints, else 0.05 each.

    Raises:
        ConfigurationError: an option is wrong.
        MissingFrameworkError: pycocotools is not installed.
    """

    running: ClassVar[bool] = False  # expensive, and not a mean over samples
    higher_is_better: ClassVar[bool] = True

    def __init__(
        self,
        iou: float | str = ALL_OVERLAPS,
        box: str = "xyxy",
        outputs: Mapping[str, str | int] | None = None,
        kind: str = "boxes",
        sigmas: Sequence[float] | None = None,
    ) -> None:
        import_coco_tools("mAP")
        self._kind = check_one_of("mAP: kind", kind, KINDS)
        self._sigmas = None if sigmas is None else check_finite_numbers("mAP: sigmas", sigmas)
        self._overlaps = parse_overlaps("mAP: iou", iou)
        self._corners = CORNERS[check_one_of("mAP: box", box, [*CORNERS])]
        self._outputs = _validate_outputs(outputs or {})
        self.reset()

    def reset(self) -> None:
        """Discard all batches."""
        self._truth: dict[str, Boxes] = {}
        self._found: dict[str, Boxes] = {}

    def update(self, preds: object, labels: object) -> None:
        """Add one batch.

        Raises:
            MetricError: predictions or labels have another format.
        """
        detections = self._boxes_per_image(preds, "predictions", self._outputs)
        truth = self._boxes_per_image(labels, "labels", {})
        if len(detections) != len(truth):
            raise MetricError(
                f"mAP got predictions for {format_count(len(detections), 'image')} "
                f"and labels for {len(truth)}"
            )
        self._add_boxes(detections, truth)

    def merge(self, other: MeanAveragePrecision) -> None:
        """Append the batches of another mAP."""
        self._add_boxes(other._found.values(), other._truth.values())

    def _add_boxes(self, detections: Iterable[Boxes], truth: Iterable[Boxes]) -> None:
        start = len(self._truth)
        for number, (ours, theirs) in enumerate(zip(detections, truth, strict=True), start):
            self._found[str(number)], self._truth[str(number)] = ours, theirs

    def result(self) -> float:
        """Return the value since the last reset, 0 to 1.

        Raises:
            MetricError: there are no images, or no label has a box.
        """
        if not self._truth:
            raise nothing_taken_in(self)
        classes = {int(kind) for boxes in self._truth.values() for kind in boxes.classes}
        if not classes:
            raise MetricError("mAP requires at least one box in the labels, got none")
        names = {kind: str(kind) for kind in sorted(classes)}
        recalls = np.linspace(0, 1, 101)
        values = summarize_detections(
            self._truth, self._found, self._overlaps, recalls, names, self._kind, self._sigmas
        )
        return values["Precision/mAP"]

    def _boxes_per_image(
        self, values: object, what: str, outputs: Mapping[str, str | int]
    ) -> list[Boxes]:
        wanted = [part for part in _PARTS if part != "scores" or what == "predictions"]
        if isinstance(values, Sequence) and all(isinstance(item, Mapping) for item in values):
            parts = [
                {
                    **_select_parts(item, what, outputs, wanted),
                    **{name: item[name] for name in (*_SHAPES, *_DETAILS) if name in item},
                }
                for item in values
            ]
        else:
            whole = _select_parts(values, what, outputs, wanted)
            length = len(whole["boxes"])
            if any(len(part) != length for part in whole.values()):
                raise MetricError(
                    f"mAP needs {what} whose first axis is the images of a batch, there are "
                    f"{format_output_list(whole)}"
                )
            parts = [{name: part[i] for name, part in whole.items()} for i in range(length)]
        return [self._parse_boxes(image, what) for image in parts]

    def _parse_boxes(self, parts: Mapping[str, Any], what: str) -> Boxes:
        arrays = {name: np.asarray(convert_to_numpy(part)) for name, part in parts.items()}
        count = arrays.pop("count", None)
        until = None if count is None else int(count.reshape(-1)[0])
        shapes = {name: arrays.pop(name, None) for name in _SHAPES}
        details = {name: arrays.pop(name, None) for name in _DETAILS}
        corners = arrays["boxes"].astype(np.float64)
        corners = corners.reshape(-1, 4) if corners.size == 0 else corners
        rows = {len(np.atleast_1d(part)) for name, part in arrays.items() if name != "boxes"}
        if corners.ndim != 2 or corners.shape[1] != 4 or rows != {len(corners)}:
            raise MetricError(
                f"mAP needs for each image boxes [M, 4] with M labels and scores, got as {what}: "
                f"{format_output_list(arrays)}"
            )
        kinds = np.atleast_1d(arrays["labels"])[:until].astype(np.int64)
        real = kinds >= 0
        scores = arrays.get("scores")
        own = self._select_shapes(shapes, len(corners), what)
        selected = {name: None if v is None else v[:until][real] for name, v in details.items()}
        return Boxes(
            # left, top, right, bottom → top, left, bottom, right
            self._corners(corners[:until])[real][:, [1, 0, 3, 2]],
            kinds[real],
            None if scores is None else np.atleast_1d(scores)[:until][real].astype(np.float64),
            masks=encode_masks(own[:until][real]) if self._kind == "masks" else None,
            keypoints=own[:until][real] if self._kind == "keypoints" else None,
            areas=selected["area"],
            crowds=selected["crowd"],
        )

    def _select_shapes(
        self, shapes: Mapping[str, np.ndarray | None], count: int, what: str
    ) -> np.ndarray:
        """Return the masks `[M, H, W]` or keypoints `[M, K, 3]`; of boxes, nothing `[M]`."""
        own = shapes.get(self._kind)
        if self._kind not in _SHAPES:
            return np.zeros(count)
        if own is None or own.ndim != 3 or len(own) != count:
            raise MetricError(
                f"mAP of {self._kind} needs {self._kind} of {count} objects among the {what}, got "
                f"{'none' if own is None else describe_value(own)}"
            )
        return own


def _select_parts(
    values: object, what: str, outputs: Mapping[str, str | int], wanted: Sequence[str]
) -> dict[str, Any]:
    arrays = map_named_outputs(values)
    if arrays is None:
        raise MetricError(
            f"mAP requires {what} with the parts {', '.join(wanted[:-1])}, per image or per batch, "
            f"got one {describe_value(values)}"
        )
    parts = {}
    for index, part in enumerate(wanted):
        names = [name for name in _ALIASES[part] if name in arrays]
        if part in outputs:
            parts[part] = choose_output(values, outputs[part], what)
        elif names:
            parts[part] = arrays[names[0]]
        elif part != "count" and str(index) in arrays:  # unnamed outputs have the order of `wanted`
            parts[part] = arrays[str(index)]
        elif part != "count":
            raise MetricError(
                f"mAP requires {part} among the {what}, got {format_output_list(arrays)}"
                + ("; set the option outputs" if what == "predictions" else "")
            )
    return parts


def _validate_outputs(outputs: object) -> Mapping[str, str | int]:
    if not isinstance(outputs, Mapping):
        raise ConfigurationError(
            f"mAP: outputs must be names or positions of outputs by part, got {outputs!r}"
        )
    for part, position in outputs.items():
        if part not in _PARTS:
            raise ConfigurationError(
                f"mAP: outputs: unknown part {part!r}{did_you_mean(part, _PARTS)}"
            )
        if not isinstance(position, str | int) or isinstance(position, bool):
            raise ConfigurationError(
                f"mAP: outputs: {part} must be the name or position of an output, got {position!r}"
            )
    return outputs
