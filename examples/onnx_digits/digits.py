"""An ONNX model for scikit-learn's handwritten digits: 1797 images of 8×8 pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

MODEL = Path(__file__).parent / "out" / "digits_net.onnx"


class Digits:
    """A dataset as neural_mp takes it: `dataset[i]` is `(image, label)`."""

    def __init__(self, split: str) -> None:
        data = load_digits()
        order = np.random.default_rng(0).permutation(len(data.target))
        chosen = {"train": order[:1200], "test": order[1200:]}[split]
        self.images = (data.images[chosen] / 16).astype(np.float32)[:, None]
        self.labels = data.target[chosen].astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        return self.images[index], self.labels[index]


def model_file() -> str:
    """The path of the model: image float32 [batch, 1, 8, 8] in 0…1, 10 logits.

    As if it had come from somewhere: the first time, a torch net is trained and exported.
    """
    if not MODEL.exists():
        print("training a net on scikit-learn's digits and exporting it (about fifteen seconds) …")
        MODEL.parent.mkdir(exist_ok=True)
        _export(_trained(), MODEL)
    return str(MODEL)


def _trained():
    import torch
    from torch import nn
    from torch.nn import functional as F

    def convolution(channels_in: int, channels_out: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        )

    class Residual(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.inner = nn.Sequential(
                convolution(channels, channels), convolution(channels, channels)
            )

        def forward(self, x):
            return self.inner(x) + x

    torch.manual_seed(0)
    net = nn.Sequential(
        convolution(1, 64),
        Residual(64),
        convolution(64, 128, 2),
        Residual(128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    data = Digits("train")
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    for _ in range(6):
        for batch in torch.randperm(len(labels)).split(64):
            loss = F.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval()


def _export(net, path: Path) -> None:
    import torch

    torch.onnx.export(
        net,
        (torch.zeros(2, 1, 8, 8),),
        str(path),
        input_names=["image"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
