"""INT8 key-value caches: rounding, bytes, modes of generation, perplexity, saved results."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import neural_mp
from neural_mp import MixedPrecision, PrecisionPlan, convert_with_plan
from neural_mp.adaptors.pytorch.graph.int8_cache import count_cache_bytes, make_int8_cache
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ConfigurationError, ConversionError

ENDS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    **ENDS,
}
IDS = torch.randint(1, 128, (4, 24), generator=torch.Generator().manual_seed(0))
PROMPT = {"input_ids": IDS[:2, :12], "attention_mask": torch.ones(2, 12, dtype=torch.long)}
INT8 = OpConfig(Precision.INT8, QuantSpec.parse("int8 symmetric per_channel"))


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def _gemma() -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=8)).eval()


def _convert(decoder, layer="model.layers.0.mlp.up_proj", ids=IDS, **options):
    plan = PrecisionPlan({layer: INT8})
    inputs = ids if isinstance(ids, dict) else {"input_ids": ids}
    return convert_with_plan(decoder, plan, inputs=inputs, capture="layers", **options)


def _write(module, **options):
    return module.generate(
        **PROMPT, max_new_tokens=16, do_sample=False, return_dict_in_generate=True, **options
    )


def test_rows_of_heads_and_tokens_are_rounded_by_scales_of_their_own() -> None:
    cache = make_int8_cache(LlamaConfig(**SIZES))
    drawn = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, 40, 64, generator=drawn) * torch.logspace(-3, 3, 40)[:, None]
    keys[0, 0, 5] = 0
    for part in keys.split([7, 1, 32], dim=2):
        read, _ = cache.update(part, part, 0)
    values = keys.numpy()
    most = np.abs(values).max(-1, keepdims=True)
    scales = torch.from_numpy(most / 127).to(torch.bfloat16).float().numpy()
    expected = np.rint(values / np.maximum(scales, 1e-30)) * scales
    np.testing.assert_allclose(read.numpy(), expected, rtol=1e-6)
    assert np.all(np.abs(read.numpy() - values) <= 0.51 * most / 127)


def test_bytes_are_at_most_52_percent_of_a_bfloat16_cache() -> None:
    config = LlamaConfig(**SIZES)
    sizes = []
    for cache in (make_int8_cache(config), DynamicCache(config=config)):
        states = torch.zeros(1, 1, 2016, 64, dtype=torch.bfloat16)
        for layer in range(2):
            cache.update(states, states, layer)
            for _ in range(32):
                cache.update(states[:, :, :1], states[:, :, :1], layer)
        sizes.append(count_cache_bytes(cache))
    assert sizes[0] <= 0.52 * sizes[1]


@pytest.mark.parametrize("make", [_llama, _gemma])
def test_generate_keeps_integers_and_writes_as_a_whole_pass_predicts(make) -> None:
    result = _convert(make(), kv_cache="int8")
    written = _write(result.model)
    kinds = {type(layer).__name__ for layer in written.past_key_values.layers}
    assert kinds <= {"Int8Layer", "Int8SlidingWindowLayer"}
    whole = result.model(input_ids=written.sequences).logits
    assert torch.equal(written.sequences[:, 12:], whole.argmax(-1)[:, 11:-1])


@pytest.mark.parametrize("make", [_llama, _gemma])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "do_sample": True}])
def test_scores_of_beams_are_those_of_a_whole_pass(make, options) -> None:
    module = _convert(make(), kv_cache="int8").model
    options |= {"num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    written = module.generate(**PROMPT, max_new_tokens=12, **options)
    logits = module(input_ids=written.sequences).logits.log_softmax(-1)
    chosen = logits[:, 11:-1].gather(-1, written.sequences[:, 12:, None])
    assert torch.allclose(chosen.mean((1, 2)), written.sequences_scores, atol=1e-3)


def test_assisted_generation_removes_refused_tokens() -> None:
    module = _convert(_llama(), kv_cache="int8").model
    torch.manual_seed(1)
    assistant = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    prompt = {name: value[:1] for name, value in PROMPT.items()}
    options = {"max_new_tokens": 16, "do_sample": False}
    alone = module.generate(**prompt, **options)
    assert torch.equal(module.generate(**prompt, assistant_model=assistant, **options), alone)


def test_perplexity_of_a_trained_decoder_changes_by_at_most_a_thousandth() -> None:
    decoder = _llama().train()
    text = torch.tensor([code % 128 for code in inspect.getsource(subprocess).encode()])
    windows = text[: len(text) // 48 * 48].reshape(-1, 48)
    optimizer = torch.optim.AdamW(decoder.parameters(), 3e-3)
    for step in range(120):
        batch = windows[step * 16 % 640 :][:16]
        decoder(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    unseen = windows[-160:]
    losses = []
    for kv_cache in ("float", "int8"):
        module = _convert(decoder.eval(), kv_cache=kv_cache).model
        with torch.no_grad():
            losses.append(float(module(input_ids=unseen, labels=unseen).loss))
    assert losses[0] != losses[1]
    assert losses[0] < 2.8  # it has learned
    assert np.exp(losses[1] - losses[0]) <= 1.001


def test_saved_results_keep_the_cache(tmp_path) -> None:
    result = _convert(_llama(), kv_cache="int8")
    result.save(tmp_path / "saved")
    code = (
        "import sys, torch, neural_mp\n"
        "module = neural_mp.load(sys.argv[1]).model\n"
        "ids, path = torch.load(sys.argv[2]), sys.argv[3]\n"
        "options = dict(max_new_tokens=16, do_sample=False, return_dict_in_generate=True)\n"
        "written = module.generate(ids, attention_mask=torch.ones_like(ids), **options)\n"
        "assert type(written.past_key_values.layers[0]).__name__ == 'Int8Layer'\n"
        "torch.save(written.sequences, path)\n"
    )
    torch.save(PROMPT["input_ids"], tmp_path / "ids")
    paths = [str(tmp_path / name) for name in ("saved", "ids", "out")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, timeout=300)
    assert torch.equal(torch.load(tmp_path / "out"), _write(result.model).sequences)


def test_a_search_judges_plans_with_the_cache() -> None:
    converter = MixedPrecision(kv_cache="int8", capture="layers", precisions="int8", cache=False)
    converter.model, converter.metric = _llama(), "perplexity"
    converter.objective = "footprint"
    converter.eval_dataloader = [({"input_ids": IDS}, IDS)]
    result = converter()
    with torch.no_grad():
        loss = float(result.model(input_ids=IDS, labels=IDS).loss)
        rest = float(result.model(input_ids=IDS, labels=IDS, use_cache=False).loss)
    assert result.report.accuracy == pytest.approx(np.exp(loss), rel=1e-6)
    assert loss != rest


def test_encoder_decoders_keep_their_encoder_in_floats() -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64,
        d_model=64,
        d_kv=32,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
    ids = {"input_ids": IDS % 64, "decoder_input_ids": IDS % 64}
    result = _convert(model, "encoder.block.0.layer.0.SelfAttention.q", ids, kv_cache="int8")
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    cache = result.model.generate(IDS % 64, **options).past_key_values
    assert type(cache.self_attention_cache.layers[0]).__name__ == "Int8Layer"
    assert type(cache.cross_attention_cache.layers[0]).__name__ == "DynamicLayer"


def test_models_without_such_a_cache_are_one_error() -> None:
    dense = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with pytest.raises(ConversionError, match="requires a decoder of transformers"):
        convert_with_plan(dense, PrecisionPlan({}), inputs=torch.ones(2, 8), kv_cache="int8")
    with pytest.raises(ConfigurationError, match="kv_cache must be"):
        _convert(_llama(), kv_cache="int4")


def test_loaded_results_answer_for_the_option(tmp_path) -> None:
    _convert(_llama()).save(tmp_path / "float")
    module = neural_mp.load(tmp_path / "float").model
    assert type(_write(module).past_key_values.layers[0]).__name__ == "DynamicLayer"
