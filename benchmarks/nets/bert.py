"""A BERT-base-size encoder, random weights: 12 layers of 768 features."""

from __future__ import annotations

import torch
from torch import nn


class Encoder(nn.Module):
    """The last hidden state only, as a tensor: what every way of converting can give back."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(num_hidden_layers=layers)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def bert_base() -> nn.Module:
    """Seeded, in evaluation mode."""
    torch.manual_seed(0)
    return Encoder().eval()
