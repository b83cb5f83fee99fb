"""The net of the tests of `autocast`, and a counter of casts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from neural_mp import AutoMixedPrecisionOptions

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class GatedNet(nn.Module):
    """Convolutions, a batch norm, a layer norm, a gate by softmax; [batch, 1, 8, 8] → 10 logits."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3)
        self.batch_norm = nn.BatchNorm2d(16)
        self.hidden, self.layer_norm = nn.Linear(256, 32), nn.LayerNorm(32)
        self.softmax, self.head = nn.Softmax(-1), nn.Linear(32, 10)

    def forward(self, images):
        features = F.relu(self.batch_norm(self.conv1(images)))
        features = self.layer_norm(self.hidden(F.relu(self.conv2(features)).flatten(1)))
        return self.head(features * (1 + self.softmax(features)))


class Casts(TorchDispatchMode):
    """Counts what torch really casts, below all that Python sees."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def amp(**options) -> AutoMixedPrecisionOptions:
    return AutoMixedPrecisionOptions(**options)
