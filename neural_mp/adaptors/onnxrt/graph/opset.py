"""Opset conversion, queries of ONNX's op schemas, and ONNX's inference of types and shapes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import onnx
import onnx_ir as ir

from neural_mp.adaptors.onnxrt.graph.file_checks import iterate_nested_graphs
from neural_mp.errors import ConversionError, one_line

logger = logging.getLogger(__name__)
#: Constants with more bytes are not part of the message for ONNX.
_MOST_BYTES = 1000


@lru_cache(maxsize=1024)
def _find_schema(op: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return None


def _find_node_schema(node: ir.Node, opset: int) -> onnx.defs.OpSchema | None:
    return None if node.domain else _find_schema(node.op_type, opset)


def _element_type_variable(schema: onnx.defs.OpSchema | None) -> str | None:
    """Return the type variable of an op's first result if it is also an input's; else None."""
    if schema is None or not schema.inputs or not schema.outputs:
        return None
    variable = str(schema.outputs[0].type_str)
    return variable if any(item.type_str == variable for item in schema.inputs) else None


def find_typed_inputs(node: ir.Node, opset: int) -> set[int]:
    """Return positions of the inputs that have the element type of the first result."""
    schema = _find_node_schema(node, opset)
    variable = _element_type_variable(schema)
    if schema is None or variable is None:
        return set()
    last = len(schema.inputs) - 1  # may be variadic
    types = (schema.inputs[min(index, last)].type_str for index in range(len(node.inputs)))
    return {index for index, kind in enumerate(types) if kind == variable}


def is_function(node: ir.Node, opset: int) -> bool:
    """Whether ONNX defines an op as a function of other ops."""
    schema = _find_node_schema(node, opset)
    flags = ("has_function", "has_context_dependent_function")  # absent from onnx's type stubs
    return schema is not None and any(getattr(schema, flag) for flag in flags)


def gives_list(node: ir.Node, opset: int) -> bool:
    """Whether a result of an op is always a sequence, an optional or a map."""
    schema = _find_node_schema(node, opset)
    types = (item.types for item in schema.outputs) if schema is not None else ()
    return any(kinds and not any(k.startswith("tensor(") for k in kinds) for kinds in types)


def supports_dtype(node: ir.Node, opset: int, dtype: str) -> bool:
    """Whether ONNX defines an op for an element type, e.g. `float16`."""
    schema = _find_node_schema(node, opset)
    variable = _element_type_variable(schema)
    constraints = schema.type_constraints if schema is not None else ()
    allowed = (c.allowed_type_strs for c in constraints if c.type_param_str == variable)
    return f"tensor({dtype})" in next(allowed, ())


def find_version_in(op: str, opset: int) -> int:
    """Return the opset in which an ONNX op type last changed; 0 if there is none."""
    schema = _find_schema(op, opset)
    return 0 if schema is None else int(schema.since_version)


def same_but_for_types(node: ir.Node, opset: int, target: int) -> bool:
    """Whether two opsets define the op of a node identically, except for element types.

    Attributes that only one of them defines must not be set.
    """
    first, second = (_find_node_schema(node, version) for version in (opset, target))
    if first is None or second is None:
        return first is second
    if first.since_version == second.since_version:
        return True
    lhs, rhs = _collect_attribute_defaults(first), _collect_attribute_defaults(second)
    equal = all(lhs[name] == rhs[name] for name in lhs.keys() & rhs.keys())
    alike = equal and _list_port_names(first) == _list_port_names(second)
    return alike and (lhs.keys() ^ rhs.keys()).isdisjoint(node.attributes)


def _collect_attribute_defaults(schema: onnx.defs.OpSchema) -> dict[str, tuple[bool, bytes]]:
    return {
        name: (bool(item.required), item.default_value.SerializeToString())
        for name, item in schema.attributes.items()
    }


def _list_port_names(schema: onnx.defs.OpSchema) -> tuple[list[str], list[str]]:
    return [item.name for item in schema.inputs], [item.name for item in schema.outputs]


def map_type_variables(node: ir.Node, opset: int, dtype: str) -> dict[str, str]:
    """Return type variable → its tensor type, for an op of element type `dtype`."""
    schema = _find_node_schema(node, opset)
    if schema is None:
        return {}
    pairs = zip(schema.inputs, node.inputs, strict=False)
    types = {
        str(item.type_str): f"tensor({value.dtype.name.lower()})"
        for item, value in pairs
        if value is not None and value.dtype is not None
    }
    variable = _element_type_variable(schema)
    return types if variable is None else {**types, variable: f"tensor({dtype})"}


#: The first opset with per-channel quantization and bfloat16.
LEAST_OPSET = 13
#: The first IR version that supports opset 13.
_LEAST_IR_VERSION = 8
#: The last opset in which Resize samples without a half-pixel shift.
_UNSHIFTED = 10


def get_onnx_opset(program: ir.Model) -> int:
    """Return the ai.onnx opset; 0 if the graph uses none."""
    imports = program.graph.opset_imports
    return imports.get("", imports.get("ai.onnx", 0))


def raise_opset(program: ir.Model, least: int = LEAST_OPSET) -> None:
    """Raise the opset of a graph to the minimum for conversions, in place.

    Raises:
        ConversionError: the converter fails.
    """
    original = get_onnx_opset(program)
    refused = f"opset {original} cannot be raised to {least}"
    try:
        from onnxscript import version_converter  # a tenth of the imports of a process

        with _log_errors_only("onnxscript.version_converter"):
            version_converter.convert_version(program, least, fallback=True)
    except Exception as error:
        # The converter uses assertions, and its C++ part raises arbitrary types.
        logger.debug("the opset cannot be raised", exc_info=True)
        raise ConversionError(f"{refused}: {one_line(error)}") from error
    if get_onnx_opset(program) != least:
        raise ConversionError(f"{refused}: an op has no equivalent in the newer opset")
    program.ir_version = max(program.ir_version, _LEAST_IR_VERSION)
    if original <= _UNSHIFTED:
        for node in program.graph.all_nodes():
            if node.op_type == "Resize" and "coordinate_transformation_mode" not in node.attributes:
                # The converter omits the mode, and its default changed in opset 11.
                node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
                node.attributes.add(ir.AttrString("nearest_mode", "floor"))


@contextmanager
def _log_errors_only(name: str) -> Iterator[None]:
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def infer_tensor_types(program: ir.Model) -> None:
    """Set element types and shapes of tensors, in place; names must be unique across bodies.

    The pass of onnx-ir does the same in time that grows with the square of the constants, and
    reads the whole graph back.
    """
    with _without_large_constants(program) as constants:
        proto = ir.to_proto(program)
    ports = {port.name for port in proto.graph.input}
    missing = (value for value in constants if value.name not in ports)
    proto.graph.input.extend(map(ir.serde.serialize_value, missing))
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    types = {
        item.name: item.type.SerializeToString()
        for graph in iterate_nested_graphs([inferred.graph])
        for item in (*graph.value_info, *graph.input, *graph.output)
        if item.type.HasField("tensor_type")
    }
    # Long graphs repeat a few types.
    parsed = {content: _parse_type(content) for content in set(types.values())}
    for graph in program.graphs():
        for value in (*graph.inputs, *(result for node in graph for result in node.outputs)):
            if value.name in types:
                _set_type(value, *parsed[types[value.name]])


@contextmanager
def _without_large_constants(program: ir.Model) -> Iterator[list[ir.Value]]:
    """Remove large constants from a graph for a while; yield all constants."""
    initializers = program.graph.initializers
    constants = list(initializers.values())
    large = [c for c in constants if c.const_value is None or c.const_value.nbytes > _MOST_BYTES]
    for value in large:
        initializers.pop(str(value.name))
    try:
        yield constants
    finally:
        for value in large:
            initializers.add(value)


def _parse_type(content: bytes) -> tuple[ir.DataType | None, ir.Shape | None]:
    """Return the element type and shape of a serialized tensor type."""
    kind = onnx.TypeProto.FromString(content)
    inferred = ir.serde.deserialize_type_proto_for_type(kind)
    dtype = None if inferred is None else inferred.dtype
    return dtype, ir.serde.deserialize_type_proto_for_shape(kind)


def _set_type(value: ir.Value, dtype: ir.DataType | None, shape: ir.Shape | None) -> None:
    if shape is not None and value.shape != shape:
        value.shape = shape.copy()
    if dtype is not None and value.dtype != dtype:
        value.dtype = dtype
