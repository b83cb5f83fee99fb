"""Decoders of transformers, converted layer by layer: they generate, and are read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.core.enums import Capture
from neural_mp.errors import CaptureError, ConversionError, DataError

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]

WORDS, LENGTH = 64, 12
_SIZES = {"vocab_size": WORDS, "num_attention_heads": 2, "num_hidden_layers": 2}
_LLAMA = {**_SIZES, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64}
_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _decoder(kind: str) -> nn.Module:
    torch.manual_seed(0)
    names = {"llama": "Llama", "qwen": "Qwen2", "opt": "OPT", "gpt2": "GPT2"}
    model = "GPT2LMHeadModel" if kind == "gpt2" else f"{names[kind]}ForCausalLM"
    options = {
        "llama": {**_LLAMA, "num_key_value_heads": 1},
        "qwen": {**_LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True},
        "opt": {**_SIZES, "hidden_size": 64, "ffn_dim": 96, "word_embed_proj_dim": 64,
                "max_position_embeddings": 64},
        "gpt2": {"vocab_size": WORDS, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2},
    }[kind]  # fmt: skip
    config = getattr(transformers, f"{names[kind]}Config")(**options, **_ENDS)
    return getattr(transformers, model)(config).eval()


def _tuned(decoder: nn.Module, precisions: str):
    ids = torch.randint(1, WORDS, (8, LENGTH))
    converter = MixedPrecision()
    converter.model, converter.precisions, converter.capture = decoder, precisions, "layers"
    converter.objective, converter.metric = "footprint", "perplexity"
    converter.accuracy_criterion = AccuracyCriterion(10, any_tolerance=True)
    converter.eval_dataloader = [({"input_ids": ids}, ids)]
    return converter(), ids


def _written(model: nn.Module, ids: torch.Tensor) -> list[int]:
    prompt = {"input_ids": ids[:2, :5], "attention_mask": torch.ones_like(ids[:2, :5])}
    return model.generate(**prompt, max_new_tokens=8, do_sample=False).tolist()


def _check_stored(folder: Path, least: int = 1) -> None:
    """Assert that layers store a scale in bfloat16 and an offset in a byte for each group."""
    stored = load_file(folder / "layers.safetensors")
    offsets = {name for name in stored if "offsets" in name}
    assert len(offsets) >= least
    for name in offsets:
        scales = stored[name.replace("offsets", "scales")]
        assert stored[name].shape == scales.shape
        assert (stored[name].element_size(), scales.element_size()) == (1, 2)


@pytest.mark.parametrize("kind", ["llama", "qwen", "opt", "gpt2"])
def test_a_decoder_in_4_bits_generates_the_same_tokens_after_reload(kind, tmp_path):
    decoder = _decoder(kind)
    tuned, ids = _tuned(decoder, "int4,int8")
    assert tuned.plan.counts()["int4"] >= 11
    assert type(tuned.model) is type(decoder)
    assert tuned.model.config.to_dict() == decoder.config.to_dict()
    written = _written(tuned.model, ids)
    tuned.save(tmp_path / "saved")
    _check_stored(tmp_path / "saved")
    again = neural_mp.load(tmp_path / "saved")
    assert _written(again.model, ids) == written
    assert torch.equal(again(input_ids=ids).logits, tuned(input_ids=ids).logits)
    assert again.adaptor.weight_bytes(again.held) == tuned.adaptor.weight_bytes(tuned.held)


def test_layers_in_2_bits_are_stored_and_restored_without_loss(tmp_path):
    tuned, ids = _tuned(_decoder("llama"), "int2")
    tuned.save(tmp_path / "saved")
    _check_stored(tmp_path / "saved", least=8)
    again = neural_mp.load(tmp_path / "saved")
    assert torch.equal(again(input_ids=ids).logits, tuned(input_ids=ids).logits)


def test_logits_stay_close_and_layers_left_in_fp32_are_the_users_own_modules():
    decoder = _decoder("llama")
    tuned, ids = _tuned(decoder, "int8")
    with torch.no_grad():
        expected = decoder(ids).logits
    noise = (tuned(input_ids=ids).logits - expected).norm() / expected.norm()
    assert 0 < noise < 0.05
    assert set(tuned.plan.counts()) == {"int8"}
    norm = tuned.model.model.layers[0].input_layernorm
    assert type(norm) is type(decoder.model.layers[0].input_layernorm)


class _Alone(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.layer(input_ids.float())


def test_a_model_without_dense_layers_is_one_error():
    converter = MixedPrecision(model=_Alone(nn.ReLU()), precisions="int8", capture="layers")
    converter.metric, converter.eval_dataloader = "accuracy", [(torch.ones(4, 3), torch.ones(4))]
    with pytest.raises(CaptureError, match="must run a dense layer or an embedding"):
        converter()


def test_a_class_of_the_users_own_is_converted_but_not_saved(tmp_path):
    x = torch.randn(16, 64)
    net = _Alone(nn.Linear(64, 16)).eval()
    converter = MixedPrecision(model=net, precisions="int4", capture="layers")
    converter.objective, converter.metric = "footprint", "mse"
    converter.accuracy_criterion = AccuracyCriterion(10, relative=False, any_tolerance=True)
    converter.eval_dataloader = [(x, net(x).detach())]
    tuned = converter()
    assert tuned.plan.counts() == {"int4": 1}
    with pytest.raises(ConversionError, match="unless transformers defines its class"):
        tuned.save(tmp_path / "saved")


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (
            torch.full((2, 5), WORDS + 3),
            f"the vocabulary has {WORDS} words, got token id {WORDS + 3}",
        ),
        (torch.ones(2, 70, dtype=torch.long), "the context has 64 tokens, got 70"),
    ],
)
def test_token_ids_beyond_the_limits_of_a_decoder_name_the_limit(ids, words):
    converter = MixedPrecision(model=_decoder("gpt2"), precisions="int8", capture="layers")
    converter.metric, converter.eval_dataloader = "perplexity", [({"input_ids": ids}, ids)]
    with pytest.raises(DataError, match=words):
        converter()


def test_a_context_that_a_decoder_can_exceed_is_a_warning():
    adaptor = PyTorchAdaptor()
    for length in (64, 70):
        ids = torch.ones(2, length, dtype=torch.long)
        model = adaptor.load(_decoder("llama"), example={"input_ids": ids}, capture=Capture.LAYERS)
        warnings = [line for line in model.warnings if "the context has 64 tokens, got 70" in line]
        assert len(warnings) == (length > 64)
