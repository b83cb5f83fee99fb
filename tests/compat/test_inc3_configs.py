"""Configuration classes of Intel Neural Compressor 3.x."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from torch import nn

from neural_mp.compat.inc.import_aliases import NotHereError
from neural_mp.compat.inc.v3 import torch_quantization as quantization
from neural_mp.compat.inc.v3.flow import parse_config_dict
from neural_mp.compat.inc.v3.torch_configs import CONFIGS
from neural_mp.compat.inc.v3.torch_quantization import (
    AutoRoundConfig,
    ComposableConfig,
    GPTQConfig,
    HQQConfig,
    MixedPrecisionConfig,
    RTNConfig,
    StaticQuantConfig,
    get_all_config_set,
    prepare,
)
from neural_mp.errors import ConfigurationError


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_configuration_survives_dict_and_json(name, tmp_path):
    kind = CONFIGS[name]
    config = kind().set_local("fc1", kind()).set_local("fc2", kind())
    assert kind.from_dict(config.to_dict()) == config
    config.to_json_file(tmp_path / "config.json")
    again = kind.from_json_file(tmp_path / "config.json")
    assert again.to_json_string() == config.to_json_string()


def test_a_configuration_with_an_array_has_a_text():
    assert "[1. 2.]" in repr(AutoRoundConfig(dataset=np.array([1.0, 2.0])))


def test_the_dict_has_a_global_and_a_local_part():
    config = RTNConfig(bits=8).set_local("fc1", RTNConfig(dtype="fp32"))
    assert config.to_dict()["global"]["bits"] == 8
    assert config.to_dict()["local"]["fc1"]["dtype"] == "fp32"
    assert "global" not in RTNConfig().to_dict()


def test_a_white_list_sets_the_options_of_its_ops_alone():
    config = RTNConfig(bits=8, white_list=["fc1", nn.Linear])
    assert config.global_config is None
    assert {key: local.bits for key, local in config.local_config.items()} == {
        "fc1": 8,
        nn.Linear: 8,
    }
    config.bits = 4
    assert config.local_config["fc1"].bits == 4


def test_lists_of_values_stand_for_every_combination():
    config = RTNConfig(bits=[4, 8], group_size=[32, 64]).set_local("fc1", RTNConfig(bits=2))
    expanded = config.expand()
    assert [(c.bits, c.group_size) for c in expanded] == [(4, 32), (4, 64), (8, 32), (8, 64)]
    assert all(c.local_config["fc1"].bits == 2 for c in expanded)
    assert len(MixedPrecisionConfig(dtype=["bf16", "fp32"]).expand()) == 2
    assert len(AutoRoundConfig(options=["W4A16", "W8A16"]).expand()) == 1
    assert len(StaticQuantConfig(excluded_precisions=["bf16"]).expand()) == 1


def test_a_sum_joins_local_settings_or_algorithms():
    same = RTNConfig() + RTNConfig(white_list=["fc1"])
    assert isinstance(same, RTNConfig)
    assert list(same.local_config) == ["fc1"]
    joined = RTNConfig(white_list=["fc1"]) + GPTQConfig(white_list=["fc2"])
    assert isinstance(joined, ComposableConfig)
    assert parse_config_dict(joined.to_dict()) == joined
    assert len((RTNConfig(bits=[4, 8]) + GPTQConfig(bits=[4, 8])).expand()) == 4


def test_options_are_checked_when_they_are_used(caplog):
    with caplog.at_level(logging.WARNING, logger="neural_compressor"):
        RTNConfig(bitss=4)
    assert "did you mean 'bits'" in caplog.text
    with pytest.raises(AttributeError, match="did you mean 'group_size'"):
        _ = RTNConfig().group_sizes
    with pytest.raises(ConfigurationError, match="from 2 to 8, got 9"):
        RTNConfig(bits=9).constraint()
    with pytest.raises(ConfigurationError, match="from 1, or -1, got 0"):
        HQQConfig(group_size=0).constraint()
    with pytest.raises(ConfigurationError, match="did you mean 'gptq'"):
        parse_config_dict({"gptqq": {}})


@pytest.mark.parametrize(
    ("make", "nearest"),
    [
        (lambda: prepare(nn.Linear(2, 2), quantization.FP8Config()), "INT8StaticQuantConfig"),
        (lambda: quantization.MXQuantConfig(), "groups of 32"),
        (lambda: prepare(nn.Linear(2, 2), StaticQuantConfig(fp8_config="E4M3")), "INT8"),
        (lambda: RTNConfig(dtype="mxfp4").constraint(), "dtype='int'"),
        (lambda: AutoRoundConfig(scheme="MXFP4").constraint(), "W4A16"),
        (lambda: quantization.prepare_qat(nn.Linear(2, 2), {}), "training.quantization_aware"),
    ],
)
def test_what_is_missing_names_the_nearest_way_here(make, nearest):
    with pytest.raises(NotHereError, match=nearest):
        make()


def test_schemes_of_autoround_name_bits_and_groups():
    def weight(config):
        limit = config.constraint()
        return limit.precisions[0].value, limit.weight.group_size, limit.weight.scheme

    assert weight(AutoRoundConfig()) == ("int4", (128,), ("symmetric",))
    assert weight(AutoRoundConfig(scheme="W2A16G32")) == ("int2", (32,), ("symmetric",))
    assert weight(AutoRoundConfig(scheme="W4A16", bits=8, group_size=64, use_sym=False)) == (
        "int8",
        (64,),
        ("asymmetric",),
    )
    assert AutoRoundConfig(iters=0).constraint().weight.rounding == ("rtn",)


def test_the_set_of_all_algorithms_can_be_expanded():
    configs = [config for kind in get_all_config_set() for config in kind.expand()]
    assert len(configs) > len(CONFIGS)
    for config in configs:
        config.constraint()
