"""How many integer kernels really run, asked of the runtimes themselves."""

from __future__ import annotations

from typing import Any

from benchmarks.nets.optimized import optimized_graph


def integer_kernels(framework: str, model: Any) -> int:
    """Of a model as its adaptor holds it; of ONNX, of a file.

    In ONNX Runtime those of the graph that it makes when it loads the model; in the others those
    of the graph that runs, which their runtimes leave as it is.
    """
    if framework == "onnxrt":
        return sum(map(_is_integer, _nodes(optimized_graph(model))))
    if framework == "pytorch":
        graphs = [part.runnable.graph for part in model.parts.values()]
        return sum("onednn" in str(node.target) for graph in graphs for node in graph.nodes)
    return sum("Quantized" in node.op for node in model.graph.nodes.values())


def _nodes(graph: Any) -> Any:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _is_integer(node: Any) -> bool:
    kind = node.op_type
    if kind in ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"):
        return False
    return kind.startswith(("QLinear", "DynamicQuantize")) or "Integer" in kind
