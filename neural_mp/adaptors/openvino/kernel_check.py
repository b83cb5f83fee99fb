"""Ops of a model that OpenVINO miscompiles next to integer kernels.

The low-precision transformations of OpenVINO move scales and zero points past float ops, and the
plugin stores results of some kernels in bytes. For some ops and attributes, the results then have
other values or another shape. No table of these would be complete, so a probe compares every
combination of op, attributes and shapes once per machine and version.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from weakref import WeakKeyDictionary

import numpy as np

from neural_mp.adaptors.common.kernels.runtime_probe import find_deviations, find_installed_version
from neural_mp.adaptors.openvino.fusion import moves_values
from neural_mp.adaptors.openvino.graph.edit import (
    get_constant_array,
    get_op_type,
    get_tensor_name,
    give_name,
    is_constant,
    is_float,
    iterate_nodes_before,
    iterate_op_nodes,
    list_read_outputs,
    name_of,
    rank_of,
    redirect_inputs,
)
from neural_mp.adaptors.openvino.ops import Check, Role, get_op_row, has_role
from neural_mp.adaptors.openvino.runtime import from_bytes, ops, ov, to_bytes

#: Must change with the cases or the probe.
_VERSION = 7
_PROBE = "neural_mp.adaptors.openvino.kernel_check_probe"
#: Places in the runtime information of a case: whether its op moves quantized values, and the types
#: of the layers before.
MOVES, FOLLOWS = ("neural_mp", "moves"), ("neural_mp", "follows")
#: Sizes of free axes: the first axis, and the others in turn.
_FREE_SIZES = (2, 16, 13)
#: Maximum number of elements of an input.
_MAX_ELEMENTS = 4_000_000
#: Graph → its rejected ops.
_REJECTED: MutableMapping[ov.Model, dict[str, str]] = WeakKeyDictionary()


def find_rejected_ops(program: ov.Model) -> dict[str, str]:
    """Return op → the reason why it cannot run next to integer kernels, for ops of a graph."""
    if program not in _REJECTED:
        version = f"{_VERSION} {find_installed_version('openvino')}"
        reasons = find_deviations(_PROBE, version, build_op_cases(program))
        _REJECTED[program] = {
            op: f"next to integer kernels, OpenVINO {reason}" for op, reason in reasons.items()
        }
    return _REJECTED[program]


def keep_rejected(program: ov.Model, renamed: ov.Model, names: Mapping[str, str]) -> None:
    """Take over the rejected ops of a graph for its copy with new names of ops."""
    if program in _REJECTED:
        reasons = _REJECTED[program]
        _REJECTED[renamed] = {names.get(op, op): reason for op, reason in reasons.items()}


def build_op_cases(program: ov.Model) -> dict[str, bytes]:
    """Return op → case, a stored model of the op alone, for the ops to compare."""
    cases, cached = dict[str, bytes](), dict[str, bytes | None]()
    for node in iterate_op_nodes(program):
        if _is_compared(node):
            key = _make_case_key(node)
            if key not in cached:
                cached[key] = _build_case(program.clone(), name_of(node))
            case = cached[key]
            if case is not None:
                cases[name_of(node)] = case
    return cases


def _make_case_key(node: ov.Node) -> str:
    sources = node.input_values()
    tensors = [*map(get_tensor_name, sources)]
    repeated = [tensors.index(tensor) for tensor in tensors]
    constants = [
        np.asarray(get_constant_array(o)).tobytes() if is_constant(o) else None for o in sources
    ]
    shapes = [str(output.get_partial_shape()) for output in sources]
    results = [output.get_index() for output in list_read_outputs(node)]
    attributes = sorted(node.get_attributes().items(), key=str)
    layers = _preceding_layer_types(node)
    return f"{get_op_type(node)} {attributes} {shapes} {repeated} {constants} {results} {layers}"


def _preceding_layer_types(node: ov.Node) -> str:
    """Return the types of the layers whose scales may move to a node."""
    layers = (
        source for source in iterate_nodes_before(node, Role.LAYER) if has_role(source, Role.LAYER)
    )
    return " ".join(sorted({*map(get_op_type, layers)}))


def _build_case(copied: ov.Model, name: str) -> bytes | None:
    """Return the case of an op, cut from a copy of the graph; None if no data can be drawn."""
    node = next(node for node in iterate_op_nodes(copied) if name_of(node) == name)
    details = {MOVES: str(moves_values(node)), FOLLOWS: _preceding_layer_types(node)}
    case = _isolate_op(node)
    if case is None:
        return None
    for path, text in details.items():
        case.set_rt_info(text, list(path))
    graph, weights = to_bytes(case)
    return len(graph).to_bytes(8, "little") + graph + weights


def read_case(content: bytes) -> ov.Model:
    """Return the model of a case."""
    start = 8 + int.from_bytes(content[:8], "little")
    return from_bytes(content[8:start], content[start:])


def choose_fixed_shape(shape: ov.PartialShape) -> list[int]:
    """Return the sizes of a tensor, with numbers for free axes."""
    return [
        size.get_length() if size.is_static else _FREE_SIZES[min(axis, 1 + axis % 2)]
        for axis, size in enumerate(shape)
    ]


def _is_compared(node: ov.Node) -> bool:
    sources = node.input_values()
    computed = [output for output in sources if not is_constant(output)]
    # Arbitrary indices and sizes would not be valid.
    if not computed or not all(map(is_float, [*computed, *list_read_outputs(node)])):
        return False
    check = get_op_row(node).check
    if check is Check.BROADCASTING:
        return len({rank_of(output) for output in computed}) > 1
    return check is Check.ALWAYS


def _isolate_op(node: ov.Node) -> ov.Model | None:
    """Return a model of an op, cut from its graph; None if no data can be drawn for its inputs."""
    inputs: dict[str, ov.Node] = {}
    for position, port in enumerate(node.inputs()):
        output = port.get_source_output()
        if is_constant(output):
            redirect_inputs([port], _copy_constant(output, position))
            continue
        shape = output.get_partial_shape()
        if shape.rank.is_dynamic or np.prod(choose_fixed_shape(shape)) > _MAX_ELEMENTS:
            return None
        tensor = get_tensor_name(output)
        if tensor not in inputs:
            inputs[tensor] = ops.parameter(shape, np.float32, name=f"x{len(inputs)}")
        redirect_inputs([port], inputs[tensor])
    node.set_friendly_name("op")
    node.validate_and_infer_types()
    results = []
    for position, output in enumerate(list_read_outputs(node)):
        output.set_names({f"y{position}"})
        results.append(give_name(f"y{position}", ops.result(output)))
    return ov.Model(results, [*inputs.values()], "op")


def _copy_constant(output: ov.Output, position: int) -> ov.Node:
    """Return a constant input; the values of vectors of floats are of no importance."""
    values = np.asarray(get_constant_array(output))
    if is_float(output) and values.size > 1:
        values = np.linspace(0.5, 1.5, values.size, dtype=np.float32).reshape(values.shape)
    return give_name(f"c{position}", ops.constant(values, output.get_element_type()))
