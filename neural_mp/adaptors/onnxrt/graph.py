"""The ops of an ONNX model and the edges between them."""

from __future__ import annotations

import onnx_ir as ir

from neural_mp.adaptors.onnxrt.constant_folding import stored_constants
from neural_mp.adaptors.onnxrt.convert_int8 import is_pointwise
from neural_mp.adaptors.onnxrt.graph_edit import SIXTEEN_BITS, constants_of, read_by
from neural_mp.adaptors.onnxrt.kernel_registry import CONTRIB, INT8_PRODUCT, has_kernel
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.ops import Role, has_role, is_product
from neural_mp.adaptors.onnxrt.source_quantization import ran_in_integers
from neural_mp.core.graph import MIN_CONSTANT_ELEMENTS, Op, OpGraph
from neural_mp.core.precision import Precision


def build_graph(model: OnnxModel) -> OpGraph:
    """Return every node with edges and fusion group; further results follow as ops.

    Nodes of bodies precede the node that runs them, which reads the results of the bodies. Per-step
    inputs of bodies are graph inputs.
    """
    structure = model.structure
    ops = []
    for name, node in structure.nodes.items():
        inputs = [structure.names[value] for value in read_by(node) if value in structure.names]
        ops.append(
            Op(
                name,
                node.op_type,
                tuple(dict.fromkeys(inputs)),
                fusion_group=structure.layer_of.get(name),
                quantize_agnostic=name in structure.agnostic_ops,
                writes_int8=_writes_int8(model, name),
                joins_int8=name in structure.fusion_groups and has_role(node, Role.JOINING),
                weights=sum(constant.size for constant in constants_of(node)),
                source_precision=_source_precision(node),
                shape=_shape(node),
                constants=_large_constants(node),
            )
        )
    for part, op in structure.parts.items():
        moved = op in structure.agnostic_ops
        ops.append(Op(part, structure.nodes[op].op_type, (op,), quantize_agnostic=moved))
    outputs = {structure.names[v] for v in model.program.graph.outputs if v in structure.names}
    step_inputs = [structure.names[value] for value in structure.given_to_bodies]
    return OpGraph(ops, [*model.signature.input_tensors, *step_inputs], sorted(outputs))


def _large_constants(node: ir.Node) -> tuple[str, ...]:
    """Return the names of the large stored constants that a node reads, also through others."""
    stored = (constant for value in node.inputs if value for constant in stored_constants(value))
    return tuple(
        sorted(
            {
                str(value.name)
                for value in stored
                if value.const_value is not None and value.const_value.size >= MIN_CONSTANT_ELEMENTS
            }
        )
    )


def _writes_int8(model: OnnxModel, name: str) -> bool:
    """Whether the integer kernel of an op cannot write float."""
    node, group = model.structure.nodes[name], model.structure.fusion_groups.get(name)
    if group is None or not has_role(node, Role.LAYER) or is_product(node):
        return False
    as_product = is_pointwise(node) and has_kernel(model.provider, INT8_PRODUCT, CONTRIB)
    return not as_product or group.activation is not None


def _source_precision(node: ir.Node) -> Precision:
    """Return INT8 if the given model quantizes the inputs of a node, or else its 16-bit precision.

    FP32 for other nodes.
    """
    if ran_in_integers(node):
        return Precision.INT8
    dtypes = (value.dtype for value in node.inputs if value is not None)
    return next((SIXTEEN_BITS[dtype] for dtype in dtypes if dtype in SIXTEEN_BITS), Precision.FP32)


def _shape(node: ir.Node) -> tuple[int | None, ...] | None:
    """Return the sizes of the first result of a node, None for a free size."""
    shape = node.outputs[0].shape if node.outputs else None
    if shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in shape)
