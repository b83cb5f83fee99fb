"""Turning the variables of a function into constants, each copied once.

TensorFlow's own `convert_variables_to_constants_v2` does the same through half a dozen copies of
all weights; it serves for functions that hand variables on to functions of their own (loops).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from neural_mp.adaptors.tensorflow.nodes import (
    NodeDef,
    TensorGraph,
    data_inputs,
    is_control,
    make_constant,
    make_node,
    node_of,
    plain,
)
from neural_mp.adaptors.tensorflow.runtime import offline_passes
from neural_mp.errors import ModelLoadError, in_one_line

logger = logging.getLogger(__name__)

_READS = ("ReadVariableOp", "ResourceGather")


def frozen_graph(function: Any) -> tuple[TensorGraph, list[tf.Tensor], list[tf.Tensor]]:
    """The graph of a concrete function with its weights in it, and the tensors of its ports.

    Returns:
        The graph, its inputs and its outputs, both in the order of the function's.

    Raises:
        ModelLoadError: it reads something that is no variable and cannot become a constant.
    """
    captured = {internal.op.name: external for external, internal in function.graph.captures}
    inputs = [t for t in function.inputs if t.op.name not in captured]
    try:
        graph = _frozen(function, captured, inputs)
        if graph is not None:
            return graph, inputs, list(function.outputs)
        frozen = convert_variables_to_constants_v2(function, lower_control_flow=False)
    except ModelLoadError:
        raise
    except Exception as error:
        # The conversion raises whatever the variables' reading and its own rewriting raise.
        logger.debug("freezing failed", exc_info=True)
        raise ModelLoadError(
            f"the model's variables cannot be turned into constants: {in_one_line(error)}"
        ) from error
    if len(frozen.inputs) != len(inputs):
        extra = [t.name for t in frozen.inputs if t.dtype in (tf.resource, tf.variant)]
        raise no_constant((extra or ["more than its inputs"])[0])
    graph = TensorGraph.from_graph_def(frozen.graph.as_graph_def())
    return graph, list(frozen.inputs), list(frozen.outputs)


def no_constant(name: str) -> ModelLoadError:
    """What is raised of a resource that is no variable."""
    return ModelLoadError(
        f"the model reads {name!r}, a lookup table or other resource that is not part of its "
        f"graph; export it without"
    )


def _frozen(
    function: Any, captured: Mapping[str, Any], inputs: Iterable[tf.Tensor]
) -> TensorGraph | None:
    """The frozen graph; None where a variable is used in another way than by reading it."""
    outputs = [tensor.name for tensor in function.outputs]
    small = offline_passes(
        function.graph.as_graph_def(), ["function"], [t.name for t in inputs], outputs
    )
    graph = TensorGraph.from_graph_def(small).pruned(outputs, [t.op.name for t in inputs])
    handles: dict[str, str] = {}
    for name, node in graph.nodes.items():
        source = node_of(node.input[0]) if node.input else ""
        if name in captured:
            handles[name] = name
        elif node.op == "Identity" and source in handles:
            handles[name] = handles[source]
    values: dict[str, str] = {}
    for node in list(graph.nodes.values()):
        read = [handles.get(node_of(t)) for t in data_inputs(node)]
        if node.name in handles or not any(read):
            continue
        external = captured[read[0]] if read[0] else None
        if external is None or external.dtype is not tf.resource:
            continue
        if node.op not in _READS:
            return None
        _replace_read(graph, node, external, values)
    for name in handles:
        if name in captured and captured[name].dtype is not tf.resource:
            graph.add(make_constant(name, captured[name].numpy()))
    return graph.pruned(outputs, [t.op.name for t in inputs])


def _replace_read(graph: TensorGraph, node: NodeDef, handle: Any, values: dict[str, str]) -> None:
    """Put a constant in the place of a node that reads a variable."""
    dtype = tf.as_dtype(node.attr["dtype"].type)
    try:
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()
    except (tf.errors.OpError, AttributeError) as error:
        raise no_constant(node.name) from error
    controls = list(filter(is_control, node.input))
    if node.op == "ReadVariableOp":
        graph.add(make_constant(node.name, value))
        graph.nodes[node.name].input.extend(controls)
        return
    if node.attr["batch_dims"].i:
        raise ModelLoadError(f"node {node.name!r} gathers from a variable in batches; export it so")
    key = plain(node.input[0])
    if key not in values:
        values[key] = graph.put_constant(f"{node.name}/table", value)
    axis = graph.put_constant(f"{node.name}/axis", np.int32(0))
    gathered = make_node(
        "GatherV2",
        node.name,
        [values[key], node.input[1], axis, *controls],
        Tparams=dtype,
        Tindices=tf.as_dtype(node.attr["Tindices"].type),
        Taxis=tf.int32,
        batch_dims=0,
    )
    graph.add(gathered)
