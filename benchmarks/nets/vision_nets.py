"""ResNet-50 and MobileNetV2 for every framework, EfficientNet-B0 in torch and Keras, and images.

Weights are random. What batch norms subtract and divide by is that of a pass over images, as it is
after training. In a random net each layer tears images further apart, and noise with them; in a
trained one much passes through. So the branches of ResNet-50 are small beside what passes by them,
and most of what MobileNetV2 clips lies between the limits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.nets.case import write_onnx

_SIDE, _CELLS = 224, 14
#: A factor of the last batch norm of ResNet-50's branches; what is added ahead of MobileNetV2's
#: activations.
_BRANCH, _LIFT = 0.3, 1.0


def images(count: int, seed: int) -> np.ndarray:
    """Soft blots with fine noise over them: as in photographs, neighbours are alike."""
    draw = np.random.default_rng(seed)
    coarse = draw.standard_normal((count, 3, _CELLS, _CELLS), dtype=np.float32)
    blots = coarse.repeat(_SIDE // _CELLS, 2).repeat(_SIDE // _CELLS, 3)
    fine = draw.standard_normal((count, 3, _SIDE, _SIDE), dtype=np.float32)
    return blots + fine / 4


def torch_net(name: str) -> Any:
    """A model in torch."""
    import torch

    from benchmarks.nets.deployed_nets import efficientnet_b0, mobilenetv2, resnet50

    build = {"resnet50": resnet50, "mobilenetv2": mobilenetv2, "efficientnetb0": efficientnet_b0}
    net = build[name]()
    for path, module in net.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
            if path.endswith("norm3"):
                module.weight.data *= _BRANCH
        elif getattr(module, "shortcut", None) is True and name == "efficientnetb0":
            module.layers[-1].weight.data *= _BRANCH
        elif isinstance(module, torch.nn.Sequential):
            for layer, following in pairwise(module):
                if isinstance(following, torch.nn.ReLU6):
                    layer.bias.data += _LIFT
    with torch.no_grad():
        net.train()(torch.from_numpy(images(8, seed=0)))
    return net.eval()


_IN_KERAS = {
    "resnet50": "ResNet50",
    "mobilenetv2": "MobileNetV2",
    "efficientnetb0": "EfficientNetB0",
}


def keras_net(name: str) -> Any:
    """A model of `keras.applications`, without its softmax."""
    import keras

    from benchmarks.nets import keras_models

    net = keras_models.build(_IN_KERAS[name])
    net.layers[-1].activation = keras.activations.linear
    for layer in net.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
            if layer.name.endswith("_3_bn"):
                layer.gamma.assign(layer.gamma * _BRANCH)
            elif name == "mobilenetv2" and not layer.name.endswith("project_BN"):
                layer.beta.assign(layer.beta + _LIFT)
    net(images(8, seed=0).transpose(0, 2, 3, 1), training=True)
    return net


def onnx_net(name: str) -> bytes:
    """The model in torch as torch's exporter writes it, its batch open."""
    return exported(torch_net(name), images(2, seed=0))


def exported(net: Any, example: np.ndarray) -> bytes:
    """A net in torch as an ONNX file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "net.onnx"
        write_onnx(net, {"x": example}, file)
        return file.read_bytes()


#: Framework → makes its model of a name.
BUILD: dict[str, Callable[[str], Any]] = {
    "pytorch": torch_net,
    "tensorflow": keras_net,
    "onnxrt": onnx_net,
}


def inputs_for(framework: str, count: int, seed: int) -> np.ndarray:
    """Images as the models of a framework take them."""
    batch = images(count, seed)
    return batch.transpose(0, 2, 3, 1).copy() if framework == "tensorflow" else batch
