"""Ops of a model that OpenVINO miscompiles next to integer kernels.

The low-precision transformations of OpenVINO move scales and zero points past float ops, and the
plugin stores results of some kernels in bytes. For some ops and attributes, the results then have
other values or another shape. No table of these would be complete, so a probe compares every
combination of op, attributes and shapes once per machine and version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from neural_mp.adaptors.common.runtime_probe import case_results, version_of
from neural_mp.adaptors.openvino.fusion import moves
from neural_mp.adaptors.openvino.graph_edit import (
    array_of,
    is_constant,
    is_float,
    name_of,
    op_nodes,
    outputs_of,
    rank_of,
    type_of,
)
from neural_mp.adaptors.openvino.runtime import from_bytes, ops, ov, to_bytes

#: Must change with the cases or the probe.
_VERSION = 2
_PROBE = "neural_mp.adaptors.openvino.kernel_check_probe"
#: Place in the runtime information of a case: whether its op moves quantized values.
MOVES = ("neural_mp", "moves")
#: Ops that transformations move scales past, or whose kernels store bytes. Ops that compute value
#: by value are compared if they broadcast over axes.
_COMPARED = frozenset(
    {
        *("AvgPool", "MaxPool", "Gather", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Split"),
        *("ReduceMax", "ReduceMin", "ReduceMean", "ReduceSum", "ReduceL1", "ReduceL2"),
        *("ReduceProd", "VariadicSplit", "StridedSlice", "Slice", "Pad", "Interpolate", "Concat"),
        *("DepthToSpace", "SpaceToDepth", "Broadcast", "Tile", "MVN", "NormalizeL2"),
        *("ShuffleChannels", "BatchToSpace", "SpaceToBatch"),
    }
)
_ELEMENTWISE = frozenset({"Add", "Subtract", "Multiply", "Divide", "Maximum", "Minimum"})
#: Sizes of free axes: the first axis, and the others in turn.
_FREE_SIZES = (2, 16, 13)
#: Maximum number of elements of an input.
_MAX_ELEMENTS = 4_000_000


@dataclass(frozen=True, eq=False)
class KernelCheck:
    """The check of the ops of a model, run when needed.

    Attributes:
        program: the canonicalized graph.
    """

    program: Any

    @cached_property
    def rejected(self) -> Mapping[str, str]:
        """Op → the reason why it cannot run next to integer kernels."""
        cases = dict(_cases(self.program))
        digests = {op: hashlib.sha256(content).hexdigest()[:32] for op, content in cases.items()}
        contents = {digests[op]: content for op, content in cases.items()}
        version = f"{_VERSION} {version_of('openvino')}"
        deviations = case_results(_PROBE, version, contents) if contents else {}
        return {
            op: f"next to integer kernels, OpenVINO {deviations[digest]}"
            for op, digest in digests.items()
            if deviations.get(digest)
        }


def _cases(program: Any) -> Iterator[tuple[str, bytes]]:
    """Yield op and case, a stored model of the op alone, for the ops to compare."""
    copied = program.clone()
    for node in [node for node in op_nodes(copied) if _is_compared(node)]:
        name, is_mover = name_of(node), moves(node)
        case = _alone(node)
        if case is not None:
            case.set_rt_info(str(is_mover), list(MOVES))
            text, weights = to_bytes(case)
            yield name, len(text).to_bytes(8, "little") + text + weights


def read_case(content: bytes) -> Any:
    """Return the model of a case."""
    start = 8 + int.from_bytes(content[:8], "little")
    return from_bytes(content[8:start], content[start:])


def fixed_shape(shape: Any) -> list[int]:
    """Return the sizes of a tensor, with numbers for free axes."""
    return [
        size.get_length() if size.is_static else _FREE_SIZES[min(axis, 1 + axis % 2)]
        for axis, size in enumerate(shape)
    ]


def _is_compared(node: Any) -> bool:
    given = [i.get_source_output() for i in node.inputs()]
    computed = [output for output in given if not is_constant(output)]
    # Arbitrary indices and sizes would not be valid.
    if not computed or not all(map(is_float, [*computed, *outputs_of(node)])):
        return False
    if type_of(node) in _ELEMENTWISE:
        return len({rank_of(output) for output in computed}) > 1
    return type_of(node) in _COMPARED


def _alone(node: Any) -> Any | None:
    """Return a model of an op, cut from its graph; None if no data can be drawn for its inputs."""
    inputs: dict[str, Any] = {}
    for position, given in enumerate(node.inputs()):
        output = given.get_source_output()
        if is_constant(output):
            given.replace_source_output(_constant(output, position).output(0))
            continue
        shape = output.get_partial_shape()
        if shape.rank.is_dynamic or np.prod(fixed_shape(shape)) > _MAX_ELEMENTS:
            return None
        source = f"{name_of(output.get_node())}:{output.get_index()}"
        if source not in inputs:
            inputs[source] = ops.parameter(shape, np.float32, name=f"x{len(inputs)}")
        given.replace_source_output(inputs[source].output(0))
    node.set_friendly_name("op")
    node.validate_and_infer_types()
    results = []
    for position, output in enumerate(outputs_of(node)):
        output.set_names({f"y{position}"})
        result = ops.result(output)
        result.set_friendly_name(f"y{position}")
        results.append(result)
    return ov.Model(results, [*inputs.values()], "op")


def _constant(output: Any, position: int) -> Any:
    """Return a constant input; the values of vectors of floats are of no importance."""
    values = np.asarray(array_of(output))
    if is_float(output) and values.size > 1:
        values = np.linspace(0.5, 1.5, values.size, dtype=np.float32).reshape(values.shape)
    constant = ops.constant(values, output.get_element_type())
    constant.set_friendly_name(f"c{position}")
    return constant
