"""The nets that files are made of before they are changed; [batch, 1, 8, 8] → 10 logits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn


def torch_net() -> nn.Module:
    """Convolutions, a norm, a pooling and a dense layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32, 10),
    ).eval()


def keras_net() -> Any:
    """The same in Keras, channels last."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.1),
            layers.Dense(10, name="head"),
        ]
    )


def as_onnx(net: nn.Module) -> Any:
    """Return the ONNX model that torch's exporter writes, with an open batch."""
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        torch.onnx.export(
            net.eval(),
            (torch.rand(2, 1, 8, 8),),
            str(path),
            input_names=["image"],
            output_names=["logits"],
            dynamic_axes={"image": {0: "batch"}},
            dynamo=False,  # the newer exporter takes seconds to import
        )
        return onnx.load(path)
