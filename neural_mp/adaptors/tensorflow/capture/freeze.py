"""Conversion of a function's variables into constants, with a single copy of each.

TensorFlow's `convert_variables_to_constants_v2` makes about six copies of all weights. It is only
used for functions that pass variables on to functions of their own (loops).

A frozen graph keeps no state between runs. The state of a random generator, e.g. in a Keras layer
that is random at inference, serves to draw other numbers in every run. Random integers in place of
the state lead to the same distribution.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.convert_to_constants import (
    convert_variables_to_constants_v2,
    disable_lower_using_switch_merge,
)

from neural_mp.adaptors.tensorflow.capture.lookup_tables import (
    Export,
    freeze_tables,
    trace_table_handles,
)
from neural_mp.adaptors.tensorflow.graph.control_flow import request_inlining
from neural_mp.adaptors.tensorflow.graph.ops import Role, Trait, get_op_role, has_trait
from neural_mp.adaptors.tensorflow.graph.runtime import has_kernel, run_offline_passes
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    Array,
    Consumers,
    GraphDef,
    NodeDef,
    TensorGraph,
    get_node_name,
    is_control,
    list_data_inputs,
    make_constant,
    make_node,
    plain_name,
    without_places,
)
from neural_mp.errors import ModelLoadError, one_line

logger = logging.getLogger(__name__)

ConcreteFunction: TypeAlias = tf.types.experimental.ConcreteFunction

_READS, _WRITES = (Role.READ, Role.READ_ROWS), (Role.WRITE, Role.UPDATE)
#: Attributes that keep a function from being inlined.
_NOT_INLINED = ("_noinline", "_XlaMustCompile", "_xla_propagate_compile_time_consts")


def freeze_concrete_function(
    function: ConcreteFunction,
) -> tuple[TensorGraph, list[tf.Tensor], list[tf.Tensor]]:
    """Return the graph of a concrete function with its weights, its inputs and its outputs.

    Raises:
        ModelLoadError: the function reads a resource that cannot become a constant.
    """
    captured = {internal.op.name: external for external, internal in function.graph.captures}
    inputs = [t for t in function.inputs if t.op.name not in captured]
    try:
        graph = _freeze_graph(function, captured, inputs)
        if graph is None and _must_inline_loops(function):
            graph = _freeze_graph(function, captured, inputs, loops=True)
        if graph is not None:
            return graph, inputs, list(function.outputs)
        frozen = convert_variables_to_constants_v2(
            _without_effects(function, captured, inputs), lower_control_flow=False
        )
    except ModelLoadError:
        raise
    except Exception as error:
        # The conversion passes on any error from reading variables and from its own rewriting.
        logger.debug("freezing failed", exc_info=True)
        raise ModelLoadError(
            f"variables of the model cannot be converted to constants: {one_line(error)}"
        ) from error
    if len(frozen.inputs) != len(inputs):
        extra = [t.name for t in frozen.inputs if t.dtype in (tf.resource, tf.variant)]
        raise unfreezable_resource_error((extra or ["more than its inputs"])[0])
    graph = TensorGraph.from_graph_def(frozen.graph.as_graph_def())
    return graph, list(frozen.inputs), list(frozen.outputs)


def unfreezable_resource_error(name: str) -> ModelLoadError:
    """Return the error about a resource whose value cannot become a constant."""
    return ModelLoadError(
        f"the model reads {name!r}, a queue or other resource that cannot become part of its "
        f"graph; export the model without the resource"
    )


def _kept_state_error(name: str) -> ModelLoadError:
    return ModelLoadError(
        f"a model must not keep state between calls, but {name!r} reads a variable that the model "
        f"also writes, as stateful recurrent layers do; pass the state as inputs and outputs "
        f"(stateful=False, initial_state)"
    )


def _without_effects(
    function: ConcreteFunction, captured: Mapping[str, Any], inputs: Sequence[Any]
) -> Any:
    """Return a function without table look-ups and variable writes (e.g. dropout seeds).

    Raises:
        ModelLoadError: an output depends on a variable that is written.
    """
    outputs = [tensor.name for tensor in function.outputs]
    names = [tensor.name for tensor in inputs]
    inlined = run_offline_passes(
        disable_lower_using_switch_merge(_make_inlinable_graph(function)),
        ["function"],
        names,
        outputs,
    )
    graph = TensorGraph.from_graph_def(inlined)
    handles = trace_table_handles(graph, captured)
    written = _drop_variable_controls(graph, handles)
    tables = _freeze_resources(graph, handles, captured)
    if not written and not tables:
        return function
    graph = without_places(graph.prune_unused(outputs))
    for node in graph.nodes.values():
        if node.name not in handles and any(
            handles.get(get_node_name(t)) in written for t in node.input
        ):
            raise _kept_state_error(node.name)
    placeholders = {*captured, *map(get_node_name, names)}
    rest = TensorGraph(
        {name: node for name, node in graph.nodes.items() if name not in placeholders},
        graph.versions,
        graph.library,
    )

    @tf.function(
        input_signature=[tf.TensorSpec(t.shape, t.dtype, name=t.op.name) for t in inputs],
        autograph=False,
    )
    def import_rest(*values: tf.Tensor) -> Any:
        input_map = dict(zip(names, values, strict=True))
        capture = tf.compat.v1.get_default_graph().capture
        input_map |= {f"{name}:0": capture(captured[name]) for name in captured if name in graph}
        return tf.graph_util.import_graph_def(
            rest.to_graph_def(), input_map=input_map, return_elements=outputs, name=""
        )

    concrete = import_rest.get_concrete_function()
    concrete.graph.variables = function.graph.variables
    return concrete


def _must_inline_loops(function: ConcreteFunction) -> bool:
    """Whether functions read tables or are compiled, which the conversion does not support."""
    library = function.graph.as_graph_def().library
    nodes = chain.from_iterable(inner.node_def for inner in library.function)
    compiled = any("_XlaMustCompile" in inner.attr for inner in library.function)
    return compiled or any(get_op_role(node) in (Role.LOOKUP, Role.LOOKUP_SIZE) for node in nodes)


def _freeze_graph(
    function: ConcreteFunction,
    captured: Mapping[str, Any],
    inputs: Iterable[tf.Tensor],
    *,
    loops: bool = False,
) -> TensorGraph | None:
    """Return the frozen graph; None if a variable is used other than by reading.

    If `loops`, resources are read in loops and branches as well, which are inlined.
    """
    outputs = [tensor.name for tensor in function.outputs]
    original = _make_inlinable_graph(function)
    if loops:
        request_inlining(original.node, original.library)
    small = run_offline_passes(original, ["function"], [t.name for t in inputs], outputs)
    graph = TensorGraph.from_graph_def(small).prune_unused(outputs, [t.op.name for t in inputs])
    handles = trace_table_handles(graph, captured, loops=loops)
    written = _drop_variable_controls(graph, handles)
    _freeze_resources(graph, handles, captured)
    graph = graph.prune_unused(outputs, [t.op.name for t in inputs])
    values: dict[str, str] = {}
    for node in list(graph.nodes.values()):
        sources = (handles.get(get_node_name(tensor)) for tensor in list_data_inputs(node))
        resources = [name for name in sources if name and captured[name].dtype is tf.resource]
        if node.name in handles or not resources:
            continue
        if get_op_role(node) not in _READS:
            return None
        if resources[0] in written:
            raise _kept_state_error(node.name)
        _freeze_variable_read(graph, node, captured[resources[0]], values)
    for name in handles:
        if name in captured and captured[name].dtype is not tf.resource:
            graph.add_node(make_constant(name, captured[name].numpy()))
    return graph.prune_unused(outputs, [t.op.name for t in inputs])


def _make_inlinable_graph(function: ConcreteFunction) -> GraphDef:
    """Return the graph of a function with calls that can be inlined, `jit_compile` dropped.

    Raises:
        ModelLoadError: an op only runs in functions compiled by XLA.
    """
    graph = function.graph.as_graph_def()
    functions = {inner.signature.name for inner in graph.library.function}
    compiled = (f.node_def for f in graph.library.function if "_XlaMustCompile" in f.attr)
    for node in chain(graph.node, *compiled):
        if node.op not in functions and not has_kernel(node.op):
            raise ModelLoadError(
                f"ops must run without XLA (jit_compile=True is dropped), got {node.op!r} "
                f"({node.name!r}); export the model without this op"
            )
    inside = chain.from_iterable(inner.node_def for inner in graph.library.function)
    for holder in chain(graph.node, graph.library.function, inside):
        for name in _NOT_INLINED:
            holder.attr.pop(name, None)
    return graph


def _freeze_resources(
    graph: TensorGraph, handles: Mapping[str, str], captured: Mapping[str, Any]
) -> bool:
    """Replace tables and states of random numbers, in place; return whether any were tables."""

    def export_arrays(export: Export) -> list[Array]:
        return [tensor.numpy() for tensor in export.export_table(captured[export.handle])]

    freeze_random_states(
        graph,
        handles,
        lambda handle: int(np.prod(tf.raw_ops.VariableShape(input=captured[handle]).numpy())),
    )
    return freeze_tables(graph, handles, export_arrays)


def _drop_variable_controls(graph: TensorGraph, handles: Mapping[str, str]) -> set[str]:
    """Remove control inputs on variable handles, reads and writes; return the handles written."""
    writes = {
        name: handles.get(get_node_name(node.input[0]), "")
        for name, node in graph.nodes.items()
        if get_op_role(node) in _WRITES
    }
    reads = {
        name
        for name, node in graph.nodes.items()
        if get_op_role(node) in _READS and get_node_name(node.input[0]) in handles
    }
    ignored = {*writes, *reads, *handles}
    for name, node in list(graph.nodes.items()):
        remaining = [t for t in node.input if not (is_control(t) and get_node_name(t) in ignored)]
        if len(remaining) < len(node.input):
            graph.edit_node(name).input[:] = remaining
    return set(writes.values())


def _freeze_variable_read(
    graph: TensorGraph, node: NodeDef, handle: tf.Tensor, values: dict[str, str]
) -> None:
    dtype = tf.as_dtype(node.attr["dtype"].type)
    try:
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()
    except (tf.errors.OpError, AttributeError) as error:
        raise unfreezable_resource_error(node.name) from error
    controls = list(filter(is_control, node.input))
    if get_op_role(node) is Role.READ:
        graph.add_node(make_constant(node.name, value))
        graph.nodes[node.name].input.extend(controls)
        return
    if node.attr["batch_dims"].i:
        raise ModelLoadError(
            f"node {node.name!r} gathers from a variable with batch_dims, which is not supported; "
            f"export the model with variables converted to constants"
        )
    key = plain_name(node.input[0])
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
    graph.add_node(gathered)


#: Ops that return the state of a generator and advance the generator.
_DRAWS = ("RngReadAndSkip",)
#: Ops that draw from the state of a generator → the same op without a generator.
_STATEFUL = {
    "StatefulStandardNormalV2": "RandomStandardNormal",
    "StatefulTruncatedNormal": "TruncatedNormal",
    "StatefulUniform": "RandomUniform",
    "StatefulUniformInt": "RandomUniformInt",
    "StatefulUniformFullInt": "NonDeterministicInts",
}
#: Inputs of random ops that determine the numbers.
_SEEDS = ("seed", "key", "counter")
#: Types of random integers.
_INTEGERS = (tf.int32, tf.int64, tf.uint32, tf.uint64)


def freeze_random_states(
    graph: TensorGraph, handles: Mapping[str, str], size: Callable[[str], int]
) -> None:
    """Replace reads of generators, and of seeds that the model changes, by random integers.

    In place. `handles` maps nodes that pass on a variable to its node; `size` returns the number of
    elements of a variable.
    """
    by_handle: dict[str, list[NodeDef]] = {}
    for node in graph.nodes.values():
        if node.input and node.name not in handles and get_node_name(node.input[0]) in handles:
            by_handle.setdefault(handles[get_node_name(node.input[0])], []).append(node)
    consumers = graph.find_consumers()
    for handle, users in by_handle.items():
        changed = any(get_op_role(user) is Role.WRITE for user in users)
        for user in users:
            if user.op in _DRAWS:
                _put_random_integers(graph, user, size(handle), tf.int64)
            elif user.op in _STATEFUL:
                _put_stateless_random(graph, user)
        reads = [user for user in users if get_op_role(user) is Role.READ] if changed else []
        if all(_only_seeds_random_ops(graph, consumers, handles, source) for source in reads):
            for source in reads:
                dtype = tf.as_dtype(source.attr["dtype"].type)
                _put_random_integers(graph, source, size(handle), dtype)


def _put_random_integers(graph: TensorGraph, node: NodeDef, size: int, dtype: tf.DType) -> None:
    shape = graph.put_constant(f"{node.name}/size", np.array([size], np.int64))
    controls = filter(is_control, node.input)
    types = {"dtype": dtype, "shape_dtype": tf.int64}
    graph.add_node(make_node("NonDeterministicInts", node.name, [shape, *controls], **types))


def _put_stateless_random(graph: TensorGraph, node: NodeDef) -> None:
    op = _STATEFUL[node.op]
    stateless = make_node(
        op, node.name, [*list_data_inputs(node)[2:], *filter(is_control, node.input)]
    )
    dtype, shape = node.attr["dtype"].type, node.attr["shape_dtype"].type or tf.int64
    if op == "NonDeterministicInts":
        stateless.attr["dtype"].type, stateless.attr["shape_dtype"].type = dtype, shape
    else:
        stateless.attr["Tout" if op == "RandomUniformInt" else "dtype"].type = dtype
        stateless.attr["T"].type = shape
    graph.add_node(stateless)


def _only_seeds_random_ops(
    graph: TensorGraph, consumers: Consumers, handles: Mapping[str, str], source: NodeDef
) -> bool:
    """Whether the value of a variable is an integer that only seeds random ops and itself."""
    if tf.as_dtype(source.attr["dtype"].type) not in _INTEGERS:
        return False
    waiting, visited = [str(source.name)], {str(source.name)}
    while waiting:
        name = waiting.pop()
        edges = [(graph.nodes[reader], position) for reader, position in consumers[name]]
        readers = [(node, i) for node, i in edges if not is_control(node.input[i])]
        if not readers and name != source.name:
            return False  # an output
        for reader, position in readers:
            own = (
                handles.get(get_node_name(reader.input[0]))
                == handles[get_node_name(source.input[0])]
            )
            if (get_op_role(reader) is Role.WRITE and own) or _is_seed_input(reader, position):
                continue
            if not has_trait(reader, Trait.COMPUTES_SEEDS):
                return False
            if reader.name not in visited:
                visited.add(str(reader.name))
                waiting.append(str(reader.name))
    return True


def _is_seed_input(node: NodeDef, position: int) -> bool:
    definition = op_def_registry.get(node.op)
    if definition is None or not node.op.startswith("Stateless"):
        return False
    arguments = definition.input_arg
    return position < len(arguments) and arguments[position].name in _SEEDS
