"""Decoders in several files: converted from the files as from memory, without second copies."""

from __future__ import annotations

import copy
import gc
import os
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import neural_mp
from neural_mp import convert_with_plan
from neural_mp.adaptors.common.weights import grouped_weight
from neural_mp.adaptors.common.weights.grouped_weight import Quantizer
from neural_mp.adaptors.common.weights.weight_corrections import round_with_corrections
from neural_mp.adaptors.pytorch import layer_weights
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.decoders import transformers_folder
from neural_mp.adaptors.pytorch.decoders.transformers_folder import read_folder
from neural_mp.adaptors.pytorch.graph import kernel_ops
from neural_mp.core.enums import Capture
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import make_weight_only
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ModelLoadError

transformers = pytest.importorskip("transformers")

WORDS = 64
_SIZES = {"vocab_size": WORDS, "num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 64}
_GATED = {**_SIZES, "intermediate_size": 96, "num_key_value_heads": 1}
_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_CONFIGS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_GATED, "tie_word_embeddings": False}),
    "qwen": ("Qwen2Config", "Qwen2ForCausalLM", {**_GATED, "tie_word_embeddings": True}),
    "opt": ("OPTConfig", "OPTForCausalLM", {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel",
             {"vocab_size": WORDS, "n_embd": 64, "n_layer": 2, "n_head": 2}),
}  # fmt: skip
_IDS = torch.arange(1, 25).reshape(2, 12)


def _decoder(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config, model, options = _CONFIGS[kind]
    built = getattr(transformers, config)(**options, **_ENDS)
    return getattr(transformers, model)(built).to(dtype).eval()


def _folder(decoder: nn.Module, path):
    decoder.save_pretrained(path, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def _plan(decoder: nn.Module, text: str) -> PrecisionPlan:
    spec = QuantSpec.parse(text)
    dense = (nn.Linear, transformers.pytorch_utils.Conv1D)
    names = [name for name, part in decoder.named_modules() if isinstance(part, dense)]
    names = [name for name in names if name != "lm_head" and (".c_proj" not in name)]
    return PrecisionPlan({name: make_weight_only(spec) for name in names})


def _written(model: nn.Module) -> list[int]:
    prompt = {"input_ids": _IDS[:, :5], "attention_mask": torch.ones_like(_IDS[:, :5])}
    return model.generate(**prompt, max_new_tokens=6, do_sample=False).tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize(
    ("kind", "correction", "dtype"),
    [
        ("llama", "rtn", torch.bfloat16),
        ("llama", "gptq", torch.float32),
        ("qwen", "hqq", torch.float32),
        ("opt", "gptq", torch.float32),
        ("gpt2", "rtn", torch.bfloat16),
        ("gpt2", "gptq", torch.float32),
    ],
)
def test_a_folder_is_converted_like_the_model_in_memory(kind, correction, dtype, tmp_path):
    decoder, text = _decoder(kind, dtype), f"uint4 asymmetric per_group 32 {correction}"
    folder = _folder(decoder, tmp_path / "float")
    options = {
        "inputs": {"input_ids": _IDS},
        "calibration": [{"input_ids": _IDS}],
        "capture": Capture.LAYERS,
    }
    # Not `decoder`: a cast of a whole module rounds its rotary frequencies, too.
    model = copy.deepcopy(type(decoder).from_pretrained(folder).eval())
    from_memory = convert_with_plan(model, _plan(decoder, text), **options)
    from_files = convert_with_plan(folder, _plan(decoder, text), **options)
    assert from_files.report.op_counts == from_memory.report.op_counts
    expected = from_memory(input_ids=_IDS).logits
    assert torch.equal(from_files(input_ids=_IDS).logits, expected)
    from_files.save(tmp_path / "saved")
    again = neural_mp.load(tmp_path / "saved")
    assert torch.equal(again(input_ids=_IDS).logits, expected)
    assert _written(again.model) == _written(from_memory.model)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_a_result_keeps_no_float_weight_and_is_written_and_read_shard_by_shard(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(transformers_folder, "MAX_SHARD_BYTES", 20_000)
    decoder = _decoder("llama")
    plan = _plan(decoder, "uint4 asymmetric per_group 32")
    embedding = decoder.get_submodule("model.embed_tokens").weight.detach().clone()
    alive = {name: weakref.ref(decoder.get_submodule(name).weight) for name in plan}
    inputs = {"input_ids": _IDS}
    result = convert_with_plan(decoder, plan, inputs=inputs, capture=Capture.LAYERS)
    del decoder
    gc.collect()
    assert len(plan) == 14
    assert not [name for name, weight in alive.items() if weight() is not None]
    result.save(tmp_path / "saved")
    for stem in ("model", "layers"):
        assert not (tmp_path / "saved" / f"{stem}.safetensors").exists()
        shards = sorted((tmp_path / "saved").glob(f"{stem}-*.safetensors"))
        assert len(shards) > 1
        assert all(shard.stat().st_size < 30_000 for shard in shards)
    again = neural_mp.load(tmp_path / "saved")
    assert torch.equal(again(**inputs).logits, result(**inputs).logits)
    result.save_pretrained(tmp_path / "checkpoint", "compressed-tensors")
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 1
    weights = transformers_folder.read_weights(tmp_path / "checkpoint" / "model.safetensors")
    assert torch.equal(weights["model.embed_tokens.weight"], embedding)
    shards[0].unlink()
    with pytest.raises(ModelLoadError, match=shards[0].name):
        neural_mp.load(tmp_path / "saved")


def test_transformers_reads_shards_in_place_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers_folder, "MAX_SHARD_BYTES", 20_000)
    decoder = _decoder("llama")
    decoder.config.save_pretrained(tmp_path)
    transformers_folder.write_weights(tmp_path / "model.safetensors", decoder.state_dict())
    again = type(decoder).from_pretrained(tmp_path).eval()
    assert torch.equal(again(input_ids=_IDS).logits, decoder(input_ids=_IDS).logits)


def test_an_index_names_files_of_its_folder_only(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers_folder, "MAX_SHARD_BYTES", 20_000)
    file = tmp_path / "model.safetensors"
    transformers_folder.write_weights(file, _decoder("llama").state_dict())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    with pytest.raises(ModelLoadError, match="files of the folder"):
        transformers_folder.read_weights(file)


def test_no_weights_are_a_file_without_weights(tmp_path):
    transformers_folder.write_weights(tmp_path / "layers.safetensors", {})
    assert transformers_folder.read_weights(tmp_path / "layers.safetensors") == {}


def test_weights_in_16_bits_are_read_in_float32_one_at_a_time():
    decoder = _decoder("llama", torch.bfloat16)
    with torch.no_grad():
        model = PyTorchAdaptor().load(decoder, example={"input_ids": _IDS}, capture=Capture.LAYERS)
    weights = layer_weights.constant_weights(model)
    layer = "model.layers.1.mlp.up_proj"
    first, second = weights[layer], weights[layer]
    assert first.dtype == np.float32
    assert not np.shares_memory(first, second)
    own = decoder.get_submodule(layer).weight.detach().float().numpy()
    np.testing.assert_array_equal(first, own)


@pytest.mark.parametrize(
    "words", ["uint4 asymmetric per_group 32", "uint2 asymmetric per_group 32 hqq"]
)
def test_parts_of_a_weight_round_like_the_whole(words, monkeypatch):
    weight = np.random.default_rng(0).normal(size=(300, 64)).astype(np.float32)
    quantizer = Quantizer(QuantSpec.parse(words))
    whole = round_with_corrections(weight, quantizer)
    monkeypatch.setattr(grouped_weight, "VALUES_AT_ONCE", 64)
    in_parts = round_with_corrections(weight, quantizer)
    assert len(list(grouped_weight.iterate_row_parts(weight.shape))) == 3
    for name in ("codes", "scales", "offsets"):
        np.testing.assert_array_equal(getattr(in_parts, name), getattr(whole, name))


def test_parts_of_a_weight_are_laid_out_like_the_whole(monkeypatch):
    codes = torch.randint(0, 256, (176, 32), dtype=torch.uint8)
    parameters = torch.ones(176, 1), torch.zeros(176, 1)
    whole, _ = kernel_ops.four_bit_weight(codes, *parameters)
    monkeypatch.setattr(kernel_ops, "_EXPANDED", 1)
    in_parts, _ = kernel_ops.four_bit_weight(codes, *parameters)
    assert torch.equal(in_parts, whole)


def test_the_layout_of_the_kernel_is_made_at_the_first_call_with_few_rows(monkeypatch):
    layouts = []
    lay_out = kernel_ops.four_bit_weight
    monkeypatch.setattr(kernel_ops, "four_bit_weight", lambda *w: layouts.append(w) or lay_out(*w))
    codes = torch.randint(0, 256, (32, 32), dtype=torch.uint8)
    stored = (
        codes,
        torch.ones(32, 1, dtype=torch.bfloat16),
        torch.zeros(32, 1, dtype=torch.bfloat16),
    )
    weight = kernel_ops.KernelWeight()
    rows = torch.randn(65, 64, generator=torch.Generator().manual_seed(0))
    many = kernel_ops.four_bit_linear(rows, weight, *stored, None)
    assert not layouts
    for first in (0, 32):
        few = kernel_ops.four_bit_linear(rows[first : first + 32], weight, *stored, None)
        torch.testing.assert_close(few, many[first : first + 32], rtol=0.02, atol=0.5)
    assert len(layouts) == 1


def _of_half_the_bytes(shard):
    os.truncate(shard, shard.stat().st_size // 2)


def _without_header(shard):
    shard.write_bytes(shard.read_bytes()[:8] + b"\xff" * 100)


@pytest.mark.parametrize("damage", [os.remove, _of_half_the_bytes, _without_header])
def test_a_missing_or_damaged_shard_is_named(damage, tmp_path):
    folder = _folder(_decoder("llama"), tmp_path / "float")
    shard = sorted(folder.glob("*.safetensors"))[1]
    damage(shard)
    with pytest.raises(ModelLoadError, match=shard.name):
        read_folder(folder)
