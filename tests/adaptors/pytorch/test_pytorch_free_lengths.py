"""Recurrent layers take sequences of any length, whatever their results meet."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.adaptors.pytorch.graph.recurrent import free_lengths
from neural_mp.errors import DataError

#: Ranges are those of other lengths, so that some values are cut off; a wrong length gives 1.
INT8_NOISE = 0.25

LAYERS = {
    "LSTM": lambda: nn.LSTM(8, 16, batch_first=True),
    "LSTM of two layers, two-way, projected": lambda: nn.LSTM(
        8, 10, num_layers=2, bidirectional=True, proj_size=8, batch_first=True
    ),
    "GRU": lambda: nn.GRU(8, 8, bidirectional=True, batch_first=True),
    "RNN": lambda: nn.RNN(8, 16, num_layers=2, batch_first=True),
    "RNN with ReLU, without bias": lambda: nn.RNN(
        8, 16, nonlinearity="relu", bias=False, batch_first=True
    ),
}


class Masked(nn.Module):
    """A recurrent layer whose results meet a mask as long as the input."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(16, 4)

    def forward(self, x, mask):
        states, last = self.layer(x)
        last = last[0] if isinstance(last, tuple) else last
        return self.head((states * mask[..., None]).mean(1)), last


class Attentive(Masked):
    """Attention behind a recurrent layer, and an update in place, seen through a view."""

    def __init__(self, layer):
        super().__init__(layer)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, mask):
        states, _ = self.layer(x)
        states, _ = self.attention(states, states, states)
        states[:, 0] += 1.0
        return self.head((states * mask[..., None]).mean(1))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.head(states)


def masked(samples, length):
    mask = torch.ones(samples, length)
    mask[0, length // 2 :] = 0
    return torch.randn(samples, length, 8), mask


def packed(samples, length):
    lengths = torch.arange(length - samples, length) + 1
    return torch.randn(samples, length, 8), lengths


def tuned(model, batches, tmp_path, how="whole"):
    converter = MixedPrecision(
        model=model,
        precisions="int8",
        objective="modelsize",
        capture=how,
        workspace=tmp_path / "workspace",
    )
    converter.calib_dataloader = [(batch, None) for batch in batches]
    return converter()


def noise(result, model, batch):
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(*batch))
    outputs = torch.utils._pytree.tree_leaves(result.loaded(batch))
    return max(
        np.linalg.norm(np.asarray(ours) - theirs.numpy()) / np.linalg.norm(theirs)
        for ours, theirs in zip(outputs, expected, strict=True)
    )


@pytest.mark.parametrize("how", ["whole", "modules"])
@pytest.mark.parametrize("name", LAYERS)
def test_any_length_runs_where_the_states_meet_a_mask(name, how, tmp_path):
    model = Masked(LAYERS[name]()).eval()
    result = tuned(model, [masked(4, 9), masked(3, 12), masked(4, 5)], tmp_path, how)
    for batch in (masked(4, 9), masked(1, 21), masked(5, 2)):
        assert noise(result, model, batch) < INT8_NOISE


@pytest.mark.slow
def test_any_length_runs_where_a_program_is_traced_anew(tmp_path):
    model = Attentive(LAYERS["LSTM"]()).eval()
    result = tuned(model, [masked(4, 9), masked(3, 12)], tmp_path)
    result.save(tmp_path / "saved")
    for form in (result, neural_mp.load(tmp_path / "saved")):
        assert noise(form, model, masked(2, 30)) < INT8_NOISE


def test_packed_sequences_of_any_lengths_run_module_by_module(tmp_path):
    model = Packed().eval()
    result = tuned(model, [packed(3, 9), packed(4, 7)], tmp_path, "modules")
    assert noise(result, model, packed(2, 15)) < INT8_NOISE


class Sized(nn.Module):
    """A layer for one length only, and no code that says so."""

    def __init__(self, takes_any):
        super().__init__()
        self.layer, self.takes_any = nn.Linear(6, 6), takes_any

    def forward(self, x):
        if self.takes_any and x.shape[1] != 6:
            return x
        return self.layer(x)


@pytest.mark.parametrize(
    ("takes_any", "said"),
    [
        (True, "the module itself accepts these inputs, but"),
        (False, "the module itself fails on these inputs"),
    ],
)
def test_a_refused_size_says_whether_the_module_itself_takes_it(takes_any, said, tmp_path):
    model = Sized(takes_any).eval()
    with pytest.raises(DataError, match=f"has 5 values; expected 6; {re.escape(said)}"):
        tuned(model, [torch.randn(2, 6), torch.randn(2, 5)], tmp_path)


def test_recurrent_layers_are_traced_as_ever_once_a_model_is_captured():
    op = torch.ops.aten.lstm.input
    original = dict(op.py_kernels), torch._decomp.decomposition_table[op]
    with free_lengths():
        assert (dict(op.py_kernels), torch._decomp.decomposition_table[op]) != original
    assert (dict(op.py_kernels), torch._decomp.decomposition_table[op]) == original
