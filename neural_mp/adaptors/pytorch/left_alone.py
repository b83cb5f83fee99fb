"""Layers in the bodies of `cond`, `while_loop`, `scan` and their kin, which stay in FP32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.common.left_alone import stays_in_fp32
from neural_mp.adaptors.pytorch.model import OP_NAME, attribute, op_type
from neural_mp.adaptors.pytorch.quantizable_ops import INTEGER_LAYERS
from neural_mp.adaptors.pytorch.recurrent import RECURRENT_TYPES

#: Why an op that runs graphs of its own has no kernel in lower precision.
RUNS_BODIES = "it runs graphs of its own, which stay as they are"


def runs_bodies(node: Node) -> bool:
    """Whether an op runs graphs of its own."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def left_in_bodies(module: GraphModule) -> list[str]:
    """A sentence for every op whose bodies hold layers."""
    said: list[str] = []
    for node in module.graph.nodes:
        if runs_bodies(node):
            said += stays_in_fp32(
                (op_type(inner) for inner in _inner(module, node) if _is_heavy(inner)),
                f"within the op {str(node.meta.get(OP_NAME, node.name))!r}",
                "only what lies in the main graph is converted",
            )
    return said


def _is_heavy(node: Node) -> bool:
    return node.target in INTEGER_LAYERS or op_type(node) in RECURRENT_TYPES


def _inner(module: GraphModule, node: Node) -> Iterator[Node]:
    """The nodes of the bodies that an op runs, and of those in them."""
    for source in node.all_input_nodes:
        body = attribute(module, str(source.target)) if source.op == "get_attr" else None
        if isinstance(body, GraphModule):
            for inner in body.graph.nodes:
                yield inner
                if runs_bodies(inner):
                    yield from _inner(body, inner)
