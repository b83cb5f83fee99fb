"""Nodes of a graph as calls of TensorFlow, so that gradients flow through them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.ops import gradient_registry

from neural_mp.adaptors.tensorflow.graph.ops import CONTROL_FLOW
from neural_mp.adaptors.tensorflow.graph.tensor_graph import NodeDef


@cache
def _parameters(op_type: str) -> Mapping[str, str] | None:
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
    is_supported = node.op not in CONTROL_FLOW and _parameters(node.op) is not None
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
    parameters = _parameters(node.op)
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
            arguments[attribute.name] = _python_value(node.attr[attribute.name])
    results = getattr(tf.raw_ops, node.op)(**arguments)
    if results is None or isinstance(results, tf.Operation):
        return []
    return list(results) if isinstance(results, list | tuple) else [results]


def _python_value(attribute: AttrValue) -> Any:
    """Return an attribute as the argument of a call."""
    kind = attribute.WhichOneof("value")
    if kind == "list":
        fields = attribute.list.ListFields()
        return [_value(field.name, item) for field, items in fields for item in items]
    return _value(kind or "", getattr(attribute, kind or "s"))


def _value(kind: str, value: Any) -> Any:
    if kind == "type":
        return tf.as_dtype(value)
    if kind == "shape":
        return tf.TensorShape(value)
    return value
