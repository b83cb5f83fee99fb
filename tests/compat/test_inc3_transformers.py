"""`neural_compressor.transformers`: models that are quantized on loading."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from neural_mp.compat.inc.v3.flow import find_module_result
from neural_mp.compat.inc.v3.torch_quantization import RTNConfig, load_empty_model, quantize
from neural_mp.compat.inc.v3.transformers_names import (
    AutoModelForCausalLM,
    AwqConfig,
    GPTQConfig,
    LMEvalParser,
    RtnConfig,
    evaluate,
)
from neural_mp.errors import DataError, MissingFrameworkError

_TOKENS = [torch.randint(1, 128, (2, 16), generator=torch.Generator().manual_seed(0))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=128, num_hidden_layers=1, **sizes, **ends)
    path = tmp_path_factory.mktemp("decoder")
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text('{"model_max_length": 64}', encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "weight"),
    [
        (RtnConfig(group_size=64), "int4 symmetric per_group 64 minmax"),
        (GPTQConfig(dataset=_TOKENS), "int4 symmetric per_group 32 minmax gptq"),
        (AwqConfig(dataset=_TOKENS), "uint4 asymmetric per_group 32 minmax awq"),
    ],
)
def test_a_folder_is_quantized_on_loading_and_saved_for_the_next_time(
    folder, config, weight, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    plan = find_module_result(model).plan
    assert {str(c.weight) for op, c in plan.items() if "proj" in op} == {weight}
    model.save_pretrained(tmp_path / "saved")
    # As scripts do afterwards, with the tokenizer.
    (tmp_path / "saved" / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(_TOKENS[0]).logits, model(_TOKENS[0]).logits)


def test_a_model_loaded_for_conversion_by_layers_gives_the_same_result(folder):
    ids = _TOKENS[0]
    with torch.no_grad():
        whole = quantize(LlamaForCausalLM.from_pretrained(folder).eval(), RTNConfig())(ids)
        layers = quantize(load_empty_model(folder), RTNConfig(use_layer_wise=True))(ids)
    assert torch.equal(whole.logits, layers.logits)


def test_calibration_texts_become_windows(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 10, encoding="utf-8")

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    config = GPTQConfig(tokenizer=tokenizer, dataset=text, seq_len=8, n_samples=6, batch_size=4)
    assert [batch.shape for batch in config.batches()] == [(4, 8), (2, 8)]
    with pytest.raises(DataError, match="no data are downloaded"):
        list(GPTQConfig(dataset="NeelNanda/pile-10k").batches())
    with pytest.raises(DataError, match="requires calibration data"):
        list(GPTQConfig().batches())


def test_tasks_need_their_package():
    with pytest.raises(MissingFrameworkError, match=r"pip install 'lm-eval\[hf\]'"):
        evaluate(LMEvalParser(tasks="lambada_openai"))
