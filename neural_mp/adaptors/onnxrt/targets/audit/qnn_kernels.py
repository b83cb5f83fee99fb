"""Kernels of the NPU with their types, from the provider's own description of its graphs.

A node that the provider takes may be computed in float: only the description of the graph that was
compiled tells. Its nodes carry the names of ONNX nodes with endings of the layout conversion, or
names of their own, which the trace of ops resolves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from neural_mp.errors import ConversionError
from neural_mp.io.limits import MAX_DATA_BYTES, MAX_DATA_VALUES
from neural_mp.io.readers import read_json
from neural_mp.util.validators import integer, list_of, mapping_of, record, string

#: Types of tensors in the description.
_TYPES: Mapping[int, str] = {
    **{0x0008: "int8", 0x0016: "int16", 0x0032: "int32", 0x0064: "int64"},
    **{0x0108: "uint8", 0x0116: "uint16", 0x0132: "uint32", 0x0164: "uint64"},
    **{0x0216: "fp16", 0x0232: "fp32", 0x0264: "fp64"},
    **{0x0304: "int4", 0x0308: "int8", 0x0316: "int16", 0x0332: "int32"},
    **{0x0404: "uint4", 0x0408: "uint8", 0x0416: "uint16", 0x0432: "uint32"},
    0x0508: "bool",
}
_FLOATS = frozenset({"fp16", "fp32", "fp64"})
#: Kernels that convert: neither integer ops nor float ops.
_CONVERSIONS = frozenset({"Quantize", "Dequantize", "Convert", "Cast"})
#: Endings that the layout conversion and the fusions of ONNX Runtime add to names.
_ENDING = re.compile(r"(_token_\d+|/duplicated)$")
_TRACE = "qnn_op_trace.json"
_TENSORS = "_tensor_log.json"

_GRAPH = record(
    {
        "graph": record(
            {
                "nodes": mapping_of(
                    record(
                        {
                            "type": string,
                            "input_names": list_of(string),
                            "output_names": list_of(string),
                        }
                    )
                ),
                "tensors": mapping_of(record({"data_type": integer})),
            }
        )
    }
)
_SOURCE = record({"name": string, "type": string})
_OP_MAPPING = record({"dst_name": string, "sources": list_of(_SOURCE)})
_OP_TRACE = record({"subgraph_traces": list_of(record({"op_mappings": list_of(_OP_MAPPING)}))})
_read = partial(
    read_json, error=ConversionError, max_bytes=MAX_DATA_BYTES, max_values=MAX_DATA_VALUES
)


@dataclass(frozen=True)
class Kernel:
    """A kernel of the NPU.

    Attributes:
        ops: names of the ONNX ops that the kernel computes; empty for a part of a function.
        kind: type of the kernel, e.g. `Conv2d`.
        inputs: types of the inputs, e.g. `uint8`, `int8`.
        outputs: types of the outputs.
    """

    ops: tuple[str, ...]
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def is_float(self) -> bool:
        """Whether the kernel computes in float; conversions do not."""
        return self.kind not in _CONVERSIONS and bool(_FLOATS & {*self.inputs, *self.outputs})


@dataclass(frozen=True)
class KernelRow:
    """Kernels of one kind and one combination of types: a row of a table.

    Attributes:
        count: the number of kernels.
        kind: type of the kernels.
        types: types of inputs and outputs, e.g. `uint8,int8→uint8`.
    """

    count: int
    kind: str
    types: str


@dataclass(frozen=True)
class CompiledGraph:
    """The compiled graph of a file.

    Attributes:
        kernels: the kernels.
        float_tensors: names of tensors that the NPU holds in float.
    """

    kernels: tuple[Kernel, ...]
    float_tensors: frozenset[str]

    @property
    def kernel_rows(self) -> tuple[KernelRow, ...]:
        """The kernels by kind and types, the most frequent first."""
        counts = Counter(
            (kernel.kind, f"{','.join(kernel.inputs)}→{','.join(kernel.outputs)}")
            for kernel in self.kernels
        )
        return tuple(KernelRow(count, *words) for words, count in counts.most_common())

    @property
    def float_ops(self) -> frozenset[str]:
        """Names of the ONNX ops that float kernels compute."""
        return frozenset(op for kernel in self.kernels if kernel.is_float for op in kernel.ops)


def recover_onnx_name(name: str, names: Collection[str]) -> str:
    """Return the name of a node in a file from that in ONNX Runtime's optimized graph.

    `names` are those of the file; the name of an added node is returned as it is.
    """
    original = name
    while original not in names and _ENDING.search(original):
        original = _ENDING.sub("", original)
    return original if original in names else name


def read_graphs(folder: Path, ops: frozenset[str]) -> CompiledGraph:
    """Return the kernels from the files that the provider wrote to a folder.

    Args:
        folder: the folder.
        ops: names of the ops of the file, without QuantizeLinear and DequantizeLinear.

    Raises:
        ConversionError: the provider wrote something else.
    """
    sources = _read_trace(folder, ops)
    kernels: list[Kernel] = []
    tensors: set[str] = set()
    for path in sorted(folder.glob("*.json")):
        if path.name == _TRACE or path.name.endswith(_TENSORS):
            continue
        graph = _read(path, _GRAPH)["graph"]
        types = {
            name: _TYPES.get(tensor["data_type"], hex(tensor["data_type"]))
            for name, tensor in graph["tensors"].items()
        }
        tensors.update(name for name, kind in types.items() if kind in _FLOATS)
        for name, node in graph["nodes"].items():
            own = recover_onnx_name(name, ops)
            computed = sources.get(name) or ((own,) if own in ops else ())
            kernels.append(_parse_kernel_row(node, computed, types))
    return CompiledGraph(tuple(kernels), frozenset(tensors))


def _parse_kernel_row(
    node: dict[str, Any], ops: tuple[str, ...], types: Mapping[str, str]
) -> Kernel:
    inputs, outputs = (
        tuple(types[name] for name in node[key] if name in types)
        for key in ("input_names", "output_names")
    )
    return Kernel(ops, node["type"], inputs, outputs)


def _read_trace(folder: Path, ops: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Return kernel → the ONNX ops that it computes, as far as the trace tells."""
    path = folder / _TRACE
    if not path.exists():
        return {}
    sources = {}
    for trace in _read(path, _OP_TRACE)["subgraph_traces"]:
        for mapping in trace["op_mappings"]:
            nodes = [
                recover_onnx_name(s["name"], ops) for s in mapping["sources"] if s["type"] == "OP"
            ]
            sources[mapping["dst_name"]] = tuple(dict.fromkeys(n for n in nodes if n in ops))
    return sources
