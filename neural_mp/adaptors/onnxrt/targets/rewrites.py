"""Rewriting of graphs for targets, before planning and before writing.

Numerically equal, except for the clipping of masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.canonicalize import infer_shapes
from neural_mp.adaptors.onnxrt.constant_folding import fold_constants
from neural_mp.adaptors.onnxrt.graph.edit import (
    GraphNames,
    get_constant_array,
    get_node_input,
    is_float32,
    require_constant_array,
)
from neural_mp.adaptors.onnxrt.graph.opset import get_onnx_opset, raise_opset, same_but_for_types
from neural_mp.errors import ConversionError
from neural_mp.targets import TargetProfile

#: Constants of masks up to this value are clipped to `MASK_VALUE`: exp(−100) is 0 in float32, and
#: integers that cover −10000 or −3.4e38 have no other value.
LEAST_MASK_VALUE, MASK_VALUE = -1e3, -100.0
#: First opsets with Gelu and LayerNormalization.
_GELU_OPSET, _LAYER_NORM_OPSET = 20, 17
#: Most rounds in which folded sizes make further shapes known.
_MAX_FOLDING_ROUNDS = 16
#: Relative tolerance of the constants of a pattern.
_TOLERANCE = 1e-3
#: Comparison → the same with its inputs swapped.
_SWAPPED = {"Equal": "Equal", "Greater": "Less"}
#: Ops that may only add or remove axes of size 1.
_VIEWS = ("Reshape", "Expand", "Squeeze", "Unsqueeze", "Identity")
#: Ops between a mask and the Softmax that keep a large negative number large.
_PASSING_MASKS = frozenset(
    {
        "Add",
        "Cast",
        "Concat",
        "Expand",
        "Gather",
        "Identity",
        "Max",
        "Min",
        "Mul",
        "Reshape",
        "Slice",
        "Softmax",
        "Squeeze",
        "Sub",
        "Tile",
        "Transpose",
        "Unsqueeze",
        "Where",
    }
)


#: A tensor and one of its axes.
AxisOf = tuple[ir.Value, int]


@dataclass(frozen=True)
class RewrittenGraph:
    """A graph for planning, and notes on rewriting that changes numbers."""

    program: ir.Model
    notes: tuple[str, ...]


def rewrite_for(
    program: ir.Model, profile: TargetProfile, clips_masks: bool = True
) -> RewrittenGraph:
    """Return a copy of a canonicalized graph, rewritten by the rules of a target.

    Without `clips_masks`, masks stay, whatever the rules.

    Raises:
        ConversionError: the opset cannot be raised to the target's.
    """
    rewritten, notes = program.clone(), []
    _fit_opset(rewritten, profile)
    common.NameFixPass()(rewritten)
    names = GraphNames(rewritten.graph)
    if "constant_first" in profile.rewrites:
        _put_constants_first(rewritten.graph)
    if "erf_to_gelu" in profile.rewrites and get_onnx_opset(rewritten) >= _GELU_OPSET:
        for node in list(rewritten.graph):
            if node.op_type == "Erf" and not node.domain:
                _replace_by_gelu(node, names)
    if "layer_norm" in profile.rewrites and get_onnx_opset(rewritten) >= _LAYER_NORM_OPSET:
        _unify_sizes(rewritten.graph)
        for node in list(rewritten.graph):
            if node.op_type == "Sqrt" and not node.domain:
                _replace_by_layer_norm(node, names)
    if "matmul_bias" in profile.rewrites:
        for node in list(rewritten.graph):
            if node.op_type == "MatMul" and not node.domain:
                _merge_bias(node, names)
    if clips_masks and "mask_clip" in profile.rewrites:
        masks = list(_find_masks(rewritten))
        for value in masks:
            clipped = np.maximum(require_constant_array(value), np.float32(MASK_VALUE))
            value.const_value = ir.tensor(clipped, name=value.name)
        if masks:
            notes.append(
                f"masks were clipped at {MASK_VALUE:g}, since integers cannot hold their values: "
                f"{', '.join(sorted(str(value.name) for value in masks))}"
            )
    common.RemoveUnusedNodesPass()(rewritten)
    infer_shapes(rewritten)
    return RewrittenGraph(rewritten, tuple(notes))


def _fit_opset(program: ir.Model, profile: TargetProfile) -> None:
    """Bring the opset within the target's, in place."""
    (least, newest), current = profile.opset, get_onnx_opset(program)
    if current < least:
        raise_opset(program, least)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(program)
    elif current > newest:
        for node in program.graph.all_nodes():
            if not same_but_for_types(node, current, newest):
                raise ConversionError(
                    f"{profile.title} reads opsets up to {newest}, got {current}, which defines "
                    f"{node.op_type} otherwise; export the model with opset {newest}"
                )
        program.graph.opset_imports[""] = newest


def _unify_sizes(graph: ir.Graph) -> None:
    """Give unknown sizes one name that a Reshape leaves equal, as all other sizes are known.

    Shape inference gives a new name to each size that the graph computes.
    """
    same: dict[str, str] = {}
    for node in graph:
        if node.op_type != "Reshape" or node.domain or node.inputs[0] is None:
            continue
        parts = [_split_sizes(value) for value in (node.inputs[0], node.outputs[0])]
        (before, unknown), (after, others) = parts
        if before == after > 0 and len(unknown) == len(others) == 1:
            old, new = (same.get(name, name) for name in (*others, *unknown))
            if old != new:
                same = {name: new if to == old else to for name, to in same.items()} | {old: new}
    for value in {output for node in graph for output in node.outputs}:
        if value.shape is not None and same:
            value.shape = ir.Shape([same.get(str(_name_of(d)), d) for d in value.shape])


def _split_sizes(value: ir.Value) -> tuple[int, list[str]]:
    """Return the product of the known sizes, 0 without a shape, and the names of the others."""
    sizes = () if value.shape is None else tuple(value.shape)
    names = [name for size in sizes if (name := _name_of(size)) is not None]
    numbers = [size for size in sizes if isinstance(size, int)]
    is_named = len(names) + len(numbers) == len(sizes)
    return (math.prod(numbers) if sizes and is_named else 0), names if is_named else []


def _name_of(size: int | ir.SymbolicDim) -> str | None:
    return size.value if isinstance(size, ir.SymbolicDim) else None


def with_static_shapes(program: ir.Model, example: Mapping[str, Array]) -> ir.Model:
    """Return a copy of a graph with the sizes of the example, and constants folded."""
    static = program.clone()
    for value in static.graph.inputs:
        array = example.get(str(value.name))
        if array is not None:
            value.shape = ir.Shape(array.shape)
    for node in static.graph:
        for result in node.outputs:
            result.shape = None
    names = GraphNames(static.graph)
    # A folded size makes further shapes known.
    for _ in range(_MAX_FOLDING_ROUNDS):
        infer_shapes(static)
        if not _fold_shapes(static, names):
            break
        fold_constants(static, names, None)
    common.RemoveUnusedNodesPass()(static)
    return static


def _fold_shapes(program: ir.Model, names: GraphNames) -> bool:
    """Replace the sizes of tensors of known shape by constants; return whether there were any."""
    nodes = [
        node
        for node in program.graph
        if node.op_type == "Shape" and not node.domain and _is_static(node.inputs[0])
    ]
    for node in nodes:
        shape = node.inputs[0].shape.numpy()  # type: ignore[union-attr]
        start = node.attributes.get_int("start", 0)
        sizes = shape[start : node.attributes.get_int("end", len(shape))]
        constant = names.add_constant(f"{node.name}/sizes", np.asarray(sizes, np.int64))
        node.outputs[0].replace_all_uses_with(constant, replace_graph_outputs=True)
        program.graph.remove(node, safe=True)
    return bool(nodes)


def _is_static(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and value.shape.is_static()


def _put_constants_first(graph: ir.Graph) -> None:
    """Swap the inputs of each Equal and Greater whose second input is constant, in place."""
    for node in graph:
        if node.op_type in _SWAPPED and not node.domain:
            first, second = node.inputs
            if second is not None and second.const_value is not None:
                node.op_type = _SWAPPED[node.op_type]
                node.replace_input_with(0, second)
                node.replace_input_with(1, first)


def _merge_bias(product: ir.Node, names: GraphNames) -> None:
    """Replace a product with a constant matrix and the sum with a bias by one Gemm."""
    data, matrix, added = product.inputs[0], product.inputs[1], _find_only_reader(product)
    weight, shape = get_constant_array(matrix), product.outputs[0].shape
    if added is None or added.op_type != "Add" or added.domain:
        return
    others = [value for value in added.inputs if value is not product.outputs[0]]
    bias = get_constant_array(others[0]) if others else None
    if weight is None or weight.ndim != 2 or bias is None or shape is None or not is_float32(data):
        return
    columns, sizes = weight.shape[1], [n if isinstance(n, int) else -1 for n in shape]
    is_row = bias.size == columns == bias.shape[-1] if bias.ndim else False
    if not is_row or bias.ndim > len(sizes) or sizes.count(-1) > 1:
        return
    if bias.min(initial=0.0) <= LEAST_MASK_VALUE:
        return  # a mask
    row = names.add_constant(f"{added.name}/bias", bias.ravel())
    gemm = ir.node("Gemm", [data, matrix, row], name=names.reserve_name(f"{product.name}/Gemm"))
    nodes = [gemm]
    if len(sizes) != 2:
        before = names.add_constant(f"{product.name}/rows", np.array([-1, len(weight)]))
        after = names.add_constant(f"{added.name}/sizes", np.array(sizes))
        name = names.reserve_name(f"{product.name}/Reshape")
        rows = ir.node("Reshape", [data, before], name=name)
        gemm.replace_input_with(0, rows.outputs[0])
        name = names.reserve_name(f"{added.name}/Reshape")
        nodes = [rows, gemm, ir.node("Reshape", [gemm.outputs[0], after], name=name)]
    for node in nodes[:-1]:
        node.outputs[0].name = names.reserve_name(f"{node.name}/result")
    _replace_result(added, nodes, names)


# Gelu: x · ½ · (1 + erf(x / √2)), whose factors exporters write in any order.


def _replace_by_gelu(erf: ir.Node, names: GraphNames) -> None:
    data = _match_scaled_by(erf.inputs[0], 1 / math.sqrt(2))
    added = _find_only_reader(erf)
    if data is None or added is None or added.op_type != "Add":
        return
    terms = [_scalar_value(operand) for operand in added.inputs]
    if not any(n is not None and math.isclose(n, 1, rel_tol=_TOLERANCE) for n in terms):
        return
    last, factors = _follow_product_chain(added)
    constants = [factor for factor in factors if isinstance(factor, float)]
    others = [factor for factor in factors if not isinstance(factor, float)]
    is_half = math.isclose(math.prod(constants), 0.5, rel_tol=_TOLERANCE)
    if last is None or others != [data] or not is_half:
        return
    gelu = ir.node("Gelu", [data], name=names.reserve_name(f"{erf.name}/Gelu"))
    _replace_result(last, [gelu], names)


def _replace_result(last: ir.Node, nodes: Sequence[ir.Node], names: GraphNames) -> None:
    """Compute the result of the last node of a pattern by other nodes, under the same name."""
    replaced, result = last.outputs[0], nodes[-1].outputs[0]
    result.type, result.shape = replaced.type, replaced.shape
    assert last.graph is not None
    last.graph.insert_after(last, nodes)
    name, replaced.name = (
        replaced.name,
        names.reserve_name(f"{replaced.name}/before_{nodes[-1].op_type}"),
    )
    replaced.replace_all_uses_with(result, replace_graph_outputs=True)
    result.name = name


def _match_scaled_by(value: ir.Value | None, factor: float) -> ir.Value | None:
    """Return the tensor that a value is a multiple of, by a factor; None for another value."""
    node = None if value is None else value.producer()
    if node is None or node.op_type not in ("Mul", "Div") or node.domain:
        return None
    for position, operand in enumerate(node.inputs):
        number = _scalar_value(operand)
        if number is None or (node.op_type == "Div" and position == 0):
            continue
        own = number if node.op_type == "Mul" else 1 / number
        if math.isclose(own, factor, rel_tol=_TOLERANCE):
            return node.inputs[1 - position]
    return None


#: Factors of Gelu besides 1 + erf: the tensor and ½.
_GELU_FACTORS = 2


def _follow_product_chain(node: ir.Node) -> tuple[ir.Node | None, list[ir.Value | float]]:
    """Return the last of the products that follow a node, and their factors besides the node."""
    factors: list[ir.Value | float] = []
    last: ir.Node | None = None
    while len(factors) < _GELU_FACTORS:
        product = _find_only_reader(last or node)
        added = None if product is None else _list_other_factors(product, (last or node).outputs[0])
        if not added:
            break
        factors += added
        last = product
    return last, factors


def _list_other_factors(product: ir.Node, value: ir.Value) -> list[ir.Value | float]:
    """Return the other factor of a product; none for another op, and for a tensor as divisor.

    A tensor that is itself the half of another counts as two factors.
    """
    if product.op_type not in ("Mul", "Div") or product.domain:
        return []
    position = list(product.inputs).index(value)
    operand = product.inputs[1 - position]
    number = _scalar_value(operand)
    if product.op_type == "Div":
        return [1 / number] if number and position == 0 else []
    if number is not None:
        return [number]
    halved = _match_scaled_by(operand, 0.5)
    if halved is not None:
        return [halved, 0.5]
    return [] if operand is None else [operand]


def _find_only_reader(node: ir.Node) -> ir.Node | None:
    uses = node.outputs[0].uses()
    if len(uses) != 1 or node.outputs[0].is_graph_output():
        return None
    return next(iter(uses)).node


def _scalar_value(value: ir.Value | None) -> float | None:
    """Return a constant of one element as a number; None for other values."""
    array = get_constant_array(value)
    return float(array.ravel()[0]) if array is not None and array.size == 1 else None


# Layer normalization over an axis: γ · (x - mean(x)) / √(variance(x) + ε) + β.


def _replace_by_layer_norm(root: ir.Node, names: GraphNames) -> None:
    variance, epsilon = _sum_with_number(root.inputs[0])
    matched = _match_variance(variance)
    if matched is None or epsilon is None or not _is_column(root.outputs[0], matched):
        return
    scaling = _match_division(root, matched) or _match_reciprocal(root, matched)
    if scaling is None:
        return
    product, scale = scaling
    addition = _find_only_reader(product)
    shift = _find_axis_operand(addition, "Add", product, matched)
    last = product if addition is None or shift is None else addition
    _insert_layer_norm(last, matched, epsilon, (scale, shift), names)


def _match_division(root: ir.Node, matched: AxisOf) -> tuple[ir.Node, Array] | None:
    """Return the product with γ, and γ, of γ · ((x - mean) / root)."""
    quotient = _find_only_reader(root)
    if quotient is None or quotient.op_type != "Div" or quotient.inputs[1] is not root.outputs[0]:
        return None
    product = _find_only_reader(quotient)
    scale = _find_axis_operand(product, "Mul", quotient, matched)
    if product is None or scale is None or _match_centering(quotient.inputs[0]) != matched:
        return None
    return product, scale


def _match_reciprocal(root: ir.Node, matched: AxisOf) -> tuple[ir.Node, Array] | None:
    """Return the last product, and γ, of (x - mean) · (γ · (1 / root)), as JAX writes."""
    reciprocal = _find_only_reader(root)
    if reciprocal is None or reciprocal.op_type != "Reciprocal":
        return None
    factor = _find_only_reader(reciprocal)
    product = None if factor is None else _find_only_reader(factor)
    scale = _find_axis_operand(factor, "Mul", reciprocal, matched)
    if factor is None or product is None or product.op_type != "Mul" or scale is None:
        return None
    centered = product.inputs[product.inputs[0] is factor.outputs[0]]
    return (product, scale) if _match_centering(centered) == matched else None


def _insert_layer_norm(
    last: ir.Node,
    matched: AxisOf,
    epsilon: float,
    parameters: tuple[Array, Array | None],
    names: GraphNames,
) -> None:
    """Compute the result of a node by a LayerNormalization over an axis."""
    (data, axis), stem = matched, f"{last.name}/LayerNormalization"
    order = list(range(_count_axes(data)))
    order[axis], order[-1] = order[-1], order[axis]
    nodes: list[ir.Node] = []

    def append_node(kind: str, inputs: Sequence[ir.Value], **attributes: Any) -> ir.Value:
        node = ir.node(kind, inputs, attributes, name=names.reserve_name(f"{last.name}/{kind}"))
        node.outputs[0].name = names.reserve_name(f"{node.name}/result")
        nodes.append(node)
        return node.outputs[0]

    is_last = axis == len(order) - 1
    rows = data if is_last else append_node("Transpose", [data], perm=order)
    constants = zip(("scale", "shift"), parameters, strict=True)
    inputs = [names.add_constant(f"{stem}/{n}", a.ravel()) for n, a in constants if a is not None]
    result = append_node("LayerNormalization", [rows, *inputs], axis=-1, epsilon=epsilon)
    if not is_last:
        append_node("Transpose", [result], perm=order)
    _replace_result(last, nodes, names)


def _match_variance(value: ir.Value | None) -> AxisOf | None:
    """Return what a value is the variance of, by squares of differences or by moments."""
    value = _skip_views(value)
    moment = _match_moment(value)
    if moment is not None:
        centered = _match_centering(_match_square(moment[0]))
        return centered if centered is not None and centered[1] == moment[1] else None
    maximum = _match_producer(value, "Max")
    if maximum is not None:
        tensors = [operand for operand in maximum.inputs if _scalar_value(operand) != 0]
        value = _skip_views(tensors[0]) if len(tensors) == 1 else None
    difference = _match_producer(value, "Sub")
    if difference is None:
        return None
    of_squares = _match_moment(_skip_views(difference.inputs[0]))
    mean = _match_moment(_skip_views(_match_square(_skip_views(difference.inputs[1]))))
    if of_squares is None or mean is None:
        return None
    return mean if (_match_square(of_squares[0]), of_squares[1]) == mean else None


def _match_moment(value: ir.Value | None) -> AxisOf | None:
    """Return the tensor and the axis whose mean a value is, also as a sum times 1 / size."""
    node = _match_producer(value, "ReduceMean", "Mul", "Div")
    if node is None:
        return None
    sums = (_match_producer(operand, "ReduceSum") for operand in node.inputs)
    candidates = [node] if node.op_type == "ReduceMean" else sums
    reduction = next((candidate for candidate in candidates if candidate is not None), None)
    if reduction is None or (data := reduction.inputs[0]) is None or data.shape is None:
        return None
    operand = get_node_input(reduction, 1)
    stored = reduction.attributes.get_ints("axes", ())
    axes = stored if operand is None else get_constant_array(operand)
    if axes is None or len(axes) != 1:
        return None
    axis = int(axes[0]) % len(data.shape)
    if node is not reduction:
        size = data.shape[axis]
        factor = 1 / size if isinstance(size, int) else math.nan
        if _match_scaled_by(value, factor) is not reduction.outputs[0]:
            return None
    return data, axis


def _match_centering(value: ir.Value | None) -> AxisOf | None:
    """Return the tensor that a value is, less its mean over an axis."""
    node = _match_producer(value, "Sub")
    matched = None if node is None else _match_moment(_skip_views(node.inputs[1]))
    if node is None or matched is None or node.inputs[0] is not matched[0]:
        return None
    return matched if _is_column(node.inputs[1], matched) else None


def _is_column(value: ir.Value | None, matched: AxisOf) -> bool:
    """Whether a value has the shape of a tensor whose axis has one element."""
    data, axis = matched
    if value is None or value.shape is None or data.shape is None:
        return False
    column = list(data.shape)
    column[axis] = 1
    return list(value.shape) == column


def _match_square(value: ir.Value | None) -> ir.Value | None:
    """Return the tensor whose square a value is."""
    node = _match_producer(value, "Pow", "Mul")
    if node is None:
        return None
    is_square = node.inputs[0] is node.inputs[1]
    if node.op_type == "Pow":
        is_square = _scalar_value(node.inputs[1]) == 2
    return node.inputs[0] if is_square else None


def _match_producer(value: ir.Value | None, *kinds: str) -> ir.Node | None:
    """Return the node that computes a value, if of one of some op types."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type in kinds and not node.domain else None


def _sum_with_number(value: ir.Value | None) -> tuple[ir.Value | None, float | None]:
    """Return the tensor and the number whose sum a value is; None and None for other values."""
    node = _match_producer(value, "Add")
    for position, operand in enumerate(node.inputs if node is not None else ()):
        number = _scalar_value(operand)
        if node is not None and number is not None:
            return node.inputs[1 - position], number
    return None, None


def _skip_views(value: ir.Value | None) -> ir.Value | None:
    """Return the tensor that a value is with axes of size 1 added or removed."""
    while (node := _match_producer(value, *_VIEWS)) is not None:
        source = node.inputs[0]
        if source is None or value is None or _list_long_axes(source) != _list_long_axes(value):
            break
        value = source
    return value


def _list_long_axes(value: ir.Value) -> list[int | ir.SymbolicDim] | None:
    return None if value.shape is None else [size for size in value.shape if size != 1]


def _count_axes(value: ir.Value) -> int:
    return 0 if value.shape is None else len(value.shape)


def _find_axis_operand(
    node: ir.Node | None, kind: str, source: ir.Node, matched: AxisOf
) -> Array | None:
    """Return the constant, one number per index of an axis, that a node combines with a result."""
    if node is None or node.op_type != kind or node.domain:
        return None
    array = get_constant_array(node.inputs[node.inputs[0] is source.outputs[0]])
    data, axis = matched
    rank = _count_axes(data)
    if array is None or not rank or array.ndim > rank or data.shape is None:
        return None
    sizes = [1] * (rank - array.ndim) + list(array.shape)
    is_row = all(size == 1 for position, size in enumerate(sizes) if position != axis)
    return array if is_row and sizes[axis] == data.shape[axis] else None


# Masks


def _find_masks(program: ir.Model) -> Iterator[ir.Value]:
    """Yield the constants with large negative numbers that are added before a Softmax."""
    for value in program.graph.initializers.values():
        if not is_float32(value) or value.const_value is None or not value.const_value.size:
            continue
        if float(require_constant_array(value).min()) <= LEAST_MASK_VALUE and _reaches_softmax(
            value
        ):
            yield value


def _reaches_softmax(value: ir.Value) -> bool:
    waiting, seen = [value], set[ir.Value]()
    while waiting:
        current = waiting.pop()
        for use in current.uses():
            if use.node.domain or use.node.op_type not in _PASSING_MASKS:
                continue
            if use.node.op_type == "Softmax":
                return True
            new = [result for result in use.node.outputs if result not in seen]
            seen.update(new)
            waiting += new
    return False
