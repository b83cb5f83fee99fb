"""Inputs and outputs of a file in integers, for targets that do not convert floats themselves."""

from __future__ import annotations

import onnx_ir as ir

from neural_mp.adaptors.onnxrt.graph.edit import GraphNames
from neural_mp.adaptors.onnxrt.kernels.ops import is_dequantize, is_quantize
from neural_mp.adaptors.onnxrt.targets.qdq_structure import Pair, format_type_name

#: Start of the keys of the metadata, before the name of an input or output: its type, scale and
#: zero point.
IO_KEY = "neural_mp.io."


def quantize_io(program: ir.Model) -> dict[str, str]:
    """Replace float inputs and outputs by the integers behind and before them, in place.

    Returns:
        Metadata with type, scale and zero point of each; values that an op in float reads or
        computes stay floats, and have none.
    """
    names, metadata = GraphNames(program.graph), dict[str, str]()
    pairs = [*_quantize_inputs(program.graph, names), *_return_integers(program.graph, names)]
    for name, pair in pairs:
        zero = 0 if pair.zero_point is None else int(pair.zero_point.reshape(-1)[0])
        metadata[f"{IO_KEY}{name}"] = f"{format_type_name(pair.dtype)} {pair.first_scale!r} {zero}"
    return metadata


def _quantize_inputs(graph: ir.Graph, names: GraphNames) -> list[tuple[str, Pair]]:
    """Feed the integers of each input that is only quantized, of several widths the widest."""
    replaced = []
    for position, value in enumerate(graph.inputs):
        readers = {use.node for use in value.uses()}
        if not readers or not all(is_quantize(n) and n.inputs[0] is value for n in readers):
            continue
        pairs = map(Pair.from_node, readers)
        pair = max(pairs, key=lambda item: 0 if item.dtype is None else item.dtype.bitwidth)
        rounding = pair.node
        if not pair.is_per_tensor or pair.zero_point is None:
            continue
        name, integers = str(value.name), rounding.outputs[0]
        value.name = names.reserve_name(f"{name}/float")
        fed = ir.val(name, pair.dtype, value.shape)
        graph.inputs[position] = fed
        integers.replace_all_uses_with(fed, replace_graph_outputs=True)
        graph.remove(rounding, safe=True)
        if value.uses():
            plain = ir.val(names.reserve_name(f"{name}/dequantized"), value.dtype, value.shape)
            node = ir.node(
                "DequantizeLinear",
                [fed, *rounding.inputs[1:]],
                outputs=[plain],
                name=names.reserve_name(f"{name}/input"),
            )
            graph.insert_before(next(iter(graph)), node)
            value.replace_all_uses_with(plain)
        replaced.append((name, pair))
    return replaced


def _return_integers(graph: ir.Graph, names: GraphNames) -> list[tuple[str, Pair]]:
    """Return the integers of each output that is dequantized at the end."""
    replaced = []
    for position, value in enumerate(graph.outputs):
        last = value.producer()
        if last is None or not is_dequantize(last) or last.inputs[0] is None:
            continue
        integers, pair = last.inputs[0], Pair.from_node(last)
        if integers.producer() is None or integers.is_graph_output():
            continue
        if pair.dtype is None or not pair.is_per_tensor:
            continue
        name = str(value.name)
        value.name = names.reserve_name(f"{name}/float")
        integers.name, integers.dtype, integers.shape = name, pair.dtype, value.shape
        graph.outputs[position] = integers
        if not value.uses():
            graph.remove(last, safe=True)
        replaced.append((name, pair))
    return replaced
