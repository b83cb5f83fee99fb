"""Ops that XNNPACK, the delegate for CPUs, leaves to LiteRT's own kernels, from the runtime."""

from __future__ import annotations

from ai_edge_litert.interpreter import Interpreter

from neural_mp.errors import ConversionError, one_line

_DELEGATE = "DELEGATE"


def find_undelegated(content: bytes) -> frozenset[int]:
    """Return the positions in the main subgraph of the ops that no delegate runs.

    The sizes of tensors are those of the file, which is checked. Ops whose results nobody reads
    count as not delegated.

    Raises:
        ConversionError: LiteRT rejects the model.
    """
    try:
        # One node for each op instead of one for all that are together.
        interpreter = Interpreter(
            model_content=content,
            num_threads=1,
            experimental_disable_delegate_node_fusion=True,
        )
        interpreter.allocate_tensors()
    except (RuntimeError, ValueError) as error:
        raise ConversionError(f"LiteRT cannot load the model: {one_line(error)}") from error
    # No public function returns the nodes.
    nodes = interpreter._get_ops_details()
    delegated = {
        tensor for node in nodes if node["op_name"] == _DELEGATE for tensor in node["outputs"]
    }
    return frozenset(
        node["index"]
        for node in nodes
        if node["op_name"] != _DELEGATE and delegated.isdisjoint(node["outputs"])
    )
