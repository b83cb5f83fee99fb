"""Methods of `transformers` that converted models answer, and models to be merged first."""

from __future__ import annotations

import copy
import json
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import neural_mp
from neural_mp import MixedPrecision, PrecisionPlan, convert_with_plan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ConfigurationError, ConversionError, ModelLoadError

IDS = torch.arange(2, 14).reshape(2, 6)
SYMMETRIC, ASYMMETRIC = "int4 symmetric per_group 32", "uint4 asymmetric per_group 32"


@pytest.fixture(scope="module", params=[False, True])
def net(request) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, bos_token_id=0, eos_token_id=0, tie_word_embeddings=request.param,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _result(net: nn.Module, spec: str = SYMMETRIC, table: bool = True):
    int4 = OpConfig(Precision.INT4, QuantSpec.parse(spec))
    layers = {name: int4 for name, layer in net.named_modules() if type(layer) is nn.Linear}
    if table:
        layers["model.embed_tokens"] = OpConfig(Precision.INT4, QuantSpec.parse(ASYMMETRIC))
    return convert_with_plan(
        net, PrecisionPlan(layers), inputs={"input_ids": IDS}, capture="layers"
    )


def test_a_converted_model_counts_the_weights_of_the_original(net):
    result = _result(net)
    for model in (result.model, copy.deepcopy(result.model)):
        for options in ({}, {"exclude_embeddings": True}):
            assert model.num_parameters(**options) == net.num_parameters(**options)
        assert model.get_input_embeddings().weight.shape == (64, 64)
        assert model.get_output_embeddings().weight.dtype is torch.float32


def test_the_tokens_of_a_converted_model_stay(net):
    model = _result(net).model
    for count in (None, 64):
        model.resize_token_embeddings(count)
    with pytest.raises(ConversionError, match="keep their 64 tokens, got 70; resize those of the"):
        model.resize_token_embeddings(70)


def test_save_pretrained_of_the_model_writes_what_transformers_reads(net, tmp_path):
    result = _result(net)
    result.model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["quantization_config"]["quant_method"] == "compressed-tensors"
    again = neural_mp.load(tmp_path).model
    assert torch.allclose(again(IDS).logits, result.model(IDS).logits, atol=0.02)
    pytest.importorskip("compressed_tensors")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.allclose(theirs(IDS).logits, result.model(IDS).logits, atol=0.02)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ASYMMETRIC, "asymmetric weight.* OptimizedModel.save, and load it by neural_mp.load"),
        ("uint2 asymmetric per_group 32", "2 bits.* OptimizedModel.save"),
    ],
)
def test_save_pretrained_of_the_model_refuses_what_would_not_load(net, tmp_path, spec, message):
    precision = Precision.INT2 if "uint2" in spec else Precision.INT4
    name = "model.layers.0.mlp.up_proj"
    plan = PrecisionPlan({name: OpConfig(precision, QuantSpec.parse(spec))})
    result = convert_with_plan(net, plan, inputs={"input_ids": IDS}, capture="layers")
    with pytest.raises(ConversionError, match=message):
        result.model.save_pretrained(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConversionError, match="takes no push_to_hub"):
        result.model.save_pretrained(tmp_path / "a", push_to_hub=True)


@pytest.mark.parametrize("suffix", [".gguf", ".safetensors", ".bin"])
def test_a_result_is_not_saved_into_a_folder_with_the_name_of_a_file(net, tmp_path, suffix):
    with pytest.raises(ConversionError, match=f"cannot be saved as a {suffix} file"):
        _result(net, table=False).save(tmp_path / f"x{suffix}")
    assert not list(tmp_path.iterdir())


def test_adapters_are_to_be_merged_first(net, tmp_path, monkeypatch):
    peft = ModuleType("peft.peft_model")
    monkeypatch.setitem(sys.modules, "peft.peft_model", peft)
    kind = type("PeftModelForCausalLM", (nn.Module,), {"__module__": "peft.peft_model"})
    with pytest.raises(ModelLoadError, match=r"adapters merged: model.merge_and_unload\(\)"):
        convert_with_plan(kind(), PrecisionPlan({}), inputs={"input_ids": IDS}, capture="layers")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    for base in (False, True):
        if base:
            net.config.save_pretrained(tmp_path)
        with pytest.raises(ModelLoadError, match=r"got an adapter of peft.* merge_and_unload\(\)"):
            convert_with_plan(
                tmp_path, PrecisionPlan({}), inputs={"input_ids": IDS}, capture="layers"
            )


def test_a_configuration_of_foreign_kernels_names_the_way(net):
    converter = MixedPrecision(model=net, capture="layers", max_bits=16)
    converter.model_wise = BitsAndBytesConfig(load_in_4bit=True)
    converter.calib_dataloader = [{"input_ids": IDS}]
    with pytest.raises(ConfigurationError, match="asks for kernels of bitsandbytes.* 'int4'"):
        converter()
