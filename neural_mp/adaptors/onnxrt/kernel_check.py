"""Ops of a model that ONNX Runtime miscompiles between integer ops.

ONNX Runtime fuses float ops between DequantizeLinear and QuantizeLinear into integer kernels, and
moves the transpositions around integer convolutions past other ops. For some ops, the results
differ, or the model does not load. No table of such ops would be complete, so a probe compares
every combination of op, attributes and reduced shapes once per machine and version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx
import onnx_ir as ir

from neural_mp.adaptors.common.kernels.runtime_probe import find_deviations, find_installed_version
from neural_mp.adaptors.onnxrt.fusion import GraphStructure, graph_structure
from neural_mp.adaptors.onnxrt.graph.edit import (
    PLAIN_ATTRIBUTES,
    get_known_sizes,
    is_float32,
    list_used_outputs,
)
from neural_mp.adaptors.onnxrt.graph.opset import get_onnx_opset
from neural_mp.adaptors.onnxrt.graph.subgraphs import iterate_node_bodies
from neural_mp.adaptors.onnxrt.kernel_check_probe import (
    GENERATED,
    JOINER,
    LAYER,
    MOVER,
    READ,
    ROLE,
    SHAPES,
)
from neural_mp.adaptors.onnxrt.kernels.ops import has_weight, is_product

#: Must change with the cases or the probe.
_VERSION = 1
_PROBE = "neural_mp.adaptors.onnxrt.kernel_check_probe"


@dataclass(frozen=True, eq=False)
class KernelCheck:
    """The check of the ops of a model, run when needed.

    Attributes:
        program: the canonicalized graph.
    """

    program: ir.Model

    @cached_property
    def rejected_ops(self) -> Mapping[str, str]:
        """Op → the reason why it cannot run between integer ops."""
        return {
            op: f"between integer ops, ONNX Runtime {reason}"
            for op, reason in _find_deviations(self.build_cases()).items()
        }

    @cached_property
    def structure(self) -> GraphStructure:
        """The structure of the graph if no op is rejected."""
        return graph_structure(self.program)

    def build_cases(self) -> dict[str, bytes]:
        """Return op → its case, for the ops that may be fused with integer ops."""
        graph, opset = self.structure, get_onnx_opset(self.program)
        cases, built = dict[str, bytes](), dict[Hashable, bytes | None]()
        for name, node in graph.nodes.items():
            if name in graph.agnostic_ops:
                role = MOVER
            elif name in graph.fusion_groups and has_weight(node):
                role = LAYER
            else:
                role = JOINER
            # Products are written as their kernel.
            if role == LAYER and is_product(node):
                continue
            key = _make_case_key(node, role)
            if key is None or key not in built:
                built[key] = build_op_case(node, role, opset)
            case = built[key]
            if case is not None:
                cases[name] = case
        return cases


def compare_ahead(checks: Iterable[KernelCheck]) -> None:
    """Compare the ops of several models in one child process."""
    cases = (case for check in checks for case in check.build_cases().values())
    _find_deviations({str(index): case for index, case in enumerate(cases)})


def _find_deviations(cases: Mapping[str, bytes]) -> dict[str, str]:
    version = find_installed_version("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")
    return find_deviations(_PROBE, f"{_VERSION} {version}", cases)


_IR_VERSION = 8
#: Sizes of free axes: the first axis; the others, once each: two pairs of remainders.
_FIRST_SIZE, _OTHER_SIZES = 2, (13, 16)
#: Shape of an input of unknown rank.
_UNKNOWN_SHAPE = (2, 6, 13, 14)
#: Greater sizes are reduced to a size with the same remainder by most strides.
_MAX_SIZE, _REMAINDER_OF = 48, 24
#: Maximum number of elements of an input in its own shape.
_MAX_ELEMENTS = 4_000_000
#: Maximum number of channels and groups of a layer.
_MAX_CHANNELS = 16

Shape = tuple[int, ...]
Dims = tuple[int | None, ...]


def _make_case_key(node: ir.Node, role: str) -> Hashable | None:
    """Return all that a case depends on; None for attributes without a simple value.

    Long graphs repeat a few ops, and a case takes far longer to write than its key.
    """
    attributes = tuple(node.attributes.values())
    if any(item.is_ref() or item.type not in PLAIN_ATTRIBUTES for item in attributes):
        return None
    settings = frozenset((item.name, item.type, str(item.value)) for item in attributes)
    numbers: dict[ir.Value, int] = {}
    operands = tuple(
        None
        if value is None
        else (numbers.setdefault(value, len(numbers)), *_describe_input(node, value))
        for value in node.inputs
    )
    used = list_used_outputs(node)
    results = tuple((bool(value.name), value in used) for value in node.outputs)
    kind = node.op_type, node.domain, is_float32(node.outputs[0])
    return role, kind, settings, operands, results


def _describe_input(node: ir.Node, value: ir.Value) -> tuple[Hashable, ...]:
    """Return the type and sizes of an input, and the values of a constant that matter."""
    constant, values = value.const_value, None
    if constant is not None and not _has_arbitrary_values(node, value):
        values = constant.numpy().tobytes()
    is_known = value.shape is not None
    return value.dtype, is_known, _choose_input_dims(value), constant is None, values


def build_op_case(node: ir.Node, role: str, opset: int) -> bytes | None:
    """Return the case of an op, a serialized model of it; None if no integer op can precede it."""
    if node.domain or list(iterate_node_bodies(node)) or not is_float32(node.outputs[0]):
        return None
    fed = [value for value in node.inputs if value is not None and value.const_value is None]
    kinds = {value.dtype for value in fed}
    # Arbitrary indices would not be valid.
    if ir.DataType.FLOAT not in kinds or kinds - {ir.DataType.FLOAT, ir.DataType.BOOL}:
        return None
    names = {
        value: f"x{index}"
        for index, value in enumerate(dict.fromkeys(_iterate_present_inputs(node)))
    }
    proto = ir.serde.serialize_node(node)
    del proto.input[:], proto.output[:]
    proto.name = proto.doc_string = ""
    proto.ClearField("metadata_props")
    proto.input.extend("" if value is None else names[value] for value in node.inputs)
    proto.output.extend(
        f"y{index}" if value.name else "" for index, value in enumerate(node.outputs)
    )
    ordered = sorted(proto.attribute, key=lambda attribute: attribute.name)
    del proto.attribute[:]
    if role == LAYER:
        ordered = [attribute for attribute in ordered if attribute.name != "group"]
    proto.attribute.extend(ordered)
    free = [
        value for value in names if value.const_value is None or _has_arbitrary_values(node, value)
    ]
    if role == LAYER:
        shapes, groups = _choose_convolution_shapes(node)
        proto.attribute.append(onnx.helper.make_attribute("group", groups))
    else:
        shapes = list(_iterate_candidate_shapes([_choose_input_dims(value) for value in free]))
    inputs = [
        onnx.helper.make_tensor_value_info(names[value], int(value.dtype or 0), None)
        for value in free
    ]
    constants = [
        onnx.numpy_helper.from_array(value.const_value.numpy(), names[value])
        for value in names
        if value not in free and value.const_value is not None
    ]
    graph = onnx.helper.make_graph([proto], "op", inputs, [], constants)
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=_IR_VERSION
    )
    details: Mapping[str, object] = {
        ROLE: role,
        SHAPES: shapes,
        READ: [f"y{node.outputs.index(value)}" for value in list_used_outputs(node)],
        GENERATED: [names[value] for value in free if value.const_value is not None],
    }
    onnx.helper.set_model_props(model, {key: json.dumps(value) for key, value in details.items()})
    return model.SerializeToString(deterministic=True)


def _iterate_present_inputs(node: ir.Node) -> Iterator[ir.Value]:
    return (value for value in node.inputs if value is not None)


def _has_arbitrary_values(node: ir.Node, value: ir.Value) -> bool:
    """Whether the values of a constant are of no importance; those of Resize are sizes."""
    constant = value.const_value
    return (
        constant is not None
        and is_float32(value)
        and constant.size > 1
        and node.op_type != "Resize"
    )


def _choose_input_dims(value: ir.Value) -> Dims:
    if value.const_value is not None:
        return tuple(value.const_value.shape.numpy())
    sizes = get_known_sizes(value)
    return _UNKNOWN_SHAPE if sizes is None else sizes


def _iterate_candidate_shapes(given: Sequence[Dims]) -> Iterator[list[list[Shape]]]:
    """Yield the shapes to run, each with alternatives: those which the op accepts count.

    Reduced shapes come first, as they take less time and apply to more models.
    """
    is_free = any(size is None for dims in given for size in dims[1:])
    for extent in _OTHER_SIZES if is_free else _OTHER_SIZES[:1]:
        whole = [
            tuple(
                size if size is not None else (extent if axis else _FIRST_SIZE)
                for axis, size in enumerate(dims)
            )
            for dims in given
        ]
        rank = max(map(len, whole))
        smaller = [
            [size if size <= _MAX_SIZE else _REMAINDER_OF + size % _REMAINDER_OF for size in shape]
            for shape in whole
        ]
        reduced = [
            tuple(
                min(size, _FIRST_SIZE) if rank > 2 and len(shape) == rank and not axis else size
                for axis, size in enumerate(shape)
            )
            for shape in smaller
        ]
        alternatives = [reduced, whole] if whole != reduced else [whole]
        yield [shapes for shapes in alternatives if max(map(math.prod, shapes)) <= _MAX_ELEMENTS]


def _choose_convolution_shapes(node: ir.Node) -> tuple[list[list[list[Shape]]], int]:
    """Return the shapes of a convolution's data, weight and bias with few channels, and groups."""
    data, weight, *bias = _iterate_present_inputs(node)
    assert weight.const_value is not None
    outputs, inputs, *window = weight.const_value.shape.numpy()
    groups = node.attributes.get_int("group", 1)
    few = min(groups, _MAX_CHANNELS)
    out_channels = few * min(outputs // groups, _MAX_CHANNELS)
    in_channels = min(inputs, _MAX_CHANNELS)
    constants: list[Shape] = [(out_channels, in_channels, *window), *[(out_channels,)] * len(bias)]
    dims = _choose_input_dims(data) if data.shape is not None else (None,) * (2 + len(window))
    return [
        [[(_FIRST_SIZE, few * in_channels, *shapes[0][2:]), *constants] for shapes in alternatives]
        for alternatives in _iterate_candidate_shapes([dims])
    ], few
