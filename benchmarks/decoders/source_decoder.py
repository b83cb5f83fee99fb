"""A small Llama decoder of bytes, trained on the source of Python's standard library."""

from __future__ import annotations

import copy
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.peers.inc3_networks import CONTEXT, network

#: Factors of outlier channels of the hostile twin.
_OUTLIERS = (8.0, 16.0, 32.0, 64.0)


def texts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes to train with, to tune with, and unseen ones."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py")) + sorted(library.glob("asyncio/*.py"))
    sources = [np.frombuffer(file.read_bytes(), np.uint8).astype(np.int64) for file in files]
    parts = (sources[::2], sources[1::4], sources[3::4])
    train, tune, unseen = (np.concatenate(part) for part in parts)
    return train, tune, unseen


def trained(train_ids: np.ndarray, steps: int, seed: int = 0) -> nn.Module:
    """A decoder of 1.9 million weights."""
    torch.manual_seed(seed)
    return train(network("decoder"), train_ids, steps)


def train(net: nn.Module, train_ids: np.ndarray, steps: int) -> nn.Module:
    """Return a decoder of bytes after training."""
    optimizer = torch.optim.AdamW(net.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    ids = torch.from_numpy(train_ids)
    for _ in range(steps):
        starts = torch.randint(len(ids) - CONTEXT, (16,))
        windows = torch.stack([ids[start : start + CONTEXT] for start in starts])
        loss = net(windows, labels=windows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


def hostile(net: nn.Module) -> nn.Module:
    """The same function with outlier channels: norms scaled up, the weights behind them down."""
    twin = copy.deepcopy(net)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in twin.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            behind = {
                layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
                layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
            }
            for norm, readers in behind.items():
                channels = torch.randperm(len(norm.weight), generator=draw)[: len(_OUTLIERS) * 2]
                for channel, factor in zip(channels, _OUTLIERS * 2, strict=True):
                    norm.weight[channel] *= factor
                    for reader in readers:
                        reader.weight[:, channel] /= factor
    return twin


def windows(ids: np.ndarray, count: int) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Batches of eight windows, spread over a text, with the tokens as labels."""
    starts = np.linspace(0, len(ids) - CONTEXT, count).astype(int)
    rows = torch.from_numpy(np.stack([ids[start : start + CONTEXT] for start in starts]))
    return [({"input_ids": batch}, batch) for batch in rows.split(8)]
