"""Weights in FP8 and MXFP4: codes of the formats, plans, saved results and checkpoints."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import neural_mp
from neural_mp import MixedPrecision, PrecisionPlan, convert_with_plan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ConfigurationError, ConversionError, PlanError

FP8 = OpConfig(Precision.INT8, QuantSpec.parse("fp8_e4m3 symmetric per_channel"))
MXFP4 = OpConfig(Precision.INT4, QuantSpec.parse("mxfp4 symmetric per_group 32"))
EIGHT, FOUR = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
IDS = {"input_ids": torch.arange(12).reshape(2, 6)}


def _hard_weight() -> torch.Tensor:
    """Return a weight [16, 64] with zeros, ties, tiny and large values."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    weight *= torch.logspace(-6, 4, 16)[:, None]
    weight[0] = 0
    weight[1, :32] = 0
    weight[2, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 2) * 2.0**-3
    weight[3, 0], weight[4, 0] = 1e-40, 1e38
    weight[5, 1] = -0.0
    return weight


def _converted(weight: torch.Tensor, config: OpConfig) -> torch.Tensor:
    """Return the weight that a converted dense layer restores."""
    layer = torch.nn.Linear(64, 16, bias=False).eval()
    layer.weight.data = weight
    result = convert_with_plan(
        torch.nn.Sequential(layer), PrecisionPlan({"0": config}), inputs=torch.ones(2, 64)
    )
    outputs: torch.Tensor = result(torch.eye(64))
    return outputs.T


def test_fp8_is_the_nearest_of_e4m3_with_a_scale_by_output() -> None:
    weight = _hard_weight()
    scales = weight.abs().amax(1, keepdim=True).numpy() / np.float32(448)
    scales[scales == 0] = 1
    codes = (weight.numpy() / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(_converted(weight, FP8).numpy(), codes * scales)


def test_mxfp4_is_the_nearest_of_e2m1_with_a_power_of_two_by_block() -> None:
    weight = _hard_weight()
    blocks = weight.numpy().reshape(16, 2, 32).astype(np.float64)
    mantissas, exponents = np.frexp(np.abs(blocks).max(-1, keepdims=True))
    # Mantissas from 0.5 to 1: from 0.875 on, the largest would round up to the next power.
    scales = 2.0 ** np.maximum(exponents - 1 + (mantissas >= 0.875) - 2, -127)
    codes = np.clip(blocks / scales, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    expected = (codes * scales).reshape(16, 64).astype(np.float32)
    assert np.array_equal(_converted(weight, MXFP4).numpy(), expected)


def test_codes_are_those_of_compressed_tensors() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import MXFP4A16
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = _hard_weight()
    by_output = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    for config, args, rows in (
        (FP8, by_output, weight.unsqueeze(1)),
        (MXFP4, MXFP4A16["weights"], weight.unflatten(1, (-1, 32))),
    ):
        scales, zeros = calculate_qparams(rows.amin(-1), rows.amax(-1), args)
        expected = fake_quantize(weight, scales, zeros, args)
        assert torch.equal(_converted(weight, config), expected)


def test_codes_are_those_of_torchao() -> None:
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    weight = _hard_weight()
    kinds = torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.EVEN
    expected = MXTensor.to_mx(weight, *kinds).dequantize(torch.float32)
    assert torch.equal(_converted(weight, MXFP4), expected)


@pytest.fixture(scope="module")
def net() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes)
    return LlamaForCausalLM(config).eval()


def _result(net, **options):
    plan = PrecisionPlan({EIGHT: FP8, FOUR: MXFP4})
    return convert_with_plan(net, plan, inputs=IDS, capture="layers", **options)


def test_results_are_saved_audited_and_smaller(net, tmp_path) -> None:
    result = _result(net)
    layers = 64 * 64 + 64 * 128
    stored = 64 * 64 + 4 * 64 + 64 * 128 // 2 + 64 * 128 // 32
    assert result.report.baseline_size - result.report.size == 4 * layers - stored
    assert result.audit().holds
    result.save(tmp_path / "saved")
    again = neural_mp.load(tmp_path / "saved").model(**IDS).logits
    assert torch.equal(again, result.model(**IDS).logits)


def test_checkpoints_hold_the_codes_by_the_names_of_their_format(net, tmp_path) -> None:
    result = _result(net)
    result.save_pretrained(tmp_path / "mixed")
    stored = load_file(tmp_path / "mixed" / "model.safetensors")
    fp8 = stored[f"{EIGHT}.weight"].float() * stored[f"{EIGHT}.weight_scale"]
    assert stored[f"{EIGHT}.weight"].dtype is torch.float8_e4m3fn
    assert torch.equal(fp8, result.model.get_submodule(EIGHT).weight.clone())
    packed = stored[f"{FOUR}.weight_packed"].numpy()
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(128, 64)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(128, 2, 32)
    scales = 2.0 ** (stored[f"{FOUR}.weight_scale"].numpy().astype(np.float32) - 127)
    restored = (values * scales[..., None]).reshape(128, 64)
    assert np.array_equal(restored, result.model.get_submodule(FOUR).weight.clone().numpy())
    config = json.loads((tmp_path / "mixed" / "config.json").read_text())["quantization_config"]
    formats = {group["format"] for group in config["config_groups"].values()}
    assert config["format"] == "mixed-precision"
    assert formats == {"naive-quantized", "mxfp4-pack-quantized"}


def test_what_formats_and_tools_have_no_place_for_is_one_error(net, tmp_path) -> None:
    result = _result(net)
    with pytest.raises(ConversionError, match="'gptq' has no place|gptq has no place"):
        result.save_pretrained(tmp_path / "gptq", quant_method="gptq")
    with pytest.raises(ConversionError, match="restores in bfloat16"):
        result.model.save_pretrained(tmp_path / "float32")
    for spec in ("mxfp4 symmetric per_group 64", "fp8_e4m3 asymmetric per_channel"):
        with pytest.raises(PlanError, match="must be"):
            QuantSpec.parse(spec)
    with pytest.raises(PlanError, match="corrections are for integers"):
        QuantSpec.parse("mxfp4 symmetric per_group 32 gptq")
    activation = QuantSpec.parse("uint8 asymmetric per_tensor")
    with pytest.raises(PlanError, match="stored alone"):
        OpConfig(Precision.INT8, FP8.weight, activation)
    with pytest.raises(ConfigurationError, match="dtype"):
        MixedPrecision(model=net, optype_wise={"linear": {"weight": {"dtype": "mxfp4"}}})()
