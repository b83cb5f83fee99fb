"""What of a model stays in FP32 whatever a plan says, in words for its user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from neural_mp.adaptors.common.left_alone import stays_in_fp32
from neural_mp.adaptors.onnxrt.fusion import LAYERS, is_recurrent
from neural_mp.adaptors.onnxrt.nodes import graphs_in

_RECURRENT = ("LSTM", "GRU", "RNN")
#: Layers that hold most of a model's weights, and do most of its work.
_HEAVY = (*LAYERS, "ConvTranspose", *_RECURRENT)


def left_alone(program: ir.Model) -> list[str]:
    """A sentence for every op that runs graphs of its own, and one for recurrent layers."""
    said: list[str] = []
    for node in program.graph:
        inside = (inner for graph in graphs_in(node) for inner in graph)
        said += stays_in_fp32(
            _types(inside, _HEAVY),
            f"within the op {node.name!r} ({node.op_type})",
            "only what lies in the main graph is converted",
        )
    slow = (node for node in program.graph if not is_recurrent(node))
    why = "ONNX Runtime has no integer kernel for it"
    return [*said, *stays_in_fp32(_types(slow, _RECURRENT), "", why)]


def _types(nodes: Iterable[ir.Node], known: tuple[str, ...]) -> Iterator[str]:
    return (node.op_type for node in nodes if node.op_type in known and not node.domain)
