"""Small nets in the forms that the example scripts load; right on the images of `data`.

Two convolutions with fixed weights, the mean of each field of the grid, and a dense layer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from inc_examples.data import CLASSES, COLUMNS, ROWS

#: Channels; enough for INT8 to save time.
WIDTH = 64


def kernels(channels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return kernels `[W, C, 8, 8]`, `[W, W, 3, 3]` and the dense weight `[10, 10]`."""
    rng = np.random.default_rng(0)
    first = rng.uniform(0.5, 1.5, (WIDTH, channels, 8, 8)) / (channels * 64)
    second = rng.uniform(0.5, 1.5, (WIDTH, WIDTH, 3, 3)) / (WIDTH * 9)
    dense = np.eye(CLASSES) + rng.uniform(-0.01, 0.01, (CLASSES, CLASSES))
    return first.astype(np.float32), second.astype(np.float32), dense.astype(np.float32)


def onnx_net(
    path: Path, size: int = 224, channels: int = 3, is_channels_last: bool = False
) -> None:
    """Write a net for images `[N, C, size, size]`, or channels last."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    stride = 4 if size > 32 else 1
    small = -(-size // stride)
    tall, wide = small // ROWS, small // COLUMNS
    pad = (8 - stride) // 2
    pads = [pad] * 2 + [8 - stride - pad] * 2
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], "conv1", strides=[stride] * 2, pads=pads),
        helper.make_node("Relu", ["a"], ["b"], "relu1"),
        helper.make_node("Conv", ["b", "w2"], ["c"], "conv2", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["d"], "relu2"),
        helper.make_node(
            "AveragePool", ["d"], ["e"], "pool", kernel_shape=[tall, wide], strides=[tall, wide]
        ),
        helper.make_node("ReduceMean", ["e"], ["f"], "mean", axes=[1], keepdims=0),
        helper.make_node("Flatten", ["f"], ["g"], "flatten"),
        helper.make_node("Gemm", ["g", "w3"], ["scores"], "fc"),
    ]
    shape = ["batch", channels, size, size]
    input_name = "x"
    if is_channels_last:
        shape, input_name = ["batch", size, size, channels], "image"
        nodes.insert(
            0, helper.make_node("Transpose", [input_name], ["x"], "to_nchw", perm=[0, 3, 1, 2])
        )
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(input_name, TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(w, f"w{n}") for n, w in enumerate(kernels(channels), 1)],
    )
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), str(path))


def keras_net(size: int = 224, channels: int = 3, has_background: bool = False):  # type: ignore[no-untyped-def]
    """Return a Keras net; with a background, class k is output k + 1."""
    import keras

    layers = keras.layers
    stride = 4 if size > 32 else 1
    small = -(-size // stride)
    window = (small // ROWS, small // COLUMNS)
    shape = (size, size, channels) if channels else (size, size)
    inputs = keras.Input(shape, name="input")
    x = inputs if channels else layers.Reshape((size, size, 1))(inputs)
    x = layers.Conv2D(WIDTH, 8, stride, padding="same", activation="relu", name="conv1")(x)
    x = layers.Conv2D(WIDTH, 3, padding="same", activation="relu", name="conv2")(x)
    x = layers.AveragePooling2D(window, window)(x)
    x = layers.Conv2D(1, 1, use_bias=False, name="mean")(x)
    x = layers.Flatten()(x)
    outputs = layers.Dense(CLASSES + has_background, name="output")(x)
    net = keras.Model(inputs, outputs)
    first, second, dense = kernels(channels or 1)
    if has_background:
        dense = np.pad(dense, ((0, 0), (1, 0)))
    bias = np.zeros(CLASSES + has_background, np.float32)
    bias[:has_background] = -100
    zeros = np.zeros(WIDTH, np.float32)
    net.get_layer("conv1").set_weights([first.transpose(2, 3, 1, 0), zeros])
    net.get_layer("conv2").set_weights([second.transpose(2, 3, 1, 0), zeros])
    net.get_layer("mean").set_weights([np.full((1, 1, WIDTH, 1), 1 / WIDTH, np.float32)])
    net.get_layer("output").set_weights([dense, bias])
    return net


def frozen_graph(
    path: Path,
    size: int = 224,
    channels: int = 3,
    has_background: bool = False,
    output: str | None = None,
) -> None:
    """Write the Keras net as a frozen graph with the input `input`; `output`: name to add."""
    from neural_mp.compat.inc.experimental import common

    net = common.Model(keras_net(size, channels, has_background))
    graph = net.graph_def
    if output is not None:
        node = graph.node.add(name=output, op="Identity", input=net.output_tensor_names)
        node.attr["T"].type = 1  # float32
    path.write_bytes(graph.SerializeToString())


def saved_model(
    path: Path, size: int = 224, channels: int = 3, has_background: bool = False
) -> None:
    """Write the Keras net as a SavedModel with the input `input` and the output `output`."""
    keras_net(size, channels, has_background).export(str(path), verbose=False)


def torch_net(path: Path) -> None:
    """Write a module of torch for images of any size."""
    import torch

    first, second, dense = map(torch.from_numpy, kernels(3))
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, WIDTH, 8, 4, padding=2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d((ROWS, COLUMNS)),
        torch.nn.Conv2d(WIDTH, 1, 1),
        torch.nn.Flatten(),
        torch.nn.Linear(CLASSES, CLASSES),
    )
    mean = torch.full((1, WIDTH, 1, 1), 1 / WIDTH)
    for index, weight in ((0, first), (2, second), (5, mean), (7, dense.T.contiguous())):
        net[index].weight.data, net[index].bias.data = weight, torch.zeros(len(weight))
    torch.save(net, path)
