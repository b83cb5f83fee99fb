"""Mixtures of experts and vision-language models of transformers, converted layer by layer."""

from __future__ import annotations

import pytest
import torch
from onnx_nets import MACHINE
from torch import nn

import neural_mp
from neural_mp import AccuracyCriterion, MixedPrecision, PrecisionPlan, convert_with_plan
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.capture.module_capture import copy_module
from neural_mp.adaptors.pytorch.decoders.experts import split_experts
from neural_mp.core.enums import Capture
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, **_ENDS,
}  # fmt: skip
_EXPERTS = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
                 "num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def _decoder(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**_SIZES, **_EXPERTS[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def _converted(model: nn.Module, method: str, inputs: dict, **options):
    adaptor = PyTorchAdaptor()
    loaded = adaptor.load(model, example=inputs, capture=Capture.LAYERS)
    spec = QuantSpec.parse(f"uint4 asymmetric per_group 32 {method}")
    dense = [
        op
        for op, kernels in adaptor.kernels(loaded, MACHINE).items()
        if not isinstance(kernels.int8, str)
        and not isinstance(kernels.int8.low_bits, str)
        and spec in [c.weight for c in kernels.int8.configs()]
    ]
    plan = PrecisionPlan(dict.fromkeys(dense, OpConfig(Precision.INT4, spec)))
    return convert_with_plan(model, plan, inputs=inputs, capture=Capture.LAYERS, **options)


def _ids() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(1, 128, (2, 16))


def _written(model: nn.Module, inputs: dict) -> list[int]:
    return model.generate(**inputs, max_new_tokens=6, do_sample=False).tolist()


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe"])
def test_split_experts_compute_as_those_of_transformers(kind):
    model = _decoder(kind)
    split = copy_module(model)
    split_experts(split)
    names = [name for name, _ in split.named_parameters()]
    assert sum(".experts.experts." in name for name in names) == 2 * 2 * 4
    with torch.no_grad():
        torch.testing.assert_close(split(_ids()).logits, model(_ids()).logits)


@pytest.mark.parametrize("kind", _EXPERTS)
def test_a_mixture_in_4_bits_generates_the_same_tokens_after_reload(kind, tmp_path):
    model, inputs = _decoder(kind), {"input_ids": _ids()}
    converted = _converted(model, "rtn", inputs)
    experts = [op for op in converted.plan if ".experts.experts." in op]
    assert len(experts) == (0 if kind == "GptOss" else 2 * 2 * 4)
    prompt = {"input_ids": _ids()[:, :5], "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    written = _written(converted.model, prompt)
    assert type(converted.model) is type(model)
    converted.save(tmp_path / "saved")
    again = neural_mp.load(tmp_path / "saved")
    assert _written(again.model, prompt) == written
    assert torch.equal(again(input_ids=_ids()).logits, converted(input_ids=_ids()).logits)
    noise = (converted(input_ids=_ids()).logits - model(_ids()).logits).norm()
    assert 0 < noise < 0.5 * model(_ids()).logits.norm()


def test_experts_in_a_form_of_their_own_are_named():
    adaptor, inputs = PyTorchAdaptor(), {"input_ids": _ids()}
    warnings = adaptor.load(_decoder("GptOss"), example=inputs, capture=Capture.LAYERS).warnings
    assert any("model.layers.0.mlp.experts.gate_up_proj" in line for line in warnings)
    none = adaptor.load(_decoder("Mixtral"), example=inputs, capture=Capture.LAYERS).warnings
    assert not any("experts in a form" in line for line in none)


def test_experts_are_corrected_with_the_tokens_routed_to_them():
    model, inputs = _decoder("Mixtral"), {"input_ids": _ids()}
    errors = []
    with torch.no_grad():
        expected = model(_ids()).logits
    for method in ("rtn", "gptq"):
        converted = _converted(model, method, inputs, calibration=[inputs])
        errors.append(float((converted(input_ids=_ids()).logits - expected).norm()))
    assert errors[1] < 0.8 * errors[0]


def _llava() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=8, patch_size=4, projection_dim=64,
    )  # fmt: skip
    text = transformers.LlamaConfig(**_SIZES)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=127, vision_feature_layer=-1
    )
    torch.manual_seed(0)
    ids = torch.randint(1, 120, (2, 12))
    ids[:, 2:6] = 127  # four patches
    images = torch.randn(2, 3, 8, 8)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    return model, {"input_ids": ids, "pixel_values": images, "attention_mask": torch.ones_like(ids)}


def test_a_vision_language_model_generates_the_same_tokens_after_reload(tmp_path):
    model, inputs = _llava()
    converted = _converted(model, "rtn", inputs)
    assert any("vision_tower" in op for op in converted.plan)
    assert any("language_model" in op for op in converted.plan)
    written = _written(converted.model, inputs)
    converted.save(tmp_path / "saved")
    again = neural_mp.load(tmp_path / "saved")
    assert _written(again.model, inputs) == written
    assert torch.equal(again(**inputs).logits, converted(**inputs).logits)
    noise = (converted(**inputs).logits - model(**inputs).logits).norm()
    assert 0 < noise < 0.5 * model(**inputs).logits.norm()


def test_a_search_finds_bits_for_every_expert(tmp_path):
    ids = torch.randint(1, 128, (8, 16))
    converter = MixedPrecision(precisions="int4,int8", workspace=tmp_path, cache=False)
    converter.model, converter.capture = _decoder("Mixtral"), "layers"
    converter.objective, converter.metric = "footprint", "perplexity"
    converter.accuracy_criterion = AccuracyCriterion(10, any_tolerance=True)
    converter.eval_dataloader = [({"input_ids": ids}, ids)]
    result = converter()
    experts = [op for op in result.plan if ".experts.experts." in op]
    assert len(experts) == 2 * 2 * 4
    assert {str(result.plan[op].precision) for op in experts} == {"int4"}
