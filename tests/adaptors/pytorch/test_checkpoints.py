"""Checkpoints for other tools: read back by the formulas of their formats."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import neural_mp
from neural_mp import PrecisionPlan, convert_with_plan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ConfigurationError, ConversionError

FIRST = "model.layers.0.self_attn.q_proj"
EIGHT = "model.layers.0.mlp.down_proj"
IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def net() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def _result(net, spec="uint4 asymmetric per_group 32 gptq", name=FIRST):
    int4 = OpConfig(Precision(f"int{QuantSpec.parse(spec).dtype.bits}"), QuantSpec.parse(spec))
    int8 = OpConfig(Precision.INT8, QuantSpec.parse("int8 symmetric per_channel"))
    table = OpConfig(Precision.INT4, QuantSpec.parse("uint4 asymmetric per_group 32"))
    plan = PrecisionPlan({name: int4, EIGHT: int8, "model.embed_tokens": table})
    inputs = {"input_ids": IDS}
    return convert_with_plan(net, plan, inputs=inputs, capture="layers", calibration=[inputs])


def _fields(packed: torch.Tensor, bits: int, count: int) -> np.ndarray:
    """Return the codes [rows, count] of int32 words, the first in the lowest bits."""
    shifts = np.arange(0, 32, bits)
    codes = packed.numpy().view(np.uint32)[..., None] >> shifts.astype(np.uint32) & (2**bits - 1)
    return codes.reshape(len(packed), -1)[:, :count].astype(np.int64)


def _packed(stored, name, bits, size):
    """Return a weight of `pack-quantized`."""
    outputs, inputs = stored[f"{name}.weight_shape"].tolist()
    codes = _fields(stored[f"{name}.weight_packed"], bits, inputs)
    scales = np.repeat(stored[f"{name}.weight_scale"].numpy(), size or inputs, axis=1)
    zeros = np.full((outputs, 1), 2 ** (bits - 1))
    if f"{name}.weight_zero_point" in stored:
        zeros = _fields(stored[f"{name}.weight_zero_point"].t().contiguous(), bits, outputs).T
        zeros = np.repeat(zeros, size, axis=1)
    return (codes - zeros) * scales


def _gptq(stored, name, bits, shift):
    """Return a weight of a GPTQ checkpoint."""
    packed = stored[f"{name}.qweight"].t().contiguous()
    inputs = packed.shape[1] * 32 // bits
    groups = stored[f"{name}.g_idx"].numpy()
    outputs = len(packed)
    zeros = _fields(stored[f"{name}.qzeros"], bits, outputs) + shift
    scales = stored[f"{name}.scales"].float().numpy()
    return ((_fields(packed, bits, inputs).T - zeros[groups]) * scales[groups]).T


def _own_weight(result, name):
    """Return the weight that a converted layer computes with."""
    layer = result.model.get_submodule(name)
    inputs = net_inputs(name)
    with torch.no_grad():
        return layer(torch.eye(inputs)[None].repeat(2, 1, 1))[0].t().numpy()


def net_inputs(name: str) -> int:
    return 128 if name == EIGHT else 64


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq"])
def test_weights_read_by_the_format_are_those_of_the_model(net, tmp_path, method):
    result = _result(net)
    result.save_pretrained(tmp_path, method)
    stored = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == method
    shift = int(config.get("checkpoint_format") == "gptq")
    for name, bits, size in ((FIRST, 4, 32), (EIGHT, 8, None)):
        weight = (
            _gptq(stored, name, bits, shift)
            if method == "gptq"
            else _packed(stored, name, bits, size)
        )
        np.testing.assert_allclose(weight, _own_weight(result, name), atol=2e-3)
        assert f"{name}.weight" not in stored
    table = stored["model.embed_tokens.weight"]
    assert torch.equal(
        table, result.model.model.embed_tokens(torch.arange(64)[None].repeat(2, 1))[0]
    )
    key = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(stored[key], net.get_submodule(key.removesuffix(".weight")).weight)


def test_a_configuration_names_the_form_of_every_layer(net, tmp_path):
    result = _result(net)
    result.save_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    groups = {
        tuple(group["targets"]): (group["weights"]["num_bits"], group["weights"]["symmetric"])
        for group in config["config_groups"].values()
    }
    assert set(groups.values()) == {(4, False), (8, True)}
    assert "model.layers.0.self_attn.k_proj" in config["ignore"]
    result.save_pretrained(tmp_path / "gptq", "gptq")
    config = json.loads((tmp_path / "gptq/config.json").read_text())["quantization_config"]
    dynamic = config["dynamic"]
    forms = [(form["bits"], form["sym"]) for name, form in dynamic.items() if form]
    assert sorted([(config["bits"], config["sym"]), *forms]) == [(4, False), (8, True)]
    assert "-:^model\\.layers\\.0\\.self_attn\\.k_proj$" in dynamic


@pytest.mark.parametrize(
    ("words", "version"),
    [
        ("int4 symmetric per_group 32 gptq", "gptq"),
        ("uint4 asymmetric per_group 32 gptq", "gptq_v2"),
    ],
)
def test_asymmetric_weights_are_in_the_version_that_gptqmodel_reads(net, tmp_path, words, version):
    # gptqmodel refuses asymmetric weights of the first version unless its own name is in the file.
    result = _result(net, words)
    result.save_pretrained(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["checkpoint_format"] == version
    stored = load_file(tmp_path / "model.safetensors")
    weight = _gptq(stored, FIRST, 4, int(version == "gptq"))
    np.testing.assert_allclose(weight, _own_weight(result, FIRST), atol=2e-3)


def test_transformers_computes_the_same_logits(net, tmp_path):
    pytest.importorskip("compressed_tensors")
    result = _result(net, "int4 symmetric per_group 32 gptq")
    result.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        theirs, ours = again(IDS).logits, result.model(IDS).logits
    assert (theirs - ours).norm() < 0.02 * ours.norm()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("uint4 asymmetric per_group 32 hqq", r"offsets between the codes \(hqq\)"),
        ("uint3 asymmetric per_group 32", "weight in 3 bits.* requires 4 or 8"),
    ],
)
def test_what_a_format_cannot_hold_is_one_clear_error(net, tmp_path, words, message):
    with pytest.raises(ConversionError, match=message):
        _result(net, words).save_pretrained(tmp_path / "out")


def test_other_models_and_formats_are_refused(net, tmp_path):
    with pytest.raises(ConfigurationError, match="quant_method cannot be 'awq'"):
        _result(net).save_pretrained(tmp_path / "out", "awq")
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64)).eval()
    int8 = OpConfig(Precision.INT8, QuantSpec.parse("int8 symmetric per_channel"))
    whole = convert_with_plan(plain, PrecisionPlan({"0": int8}), inputs=torch.zeros(2, 64))
    with pytest.raises(ConversionError, match="requires a model of transformers"):
        whole.save_pretrained(tmp_path / "out")


@pytest.mark.parametrize("name", [FIRST, "lm_head"])
def test_a_tied_head_is_stored_once_unless_its_weight_is_converted(tmp_path, name):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    spec = QuantSpec.parse("uint4 asymmetric per_group 32")
    plan = PrecisionPlan({name: OpConfig(Precision.INT4, spec)})
    tied = LlamaForCausalLM(config).eval()
    result = convert_with_plan(tied, plan, inputs={"input_ids": IDS}, capture="layers")
    result.save_pretrained(tmp_path / "c")
    stored = load_file(tmp_path / "c" / "model.safetensors")
    written = json.loads((tmp_path / "c" / "config.json").read_text())
    assert written["tie_word_embeddings"] is (name == FIRST)
    heads = {key for key in stored if key.startswith("lm_head.")}
    assert bool(heads) is (name == "lm_head")
    assert "model.embed_tokens.weight" in stored
    again = neural_mp.load(tmp_path / "c")
    assert torch.allclose(again.model(IDS).logits, result.model(IDS).logits, atol=0.02)
