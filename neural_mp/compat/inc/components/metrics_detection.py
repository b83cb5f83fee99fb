"""Mean average precision of Intel Neural Compressor (INC): mAP, COCOmAP, VOCmAP, COCOmAPv2.

Predictions are boxes `[N, M, 4]`, each `[ymin, xmin, ymax, xmax]`, their scores `[N, M]` and COCO
class ids `[N, M]`, and optionally the number of valid boxes, `[N]` or `[N, 1]`. Labels are, per
image, boxes `[M, 4]` in the same unit, class names `[M]` or class ids `[M]`, the other empty, and
the image's name or number. Repeated images are skipped. Classes outside COCO are ignored, even if
a label file names them. The sizes small, medium and large are areas in pixels; boxes in fractions
of the image all count as small.

Source of the definitions: `neural_compressor/experimental/metric/` (`metric.py`,
`coco_tools.py`) of release 1.14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from neural_mp.compat.inc.components.registries import METRICS, register_for, to_text
from neural_mp.config.source import read_file
from neural_mp.data.option_checks import check_existing_path, check_one_of, check_whole_number
from neural_mp.errors import ConfigurationError, MetricError, did_you_mean
from neural_mp.metrics.coco_map import (
    ALL_OVERLAPS,
    SUMMARY,
    Boxes,
    import_coco_tools,
    parse_overlaps,
    summarize_detections,
)
from neural_mp.util.pytree import convert_to_numpy
from neural_mp.util.text import with_article

_NAMES = """
    person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light,
    fire hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant,
    bear, zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard,
    sports ball, kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle,
    wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot,
    hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop,
    mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock,
    vase, scissors, teddy bear, hair drier, toothbrush
"""
#: COCO ids that the detection data of 2017 do not use.
_UNUSED = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
#: COCO class id → name. Source: `annotations/instances_val2017.json` of cocodataset.org.
CATEGORIES: Mapping[int, str] = dict(
    zip(
        (number for number in range(1, 91) if number not in _UNUSED),
        (name.strip() for name in _NAMES.split(",")),
        strict=True,
    )
)


_KEYS = tuple(f"DetectionBoxes_{name}" for name in SUMMARY)
_OUTPUTS = ("num_detections", "boxes", "scores", "classes")


@register_for(METRICS, "mAP")
class MeanAveragePrecision:
    """Mean average precision over the classes of COCO.

    Outputs are boxes, scores and classes, or the number of detections followed by these.

    Args:
        anno_path: a YAML file of `name: id`; default: the classes of COCO.
        iou_thrs: minimum overlap (intersection over union) of a detected box, 0 to 1, or
            `0.5:0.05:0.95` for the mean over these thresholds.
        map_points: 0 for the area under the precision-recall curve; 11 or 101 for the mean at
            that number of recalls.
        map_key: value of COCO's summary to return, e.g. `DetectionBoxes_Precision/mAP` or
            `DetectionBoxes_Recall/AR@100`. Values for an overlap outside `iou_thrs` are -1. With
            `map_points` 0, recall is always 1 in INC, but correct here.
    """

    running: ClassVar[bool] = False  # slow, and not a mean over samples
    higher_is_better: ClassVar[bool] = True
    name: ClassVar[str] = "mAP"
    #: Values of `iou_thrs` and `map_points` in place of the options, as in INC.
    fixed: ClassVar[tuple[float | str, int] | None] = None

    def __init__(
        self,
        anno_path: str | None = None,
        iou_thrs: float | str | None = 0.5,
        map_points: int | None = 0,
        map_key: str = _KEYS[0],
    ) -> None:
        import_coco_tools(self.name)
        iou_thrs, map_points = self.fixed or (iou_thrs, map_points)
        self._ids = (
            {name: number for number, name in CATEGORIES.items()}
            if anno_path is None
            else _read_class_ids(f"{self.name}: anno_path", anno_path)
        )
        self._overlaps = parse_overlaps(f"{self.name}: iou_thrs", iou_thrs)
        if isinstance(map_points, bool) or map_points not in (0, 11, 101):
            raise ConfigurationError(
                f"{self.name}: map_points must be 0, 11 or 101, got {map_points!r}"
            )
        self._recalls = np.linspace(0, 1, int(map_points)) if map_points else None
        self._key = check_one_of(f"{self.name}: map_key", map_key, _KEYS)
        self.reset()

    def reset(self) -> None:
        """Reset the state."""
        self._truth: dict[str, Boxes] = {}
        self._found: dict[str, Boxes] = {}

    def update(self, preds: object, labels: object, sample_weight: object = None) -> None:
        """Update with one batch."""
        outputs = [_items_by_image(output) for output in _list_outputs(preds, "predictions")]
        positions = self._map_output_positions(len(outputs))
        if not isinstance(labels, list | tuple) or len(labels) != 4:
            raise MetricError(
                f"{self.name}: labels must be (boxes, class names, class ids, images), got "
                f"{_describe_size(labels)}"
            )
        corners, names, ids, images = map(_items_by_image, labels)
        chosen = {what: outputs[position] for what, position in positions.items()}
        for what, output in {**chosen, "labelled boxes": corners}.items():
            if len(output) != len(images):
                raise MetricError(
                    f"{self.name}: the first axis must be the images of a batch, got {what} for "
                    f"{len(output)} images and labels of {len(images)}"
                )
        for i, image in enumerate(map(to_text, images)):
            if image not in self._truth:
                classes = self._read_class_ids(_item_of_image(names, i), _item_of_image(ids, i))
                self._truth[image] = self._validate_boxes("labels", corners[i], classes)
                self._found[image] = self._read_detected_boxes(
                    {w: out[i] for w, out in chosen.items()}
                )

    def merge(self, other: MeanAveragePrecision) -> None:
        """Add the images of another instance that are not yet present."""
        for image in other._truth:
            self._truth.setdefault(image, other._truth[image])
            self._found.setdefault(image, other._found[image])

    def result(self) -> float:
        """Return the value since the last reset, 0 to 1.

        0 before any labelled box; -1 if undefined, e.g. for the precision of boxes of a size that
        does not occur.
        """
        if not any(
            np.isin(boxes.classes, list(CATEGORIES)).any() for boxes in self._truth.values()
        ):
            return 0.0
        values = summarize_detections(
            self._truth, self._found, self._overlaps, self._recalls, CATEGORIES
        )
        return values[self._key.removeprefix("DetectionBoxes_")]

    def _map_output_positions(self, count: int) -> dict[str, int]:
        """Return the index of each output, by name, among `count` outputs."""
        if count not in (3, 4):
            raise MetricError(
                f"{self.name}: outputs must be boxes, scores and classes, optionally after the "
                f"number of detections, got {count} outputs; use COCOmAPv2 for another order"
            )
        return {what: i for i, what in enumerate(_OUTPUTS[4 - count :])}

    def _read_detected_boxes(self, outputs: Mapping[str, Any]) -> Boxes:
        count = outputs.get("num_detections")
        until = None if count is None else int(convert_to_numpy(count).reshape(-1)[0])
        corners, scores, classes = (
            convert_to_numpy(outputs[what])[:until] for what in _OUTPUTS[1:]
        )
        return self._validate_boxes("predictions", corners, classes, scores)

    def _validate_boxes(
        self, what: str, corners: object, classes: np.ndarray, scores: np.ndarray | None = None
    ) -> Boxes:
        corners = convert_to_numpy(corners)
        corners = corners.reshape(-1, 4) if corners.size == 0 else corners
        rows = {corners.shape[:-1], classes.shape}
        if scores is not None:
            rows.add(scores.shape)
        if corners.ndim != 2 or corners.shape[1] != 4 or len(rows) != 1:
            shapes = f"boxes {corners.shape}, classes {classes.shape}"
            shapes += "" if scores is None else f", scores {scores.shape}"
            raise MetricError(
                f"{self.name}: {what} of an image must be boxes [M, 4] with M classes and scores, "
                f"got {shapes}"
            )
        return Boxes(corners, classes, scores)

    def _read_class_ids(self, names: Sequence[Any], ids: object) -> np.ndarray:
        """Return the class ids of one image's boxes, from the names if there are no ids."""
        class_ids = convert_to_numpy(ids)
        if class_ids.size or not len(names):
            return class_ids
        class_names = [to_text(name) for name in _items_by_image(names)]
        for key in class_names:
            if key not in self._ids:
                raise MetricError(
                    f"{self.name}: unknown class {key!r} in a label{did_you_mean(key, self._ids)}"
                )
        return np.array([self._ids[key] for key in class_names])


@register_for(METRICS, "COCOmAP")
class COCOMeanAveragePrecision(MeanAveragePrecision):
    """`mAP` as in COCO: ten overlaps, 101 recalls, regardless of `iou_thrs` and `map_points`."""

    name = "COCOmAP"
    fixed = (ALL_OVERLAPS, 101)


@register_for(METRICS, "VOCmAP")
class VOCMeanAveragePrecision(MeanAveragePrecision):
    """`mAP` as in VOC: the area under the curve at an overlap of 0.5, regardless of options."""

    name = "VOCmAP"
    fixed = (0.5, 0)


@register_for(METRICS, "COCOmAPv2")
class COCOMeanAveragePrecisionV2(MeanAveragePrecision):
    """`mAP` for outputs in any order.

    Options are those of `mAP`, and `output_index_mapping`: positions, from 0, of the outputs
    `boxes`, `scores`, `classes` and `num_detections`; -1 if the model has no `num_detections`.
    """

    name = "COCOmAPv2"

    def __init__(
        self,
        anno_path: str | None = None,
        iou_thrs: float | str = ALL_OVERLAPS,
        map_points: int = 101,
        map_key: str = _KEYS[0],
        output_index_mapping: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(anno_path, iou_thrs, map_points, map_key)
        self._mapping = _parse_mapping("COCOmAPv2: output_index_mapping", output_index_mapping)

    def _map_output_positions(self, count: int) -> dict[str, int]:
        beyond = {what: position for what, position in self._mapping.items() if position >= count}
        if beyond:
            raise MetricError(
                f"COCOmAPv2: {' and '.join(beyond)} must be among the {count} outputs, got "
                f"position {max(beyond.values())} (from 0); set output_index_mapping"
            )
        return dict(self._mapping)


def _parse_mapping(option: str, value: object) -> dict[str, int]:
    if value is None:
        return {"boxes": 0, "scores": 1, "classes": 2}
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{option} must be positions by name of output, got {value!r}")
    for what in value:
        if what not in _OUTPUTS:
            raise ConfigurationError(f"{option}: unknown {what!r}{did_you_mean(what, _OUTPUTS)}")
    for what in _OUTPUTS[1:]:
        if what not in value:
            raise ConfigurationError(f"{option} must hold the position of {what!r}, got {value!r}")
    positions = {what: check_whole_number(f"{option}: {what}", value[what], -1) for what in value}
    if min(positions[what] for what in _OUTPUTS[1:]) < 0:
        raise ConfigurationError(f"{option}: only num_detections can be -1, got {value!r}")
    return {what: position for what, position in positions.items() if position >= 0}


def _read_class_ids(option: str, path: object) -> dict[str, int]:
    file = check_existing_path(option, path)
    requirement = "must be a YAML file with a line 'name: id' for each class"
    try:
        content = read_file(file).data
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{option} {requirement}; {file} cannot be read: {error}"
        ) from error
    is_mapping = isinstance(content, Mapping) and content
    if not is_mapping or not all(isinstance(number, int) for number in content.values()):
        raise ConfigurationError(f"{option} {requirement}, got {file} with another structure")
    return {str(name): number for name, number in content.items()}


def _list_outputs(values: object, what: str) -> list[Any]:
    if isinstance(values, Mapping):
        return list(values.values())
    if not isinstance(values, list | tuple):
        raise MetricError(f"mAP: {what} must be several outputs, got {_describe_size(values)}")
    return list(values)


def _items_by_image(values: object) -> Sequence[Any]:
    """Return an array with images on the first axis, or a list with one array per image."""
    if isinstance(values, list | tuple):
        return values
    return np.atleast_1d(convert_to_numpy(values))  # type: ignore[return-value]


def _item_of_image(values: Sequence[Any], index: int) -> Any:
    """Return the part of one image; empty if the whole batch lacks the part."""
    return values[index] if index < len(values) else np.array([])


def _describe_size(values: object) -> str:
    of = f" of {len(values)}" if isinstance(values, list | tuple | dict) else ""
    return f"{with_article(type(values).__name__)}{of}"
