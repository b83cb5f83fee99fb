"""The ops of an OpenVINO model and the edges between them."""

from __future__ import annotations

from typing import Any

from neural_mp.adaptors.openvino.fusion import has_weight, is_product, joined_inputs
from neural_mp.adaptors.openvino.graph_edit import (
    SIXTEEN_BITS,
    constants_read,
    name_of,
    tensor_of,
    type_of,
)
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.ops import Role, has_role
from neural_mp.adaptors.openvino.reduce_range import kernel_of
from neural_mp.core.graph import MIN_CONSTANT_ELEMENTS, Layer, Op, OpGraph
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.precision import Precision

#: Start of the names of ops that come from the modules of a PyTorch model.
_MODULE = "__module."


def build_graph(model: OpenVinoModel) -> OpGraph:
    """Return every node with edges and fusion group; further results follow as ops."""
    structure = model.structure
    counted: set[str] = set()
    groups = structure.fusion_groups.values()
    sums = {group.residual_sum.ops[-1] for group in groups if group.residual_sum is not None}
    ops = []
    for name, node in structure.nodes.items():
        # A constant that several ops read counts once.
        constants = {name_of(c): c for c in constants_read(node) if name_of(c) not in counted}
        counted.update(constants)
        weights = sum(int(c.get_data().size) for c in constants.values() if _is_weight(c))
        ops.append(
            Op(
                name,
                type_of(node),
                tuple(dict.fromkeys(structure.read_by(name))),
                fusion_group=structure.layer_of.get(name),
                quantize_agnostic=name in structure.agnostic_ops,
                writes_int8=has_role(node, Role.SEQUENCE) and name in structure.fusion_groups,
                joins_int8=has_role(node, Role.JOINING) and name in structure.fusion_groups,
                quantized_inputs=_quantized_inputs(node) if name in structure.fusion_groups else (),
                channel_scales=_is_depthwise(node),
                quantizes_terms=name in sums,
                weights=weights,
                constants=_large_constants(node),
                layers=_module_layers(name, type_of(node)),
                source_precision=_source_precision(node),
                shape=_output_shape(node),
            )
        )
    for part, op in structure.parts.items():
        moved = op in structure.agnostic_ops
        ops.append(Op(part, type_of(structure.nodes[op]), (op,), quantize_agnostic=moved))
    outputs = {tensor_of(result.input_value(0)) for result in model.program.get_results()}
    return OpGraph(ops, model.signature.input_tensors, sorted(outputs & set(structure.tensors)))


def _quantized_inputs(node: Any) -> tuple[str, ...]:
    """Return the inputs that an integer kernel reads quantized; empty for the first one only."""
    if is_product(node):
        return tuple(dict.fromkeys(map(tensor_of, node.input_values())))
    return joined_inputs(node)


def _is_depthwise(node: Any) -> bool:
    return has_weight(node) and kernel_of(node) is KernelKind.DEPTHWISE


def _large_constants(node: Any) -> tuple[str, ...]:
    weights = filter(_is_weight, constants_read(node))
    large = (c for c in weights if c.get_data().size >= MIN_CONSTANT_ELEMENTS)
    return tuple(dict.fromkeys(map(name_of, large)))


def _is_weight(constant: Any) -> bool:
    return bool(constant.get_element_type().is_real())


def _source_precision(node: Any) -> Precision:
    """Return the precision of the first 16-bit input of a node; FP32 if there is none."""
    kinds = (port.get_element_type() for port in node.inputs())
    return next((SIXTEEN_BITS[kind] for kind in kinds if kind in SIXTEEN_BITS), Precision.FP32)


def _output_shape(node: Any) -> tuple[int | None, ...] | None:
    """Return the sizes of the first result of a node, None for a free size."""
    if not node.get_output_size():
        return None
    shape = node.get_output_partial_shape(0)
    if shape.rank.is_dynamic:
        return None
    return tuple(size.get_length() if size.is_static else None for size in shape)


def _module_layers(name: str, kind: str) -> tuple[Layer, ...]:
    """Return the PyTorch modules in the name of an op, such as `__module.layer1.0.conv1/Conv`.

    Args:
        name: the name.
        kind: the op type, which stands for the type of the innermost module.
    """
    if not name.startswith(_MODULE):
        return ()
    path = name.removeprefix(_MODULE).partition("/")[0].split(".")
    names = [".".join(path[: end + 1]) for end in range(len(path))]
    return tuple(Layer(layer, kind if layer == names[-1] else "Module") for layer in names)
