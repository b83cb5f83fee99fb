"""Attention in bfloat16 as products: results of torch's own kernel, where products are fast."""

from __future__ import annotations

import math

import pytest
import torch
from machine import machine
from torch import nn
from torch.nn import functional as F

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.kernels import attention
from neural_mp.adaptors.pytorch.kernels.attention import AttentionMask, attention_in_bfloat16
from neural_mp.core.observations import Observations
from neural_mp.core.precision import Precision
from neural_mp.testing import signal_to_noise, uniform

#: SQNR in dB that bfloat16 keeps of a mean of values.
LEAST_DB = 40


def heads(batch: int, count: int, rows: int, width: int, seed: int) -> torch.Tensor:
    """Queries, keys or values in the memory order of a dense layer's result."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(batch, rows, count, width, generator=random)
    return values.transpose(1, 2).bfloat16()


def expected(query, key, value, mask=None, scale=None):
    """Attention in float64, by its definition; rows without any weight are 0."""
    query, key, value = query.double(), key.double(), value.double()
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
        scores = scores + mask
    return torch.nan_to_num(scores.softmax(-1)) @ value


def masks(rows: int, columns: int) -> dict[str, torch.Tensor | None]:
    padding = torch.ones(2, 1, 1, columns, dtype=torch.bool)
    padding[1, ..., columns // 2 :] = False
    empty = torch.ones(rows, columns, dtype=torch.bool)
    empty[3] = False
    bias = torch.randn(1, 4, rows, columns, generator=torch.Generator().manual_seed(9))
    lowest = torch.zeros(2, 1, 1, columns)
    lowest[..., 5:] = torch.finfo(torch.bfloat16).min
    return {"none": None, "padding": padding, "row": empty, "bias": bias, "lowest": lowest}


@pytest.mark.parametrize("kind", ["none", "padding", "row", "bias", "lowest"])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (50, 77), (600, 500), (4, 6)])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_the_result_is_attention_by_its_definition(kind, rows, columns, scale):
    query = heads(2, 4, rows, 16, 0)
    key, value = heads(2, 4, columns, 16, 1), heads(2, 4, columns, 16, 2)
    mask = masks(rows, columns)[kind]
    attn_mask = mask if mask is None or mask.dtype is torch.bool else mask.bfloat16()
    prepared = None if attn_mask is None else AttentionMask(attn_mask)
    outputs = attention_in_bfloat16(query, key, value, prepared, scale=scale)
    reference = expected(query, key, value, mask, scale)
    assert outputs.dtype is torch.bfloat16
    assert signal_to_noise(reference.numpy(), outputs.float().numpy()) > LEAST_DB
    own = F.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale)
    assert outputs.stride() == own.stride()


def test_causal_attention_is_left_to_torch():
    x = heads(1, 4, 80, 16, 0)
    own = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert torch.equal(attention_in_bfloat16(x, x, x, is_causal=True), own)


@pytest.mark.parametrize("mask", [torch.ones(2, 1, 1, 64, dtype=torch.bool), torch.zeros(64, 64)])
def test_a_mask_that_hides_nothing_changes_no_bit(mask):
    query, key, value = (heads(2, 4, 64, 16, seed) for seed in range(3))
    attn_mask = mask if mask.dtype is torch.bool else mask.bfloat16()
    outputs = attention_in_bfloat16(query, key, value, AttentionMask(attn_mask))
    assert torch.equal(outputs, attention_in_bfloat16(query, key, value))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mixed(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*parts, scale=0.3).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_plan_in_bfloat16_runs_products_where_they_are_fast(is_fast, monkeypatch):
    monkeypatch.setattr(attention, "multiplies_bfloat16_fast", lambda: is_fast)
    torch.manual_seed(0)
    net, x = Attention().eval(), torch.randn(2, 64, 32)
    adaptor = PyTorchAdaptor()
    model = adaptor.load(net, example=x)
    space = adaptor.space(model, machine(Precision.BF16))
    plan = space.resolve(uniform(space, Precision.BF16))
    converted = adaptor.convert(model, plan, Observations(), space)
    targets = [node.target for node in converted.runnable_graph.graph.nodes]
    assert (attention_in_bfloat16 in targets) is is_fast
    with torch.no_grad():
        reference = net(x)
    outputs = adaptor.predict(converted, x)
    assert signal_to_noise(reference.numpy(), outputs.numpy()) > 35


class Masked(nn.Module):
    """Two layers of attention under one padding mask."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        visible = mask.bool()[:, None, None, :]
        for _ in range(2):
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=visible)
        return x


@pytest.mark.parametrize("hidden", [0, 20, 64])
def test_layers_share_what_is_made_of_a_mask(hidden, monkeypatch):
    monkeypatch.setattr(attention, "multiplies_bfloat16_fast", lambda: True)
    x, mask = torch.randn(2, 4, 64, 16), torch.ones(2, 64, dtype=torch.long)
    adaptor, net = PyTorchAdaptor(), Masked().eval()
    model = adaptor.load(net, example=(x, mask))
    space = adaptor.space(model, machine(Precision.BF16))
    plan = space.resolve(uniform(space, Precision.BF16))
    converted = adaptor.convert(model, plan, Observations(), space)
    targets = [node.target for node in converted.runnable_graph.graph.nodes]
    assert targets.count(attention_in_bfloat16) == 2
    assert targets.count(AttentionMask) == 1
    mask[1, 64 - hidden :] = 0
    visible = mask.bool()[:, None, None]
    for _ in range(2):  # by the checked path, then directly
        outputs = adaptor.predict(converted, (x, mask))
        inner = expected(x, x, x, visible)
        reference = expected(inner, inner, inner, visible)
        assert signal_to_noise(reference.numpy(), outputs.numpy()) > 35
