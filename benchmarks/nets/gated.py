"""A net that INT8 makes slower: few channels, hard-swish, gates of squeeze-and-excite.

Between its small layers runs what has no integer kernel, so that each of them converts what it
reads and what it gives, which takes longer than the layer saves. Trained a little on scikit-learn's
digits; in torch, in Keras, and in ONNX as torch's exporter writes the first.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.measurement.search_data import Digits

CHANNELS, EXPANSION, BLOCKS, SQUEEZED = 16, 2, 4, 4
_EPOCHS, _STEP, _BATCH = 6, 3e-3, 50


def torch_net() -> Any:
    """The net in torch, trained."""
    import torch
    from torch import nn

    class HardSwish(nn.Module):
        """Written out, as in many a net that people trained."""

        def forward(self, x: Any) -> Any:
            return x * nn.functional.relu6(x + 3) / 6

    class Gate(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.squeeze = nn.Conv2d(width, width // SQUEEZED, 1)
            self.excite = nn.Conv2d(width // SQUEEZED, width, 1)

        def forward(self, x: Any) -> Any:
            means = x.mean((2, 3), keepdim=True)
            return x * self.excite(self.squeeze(means).relu()).sigmoid()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = CHANNELS * EXPANSION
            self.layers = nn.Sequential(
                nn.Conv2d(CHANNELS, width, 1, bias=False),
                nn.BatchNorm2d(width),
                HardSwish(),
                nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
                nn.BatchNorm2d(width),
                HardSwish(),
                Gate(width),
                nn.Conv2d(width, CHANNELS, 1, bias=False),
                nn.BatchNorm2d(CHANNELS),
            )

        def forward(self, x: Any) -> Any:
            return x + self.layers(x)

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1),
        HardSwish(),
        *(Block() for _ in range(BLOCKS)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(CHANNELS, 10),
    )
    _train(net)
    return net.eval()


def _train(net: Any) -> None:
    import torch

    data = Digits("train")
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    optimizer = torch.optim.Adam(net.parameters(), _STEP)
    for _ in range(_EPOCHS):
        for batch in torch.randperm(len(labels)).split(_BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()


def keras_net() -> Any:
    """The same net in Keras, trained there."""
    import keras
    from keras import layers

    def gated(x: Any, width: int) -> Any:
        means = layers.GlobalAveragePooling2D(keepdims=True)(x)
        squeezed = layers.Conv2D(width // SQUEEZED, 1, activation="relu")(means)
        return layers.Multiply()([x, layers.Conv2D(width, 1, activation="sigmoid")(squeezed)])

    def block(x: Any) -> Any:
        width = CHANNELS * EXPANSION
        y = layers.Conv2D(width, 1, use_bias=False)(x)
        y = layers.Activation("hard_silu")(layers.BatchNormalization(momentum=0.9)(y))
        y = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(y)
        y = layers.Activation("hard_silu")(layers.BatchNormalization(momentum=0.9)(y))
        y = layers.Conv2D(CHANNELS, 1, use_bias=False)(gated(y, width))
        return layers.Add()([x, layers.BatchNormalization(momentum=0.9)(y)])

    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(CHANNELS, 3, padding="same", activation="hard_silu")(inputs)
    for _ in range(BLOCKS):
        x = block(x)
    net = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.Adam(_STEP), loss)
    data = Digits("train", channels_last=True)
    net.fit(data.images, data.labels, batch_size=_BATCH, epochs=_EPOCHS, verbose=0)
    return net


def onnx_net() -> bytes:
    """The net in torch as torch's exporter writes it."""
    from benchmarks.nets.vision_nets import exported

    return exported(torch_net(), Digits("test").images[:2])


#: Framework → makes its form of the net.
BUILD = {"pytorch": torch_net, "tensorflow": keras_net, "onnxrt": onnx_net}
