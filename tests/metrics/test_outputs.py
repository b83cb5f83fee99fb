"""One of several outputs, by its name or position, in every framework."""

from typing import NamedTuple

import keras
import numpy as np
import onnx_nets
import pytest
import torch
from torch import nn

from neural_mp.api.loading import load_source
from neural_mp.api.user_metrics import parse_metrics
from neural_mp.core.criterion import Deadline
from neural_mp.errors import MetricError
from neural_mp.metrics import build_metric
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.evaluator import Evaluator

IMAGES = np.random.default_rng(0).normal(size=(6, 1, 8, 8)).astype(np.float32)
MASKS = np.random.default_rng(1).integers(0, 2, (6, 8, 8))


class TwoHeads(nn.Module):
    """A mask `[N, 2, H, W]` and a kind `[N, 2]`."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.form = nn.Conv2d(1, 2, 3, padding=1), form

    def forward(self, x):
        mask = self.inner(x)
        return self.form(mask, mask.mean((2, 3)))


def as_dict(mask, kind):
    return {"mask": mask, "kind": kind}


def as_pair(mask, kind):
    return mask, kind


def torch_model(form):
    net = TwoHeads(form).eval()
    return load_source(net, None, (torch.from_numpy(IMAGES),)), net


def onnx_model():
    proto = onnx_nets.as_onnx(TwoHeads(as_pair).eval())
    for old, new in zip(
        [output.name for output in proto.graph.output], ("mask", "kind"), strict=True
    ):
        for node in proto.graph.node:
            node.output[:] = [new if name == old else name for name in node.output]
            node.input[:] = [new if name == old else name for name in node.input]
        next(output for output in proto.graph.output if output.name == old).name = new
    return load_source(proto, None, None)


def keras_model(form):
    keras.utils.set_random_seed(0)
    images = keras.Input((1, 8, 8))
    last = keras.layers.Permute((2, 3, 1))(images)
    first = keras.layers.Permute((3, 1, 2))(keras.layers.Conv2D(2, 3, padding="same")(last))
    kind = keras.layers.GlobalAveragePooling2D(data_format="channels_first")(first)
    outputs = {"mask": first, "kind": kind} if form == "dict" else [first, kind]
    return load_source(keras.Model(images, outputs), None, None)


MODELS = {
    "pytorch dict": lambda: torch_model(as_dict)[0],
    "pytorch tuple": lambda: torch_model(as_pair)[0],
    "onnxrt": onnx_model,
    "tensorflow dict": lambda: keras_model("dict"),
    "tensorflow list": lambda: keras_model("list"),
}
#: Whether the outputs have the names that were given them.
NAMED = ("pytorch dict", "onnxrt", "tensorflow dict")


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return request.param, MODELS[request.param]()


def value(model, metric, labels=MASKS):
    batches = Batches([(IMAGES[:4], labels[:4]), (IMAGES[4:], labels[4:])], "eval_dataloader")
    return Evaluator(batches, parse_metrics(metric))(model, Deadline())


def test_a_named_metric_is_given_the_output_it_asks_for(model):
    name, loaded = model
    outputs = []

    def keep(preds, labels):
        outputs.append(preds)
        return 1.0

    value(loaded, keep)
    masks = outputs[0]["mask"] if isinstance(outputs[0], dict) else outputs[0][0]
    assert masks.shape == (6, 2, 8, 8)
    predicted = masks.argmax(1)
    intersections = [((predicted == k) & (k == MASKS)).sum() for k in (0, 1)]
    unions = [((predicted == k) | (k == MASKS)).sum() for k in (0, 1)]
    expected = np.mean(np.divide(intersections, unions))
    index = list(outputs[0]).index("mask") if isinstance(outputs[0], dict) else 0
    for output in ("mask", index) if name in NAMED else (index,):
        assert value(loaded, ("mIoU", {"output": output})) == pytest.approx(expected)
        assert value(loaded, {"mIoU": {"output": output}}) == pytest.approx(expected)


def test_an_output_that_is_not_there_is_said_with_those_that_are(model):
    name, loaded = model
    text = "'mask' \\(float32 \\[4, 2, 8, 8\\]\\)" if name in NAMED else "\\(float32 \\[4, 2, 8, 8"
    with pytest.raises(Exception, match=text) as caught:
        value(loaded, ("mIoU", {"output": "maks"}))
    assert "no output 'maks'" in str(caught.value)
    assert ("did you mean 'mask'" in str(caught.value)) == (name in NAMED)


def test_without_a_choice_a_metric_of_one_array_says_what_to_do(model):
    with pytest.raises(Exception, match="must be one array, got 2: .*; select one with the"):
        value(model[1], "mIoU")


class Pair(NamedTuple):
    mask: np.ndarray
    kind: np.ndarray


@pytest.mark.parametrize(
    "preds",
    [
        {"mask": np.eye(3), "kind": np.zeros((3, 2))},
        Pair(np.eye(3), np.zeros((3, 2))),
        (np.eye(3), np.zeros((3, 2))),
    ],
)
@pytest.mark.parametrize(
    "labels",
    [
        np.arange(3),
        {"mask": np.arange(3), "kind": np.zeros(3)},
        (np.arange(3), np.zeros(3)),
    ],
)
def test_labels_go_with_the_output_of_their_name_or_place(preds, labels):
    output = 0 if type(preds) is tuple else "mask"
    if type(preds) is tuple and isinstance(labels, dict):
        options = {"output": output, "label": "mask"}
    else:
        options = {"output": output}
    metric = build_metric("accuracy", options)
    metric.update(preds, labels)
    assert metric.result() == 1.0


def test_a_label_that_is_not_there_is_said():
    metric = build_metric("accuracy", {"label": "kinds"})
    with pytest.raises(MetricError, match="labels have no output 'kinds'.*did you mean 'kind'"):
        metric.update(np.eye(3), {"kind": np.arange(3)})
