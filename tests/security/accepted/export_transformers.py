"""Models of `transformers` for export, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accepted.export_calls import Build, Call

TRANSFORMERS: dict[str, Build] = {}
#: Sizes under the names that most configurations use.
_COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_PICTURES = {**_COMMON, "image_size": 32, "patch_size": 8}


def _tokens() -> dict[str, Any]:
    mask = torch.ones(2, 8, dtype=torch.long)
    return {"input_ids": torch.randint(0, 90, (2, 8)), "attention_mask": mask}


def _text(name: str, model: str, **options: Any) -> None:
    _add(name, model, {"vocab_size": 100, **options}, _tokens)


def _picture(name: str, model: str, **options: Any) -> None:
    _add(name, model, options, lambda: {"pixel_values": torch.randn(2, 3, 32, 32)})


def _add(name: str, model: str, options: Mapping[str, Any], inputs: Any) -> None:
    def build() -> Call:
        import transformers

        kind = getattr(transformers, model)
        return Call(kind(kind.config_class(**options)).eval(), kwargs=inputs())

    TRANSFORMERS[name] = build


_text("bert", "BertForSequenceClassification", **_COMMON)
_text("roberta", "RobertaForTokenClassification", **_COMMON)
_text("electra", "ElectraModel", embedding_size=16, **_COMMON)
_text("albert", "AlbertModel", embedding_size=16, **_COMMON)
_text("distilbert", "DistilBertModel", dim=32, n_layers=2, n_heads=2, hidden_dim=64)
_text("deberta", "DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"], **_COMMON)
_text("mpnet", "MPNetModel", **_COMMON)
_text("gpt2", "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=2, use_cache=False)
_text("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32, use_cache=False, **_COMMON)
_text("llama", "LlamaForCausalLM", use_cache=False, **_COMMON)
_text("mistral", "MistralForCausalLM", num_key_value_heads=1, use_cache=False, **_COMMON)
_text("qwen2", "Qwen2ForCausalLM", num_key_value_heads=1, use_cache=False, **_COMMON)
_text("gemma", "GemmaModel", num_key_value_heads=1, head_dim=16, use_cache=False, **_COMMON)
_text("t5_encoder", "T5EncoderModel", d_model=32, num_layers=2, num_heads=2, d_ff=64, d_kv=16)
_picture("vit", "ViTForImageClassification", **_PICTURES)
_picture("deit", "DeiTModel", **_PICTURES)
_picture("beit", "BeitModel", **_PICTURES)
_picture("dinov2", "Dinov2Model", **_PICTURES)
_picture("clip", "CLIPVisionModel", **_PICTURES)
_picture("siglip", "SiglipVisionModel", **_PICTURES)
_picture(
    "swin",
    "SwinModel",
    embed_dim=16,
    depths=[1, 1],
    num_heads=[2, 2],
    image_size=32,
    patch_size=4,
    window_size=4,
)
_picture("convnext", "ConvNextModel", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1])
_picture("resnet50", "ResNetModel", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
_picture("mobilenet_v2", "MobileNetV2Model", depth_multiplier=0.25, image_size=32)
_picture("mobilevit", "MobileViTModel", image_size=32)
_picture(
    "segformer",
    "SegformerForSemanticSegmentation",
    hidden_sizes=[8, 16],
    depths=[1, 1],
    num_encoder_blocks=2,
    num_attention_heads=[1, 2],
    sr_ratios=[2, 1],
    patch_sizes=[3, 3],
    strides=[2, 2],
    mlp_ratios=[2, 2],
    decoder_hidden_size=16,
)
_add(
    "wav2vec2",
    "Wav2Vec2ForCTC",
    {
        **_COMMON,
        "conv_dim": [16, 16],
        "conv_stride": [5, 2],
        "conv_kernel": [10, 3],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    },
    lambda: {"input_values": torch.randn(2, 800)},
)
_add(
    "whisper",
    "WhisperForAudioClassification",
    {
        "d_model": 32,
        **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
        "encoder_ffn_dim": 64,
        "num_mel_bins": 8,
        "max_source_positions": 20,
        "vocab_size": 100,
        "pad_token_id": 0,
    },
    lambda: {"input_features": torch.randn(2, 8, 40)},
)
