"""Object detectors of both versions, with images and boxes in the form of COCO.

All images have one box at the same place; the nets find it in every image, once for each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from inc_data import images, records

from inc_examples.case import ACCURACY_V2, V2, Case, steps

CHANNELS = 64
#: Corners of the box of `inc_data`, relative to the image: top, left, bottom, right.
_BOX = np.array([8 / 80, 8 / 96, 32 / 80, 40 / 96], np.float32)
#: Corners of the box in records.
_RECORD_BOX = np.array([0.1, 0.1, 0.5, 0.6], np.float32)
_FOUND = 3


def _heads(box: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return weight `[C, n]` and bias of each output: number, boxes, scores, classes."""
    rng = np.random.default_rng(1)
    biases = {
        "num_detections": np.array([_FOUND], np.float32),
        "detection_boxes": np.tile(box, _FOUND),
        "detection_scores": np.array([0.9, 0.8, 0.7], np.float32),
        "detection_classes": np.arange(1, _FOUND + 1, dtype=np.float32),
    }
    return {
        name: (rng.uniform(-1e-5, 1e-5, (CHANNELS, len(bias))).astype(np.float32), bias)
        for name, bias in biases.items()
    }


def _kernels() -> tuple[np.ndarray, np.ndarray]:
    """Return kernels `[C, 3, 8, 8]` and `[C, C, 3, 3]`."""
    rng = np.random.default_rng(0)
    first = rng.uniform(-1, 1, (CHANNELS, 3, 8, 8)) / 192
    second = rng.uniform(-1, 1, (CHANNELS, CHANNELS, 3, 3)) / (CHANNELS * 9)
    return first.astype(np.float32), second.astype(np.float32)


def onnx_detector(
    path: Path, outputs: Sequence[str], is_float: bool = False, scale: float = 1.0
) -> None:
    """Write a detector.

    Args:
        path: the file.
        outputs: the outputs in order.
        is_float: whether it takes float32 images, channels first; else uint8, channels last.
        scale: factor of the box.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    node = helper.make_node
    first, second = _kernels()
    weights = {"w1": first, "w2": second, "ends": np.array([0, -1], np.int64)}
    nodes = [
        node("Conv", ["x", "w1"], ["a"], "conv1", strides=[4, 4], pads=[2] * 4),
        node("Relu", ["a"], ["b"], "relu1"),
        node("Conv", ["b", "w2"], ["c"], "conv2", pads=[1] * 4),
        node("Relu", ["c"], ["d"], "relu2"),
        node("GlobalAveragePool", ["d"], ["e"], "pool"),
        node("Flatten", ["e"], ["f"], "flatten"),
    ]
    input_info = ("x", TensorProto.FLOAT, ["batch", 3, "height", "width"])
    if not is_float:
        input_info = ("image", TensorProto.UINT8, ["batch", "height", "width", 3])
        nodes = [
            node("Cast", ["image"], ["floats"], "cast", to=TensorProto.FLOAT),
            node("Transpose", ["floats"], ["x"], "to_nchw", perm=[0, 3, 1, 2]),
            *nodes,
        ]
    heads = _heads(_BOX * np.float32(scale))
    for name in outputs:
        weights[f"w_{name}"], weights[f"b_{name}"] = heads[name]
        flat = f"flat_{name}"
        nodes.append(node("Gemm", ["f", f"w_{name}", f"b_{name}"], [flat], f"gemm_{name}"))
        if name == "detection_boxes":
            weights["box_shape"] = np.array([-1, _FOUND, 4], np.int64)
            nodes.append(node("Reshape", [flat, "box_shape"], [name], "boxes"))
        elif name == "num_detections":
            weights["one_shape"] = np.array([-1], np.int64)
            nodes.append(node("Round", [flat], [f"round_{name}"], f"rounded_{name}"))
            nodes.append(node("Reshape", [f"round_{name}", "one_shape"], [name], "number"))
        elif name == "detection_classes":
            nodes.append(node("Round", [flat], [name], f"rounded_{name}"))
        else:
            nodes.append(node("Identity", [flat], [name], f"named_{name}"))
    graph = helper.make_graph(
        nodes,
        "detector",
        [helper.make_tensor_value_info(*input_info)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), str(path))


def frozen_detector(path: Path) -> None:
    """Write a frozen graph with the names of TensorFlow's model zoo."""
    import tensorflow as tf

    first, second = (kernel.transpose(2, 3, 1, 0) for kernel in _kernels())
    with tf.Graph().as_default() as graph:
        image = tf.compat.v1.placeholder(tf.uint8, (None, None, None, 3), "image_tensor")
        x = tf.cast(image, tf.float32) / 255.0
        x = tf.nn.relu(tf.nn.conv2d(x, first, 4, "SAME"))
        x = tf.reduce_mean(tf.nn.relu(tf.nn.conv2d(x, second, 1, "SAME")), (1, 2))
        for name, (weight, bias) in _heads(_RECORD_BOX).items():
            _named(tf, tf.matmul(x, weight) + bias, name)
    path.write_bytes(graph.as_graph_def().SerializeToString())


def _named(tf: Any, flat: Any, name: str) -> None:
    """Add an output to the graph."""
    if name == "detection_boxes":
        tf.reshape(flat, (-1, _FOUND, 4), name)
    elif name == "num_detections":
        tf.reshape(tf.round(flat), (-1,), name)
    elif name == "detection_classes":
        tf.round(flat, name)
    else:
        tf.identity(flat, name)


def _coco(folder: Path) -> None:
    (folder / "coco").mkdir()
    images.with_boxes(folder / "coco")


def _record(folder: Path) -> None:
    records.of_boxes(folder)


NUMBERED = ("num_detections", "detection_boxes", "detection_scores", "detection_classes")
_ONNX = "examples/onnxrt/object_detection"
_TENSORFLOW = "examples/tensorflow/object_detection/tensorflow_models"


def _onnx_v1(model: str, config: str) -> Case:
    def make(folder: Path) -> None:
        _coco(folder)
        onnx_detector(folder / "net.onnx", NUMBERED)

    common = ("--model_path", "net.onnx", "--config", config)
    return Case(
        f"{_ONNX}/{model}/quantization/ptq",
        make,
        steps(common, ("--output_model", "int8.onnx")),
        paths={"root": "coco"},
        result="int8.onnx",
    )


def _onnx_v2(model: str, outputs: Sequence[str] = NUMBERED, *more: str) -> Case:
    def make(folder: Path) -> None:
        _coco(folder)
        onnx_detector(folder / "net.onnx", outputs, is_float=outputs != NUMBERED)

    common = ("--model_path", "net.onnx", "--data_path", "coco/val2017", *more)
    return Case(
        f"{_ONNX}/{model}/quantization/ptq_static",
        make,
        steps(common, ("--output_model", "int8.onnx", "--quant_format", "QDQ"), ACCURACY_V2),
        result="int8.onnx",
        tag=V2,
    )


def _tensorflow_v1(config: str) -> Case:
    def make(folder: Path) -> None:
        _record(folder)
        frozen_detector(folder / "net.pb")

    common = ("--input-graph", "net.pb", "--config", config)
    return Case(
        f"{_TENSORFLOW}/quantization/ptq",
        make,
        steps(common, ("--output_model", "int8.pb")),
        paths={"root": "coco_val.record"},
        result="int8.pb",
    )


def _tensorflow_v2(model: str) -> Case:
    def make(folder: Path) -> None:
        _record(folder)
        frozen_detector(folder / "net.pb")

    # The first five batches are not timed, and there are twelve images.
    common = ("--input-graph", "net.pb", "--dataset_location", "coco_val.record", "--batch_size=1")
    return Case(
        f"{_TENSORFLOW}/{model}/quantization/ptq",
        make,
        steps(common, ("--output_model", "int8.pb"), ACCURACY_V2),
        result="int8.pb",
        tag=V2,
    )


CASES: tuple[Case, ...] = (
    _onnx_v1("ssd_mobilenet_v1", "ssd_mobilenet_v1.yaml"),
    _onnx_v1("ssd_mobilenet_v2", "ssd_mobilenet_v2.yaml"),
    _onnx_v2("ssd_mobilenet_v1"),
    _onnx_v2("ssd_mobilenet_v2"),
    _onnx_v2("onnx_model_zoo/ssd", ("detection_boxes", "detection_classes", "detection_scores")),
    _tensorflow_v1("ssd_mobilenet_v1.yaml"),
    _tensorflow_v2("ssd_mobilenet_v1"),
    _tensorflow_v2("faster_rcnn_resnet50"),
)
