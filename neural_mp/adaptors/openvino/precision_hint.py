"""BF16 by the runtime's precision hint, for plans of INT8 and BF16.

Compiled for float32, an INT8 kernel writes integers or float32, so that ops written in BF16 types
behind it need a cast of the whole tensor. Compiled for BF16, the kernel writes BF16 itself. The
hint applies to all float ops of a model and is kept in the model's runtime information.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from neural_mp.adaptors.common.named_graphs.tensor_variants import cast_saturating
from neural_mp.adaptors.openvino.fusion import GraphStructure
from neural_mp.adaptors.openvino.graph_edit import (
    array_of,
    give_name,
    is_constant,
    is_float,
    name_of,
    readers_of,
    redirect_inputs,
)
from neural_mp.adaptors.openvino.ops import Role, has_role
from neural_mp.adaptors.openvino.runtime import CPU, compile_for_bf16, core, dtype_of, ops, ov
from neural_mp.core.precision import Precision

#: Suffix of the name of a constant that is stored in BF16.
_STORED = "/bf16"


def runs_by_hint(structure: GraphStructure, effective: Mapping[str, Precision]) -> bool:
    """Whether the hint spares casts of what INT8 kernels write, and changes no op's precision.

    Ops in FP32 must read quantized tensors only, and BF16 ops or quantizations must read theirs:
    kernels compute in float32 whatever they write.

    Args:
        structure: the graph, with quantized tensors.
        effective: op → its precision.
    """
    graph = _Precisions(structure.nodes, effective)
    has_spared = False
    for name, node in structure.nodes.items():
        precision = graph.of(name)
        if precision is Precision.INT8 or not is_float(node.output(0)):
            continue
        inputs = list(graph.read(node))
        if precision is Precision.FP32:
            if {*inputs} != {None} or not {*graph.readers(node)} <= {Precision.BF16, None}:
                return False
        elif precision is not Precision.BF16:
            return False
        has_spared |= precision is Precision.BF16 and Precision.INT8 in inputs
    return has_spared and _has_native_bf16()


def set_hint(program: Any, structure: GraphStructure, effective: Mapping[str, Precision]) -> None:
    """Have a graph compiled for BF16, with the constants of its BF16 ops stored in BF16."""
    compile_for_bf16(program)
    for name, node in structure.nodes.items():
        if effective.get(name) is Precision.BF16:
            for index, port in enumerate(node.inputs()):
                _store_as_bf16(port, f"{name}{_STORED}{index}")


def _store_as_bf16(port: Any, name: str) -> None:
    output = port.get_source_output()
    array = array_of(output) if is_float(output) and is_constant(output) else None
    if array is None:
        return
    values = cast_saturating(np.asarray(array, np.float32), dtype_of(ov.Type.bf16))
    redirect_inputs([port], give_name(name, ops.convert(ops.constant(values, ov.Type.bf16), "f32")))


class _Precisions:
    """Precisions along the edges of a graph with quantized tensors."""

    def __init__(self, nodes: Mapping[str, Any], effective: Mapping[str, Precision]) -> None:
        self._nodes, self._effective = nodes, effective

    def of(self, name: str) -> Precision:
        return self._effective.get(name, Precision.FP32)

    def read(self, node: Any) -> Iterator[Precision | None]:
        """Yield the precisions of the float tensors that a node reads; None for quantized ones."""
        for output in node.input_values():
            if is_constant(output) or not is_float(output):
                continue
            source = output.get_node()
            while not self._is_inserted_quantize(source) and self._is_inserted(source):
                source = source.input_value(0).get_node()
            yield None if self._is_inserted_quantize(source) else self.of(name_of(source))

    def readers(self, node: Any) -> Iterator[Precision | None]:
        """Yield the precisions of the ops that read a node's results; None for quantizations."""
        for output in node.outputs():
            for reader in readers_of(output):
                yield None if self._is_inserted_quantize(reader) else self.of(name_of(reader))

    def _is_inserted(self, node: Any) -> bool:
        return name_of(node) not in self._nodes and node.get_input_size() > 0

    def _is_inserted_quantize(self, node: Any) -> bool:
        return self._is_inserted(node) and has_role(node, Role.QUANTIZATION)


@lru_cache(maxsize=1)
def _has_native_bf16() -> bool:
    """Whether the CPU computes in BF16; on others, the plugin ignores the hint."""
    return "BF16" in core().get_property(CPU, "OPTIMIZATION_CAPABILITIES")
