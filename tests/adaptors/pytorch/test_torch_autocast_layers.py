"""Layers of every kind train within `autocast`: recurrent, attention, norms, recomputed blocks."""

import contextlib

import pytest
import torch
from autocast_nets import BF16, FP16, FP32, amp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from neural_mp.training import autocast

SEQUENCE = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
LAYERS = {
    "recurrent behind a product": lambda: nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8), First()),
    "gru": lambda: nn.Sequential(nn.GRU(8, 8, 2, bidirectional=True), First()),
    "attention": lambda: SelfAttention(),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0, batch_first=True),
    "norms": lambda: nn.Sequential(
        nn.Conv1d(5, 4, 3),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nn.PReLU(),
        nn.GroupNorm(2, 4),
        nn.BatchNorm1d(4),
        nn.RMSNorm(6),
    ),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "images": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.Conv2d(1, 2, 3),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.AvgPool2d(2),
        nn.Dropout(0.0),
        nn.Flatten(),
        nn.LeakyReLU(inplace=True),
    ),
}


class First(nn.Module):
    def forward(self, outputs):
        return outputs[0]


class SelfAttention(nn.MultiheadAttention):
    """The last two steps of the first sequence are padding."""

    def __init__(self):
        super().__init__(8, 2, batch_first=True)

    def forward(self, x):
        padded = torch.zeros(2, 5, dtype=torch.bool)
        padded[0, 3:] = True
        return super().forward(x, x, x, key_padding_mask=padded)[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_every_kind_train(name, precision):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    gradients, outputs = [], []
    for context in (contextlib.nullcontext(), autocast(precision)):
        layer.zero_grad()
        with context:
            outputs.append(layer(SEQUENCE))
            loss = F.binary_cross_entropy_with_logits(
                outputs[-1], torch.ones_like(outputs[-1], dtype=FP32)
            )
        loss.backward()
        assert loss.dtype is FP32
        assert {p.grad.dtype for p in layer.parameters()} == {FP32}
        gradients.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
    assert not torch.equal(*gradients)
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 0.05
    torch.testing.assert_close(outputs[1].float(), outputs[0], rtol=0.1, atol=0.05)


def test_attention_is_one_op_with_its_masks_kept():
    torch.manual_seed(0)
    attention = SelfAttention().eval()
    changed = SEQUENCE.clone()
    changed[0, 3:] = 100.0  # padding: nobody may look at it
    with torch.no_grad(), autocast("bf16"):
        original, masked = attention(SEQUENCE), attention(changed)
    assert original.dtype is BF16
    assert torch.equal(original[0, :3], masked[0, :3])
    with autocast("bf16", amp(allowlist_remove="scaled_dot_product_attention")):
        assert attention(SEQUENCE).dtype is FP32


def attention_by_hand(queries, keys, values, mask):
    scores = queries @ keys.transpose(-1, -2) / queries.shape[-1] ** 0.5
    return torch.softmax(scores + mask, -1) @ values


@pytest.mark.parametrize("attention", [F.scaled_dot_product_attention, attention_by_hand])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_row_that_is_masked_altogether_by_the_lowest_number_stays_finite(precision, attention):
    queries = SEQUENCE[:, None]
    mask = torch.zeros(5, 5)
    mask[0], mask[1, 3:] = torch.finfo(FP32).min, -torch.inf
    exact = attention(queries, queries, queries, mask)
    with autocast(precision):
        ours = attention(queries, queries, queries, mask)
    assert ours.dtype in (BF16, FP16)
    assert bool(ours.isfinite().all())
    torch.testing.assert_close(ours[:, :, 1:].float(), exact[:, :, 1:], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_block_is_decorated(use_reentrant):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    decorated = autocast("bf16")(block.forward)
    gradients = []
    for call in (block, lambda x: checkpoint(decorated, x, use_reentrant=use_reentrant)):
        block.zero_grad()
        with autocast("bf16"):
            loss = call(SEQUENCE.clone().requires_grad_()).float().sum()
        loss.backward()
        gradients.append(block[0].weight.grad.clone())
    assert torch.equal(*gradients)
