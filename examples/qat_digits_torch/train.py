"""Recover by training the accuracy that INT8 costs a narrow net of depthwise convolutions."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import neural_mp
from neural_mp import training
from neural_mp.core.plan import PrecisionPlan

CHANNELS = 16
LAYERS = ("stem", "depthwise", "pointwise", "head")


class NarrowNet(nn.Module):
    """Input float32 [batch, 1, 8, 8] in 0…1, output 10 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, CHANNELS, 3, padding=1)
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.pointwise = nn.Conv2d(CHANNELS, 2 * CHANNELS, 1, stride=2)
        self.head = nn.Linear(2 * CHANNELS * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.depthwise(F.relu(self.stem(x))))
        return self.head(F.relu(self.pointwise(x)).flatten(1))


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return images and labels for training, and those for the test."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = torch.from_numpy((data.images / 16).astype(np.float32)[order, None])
    labels = torch.from_numpy(data.target[order].astype(np.int64))
    return images[:1200], labels[:1200], images[1200:], labels[1200:]


def batches(images: torch.Tensor, labels: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(images.split(50), labels.split(50), strict=True))


def train(net: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int = 12) -> None:
    """Train in FP32; the learning rate decays along half a cosine."""
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = 5e-3 * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        for x, y in batches(images, labels):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()


@torch.no_grad()
def with_outliers(net: NarrowNet) -> NarrowNet:
    """Return the same function with channels of very different ranges, as in MobileNet."""
    net = copy.deepcopy(net)
    factors = torch.logspace(0, 3, CHANNELS)
    net.stem.weight.mul_(factors[:, None, None, None])
    net.stem.bias.mul_(factors)
    net.depthwise.weight.div_(factors[:, None, None, None])
    return net


@torch.no_grad()
def accuracy(run: object, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((run(images).argmax(1) == labels).float().mean())


def main() -> None:
    torch.manual_seed(0)
    images, labels, test_images, test_labels = digits()
    net = NarrowNet()
    train(net, images, labels)
    net = with_outliers(net).eval()
    plan = PrecisionPlan.from_dict(dict.fromkeys(LAYERS, "int8"))

    simulation = training.quantization_aware(net, plan, calibration=[images[:200]])
    baseline = training.finish(simulation)
    training.fit(
        simulation,
        batches(images, labels),
        F.cross_entropy,
        epochs=10,
        learning_rate=5e-3,
        folder="out/checkpoints",
    )
    result = training.finish(simulation)
    for name, run in {
        "FP32": net,
        "INT8": baseline.model,
        "simulation after training": simulation,
        "INT8 after training": result.model,
    }.items():
        print(f"{name:26} {accuracy(run, test_images, test_labels):.3f}")

    result.save("out/trained")
    loaded = neural_mp.load("out/trained")
    assert accuracy(loaded.model, test_images, test_labels) == accuracy(
        result.model, test_images, test_labels
    )


if __name__ == "__main__":
    main()
