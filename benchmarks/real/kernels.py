"""How many integer kernels really run, asked of the runtimes themselves."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any


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


def optimized_graph(file: str | Path) -> Any:
    """A `GraphProto` of its kernels, without the weights."""
    import onnx
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath, load_external_data=False).graph


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
