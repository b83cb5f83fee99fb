"""Types of weights that INC 3.x has and no kernel here reads: the integers in their place."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from neural_mp.compat.inc.v3.flow import find_module_result
from neural_mp.compat.inc.v3.torch_quantization import (
    AutoRoundConfig,
    GPTQConfig,
    RTNConfig,
    StaticQuantConfig,
    quantize,
)

#: Values of NF4, from the paper on QLoRA, and of the two types called FP4, largest 1.
_NF4 = (
    -1.0,
    -0.6961928,
    -0.5250731,
    -0.3949175,
    -0.2844414,
    -0.1847734,
    -0.0910500,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.3379152,
    0.4407098,
    0.5626170,
    0.7229568,
    1.0,
)
_BNB = tuple(value / 12 for value in (0, 0.0625, 2, 3, 4, 6, 8, 12))
_E2M1 = tuple(value / 6 for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6))
TABLES = {
    "nf4": _NF4,
    "fp4": (*_BNB, *(-value for value in _BNB)),
    "fp4_e2m1": (*_E2M1, *(-value for value in _E2M1)),
}


def rounded_by_table(weight: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """Round each group of 32 inputs to a table, scaled to the largest weight of the group."""
    grouped = weight.reshape(-1, 32)
    scales = grouped.abs().amax(dim=1, keepdim=True)
    table = torch.tensor(values)
    nearest = ((grouped / scales)[..., None] - table).abs().argmin(-1)
    return (table[nearest] * scales).reshape(weight.shape)


@pytest.fixture(params=["normal", "uniform", "laplace"])
def layer(request) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Linear(256, 64, bias=False).eval()
    kinds = {
        "normal": torch.distributions.Normal(0.0, 0.05),
        "uniform": torch.distributions.Uniform(-0.05, 0.05),
        "laplace": torch.distributions.Laplace(0.0, 0.05),
    }
    module.weight.data = kinds[request.param].sample((64, 256))
    return nn.Sequential(module)


@pytest.mark.parametrize("dtype", sorted(TABLES))
def test_integers_in_place_of_a_table_of_four_bits_are_no_less_exact(layer, dtype):
    weight = layer[0].weight.detach()
    converted = quantize(copy.deepcopy(layer), RTNConfig(dtype=dtype, group_size=32))
    config = find_module_result(converted).plan["0"]
    assert str(config.weight) == "uint4 asymmetric per_group 32 minmax hqq"
    with torch.no_grad():
        ours = converted(torch.eye(256)).T
    error = (ours - weight).square().mean()
    assert error <= (rounded_by_table(weight, TABLES[dtype]) - weight).square().mean()


@pytest.mark.parametrize("dtype", ["fp8_e4m3fn", "fp8_e5m2"])
def test_int8_in_place_of_weights_in_float8_is_no_less_exact(layer, dtype):
    weight = layer[0].weight.detach()
    converted = quantize(copy.deepcopy(layer), RTNConfig(dtype=dtype))
    assert find_module_result(converted).plan["0"].precision == "int8"
    kind = getattr(torch, dtype.replace("fp8", "float8"))
    largest = torch.finfo(kind).max
    scales = weight.abs().amax(dim=1, keepdim=True) / largest
    theirs = (weight / scales).to(kind).float() * scales
    with torch.no_grad():
        ours = converted(torch.eye(256)).T
    assert (ours - weight).square().mean() <= (theirs - weight).square().mean()


@pytest.mark.parametrize(
    ("config", "named", "plan"),
    [
        (RTNConfig(bits=6), "6 bits: integers of 8 bits", "int8"),
        (RTNConfig(dtype="int5"), "5 bits: integers of 8 bits", "int8"),
        (RTNConfig(white_list=["0"], dtype="nf4"), "nf4: integers of 4 bits", "int4"),
        (AutoRoundConfig(dtype="nf4", iters=0), "nf4: integers of 4 bits", "int4"),
        (GPTQConfig(dtype="nf4"), "rounded by gptq", "int4"),
    ],
)
def test_a_type_without_kernel_is_named_once_with_its_replacement(config, named, plan, caplog):
    net = nn.Sequential(nn.Linear(128, 32)).eval()
    with caplog.at_level(logging.WARNING, logger="neural_compressor"):
        converted = quantize(net, config, run_fn=lambda model: model(torch.randn(8, 128)))
    assert find_module_result(converted).plan["0"].precision == plan
    assert sum(named in line for line in caplog.messages) == 1


def test_options_that_fit_a_kernel_give_no_warning(caplog):
    net = nn.Sequential(nn.Linear(128, 32)).eval()
    with caplog.at_level(logging.WARNING, logger="neural_compressor"):
        quantize(net, RTNConfig(dtype="int4"), example_inputs=torch.randn(1, 128))
        quantize(net, RTNConfig(bits=8), example_inputs=torch.randn(1, 128))
    assert not [line for line in caplog.messages if "no kernel" in line]


class WithConv1D(nn.Module):
    """Layers of two classes, in a `forward` that no input is known for."""

    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        self.fc1 = transformers.Conv1D(64, 32)
        self.fc2 = nn.Linear(64, 32)
        self.fc3 = nn.Linear(32, 5)

    def forward(self, x):
        return self.fc3(self.fc2(self.fc1(x)))


def test_conv1d_needs_no_inputs():
    torch.manual_seed(0)
    net, x = WithConv1D().eval(), torch.randn(4, 32)
    expected = net(x)
    converted = quantize(net, RTNConfig(bits=8, group_size=-1))
    assert {str(config.precision) for config in find_module_result(converted).plan.values()} == {
        "int8"
    }
    assert not torch.equal(converted(x), expected)
    torch.testing.assert_close(converted(x), expected, atol=0.01, rtol=0)


def test_float8_is_a_configuration_of_its_own():
    config = StaticQuantConfig(fp8_config="E5M2", observer="maxabs")
    assert config.name == "fp8_quant"
    assert type(config).from_dict(config.to_dict()) == config
    assert StaticQuantConfig(act_algo="kl").name == "static_quant"
