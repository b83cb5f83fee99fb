"""Checkpoints of GPTQ with `desc_act`, of AutoAWQ, and in 8 bits compute with the stored codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import neural_mp
from neural_mp.errors import ModelLoadError

pytestmark = pytest.mark.slow

LAYER = "model.layers.0.mlp.up_proj"
IDS = torch.arange(12).reshape(2, 6)
INPUTS, OUTPUTS, GROUPS = 64, 128, 2
#: Outputs in a word of AutoAWQ, from the lowest bits: `order_map` of its `WQLinear_GEMM`.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.fixture
def net() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes, **ends)).eval()


def drawn(bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [inputs, outputs], zero points and scales [groups, outputs]."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**bits, (INPUTS, OUTPUTS))
    zeros = rng.integers(1, 2**bits, (GROUPS, OUTPUTS))
    # Exact in bfloat16, which kernels read scales in.
    scales = 2.0 ** rng.integers(-9, -6, (GROUPS, OUTPUTS))
    return codes, zeros, scales.astype(np.float16)


def words(values: np.ndarray, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """Pack the last axis into words of 32 bits, the first of `order` into the lowest bits."""
    per = 32 // bits
    packed = np.zeros((*values.shape[:-1], values.shape[-1] // per), np.uint32)
    for position, source in enumerate(order):
        packed |= values[..., source::per].astype(np.uint32) << np.uint32(position * bits)
    return torch.from_numpy(packed.view(np.int32))


def write(net, folder: Path, tensors: dict[str, torch.Tensor], **quantization: object) -> Path:
    """Write a checkpoint with one layer of another tool."""
    net.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    del state[f"{LAYER}.weight"]
    state |= {f"{LAYER}.{name}": value.contiguous() for name, value in tensors.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def expected(net, codes, zeros, scales, groups) -> torch.Tensor:
    """Logits with the weight that codes, zero points and scales mean."""
    weight = (codes - zeros[groups]) * scales[groups].astype(np.float32)
    with torch.no_grad():
        net.get_submodule(LAYER).weight.copy_(torch.from_numpy(weight.T))
        return net(IDS).logits


def gptq_tensors(codes, zeros, scales, groups, bits: int) -> dict[str, torch.Tensor]:
    order = tuple(range(32 // bits))
    return {
        "qweight": words(codes.T, bits, order).T,
        "qzeros": words(zeros - 1, bits, order),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq_computes_with_the_codes_and_the_order_of_groups(net, tmp_path, bits, shuffled):
    codes, zeros, scales = drawn(bits)
    groups = np.arange(INPUTS) // (INPUTS // GROUPS)
    if shuffled:
        groups = np.random.default_rng(1).permutation(groups)
    tensors = gptq_tensors(codes, zeros, scales, groups, bits)
    options = {"bits": bits, "group_size": 32, "desc_act": shuffled, "sym": False}
    folder = write(net, tmp_path / "model", tensors, quant_method="gptq", **options)
    loaded = neural_mp.load(folder)
    logits = expected(net, codes, zeros, scales, groups)
    is_stored = bits == 4 and not shuffled
    assert (loaded.plan[LAYER].precision == "int4") == is_stored
    # The kernel of 4 bits rounds its inputs to bfloat16.
    tolerance = 0.02 if is_stored else 1e-6
    with torch.no_grad():
        assert (loaded.model(IDS).logits - logits).norm() < tolerance * logits.norm()
    if not is_stored:
        assert any(LAYER in line for line in loaded.report.warnings)


def test_autoawq_runs_on_the_kernel_of_4_bits(net, tmp_path):
    codes, zeros, scales = drawn(4)
    tensors = {
        "qweight": words(codes, 4, AWQ_ORDER),
        "qzeros": words(zeros, 4, AWQ_ORDER),
        "scales": torch.from_numpy(scales),
    }
    options = {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    folder = write(net, tmp_path / "model", tensors, quant_method="awq", **options)
    loaded = neural_mp.load(folder)
    assert str(loaded.plan[LAYER].weight).startswith("uint4 asymmetric per_group 32")
    logits = expected(net, codes, zeros, scales, np.arange(INPUTS) // 32)
    with torch.no_grad():
        assert (loaded.model(IDS).logits - logits).norm() < 0.02 * logits.norm()


def test_damaged_orders_and_unknown_layouts_are_refused(net, tmp_path):
    codes, zeros, scales = drawn(4)
    groups = np.full(INPUTS, GROUPS)
    tensors = gptq_tensors(codes, zeros, scales, groups, 4)
    folder = write(net, tmp_path / "order", tensors, quant_method="gptq", bits=4)
    with pytest.raises(ModelLoadError, match="g_idx must name groups from 0 to 1"):
        neural_mp.load(folder)
    folder = write(net, tmp_path / "gemv", tensors, quant_method="awq", version="gemv")
    with pytest.raises(ModelLoadError, match="version must be gemm"):
        neural_mp.load(folder)
