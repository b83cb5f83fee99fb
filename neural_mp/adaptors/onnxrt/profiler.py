"""Kernels and times of ops, from ONNX Runtime's own profiler and its optimized graph.

Kernels that ONNX Runtime fuses, inlines or inserts are attributed by the optimized graph.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import onnx_ir as ir

from neural_mp.adaptors.onnxrt.graph.edit import (
    SIXTEEN_BITS,
    count_tensor_bytes,
    iterate_all_constants,
)
from neural_mp.adaptors.onnxrt.kernels.n_bits import PRODUCT, multiplies_integers
from neural_mp.adaptors.onnxrt.kernels.ops import (
    CONVERSIONS,
    INSERTED,
    INTEGER_KERNELS,
    RUNS_GRAPHS,
    get_op_row,
    has_weight,
)
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.core.op_timings import NOT_REACHED, OpTrace, TracedKernel, build_op_trace
from neural_mp.core.precision import Precision
from neural_mp.errors import ConversionError

logger = logging.getLogger(__name__)

#: Weights in bytes up to which the optimized graph is written, weights included, to be read.
_MAX_WRITTEN_BYTES = 1 << 30
#: Suffix of kernel times after the node name.
_SUFFIX = "_kernel_time"
#: Additions of ONNX Runtime to the name of a node or its result in a kernel name, also in bodies of
#: functions, e.g. SequenceMap; and of its fusions, e.g. `fused fc/MatMulAddFusion`.
_DECORATION = re.compile(
    r"^InsertedPrecisionFreeCast_|^(fused )+|^(_inlfunc_[A-Za-z]+_)+"
    r"|(/+\w+Fusion/?)*(_nchwc|_nhwc)?(_token_\d+)?$"
)


def time_ops(model: OnnxModel, inputs: object, runs: int) -> dict[str, list[float]]:
    """Return op → seconds of every run; fused ops count towards their fusion group.

    Conversions and layout changes that ONNX Runtime inserts count towards the op that writes the
    result, or else reads it; those of no known op have entries of their own (`ReorderOutput`).
    """
    # Ops without a kernel are fused into others.
    seconds = {op: [0.0] * runs for op in model.structure.nodes if op not in model.ops}
    layer_of, run = model.structure.layer_of, 0
    owners = {
        name: layer_of.get(op, op)
        for name, op in _map_kernel_owners(model, conversions=True).items()
    }
    kernels: list[dict[str, Any]] = []
    recorded, nodes = _events_and_nodes(model, inputs, runs)
    for event in recorded:
        if is_kernel(event):
            kernels.append(event)
        if event.get("name") == "model_run":  # written at the end of a run
            if not run:
                unknown = [kernel for kernel in kernels if find_kernel_op(kernel, owners) is None]
                owners |= find_fused_owners(unknown, nodes, owners)
            for kernel, microseconds in iterate_own_times(kernels):
                op = find_kernel_op(kernel, owners) or strip_kernel_name(kernel)
                seconds.setdefault(op, [0.0] * runs)[run] += microseconds / 1e6
            run, kernels = run + 1, []
    return seconds


def _events_and_nodes(
    model: OnnxModel, inputs: object, runs: int
) -> tuple[list[dict[str, Any]], list[onnx.NodeProto]]:
    """Return the profiler's events, and the nodes of the optimized graph if it can be written."""
    if sum(map(count_tensor_bytes, iterate_all_constants(model.program))) <= _MAX_WRITTEN_BYTES:
        with TemporaryDirectory() as folder:
            optimized = Path(folder) / "optimized.onnx"
            try:
                recorded = profile_events(model, inputs, runs, optimized)
                # The runtime may be unable to write the file.
                if not optimized.exists():
                    return recorded, []
                return recorded, list(onnx.load(optimized, load_external_data=False).graph.node)
            except ConversionError:
                # The disk may be full; times without the graph are better than none.
                logger.debug("the optimized graph was not written", exc_info=True)
    return profile_events(model, inputs, runs), []


def iterate_own_times(kernels: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield kernels with their microseconds, excluding kernels that ran within them.

    The time of an op with a body includes everything in the body.
    """
    running: list[tuple[dict[str, Any], float]] = []
    for kernel in sorted(kernels, key=lambda event: (event["ts"], -event["dur"])):
        while running and kernel["ts"] >= running[-1][0]["ts"] + running[-1][0]["dur"]:
            yield running.pop()
        if running:
            around, own = running[-1]
            running[-1] = around, max(own - kernel["dur"], 0.0)
        if kernel["args"].get("op_name") in RUNS_GRAPHS:
            running.append((kernel, float(kernel["dur"])))
        else:
            yield kernel, float(kernel["dur"])
    yield from running


def profile_events(
    model: OnnxModel, inputs: object, runs: int, optimized: Path | None = None
) -> list[dict[str, Any]]:
    """Return the profiler's events of `runs` runs, in order; write the optimized graph."""
    runner = model.create_session(model.program, profiled=True, optimized=optimized)
    feeds = model.signature.bind_inputs(inputs)
    for _ in range(runs):
        runner(feeds, model.signature.output_tensors)
    return list(json.loads(Path(runner.session.end_profiling()).read_text(encoding="utf-8")))


def is_kernel(event: Mapping[str, Any]) -> bool:
    """Whether an event is an executed kernel."""
    return event.get("cat") == "Node" and str(event.get("name", "")).endswith(_SUFFIX)


def strip_kernel_name(event: Mapping[str, Any]) -> str:
    """Return the name of the node, or of its result, behind a kernel."""
    return _DECORATION.sub("", str(event["name"]).removesuffix(_SUFFIX))


def find_kernel_op(event: Mapping[str, Any], owners: Mapping[str, str]) -> str | None:
    """Return the op of a kernel by its possible names; None for an unknown kernel."""
    whole = str(event["name"]).removesuffix(_SUFFIX)
    return owners.get(whole) or owners.get(strip_kernel_name(event))


def _map_kernel_owners(model: OnnxModel, *, conversions: bool) -> dict[str, str]:
    """Return possible kernel name (node or result) → its op, with or without conversions."""
    owners: dict[str, str] = {}
    for name, node in model.structure.nodes.items():
        op = model.ops.get(name, name)
        if conversions or op == name or node.op_type not in INSERTED:
            owners[name] = op
            for value in node.outputs:
                owners.setdefault(str(value.name), op)
    return owners


_PRECISIONS = {
    "float": Precision.FP32,
    "double": Precision.FP32,
    "bfloat16": Precision.BF16,
    "float16": Precision.FP16,
}
_BYTES = ("uint8", "int8")


def trace_kernels(model: OnnxModel, inputs: object) -> dict[str, OpTrace]:
    """Return op → its executed kernels, excluding inserted conversions and layout changes.

    A run may not reach a body at all, e.g. a branch that is not taken.
    """
    model = model.as_given
    # The kernels of conversions bear the node's name, too.
    owners = _map_kernel_owners(model, conversions=False)
    executed: dict[str, list[TracedKernel]] = {}
    nodes = model.structure.nodes
    integer = {model.ops.get(op, op) for op in nodes if multiplies_integers(nodes[op])}
    for event in filter(is_kernel, profile_events(model, inputs, 1)):
        op = find_kernel_op(event, owners)
        if op is not None:
            executed.setdefault(op, []).append(_parse_traced_kernel(event["args"], op in integer))
    requested = _list_requested_precisions(model)
    graphs = {model.ops.get(op, op): node.graph for op, node in nodes.items()}
    reached = {model.program.graph, *(graphs.get(op) for op in executed)}
    passed_by = (op for op, graph in graphs.items() if graph not in reached)
    # Without a weight, an integer kernel rounds nothing that is not quantized already.
    equal = {
        model.ops.get(op, op)
        for op, node in nodes.items()
        if get_op_row(node).kernel and not has_weight(node)
    }
    ran = {
        op: build_op_trace(kernels, requested.get(op), op in equal)
        for op, kernels in executed.items()
    }
    return {**dict.fromkeys(passed_by, NOT_REACHED), **ran}


def _parse_traced_kernel(details: Mapping[str, Any], multiplies_integers: bool) -> TracedKernel:
    name = str(details["op_name"])
    types = [kind for tensor in details["input_type_shape"] for kind in tensor]
    reads_bytes = any(kind in _BYTES for kind in types)
    if name.startswith(INTEGER_KERNELS) or (name == PRODUCT and multiplies_integers):
        return TracedKernel(name, Precision.INT8, True)
    if types and types[0] in _BYTES:
        return TracedKernel(name, None, True)
    precision = next((_PRECISIONS[kind] for kind in types if kind in _PRECISIONS), None)
    return TracedKernel(name, precision, reads_bytes)


def _list_requested_precisions(model: OnnxModel) -> dict[str, Precision]:
    """Return op → its 16-bit precision in the graph given to the runtime.

    For an op without a 16-bit kernel, the runtime uses FP32 and removes the casts around it; or the
    graph has the op in FP32 followed by a rounding cast.
    """
    formats: dict[ir.Value, Precision] = {}
    rounded: dict[ir.Value, Precision] = {}
    working = {}
    for name, node in model.structure.nodes.items():
        if node.op_type == "Cast":
            kind = SIXTEEN_BITS.get(ir.DataType(node.attributes.get_int("to", 1)))
            if kind is not None and node.inputs[0] is not None:
                rounded[node.inputs[0]] = formats[node.outputs[0]] = kind
        elif node.op_type not in CONVERSIONS:
            working[model.ops.get(name, name)] = node.outputs[0]
            for value in filter(None, node.inputs):
                kind, constant = formats.get(value), value.const_value
                if kind is None and constant is not None:
                    kind = SIXTEEN_BITS.get(ir.DataType(constant.dtype))
                if kind is not None:
                    formats.update(dict.fromkeys(node.outputs, kind))
                    break
    requested = {**rounded, **formats}
    return {op: requested[result] for op, result in working.items() if result in requested}


def find_fused_owners(
    kernels: Iterable[Mapping[str, Any]], nodes: Sequence[onnx.NodeProto], owners: Mapping[str, str]
) -> dict[str, str]:
    """Return name of a kernel → op, for kernels that ONNX Runtime has named.

    A kernel counts towards the op that writes its result, or else towards the next op after it: a
    fused kernel writes the result of its last op, and an inlined function that of its op.
    `kernels` are events of unknown ops in one run, `nodes` those of the optimized graph, and
    `owners` the ops of tensors by name.
    """
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    unnamed: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in nodes:
        for value in node.input:
            readers[value].append(node)
        if not node.name:
            unnamed[node.op_type].append(node)
    named = {node.name: node for node in nodes if node.name}
    ops = {}
    for name, node in _match_kernel_nodes(kernels, named, unnamed):
        op = _find_owner(node, readers, owners)
        if op is not None:
            ops[name] = op
    return ops


def _match_kernel_nodes(
    kernels: Iterable[Mapping[str, Any]],
    named: Mapping[str, onnx.NodeProto],
    unnamed: Mapping[str, Sequence[onnx.NodeProto]],
) -> Iterator[tuple[str, onnx.NodeProto]]:
    """Yield name of a kernel and its node; kernels of nodes without a name have a number."""
    numbered: dict[str, dict[int, str]] = defaultdict(dict)
    for kernel in kernels:
        name, details = str(kernel["name"]).removesuffix(_SUFFIX), kernel["args"]
        if name in named:
            yield name, named[name]
        elif name == f"{details['op_name']}_{details.get('node_index')}":
            numbered[details["op_name"]][int(details["node_index"])] = name
    for kind, by_number in numbered.items():
        # Functions are inlined in the order of the graph.
        if len(by_number) == len(unnamed[kind]):
            names = (by_number[number] for number in sorted(by_number))
            yield from zip(names, unnamed[kind], strict=True)


def _find_owner(
    node: onnx.NodeProto, readers: Mapping[str, Sequence[onnx.NodeProto]], owners: Mapping[str, str]
) -> str | None:
    """Return the op of the first known result of a node or of those after it."""
    waiting, visited = [node], set[str]()
    while waiting:
        current = waiting.pop(0)
        for value in current.output:
            if value in owners:
                return owners[value]
        for value in current.output:
            if value not in visited:
                visited.add(value)
                waiting += readers.get(value, ())
    return None
