"""Canonical form of graphs: dense layers become MatMul on matrices.

Frameworks write a dense layer on sequences as a batched product, an Einsum, or Reshape, MatMul and
Reshape with a computed shape. Integer kernels need matrices, and the bias and activation directly
after the MatMul, so Reshapes are moved behind both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from string import ascii_letters

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.signatures.signature import Shape
from neural_mp.adaptors.tensorflow.graph.constants import (
    compute_constants,
    merge_duplicates,
    read_constants,
    simplify_graph,
    take_constant_branches,
    tie_loop_constants,
)
from neural_mp.adaptors.tensorflow.graph.control_flow import (
    inline_control_flow,
    with_functions_of_its_own,
)
from neural_mp.adaptors.tensorflow.graph.fusion import fold_affine_chains, fold_paddings
from neural_mp.adaptors.tensorflow.graph.ops import (
    CONTROL_FLOW,
    Role,
    Trait,
    get_op_role,
    has_trait,
)
from neural_mp.adaptors.tensorflow.graph.shape_inference import Shapes, infer_shapes
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    Array,
    NodeDef,
    TensorGraph,
    get_dtype_attribute,
    get_node_name,
    get_output_index,
    get_text_attribute,
    is_control,
    list_data_inputs,
    list_result_dtypes,
    make_node,
    plain_name,
    without_places,
)
from neural_mp.adaptors.tensorflow.model import ServedSignature

logger = logging.getLogger(__name__)


def canonical_dense_layers(graph: TensorGraph, outputs: frozenset[str]) -> None:
    """Rewrite the dense layers of a graph in place."""
    for node in list(graph.nodes.values()):
        if get_op_role(node) is Role.MATRIX_PRODUCT and get_dtype_attribute(node) is tf.float32:
            _transpose_weight(graph, node)
    roles = set(map(get_op_role, graph.nodes.values()))
    if roles.isdisjoint((Role.RESHAPE, Role.BATCH_PRODUCT)):
        return
    inferred, count = infer_shapes(graph), len(graph.nodes)
    for node in list(graph.nodes.values()):
        if get_op_role(node) is Role.BATCH_PRODUCT and get_dtype_attribute(node) is tf.float32:
            rewrite = _convert_einsum if "equation" in node.attr else _from_batches
            rewrite(graph, node, inferred)
    if not any(map(_is_reshape, graph.nodes.values())):
        return
    if len(graph.nodes) > count:  # products were rewritten
        inferred = infer_shapes(graph)
    _fold_reshape_shapes(graph, inferred)
    _join_reshapes(graph, outputs, _sink_reshapes(graph, outputs, inferred))


def _is_reshape(node: NodeDef) -> bool:
    return get_op_role(node) is Role.RESHAPE


def _transpose_weight(graph: TensorGraph, node: NodeDef) -> None:
    weight = graph.find_constant(node.input[1])
    if weight is None or not node.attr["transpose_b"].b:
        return
    edited, transposed = graph.edit_node(node.name), np.ascontiguousarray(weight.T)
    edited.input[1] = graph.put_constant(f"{node.name}/transposed", transposed)
    edited.attr["transpose_b"].b = False


def _from_batches(graph: TensorGraph, node: NodeDef, known: Shapes) -> None:
    weight = graph.find_constant(node.input[1])
    if weight is None or node.attr["adj_x"].b or any(size != 1 for size in weight.shape[:-2]):
        return
    axes = known[node.name]
    if axes is None or len(axes) < max(3, weight.ndim):
        return
    weight = weight.reshape(weight.shape[-2:])
    weight = weight.T if node.attr["adj_y"].b else weight
    _put_product(graph, node, weight, weight.shape[1:], known)


def _convert_einsum(graph: TensorGraph, node: NodeDef, known: Shapes) -> None:
    """Convert `abc,cde->abde`: contraction of the input's last axes with the weight's first."""
    weight = graph.find_constant(node.input[1]) if len(node.input) == 2 else None
    equation = get_text_attribute(node, "equation").replace(" ", "")
    shape = known[node.input[0]]
    if weight is None or "->" not in equation or shape is None:
        return
    factors, _, result = equation.partition("->")
    lhs, _, rhs = factors.partition(",")
    # An ellipsis stands for the unlabelled axes, which only the input has.
    unnamed = [letter for letter in ascii_letters if letter not in equation]
    lhs, result = (
        text.replace("...", "".join(unnamed[: len(shape) - len(lhs.replace("...", ""))]))
        for text in (lhs, result)
    )
    if "." in lhs + rhs + result or len(lhs) != len(shape):
        return
    summed = [label for label in lhs if label in rhs]
    produced = [label for label in rhs if label not in lhs]
    outer = [label for label in lhs if label not in rhs]
    proper = len(set(lhs)) == len(lhs) and len(set(rhs)) == len(rhs) and summed and produced
    if not proper or list(lhs) != outer + summed or list(result) != outer + produced:
        return
    ordered = weight.transpose([rhs.index(label) for label in (*summed, *produced)])
    columns = ordered.shape[len(summed) :]
    _put_product(graph, node, ordered.reshape(-1, int(np.prod(columns))), columns, known)


def _put_product(
    graph: TensorGraph, node: NodeDef, weight: Array, columns: tuple[int, ...], known: Shapes
) -> None:
    """Replace a product over the last axes of its input by Reshape, MatMul, Reshape.

    The last node keeps the name. `columns` are the sizes of the last axes of the result, which the
    matrix `weight` produces.
    """
    shape = known[node.name]
    if shape is None or 0 in shape:
        return
    name, sizes = node.name, {"T": tf.float32, "Tshape": tf.int32}
    matrix = _reshape_to_matrix(graph, node, weight.shape[0])
    factor = graph.put_constant(f"{name}/weight", np.ascontiguousarray(weight, np.float32))
    plainly = {"T": tf.float32, "transpose_a": False, "transpose_b": False}
    product = graph.put_node("MatMul", f"{name}/MatMul", [matrix, factor], **plainly)
    fixed = _make_constant_shape(shape)
    if fixed is not None:
        target = graph.put_constant(f"{name}/sizes", fixed)
    else:
        target = _put_dynamic_shape(graph, node, len(shape) - len(columns), columns)
    graph.add_node(make_node("Reshape", name, [product, target], **sizes))


def _reshape_to_matrix(graph: TensorGraph, node: NodeDef, width: int) -> str:
    """Return the input of a product as a matrix, shared by all products that read the tensor.

    Separate matrices would be quantized and corrected separately.
    """
    source, rows = node.input[0], np.array([-1, width], np.int32)
    for candidate in graph.nodes.values():
        # A Reshape with control inputs may wait for this very product.
        if _is_reshape(candidate) and len(candidate.input) == 2 and candidate.input[0] == source:
            sizes = graph.find_constant(candidate.input[1])
            if sizes is not None and np.array_equal(sizes, rows):
                return str(candidate.name)
    target = graph.put_constant(f"{node.name}/rows", rows)
    types = {"T": tf.float32, "Tshape": tf.int32}
    return graph.put_node("Reshape", f"{node.name}/matrix", [source, target], **types)


def _put_dynamic_shape(
    graph: TensorGraph, node: NodeDef, outer: int, columns: tuple[int, ...]
) -> str:
    """Return a new tensor: the shape of a product with several sizes unknown before the run."""
    name, whole = node.name, {"Index": tf.int32, "T": tf.int32}
    shape = graph.put_node(
        "Shape", f"{name}/shape", [node.input[0]], T=tf.float32, out_type=tf.int32
    )
    begin = graph.put_constant(f"{name}/first", np.array([0], np.int32))
    count = graph.put_constant(f"{name}/outer", np.array([outer], np.int32))
    outer_sizes = graph.put_node("Slice", f"{name}/outer_sizes", [shape, begin, count], **whole)
    inner_sizes = graph.put_constant(f"{name}/columns", np.array(columns, np.int32))
    axis = graph.put_constant(f"{name}/axis", np.int32(0))
    joined = {"N": 2, "T": tf.int32, "Tidx": tf.int32}
    return graph.put_node("ConcatV2", f"{name}/sizes", [outer_sizes, inner_sizes, axis], **joined)


def _make_constant_shape(shape: Shape) -> Array | None:
    """Return the shape operand of a Reshape; None if more than one size is unknown."""
    if shape is None or sum(size is None for size in shape) > 1 or 0 in shape:
        return None
    return np.array([-1 if size is None else size for size in shape], np.int32)


def _fold_reshape_shapes(graph: TensorGraph, known: Shapes) -> None:
    """Make the shape operand of Reshapes constant if at most one size is unknown."""
    for node in list(graph.nodes.values()):
        if not _is_reshape(node) or graph.is_constant(node.input[1]):
            continue
        shape = _make_constant_shape(known[node.name])
        if shape is not None:
            edited = graph.edit_node(node.name)
            edited.input[1] = graph.put_constant(f"{node.name}/sizes", shape)
            edited.attr["Tshape"].type = tf.int32.as_datatype_enum


def _sink_reshapes(
    graph: TensorGraph, outputs: frozenset[str], known: Shapes
) -> Mapping[str, Shape]:
    """Move Reshapes that follow a product behind the elementwise ops after it.

    Return node → the shape of its first result afterwards.
    """
    now = {name: results[0] for name, results in known.fixed.items() if results}
    # Matrix → its product: all matrices of a product have the same number of rows.
    flat = {
        name: name for name, node in graph.nodes.items() if get_op_role(node) is Role.MATRIX_PRODUCT
    }
    moved: dict[str, str] = {}
    for node in list(graph.nodes.values()):
        if not has_trait(node, Trait.POINTWISE) or node.name in outputs:
            continue
        sources = [moved.get(tensor, tensor) for tensor in list_data_inputs(node)]
        reshapes = [graph[t] for t in sources if _is_reshape(graph[t])]
        bases = {plain_name(reshape.input[0]) for reshape in reshapes}
        origins = {flat.get(base) for base in bases}
        if None in origins or len(origins) != 1 or get_dtype_attribute(node) is not tf.float32:
            continue
        shape, matrices = now[reshapes[0].name], [now[base] for base in bases]
        widths = {sizes[-1] if sizes and len(sizes) == 2 else None for sizes in matrices}
        width = widths.pop() if len(widths) == 1 else None
        # Shape operands of the Reshapes: sizes if constant, else the tensor with them.
        operands = [(plain_name(r.input[1]), graph.find_constant(r.input[1])) for r in reshapes]
        targets = {name if sizes is None else tuple(map(int, sizes)) for name, sizes in operands}
        if shape is None or width is None or now[node.name] != shape or len(targets) != 1:
            continue
        inputs = [_flatten_operand(graph, t, shape, width) for t in sources]
        if None in inputs or (get_op_role(node) is Role.BIAS and shape[-1] != width):
            continue
        edited = graph.edit_node(node.name)
        edited.input[: len(inputs)] = [t for t in inputs if t is not None]
        types = {"T": tf.float32, "Tshape": tf.as_dtype(reshapes[0].attr["Tshape"].type)}
        operand = reshapes[0].input[1]
        reshaped = graph.put_node("Reshape", f"{node.name}/reshaped", [node.name, operand], **types)
        moved[node.name] = reshaped
        base = bases.pop()
        now[reshaped], now[node.name] = shape, now[base]
        flat[node.name] = flat[base]
    graph.redirect_readers(moved, unless={*moved, *moved.values()})
    return now


def _flatten_operand(
    graph: TensorGraph, tensor: str, shape: tuple[int | None, ...], width: int
) -> str | None:
    """Return the matrix that replaces a tensor; None if there is none."""
    if _is_reshape(graph[tensor]):
        return plain_name(graph[tensor].input[0])
    value = graph.find_constant(tensor)
    if value is None:
        return None
    name = f"{tensor}/flat"
    if value.size == 1:
        return tensor if value.ndim <= 2 else graph.put_constant(name, value.reshape(()))
    while value.ndim > 1 and value.shape[0] == 1:
        value = value[0]
    if value.size != width or value.shape != tuple(shape[-value.ndim :]):
        return None
    return graph.put_constant(name, value.reshape(-1))


def _join_reshapes(graph: TensorGraph, outputs: frozenset[str], known: Mapping[str, Shape]) -> None:
    """Merge consecutive Reshapes, and remove those that change nothing.

    `known` are the shapes of the nodes' first results.
    """
    for node in list(graph.nodes.values()):
        if _is_reshape(node) and _is_reshape(graph[node.input[0]]):
            edited = graph.edit_node(node.name)
            while _is_reshape(graph[edited.input[0]]):
                edited.input[0] = graph[edited.input[0]].input[0]
    replaced = {}
    for node in graph.nodes.values():
        if not _is_reshape(node) or node.name in outputs or not graph.is_constant(node.input[1]):
            continue
        source = plain_name(node.input[0])
        shape = known[node.name]
        if ":" not in source and known[source] == shape and _make_constant_shape(shape) is not None:
            replaced[node.name] = source
    graph.redirect_readers(replaced)


def canonicalize_graph(
    graph: TensorGraph, signature: ServedSignature
) -> tuple[TensorGraph, list[str]]:
    """Return a frozen graph in canonical form, and warnings about steps that failed."""
    inputs, outputs = signature.input_tensors, signature.output_tensors
    warnings: list[str] = []
    graph = without_places(graph)
    try:
        graph = without_places(inline_control_flow(graph, inputs, outputs))
        graph = simplify_graph(graph, inputs, outputs)
    except (tf.errors.OpError, ValueError) as error:
        logger.debug("offline passes failed", exc_info=True)
        graph = graph.prune_unused(outputs, inputs)
        warnings.append(
            f"constants of the graph are not folded, because TensorFlow's passes failed: "
            f"{str(error).splitlines()[0]}"
        )
    protected = frozenset(map(get_node_name, outputs))
    take_constant_branches(graph)
    read_constants(graph)
    graph = graph.prune_unused(outputs, inputs)
    compute_constants(graph, protected)
    strip_identities(graph, protected)
    graph = graph.prune_unused(outputs, inputs)
    merge_duplicates(graph, protected)
    canonical_dense_layers(graph, protected)
    graph = graph.prune_unused(outputs, inputs)
    fold_affine_chains(graph, protected)
    fold_paddings(graph)
    tie_loop_constants(graph)
    name_every_result(graph)
    return with_functions_of_its_own(graph.prune_unused(outputs, inputs)), warnings


def strip_identities(graph: TensorGraph, outputs: frozenset[str]) -> None:
    """Connect readers of identity ops directly to the inputs of these ops."""
    consumers = graph.find_consumers()
    replaced: dict[str, str] = {}
    for name, node in graph.nodes.items():
        is_same_type = "SrcT" in node.attr and node.attr["SrcT"].type == node.attr["DstT"].type
        returns_input = get_op_role(node) is Role.IDENTITY or is_same_type
        if not returns_input or name in outputs or len(node.input) != 1:
            continue
        neighbours = [graph[node.input[0]], *(graph[reader] for reader, _ in consumers[name])]
        controls = any(is_control(graph.nodes[r].input[index]) for r, index in consumers[name])
        if not controls and not any(neighbour.op in CONTROL_FLOW for neighbour in neighbours):
            replaced[name] = plain_name(node.input[0])
    for name in replaced:
        while replaced[name] in replaced:
            replaced[name] = replaced[replaced[name]]
    graph.redirect_readers(replaced)


def name_every_result(graph: TensorGraph) -> None:
    """Add an Identity to each result of ops with several results.

    Afterwards the name of a node is the name of its tensor, as in plans. Batch norms are left out:
    only their first result is ever read.
    """
    named: dict[str, str] = {}
    for node in list(graph.nodes.values()):
        for tensor in list_data_inputs(node):
            source = graph[tensor]
            border = source.op in CONTROL_FLOW and (
                get_op_role(source) is not Role.SWITCH or node.op in CONTROL_FLOW
            )
            kinds = [] if border else list_result_dtypes(source)
            if len(kinds) < 2 or "Norm" in source.op or tensor in named:
                continue
            index = get_output_index(tensor)
            name = f"{source.name}/result_{index}"
            named[tensor] = graph.put_node("Identity", name, [tensor], T=kinds[index])
    graph.redirect_readers(named, unless=named.values())
