"""Limits speak of the layers of a model by the names that its own code gives them."""

import os

import numpy as np
import pytest
import torch
from torch import nn

from neural_mp import MixedPrecision, Precision
from neural_mp.errors import UnknownOperatorError

pytestmark = pytest.mark.usefixtures("quick_runs")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)) + x)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.stages = nn.Sequential(Block(4), Block(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


WEIGHTED = ("conv2d", "linear", "Conv2D", "MatMul")


def in_int8(model, images, **limits):
    """Names of the weighted ops that a run puts in INT8."""
    converter = MixedPrecision(model=model, precisions="int8", objective="modelsize", **limits)
    converter.exit_policy = {"performance_only": True}
    converter.calib_dataloader = [images]
    result = converter()
    ops = {op.name: op.type for op in result.adaptor.graph(result.adaptor.load(model)) if op.type}
    return {
        name
        for name, config in result.plan.items()
        if config.precision is Precision.INT8 and ops[name] in WEIGHTED
    }


class TestPyTorch:
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    everything = frozenset({"stem", "stages.0.conv", "stages.1.conv", "head"})

    @pytest.fixture(scope="class")
    def net(self):
        torch.manual_seed(0)
        return Blocks().eval()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("limits", "out"),
        [
            ({}, set()),
            ({"exclude": "stages"}, {"stages.0.conv", "stages.1.conv"}),
            ({"exclude": ["stages.1", "head"]}, {"stages.1.conv", "head"}),
            ({"exclude": "stages.0.norm"}, {"stages.0.conv"}),
            ({"exclude": r"stages\.[1-9]"}, {"stages.1.conv"}),
            ({"op_wise": {"stages": "fp32"}}, {"stages.0.conv", "stages.1.conv"}),
            ({"optype_wise": {"Linear": "fp32"}}, {"head"}),
            ({"optype_wise": {"Conv2d": "fp32"}}, {"stem", "stages.0.conv", "stages.1.conv"}),
            ({"optype_wise": {"Block": "fp32"}}, {"stages.0.conv", "stages.1.conv"}),
            ({"optype_wise": {"conv2d": "fp32"}}, {"stem", "stages.0.conv", "stages.1.conv"}),
        ],
    )
    def test_modules_and_their_classes(self, net, limits, out):
        assert in_int8(net, self.images, **limits) == self.everything - out

    def test_in_a_file(self, net, tmp_path):
        file = tmp_path / "conf.yaml"
        file.write_text(
            "model: {name: blocks, framework: pytorch}\nquantization:\n"
            "  optype_wise: {Linear: {precisions: fp32}}\n"
            "  op_wise: {stages.0: {precisions: fp32}}\n"
        )
        converter = MixedPrecision(file)
        converter.model, converter.calib_dataloader = net, [self.images]
        converter.precisions, converter.objective = "int8", "modelsize"
        converter.exit_policy = {"performance_only": True}
        plan = converter().plan
        assert {op for op in self.everything if plan[op].precision is Precision.INT8} == {
            "stem",
            "stages.1.conv",
        }

    def test_the_nearest_names_and_classes_are_offered(self, net):
        with pytest.raises(UnknownOperatorError, match=r"'stages\.3'.*'stages\.[01]'"):
            in_int8(net, self.images, exclude="stages.3")
        with pytest.raises(UnknownOperatorError, match="'Linaer'.*'Linear'"):
            in_int8(net, self.images, optype_wise={"Linaer": "fp32"})


class TestKeras:
    images = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype(np.float32)

    @pytest.fixture(scope="class")
    def net(self):
        pytest.importorskip("tensorflow")
        os.environ.setdefault("KERAS_BACKEND", "tensorflow")
        import keras

        layers = keras.layers
        inner = keras.Sequential([layers.Input((10,)), layers.Dense(6, name="twin")], name="inner")
        net = keras.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Conv2D(4, 3, name="conv", use_bias=False),
                layers.BatchNormalization(name="norm"),
                layers.Activation("relu"),
                layers.Flatten(),
                layers.Dense(12, activation="relu", name="dense"),
                layers.Dense(10, name="dense_1"),
                inner,
                layers.Dense(3, name="dense_1_2"),
            ],
        )
        for layer in net.layers:  # so that the norm has something to fold in
            if layer.name == "norm":
                rng = np.random.default_rng(1)
                layer.set_weights([rng.uniform(0.5, 2, w.shape) for w in layer.get_weights()])
        return net

    @pytest.mark.parametrize(
        ("limits", "left"),
        [
            ({}, 5),
            ({"exclude": "conv"}, 4),
            ({"exclude": "norm"}, 4),
            ({"exclude": ["conv", "norm"]}, 4),
            ({"exclude": "dense"}, 4),
            ({"exclude": ["dense", "dense_1"]}, 3),
            ({"exclude": ["dense_1", "dense_1_2"]}, 3),
            ({"exclude": "dense.*"}, 2),
            ({"exclude": "inner"}, 4),
            ({"optype_wise": {"Dense": "fp32"}}, 1),
            ({"optype_wise": {"Conv2D": "fp32"}}, 4),
            ({"op_wise": {"twin": "fp32"}}, 4),
        ],
    )
    def test_layers_and_their_classes(self, net, limits, left):
        assert len(in_int8(net, self.images, **limits)) == left

    @pytest.mark.slow
    def test_a_layer_is_meant_by_its_own_name_not_by_that_of_the_graph(self, net):
        """Ops of the layer `dense` are called `…/dense_1/…` in TensorFlow's graph."""
        everything = in_int8(net, self.images)
        (first,) = everything - in_int8(net, self.images, exclude="dense")
        (second,) = everything - in_int8(net, self.images, exclude="dense_1")
        names = sorted(everything, key=list(everything).index)
        assert first != second
        assert {first, second} < set(names)

    def test_the_model_is_left_as_it_was(self, net):
        in_int8(net, self.images)
        assert not any("call" in vars(layer) for layer in net.layers)

    def test_the_nearest_names_are_offered(self, net):
        with pytest.raises(UnknownOperatorError, match="'dense_3'.*'dense_1"):
            in_int8(net, self.images, exclude="dense_3")
        with pytest.raises(UnknownOperatorError, match="'Dnese'.*'Dense'"):
            in_int8(net, self.images, optype_wise={"Dnese": "fp32"})
