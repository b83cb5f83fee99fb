"""How much rounding a weight harms, by estimates of second derivatives."""

import keras
import numpy as np
import pytest
import torch
from machine import DENSE, weight_limit_here
from onnx_nets import graph, op
from torch import nn

from neural_mp.adaptors.common.sensitivity import (
    DIRECTIONS,
    estimate_weight_sensitivity,
)
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.errors import ConversionError
from neural_mp.testing import machine

MACHINE = machine()

DATA = np.random.default_rng(0).standard_normal((24, 6)).astype(np.float32)
WEIGHT = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)


def in_pytorch() -> nn.Module:
    layer = nn.Linear(6, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(WEIGHT))
    return nn.Sequential(layer).eval()


def in_tensorflow() -> keras.Model:
    features = keras.Input((6,))
    layer = keras.layers.Dense(4)
    model = keras.Model(features, layer(features))
    layer.set_weights([WEIGHT.T, np.zeros(4, np.float32)])
    return model


def traces(source, data, batch: int) -> list[float]:
    """The traces of all layers, in the order of the graph."""
    adaptor = adaptor_for(source)
    model = adaptor.load(source, example=data)
    params, batches = adaptor.corrections.layer_params(model), np.split(data, len(data) // batch)
    ops = [op.name for op in adaptor.graph(model) if op.name in params]
    estimates = adaptor.hessian_traces(model, batches, ops)
    return [estimates[name] for name in ops]


def spread(jacobian: np.ndarray) -> float:
    """The standard deviation of the mean of rᵀJJᵀr over random signs r."""
    kernel = jacobian @ jacobian.T
    np.fill_diagonal(kernel, 0)
    return float(np.sqrt(2 * np.square(kernel).sum() / DIRECTIONS))


@pytest.mark.parametrize("build", [in_pytorch, in_tensorflow])
def test_the_trace_of_a_product_is_the_inputs_power_for_every_output(build):
    expected = 4 * np.square(DATA, dtype=np.float64).sum()
    # One by one, directions have nothing to blur.
    assert traces(build(), DATA, 1) == pytest.approx([expected], rel=1e-4)
    together = np.kron(DATA.astype(np.float64), np.eye(4))
    (trace,) = traces(build(), DATA, len(DATA))
    assert abs(trace - expected) < 4 * spread(together)


@pytest.mark.parametrize("build", [in_pytorch, in_tensorflow])
def test_the_score_is_the_mean_curvature_times_what_rounding_moves(build):
    adaptor = adaptor_for(build())
    model = adaptor.load(build(), example=DATA)
    space = adaptor.space(model, MACHINE)
    batches = np.split(DATA, len(DATA))
    (score,) = estimate_weight_sensitivity(adaptor, model, batches, space).values()
    moved = 0.0
    for row in WEIGHT.astype(np.float64):
        step = np.abs(row).max() / weight_limit_here(adaptor.framework, DENSE)
        moved += sum((value - round(value / step) * step) ** 2 for value in row)
    assert score == pytest.approx(np.square(DATA).sum() / 6 * moved, rel=1e-3)


def test_two_frameworks_find_the_traces_of_one_net():
    images = np.random.default_rng(0).random((6, 1, 8, 8), np.float32)
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)]
    net = nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1]).eval()
    image = keras.Input((8, 8, 1))
    layers = [keras.layers.Conv2D(channels, 3, padding="same") for channels in (4, 3)]
    same = keras.Model(image, layers[1](keras.ops.relu(layers[0](image))))
    for layer, convolution in zip(layers, convolutions, strict=True):
        weight, bias = (value.detach().numpy() for value in convolution.parameters())
        layer.set_weights([weight.transpose(2, 3, 1, 0), bias])

    estimates = [traces(net, images, 6), traces(same, images.transpose(0, 2, 3, 1).copy(), 6)]

    for position, name in enumerate(("0.weight", "2.weight")):

        def output(weight: torch.Tensor, name: str = name) -> torch.Tensor:
            return torch.func.functional_call(net, {name: weight}, torch.from_numpy(images))

        weight = net.get_parameter(name)
        jacobian = torch.autograd.functional.jacobian(output, weight)
        exact = jacobian.reshape(-1, weight.numel()).double().numpy()
        for by_framework in estimates:
            off = abs(by_framework[position] - np.square(exact).sum())
            assert off < 4 * spread(exact)


class CalledTwice(nn.Module):
    """A module without a graph as a whole, that calls a part of itself twice."""

    def __init__(self) -> None:
        super().__init__()
        self.part = in_pytorch()[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) > 1e9:
            x = x + 1
        return self.part(x) + self.part(2 * x)


def test_a_module_called_twice_counts_twice():
    adaptor = adaptor_for(CalledTwice())
    model = adaptor.load(CalledTwice().eval(), example=DATA, capture="modules")
    (name,) = adaptor.corrections.layer_params(model)
    estimates = adaptor.hessian_traces(model, np.split(DATA, len(DATA)), [name])
    # y = Wx + 2Wx: three times the derivative, nine times its square.
    assert estimates[name] == pytest.approx(9 * 4 * np.square(DATA).sum(), rel=1e-4)


def test_onnx_has_no_gradients():
    source = graph([op("MatMul", "x w", "y")], {"x": ["n", 6]}, ["y"], {"w": WEIGHT.T.copy()})
    adaptor = adaptor_for(source)
    model = adaptor.load(source)
    with pytest.raises(ConversionError, match="gradients"):
        estimate_weight_sensitivity(adaptor, model, [DATA], adaptor.space(model, MACHINE))
