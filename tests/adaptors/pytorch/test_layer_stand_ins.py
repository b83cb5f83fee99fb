"""Modules in the place of layers answer for the layers' attributes."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import neural_mp
from neural_mp import PrecisionPlan, convert_with_plan
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.enums import Capture
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import CaptureError, ConversionError

_INT4 = OpConfig(Precision.INT4, QuantSpec.parse("uint4 asymmetric per_group 32"))
_ENDS = {"eos_token_id": 1, "pad_token_id": 0}


class _Reader(nn.Module):
    """Reads what models of transformers read of their layers."""

    def __init__(self, change: float = 1.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(40, 32), nn.Embedding(8, 32)
        self.first = nn.Linear(32, 64)
        self.last = nn.Linear(64, 32)
        self.change = change

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(self.places.num_embeddings)
        x = self.words(ids) + self.places(places) + self.words.weight[self.words.padding_idx or 0]
        x = self.first(x.to(self.first.weight.dtype)).relu()
        self.last.weight.data.mul_(self.change)
        assert self.last.weight.device == x.device
        assert self.first.out_features == x.shape[-1]
        return self.last(x) + F.linear(x, self.last.weight, self.last.bias)


class _Checker(_Reader):
    """Accepts nothing but a dense layer as its last layer."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.last, nn.Linear)
        return super().forward(ids)


def _ids() -> torch.Tensor:
    return torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(1))


def _convert(model: nn.Module, *ops: str):
    plan = PrecisionPlan(dict.fromkeys(ops, _INT4))
    return convert_with_plan(model, plan, inputs=(_ids(),), capture=Capture.LAYERS)


def _round(weight: torch.Tensor) -> torch.Tensor:
    """Round to nearest in 4 bits, groups of 32, offsets of whole steps, scales in bfloat16."""
    groups = weight.detach().reshape(len(weight), -1, 32)
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    step = ((high - low) / 15).clamp(min=1e-9).bfloat16().float()
    zero = (-low / step).round()
    return (((groups / step + zero).round().clamp(0, 15) - zero) * step).reshape(weight.shape)


def test_models_that_read_attributes_of_their_layers_compute_with_the_stored_weights():
    torch.manual_seed(0)
    model = _Reader().eval()
    result = _convert(model, "words", "first", "last")
    rounded = copy.deepcopy(model)
    for layer in (rounded.words, rounded.first, rounded.last):
        layer.weight.data = _round(layer.weight)
    expected = rounded(_ids())
    assert (result(_ids()) - expected).norm() < 0.02 * expected.norm()
    for module in (result.model, copy.deepcopy(result.model)):
        assert torch.equal(module(_ids()), result(_ids()))
        assert module.words.weight.shape == (40, 32)
        assert module.first.weight.dtype is torch.float32
        assert torch.allclose(module.last.weight + 0, rounded.last.weight, atol=5e-3)


def test_a_weight_of_a_converted_layer_is_not_changed_in_silence():
    model = _Reader(change=1.5).eval()
    with pytest.raises(ConversionError, match="must not change"):
        _convert(model, "last").model(_ids())


def test_layers_that_the_code_refuses_to_have_replaced_stay_with_a_warning():
    loaded = PyTorchAdaptor().load(_Checker().eval(), example=(_ids(),), capture=Capture.LAYERS)
    assert set(loaded.parts) == {"words", "places", "first"}
    assert any("1 layer (last) stayed as in the model" in text for text in loaded.warnings)


def test_a_model_that_refuses_every_replacement_is_not_captured():
    class _Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(self.only, nn.Linear)
            return self.only(x)

    with pytest.raises(CaptureError, match="must accept other modules"):
        PyTorchAdaptor().load(_Whole(), example=(torch.ones(2, 32),), capture=Capture.LAYERS)


def _t5(gated: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_ff=64, d_kv=8, num_layers=1, num_heads=4,
        feed_forward_proj="gated-gelu" if gated else "relu", decoder_start_token_id=0, **_ENDS,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": _ids() + 2, "decoder_input_ids": _ids()[:, :4] + 2}


def _whisper() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        max_source_positions=10, max_target_positions=32, num_mel_bins=8,
        decoder_start_token_id=2, bos_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None, **_ENDS,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": _ids()[:, :4]}


def _mamba() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4, time_step_rank=4,
        bos_token_id=0, **_ENDS,
    )  # fmt: skip
    return transformers.MambaForCausalLM(config), {"input_ids": _ids() + 2}


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: _t5(True), lambda: _t5(False), _whisper, _mamba])
def test_families_that_read_their_weights_generate_the_same_tokens_after_reload(make, tmp_path):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, inputs = make()
    layers = {
        name: _INT4
        for name, layer in model.eval().named_modules()
        if type(layer) is nn.Linear and not (layer.in_features % 32 or layer.out_features % 16)
        and "dt_proj" not in name  # its weight is read, the layer is not called
    }  # fmt: skip
    result = convert_with_plan(model, PrecisionPlan(layers), inputs=inputs, capture=Capture.LAYERS)
    prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    written = result.model.generate(**prompt, **options)
    result.save(tmp_path / "saved")
    again = neural_mp.load(tmp_path / "saved").model
    assert torch.equal(again.generate(**prompt, **options), written)


@pytest.mark.slow
def test_tables_that_scale_their_rows_are_converted_beside_a_tied_head(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, bos_token_id=2, **_ENDS,
    )  # fmt: skip
    model, ids = transformers.Gemma3ForCausalLM(config).eval(), {"input_ids": _ids() + 2}
    table, head = "model.embed_tokens.embedding", "lm_head"
    plan = PrecisionPlan({table: _INT4, head: _INT4})
    result = convert_with_plan(model, plan, inputs=ids, capture=Capture.LAYERS)
    rounded = copy.deepcopy(model)
    rounded.lm_head.weight.data = _round(model.lm_head.weight)  # the weight of the table, too
    expected = rounded(**ids).logits
    assert (result(**ids).logits - expected).norm() < 0.02 * expected.norm()
    assert result.report.size < result.report.baseline_size - 0.6 * 4 * 256 * 32
    result.save(tmp_path / "saved")
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")
    again = neural_mp.load(tmp_path / "saved")
    assert torch.equal(again(**ids).logits, result(**ids).logits)


@pytest.mark.slow
def test_tables_of_positions_that_take_a_shape_stay():
    transformers = pytest.importorskip("transformers")
    config = transformers.LEDConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64,
        decoder_ffn_dim=64, encoder_attention_heads=2, decoder_attention_heads=2,
        attention_window=8, max_encoder_position_embeddings=32, bos_token_id=2, **_ENDS,
    )  # fmt: skip
    model = transformers.LEDForConditionalGeneration(config).eval()
    inputs = {"input_ids": _ids() + 2, "decoder_input_ids": _ids()[:, :4] + 2}
    loaded = PyTorchAdaptor().load(model, example=inputs, capture=Capture.LAYERS)
    assert "led.encoder.layers.0.fc1" in loaded.parts
    assert not any("embed_positions" in path for path in loaded.parts)
