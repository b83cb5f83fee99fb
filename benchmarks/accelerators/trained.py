"""Nets trained within minutes on scikit-learn's digits, as pictures, texts and scenes.

Texts are the dark pixels of a digit: a token is a place and a quarter of the darkness; some pixels
are lost, so that lengths differ. Scenes have up to three digits of several sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from benchmarks.accelerators.fidelity import Detections, MaskOverlap
from benchmarks.nets.case import write_onnx
from benchmarks.nets.digit_nets import (
    DistilBert,
    MobileViT,
    UNet,
    VisionTransformer,
    Yolo,
)
from benchmarks.real.case import Accuracy, Batches, Case, Split

#: Side of pictures and of scenes, in pixels.
SIDE, SCENE_SIDE = 16, 32
#: Tokens of a text, and of the vocabulary: padding, the start, and pixels by darkness.
LENGTH, LEVELS = 40, 4
VOCABULARY = 2 + 64 * LEVELS
#: Samples for training, calibration and evaluation, and of a batch.
TRAINED, CALIBRATED, EVALUATED, BATCH = 1600, 64, 480, 32
#: Standard deviation of the noise, where strokes are 1, and the share of lost pixels of texts.
_NOISE, _LOST = 0.3, 0.15

Arrays = tuple[Any, np.ndarray]


@cache
def _all_digits() -> Any:
    return load_digits()


def _digits(count: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures [count, 8, 8] within 0 … 1, and their classes."""
    digits = _all_digits()
    chosen = draw.integers(0, len(digits.images), count)
    return digits.images[chosen] / 16, digits.target[chosen]


def _enlarged(pictures: np.ndarray, side: int) -> np.ndarray:
    tensor = torch.tensor(pictures, dtype=torch.float32)[:, None]
    return F.interpolate(tensor, (side, side), mode="bilinear").numpy()


def pictures(count: int, seed: int, side: int = SIDE, noise: float = _NOISE) -> Arrays:
    """Return noisy pictures [count, 1, side, side] and their classes."""
    draw = np.random.default_rng(seed)
    images, classes = _digits(count, draw)
    clean = _enlarged(images, side)
    return (clean + noise * draw.standard_normal(clean.shape)).astype(np.float32), classes


def strokes(count: int, seed: int) -> Arrays:
    """Return noisy pictures and the masks of their strokes, of the same shape."""
    draw = np.random.default_rng(seed)
    clean = _enlarged(_digits(count, draw)[0], SIDE)
    noisy = clean + 2 * _NOISE * draw.standard_normal(clean.shape)
    return noisy.astype(np.float32), (clean > 0.5).astype(np.float32)


def texts(count: int, seed: int) -> Arrays:
    """Return tokens int64 and masks float32 [count, LENGTH], and the classes."""
    draw = np.random.default_rng(seed)
    images, classes = _digits(count, draw)
    ids = np.zeros((count, LENGTH), np.int64)
    ids[:, 0] = 1
    for row, image in zip(ids, images.reshape(count, 64), strict=True):
        places = np.flatnonzero((image > 0.1) & (draw.random(64) > _LOST))[: LENGTH - 1]
        levels = np.minimum((image[places] * LEVELS).astype(int), LEVELS - 1)
        row[1 : 1 + len(places)] = 2 + places * LEVELS + levels
    return {"ids": ids, "mask": (ids > 0).astype(np.float32)}, classes


def scenes(count: int, seed: int, size: int = SCENE_SIDE) -> Arrays:
    """Return scenes [count, 1, size, size], and boxes with classes [count, 3, 5].

    Rows are left, top, right, bottom and class; those without a digit are -1.
    """
    draw, half = np.random.default_rng(seed), size // 2
    shown = np.zeros((count, 1, size, size), np.float32)
    objects = np.full((count, 3, 5), -1, np.float32)
    for scene, boxes in zip(shown, objects, strict=True):
        number = int(draw.integers(1, 4))
        images, classes = _digits(number, draw)
        corners = draw.permutation(4)[:number]
        for box, image, kind, corner in zip(boxes, images, classes, corners, strict=False):
            side = int(draw.integers(half // 2, half - 2))
            place = half * np.array([corner % 2, corner // 2])
            left, top = draw.integers(0, half + 1 - side, 2) + place
            scene[0, top : top + side, left : left + side] = _enlarged(image[None], side)[0, 0]
            box[:] = left, top, left + side, top + side, kind
    noisy = shown + _NOISE / 2 * draw.standard_normal(shown.shape)
    return noisy.astype(np.float32), objects


def _class_loss(net: nn.Module, inputs: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(*inputs), labels)


def _mask_loss(net: nn.Module, inputs: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(net(*inputs), labels)


def _detection_loss(
    net: nn.Module, inputs: list[torch.Tensor], objects: torch.Tensor
) -> torch.Tensor:
    """Return the loss of scores at all cells, and of boxes at the cells of their centers."""
    boxes, logits = net.raw(*inputs)  # type: ignore[operator]  # a detector
    cells = SCENE_SIDE // Yolo.stride
    scene, row = (objects[..., 4] >= 0).nonzero(as_tuple=True)
    targets = objects[scene, row]
    centers = (targets[:, :2] + targets[:, 2:4]) / 2 / Yolo.stride
    cell = centers[:, 1].long().clamp(max=cells - 1) * cells + centers[:, 0].long()
    scores = torch.zeros_like(logits)
    scores[scene, targets[:, 4].long(), cell] = 1.0
    shown = F.binary_cross_entropy_with_logits(logits, scores, reduction="sum") / len(targets)
    return shown + (boxes[scene, :, cell] - targets[:, :4]).abs().mean() / Yolo.stride


@dataclass(frozen=True)
class _Recipe:
    """A net and its training.

    Attributes:
        net: makes the untrained net.
        data: count and seed → inputs and labels.
        loss: of a net, its inputs and labels.
        metric: makes the metric of the evaluation.
        epochs: passes over the training data.
    """

    net: Callable[[], nn.Module]
    data: Callable[[int, int], Arrays]
    loss: Callable[..., torch.Tensor]
    metric: Callable[[], Any]
    epochs: int


RECIPES: Mapping[str, _Recipe] = {
    "DistilBERT": _Recipe(partial(DistilBert, VOCABULARY, LENGTH), texts, _class_loss, Accuracy, 4),
    "MPNet": _Recipe(
        partial(DistilBert, VOCABULARY, LENGTH, has_bias=True), texts, _class_loss, Accuracy, 8
    ),
    "ViT": _Recipe(partial(VisionTransformer, SIDE), pictures, _class_loss, Accuracy, 8),
    "MobileViT": _Recipe(MobileViT, pictures, _class_loss, Accuracy, 4),
    "U-Net": _Recipe(UNet, strokes, _mask_loss, partial(MaskOverlap, 0.0), 2),
    "YOLO": _Recipe(partial(Yolo, SCENE_SIDE), scenes, _detection_loss, Detections, 14),
}
_LEARNING_RATE = 5e-3


def _arrays_of(inputs: Any) -> list[np.ndarray]:
    return list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]


def _part_of(inputs: Any, part: slice) -> Any:
    if isinstance(inputs, Mapping):
        return {name: array[part] for name, array in inputs.items()}
    return inputs[part]


@cache
def trained_net(name: str, seed: int) -> nn.Module:
    """Return a net by its name, trained from a seed, in inference mode."""
    recipe = RECIPES[name]
    torch.manual_seed(seed)
    net = recipe.net()
    inputs, labels = recipe.data(TRAINED, seed)
    tensors, expected = list(map(torch.from_numpy, _arrays_of(inputs))), torch.from_numpy(labels)
    steps = recipe.epochs * TRAINED // BATCH
    optimizer = torch.optim.Adam(net.parameters(), _LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, steps)
    for step in range(steps):
        start = step * BATCH % TRAINED
        part = slice(start, start + BATCH)
        loss = recipe.loss(net, [tensor[part] for tensor in tensors], expected[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


def trained_case(name: str, seed: int) -> Case:
    """Return a trained net as ONNX, with its data and metric."""
    recipe = RECIPES[name]

    def source(scratch: Path) -> str:
        inputs, _ = recipe.data(2, seed)
        named = inputs if isinstance(inputs, Mapping) else {"x": inputs}
        return write_onnx(trained_net(name, seed), named, scratch / "net.onnx", opset_version=21)

    def batches(split: Split) -> Batches:
        count, own_seed = (
            (CALIBRATED, seed + 1) if split == "calibration" else (EVALUATED, seed + 2)
        )
        inputs, labels = recipe.data(count, own_seed)
        parts = (slice(i, i + BATCH) for i in range(0, count - BATCH + 1, BATCH))
        return Batches([(_part_of(inputs, part), labels[part]) for part in parts], BATCH)

    return Case("onnxrt", source, batches, recipe.metric, ())
