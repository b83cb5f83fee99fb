"""What a metric receives of a model with several outputs, in every framework."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from torch import nn
from transformers.modeling_outputs import SemanticSegmenterOutput

from neural_mp import MixedPrecision

IMAGES = (load_digits().images[:60, None] / 16).astype(np.float32)
MASKS = np.digitize(IMAGES[:, 0], [0.25, 0.75], right=True)
KINDS = load_digits().target[:60]
#: A convolution that tells how far a pixel is from each of three shades: 3 channels, and biases.
SHADES = np.array([0.0, 0.5, 1.0], np.float32)
WEIGHT, BIAS = (8 * SHADES)[:, None, None, None], -4 * SHADES**2


class Segmenter(nn.Module):
    """Three outputs: scores of a mask, ten of a kind that are of no use, and the sum of the ink."""

    def __init__(self, form):
        super().__init__()
        self.form, self.conv, self.kind = form, nn.Conv2d(1, 3, 1), nn.Linear(64, 10)
        with torch.no_grad():
            self.conv.weight.copy_(torch.from_numpy(WEIGHT))
            self.conv.bias.copy_(torch.from_numpy(BIAS))

    def forward(self, image):
        mask, kind = self.conv(image), self.kind(image.flatten(1))
        ink = image.mean((1, 2, 3))
        if self.form == "dict":
            return {"mask": mask, "kind": kind, "ink": ink}
        if self.form == "dataclass":
            return SemanticSegmenterOutput(logits=mask, hidden_states=(kind, ink))
        return mask, kind, ink


def onnx_model(form):
    def constant(name, values):
        return numpy_helper.from_array(np.asarray(values), name)

    weights = np.zeros((64, 10), np.float32)
    nodes = [
        helper.make_node("Conv", ["image", "w", "b"], ["mask"], name="conv"),
        helper.make_node("Flatten", ["image"], ["flat"], name="flatten"),
        helper.make_node("MatMul", ["flat", "k"], ["kind"], name="matmul"),
        helper.make_node("ReduceMean", ["flat", "axes"], ["ink"], name="mean", keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "segmenter",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [
            helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["N", 3, 8, 8]),
            helper.make_tensor_value_info("kind", TensorProto.FLOAT, ["N", 10]),
            helper.make_tensor_value_info("ink", TensorProto.FLOAT, ["N"]),
        ],
        [
            constant("w", WEIGHT),
            constant("b", BIAS),
            constant("k", weights),
            constant("axes", np.array([1], np.int64)),
        ],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=onnx.IR_VERSION_2023_5_5
    )


def keras_model(form):
    image = keras.Input((8, 8, 1), name="image")
    mask = keras.layers.Conv2D(3, 1, name="mask")
    flat = keras.layers.Flatten()(image)
    outputs = [mask(image), keras.layers.Dense(10)(flat)]
    mask.set_weights([WEIGHT.transpose(2, 3, 1, 0), BIAS])
    named = {"mask": outputs[0], "kind": outputs[1]}
    return keras.Model(image, named if form == "dict" else outputs)


#: Model and images → the options of mIoU, by name where there is one, and what the outputs are.
CASES = {
    "PyTorch, dict": (lambda: Segmenter("dict"), {"output": "mask"}, ("mask", "kind", "ink")),
    "PyTorch, tuple": (lambda: Segmenter("tuple"), {"output": 0}, ("0", "1", "2")),
    "PyTorch, dataclass": (
        lambda: Segmenter("dataclass"),
        {"output": "logits"},
        ("logits", "hidden_states"),
    ),
    "ONNX, by name": (lambda: onnx_model(""), {"output": "mask"}, ("mask", "kind", "ink")),
    "ONNX, by position": (lambda: onnx_model(""), {"output": 0}, ("mask", "kind", "ink")),
    "TensorFlow, dict": (
        lambda: keras_model("dict"),
        {"output": "mask", "axis": -1},
        ("kind", "mask"),
    ),
    "TensorFlow, list": (
        lambda: keras_model("list"),
        {"output": 0, "axis": -1},
        ("output_0", "output_1"),
    ),
}


def converter(case, metric, labels):
    make, _, _ = CASES[case]
    tuner = MixedPrecision()
    tuner.model = make()
    tuner.precisions = "int8"
    tuner.strategy = "basic"
    tuner.objective = "modelsize"
    tuner.metric = metric
    images = IMAGES.transpose(0, 2, 3, 1) if "TensorFlow" in case else IMAGES
    parts = [slice(0, 30), slice(30, 60)]
    tuner.eval_dataloader = [
        (
            images[part],
            {name: values[part] for name, values in labels.items()}
            if isinstance(labels, Mapping)
            else labels[part],
        )
        for part in parts
    ]
    tuner.exit_policy = tuner.exit_policy.__class__(max_trials=1)
    tuner.accuracy_criterion = 0.4
    return tuner


#: Only where outputs have names, labels can have them.
LABELS = [(case, "alone") for case in CASES] + [
    (case, "by name") for case, (_, options, _) in CASES.items() if options["output"] != 0
]


@pytest.mark.parametrize(("case", "labels"), LABELS)
def test_a_metric_of_one_output_is_measured_alike(case, labels, quick_runs):
    _, options, _ = CASES[case]
    name = options["output"]
    truth = MASKS if labels == "alone" else {name: MASKS, "other": KINDS}
    tuner = converter(case, ("mIoU", {"num_classes": 3, **options}), truth)
    result = tuner()
    # The shades are those that the masks were made by: FP32 makes no mistake.
    assert result.report.baseline_accuracy == 1.0
    assert result.report.metric == "MeanIoU"
    assert result.met


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_function_gets_all_outputs_in_the_form_of_the_model(case, quick_runs):
    received = []

    def keep(predictions, labels):
        received.append(predictions)
        return 1.0

    converter(case, keep, MASKS)()
    first = received[0]
    _, options, names = CASES[case]
    if isinstance(first, Mapping):
        assert list(map(str, first)) == list(names)
        mask = first[options["output"]]
    else:
        assert isinstance(first, tuple)
        mask = first[0]
    assert len(mask) == 60
    assert (mask.argmax(options.get("axis", 1)) == MASKS).all()
