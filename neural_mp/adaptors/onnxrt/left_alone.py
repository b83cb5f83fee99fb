"""What of a model stays in FP32 whatever a plan says, in words for its user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from neural_mp.adaptors.common.left_alone import stays_in_fp32
from neural_mp.adaptors.onnxrt.fusion import is_recurrent
from neural_mp.adaptors.onnxrt.subgraphs import in_order

_RECURRENT = ("LSTM", "GRU", "RNN")


def left_alone(program: ir.Model) -> list[str]:
    """A sentence for recurrent layers that have no integer kernel, wherever they lie."""
    slow = (node for node in in_order(program.graph) if not is_recurrent(node))
    why = "ONNX Runtime has no integer kernel for it"
    return list(stays_in_fp32(_types(slow, _RECURRENT), "", why))


def _types(nodes: Iterable[ir.Node], known: tuple[str, ...]) -> Iterator[str]:
    return (node.op_type for node in nodes if node.op_type in known and not node.domain)
