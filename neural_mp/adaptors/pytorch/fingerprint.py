"""A digest of a model: equal for equal models, also in another process."""

from __future__ import annotations

import hashlib
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule

from neural_mp.adaptors.pytorch.model import TorchModel


def fingerprint(model: TorchModel) -> str:
    """The digest of every op with its options, in order, and of every weight and constant."""
    digest = hashlib.sha256()
    for part in model.parts.values():
        _feed_graph(digest, part.portable)
    for name, value in sorted(model.weights.items()):
        digest.update(name.encode())
        _feed_tensor(digest, value)
    return digest.hexdigest()


def _feed_graph(digest: Any, module: GraphModule) -> None:
    for node in module.graph.nodes:
        given = f"{node.args} {node.kwargs}"
        digest.update(f"{node.op} {node.target} {node.name} {given};".encode())
        if node.op != "get_attr":
            continue
        # Constants of the code are no buffers; branches are graphs themselves.
        value = attrgetter(node.target)(module)
        if isinstance(value, GraphModule):
            _feed_graph(digest, value)
        elif isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            _feed_tensor(digest, value)


def _feed_tensor(digest: Any, value: torch.Tensor) -> None:
    stored = value.detach().contiguous().reshape(-1).view(torch.uint8)
    digest.update(stored.numpy().tobytes())
