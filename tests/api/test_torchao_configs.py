"""Configurations of torchao: `neural_mp.quantize_`, and as a constraint of a search."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AwqConfig, GPTQConfig

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.api.foreign_configs import parse_foreign_config
from neural_mp.compat.torchao import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
)
from neural_mp.errors import ConfigurationError


@pytest.fixture
def net(tmp_path, monkeypatch) -> nn.Module:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)).eval()


@pytest.mark.parametrize(
    ("config", "largest_error"),
    [
        (Int4WeightOnlyConfig(group_size=32), 0.15),
        (Int8WeightOnlyConfig(), 0.01),
        (Int8DynamicActivationInt8WeightConfig(), 0.02),
        (IntxWeightOnlyConfig("int3"), 0.3),
    ],
)
def test_layers_are_replaced_in_place(net, config, largest_error):
    original, x = copy.deepcopy(net), torch.randn(8, 64)
    neural_mp.quantize_(net, config)
    assert type(net[0]) is not nn.Linear
    assert type(net[1]) is nn.ReLU
    with torch.no_grad():
        assert 0 < (net(x) - original(x)).norm() / original(x).norm() < largest_error


def test_a_filter_leaves_layers_out(net):
    neural_mp.quantize_(net, Int8WeightOnlyConfig(), lambda module, name: name != "2")
    assert type(net[0]) is not nn.Linear
    assert type(net[2]) is nn.Linear


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_configuration_limits_a_search(net, wrapped):
    @dataclass
    class TorchAoConfig:
        quant_type: object

    config = Int4WeightOnlyConfig(group_size=32)
    converter = MixedPrecision(model=net, precisions="int4", objective="modelsize")
    converter.calib_dataloader = [torch.randn(8, 64)]
    converter.model_wise = TorchAoConfig(config) if wrapped else config
    plan = converter().plan
    assert {str(c.weight) for c in plan.values()} == {"uint4 asymmetric per_group 32 minmax"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPTQConfig(bits=4, group_size=32), "int4 symmetric per_group 32 minmax gptq"),
        (AwqConfig(bits=4, group_size=64), "uint4 asymmetric per_group 64 minmax awq"),
        (
            # The class itself requires the package compressed-tensors.
            SimpleNamespace(
                quant_method="compressed-tensors",
                quantization_config=SimpleNamespace(
                    config_groups={
                        "group_0": {
                            "targets": ["Linear"],
                            "weights": {"num_bits": 4, "symmetric": True, "group_size": 32},
                        }
                    }
                ),
            ),
            "int4 symmetric per_group 32 minmax",
        ),
    ],
)
def test_configurations_of_transformers_limit_a_search(net, config, words):
    converter = MixedPrecision(model=net, precisions="int4", objective="modelsize")
    converter.calib_dataloader = [torch.randn(8, 64)]
    converter.model_wise = config
    plan = converter().plan
    assert {str(c.weight) for c in plan.values()} == {words}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant_method": "gptq", "bits": 5, "group_size": 32}, "bits of .* got 5"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "got 0 groups"),
    ],
)
def test_configurations_of_transformers_without_a_kernel_are_errors(options, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_foreign_config(SimpleNamespace(**options))


def test_words_of_a_configuration_are_those_of_a_plan():
    hqq = parse_foreign_config(Int4WeightOnlyConfig(64, "hqq"))
    assert hqq.weight.rounding == ("hqq",)
    group = SimpleNamespace(group_size=64)
    two = parse_foreign_config(
        IntxWeightOnlyConfig(torch.int2, group, SimpleNamespace(name="ASYMMETRIC"))
    )
    assert (two.precisions, two.weight.group_size) == (("int2",), (64,))
    assert two.weight.scheme == ("asymmetric",)
    assert parse_foreign_config("int8") is None


def test_what_no_kernel_holds_is_an_error(net):
    with pytest.raises(ConfigurationError, match="one scale per output"):
        neural_mp.quantize_(net, Int8WeightOnlyConfig(group_size=32))
    with pytest.raises(ConfigurationError, match="int2, int3, int4 or int8, got 'int5'"):
        neural_mp.quantize_(net, IntxWeightOnlyConfig("int5"))
    with pytest.raises(ConfigurationError, match="did you mean 'Int8WeightOnlyConfig'"):
        neural_mp.quantize_(net, type("Int8WeightOnlyConfigs", (), {})())
