"""Conversion of GRU layers to integer kernels.

ONNX Runtime has an integer kernel of LSTM but not of GRU. Therefore one product covers the inputs
of all steps, and the body of a Scan multiplies the state step by step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.named_graphs import FP32
from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.graph.edit import (
    get_constant_array,
    get_node_input,
    require_constant_array,
)
from neural_mp.adaptors.onnxrt.kernels.registry import CONTRIB, INT8_PRODUCT
from neural_mp.adaptors.onnxrt.kernels.tensor_variants import Variants, store_weight
from neural_mp.adaptors.onnxrt.kernels.writers import FusionGroup
from neural_mp.core.precision import OpConfig
from neural_mp.core.quant_spec import QuantSpec

_DEFAULT_ACTIVATIONS = ("Sigmoid", "Tanh")


def find_gru_obstacle(node: ir.Node) -> str | None:
    """Return the reason why a GRU cannot run in INT8; None if it can."""
    numbers = node.attributes
    activations = tuple(name.lower() for name in numbers.get_strings("activations", []))
    usual = tuple(name.lower() for name in _DEFAULT_ACTIVATIONS)
    if activations not in ((), usual, usual * 2):
        return "its activations are not Sigmoid and Tanh"
    if "clip" in numbers:
        return "it clips the inputs of its activations"
    bias = get_node_input(node, 3)
    if bias is not None and get_constant_array(bias) is None:
        return "its bias is computed, not constant"
    return None


def write_gru(variants: Variants, fusion_group: FusionGroup, config: OpConfig) -> None:
    """Convert a GRU to INT8 products and a Scan for every direction."""
    node = fusion_group.head
    assert config.weight is not None
    for position, value in enumerate(node.inputs):
        if value is not None and value.const_value is None:
            node.replace_input_with(position, variants.as_float(value))
    name = str(node.name)
    node.name = variants.names.reserve_name(f"{name}/{FP32}")
    variants.names.give_up(name)
    writer = _Writer(variants, node, name, config.weight)
    towards = node.attributes.get_string("direction", "forward")
    backwards = {"forward": [0], "reverse": [1], "bidirectional": [0, 1]}[towards]
    states = [writer.write_direction(index, reverse) for index, reverse in enumerate(backwards)]
    for result, axis, parts in zip(node.outputs, (1, 0), zip(*states, strict=True), strict=False):
        axes = variants.names.add_constant(f"{name}/axis", np.array([axis]))
        stacked = [writer.put_node("Unsqueeze", [part, axes]) for part in parts]
        whole = (
            writer.put_node("Concat", stacked, {"axis": axis}) if len(stacked) > 1 else stacked[0]
        )
        variants.set_variant(result, FP32, whole)


@dataclass
class _Writer:
    variants: Variants
    node: ir.Node
    name: str
    spec: QuantSpec
    #: The nodes of the current body; None outside of a body.
    body: list[ir.Node] | None = None
    _lasting: dict[str, ir.Value] = field(default_factory=dict)

    def write_direction(self, index: int, reverse: int) -> tuple[ir.Value, ir.Value]:
        """Return the states of all steps of a direction, [steps, batch, hidden], and the last."""
        node, names = self.node, self.variants.names
        data = node.inputs[0]
        assert data is not None
        weight, recurrent = (require_constant_array(value)[index] for value in node.inputs[1:3])
        hidden = recurrent.shape[1]
        bias = get_constant_array(get_node_input(node, 3))
        bias = np.zeros(6 * hidden, np.float32) if bias is None else bias[index]
        input_bias, state_bias = bias[: 3 * hidden].copy(), bias[3 * hidden :].copy()
        reset_after = bool(node.attributes.get_int("linear_before_reset", 0))
        # The reset gate scales the state's contribution to the candidate, including its bias.
        added = 2 * hidden if reset_after else 3 * hidden
        input_bias[:added] += state_bias[:added]
        state_bias[:added] = 0
        projection = self.write_product(
            "input", self.variants.quantize_dynamically(data), weight, input_bias, index
        )
        step = _Step(hidden, reset_after, recurrent, state_bias, index)
        body = self.write_step(step)
        runs: dict[str, Any] = {"body": body, "num_scan_inputs": len(body.inputs) - 1}
        inputs = [self.initial_state(index, hidden), projection]
        if len(body.inputs) > 2:
            inputs.append(self.length_mask())
        for attribute in ("scan_input_directions", "scan_output_directions"):
            runs[attribute] = [reverse] * (len(inputs) - 1 if "input" in attribute else 1)
        last, states = (
            ir.val(names.reserve_name(f"{self.name}/{part}")) for part in ("last", "states")
        )
        scan = ir.node("Scan", inputs, runs, outputs=[last, states])
        self.variants.insert_node(scan, self.name)
        return states, last

    def initial_state(self, index: int, hidden: int) -> ir.Value:
        """Return the state before the first step, [batch, hidden]."""
        initial = get_node_input(self.node, 5)
        if initial is not None:
            bounds = [self.integer_constant("bound", [position]) for position in (index, index + 1)]
            every = self.integer_constant("states", [-1, hidden])
            return self.put_node("Reshape", [self.put_node("Slice", [initial, *bounds]), every])
        if "start" not in self._lasting:
            shape = self.put_node("Shape", [self.node.inputs[0]])
            batch = self.integer_constant("batch", [1])
            size = self.put_node("Gather", [shape, batch], {"axis": 0})
            width = self.integer_constant("hidden", [hidden])
            shape = self.put_node("Concat", [size, width], {"axis": 0})
            self._lasting["start"] = self.put_node("ConstantOfShape", [shape])
        return self._lasting["start"]

    def length_mask(self) -> ir.Value:
        """Return whether each step lies within the length of its sequence, [steps, batch, 1]."""
        if "reaches" not in self._lasting:
            shape = self.put_node("Shape", [self.node.inputs[0]])
            first = self.integer_constant("first", 0)
            delta = self.integer_constant("one", 1)
            count = self.put_node("Gather", [shape, first], {"axis": 0})
            steps = self.put_node("Range", [first, count, delta])
            axes = self.integer_constant("axes", [1, 2])
            lengths = self.put_node("Cast", [self.node.inputs[4]], {"to": int(ir.DataType.INT64)})
            column = self.integer_constant("column", [1])
            lengths = self.put_node("Unsqueeze", [lengths, column])
            steps = self.put_node("Unsqueeze", [steps, axes])
            self._lasting["reaches"] = self.put_node("Less", [steps, lengths])
        return self._lasting["reaches"]

    def write_step(self, step: _Step) -> ir.Graph:
        """Return the body of the Scan: state, input (and mask) → next state, twice."""
        names = self.variants.names
        limited = get_node_input(self.node, 4) is not None
        roles = ("state", "read", "within") if limited else ("state", "read")
        kinds = (ir.DataType.FLOAT, ir.DataType.FLOAT, ir.DataType.BOOL)
        inputs = [
            ir.val(names.reserve_name(f"{self.name}/{role}"), kind, shape=None)
            for role, kind in zip(roles, kinds, strict=False)
        ]
        state, projection = inputs[:2]
        self.body = []
        following = self._write_next_state(step, state, projection)
        if limited:
            zero = names.add_constant(f"{self.name}/nothing", np.float32(0))
            shown = self.put_node("Where", [inputs[2], following, zero])
            following = self.put_node("Where", [inputs[2], following, state])
        else:
            shown = self.put_node("Identity", [following])
        nodes, self.body = self.body, None
        for value in (following, shown):
            value.type = ir.TensorType(ir.DataType.FLOAT)
        return ir.Graph(inputs, [following, shown], nodes=nodes, name=f"{self.name}/step")

    def _write_next_state(self, step: _Step, state: ir.Value, projection: ir.Value) -> ir.Value:
        """Return the state after a step (ONNX's definition of GRU)."""
        hidden, matrix = step.hidden, step.matrix
        cut = self.integer_constant("gates", [2 * hidden, hidden])
        read_gates, read_candidate = self.split_in_two(projection, cut)
        if step.after:
            own = self.write_product(
                "state", self.quantize_dynamically(state), matrix, step.bias, step.index
            )
            own_gates, own_candidate = self.split_in_two(own, cut)
        else:
            quantized = self.quantize_dynamically(state)
            own_gates = self.write_product(
                "gates", quantized, matrix[: 2 * hidden], None, step.index
            )
        gates = self.put_node("Sigmoid", [self.put_node("Add", [read_gates, own_gates])])
        halves = self.integer_constant("halves", [hidden, hidden])
        update, reset = self.split_in_two(gates, halves)
        if step.after:
            own_candidate = self.put_node("Mul", [reset, own_candidate])
        else:
            gated = self.quantize_dynamically(self.put_node("Mul", [reset, state]))
            own_candidate = self.write_product(
                "left", gated, matrix[2 * hidden :], None, step.index
            )
        candidate = self.put_node("Tanh", [self.put_node("Add", [own_candidate, read_candidate])])
        # (1 − update) · candidate + update · state, with one multiplication.
        carried = self.put_node("Mul", [update, self.put_node("Sub", [state, candidate])])
        return self.put_node("Add", [candidate, carried])

    def integer_constant(self, suffix: str, values: int | list[int]) -> ir.Value:
        """Return integers as a constant."""
        return self.variants.names.add_constant(f"{self.name}/{suffix}", np.array(values))

    def write_product(
        self,
        suffix: str,
        quantized: Sequence[ir.Value],
        matrix: Array,
        bias: Array | None,
        index: int,
    ) -> ir.Value:
        """Return the product of a quantized value and a matrix, [outputs, inputs]."""
        stem = f"{self.name}.{suffix}_{index}"
        stored = store_weight(np.ascontiguousarray(matrix.T), 1, self.spec)
        values, scale, zero = quantized
        integers, steps, zeros = self.variants.weight_constants(stem, stored)
        inputs = [values, integers, scale, steps, zero, zeros]
        if bias is not None and bias.any():
            inputs.append(self.variants.names.add_constant(f"{stem}/bias", bias.astype(np.float32)))
        return self.put_node(INT8_PRODUCT, inputs, domain=CONTRIB)

    def quantize_dynamically(self, value: ir.Value) -> tuple[ir.Value, ...]:
        """Return a value, dynamically quantized: uint8, scale, zero point."""
        parts = [
            ir.val(self.variants.names.reserve_name(f"{self.name}/stored_{part}"))
            for part in range(3)
        ]
        self._add_node(ir.node("DynamicQuantizeLinear", [value], outputs=parts))
        self.variants.count_conversion("quantize")
        return tuple(parts)

    def split_in_two(self, value: ir.Value, sizes: ir.Value) -> list[ir.Value]:
        """Split a value in two along its last axis."""
        parts = [ir.val(self.variants.names.reserve_name(f"{self.name}/part")) for _ in range(2)]
        self._add_node(ir.node("Split", [value, sizes], {"axis": -1}, outputs=parts))
        return parts

    def put_node(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> ir.Value:
        """Return the result of a new node, in the current body or in the graph."""
        result = ir.val(self.variants.names.reserve_name(f"{self.name}/{op.lower()}"))
        self._add_node(ir.node(op, inputs, attributes, domain=domain, outputs=[result]))
        return result

    def _add_node(self, node: ir.Node) -> None:
        name = f"{self.name}/{node.op_type}"
        if self.body is None:
            self.variants.insert_node(node, name)
            return
        node.name = self.variants.names.reserve_name(name)
        self.variants.owners[node.name] = self.variants.owner
        self.body.append(node)


@dataclass(frozen=True)
class _Step:
    """The recurrent weights of one direction.

    Attributes:
        hidden: the size of the state.
        after: whether the reset gate scales the product instead of the state.
        matrix: shape [3 · hidden, hidden]: update, reset, candidate.
        bias: the bias of the product, shape [3 · hidden].
        index: the direction.
    """

    hidden: int
    after: bool
    matrix: Array
    bias: Array
    index: int
