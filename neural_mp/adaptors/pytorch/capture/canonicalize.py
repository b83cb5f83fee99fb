"""Canonical form of a captured graph: no-ops removed, batch norms folded, ops named.

`build_graph` returns the framework-independent graph of its ops, with fusion groups of integer
kernels.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.kernels.fusion import Affine
from neural_mp.adaptors.common.naming import reserve_name
from neural_mp.adaptors.pytorch.capture.graph_capture import ENCLOSED, Enclosed
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import quantizable_ops as layers
from neural_mp.adaptors.pytorch.graph.casts import PRECISIONS
from neural_mp.adaptors.pytorch.graph.fusion import map_fused_layers
from neural_mp.adaptors.pytorch.graph.model import WHOLE, TorchModel
from neural_mp.adaptors.pytorch.graph.qdq_ops import register_op
from neural_mp.adaptors.pytorch.graph.quantizable_ops import quantize_agnostic
from neural_mp.core.graph import MIN_CONSTANT_ELEMENTS, Layer, Op, OpGraph
from neural_mp.core.precision import Precision
from neural_mp.util.pytree import convert_to_numpy

aten = torch.ops.aten

#: Convolution with a named padding → convolution with numeric padding.
_NAMED_PADDING = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}
#: Maximum growth of a constant relative to its sources when folded.
_GROWTH_LIMIT = 2


def simplify_graph(module: GraphModule) -> None:
    """Canonicalize constants, contractions and padding of a functional graph in place."""
    _fold_constants(module)
    rewriter = _DenseRewriter(module)
    for node in list(module.graph.nodes):
        if node.target in _NAMED_PADDING:
            _make_padding_numeric(node)
        elif node.target is aten.pad.default:
            _pad_with_constants(node)
        rewriter.rewrite_node(node)
    for node in list(module.graph.nodes):
        if node.target in layers.CONVOLUTIONS:
            _fold_padding(node)


def _fold_constants(module: GraphModule) -> None:
    for node in list(module.graph.nodes):
        sources = node.all_input_nodes
        if node.op != "call_function" or not sources or not hasattr(node.target, "tags"):
            continue
        values = {source: fx.get_constant(module, source) for source in sources}
        if torch.Tag.nondeterministic_seeded in node.target.tags or None in values.values():
            continue
        readers = _list_tensor_readers(node)
        if readers is None:
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        result: Any = node.target(*args, **kwargs)
        size = sum(value.numel() for value in values.values() if value is not None)
        tensors = [result if index is None else result[index] for index in readers.values()]
        if any(tensor.numel() > _GROWTH_LIMIT * size for tensor in tensors):
            continue
        for reader, tensor in zip(readers, tensors, strict=True):
            name = f"{reader.name}_constant"
            reader.replace_all_uses_with(fx.add_constant(module, name, tensor.contiguous(), node))
            module.graph.erase_node(reader)
        if node not in readers:
            module.graph.erase_node(node)


def _list_tensor_readers(node: Node) -> dict[Node, int | None] | None:
    """Return the nodes that hold an op's tensors, each with its index among several results.

    None if a result is no tensor.
    """
    if isinstance(node.meta.get("val"), torch.Tensor):
        return {node: None}
    if not node.users or any(user.target is not operator.getitem for user in node.users):
        return None
    readers: dict[Node, int | None] = {user: int(str(user.args[1])) for user in node.users}
    is_tensor = all(isinstance(reader.meta.get("val"), torch.Tensor) for reader in readers)
    return readers if is_tensor else None


class _DenseRewriter:
    """Rewriter of products with a constant matrix to dense layers; tied matrices stay tied."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.transposed: dict[str, str] = {}

    def rewrite_node(self, node: Node) -> None:
        """Rewrite `node` to a dense layer if the second factor is constant."""
        bias: Any = None
        if node.target is aten.addmm.default:
            bias, lhs, rhs = node.args
            value = fx.get_constant(self.module, bias)
            if node.kwargs or value is None or value.shape != node.meta["val"].shape[-1:]:
                return
        elif node.target in (aten.mm.default, aten.matmul.default):
            lhs, rhs = node.args
        else:
            return
        factor = fx.get_constant(self.module, rhs)
        if factor is None or factor.ndim != 2 or fx.get_constant(self.module, lhs) is not None:
            return
        weight = self._transpose_weight(rhs, factor, node)
        node.target = layers.LINEAR
        node.args = (lhs, weight, bias) if bias is not None else (lhs, weight)

    def _transpose_weight(self, source: Node, factor: torch.Tensor, next_node: Node) -> Node:
        name = str(source.target)
        if name in self.transposed:
            return fx.read_constant(self.module, self.transposed[name], next_node)
        values = factor.t().contiguous()
        weight = fx.add_constant(self.module, f"{source.name}_transposed", values, next_node)
        self.transposed[name] = str(weight.target)
        return weight


def _pad_with_constants(pad: Node) -> None:
    """Canonicalize constant padding; remove padding of zero width."""
    image, sides, mode, value = fx.get_arguments(pad).values()
    if mode != "constant":
        return
    if not any(sides) and not any(user.op == "output" for user in pad.users):
        pad.replace_all_uses_with(image)
        pad.graph.erase_node(pad)
        return
    pad.target = layers.PADDING
    pad.args, pad.kwargs = (image, sides, 0.0 if value is None else value), {}


def _make_padding_numeric(conv: Node) -> None:
    """Make `same` and `valid` padding numeric; pad before the layer if the two sides differ."""
    args, axes = fx.get_arguments(conv), layers.CONVOLUTIONS[_NAMED_PADDING[conv.target]]
    source, total = args["input"], [0] * axes
    if args["padding"] == "same":
        kernel = args["weight"].meta["val"].shape[2:]
        dilation = layers.expand_per_axis(args["dilation"], axes)
        total = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
    if any(size % 2 for size in total):
        sides = [side for size in reversed(total) for side in (size // 2, size - size // 2)]
        padded = aten.constant_pad_nd(source.meta["val"], sides)
        with conv.graph.inserting_before(conv):
            source = conv.graph.call_function(layers.PADDING, (source, sides, 0.0))
        source.meta = {**conv.meta, "val": padded}
        total = [0] * axes
    conv.target = _NAMED_PADDING[conv.target]
    fx.set_arguments(conv, input=source, padding=[size // 2 for size in total])


def _fold_padding(conv: Node) -> None:
    """Merge symmetric zero padding into the convolution."""
    args, axes = fx.get_arguments(conv), layers.CONVOLUTIONS[conv.target]
    if not isinstance(args["input"], Node) or args["input"].target is not layers.PADDING:
        return
    image, sides, value = fx.get_arguments(args["input"]).values()
    if value != 0 or len(sides) > 2 * axes:
        return
    sides = [*sides, *[0] * (2 * axes - len(sides))]
    low, high = sides[::2], sides[1::2]
    if low != high or not all(isinstance(side, int) and side >= 0 for side in sides):
        return
    own = layers.expand_per_axis(args["padding"], axes)
    padding = [mine + added for mine, added in zip(own, reversed(low), strict=True)]
    fx.set_arguments(conv, input=image, padding=padding)


#: Key of `Node.meta` for the module stacks of ops folded into a node.
FOLDED_STACKS = "neural_mp_folded_stacks"
#: Ops whose result depends on the memory layout of their input.
_OF_MEMORY = (aten.as_strided.default, aten.view_as_complex.default)


@torch.no_grad()
def canonicalize_graph(module: GraphModule, path: str = WHOLE) -> GraphModule:
    """Canonicalize a functional graph in place, numerically equal, and name its ops.

    The path of the captured module in the model is the prefix of the op names.
    """
    _drop_copies(module)
    views_to_reshapes(module)
    for node in module.graph.nodes:
        # A saved graph then needs no package besides this one and torch.
        if getattr(node.target, "_name", "") == _OF_TRANSFORMERS:
            node.target = grouped_product
    simplify_graph(module)
    _fold_batch_norms(module)
    fx.finish_graph(module)
    name_ops(module, path)
    return module


def _drop_copies(module: GraphModule) -> None:
    for node in list(module.graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)  # asserts the traced dtype, which plans change
        elif _is_identity_op(node) and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _is_identity_op(node: Node) -> bool:
    """Whether a node is an identity: a clone, or a cast to its input's dtype."""
    if node.target is aten.clone.default:
        return not node.kwargs
    if node.target is not aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return False
    return bool(node.args[0].meta["val"].dtype == node.kwargs["dtype"])


def drop_updates(module: GraphModule) -> list[str]:
    """Remove in-place updates of inputs and buffers; return one warning per buffer.

    Candidates share the buffers, and runs share the user's data, so neither may change.
    """
    warnings = []
    for node in list(module.graph.nodes):
        if node.target is aten.copy_.default and node.args[0].op in ("placeholder", "get_attr"):
            target = node.args[0]
            if target.op == "get_attr":
                warnings.append(dropped_update_warning(str(target.target)))
            node.replace_all_uses_with(node.args[1])
            module.graph.erase_node(node)
    return warnings


def dropped_update_warning(name: str) -> str:
    """Return the warning for a buffer whose updates converted models leave out."""
    return (
        f"buffer {name!r}, which the model updates in every run, keeps its value in converted "
        f"models"
    )


def views_to_reshapes(module: GraphModule) -> None:
    """Remove assumptions on memory order: converted kernels use channels last, unlike the trace."""
    for node in list(module.graph.nodes):
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        elif node.target in _OF_MEMORY and node.args[0].target is not aten.clone.default:
            with module.graph.inserting_before(node):
                ordered = module.graph.call_function(
                    aten.clone.default, node.args[:1], {"memory_format": torch.contiguous_format}
                )
            ordered.meta = dict(node.args[0].meta)
            node.update_arg(0, ordered)


def _fold_batch_norms(module: GraphModule) -> None:
    for norm in list(module.graph.nodes):
        if norm.target is not aten._native_batch_norm_legit_no_training.default:
            continue
        layer = norm.args[0]
        results = list(norm.users)
        if (
            layer.target in layers.INTEGER_LAYERS
            and len(layer.users) == 1
            and all(r.target is operator.getitem and r.args[1] == 0 for r in results)
            and all(
                part is None or fx.get_constant(module, part) is not None
                for part in layer.args[1:3]
            )
            and (layer.target is not layers.LINEAR or norm.meta["val"][0].ndim == 2)
        ):
            _fold_batch_norm(module, layer, norm)
            for result in results:
                result.replace_all_uses_with(layer)
                module.graph.erase_node(result)
            module.graph.erase_node(norm)


def _fold_batch_norm(module: GraphModule, layer: Node, norm: Node) -> None:
    normed = (fx.get_constant(module, argument) for argument in norm.args[1:5])
    weight, bias = (
        fx.get_constant(module, fx.get_arguments(layer)[name]) for name in ("weight", "bias")
    )
    assert weight is not None
    affine = Affine.identity(len(weight))
    if bias is not None:
        affine.then_add(convert_to_numpy(bias))
    parameters = [None if value is None else convert_to_numpy(value) for value in normed]
    affine.then_normalize(parameters, norm.args[6])
    # Axis 0 of a layer's weight is the output channel.
    values, scale = convert_to_numpy(weight), affine.scale.reshape(-1, *[1] * (weight.ndim - 1))
    # Rounding once suffices for float32; scaling in float64 would double the memory.
    scaled = np.empty_like(values) if weight.dtype == torch.float32 else None
    scaled = np.multiply(values, scale, out=scaled, casting="same_kind")
    fx.put_constant(module, layer, "weight", scaled)
    fx.put_constant(module, layer, "bias", affine.shift)
    layer.meta[FOLDED_STACKS] = (
        *layer.meta.get(FOLDED_STACKS, ()),
        norm.meta.get("nn_module_stack") or {},
    )


def name_ops(module: GraphModule, path: str = WHOLE) -> None:
    """Name every op after its module: `layer1.0.conv1`, or `layer1.0.add`."""
    nodes = [n for n in module.graph.nodes if n.op == "call_function" and fx.has_tensors(n)]
    paths: dict[Node, str] = {}
    for node in nodes:
        stack = node.meta.get("nn_module_stack") or {}
        paths[node] = _path_in_model(path, next(reversed(stack.values()))[0] if stack else "")
    counts = Counter(paths.values())
    # An op that is alone in its module takes precedence for the module's name.
    reserved = {full_path for full_path, count in counts.items() if full_path and count == 1}
    for node in nodes:
        full_path = paths[node]
        if full_path and counts[full_path] == 1:
            node.meta[fx.OP_NAME] = full_path
        else:
            node.meta[fx.OP_NAME] = reserve_name(
                f"{full_path}.{fx.get_op_type(node)}".lstrip("."), reserved, 2
            )
    for node in module.graph.nodes:
        if node.op == "placeholder":
            own = f"{path}.{node.name}" if path else node.name
            if own in reserved:
                own = reserve_name(f"{own}.input", reserved, 2)
            node.meta[fx.INPUT_NAME] = own


def _path_in_model(path: str, location: object) -> str:
    """Return the path of a module in the model, from those of the captured one and within it."""
    inner = str(location).removeprefix(ENCLOSED).removeprefix(".")
    return ".".join(filter(None, (path, inner)))


def _list_module_stacks(node: Node) -> tuple[dict[str, tuple[str, Any]], ...]:
    return node.meta.get("nn_module_stack") or {}, *node.meta.get(FOLDED_STACKS, ())


def list_source_modules(node: Node, path: str) -> tuple[str, ...]:
    """Return the paths of the module of an op, and of each op folded into it."""
    innermost = (next(reversed(stack.values()))[0] for stack in _list_module_stacks(node) if stack)
    return tuple(_path_in_model(path, location) for location in innermost)


def list_node_layers(node: Node, path: str) -> tuple[Layer, ...]:
    """Return the modules of an op and of ops folded into it, outer modules first."""
    modules: dict[Layer, None] = {}
    for stack in _list_module_stacks(node):
        for location, kind in stack.values():
            name = _path_in_model(path, location)
            class_name = kind if isinstance(kind, str) else kind.__qualname__
            if name and not class_name.endswith(f".{Enclosed.__name__}"):
                modules[Layer(name, class_name.rpartition(".")[2])] = None
    return tuple(modules)


#: Op of `transformers` with the same arguments, which files can only hold with its package.
_OF_TRANSFORMERS = "transformers::grouped_mm_fallback"


def _compute_grouped_product(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    product = rows.new_zeros(rows.shape[0], matrices.shape[2])
    start = 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        if start < end:
            torch.mm(rows[start:end], matrix, out=product[start:end])
            start = end
    return product


#: Rows [rows, inputs] sorted by expert, matrices [experts, inputs, outputs], and the end of the
#: rows of each expert [experts] to products [rows, outputs]; rows after the last end are zero.
grouped_product = register_op(
    "grouped_product(Tensor rows, Tensor matrices, Tensor ends) -> Tensor",
    _compute_grouped_product,
    lambda rows, matrices, ends: rows.new_empty(rows.shape[0], matrices.shape[2]),
)


def build_graph(model: TorchModel) -> OpGraph:
    """Build the graph of ops, edges and fusion groups from all parts of a model."""
    ops: list[Op] = []
    inputs: list[str] = []
    outputs: list[str] = []
    #: Address of a constant → its name, after the first op that reads it.
    names: dict[int, str] = {}
    for path, part in model.parts.items():
        module = part.portable
        heads = map_fused_layers(module)
        for name, node in fx.map_op_nodes(module).items():
            constants = list(fx.iterate_node_constants(module, node))
            op = Op(
                name,
                fx.get_op_type(node),
                _list_producer_names(node),
                heads.get(name),
                quantize_agnostic(node),
                weights=sum(tensor.numel() for tensor in constants),
                constants=tuple(
                    names.setdefault(tensor.data_ptr(), f"{name}:{len(names)}")
                    for tensor in constants
                    if tensor.numel() >= MIN_CONSTANT_ELEMENTS
                ),
                layers=list_node_layers(node, path),
                source_precision=_find_source_precision(node),
                widened=model.signature.dtype in PRECISIONS,
                shape=_get_output_shape(node),
            )
            ops.append(op)
        for node in module.graph.nodes:
            if node.op == "placeholder" and fx.has_tensors(node):
                inputs.append(fx.get_tensor_name(node))
            elif node.op == "output":
                outputs += _list_producer_names(node)
    return OpGraph(ops, inputs, outputs)


def _find_source_precision(node: Node) -> Precision:
    """Return the precision of the first float tensor that a node reads, else of its result."""
    values = (item.meta.get("val") for item in (*node.all_input_nodes, node))
    dtypes = (leaf.dtype for leaf in pytree.tree_leaves(tuple(values)) if fx.is_float(leaf))
    return PRECISIONS.get(next(dtypes, None), Precision.FP32)


def _get_output_shape(node: Node) -> tuple[int | None, ...] | None:
    """Return the sizes of the first tensor that a node returns, None for a free size."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    shape = next((leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    if shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in shape)


def _list_producer_names(node: Node) -> tuple[str, ...]:
    """Return the ops and graph inputs that a node reads, skipping conversions."""
    sources: dict[str, None] = {}
    for source in node.all_input_nodes:
        if source.op == "get_attr" or not fx.has_tensors(source):
            continue
        if source.op == "placeholder" or fx.OP_NAME in source.meta:
            sources[fx.get_tensor_name(source)] = None
        else:
            sources.update(dict.fromkeys(_list_producer_names(source)))
    return tuple(sources)
