"""Canonicalization of a graph before planning, numerically equal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from neural_mp.adaptors.onnxrt import constant_folding as folding
from neural_mp.adaptors.onnxrt.graph import edit
from neural_mp.adaptors.onnxrt.graph import opset as opsets
from neural_mp.adaptors.onnxrt.graph.edit import (
    GraphNames,
    get_constant_array,
    get_node_input,
    is_float32,
)
from neural_mp.adaptors.onnxrt.graph.opset import infer_tensor_types
from neural_mp.adaptors.onnxrt.graph.protos import hide_map_ops
from neural_mp.adaptors.onnxrt.graph.subgraphs import (
    hoist_loop_invariants,
    in_order,
    sink_constants,
)
from neural_mp.adaptors.onnxrt.kernels.ops import is_convolution
from neural_mp.adaptors.onnxrt.kernels.registry import can_quantize
from neural_mp.errors import ConversionError

logger = logging.getLogger(__name__)


def canonicalize_graph(program: ir.Model, folder: Path | None) -> list[str]:
    """Canonicalize a graph, in place, and return notes to the user.

    Raises:
        ConversionError: the opset cannot be converted.
    """
    _use_plain_domain(program)
    if program.functions:
        common.InlinePass()(program)
    common.RemoveInitializersFromInputsPass()(program)
    notes: list[str] = []
    opset = opsets.get_onnx_opset(program)
    if 0 < opset < opsets.LEAST_OPSET:
        opsets.raise_opset(program)
        notes.append(
            f"the model's opset {opset} was raised to {opsets.LEAST_OPSET}, the first with "
            f"quantization per channel and bfloat16"
        )
    elif not can_quantize(opset):
        _lower_opset(program)
        notes.append(
            f"the model's opset {opset} was lowered to {opsets.get_onnx_opset(program)}, the "
            "newest in which ONNX Runtime quantizes tensors"
        )
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(program)
    common.NameFixPass()(program)  # names may repeat across bodies
    common.LiftSubgraphInitializersToMainGraphPass()(program)
    _apply_rules(program.graph, {"Loop": hoist_loop_invariants, "Scan": hoist_loop_invariants})
    edit.name_nodes(program)
    _apply_rules(program.graph, dict.fromkeys(("Identity", "Dropout"), folding.remove_identity))
    infer_shapes(program)
    names = GraphNames(program.graph)
    _apply_rules(program.graph, {"CastLike": write_out_type})
    folding.fold_constants(program, names, folder)
    _apply_rules(program.graph, {"If": folding.fold_branch}, names)
    axes = {"Pad": pad_all_axes, "Resize": resize_all_axes}
    _apply_rules(program.graph, {"BatchNormalization": folding.fold_batch_norm, **axes}, names)
    if frame_convolutions(program, names):
        infer_shapes(program)
    common.RemoveUnusedNodesPass()(program)
    sink_constants(program)
    edit.name_nodes(program)
    return notes


def _apply_rules(
    graph: ir.Graph, rules: Mapping[str, Callable[..., None]], *names: GraphNames
) -> None:
    """Apply op type → rule to the ops of ONNX, those of bodies first."""
    for node in list(in_order(graph)):
        if not node.domain and node.op_type in rules:
            rules[node.op_type](node, *names)


def _use_plain_domain(program: ir.Model) -> None:
    """Replace the domain `ai.onnx` of operators by its alias, the empty domain."""
    version = program.graph.opset_imports.pop("ai.onnx", None)
    if version is not None:
        program.graph.opset_imports[""] = version
    for node in program.graph.all_nodes():
        if node.domain == "ai.onnx":
            node.domain = ""


def _lower_opset(program: ir.Model) -> None:
    """Lower the opset of a graph to the newest in which ONNX Runtime quantizes, in place.

    ONNX may be ahead of the kernels of ONNX Runtime. Often only the element types of an op changed.

    Raises:
        ConversionError: an op has another definition in the older opset.
    """
    current = opsets.get_onnx_opset(program)
    fitting = (opset for opset in range(current, opsets.LEAST_OPSET - 1, -1) if can_quantize(opset))
    newest = next(fitting, opsets.LEAST_OPSET)
    for node in program.graph.all_nodes():
        if not opsets.same_but_for_types(node, current, newest):
            raise ConversionError(
                f"ONNX Runtime has no quantization kernels for opset {current}, and opset {newest} "
                f"defines {node.op_type} differently"
            )
    program.graph.opset_imports[""] = newest


def infer_shapes(program: ir.Model) -> None:
    """Infer element types and shapes, as far as ONNX can."""
    try:
        with hide_map_ops(program):
            lists = _list_types(program)
            infer_tensor_types(program)
        for value, kind in lists:
            value.type = kind
    except Exception:
        # The underlying checker raises its own types; shapes are optional.
        logger.debug("shape inference failed", exc_info=True)


def with_sizes(program: ir.Model, sizes: Mapping[str, Sequence[int]]) -> ir.Model:
    """Return a copy with the shapes that follow from those of its inputs, as far as ONNX can.

    Shapes in a file are ignored: those of results may be left from another batch size.
    """
    program = program.clone()
    for node in program.graph:
        for result in node.outputs:
            result.shape = None
    for value in program.graph.inputs:
        size = sizes.get(str(value.name))
        if size is not None:
            value.shape = ir.Shape(size)
    infer_shapes(program)
    return program


def _list_types(program: ir.Model) -> list[tuple[ir.Value, ir.TypeProtocol]]:
    """Return the values that are sequences and optionals, with their types.

    The pass of onnx-ir treats every value as a tensor of its element type.
    """
    opset = opsets.get_onnx_opset(program)
    lists = any(value.type and not edit.is_tensor(value) for value in program.graph.inputs)
    if not lists and not any(opsets.gives_list(node, opset) for node in program.graph.all_nodes()):
        return []
    inferred = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(program)))
    pairs = []
    for graph, inferred_graph in zip(program.graphs(), inferred.graphs(), strict=True):
        typed = ir.convenience.create_value_mapping(inferred_graph)
        for name, value in ir.convenience.create_value_mapping(graph).items():
            kind = typed[name].type if name in typed else None
            if kind is not None and not edit.is_tensor(typed[name]):
                pairs.append((value, kind))
    return pairs


def write_out_type(node: ir.Node) -> None:
    """Replace a CastLike by a Cast if the type is known.

    The CastLike of a constant then becomes a constant: torch 2.6 exports zero biases as CastLike.
    """
    dtype = node.inputs[1].dtype if node.inputs[1] is not None else None
    if dtype is None:
        return
    node.op_type = "Cast"
    node.resize_inputs(1)
    node.attributes["to"] = ir.AttrInt64("to", int(dtype))


def pad_all_axes(node: ir.Node, names: GraphNames) -> None:
    """Pad explicitly on all axes, with no effect on the unnamed axes.

    ONNX Runtime runs integer convolutions with channels last; when moving the transposition past
    such an op, ONNX Runtime does not permute `axes`.
    """
    data = get_node_input(node, 0)
    if data is None or data.shape is None or get_node_input(node, 3) is None:
        return
    axes, amounts = get_constant_array(node.inputs[3]), get_constant_array(node.inputs[1])
    if axes is None or amounts is None:
        return
    whole = np.zeros((2, len(data.shape)), np.int64)
    whole[:, axes] = amounts.reshape(2, -1)
    node.replace_input_with(1, names.add_constant(f"{node.name}.pads", whole.reshape(-1)))
    node.resize_inputs(3)


def resize_all_axes(node: ir.Node, names: GraphNames) -> None:
    """Resize explicitly on all axes, for the reason of `pad_all_axes`."""
    data = get_node_input(node, 0)
    if data is None or data.shape is None or "axes" not in node.attributes:
        return
    rank, scales, region = (
        len(data.shape),
        get_constant_array(get_node_input(node, 2)),
        get_node_input(node, 1),
    )
    borders = get_constant_array(region)
    crops = node.attributes.get_string("coordinate_transformation_mode") == "tf_crop_and_resize"
    if scales is None or not scales.size or (crops and borders is None):
        return
    resized = list(node.attributes.get_ints("axes"))
    every = np.ones(rank, np.float32)
    every[resized] = scales
    node.replace_input_with(2, names.add_constant(f"{node.name}.scales", every))
    if crops and borders is not None:
        whole = np.repeat(np.array([[0], [1]], borders.dtype), rank, axis=1)
        whole[:, resized] = borders.reshape(2, -1)
        region = names.add_constant(f"{node.name}.roi", whole.reshape(-1))
    node.replace_input_with(1, region if crops else None)  # other modes ignore the region
    del node.attributes["axes"]


#: Shorter kernels gain nothing.
MIN_KERNEL = 32
#: Maximum number of strides per kernel: a frame is concatenated from as many parts.
MAX_PARTS = 8
_TO_THE_END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class _Framing:
    """A convolution that can become a matrix product.

    Attributes:
        weight: float32 [kernels, 1, length of a kernel].
        stride: distance of frames; divides the length of a kernel.
    """

    weight: np.ndarray
    stride: int

    @property
    def strides_per_kernel(self) -> int:
        """Number of strides per kernel."""
        return int(self.weight.shape[2]) // self.stride


def frame_convolutions(program: ir.Model, names: GraphNames) -> bool:
    """Convert long convolutions of one channel to products of frames; return whether there was one.

    The filter banks and short-time Fourier transforms at the start of speech models are such
    convolutions. ONNX Runtime multiplies narrow matrices for every sample; all frames of a batch in
    one product cost 94 µs instead of 324 µs (16 samples of 640 values, 258 kernels of 256 values,
    stride 128, one thread) and 14 µs instead of 26 µs for one sample. The product gets the name of
    the convolution. Results are equal up to the order of summation.
    """
    matches = [
        (node, framing) for node in in_order(program.graph) if (framing := _match_framing(node))
    ]
    for node, framing in matches:
        _replace_convolution(node, framing, names)
    return bool(matches)


def _match_framing(node: ir.Node) -> _Framing | None:
    if not is_convolution(node) or not is_float32(node.inputs[0]):
        return None
    weight = get_constant_array(node.inputs[1])
    if weight is None or weight.dtype != np.float32 or weight.ndim != 3 or weight.shape[1] != 1:
        return None
    attributes = node.attributes
    if attributes.get_int("group", 1) != 1 or any(attributes.get_ints("pads", ())):
        return None
    if attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    if any(step != 1 for step in attributes.get_ints("dilations", ())):
        return None
    (stride,) = attributes.get_ints("strides", None) or (1,)
    length = int(weight.shape[2])
    long_enough = length >= MIN_KERNEL and length % stride == 0 and length <= stride * MAX_PARTS
    return _Framing(weight, int(stride)) if long_enough else None


class _Writer:
    """New nodes that replace a node."""

    def __init__(self, node: ir.Node, names: GraphNames) -> None:
        self.nodes: list[ir.Node] = []
        self._stem, self._names = str(node.name), names

    def add_constant(self, suffix: str, array: np.ndarray) -> ir.Value:
        """Return a constant of the graph."""
        return self._names.add_constant(f"{self._stem}.{suffix}", array)

    def slice_bound(self, number: int) -> ir.Value:
        """Return a position in the format of Slice: int64 [1]."""
        return self.add_constant("bound", np.array([number]))

    def append_node(
        self, op: str, *inputs: ir.Value, name: str | None = None, **options: int | list[int]
    ) -> ir.Value:
        """Append a new node and return its result."""
        node = ir.node(
            op, inputs, options, name=name or self._names.reserve_name(f"{self._stem}/{op}")
        )
        node.outputs[0].name = self._names.reserve_name(f"{node.name}_result")
        self.nodes.append(node)
        return node.outputs[0]


def _replace_convolution(node: ir.Node, framing: _Framing, names: GraphNames) -> None:
    assert node.graph is not None
    signal, bias = node.inputs[0], get_node_input(node, 2)
    assert signal is not None
    writer = _Writer(node, names)
    frames = _slice_frames(writer, signal, framing)
    weight = writer.add_constant("weight_framed", np.ascontiguousarray(framing.weight[:, 0].T))
    result = writer.append_node("MatMul", frames, weight, name=str(node.name))
    if bias is not None:
        result = writer.append_node("Add", result, bias)
    result = writer.append_node("Transpose", result, perm=[0, 2, 1])
    node.name = names.reserve_name(f"{node.name}/replaced")
    ir.convenience.replace_nodes_and_values(
        node.graph, node, [node], writer.nodes, node.outputs, [result]
    )


def _slice_frames(writer: _Writer, signal: ir.Value, framing: _Framing) -> ir.Value:
    """Return the frames [batch, frames, length of a kernel] of a signal [batch, 1, length]."""
    axis, start = writer.slice_bound(2), writer.slice_bound(0)
    whole = writer.append_node(
        "Slice", signal, start, _floor_to_stride(writer, signal, framing.stride), axis
    )
    hops = writer.append_node(
        "Reshape", whole, writer.add_constant("hops", np.array([0, -1, framing.stride]))
    )
    if framing.strides_per_kernel == 1:
        return hops
    axis = writer.slice_bound(1)
    parts = []
    for first in range(framing.strides_per_kernel):
        behind = first + 1 - framing.strides_per_kernel
        end = writer.slice_bound(behind if behind else _TO_THE_END)
        parts.append(writer.append_node("Slice", hops, writer.slice_bound(first), end, axis))
    return writer.append_node("Concat", *parts, axis=2)


def _floor_to_stride(writer: _Writer, signal: ir.Value, stride: int) -> ir.Value:
    """Return the length of a signal, rounded down to a multiple of the stride, int64 [1]."""
    size = signal.shape[2] if signal.shape is not None else None
    if isinstance(size, int):
        return writer.slice_bound(size // stride * stride)
    length = writer.append_node(
        "Gather", writer.append_node("Shape", signal), writer.slice_bound(2)
    )
    step = writer.slice_bound(stride)
    return writer.append_node("Mul", writer.append_node("Div", length, step), step)
