"""Scales of simulations: one parameter of a graph, with the gradients of learned step sizes."""

import pytest
import torch
from test_quantization_aware import distance, plan_of
from torch import nn
from torch.nn import functional as F

from neural_mp import training
from neural_mp.adaptors.pytorch.training.scales import Scales
from neural_mp.core.precision import Precision
from neural_mp.errors import TrainingError


class Dense(nn.Module):
    """Dense layers of two widths with a shortcut; one has no bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.third, self.head = nn.Linear(32, 64), nn.Linear(64, 4)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = F.relu(x + self.second(x))
        return self.head(F.relu(self.third(x)))


INPUTS = {
    "rows": torch.randn(20, 32, generator=torch.Generator().manual_seed(0)),
    "sequences": torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(1)),
}


def simulation(inputs, precision=Precision.INT8, freeze=()):
    net = Dense().eval()
    for name in freeze:
        getattr(net, name).requires_grad_(False)
    plan = plan_of(net, inputs, precision)
    return training.quantization_aware(net, plan, calibration=[inputs])


def straight_through(exact, rounded):
    """Return rounded values with the gradient of the exact ones."""
    return exact + (rounded - exact).detach()


def quantized(values, scales, zero_points, limits, size):
    """Return values after quantize and dequantize, with LSQ's gradient of scales for a size."""
    factor = (size * limits[1]) ** -0.5
    scales = straight_through(factor * scales, scales)
    steps = (values - zero_points) / scales
    return straight_through(steps, steps.round()).clamp(*limits) * scales + zero_points


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
@pytest.mark.parametrize("shape", INPUTS)
def test_numbers_and_gradients_are_those_of_learned_step_sizes(shape, precision):
    torch.manual_seed(0)
    net = nn.Linear(32, 16).eval()
    inputs = INPUTS[shape] * 1.5  # beyond the calibrated range
    plan = plan_of(net, INPUTS[shape], precision)
    model = training.quantization_aware(net, plan, calibration=[INPUTS[shape]]).train()
    (table,) = [module for module in model.modules() if isinstance(module, Scales)]
    with torch.no_grad():
        table.log_scales.add_(torch.linspace(-0.2, 0.2, len(table.log_scales)))
    logs = table.log_scales.detach().clone().requires_grad_()
    scales = (table.initial * logs.exp()).float()
    (weight,) = [w for w in model.weights() if w.ndim == 2]
    own, x = weight.detach().clone().requires_grad_(), inputs
    if precision is Precision.INT8:
        point = int(table.zero_points[0])
        limits = (-point, 255 - point)
        factor = (inputs.numel() * 255) ** -0.5
        first = straight_through(factor * scales[0], scales[0])
        steps = x / first
        x = straight_through(steps, steps.round()).clamp(*limits) * first
        rounded = quantized(own, scales[1:, None], 0.0, table.forms[0].limits, 32)
    else:
        rows = table.forms[0].per_row
        bfloat16 = straight_through(scales, scales.bfloat16().float()).view(rows)
        values = own.view(16, *rows[1:-1], -1)
        offsets = table.row_offsets.view(rows)
        limits = table.forms[0].limits
        rounded = quantized(values, bfloat16, offsets, limits, values.shape[-1]).view(16, 32)
        for name, tensor in (*model.named_buffers(), *model.named_parameters()):
            x = x * tensor if "input_factors" in name else x
    expected = F.linear(x, rounded, net.bias)
    expected.cos().sum().backward()
    outputs = model(inputs)
    outputs.cos().sum().backward()
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0.02)
    torch.testing.assert_close(weight.grad, own.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(table.log_scales.grad, logs.grad, rtol=2e-2, atol=1e-3)
    assert float(logs.grad.abs().min()) > 0


def test_frozen_weights_have_no_gradient():
    model = simulation(INPUTS["rows"], freeze=("first", "head")).train()
    model(INPUTS["rows"]).sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert any("second" in name for name in trained)
    assert not any(name in key for key in trained for name in ("first", "head"))


def test_all_scales_of_a_graph_are_one_parameter():
    model = simulation(INPUTS["rows"])
    (scales,) = model.scales()
    assert scales.numel() == 4 + 32 + 32 + 64 + 4
    assert len(list(model.parameters())) == 1 + len(list(Dense().parameters()))


def test_nan_names_the_layer():
    inputs = INPUTS["rows"]
    for name in ("second", "head"):
        model = simulation(inputs)
        with torch.no_grad():
            weight = next(v for k, v in model.named_parameters() if f"{name}_weight" in k)
            weight[1, 2] = torch.nan
        with pytest.raises(TrainingError, match=f"a weight of layer '{name}'"):
            training.fit(model, [inputs], epochs=1)


def test_scales_of_weights_in_four_bits_are_learned():
    inputs = INPUTS["rows"]
    model = simulation(inputs, Precision.INT4)
    (scales,) = model.scales()
    training.fit(model, [inputs] * 20, epochs=2, learning_rate=1e-2)
    assert float(scales.detach().abs().max()) > 0.01
    result = training.finish(model)
    assert distance(model, result, inputs) < 2e-2  # the kernel rounds its inputs to bfloat16
