"""Encoder-decoders of `transformers` as two modules, each of which is one graph."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neural_mp.adaptors.pytorch.decoders.transformers_folder import read_folder


class Encoder(nn.Module):
    """The encoder, which returns its last states `[N, S, D]`."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self, features: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the states of tokens `[N, S]`, or of features of sound `[N, F, S]`."""
        named = {} if attention_mask is None else {"attention_mask": attention_mask}
        states: torch.Tensor = self.encoder(features, **named)[0]
        return states


class Decoder(nn.Module):
    """The decoder with its output layer, without a cache."""

    def __init__(self, model: Any, takes_mask: bool) -> None:
        super().__init__()
        encoder = model.get_encoder()
        # The encoder is left out, and weights are shared with the model.
        memo: dict[int, Any] = {id(weight): weight for weight in model.parameters()}
        memo[id(encoder)] = nn.Identity()
        self.model = copy.deepcopy(model, memo)
        self.takes_mask = takes_mask

    def forward(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits `[N, T, V]` of the token after each of `tokens` `[N, T]`."""
        named: dict[str, Any] = {"attention_mask": attention_mask} if self.takes_mask else {}
        outputs = self.model(
            encoder_outputs=(states,),
            decoder_input_ids=tokens,
            use_cache=False,
            return_dict=False,
            **named,
        )
        logits: torch.Tensor = outputs[0]
        return logits


def split_encoder_decoder(folder: str | Path) -> dict[str, nn.Module]:
    """Return the encoder and the decoder of a model folder.

    Raises:
        ModelLoadError: as for `read_folder`.
    """
    model: Any = read_folder(Path(folder))
    is_text = "input_ids" in inspect.signature(model.forward).parameters
    return {
        "encoder": Encoder(model.get_encoder()).eval(),
        "decoder": Decoder(model, takes_mask=is_text).eval(),
    }
