"""Security checks of ONNX files before they are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from neural_mp.errors import ModelLoadError
from neural_mp.io.files import resolve_sibling
from neural_mp.io.limits import MAX_DEPTH, MAX_ONNX_NODES

#: Ops that read files or call Python.
_HARMFUL = ("EPContext", "PythonOp", "PythonOpGrad", "ATen", "ATenOp", "PyOp")
#: Session settings that ONNX Runtime reads from a model if a variable enables it.
_SETTINGS = "ort_config"
_EXTERNAL = onnx.TensorProto.EXTERNAL
#: Numbers of the types that tensors may have.
_TYPES = frozenset(int(dtype) for dtype in ir.DataType) - {int(ir.DataType.UNDEFINED)}

_Function = tuple[str, str, str]


def check_model(model: onnx.ModelProto, path: Path) -> None:
    """Check that a model reads weights from sibling files only, and that its ops only compute.

    Settings for ONNX Runtime in the model are removed.

    Raises:
        ModelLoadError: a weight is outside the folder or truncated, or an op is unsafe.
    """
    properties = [item for item in model.metadata_props if item.key != _SETTINGS]
    if len(properties) < len(model.metadata_props):
        del model.metadata_props[:]
        model.metadata_props.extend(properties)
    what, graphs = repr(str(path)), list(_iterate_all_graphs(model))
    nodes = [node for graph in graphs for node in graph.node]
    nodes += [node for function in model.functions for node in function.node]
    for name, fault in _find_tensor_faults(model, graphs, nodes, path):
        raise ModelLoadError(f"{what} was rejected: tensor {name!r} {fault}")
    for node in nodes:
        if node.op_type in _HARMFUL:
            raise ModelLoadError(
                f"{what} was rejected: node {node.name!r} is of the op {node.op_type!r}, which "
                f"reads other files or calls Python; export the model without this op"
            )
    _check_function_expansion(model, what)


def _iterate_all_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    graphs = [model.graph]
    graphs += [g for info in model.training_info for g in (info.initialization, info.algorithm)]
    graphs += _iterate_body_graphs(node for function in model.functions for node in function.node)
    graphs += _iterate_attribute_graphs(
        a for function in model.functions for a in function.attribute_proto
    )
    return iterate_nested_graphs(graphs)


def iterate_nested_graphs(graphs: Iterable[onnx.GraphProto]) -> Iterator[onnx.GraphProto]:
    """Yield graphs and the graphs within their nodes, at any depth."""
    waiting = list(graphs)
    while waiting:
        graph = waiting.pop()
        yield graph
        waiting += _iterate_body_graphs(graph.node)


def _iterate_body_graphs(nodes: Iterable[onnx.NodeProto]) -> list[onnx.GraphProto]:
    return _iterate_attribute_graphs(attribute for node in nodes for attribute in node.attribute)


def _iterate_attribute_graphs(attributes: Iterable[onnx.AttributeProto]) -> list[onnx.GraphProto]:
    """Return the graphs in attributes; a function's attributes are defaults of its calls."""
    return [graph for a in attributes for graph in ([a.g] if a.HasField("g") else []) + [*a.graphs]]


def _find_tensor_faults(
    model: onnx.ModelProto,
    graphs: Iterable[onnx.GraphProto],
    nodes: Iterable[onnx.NodeProto],
    path: Path,
) -> Iterator[tuple[str, str]]:
    """Yield the names of invalid tensors with the fault as text."""
    sizes: dict[str, int] = {}
    for tensor in (tensor for graph in graphs for tensor in graph.initializer):
        if tensor.data_location == _EXTERNAL:
            fault = _external_tensor_fault(tensor, path, sizes)
        else:
            fault = _find_tensor_fault(tensor)
        if fault:
            yield tensor.name, fault
    for tensor in _non_initializer_tensors(model, graphs, nodes):
        if tensor.data_location == _EXTERNAL:
            yield tensor.name, "is stored in a file although it is not an initializer"
        elif fault := _find_tensor_fault(tensor):
            yield tensor.name, fault


def _non_initializer_tensors(
    model: onnx.ModelProto, graphs: Iterable[onnx.GraphProto], nodes: Iterable[onnx.NodeProto]
) -> Iterator[onnx.TensorProto]:
    defaults = [a for function in model.functions for a in function.attribute_proto]
    attributes = [*defaults, *(a for node in nodes for a in node.attribute)]
    sparse_ones = [sparse for graph in graphs for sparse in graph.sparse_initializer]
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        sparse_ones += attribute.sparse_tensors
        if attribute.HasField("sparse_tensor"):
            sparse_ones.append(attribute.sparse_tensor)
    for sparse in sparse_ones:
        yield from (sparse.values, sparse.indices)


def _find_type_fault(tensor: onnx.TensorProto) -> str:
    """Return the fault of a tensor's type and shape as text; empty if there is none."""
    if tensor.data_type not in _TYPES:
        return f"must have a type of ONNX, got number {tensor.data_type}"
    if any(size < 0 for size in tensor.dims):
        return f"must have sizes of at least 0, got {list(tensor.dims)}"
    return ""


def _find_tensor_fault(tensor: onnx.TensorProto) -> str:
    if fault := _find_type_fault(tensor):
        return fault
    needed, available = _size_in_bytes(tensor), len(tensor.raw_data)
    if tensor.HasField("raw_data") and needed is not None and needed > available:
        return f"requires {needed} bytes, got {available}"
    return ""


def _external_tensor_fault(tensor: onnx.TensorProto, path: Path, sizes: dict[str, int]) -> str:
    """Return the fault of an external tensor; `sizes` caches file sizes."""
    if fault := _find_type_fault(tensor):
        return fault
    needed = _size_in_bytes(tensor)
    fields = {item.key: item.value for item in tensor.external_data}
    try:
        offset, length = int(fields.get("offset", "0")), int(fields.get("length", "-1"))
    except ValueError:
        return f"must have integers as offset and length in its file, got {fields}"
    location = fields.get("location", "")
    if location not in sizes:
        file = resolve_sibling(path, location)
        # The reader reports missing files.
        sizes[location] = file.stat().st_size if file.is_file() else -1
    size = sizes[location]
    if size < 0:
        return ""
    available = max(0, min(length, size - offset) if "length" in fields else size - offset)
    if offset < 0 or ("length" in fields and (length < 0 or offset + length > size)):
        return f"occupies {length} bytes from byte {offset} of {location!r}, which has {size} bytes"
    if needed is not None and needed > available:
        return f"requires {needed} bytes of {location!r}, got {available}"
    return ""


def _size_in_bytes(tensor: onnx.TensorProto) -> int | None:
    """Return the size of a tensor by type and shape; None if unknown."""
    try:
        kind = ir.DataType(tensor.data_type)
        return int(prod(tensor.dims) * kind.itemsize)
    except (ValueError, TypeError, KeyError, OverflowError):  # strings, or an unknown type
        return None


def _check_function_expansion(model: onnx.ModelProto, what: str) -> None:
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    sizes: dict[_Function, int] = {}

    def count_expanded_nodes(nodes: Iterable[Any], inside: tuple[_Function, ...]) -> int:
        count = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            if key in inside or len(inside) > MAX_DEPTH:
                raise ModelLoadError(f"{what} was rejected: function {key[1]!r} is recursive")
            if key in functions and key not in sizes:
                sizes[key] = count_expanded_nodes(functions[key].node, (*inside, key))
            count += sizes.get(key, 1)
            for graph in _iterate_body_graphs([node]):
                count += count_expanded_nodes(graph.node, inside)
        return count

    count = count_expanded_nodes(model.graph.node, ())
    if count > MAX_ONNX_NODES:
        raise ModelLoadError(
            f"{what} was rejected: {count} nodes after inlining functions exceed the limit of "
            f"{MAX_ONNX_NODES}"
        )
