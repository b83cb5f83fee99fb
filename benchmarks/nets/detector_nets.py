"""Detectors in the shapes of YOLO11n, YOLO26n and RT-DETR, trained on synthetic images in minutes.

Images have up to four circles, squares and triangles of several sizes on a noisy ground. The first
detector returns boxes and scores in one array `[N, 4 + C, A]`, the second the best boxes `[N, M,
6]`, the third logits and boxes of queries, as the exports of these models do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

CLASSES, SIDE = 3, 64
#: Bins of the distance to a side, of the distribution that YOLO11 predicts, in cells.
BINS = 8
STRIDES = (4, 8, 16)
#: Boxes that the second detector returns, and queries of the third.
BEST = 30
Scenes = tuple[np.ndarray, list[dict[str, np.ndarray]]]


def draw_scenes(count: int, seed: int) -> Scenes:
    """Return images float32 `[N, 3, SIDE, SIDE]` in 0 … 1, and labels in the form of `mAP`."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    images, labels = [], []
    for _ in range(count):
        image = np.full((3, SIDE, SIDE), 0.5, np.float32)
        image += random.uniform(-0.2, 0.2, (3, 1, 1)).astype(np.float32)
        boxes, classes = list[list[float]](), list[int]()
        for _ in range(int(random.integers(1, 5))):
            size, kind = float(random.uniform(10, 30)), int(random.integers(CLASSES))
            left, top = random.uniform(0, SIDE - size, 2)
            box = [left, top, left + size, top + size]
            if any(_overlap(box, other) > 0.1 for other in boxes):
                continue
            x, y = (columns - left) / size, (rows - top) / size
            inside = (x >= 0) & (x < 1) & (y >= 0) & (y < 1)
            if kind == 0:
                inside &= (x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.25
            elif kind == 2:
                inside &= np.abs(x - 0.5) < y / 2
            image[:, inside] = random.uniform(0, 1, (3, 1))
            boxes.append(box)
            classes.append(kind)
        image += random.normal(0, 0.05, image.shape).astype(np.float32)
        images.append(image.clip(0, 1))
        labels.append(
            {
                "boxes": np.array(boxes, np.float32),
                "labels": np.array(classes, np.int64),
                "size": np.array([SIDE, SIDE]),
            }
        )
    return np.stack(images).astype(np.float32), labels


def _overlap(box: list[float], other: list[float]) -> float:
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    smaller = min((b[2] - b[0]) * (b[3] - b[1]) for b in (box, other))
    return max(width, 0) * max(height, 0) / smaller


def _conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Module:
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.SiLU())


class _Stage(nn.Module):
    """Half of the channels through bottlenecks, all mixed at the end (C3k2)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        half = outputs // 2
        self.first = _conv(inputs, outputs, 1)
        self.inner = nn.Sequential(_conv(half, half), _conv(half, half))
        self.mix = _conv(outputs + half, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        direct, refined = self.first(x).chunk(2, 1)
        return self.mix(torch.cat([direct, refined, refined + self.inner(refined)], 1))


class _Pyramid(nn.Module):
    """Spatial pyramid pooling (SPPF)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.mix = _conv(channels, channels // 2, 1), _conv(2 * channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = [self.first(x)]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, 1, 2))
        return self.mix(torch.cat(pooled, 1))


class Yolo11(nn.Module):
    """Backbone, feature pyramid in both directions, and a head of boxes and scores per level.

    Attributes:
        bins: bins of the distribution of each side; 1 for distances themselves, as in YOLO26.
    """

    def __init__(self, width: int = 12, bins: int = BINS) -> None:
        super().__init__()
        self.bins = bins
        wide = (2 * width, 3 * width, 4 * width)
        self.stem = nn.Sequential(_conv(3, width, 3, 2), _conv(width, wide[0], 3, 2))
        self.stages = nn.ModuleList(
            [_Stage(wide[0], wide[0]), _Stage(wide[1], wide[1]), _Stage(wide[2], wide[2])]
        )
        self.downs = nn.ModuleList([_conv(wide[0], wide[1], 3, 2), _conv(wide[1], wide[2], 3, 2)])
        self.pyramid = _Pyramid(wide[2])
        self.ups = nn.ModuleList(
            [_Stage(wide[2] + wide[1], wide[1]), _Stage(wide[1] + wide[0], wide[0])]
        )
        self.backs = nn.ModuleList([_conv(wide[0], wide[0], 3, 2), _conv(wide[1], wide[1], 3, 2)])
        self.joins = nn.ModuleList(
            [_Stage(wide[0] + wide[1], wide[1]), _Stage(wide[1] + wide[2], wide[2])]
        )
        inner = 2 * width
        self.boxes = nn.ModuleList(
            nn.Sequential(_conv(c, inner), _conv(inner, inner), nn.Conv2d(inner, 4 * bins, 1))
            for c in wide
        )
        self.scores = nn.ModuleList(
            nn.Sequential(
                _conv(c, c, 3, 1, c),
                _conv(c, inner, 1),
                _conv(inner, inner, 3, 1, inner),
                _conv(inner, inner, 1),
                nn.Conv2d(inner, CLASSES, 1),
            )
            for c in wide
        )
        for level in self.scores:
            nn.init.constant_(level[-1].bias, -4.0)  # type: ignore[index]  # objects are rare
        centers, scales = zip(*map(_cells_of, STRIDES), strict=True)
        self.register_buffer("centers", torch.cat(centers, 1))
        self.register_buffer("scales", torch.cat(scales))
        self.register_buffer("steps", torch.arange(bins, dtype=torch.float32)[None, :, None, None])

    def features(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the maps of the levels, the finest first."""
        fine = self.stages[0](self.stem(x))
        middle = self.stages[1](self.downs[0](fine))
        coarse = self.pyramid(self.stages[2](self.downs[1](middle)))
        up = self.ups[0](torch.cat([F.interpolate(coarse, scale_factor=2), middle], 1))
        finest = self.ups[1](torch.cat([F.interpolate(up, scale_factor=2), fine], 1))
        down = self.joins[0](torch.cat([self.backs[0](finest), up], 1))
        return [finest, down, self.joins[1](torch.cat([self.backs[1](down), coarse], 1))]

    def raw(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return distances to the sides in cells `[N, 4, A]` and logits `[N, C, A]`.

        Boxes and scores of a level are joined, then the levels, then both are taken apart, as
        exports of YOLO do.
        """
        levels = [
            torch.cat([box(m), score(m)], 1).flatten(2)
            for m, box, score in zip(self.features(x), self.boxes, self.scores, strict=True)
        ]
        sides, logits = torch.cat(levels, 2).split([4 * self.bins, CLASSES], 1)
        if self.bins == 1:
            return F.softplus(sides), logits
        shares = sides.unflatten(1, (4, self.bins)).transpose(1, 2).softmax(1)
        # The expectation over bins is a convolution with fixed weights in YOLO.
        return F.conv2d(shares, self.steps)[:, 0], logits

    def decoded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return left, top, right, bottom in pixels `[N, 4, A]`, and logits."""
        sides, logits = self.raw(x)
        low, high = self.centers - sides[:, :2], self.centers + sides[:, 2:]
        return torch.cat([low, high], 1) * self.scales, logits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return center, width and height in pixels, and probabilities, `[N, 4 + C, A]`."""
        boxes, logits = self.decoded(x)
        low, high = boxes.chunk(2, 1)
        return torch.cat([(low + high) / 2, high - low, logits.sigmoid()], 1)


def _cells_of(stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the centers of cells `[2, A]` in cells, and the pixels of a cell `[A]`."""
    cells = torch.arange(SIDE // stride) + 0.5
    y, x = torch.meshgrid(cells, cells, indexing="ij")
    centers = torch.stack([x, y]).flatten(1)
    return centers, torch.full((centers.shape[1],), float(stride))


class Yolo26(Yolo11):
    """The same without bins, returning the best boxes by itself."""

    def __init__(self, width: int = 12) -> None:
        super().__init__(width, bins=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return left, top, right, bottom, score and class `[N, BEST, 6]`."""
        boxes, logits = self.decoded(x)
        scores, kinds = logits.sigmoid().transpose(1, 2).max(-1)
        best, cells = scores.topk(BEST)
        chosen = boxes.transpose(1, 2).gather(1, cells[..., None].expand(-1, -1, 4))
        classes = kinds.gather(1, cells)
        return torch.cat([chosen, best[..., None], classes[..., None].float()], 2)


def make_rtdetr() -> nn.Module:
    """Return an untrained RT-DETR of `transformers`, with two decoder layers."""
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

    backbone = RTDetrResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = RTDetrConfig(
        backbone_config=backbone,
        num_labels=CLASSES,
        encoder_hidden_dim=64,
        encoder_in_channels=[32, 48, 64],
        encoder_ffn_dim=128,
        encoder_attention_heads=4,
        d_model=64,
        num_queries=BEST,
        decoder_in_channels=[64, 64, 64],
        decoder_ffn_dim=128,
        decoder_layers=2,
        decoder_attention_heads=4,
        num_denoising=0,
        anchor_image_size=[SIDE, SIDE],
    )
    return RTDetrForObjectDetection(config)


class Queries(nn.Module):
    """An RT-DETR that returns logits and boxes only."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `logits` `[N, Q, C]` and `pred_boxes` `[N, Q, 4]` in fractions."""
        outputs: Any = self.net(pixel_values=x)
        return {"logits": outputs.logits, "pred_boxes": outputs.pred_boxes}


def _yolo_loss(net: nn.Module, images: torch.Tensor, labels: list[dict[str, Any]]) -> torch.Tensor:
    """Return the loss of scores at all cells, and of boxes at the cells near their centers."""
    boxes, logits = net.decoded(images)  # type: ignore[operator]  # a YOLO
    centers = (net.centers * net.scales).T  # type: ignore[operator, union-attr]
    targets = torch.zeros_like(logits)
    box_loss, count = boxes.sum() * 0, 0
    scales: Any = net.scales
    for index, label in enumerate(labels):
        for box, kind in zip(torch.from_numpy(label["boxes"]), label["labels"], strict=True):
            size = float((box[2:] - box[:2]).max())
            stride = STRIDES[int(np.clip(np.log2(size / 9), 0, 2))]
            middle = (box[:2] + box[2:]) / 2
            near = ((centers - middle).abs().amax(1) < 0.75 * stride) & (scales == stride)
            cells = near.nonzero()[:, 0]
            predicted = boxes[index, :, cells].T
            overlap = _paired_overlaps(predicted, box)
            targets[index, int(kind), cells] = overlap.detach().clamp(0.3)
            box_loss = box_loss + (1 - overlap).sum() + (predicted - box).abs().mean(1).sum() / 16
            count += len(cells)
    scores = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    weights = (logits.sigmoid() - targets).abs() ** 1.5 + (targets > 0)
    return ((scores * weights).sum() + 2 * box_loss) / max(count, 1)


def _paired_overlaps(boxes: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
    low, high = torch.maximum(boxes[:, :2], box[:2]), torch.minimum(boxes[:, 2:], box[2:])
    shared = (high - low).clamp(0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp(0).prod(1) + (box[2:] - box[:2]).prod()
    return shared / (areas - shared)


def _query_loss(net: nn.Module, images: torch.Tensor, labels: list[dict[str, Any]]) -> torch.Tensor:
    """Return the loss of `transformers`, which matches queries with objects."""
    targets = []
    for label in labels:
        corners = torch.from_numpy(label["boxes"]) / SIDE
        middle, sides = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
        boxes = torch.cat([middle, sides], 1)
        targets.append({"class_labels": torch.from_numpy(label["labels"]), "boxes": boxes})
    loss: torch.Tensor = net(pixel_values=images, labels=targets).loss
    return loss


Loss = Callable[[nn.Module, torch.Tensor, list[dict[str, Any]]], torch.Tensor]
#: Name → untrained net, its loss, learning rate and epochs.
RECIPES: dict[str, tuple[Callable[[], nn.Module], Loss, float, int]] = {
    "YOLO11n-shaped": (Yolo11, _yolo_loss, 4e-3, 30),
    "YOLO26n-shaped": (Yolo26, _yolo_loss, 4e-3, 30),
    "RT-DETR-shaped": (make_rtdetr, _query_loss, 1e-3, 60),
}


def train_detector(name: str, seed: int, images: int = 200, epochs: int | None = None) -> nn.Module:
    """Return a detector trained on synthetic images, in inference mode."""
    build, loss_of, rate, usual = RECIPES[name]
    torch.manual_seed(seed)
    net, (pixels, labels) = build(), draw_scenes(images, seed)
    steps = (epochs or usual) * (images // 16)
    optimizer = torch.optim.AdamW(net.parameters(), rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    net.train()
    for _, batch in zip(range(steps), _iterate_batches(pixels, labels, seed), strict=False):
        loss = loss_of(net, *batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        schedule.step()
    return (Queries(net) if name.startswith("RT") else net).eval()


def _iterate_batches(
    pixels: np.ndarray, labels: list[dict[str, Any]], seed: int
) -> Iterator[tuple[torch.Tensor, list[dict[str, Any]]]]:
    """Yield batches of 16, half of them mirrored, without end."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(pixels))
        for start in range(0, len(order) - 15, 16):
            part = order[start : start + 16]
            images, chosen = pixels[part], [labels[i] for i in part]
            if random.random() < 0.5:
                images = images[..., ::-1].copy()
                chosen = [_mirrored(label) for label in chosen]
            yield torch.from_numpy(images), chosen


def _mirrored(label: dict[str, Any]) -> dict[str, Any]:
    boxes = label["boxes"].copy()
    boxes[:, [0, 2]] = SIDE - boxes[:, [2, 0]]
    return label | {"boxes": boxes}
