"""Run of a graph in float with the rounding of a plan, decided as in `convert.write`.

Nodes run as calls of TensorFlow, so that gradients flow through them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.ops import gradient_registry

from neural_mp.adaptors.common.named_graphs import (
    BF16,
    FP32,
    UINT8,
    VARIANT_OF,
    cast_saturating,
)
from neural_mp.adaptors.tensorflow.graph.ops import CONTROL_FLOW, LAYERS, Role, get_op_role
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    Array,
    NodeDef,
    find_typed_inputs,
    get_node_name,
    get_output_index,
    list_data_inputs,
)
from neural_mp.adaptors.tensorflow.kernels.convert_int8 import map_int8_layers
from neural_mp.adaptors.tensorflow.kernels.integer_kernels import DTYPES
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.core.graph import Layer
from neural_mp.core.precision import Precision
from neural_mp.space import ResolvedPlan


@cache
def _call_parameters(op_type: str) -> Mapping[str, str] | None:
    """Return input or attribute of an op type → parameter of its call; None without a call."""
    function, definition = getattr(tf.raw_ops, op_type, None), op_def_registry.get(op_type)
    if function is None or definition is None:
        return None
    parameters = list(inspect.signature(function).parameters)
    inputs = [argument.name for argument in definition.input_arg]
    names = {*inputs, *(attribute.name for attribute in definition.attr), "name"}
    # Python renames some inputs, such as `reduction_indices`, and keeps their order.
    renamed = dict(
        zip(
            [name for name in inputs if name not in parameters],
            [parameter for parameter in parameters if parameter not in names],
            strict=True,
        )
    )
    return {**{name: name for name in parameters if name in names}, **renamed}


def can_be_called(node: NodeDef) -> bool:
    """Whether a node can be called: no loop or branch, no op of the runtime's own."""
    kinds = (attribute.WhichOneof("value") for attribute in node.attr.values())
    is_supported = node.op not in CONTROL_FLOW and _call_parameters(node.op) is not None
    return is_supported and "func" not in kinds


def has_gradient(node: NodeDef) -> bool:
    """Whether TensorFlow can compute gradients of an op, or defines that there are none."""
    try:
        gradient_registry.lookup(node.op)
    except LookupError:
        return False
    return True


def call_node(node: NodeDef, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Run a node on tensors, without control inputs, and return its results."""
    definition = op_def_registry.get(node.op)
    parameters = _call_parameters(node.op)
    assert definition is not None
    assert parameters is not None  # see `can_be_called`
    remaining = list(inputs)
    arguments: dict[str, Any] = {}
    for argument in definition.input_arg:
        parameter = parameters[argument.name]
        if argument.number_attr:
            count = node.attr[argument.number_attr].i
        elif argument.type_list_attr:
            count = len(node.attr[argument.type_list_attr].list.type)
        else:
            arguments[parameter] = remaining.pop(0)
            continue
        arguments[parameter], remaining = remaining[:count], remaining[count:]
    for attribute in definition.attr:
        if attribute.name in parameters and attribute.name in node.attr:
            arguments[attribute.name] = _convert_attribute_value(node.attr[attribute.name])
    results = getattr(tf.raw_ops, node.op)(**arguments)
    if results is None or isinstance(results, tf.Operation):
        return []
    return list(results) if isinstance(results, list | tuple) else [results]


def _convert_attribute_value(attribute: AttrValue) -> Any:
    kind = attribute.WhichOneof("value")
    if kind == "list":
        fields = attribute.list.ListFields()
        return [_convert_value(field.name, item) for field, items in fields for item in items]
    return _convert_value(kind or "", getattr(attribute, kind or "s"))


def _convert_value(kind: str, value: object) -> Any:
    if kind == "type":
        return tf.as_dtype(value)
    if kind == "shape":
        return tf.TensorShape(value)
    return value


#: Keras layer that is folded into the layer before.
_NORM = "BatchNormalization"


def list_node_owners(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return the layers of a node, without norms that are folded into it."""
    return tuple(layer for layer in layers if layer.type != _NORM) or layers


@dataclass(frozen=True)
class Rounding:
    """Rounding of a model under a plan.

    Attributes:
        reads: node → input positions that are read quantized.
        weights: node → input position of its INT8 weight.
        results: node → variant of its result, unless FP32.
        runs_in: node that runs in 16 bits → the variant.
        unchanged: nodes of `results` whose result needs no rounding, as they only move values.
    """

    reads: Mapping[str, frozenset[int]]
    weights: Mapping[str, int]
    results: Mapping[str, str]
    runs_in: Mapping[str, str]
    unchanged: frozenset[str]


def make_plan_rounding(model: TensorFlowModel, plan: ResolvedPlan) -> Rounding:
    """Return the rounding of a model under a plan."""
    graph, stored = model.graph, plan.flow.int8_outputs
    runs_in = {name: VARIANT_OF[p] for name, p in plan.effective.items() if p.is_16_bit}
    reads: dict[str, frozenset[int]] = {}
    results = dict(runs_in)
    heads = []
    for tail, layer in map_int8_layers(model, plan.effective).items():
        heads.append(layer.head)
        reads[layer.head] = frozenset({0})
        summed = layer.group.residual_sum
        if summed is not None:
            inputs = list_data_inputs(graph.nodes[summed.ops[-1]])
            reads[summed.ops[-1]] = frozenset({inputs.index(str(summed.operand))})
        if tail in stored or not LAYERS[layer.node.op].is_dense:
            results[tail] = UINT8
        elif layer.sixteen and tail not in model.output_nodes:
            results[tail] = BF16
    moving = {
        name: moved
        for name, moved in model.structure.agnostic_ops.items()
        if name in stored and name not in results
    }
    reads.update({name: frozenset(range(len(moved))) for name, moved in moving.items()})
    results.update(dict.fromkeys(moving, UINT8))
    tables = (n for n in model.structure.tables if plan.effective.get(n) is Precision.INT8)
    weights = {**dict.fromkeys(heads, 1), **dict.fromkeys(tables, 0)}
    unchanged = frozenset(
        name for name in moving if get_op_role(graph.nodes[name]) is not Role.AVERAGE
    )
    return Rounding(reads, weights, results, runs_in, unchanged)


@dataclass
class Walk:
    """One run of a graph.

    Attributes:
        model: the graph.
        rounding: its rounding.
        weight: node → its INT8 weight after quantize and dequantize.
        variable: constant → its trained value; None for other constants.
        quantized: tensor, its value, whether it is an average → the value after quantize and
            dequantize.
        seen: called with each node and its results, before they are rounded.
    """

    model: TensorFlowModel
    rounding: Rounding
    weight: Callable[[str], tf.Tensor]
    variable: Callable[[str], tf.Tensor | None]
    quantized: Callable[[str, tf.Tensor, bool], tf.Tensor]
    seen: Callable[[NodeDef, Sequence[tf.Tensor]], None] | None = None
    _variants: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run_feeds(self, feeds: Mapping[str, Any]) -> list[tf.Tensor]:
        """Return the outputs in the order of the signature."""
        self._variants = {tensor: {FP32: tf.convert_to_tensor(v)} for tensor, v in feeds.items()}
        fed = {get_node_name(tensor) for tensor in feeds}
        for name, node in self.model.graph.nodes.items():
            if name not in fed:
                if node.op == CONSTANT:
                    self._evaluate_constant(node)
                else:
                    self._compute_node(node)
        return [self._get_tensor_variant(tensor) for tensor in self.model.signature.output_tensors]

    def _evaluate_constant(self, node: NodeDef) -> None:
        trained = self.variable(node.name)
        # Other constants are read by `_get_tensor_variant`, only if needed.
        self._variants[node.name] = {} if trained is None else {FP32: trained}
        if trained is not None and self.seen is not None:
            self.seen(node, [trained])

    def _compute_node(self, node: NodeDef) -> None:
        name = node.name
        low, typed = self.rounding.runs_in.get(name, FP32), find_typed_inputs(node)
        inputs = []
        for position, tensor in enumerate(list_data_inputs(node)):
            if position == self.rounding.weights.get(name):
                inputs.append(self.weight(name))
            elif position in self.rounding.reads.get(name, ()):
                inputs.append(self._get_tensor_variant(tensor, UINT8))
            else:
                inputs.append(self._get_tensor_variant(tensor, low if position in typed else FP32))
        results = call_node(node, inputs)
        if self.seen is not None:
            self.seen(node, results)
        kind = self.rounding.results.get(name, FP32)
        for index, result in enumerate(results):
            tensor, variant = (name, kind) if index == 0 else (f"{name}:{index}", FP32)
            if variant == UINT8 and name not in self.rounding.unchanged:
                result = self.quantized(name, result, get_op_role(node) is Role.AVERAGE)
            elif variant in DTYPES and variant != FP32:
                result = tf.cast(result, DTYPES[variant])
            self._variants[tensor] = {variant: result}

    def _get_tensor_variant(self, tensor: str, variant: str = FP32) -> tf.Tensor:
        """Return a variant of a tensor, made on the first request."""
        tensor = tensor if get_output_index(tensor) else get_node_name(tensor)
        variants = self._variants[tensor]
        if variant not in variants:
            variants[variant] = self._make_variant(tensor, variant, variants)
        return variants[variant]

    def _make_variant(
        self, tensor: str, variant: str, variants: Mapping[str, tf.Tensor]
    ) -> tf.Tensor:
        if self.model.graph.is_constant(tensor) and FP32 not in variants:
            value: Array = self.model.graph.constant_value(tensor)
            if variant == FP32:
                return tf.constant(value)
            return tf.constant(cast_saturating(value, DTYPES[variant].as_numpy_dtype))
        if variant == UINT8:
            return self.quantized(tensor, self._get_tensor_variant(tensor), False)
        # The values of a quantized tensor are floats on its grid.
        return tf.cast(next(iter(variants.values())), DTYPES[variant])
