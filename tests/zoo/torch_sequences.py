"""Recurrent layers, their cells, attention and transformers of `torch.nn`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from zoo.harness import Case
from zoo.torch_cases import BY_MODULES, case, floats, several

_WIDTH = 8
_LENGTH = 7


class Tagger(nn.Module):
    """A recurrent layer between dense ones; gives tags and the last state."""

    def __init__(self, recurrent: nn.RNNBase) -> None:
        super().__init__()
        width = recurrent.proj_size or recurrent.hidden_size
        self.stem, self.recurrent = nn.Linear(_WIDTH, _WIDTH), recurrent
        self.head = nn.Linear(width * (2 if recurrent.bidirectional else 1), 3)

    def forward(self, x: torch.Tensor, *state: torch.Tensor) -> Any:
        initial = (state,) if len(state) > 1 else state
        states, last = self.recurrent(self.stem(x), *initial)
        return self.head(states), last


class Packed(Tagger):
    """Sequences of several lengths, packed."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = pack_padded_sequence(self.stem(x), lengths, True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.recurrent(packed)[0], True)
        return self.head(states)


class Steps(nn.Module):
    """A cell called step by step in a loop of Python."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(_WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Attended(nn.Module):
    """Self-attention with a mask of padding."""

    def __init__(self, weights: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(_WIDTH, 2, batch_first=True, **options)
        self.weights = weights

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> Any:
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=self.weights)


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(_WIDTH, 2, kdim=6, vdim=5, add_bias_kv=True)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x, keys, values = (tensor.transpose(0, 1) for tensor in (x, keys, values))
        return self.attention(x, keys, values)[0].transpose(0, 1)


class Causal(nn.Module):
    """The functional form of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.inward(x).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.outward(attended.transpose(1, 2).flatten(-2))


class Padded(nn.Module):
    """An encoder whose own fast path takes over in inference, where torch's eager mode runs it."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(_WIDTH, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


def _padding(samples: int) -> torch.Tensor:
    mask = torch.zeros(samples, _LENGTH, dtype=torch.bool)
    mask[0, -2:] = True
    return mask


def _lengths(samples: int) -> torch.Tensor:
    return torch.arange(_LENGTH - samples, _LENGTH) + 1


def _state(width: int) -> Any:
    return lambda samples: torch.randn(1, samples, width)


_SEQUENCE = floats(_LENGTH, _WIDTH)


def _recurrent() -> list[Case]:
    variants: dict[str, dict[str, Any]] = {
        "": {},
        " two-way": {"bidirectional": True},
        " two layers": {"num_layers": 2, "bias": False},
    }
    kinds = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
    options = {"batch_first": True}
    cases = [
        case(
            f"{name}{variant}",
            lambda kind=kind, more=more: Tagger(kind(_WIDTH, 6, **options, **more)),
            _SEQUENCE,
        )
        for name, kind in kinds.items()
        for variant, more in variants.items()
    ]
    return [
        *cases,
        case("LSTM projected", lambda: Tagger(nn.LSTM(_WIDTH, 6, proj_size=4)), _SEQUENCE),
        case(
            "LSTM given a state",
            lambda: Tagger(nn.LSTM(_WIDTH, 6, **options)),
            several(_SEQUENCE, _state(6), _state(6)),
        ),
        case(
            "GRU given a state",
            lambda: Tagger(nn.GRU(_WIDTH, 6, **options)),
            several(_SEQUENCE, _state(6)),
        ),
        case(
            "RNN with ReLU",
            lambda: Tagger(nn.RNN(_WIDTH, 6, nonlinearity="relu", **options)),
            _SEQUENCE,
        ),
        *(
            case(
                f"{name} packed",
                lambda kind=kind: Packed(kind(_WIDTH, 6, **options)),
                several(_SEQUENCE, _lengths),
                **BY_MODULES,
            )
            for name, kind in kinds.items()
        ),
        case("LSTMCell", lambda: Steps(nn.LSTMCell(_WIDTH, _WIDTH)), _SEQUENCE),
        case("GRUCell", lambda: Steps(nn.GRUCell(_WIDTH, _WIDTH)), _SEQUENCE),
        case("RNNCell", lambda: Steps(nn.RNNCell(_WIDTH, _WIDTH)), _SEQUENCE),
    ]


def _encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(_WIDTH, 2, 16, batch_first=True, **options)


def _attention() -> list[Case]:
    pair = several(_SEQUENCE, _SEQUENCE)
    masked = several(_SEQUENCE, _padding)
    return [
        case("MultiheadAttention", lambda: Attended(True), masked),
        case("MultiheadAttention without weights", lambda: Attended(False, bias=False), masked),
        case(
            "MultiheadAttention of other keys",
            Crossed,
            several(_SEQUENCE, floats(5, 6), floats(5, 5)),
        ),
        case("scaled_dot_product_attention", Causal, _SEQUENCE),
        case("TransformerEncoderLayer", _encoder_layer, _SEQUENCE),
        case(
            "TransformerEncoderLayer GELU, norm first",
            lambda: _encoder_layer(activation="gelu", norm_first=True),
            _SEQUENCE,
        ),
        case("TransformerEncoder", lambda: nn.TransformerEncoder(_encoder_layer(), 2), _SEQUENCE),
        case("TransformerEncoder padded", Padded, masked),
        case(
            "TransformerDecoderLayer",
            lambda: nn.TransformerDecoderLayer(_WIDTH, 2, 16, batch_first=True),
            pair,
        ),
        case(
            "TransformerDecoder",
            lambda: nn.TransformerDecoder(
                nn.TransformerDecoderLayer(_WIDTH, 2, 16, batch_first=True), 1
            ),
            pair,
        ),
        case("Transformer", lambda: nn.Transformer(_WIDTH, 2, 1, 1, 16, batch_first=True), pair),
    ]


CASES: tuple[Case, ...] = (*_recurrent(), *_attention())
