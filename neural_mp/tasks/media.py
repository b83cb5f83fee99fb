"""Encoding of images and sound, and decoding of detections and segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from neural_mp.data.images import read_pixels
from neural_mp.data.option_checks import import_package
from neural_mp.errors import DataError
from neural_mp.metrics.texts import decode_ids
from neural_mp.tasks.declaration import Encoded, Outputs
from neural_mp.tasks.folders import ModelFolder
from neural_mp.tasks.rows import SOUND_SUFFIXES, Row
from neural_mp.util.validators import is_integer, preview_value

#: Score from which a detection is an answer, as in the pipelines of `transformers`.
_MIN_SCORE = 0.5
_IGNORED_PIXEL = 255


def encode_images(folder: ModelFolder, rows: Sequence[Row]) -> Encoded:
    """Return the inputs of images; a context is height and width of the image."""
    images = [_read_image(row) for row in rows]
    features = folder.processor(images, input_data_format="channels_last", return_tensors="np")
    return Encoded(folder.select_inputs(dict(features)), [image.shape[:2] for image in images])


def _read_image(row: Row) -> np.ndarray:
    """Return the pixels `[H, W, 3]` of an image: a file, an array, or an object of Pillow."""
    value = row["image"]
    if isinstance(value, str | Path | Mapping):
        return read_pixels(row.path("image"), "RGB", "an image")
    pixels = np.asarray(value.convert("RGB") if hasattr(value, "convert") else value)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise DataError(
            f"{row.origin}: 'image' must be a file or uint8 pixels [H, W, 3], got {pixels.dtype} "
            f"{list(pixels.shape)}"
        )
    return pixels


def encode_sound(folder: ModelFolder, rows: Sequence[Row]) -> Encoded:
    """Return the inputs of sound, padded to the longest."""
    extractor = getattr(folder.processor, "feature_extractor", folder.processor)
    rate = int(extractor.sampling_rate)
    waves = [_read_sound(row, rate) for row in rows]
    # Those of Whisper have one length.
    padding = "max_length" if hasattr(extractor, "chunk_length") else True
    features = extractor(waves, sampling_rate=rate, padding=padding, return_tensors="np")
    return Encoded(folder.select_inputs(dict(features)), [None] * len(rows))


def _read_sound(row: Row, rate: int) -> np.ndarray:
    """Return one channel of sound, from -1 to 1, at a sampling rate in Hz.

    A value is a `.wav` file, or an array at this rate.
    """
    value = row["audio"]
    if not isinstance(value, str | Path | Mapping):
        return np.asarray(value, np.float32)
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    file = row.path("audio")
    try:
        original, samples = wavfile.read(file)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"{row.origin}: {str(file)!r} must be a sound file of {', '.join(SOUND_SUFFIXES)}: "
            f"{error}"
        ) from error
    if samples.size == 0:
        raise DataError(f"{row.origin}: the sound file {str(file)!r} must not be empty")
    wave = samples.astype(np.float32)
    if samples.dtype.kind in "iu":
        limits = np.iinfo(samples.dtype)
        middle = (limits.max + limits.min + 1) / 2
        wave = (wave - middle) / (limits.max - middle + 1)
    wave = wave if wave.ndim == 1 else wave.mean(axis=1)
    divisor = np.gcd(rate, original)
    wave = resample_poly(wave, rate // divisor, original // divisor) if rate != original else wave
    return np.asarray(wave, np.float32)


def decode_speech(folder: ModelFolder, outputs: Outputs, contexts: Sequence[Any]) -> list[str]:
    """Return the texts of a CTC model."""
    return decode_ids(folder.processor.tokenizer, outputs["logits"].argmax(axis=-1), merged=True)


def read_objects(folder: ModelFolder, row: Row) -> dict[str, np.ndarray]:
    """Return the boxes `[M, 4]` (x and y of two corners, in pixels) and classes `[M]` of an image.

    Raises:
        DataError: the objects are not boxes in the form of COCO with their classes.
    """
    value = row["objects"]
    boxes = value.get("bbox") if isinstance(value, Mapping) else None
    classes = (
        next((value[name] for name in ("category", "label", "category_id") if name in value), None)
        if isinstance(value, Mapping)
        else None
    )
    try:
        corners = np.array(boxes if boxes is not None else [[]], np.float64).reshape(-1, 4)
    except (TypeError, ValueError):
        corners = np.zeros((0, 4))
        boxes = None
    if boxes is None or not isinstance(classes, list) or len(classes) != len(corners):
        raise row.fault("objects", "a dict of bbox, a list of [x, y, width, height], and category")
    indices = [_find_class(folder, row, name) for name in classes]
    corners[:, 2:] += corners[:, :2]
    return {"boxes": corners, "labels": np.array(indices, np.int64)}


def _find_class(folder: ModelFolder, row: Row, value: object) -> int:
    names = folder.labels
    if value in names:
        return names.index(str(value))
    if not is_integer(value) or not 0 <= int(str(value)) < len(names):
        raise DataError(
            f"{row.origin}: the category must be a class of the model, "
            f"{', '.join(map(preview_value, names[:10]))}, or its index, got {preview_value(value)}"
        )
    return int(str(value))


def decode_boxes(
    folder: ModelFolder, outputs: Outputs, contexts: Sequence[Any]
) -> list[dict[str, np.ndarray]]:
    """Return boxes `[M, 4]` in pixels, scores and classes `[M]` of each image, of any score."""
    torch = import_package("torch", "object detection", "torch")
    tensors = {
        name: torch.from_numpy(np.array(outputs[name]))
        for name in outputs.by_name
        if name in ("logits", "pred_boxes")
    }
    found = folder.processor.post_process_object_detection(
        SimpleNamespace(**tensors), threshold=0.0, target_sizes=list(contexts)
    )
    return [
        {name: values.numpy() for name, values in image.items() if hasattr(values, "numpy")}
        for image in found
    ]


def answer_boxes(
    folder: ModelFolder, decoded: list[dict[str, np.ndarray]], contexts: Sequence[Any]
) -> list[list[dict[str, Any]]]:
    """Return the objects of each image above a score of .5: class, score and box."""
    answers = []
    for image in decoded:
        columns = zip(image["boxes"], image["scores"], image["labels"], strict=True)
        answers.append(
            [
                {"label": folder.labels[label], "score": float(score), "box": box.tolist()}
                for box, score, label in columns
                if score >= _MIN_SCORE
            ]
        )
    return answers


def read_mask(folder: ModelFolder, row: Row) -> np.ndarray:
    """Return the class of each pixel `[H, W]`; 255 does not count.

    Raises:
        DataError: the mask is no image of classes.
    """
    pixels = read_pixels(row.path("mask"), None, "a mask")
    if pixels.ndim != 2:
        raise DataError(
            f"{row.origin}: 'mask' must be an image of one channel with the class of each pixel, "
            f"got the shape {list(pixels.shape)}"
        )
    classes = pixels.astype(np.int64)
    if getattr(folder.processor, "do_reduce_labels", False):
        classes = np.where(classes == 0, _IGNORED_PIXEL, classes - 1)
    beyond = classes[(classes >= len(folder.labels)) & (classes != _IGNORED_PIXEL)]
    if beyond.size:
        raise DataError(
            f"{row.origin}: 'mask' must have classes from 0 to {len(folder.labels) - 1}, or "
            f"{_IGNORED_PIXEL} where they do not count, got {beyond[0]}"
        )
    return classes


def join_masks(truths: list[np.ndarray]) -> np.ndarray:
    """Return the classes of all pixels of a batch, of images of any sizes."""
    return np.concatenate([mask.reshape(-1) for mask in truths])


def decode_segments(folder: ModelFolder, outputs: Outputs, contexts: Sequence[Any]) -> np.ndarray:
    """Return the class of all pixels of a batch, in the sizes of the images."""
    return join_masks(_segment_images(folder, outputs["logits"], contexts))


def _segment_images(
    folder: ModelFolder, logits: np.ndarray, contexts: Sequence[Any]
) -> list[np.ndarray]:
    torch = import_package("torch", "image segmentation", "torch")
    segments = folder.processor.post_process_semantic_segmentation(
        SimpleNamespace(logits=torch.from_numpy(np.array(logits))), target_sizes=list(contexts)
    )
    return [segment.numpy().astype(np.int64) for segment in segments]


def answer_segments(
    folder: ModelFolder, decoded: np.ndarray, contexts: Sequence[Any]
) -> list[np.ndarray]:
    """Return the class of each pixel `[H, W]` of each image."""
    ends = np.cumsum([height * width for height, width in contexts])
    parts = np.split(decoded, ends[:-1])
    return [part.reshape(size) for part, size in zip(parts, contexts, strict=True)]


def choose_segment_metric(folder: ModelFolder) -> Any:
    """Return the mean IoU over the classes of the model."""
    return ("mIoU", {"num_classes": len(folder.labels), "ignore_index": _IGNORED_PIXEL})
