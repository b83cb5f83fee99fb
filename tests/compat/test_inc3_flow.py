"""The flow of Intel Neural Compressor 3.x: prepare, the user's own loop, convert."""

from __future__ import annotations

import copy

import pytest
import torch
from machine import DENSE, weight_limit_here
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from neural_mp.compat.inc.v3.flow import find_module_result
from neural_mp.compat.inc.v3.torch_helpers import export
from neural_mp.compat.inc.v3.torch_quantization import (
    AutoRoundConfig,
    AWQConfig,
    DynamicQuantConfig,
    GPTQConfig,
    HQQConfig,
    MixedPrecisionConfig,
    RTNConfig,
    SmoothQuantConfig,
    StaticQuantConfig,
    TEQConfig,
    convert,
    finalize_calibration,
    load,
    prepare,
    quantize,
    save,
)
from neural_mp.errors import ConfigurationError, DataError


class Net(nn.Module):
    """Three hidden layers and an output layer with the name of a decoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 64), nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        return self.lm_head(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(16, 64) for _ in range(3)]


def _error(model: nn.Module, reference: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - reference(x)).norm() / reference(x).norm())


@pytest.mark.parametrize(
    ("config", "weight", "head"),
    [
        (RTNConfig(), "int4 symmetric per_group 32 minmax", "fp32"),
        (
            RTNConfig(use_sym=False, quant_lm_head=True),
            "uint4 asymmetric per_group 32 minmax",
            "int4",
        ),
        (RTNConfig(bits=8), "int8 symmetric per_channel minmax", "fp32"),
        (RTNConfig(bits=3), "uint3 asymmetric per_group 32 minmax", "fp32"),
        (GPTQConfig(), "int4 symmetric per_group 32 minmax gptq", "fp32"),
        (AWQConfig(group_size=64), "int4 symmetric per_group 64 minmax awq", "fp32"),
        (TEQConfig(), "int4 symmetric per_group 32 minmax awq", "fp32"),
        (HQQConfig(), "uint4 asymmetric per_group 64 minmax hqq", "fp32"),
        (AutoRoundConfig(), "int4 symmetric per_group 64 minmax autoround", "fp32"),
        (StaticQuantConfig(), "int8 symmetric per_channel minmax", "int8"),
        (SmoothQuantConfig(), "int8 symmetric per_channel minmax", "int8"),
        (DynamicQuantConfig(), "int8 symmetric per_channel minmax", "int8"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_result_is_what_the_configuration_says(net, batches, config, weight, head):
    prepared = prepare(copy.deepcopy(net), config)
    for batch in batches:
        assert torch.equal(prepared(batch), net(batch))
    converted = convert(prepared)
    plan = find_module_result(converted).plan
    if head == "int8" and weight_limit_here("pytorch", DENSE) != 127:
        weight += " reduced_range"
    assert {str(plan[op].weight) for op in ("fc1", "fc2")} == {weight}
    assert plan["lm_head"].precision.value == head
    assert 0 < _error(converted, net, batches[0]) < 0.3


def test_static_ranges_follow_the_algorithm_and_dynamic_ones_need_no_calibration(net, batches):
    static = quantize(net, StaticQuantConfig(act_algo="kl"), lambda m: [m(b) for b in batches])
    assert find_module_result(static).plan["fc1"].activation.algorithm == "kl"
    dynamic = convert(prepare(net, DynamicQuantConfig(), example_inputs=batches[0]))
    assert find_module_result(dynamic).plan["fc1"].activation.algorithm == "dynamic"


def test_local_settings_by_name_pattern_and_type(net, batches):
    config = RTNConfig().set_local(nn.Linear, RTNConfig(bits=8))
    config.set_local("fc[2-9]", RTNConfig(bits=2)).set_local("lm_head", RTNConfig(dtype="fp32"))
    plan = find_module_result(convert(net, config)).plan
    precisions = {op: plan[op].precision.value for op in ("fc1", "fc2", "lm_head")}
    assert precisions == {"fc1": "int8", "fc2": "int2", "lm_head": "fp32"}


def test_two_algorithms_share_one_model(net, batches):
    joined = GPTQConfig(white_list=["fc1"]) + StaticQuantConfig(white_list=["fc2"])
    for config in (joined, joined.to_dict()):
        converted = quantize(net, config, lambda m: [m(b) for b in batches])
        plan = find_module_result(converted).plan
        assert str(plan["fc1"].weight).endswith("gptq")
        assert plan["fc2"].approach == "static"
        assert plan["lm_head"].precision == "fp32"


def test_mixed_precision_computes_in_16_bits(net, monkeypatch):
    monkeypatch.setenv("FORCE_BF16", "1")
    converted = convert(net, MixedPrecisionConfig("bf16"))
    assert find_module_result(converted).plan["fc1"].precision == "bf16"


def test_missing_calibration_and_configuration_are_errors(net):
    with pytest.raises(DataError, match="requires calibration inputs"):
        convert(prepare(net, GPTQConfig()))
    with pytest.raises(ConfigurationError, match="call prepare first"):
        convert(net)
    with pytest.raises(ConfigurationError, match="a configuration or a dict"):
        prepare(net, "rtn")


def test_calls_after_the_end_of_calibration_do_not_count(net, batches):
    prepared = prepare(net, StaticQuantConfig())
    prepared(batches[0])
    finalize_calibration(prepared)
    prepared(1000 * batches[0])
    ranges = find_module_result(convert(prepared)).observations.ranges["x"]
    assert ranges["minmax"][1] == pytest.approx(float(batches[0].max()))


def test_the_given_model_stays_as_it_was(net, batches):
    original = copy.deepcopy(net.state_dict())
    prepared = prepare(net, GPTQConfig(), inplace=False)
    assert prepared is not net
    prepared(batches[0])
    convert(prepared)
    assert all(torch.equal(value, original[name]) for name, value in net.state_dict().items())
    assert not net._forward_pre_hooks
    assert not prepared._forward_pre_hooks


def test_a_saved_module_computes_the_same(net, batches, tmp_path):
    converted = convert(net, RTNConfig())
    save(converted, tmp_path / "one")
    converted.save(tmp_path / "two")
    converted.save(example_inputs=(batches[0],), output_dir=tmp_path / "three")
    for folder in ("one", "two", "three"):
        assert torch.equal(load(tmp_path / folder)(batches[0]), converted(batches[0]))
    with pytest.raises(ConfigurationError, match="that convert returned"):
        save(net, tmp_path)


def test_an_exported_graph_can_be_prepared(net, batches):
    batch = torch.export.Dim("batch", min=2)
    exported = export(net, (batches[0],), dynamic_shapes=({0: batch},))
    prepared = prepare(exported, StaticQuantConfig())
    prepared(batches[0])
    converted = convert(prepared)
    assert find_module_result(converted).plan.counts()["int8"] == 3
    assert converted(batches[1][:5]).shape == (5, 16)


def test_a_graph_exported_for_one_sample_is_converted_for_one(net):
    sample = torch.randn(1, 64)
    prepared = prepare(export(net, (sample,)), StaticQuantConfig())
    prepared(sample)
    converted = convert(prepared)
    assert find_module_result(converted).plan.counts()["int8"] == 3
    assert 0 < _error(converted, net, sample) < 0.1


@pytest.fixture(scope="module")
def decoder() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=128, num_hidden_layers=2, **sizes, **ends)
    ).eval()


@pytest.mark.slow
def test_a_decoder_keeps_its_class_and_is_saved_for_transformers(decoder, tmp_path):
    tokens = torch.randint(1, 128, (4, 16))
    prepared = prepare(decoder, GPTQConfig(use_sym=False))
    prepared(tokens)
    converted = convert(prepared)
    assert isinstance(converted, LlamaForCausalLM)
    plan = find_module_result(converted).plan
    assert plan["lm_head"].precision == "fp32"
    assert plan.counts()["int4"] == 14
    prompt = {"attention_mask": torch.ones(1, 8, dtype=torch.long), "do_sample": False}
    written = converted.generate(tokens[:1, :8], max_new_tokens=4, **prompt)
    converted.save(tmp_path / "default")
    again = load(tmp_path / "default").generate(tokens[:1, :8], max_new_tokens=4, **prompt)
    assert torch.equal(written, again)
    save(converted, tmp_path / "checkpoint", format="huggingface")
    assert (tmp_path / "checkpoint" / "config.json").is_file()


@pytest.mark.slow
def test_a_mean_number_of_bits_is_met(decoder):
    tokens = torch.randint(1, 128, (8, 16))
    prepared = prepare(decoder, AutoRoundConfig(target_bits=6, options=["W4A16", "W8A16"]))
    prepared(tokens)
    result = find_module_result(convert(prepared))
    assert set(result.plan.counts()) <= {"int4", "int8", "fp32"}
    assert result.loaded.size * 8 <= 6.01 * sum(p.numel() for p in decoder.parameters())
