"""Twelve nets for golden files: images, attention and a recurrent layer, in four runtimes."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import onnx
import torch
from nets import small_net
from torch import nn

SAMPLES, TOKENS, WIDTH = 2, 6, 32


class Attention(nn.Module):
    """Two heads of self-attention with a residual stream, a norm and a gated unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.reshape(x.shape[0], TOKENS, 2, WIDTH // 2).transpose(1, 2)
            for part in self.mixed(self.norm(x)).chunk(3, -1)
        )
        weights = torch.softmax(query @ key.transpose(2, 3) / 4.0, -1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(x.shape[0], TOKENS, WIDTH))
        return self.head(x + self.down(self.up(x) * torch.sigmoid(self.gate(x))))


class Recurrent(nn.Module):
    """A bidirectional LSTM before a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.cells(x)[0]))


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval()


#: Net → its module, and the shape of an input.
_MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "images": (small_net, (SAMPLES, 1, 8, 8)),
    "attention": (Attention, (SAMPLES, TOKENS, WIDTH)),
    "recurrent": (Recurrent, (SAMPLES, TOKENS, WIDTH)),
}


def _array(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _torch(name: str) -> tuple[Any, Any]:
    build, shape = _MODULES[name]
    return _seeded(build), torch.from_numpy(_array(shape))


def _onnx(name: str) -> tuple[Any, Any]:
    build, shape = _MODULES[name]
    file = io.BytesIO()
    torch.onnx.export(
        _seeded(build),
        (torch.from_numpy(_array(shape)),),
        file,
        input_names=["x"],
        dynamo=False,
        opset_version=17,
    )
    return onnx.load_from_string(file.getvalue()), {"x": _array(shape)}


def _openvino(name: str) -> tuple[Any, Any]:
    import openvino as ov

    model, feeds = _onnx(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        onnx.save(model, path)
        return ov.convert_model(path).clone(), feeds


def _keras(name: str) -> tuple[Any, Any]:
    import keras
    from keras import layers
    from keras_nets import small_net as images

    keras.utils.clear_session(free_memory=False)  # names of layers are counted
    if name == "images":
        return images(), _array((SAMPLES, 8, 8, 1))
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((TOKENS, WIDTH), name="x")
    if name == "attention":
        normed = layers.LayerNormalization(name="norm")(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, WIDTH // 2, name="mix")(normed, normed)])
        gate = layers.Dense(2 * WIDTH, activation="sigmoid", name="gate")(x)
        gated = layers.Multiply()([layers.Dense(2 * WIDTH, name="up")(x), gate])
        x = layers.Add()([x, layers.Dense(WIDTH, name="down")(gated)])
    else:
        cells = layers.LSTM(16, return_sequences=True, name="cells")
        x = layers.Activation("tanh")(layers.Bidirectional(cells, name="both")(x))
    net = keras.Model(inputs, layers.Dense(10, name="head")(x))
    return net, _array((SAMPLES, TOKENS, WIDTH))


_FRAMEWORKS = {"pytorch": _torch, "onnxrt": _onnx, "openvino": _openvino, "tensorflow": _keras}
#: (framework, net) → function that returns the source and the inputs of one batch.
NETS = {
    (framework, name): partial(build, name)
    for framework, build in _FRAMEWORKS.items()
    for name in _MODULES
}
