"""Checkpoints with `quantization_config` are loaded and run on the kernels here."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import neural_mp
from neural_mp import PrecisionPlan, convert_with_plan
from neural_mp.core.precision import OpConfig, Precision, make_weight_only
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ModelLoadError

pytestmark = pytest.mark.slow

FIRST, SECOND = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
EIGHT = "model.layers.0.mlp.down_proj"
IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes, **ends)
    net = LlamaForCausalLM(config).eval()
    plan = {
        FIRST: make_weight_only(QuantSpec.parse("uint4 asymmetric per_group 32")),
        SECOND: make_weight_only(QuantSpec.parse("int4 symmetric per_group 64")),
        EIGHT: OpConfig(Precision.INT8, QuantSpec.parse("int8 symmetric per_channel")),
    }
    return convert_with_plan(net, PrecisionPlan(plan), inputs={"input_ids": IDS}, capture="layers")


# GPTQ stores scales in float16, which rounds that of a weight in INT8.
@pytest.mark.parametrize(("form", "atol"), [("compressed-tensors", 1e-6), ("gptq", 5e-4)])
def test_a_checkpoint_written_here_computes_as_before(result, form, atol, tmp_path):
    result.save_pretrained(tmp_path / "checkpoint", form)
    again = neural_mp.load(tmp_path / "checkpoint")
    assert again.plan[FIRST].weight == result.plan[FIRST].weight
    assert again.plan[SECOND].weight == result.plan[SECOND].weight
    assert again.plan[EIGHT].precision == "int8"
    assert isinstance(again.model, LlamaForCausalLM)
    with torch.no_grad():
        expected, actual = (optimized.model(IDS).logits for optimized in (result, again))
    assert torch.allclose(actual, expected, atol=atol)
    assert again.audit().holds
    again.save(tmp_path / "own")
    assert torch.equal(neural_mp.load(tmp_path / "own").model(IDS).logits, actual)


def test_damaged_and_unknown_checkpoints_are_refused(result, tmp_path):
    folder = tmp_path / "checkpoint"
    result.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    del weights[f"{FIRST}.weight_scale"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"q_proj.*weight_scale is missing"):
        neural_mp.load(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "bitsandbytes"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="quantize it here"):
        neural_mp.load(folder)
