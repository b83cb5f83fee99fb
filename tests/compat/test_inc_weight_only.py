"""`PostTrainingQuantConfig(approach="weight_only")` of Intel Neural Compressor 2.x."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neural_mp.compat.inc import PostTrainingQuantConfig, quantization
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()


@pytest.fixture
def batches(tmp_path, monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    return [(torch.randn(16, 64), torch.zeros(16, dtype=torch.long)) for _ in range(2)]


def _fit(net, batches, weight, name="Linear"):
    conf = PostTrainingQuantConfig(
        approach="weight_only", op_type_dict={name: {"weight": {**weight}}}
    )
    return quantization.fit(net, conf, calib_dataloader=batches)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (
            {"bits": 4, "group_size": 32, "scheme": "asym", "algorithm": "GPTQ"},
            "uint4 asymmetric per_group 32 minmax gptq",
        ),
        (
            {"bits": 4, "group_size": 64, "scheme": "sym", "algorithm": "RTN"},
            "int4 symmetric per_group 64 minmax",
        ),
        (
            {"bits": 4, "group_size": 32, "scheme": "sym", "algorithm": "AWQ"},
            "int4 symmetric per_group 32 minmax awq",
        ),
        (
            {"bits": 4, "group_size": 32, "scheme": "asym", "algorithm": "AUTOROUND"},
            "uint4 asymmetric per_group 32 minmax autoround",
        ),
        (
            {"bits": [3], "group_size": [64], "scheme": ["asym"], "algorithm": ["RTN"]},
            "uint3 asymmetric per_group 64 minmax",
        ),
        ({"bits": 8, "group_size": -1, "scheme": "sym"}, "int8 symmetric per_channel minmax"),
    ],
)
@pytest.mark.parametrize("name", ["Linear", ".*"])
def test_the_weight_of_every_layer_is_what_the_dict_says(net, batches, weight, expected, name):
    result = _fit(net, batches, weight, name)
    assert {str(result.plan[op].weight) for op in ("0", "2")} == {expected}
    with torch.no_grad():
        x, _ = batches[0]
        assert (result(x) - net(x)).norm() < 0.5 * net(x).norm()


def test_layers_that_are_named_differ_from_the_others(net, batches):
    conf = PostTrainingQuantConfig(
        approach="weight_only",
        op_type_dict={"Linear": {"weight": {"bits": 4, "group_size": 64, "algorithm": "RTN"}}},
        op_name_dict={"2": {"weight": {"dtype": "fp32"}}},
    )
    result = quantization.fit(net, conf, calib_dataloader=batches)
    assert result.plan["0"].precision is Precision.INT4
    assert result.plan["2"].precision is Precision.FP32


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ({"bits": 5}, "bits .*one of 2, 3, 4, 8, got 5"),
        ({"algorithm": "TEQ"}, "algorithm .*one of RTN, GPTQ, AWQ, HQQ, AUTOROUND, got 'TEQ'"),
        ({"group_size": 0}, "group_size .*got 0"),
        ({"dtype": "nf4"}, "dtype .*got 'nf4'"),
        ({"bit": 4}, "keys of a weight .*got 'bit'"),
    ],
)
def test_values_without_a_counterpart_are_one_clear_error(net, batches, weight, message):
    with pytest.raises(ConfigurationError, match=message):
        _fit(net, batches, weight)


def test_a_tuning_file_of_this_package_has_the_same_limits():
    from neural_mp import MixedPrecision

    weight = {"dtype": "uint4", "group_size": 32, "rounding": "awq gptq"}
    settings = MixedPrecision({"quantization": {"optype_wise": {"linear": {"weight": weight}}}})
    limit = settings._settings.constraints.optype_wise["linear"].weight
    assert (limit.group_size, limit.rounding) == ((32,), ("awq gptq",))
    wrong = {**weight, "rounding": "gtpq"}
    with pytest.raises(ConfigurationError, match="did you mean 'gptq'"):
        MixedPrecision({"quantization": {"optype_wise": {"linear": {"weight": wrong}}}})
