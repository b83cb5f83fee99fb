"""Results that nobody reads.

AI Edge Quantizer 0.10 leaves such results in float, even if the other results of their op become
INT8; XNNPACK then refuses the graph.
"""

from __future__ import annotations

from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.litert.graph.program import Program


def quantize_unread_results(program: Program) -> None:
    """Give float results that nobody reads the type of the INT8 results of their op, in place."""
    read, tensors = program.list_read_tensors(), program.main.tensors
    for op in program.iterate_ops():
        results = [tensors[index] for index in op.outputs]
        int8 = next((entry for entry in results if entry.type == schema.TensorType.INT8), None)
        if int8 is None:
            continue
        for index in op.outputs:
            if int(index) not in read and program.is_float(index):
                tensors[index].type, tensors[index].quantization = int8.type, int8.quantization
