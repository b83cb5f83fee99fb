"""A result that is worse than FP32 by the user's objective never wins, in any framework."""

import pytest
import torch
from onnx_bodies import draw
from onnx_nets import graph, op, run
from torch import nn

from neural_mp import MixedPrecision
from neural_mp.core.enums import Objective
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.space import Capability, TuningSpace

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
        return self.last(torch.einsum("ij,nj->ni", self.layer.weight * hidden[0], hidden))


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
    assert result.report.size < result.report.baseline_size
    assert result.plan.counts() == {Precision.INT8: 1, Precision.FP32: 2}


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


def keras_both_ways():
    import keras

    class BothWaysLayer(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(SIDE, SIDE), initializer="glorot_uniform", name="w")

        def call(self, x):
            from keras import ops

            hidden = ops.relu(ops.matmul(x, self.w))
            return ops.transpose(ops.matmul(self.w, ops.transpose(hidden)))

    keras.utils.set_random_seed(0)
    inputs = keras.Input((SIDE,))
    return keras.Model(inputs, keras.layers.Dense(8)(BothWaysLayer()(inputs)))


@pytest.mark.slow
def test_a_shared_weight_does_not_grow_a_model_in_tensorflow():
    result = tuned(keras_both_ways(), [draw(16, SIDE, seed=2)])
    assert result.report.size <= result.report.baseline_size
    assert result.plan.counts() == {Precision.INT8: 1, Precision.FP32: 2}


def test_the_reason_names_the_op_that_reads_the_weight_in_float():
    space = TuningSpace(
        OpGraph(
            [Op("a", "MatMul", ("x",), constants=("w",)), Op("b", "Mul", ("a",), constants=("w",))],
            ["x"],
        ),
        {"a": Capability((OpConfig(Precision.INT8), FP32)), "b": Capability()},
    )
    assert space.suited_to([Objective.PERFORMANCE, Objective.MODELSIZE]) is space
    (reason,) = space.suited_to([Objective.MODELSIZE]).capabilities["a"].reasons.values()
    assert reason == "its weight is also read by 'b' in float: stored twice"
