"""Re-declaration of graphs that compute in 16 bits, e.g. of Keras's mixed policies, in float32.

Integer kernels read and return float32 at their borders, and calibration observes float32. The
weights of a model under a mixed policy are float32 in the first place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef

from neural_mp.adaptors.tensorflow.graph.control_flow import with_functions_of_its_own
from neural_mp.adaptors.tensorflow.graph.ops import Trait, has_trait
from neural_mp.adaptors.tensorflow.graph.runtime import runnable
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    FunctionDefLibrary,
    NodeDef,
    TensorGraph,
    copied,
    make_constant,
    make_node,
    node_of,
    result_dtypes,
    without_large,
)
from neural_mp.adaptors.tensorflow.model import ServedSignature
from neural_mp.errors import ModelLoadError, one_line

logger = logging.getLogger(__name__)

_16_BITS = {kind.as_datatype_enum: kind for kind in (tf.float16, tf.bfloat16)}
_FLOAT32 = tf.float32.as_datatype_enum


def in_float32(
    graph: TensorGraph, signature: ServedSignature
) -> tuple[TensorGraph | None, list[str]]:
    """Return the graph with all 16-bit floats as float32, and warnings.

    Inputs and outputs keep their types. None without 16-bit floats, or if the graph cannot be
    re-declared; a warning then gives the reason.
    """
    needed = graph.pruned(signature.output_tensors, signature.input_tensors)
    names = sorted({_16_BITS[kind].name for node in _all_nodes(needed) for kind in _kinds(node)})
    if not names:
        return None, []
    dtypes = " and ".join(names)
    reason = _obstacle(needed, signature)
    if reason is None:
        rewritten = with_functions_of_its_own(_rewritten(needed, signature))
        try:
            runnable(without_large(rewritten))
        except (ValueError, ModelLoadError, tf.errors.OpError) as error:
            logger.debug("re-declaring the graph failed", exc_info=True)
            reason = one_line(error)
        else:
            return rewritten, [
                f"ops in {dtypes} are re-declared in float32 in converted models, as integer "
                f"kernels return float32; an unchanged model keeps {dtypes}"
            ]
    return None, [f"ops in {dtypes} stay as they are and get no INT8: {reason}"]


def _all_nodes(graph: TensorGraph) -> Iterator[NodeDef]:
    return chain(graph.nodes.values(), *(f.node_def for f in graph.library.function))


def _kinds(node: NodeDef) -> Iterator[int]:
    """Yield the 16-bit types in the attributes of a node."""
    for value in node.attr.values():
        yield from (kind for kind in (value.type, *value.list.type) if kind in _16_BITS)


def _obstacle(graph: TensorGraph, signature: ServedSignature) -> str | None:
    for node in _all_nodes(graph):
        if has_trait(node, Trait.READS_BITS) and any(_kinds(node)):
            return f"{node.name!r} ({node.op}) reads the bits of floats"
    fed = set(map(node_of, signature.input_tensors))
    for tensor in signature.output_tensors:
        kinds = result_dtypes(graph[tensor])
        halves = [kind for kind in kinds if kind.as_datatype_enum in _16_BITS]
        if halves and (len(kinds) > 1 or node_of(tensor) in fed):
            return f"the output {tensor!r} is an input, or one of several results of an op"
    return None


def _rewritten(graph: TensorGraph, signature: ServedSignature) -> TensorGraph:
    """Return the graph in float32, with casts at inputs and outputs in 16 bits."""
    ends = dict.fromkeys(map(node_of, signature.output_tensors))
    halves = {name: kind for name in ends if (kind := _half_result(graph.nodes[name]))}
    inner = {name: graph.unused(f"{name}/float32") for name in halves}
    graph = graph.renamed(inner)
    fed = set(map(node_of, signature.input_tensors))
    rewritten = TensorGraph(
        {name: node if name in fed else _widened(node) for name, node in graph.nodes.items()},
        graph.versions,
        FunctionDefLibrary(function=map(_widened_function, graph.library.function)),
    )
    for name, kind in halves.items():
        rewritten.add(_cast(name, inner[name], tf.float32, kind))
    starts = {name: kind for name in fed if (kind := _half_result(rewritten.nodes[name]))}
    casts = {
        name: rewritten.add(_cast(rewritten.unused(f"{name}/float32"), name, kind, tf.float32))
        for name, kind in starts.items()
    }
    rewritten.redirect(casts, unless=casts.values())
    return rewritten


def _half_result(node: NodeDef) -> tf.DType | None:
    """Return the type of the first result if it has 16 bits, else None."""
    kinds = result_dtypes(node)
    return kinds[0] if kinds and kinds[0].as_datatype_enum in _16_BITS else None


def _cast(name: str, source: str, source_type: tf.DType, target_type: tf.DType) -> NodeDef:
    return make_node("Cast", name, [source], SrcT=source_type, DstT=target_type, Truncate=False)


def _widened(node: NodeDef) -> NodeDef:
    """Return a node with float32 in place of 16-bit types."""
    if not any(_kinds(node)):
        return node
    if node.op == CONSTANT:
        value = tf.make_ndarray(node.attr["value"].tensor).astype("float32")
        constant = make_constant(node.name, value)
        constant.input[:] = node.input
        return constant
    widened = copied(node)
    for value in widened.attr.values():
        # An assignment to one kind of value would clear another.
        if value.type in _16_BITS:
            value.type = _FLOAT32
        for index, kind in enumerate(value.list.type):
            if kind in _16_BITS:
                value.list.type[index] = _FLOAT32
    return widened


def _widened_function(function: FunctionDef) -> FunctionDef:
    widened = FunctionDef()
    widened.CopyFrom(function)
    for argument in (*widened.signature.input_arg, *widened.signature.output_arg):
        if argument.type in _16_BITS:
            argument.type = _FLOAT32
    nodes = [_widened(node) for node in function.node_def]
    del widened.node_def[:]
    widened.node_def.extend(nodes)
    return widened
