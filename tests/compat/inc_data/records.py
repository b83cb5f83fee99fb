"""Datasets in TensorFlow's files of records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from inc_data.images import CLASSES, COUNT, SIZE, encoded, pixels
from inc_data.text import QUESTIONS, squad

_NAMES = (b"person", b"bicycle", b"car")
_TOKENS = 384


def of_classes(folder: Path) -> Mapping[str, Any]:
    """Images with their classes, in the form of ImageNet."""
    write(
        folder / "validation-00000-of-00001",
        (
            {
                "image/encoded": [encoded(pixels(index))],
                "image/class/label": [index % CLASSES + 1],
                "image/class/text": [_NAMES[index % CLASSES]],
                "image/format": [b"JPEG"],
                "image/height": [SIZE[0]],
                "image/width": [SIZE[1]],
                "image/object/bbox/xmin": [0.1],
                "image/object/bbox/ymin": [0.1],
                "image/object/bbox/xmax": [0.6],
                "image/object/bbox/ymax": [0.5],
            }
            for index in range(COUNT)
        ),
    )
    return {"root": folder}


def of_boxes(folder: Path, *, numbered: bool = True) -> Mapping[str, Any]:
    """Images with boxes, in the form of COCO; the root is the file itself.

    Classes have a name, and with `numbered` also a number.
    """
    file = folder / "coco_val.record"
    write(
        file,
        (
            {
                "image/encoded": [encoded(pixels(index))],
                "image/source_id": [str(index + 1).encode()],
                "image/filename": [f"{index + 1:012d}.jpg".encode()],
                "image/height": [SIZE[0]],
                "image/width": [SIZE[1]],
                "image/object/class/text": [_NAMES[index % CLASSES]],
                **({"image/object/class/label": [index % CLASSES + 1]} if numbered else {}),
                "image/object/bbox/xmin": [0.1],
                "image/object/bbox/ymin": [0.1],
                "image/object/bbox/xmax": [0.6],
                "image/object/bbox/ymax": [0.5],
            }
            for index in range(COUNT)
        ),
    )
    return {"root": file}


def of_segments(folder: Path) -> Mapping[str, Any]:
    """Images with the class of every pixel, in the form of Pascal VOC."""
    write(
        folder / "val-00000-of-00001.tfrecord",
        (
            {
                "image/encoded": [encoded(pixels(index))],
                "image/filename": [f"{index}.jpg".encode()],
                "image/format": [b"jpeg"],
                "image/height": [SIZE[0]],
                "image/width": [SIZE[1]],
                "image/segmentation/class/encoded": [
                    encoded(np.full(SIZE, index % CLASSES, np.uint8), "PNG")
                ],
                "image/segmentation/class/format": [b"png"],
            }
            for index in range(COUNT)
        ),
    )
    return {"root": folder}


def of_tokens(folder: Path) -> Mapping[str, Any]:
    """Questions as token ids, with the file of their answers."""
    file, answers = folder / "eval.tf_record", folder / "dev-v1.1.json"
    answers.write_text(json.dumps(squad()))
    write(
        file,
        (
            {
                "unique_ids": [1_000_000_000 + index],
                "input_ids": [101, *range(4, 12), 102] + [0] * (_TOKENS - 10),
                "input_mask": [1] * 10 + [0] * (_TOKENS - 10),
                "segment_ids": [0] * 5 + [1] * 5 + [0] * (_TOKENS - 10),
            }
            for index in range(QUESTIONS)
        ),
    )
    return {"root": file, "label_file": answers}


def write(file: Path, samples: Iterable[Mapping[str, list[Any]]]) -> None:
    """Write samples, by name of the feature, into a file."""
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(file)) as writer:
        for sample in samples:
            features = {name: _feature(values) for name, values in sample.items()}
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())


def _feature(values: list[Any]) -> Any:
    import tensorflow as tf

    if isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
