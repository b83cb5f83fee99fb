"""Runs of small ops in simulations: numbers and gradients are those of autograd, op by op."""

import copy

import pytest
import torch
from test_quantization_aware import distance, plan_of
from torch import nn
from torch.nn import functional as F

from neural_mp import training
from neural_mp.adaptors.pytorch.training.fused_runs import FusedRun
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


def runs(model):
    return [module for module in model.modules() if isinstance(module, FusedRun)]


def op_by_op(model):
    """Return a copy whose runs are graphs of single ops, with the gradients of autograd."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, FusedRun):
                setattr(parent, name, child.plain)
    return model


def gradients(model, inputs):
    model.train()
    outputs = model(inputs)
    (outputs * torch.linspace(-1, 2, outputs.numel()).view_as(outputs)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return outputs.detach(), grads


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
@pytest.mark.parametrize("freeze", [(), ("second",), ("first", "head")])
@pytest.mark.parametrize("shape", INPUTS)
def test_numbers_and_gradients_are_those_of_single_ops(shape, freeze, precision):
    inputs = INPUTS[shape] * 1.5  # beyond the calibrated range
    model = simulation(INPUTS[shape], precision, freeze)
    with torch.no_grad():
        for scale in model.scales():
            scale.add_(torch.linspace(-0.2, 0.2, len(scale)))
    assert runs(model)
    reference = op_by_op(model)
    assert not runs(reference)
    outputs, grads = gradients(model, inputs)
    expected, expected_grads = gradients(reference, inputs)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
    assert grads.keys() == expected_grads.keys()
    assert not any(name in key for key in grads for name in freeze)
    for name, value in expected_grads.items():
        assert float(value.abs().max()) > 0
        torch.testing.assert_close(grads[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_all_scales_of_a_graph_are_one_parameter():
    model = simulation(INPUTS["rows"])
    (scales,) = model.scales()
    assert scales.numel() == 4 + 32 + 32 + 64 + 4
    assert len(list(model.parameters())) == 1 + len(list(Dense().parameters()))


def test_a_whole_dense_net_is_one_run():
    (run,) = runs(simulation(INPUTS["rows"]))
    assert len(run.program.groups) == 2  # rows of 32 and of 64 inputs


def test_nan_within_a_run_names_the_layer():
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
