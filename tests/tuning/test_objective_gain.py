"""A result that is worse than FP32 by the user's objective never wins, in any framework."""

import pytest
import torch
from onnx_bodies import draw
from onnx_nets import graph, op, run
from torch import nn

from neural_mp import MixedPrecision
from neural_mp.core.precision import Precision

SIDE = 128


def both_ways():
    """A weight that one product reads as its second factor, and another as its first."""
    nodes = [
        op("MatMul", "x w", "a"),
        op("Relu", "a", "r"),
        op("Transpose", "r", "t", perm=[1, 0]),
        op("MatMul", "w t", "b"),
        op("Transpose", "b", "u", perm=[1, 0]),
        op("MatMul", "u v", "y"),
    ]
    constants = {"w": draw(SIDE, SIDE) / 8, "v": draw(SIDE, 8, seed=1)}
    return graph(nodes, {"x": ["n", SIDE]}, ["y"], constants)


class BothWays(nn.Module):
    """The same in PyTorch, where only the layer has an integer kernel."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(SIDE, SIDE, bias=False), nn.Linear(SIDE, 8)

    def forward(self, x):
        hidden = torch.relu(self.layer(x))
        return self.last(torch.relu(torch.cumsum(self.layer.weight, 0)[:, 0] + hidden))


def tuned(source, data, **options):
    converter = MixedPrecision(model=source, precisions="int8", cache=False)
    converter.calib_dataloader, converter.objective = data, "modelsize"
    for name, value in options.items():
        setattr(converter, name, value)
    return converter()


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("framework", ["onnxrt", "pytorch"])
def test_a_weight_that_is_read_in_float_too_does_not_grow_the_model(framework, checked):
    inputs = draw(16, SIDE, seed=2)
    options = {}
    if framework == "onnxrt":
        source, outputs = both_ways(), run(both_ways(), x=inputs)[0]
    else:
        torch.manual_seed(0)
        source = BothWays().eval()
        outputs = source(torch.from_numpy(inputs)).detach().numpy()
    if checked:
        options = {"metric": "accuracy", "eval_dataloader": [(inputs, outputs.argmax(1))]}
        options["accuracy_criterion"] = {"relative": 0.2}
    result = tuned(source, [inputs], **options)
    assert result.report.size <= result.report.baseline_size
    if framework == "onnxrt":
        assert result.plan["a"].precision is Precision.FP32
        assert result.plan["y"].precision is Precision.INT8


def test_a_plan_that_gains_nothing_is_not_the_result(monkeypatch):
    """Sizes as they would be with every weight stored twice."""
    from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor

    bytes_of = OnnxRuntimeAdaptor.weight_bytes

    def twice(self, model):
        return bytes_of(self, model) * (1 if model.given is not None else 5)

    monkeypatch.setattr(OnnxRuntimeAdaptor, "weight_bytes", twice)
    inputs = draw(16, SIDE, seed=2)
    model = graph([op("MatMul", "x w", "y")], {"x": ["n", SIDE]}, ["y"], {"w": draw(SIDE, SIDE)})
    labels = run(model, x=inputs)[0].argmax(1)
    for options in ({}, {"metric": "accuracy", "eval_dataloader": [(inputs, labels)]}):
        result = tuned(model, [inputs], **options)
        assert set(result.plan.counts()) == {Precision.FP32}
        assert not result.met
        assert any("by the objective modelsize" in text for text in result.report.warnings)
    every = tuned(model, [inputs], exit_policy={"performance_only": True})
    assert every.plan.counts() == {Precision.INT8: 1}
