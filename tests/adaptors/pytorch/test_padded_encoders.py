"""Padded places of `nn.TransformerEncoder` hold what inference without a trace returns there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor

pytestmark = pytest.mark.slow

LEFT, RIGHT, BETWEEN = "left", "right", "between"


class Words(nn.Module):
    """Mean over all places of an encoder's outputs, the padded ones included."""

    def __init__(self, is_float=False, norm=None, **options):
        super().__init__()
        self.words, self.is_float = nn.Embedding(20, 8), is_float
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm, **options)

    def forward(self, ids):
        mask = ids.eq(0)
        if self.is_float:
            mask = torch.zeros(mask.shape).masked_fill(mask, float("-inf"))
        return self.encoder(self.words(ids), src_key_padding_mask=mask).mean(1)


def padded_ids(padding):
    ids = torch.randint(1, 20, (4, 6), generator=torch.Generator().manual_seed(0))
    for row, length in enumerate((6, 4, 3, 5)):
        positions = torch.arange(6)
        chosen = {
            RIGHT: positions >= length,
            LEFT: positions < 6 - length,
            BETWEEN: positions == length - 2,
        }
        ids[row, chosen[padding]] = 0
    return ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_float": True},
        {"norm": nn.LayerNorm(8)},
        {"enable_nested_tensor": False},
        {"mask_check": False},
    ],
    ids=str,
)
def test_padded_places_are_those_of_inference(options):
    torch.manual_seed(0)
    module, adaptor = Words(**options).eval(), PyTorchAdaptor()
    model = adaptor.load(module, example=(padded_ids(RIGHT),))
    paddings = (RIGHT,) if "mask_check" in options else (RIGHT, LEFT, BETWEEN)
    for padding in paddings:
        ids = padded_ids(padding)
        with torch.no_grad():
            expected = module(ids)
        got = model.module(ids)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(model.module(ids[1:3]), got[1:3], atol=1e-5, rtol=1e-4)
