"""Tensors within bodies as model outputs: their values in every step of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.canonicalize import infer_shapes
from neural_mp.adaptors.onnxrt.graph.edit import GraphNames, is_tensor, list_nested_graphs
from neural_mp.adaptors.onnxrt.graph.opset import get_onnx_opset
from neural_mp.adaptors.onnxrt.graph.subgraphs import find_runners, iterate_node_bodies

#: The first opset with sequences.
_HAS_SEQUENCES = 11
#: The first opset in which a branch can return an outer sequence.
_PASSES_SEQUENCES = 14
#: Ops that sequences can pass through.
_TAKE_SEQUENCES = ("If", "Loop")


def with_outputs(program: ir.Model, names: Iterable[str]) -> ir.Model:
    """Return the part of a graph that computes some tensors.

    A tensor of a body is returned as a float32 sequence: one array per step of a loop, empty if the
    run did not reach the body (see `collect_output_arrays`). Types in bodies must be known (see
    `with_body_types`), and the tensors visible (see `select_visible`).
    """
    tensors = list(dict.fromkeys(names))
    program = _with_results_of_bodies(program, tensors)
    inputs = [value for value in program.graph.inputs if not value.is_initializer()]
    part = ir.convenience.extract(program.graph, inputs, tensors)
    functions = program.functions.values()
    return ir.Model(part, ir_version=program.ir_version, functions=list(functions))


def with_body_types(program: ir.Model) -> ir.Model:
    """Return a model with types in its bodies; the model itself if it has no bodies.

    Conversion removes these types.
    """
    if len(list_nested_graphs(program.graph)) == 1:
        return program
    program = program.clone()
    infer_shapes(program)
    return program


def map_computed_values(program: ir.Model) -> dict[str, ir.Value]:
    """Return computed values by name, including those of bodies."""
    return {
        str(value.name): value
        for graph in list_nested_graphs(program.graph)
        for value in (*graph.inputs, *(result for node in graph for result in node.outputs))
    }


def select_visible(program: ir.Model, values: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
    """Return the values that a run can return, at any depth of bodies.

    A Scan returns values of its own body whose number of axes is known, but no sequences from
    deeper bodies; strings and sequences cannot be returned.
    """
    parents, opset = find_runners(program.graph), get_onnx_opset(program)

    def is_visible(value: ir.Value) -> bool:
        around = []
        graph = value.graph
        while isinstance(graph, ir.Graph) and graph is not program.graph:
            around.append(parents[graph])
            graph = parents[graph].graph
        is_numeric = is_tensor(value) and value.dtype is not ir.DataType.STRING
        if around and (opset < _HAS_SEQUENCES or not is_numeric):
            return False
        if around and around[0].op_type == "Scan":
            if value.shape is None:
                return False
            del around[0]
        if around and opset < _PASSES_SEQUENCES:
            return False
        return all(node.op_type in _TAKE_SEQUENCES for node in around)

    return {name: value for name, value in values.items() if is_visible(value)}


def collect_output_arrays(output: object) -> list[Array]:
    """Return the arrays of an output; those of a sequence are concatenated if shapes agree."""
    if not isinstance(output, list):
        return [np.asarray(output)]
    arrays = [array for array in map(np.asarray, output) if array.dtype != object]
    if len(arrays) > 1 and arrays[0].ndim and len({array.shape[1:] for array in arrays}) == 1:
        return [np.concatenate(arrays)]
    return arrays


def _with_results_of_bodies(program: ir.Model, tensors: Collection[str]) -> ir.Model:
    values = map_computed_values(program)
    inside = {name for name, value in values.items() if value.graph is not program.graph}
    if inside.isdisjoint(tensors):
        return program
    program = program.clone()
    recorder = _Recorder(program)
    for name in tensors:
        if name in inside:
            recorder.record_tensor(name)
    return program


class _Recorder:
    """Sequences that collect a tensor's values through all bodies around the tensor."""

    def __init__(self, program: ir.Model) -> None:
        self._graph, self._names = program.graph, GraphNames(program.graph)
        self._values = map_computed_values(program)

    def record_tensor(self, name: str) -> None:
        """Add an output with the name of a tensor that collects its values."""
        value = self._values[name]
        parents = find_runners(self._graph)  # recomputed, as recording replaces Loops
        assert isinstance(value.graph, ir.Graph)
        around = [value.graph]
        while around[0] is not self._graph:
            outer = parents[around[0]].graph
            assert isinstance(outer, ir.Graph)
            around.insert(0, outer)
        value.name = self._names.reserve_name(f"{name}/within")
        # Sequences do not support BF16; float32 represents all values except large integers.
        if value.dtype is not ir.DataType.FLOAT:
            producer = value.producer()
            cast = self._make_node("Cast", [value], {"to": int(ir.DataType.FLOAT)})
            if producer is None:
                around[-1].insert_before(around[-1][0], cast)
            else:
                around[-1].insert_after(producer, cast)
            value = cast.outputs[0]
        empty = self._make_node("SequenceEmpty", [], {"dtype": int(ir.DataType.FLOAT)})
        self._graph.insert_before(self._graph[0], empty)
        self._collect_values(around, parents, value, empty.outputs[0]).name = name

    def _collect_values(
        self,
        around: list[ir.Graph],
        parents: dict[ir.Graph, ir.Node],
        value: ir.Value,
        sequence: ir.Value,
    ) -> ir.Value:
        """Return the sequence with the tensor's values, in the outermost of the graphs."""
        graph, *inner = around
        if not inner:
            return self._append_node(graph, "SequenceInsert", [sequence, value])
        body, node = inner[0], parents[inner[0]]
        if node.op_type not in _TAKE_SEQUENCES:  # a Scan, which returns arrays only
            return self._append_node(
                graph, "SequenceInsert", [sequence, self._add_scan_output(node, body, value)]
            )
        if node.op_type == "If":
            for branch in iterate_node_bodies(node):
                if branch is body:
                    branch.outputs.append(self._collect_values(inner, parents, value, sequence))
                else:
                    branch.outputs.append(self._append_node(branch, "Identity", [sequence]))
            node.resize_outputs(len(node.outputs) + 1)
            node.outputs[-1].name = self._names.reserve_name(f"{node.name}/kept")
            return node.outputs[-1]
        return self._carry_through_loop(node, inner, parents, value, sequence)

    def _add_scan_output(self, node: ir.Node, body: ir.Graph, value: ir.Value) -> ir.Value:
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        result = self._append_node(body, "Identity", [value])
        result.type, result.shape = ir.TensorType(ir.DataType.FLOAT), value.shape
        body.outputs.append(result)
        for attribute in ("scan_output_axes", "scan_output_directions"):
            entries = node.attributes.get_ints(attribute)
            if entries:
                node.attributes[attribute] = ir.AttrInt64s(attribute, [*entries, 0])
        node.resize_outputs(len(node.outputs) + 1)
        steps = node.outputs[-1]
        steps.name = self._names.reserve_name(f"{node.name}/kept")
        # Steps are concatenated without an axis of their own, so channel axes stay valid.
        bounds = [self._names.add_constant("recorded/bound", np.array([b])) for b in (2, 2**31)]
        shape = self._append_node(
            graph, "Slice", [self._append_node(graph, "Shape", [steps]), *bounds]
        )
        every = self._names.add_constant("recorded/every", np.array([-1]))
        whole = self._append_node(graph, "Concat", [every, shape], {"axis": 0})
        return self._append_node(graph, "Reshape", [steps, whole])

    def _carry_through_loop(
        self,
        node: ir.Node,
        inner: list[ir.Graph],
        parents: dict[ir.Graph, ir.Node],
        value: ir.Value,
        sequence: ir.Value,
    ) -> ir.Value:
        """Replace a Loop by one that also carries the sequence; return the sequence."""
        body = inner[0]
        carried = len(body.inputs) - 2
        kind = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
        accumulator = ir.val(self._names.reserve_name(f"{node.name}/carried"), type=kind)
        body.inputs.append(accumulator)
        body.outputs.insert(1 + carried, self._collect_values(inner, parents, value, accumulator))
        old = list(node.outputs)
        new = [ir.val(None, type=result.type) for result in old]
        collected = ir.val(self._names.reserve_name(f"{node.name}/kept"), type=kind)
        outputs = [*new[:carried], collected, *new[carried:]]
        inputs = [*node.inputs, *[None] * (2 - len(node.inputs)), sequence]
        attributes = list(node.attributes.values())
        loop = ir.Node("", "Loop", inputs, attributes, outputs=outputs, name=node.name)
        assert isinstance(node.graph, ir.Graph)
        node.graph.insert_before(node, loop)
        for result, replacement in zip(old, new, strict=True):
            name = str(result.name)
            result.replace_all_uses_with(replacement, replace_graph_outputs=True)
            result.name = self._names.reserve_name(f"{name}/before")
            replacement.name = name
            self._values[name] = replacement
        node.graph.remove(node)
        return collected

    def _append_node(
        self,
        graph: ir.Graph,
        op: str,
        inputs: list[ir.Value],
        attributes: dict[str, int] | None = None,
    ) -> ir.Value:
        graph.append(node := self._make_node(op, inputs, attributes))
        return node.outputs[0]

    def _make_node(
        self, op: str, inputs: list[ir.Value], attributes: dict[str, int] | None = None
    ) -> ir.Node:
        result = ir.val(self._names.reserve_name("recorded"))
        return ir.node(
            op,
            inputs,
            attributes,
            outputs=[result],
            name=self._names.reserve_name(f"recorded/{op}"),
        )
