"""Recurrent and attention nets for export, and nets over embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accepted.export_calls import Build, Call, Run
from torch import nn
from torch.export import Dim

SEQUENCES: dict[str, Build] = {}


def _net(build: Build) -> Build:
    SEQUENCES[build.__name__] = build
    return build


@_net
def lstm() -> Call:
    """A bidirectional LSTM of two layers over embeddings."""

    def run(m: Any, ids: Any) -> Any:
        return m.o(m.l(m.e(ids))[0][:, -1])

    layer = nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True, dropout=0.1)
    net = Run(run, e=nn.Embedding(50, 16, padding_idx=0), l=layer, o=nn.Linear(32, 4))
    return Call(net, (torch.randint(0, 50, (2, 7)),))


@_net
def projected_lstm() -> Call:
    """An LSTM with projections and given states."""

    def run(m: Any, x: Any, h: Any, c: Any) -> Any:
        return m.l(x, (h, c))

    net = Run(run, l=nn.LSTM(4, 6, proj_size=3))
    return Call(net, (torch.randn(5, 2, 4), torch.randn(1, 2, 3), torch.randn(1, 2, 6)))


@_net
def gru() -> Call:
    """A GRU with an open batch size and named outputs."""

    def run(m: Any, x: Any) -> Any:
        y, h = m.l(x)
        return {"y": m.o(y), "h": h}

    net = Run(run, l=nn.GRU(8, 16, batch_first=True), o=nn.Linear(16, 4))
    return Call(net, (torch.randn(2, 7, 8),), dynamic=({0: Dim("batch")},))


@_net
def rnn() -> Call:
    """Plain recurrent layers."""

    def run(m: Any, x: Any) -> Any:
        return m.a(x)[0], m.b(x)[0]

    net = Run(run, a=nn.RNN(4, 5), b=nn.RNN(4, 5, 2, "relu", bidirectional=True))
    return Call(net, (torch.randn(5, 2, 4),))


@_net
def cells() -> Call:
    """Recurrent cells, unrolled."""

    def run(m: Any, x: Any) -> Any:
        h = c = g = r = torch.zeros(2, 5)
        for step in range(3):
            h, c = m.lstm(x[step], (h, c))
            g, r = m.gru(x[step], g), m.rnn(x[step], r)
        return h, g, r

    net = Run(run, lstm=nn.LSTMCell(4, 5), gru=nn.GRUCell(4, 5), rnn=nn.RNNCell(4, 5))
    return Call(net, (torch.randn(3, 2, 4),))


@_net
def encoder() -> Call:
    """A transformer encoder with open sizes."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    dynamic = ({0: Dim("b"), 1: Dim("s", min=2, max=64)},)
    return Call(net, (torch.randn(2, 5, 32),), dynamic=dynamic)


@_net
def transformer() -> Call:
    """An encoder and a decoder with a causal mask."""

    def run(m: Any, source: Any, target: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        return m.net(source, target, tgt_mask=mask, tgt_is_causal=True)

    net = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    return Call(Run(run, net=net), (torch.randn(2, 5, 16), torch.randn(2, 4, 16)))


@_net
def attention() -> Call:
    """Attention with a mask of padding, and its weights."""

    def run(m: Any, x: Any, mask: Any) -> Any:
        return m.a(x, x, x, key_padding_mask=mask), m.a(x, x, x, need_weights=False)[0]

    net = Run(run, a=nn.MultiheadAttention(32, 4, batch_first=True))
    return Call(net, (torch.randn(2, 5, 32), torch.zeros(2, 5, dtype=torch.bool)))


@_net
def products() -> Call:
    """Attention without layers, and products in index notation."""

    def run(m: Any, x: Any, mask: Any) -> Any:
        q = m.q(x)
        outputs = [
            F.scaled_dot_product_attention(q, q, q, is_causal=True),
            F.scaled_dot_product_attention(q[:, None], q[:, None], q[:, None], attn_mask=mask),
            torch.einsum("bij,bkj->bik", q, q) @ q,
            torch.baddbmm(q, torch.matmul(q, q.mT), q),
            torch.tensordot(q, q, dims=([2], [2])),
            torch.addmm(m.b, q[0], m.w),
            torch.outer(q[0, 0], q[0, 1]),
            torch.bmm(q, q.mT),
            torch.mv(m.w, q[0, 0]),
            torch.kron(q[0], m.w),
        ]
        return outputs, q[0, 0].dot(q[0, 1])

    net = Run(run, q=nn.Linear(8, 8), b=torch.randn(8), w=torch.randn(8, 8))
    return Call(net, (torch.randn(2, 5, 8), torch.randn(1, 1, 1, 1)), dynamic=({0: Dim("b")}, None))


@_net
def tied() -> Call:
    """One weight of two layers."""

    def run(m: Any, ids: Any) -> Any:
        return F.linear(m.e(ids), m.e.weight)

    return Call(Run(run, e=nn.Embedding(20, 8)), (torch.randint(0, 20, (2, 3)),))


@_net
def bags() -> Call:
    """Bags of embeddings."""

    def run(m: Any, ids: Any, offsets: Any, weights: Any) -> Any:
        flat = ids.flatten()
        return [
            m.total(ids),
            m.mean(ids),
            m.largest(ids),
            m.total(flat, offsets),
            m.total(ids, per_sample_weights=weights),
        ]

    kinds = {"total": "sum", "mean": "mean", "largest": "max"}
    net = Run(run, **{name: nn.EmbeddingBag(20, 8, mode=mode) for name, mode in kinds.items()})
    return Call(net, (torch.randint(0, 20, (2, 3)), torch.tensor([0, 2]), torch.rand(2, 3)))


@_net
def bilinear() -> Call:
    """Layers with two inputs."""

    def run(m: Any, x: Any, y: Any) -> Any:
        distance = F.pairwise_distance(x, y), F.cosine_similarity(x, y), torch.cdist(x, y)
        return m.b(x, y), distance, torch.pdist(x), F.triplet_margin_loss(x, y, y)

    return Call(Run(run, b=nn.Bilinear(4, 4, 3)), (torch.randn(2, 4), torch.randn(2, 4)))


@_net
def losses() -> Call:
    """Losses among the outputs."""

    def run(m: Any, x: Any, ids: Any) -> Any:
        y = m.l(x)
        target = torch.sigmoid(y)
        return [
            F.cross_entropy(y, ids, label_smoothing=0.1),
            F.nll_loss(F.log_softmax(y, -1), ids),
            F.binary_cross_entropy_with_logits(y, target),
            F.binary_cross_entropy(target, target),
            *(f(y, x) for f in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)),
            F.kl_div(F.log_softmax(y, -1), target),
            F.poisson_nll_loss(y, target),
        ]

    return Call(Run(run, l=nn.Linear(4, 4)), (torch.randn(3, 4), torch.tensor([0, 3, 1])))
