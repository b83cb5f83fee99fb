"""Canonicalization of a graph before planning, numerically equal."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from neural_mp.adaptors.onnxrt import constant_folding
from neural_mp.adaptors.onnxrt import graph_edit as edit
from neural_mp.adaptors.onnxrt import opset as opsets
from neural_mp.adaptors.onnxrt.conv_framing import frame_convolutions
from neural_mp.adaptors.onnxrt.kernel_registry import quantizes
from neural_mp.adaptors.onnxrt.map_types import hidden_maps
from neural_mp.adaptors.onnxrt.subgraphs import (
    hoist_invariants,
    in_order,
    lift_constants,
    sink_constants,
)
from neural_mp.errors import ConversionError

logger = logging.getLogger(__name__)


def prepare(program: ir.Model, folder: Path | None) -> list[str]:
    """Canonicalize a graph, in place, and return notes to the user.

    Functions are inlined, unsupported opsets changed, constants collected, states that no step of a
    loop changes read from outside, names made unique, shapes inferred, identities removed, batch
    norms folded, and long convolutions of one channel become matrix products.

    Raises:
        ConversionError: the opset cannot be converted.
    """
    _use_plain_domain(program)
    if program.functions:
        common.InlinePass()(program)
    common.RemoveInitializersFromInputsPass()(program)
    notes: list[str] = []
    opset = opsets.opset_of(program)
    if 0 < opset < opsets.LEAST_OPSET:
        opsets.raise_opset(program)
        notes.append(
            f"the model's opset {opset} was raised to {opsets.LEAST_OPSET}, the first with "
            f"quantization per channel and bfloat16"
        )
    elif not quantizes(opset):
        _lower_opset(program)
        notes.append(
            f"the model's opset {opset} was lowered to {opsets.opset_of(program)}, the newest in "
            f"which ONNX Runtime quantizes tensors"
        )
    lift_constants(program)
    hoist_invariants(program)
    edit.name_nodes(program)
    for node in list(in_order(program.graph)):
        constant_folding.remove_identity(node)
    infer_shapes(program)
    names = edit.GraphNames(program.graph)
    for node in in_order(program.graph):
        write_out_type(node)
    constant_folding.fold_constants(program, names, folder)
    for node in list(in_order(program.graph)):
        constant_folding.fold_branch(node, names)
    for node in list(in_order(program.graph)):
        constant_folding.fold_batch_norm(node, names)
        write_out_axes(node, names)
    if frame_convolutions(program, names):
        infer_shapes(program)
    common.RemoveUnusedNodesPass()(program)
    sink_constants(program)
    edit.name_nodes(program)
    return notes


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
    current = opsets.opset_of(program)
    fitting = (opset for opset in range(current, opsets.LEAST_OPSET - 1, -1) if quantizes(opset))
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
        with hidden_maps(program):
            lists = _list_types(program)
            common.ShapeInferencePass(check_type=False, strict_mode=False)(program)
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
    opset = opsets.opset_of(program)
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
    if node.op_type != "CastLike" or node.domain or node.inputs[1] is None:
        return
    dtype = node.inputs[1].dtype
    if dtype is None:
        return
    node.op_type = "Cast"
    node.resize_inputs(1)
    node.attributes["to"] = ir.AttrInt64("to", int(dtype))


def write_out_axes(node: ir.Node, names: edit.GraphNames) -> None:
    """Pad or resize explicitly on all axes, with no effect on the unnamed axes.

    ONNX Runtime runs integer convolutions with channels last; when moving the transposition past
    such an op, ONNX Runtime does not permute `axes`.
    """
    shape = node.inputs[0].shape if node.inputs and node.inputs[0] is not None else None
    if shape is None or not has_axes(node):
        return
    rank = len(shape)
    if node.op_type == "Pad":
        axes, amounts = edit.array_of(node.inputs[3]), edit.array_of(node.inputs[1])
        if axes is None or amounts is None:
            return
        whole = np.zeros((2, rank), np.int64)
        whole[:, axes] = amounts.reshape(2, -1)
        node.replace_input_with(1, names.constant(f"{node.name}.pads", whole.reshape(-1)))
        node.resize_inputs(3)
        return
    scales = edit.array_of(edit.input_of(node, 2))
    region = edit.input_of(node, 1)
    borders = edit.array_of(region)
    crops = node.attributes.get_string("coordinate_transformation_mode") == "tf_crop_and_resize"
    if scales is None or not scales.size or (crops and borders is None):
        return
    resized = list(node.attributes.get_ints("axes"))
    every = np.ones(rank, np.float32)
    every[resized] = scales
    node.replace_input_with(2, names.constant(f"{node.name}.scales", every))
    if crops and borders is not None:
        whole = np.repeat(np.array([[0], [1]], borders.dtype), rank, axis=1)
        whole[:, resized] = borders.reshape(2, -1)
        region = names.constant(f"{node.name}.roi", whole.reshape(-1))
    node.replace_input_with(1, region if crops else None)  # other modes ignore the region
    del node.attributes["axes"]


def has_axes(node: ir.Node) -> bool:
    """Whether an op pads or resizes only the axes in its `axes`."""
    if node.op_type == "Pad":
        return edit.input_of(node, 3) is not None
    return node.op_type == "Resize" and "axes" in node.attributes
