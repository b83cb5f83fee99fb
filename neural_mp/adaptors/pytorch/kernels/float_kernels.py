"""FP32 layers in oneDNN's kernels with packed weights, which a plan requests op by op.

Own kernels of torch use MKL for dense layers, which is slow on processors of other vendors, and
reorder the weights of convolutions in every call. Activations are fused where that is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.common.kernels.fusion import FusionRules, Step, find_fusion_groups
from neural_mp.adaptors.pytorch.capture.module_capture import visit_nodes
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph import quantizable_ops as layers
from neural_mp.adaptors.pytorch.graph.fusion import (
    ACTIVATIONS,
    OVERWRITABLE,
    Group,
    match_activation,
    post_op_of,
)
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.kernels.kernel_probes import time_fastest_runs

aten = torch.ops.aten
mkldnn = torch.ops.mkldnn

#: The kernel's name in plans; see `FLOAT_KERNELS`.
ONEDNN = "onednn"
#: Key of `Node.meta` for the kernel that a plan requests for an op.
_KERNEL = "neural_mp_kernel"
_PACKED = {
    layers.CONVOLUTION: "mkldnn::_convolution_pointwise",
    layers.LINEAR: "mkldnn::_linear_pointwise",
}
#: The least speed-up, beyond the noise of the fastest runs.
_LEAST_GAIN = 1.05
#: Products of all layers below which calls take longer than the layers: about a millisecond.
_LEAST_PRODUCTS = 50_000_000
#: Ops whose result is in channels-last memory if all their images are.
_KEEPS_LAYOUT = frozenset(
    {
        *ACTIVATIONS,
        layers.ADD,
        layers.MAX_POOLING,
        layers.CONCATENATION,
        ops.dequantize,
        aten.mul.Tensor,
        aten.sigmoid.default,
        aten.hardsigmoid.default,
        aten.clone.default,
        aten.avg_pool2d.default,
        aten.dropout.default,
        aten.batch_norm.default,
    }
)
_Shapes = Mapping[Node, tuple[int, ...]]


class _PackedLayers(FusionRules[Node, Node]):
    """Fusion rules of the packed kernels: an activation, without sums."""

    def match_activation(self, group: Group) -> Step[Node, Node] | None:
        """Match an activation that the kernel has as a post-op."""
        return match_activation(group)


def _find_packable_groups(module: GraphModule) -> dict[Node, Group]:
    nodes = [n for n in module.graph.nodes if _is_packable(module, n)] if _has_kernels() else []
    return find_fusion_groups(nodes, _PackedLayers())


def _has_kernels() -> bool:
    return torch.backends.mkldnn.is_available() and all(
        torch._C._dispatch_has_kernel_for_dispatch_key(kernel, "MkldnnCPU")
        for kernel in _PACKED.values()
    )


def _is_packable(module: GraphModule, node: Node) -> bool:
    """Whether a node is a layer of constant FP32 weights whose input has a batch."""
    if node.op != "call_function" or node.target not in _PACKED:
        return False
    weight, x = fx.get_constant(module, node.args[1]), node.args[0]
    if weight is None or weight.dtype is not torch.float32 or not weight.numel():
        return False
    bias = fx.get_arguments(node)["bias"]
    if bias is not None and fx.get_constant(module, bias) is None:
        return False
    value = x.meta.get("val") if isinstance(x, Node) else None
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return False
    is_batched = value.ndim == 4 if node.target is layers.CONVOLUTION else value.ndim > 1
    return is_batched and value.device.type == "cpu"


def find_packable_ops(module: GraphModule) -> frozenset[str]:
    """Return the ops that packed kernels can compute: layers, and activations fused into them."""
    groups = _find_packable_groups(module).values()
    nodes = (node for group in groups for node in (group.head, *group.fused_ops))
    return frozenset(node.meta[fx.OP_NAME] for node in nodes if fx.OP_NAME in node.meta)


def mark_kernels(module: GraphModule, kernels: Mapping[str, str]) -> None:
    """Note in the portable graph the kernels that a plan requests, by op."""
    for name, node in fx.map_op_nodes(module).items():
        if kernels.get(name):
            node.meta[_KERNEL] = kernels[name]


def list_marked_kernels(module: GraphModule) -> dict[str, str]:
    """Return op → the kernel that a plan requested."""
    nodes = fx.map_op_nodes(module).items()
    return {name: node.meta[_KERNEL] for name, node in nodes if _KERNEL in node.meta}


def call_packed_kernels(module: GraphModule) -> None:
    """Call packed kernels instead of the marked layers, with the marked activations fused."""
    for layer, candidate in _find_packable_groups(module).items():
        if _KERNEL not in layer.meta:
            continue
        group = candidate.fused_prefix(lambda op: _KERNEL in op.meta)
        shape = tuple(map(fx.get_likely_size, layer.args[0].meta["val"].shape))
        call, packed, trailing = _pack_group(module, group, shape)
        weight = fx.add_constant(module, f"{layer.name}_packed", packed, group.tail)
        with module.graph.inserting_before(group.tail):
            bias = fx.get_arguments(layer)["bias"]
            result = module.graph.call_function(call, (layer.args[0], weight, bias, *trailing))
        result.meta = dict(group.tail.meta)
        result.meta[fx.OP_NAME] = layer.meta.get(fx.OP_NAME, layer.name)
        result.meta[fx.RESULT] = (fx.get_tensor_name(group.tail), None)
        group.tail.replace_all_uses_with(result)
    module.graph.eliminate_dead_code()
    _read_channels_last(module)


def _pack_group(
    module: GraphModule, group: Group, shape: tuple[int, ...]
) -> tuple[Any, torch.Tensor, tuple[Any, ...]]:
    """Return a kernel, the weight packed for inputs of a shape, and arguments after the bias."""
    layer, post_op = group.head, post_op_of(group.activation)
    weight = fx.get_constant(module, layer.args[1])
    assert weight is not None
    if layer.target is layers.LINEAR:
        packed = mkldnn._reorder_linear_weight(weight, max(1, math.prod(shape[:-1])))
        return mkldnn._linear_pointwise.default, packed, post_op
    stride, padding, dilation, groups = layers.convolution_geometry(layer)
    geometry = (padding, stride, dilation, groups)
    packed = mkldnn._reorder_convolution_weight(weight, *geometry, [max(1, size) for size in shape])
    return mkldnn._convolution_pointwise.default, packed, (*geometry, *post_op)


def _read_channels_last(module: GraphModule) -> None:
    """Convert the inputs of packed convolutions to channels-last memory, unless they are."""
    kernel = mkldnn._convolution_pointwise.default
    ready: set[Node] = set()
    for node in list(module.graph.nodes):
        if node.target is kernel and node.args[0] not in ready:
            with module.graph.inserting_before(node):
                ordered = module.graph.call_function(
                    aten.contiguous.default, (node.args[0],), {"memory_format": torch.channels_last}
                )
            ordered.meta["val"] = node.args[0].meta["val"]
            node.args = (ordered, *node.args[1:])
        is_ordered = node.target is kernel or node.target in OVERWRITABLE
        images = [source for source in node.all_input_nodes if source.op != "get_attr"]
        keeps_order = node.target in _KEEPS_LAYOUT and images and ready.issuperset(images)
        if is_ordered or keeps_order:
            ready.add(node)


def find_faster_kernels(
    model: TorchModel, inputs: object, op_names: Collection[str]
) -> dict[str, str]:
    """Return op → the packed kernel, for the ops that it computes faster."""
    shapes: dict[Node, tuple[int, ...]] = {}

    def record_shape(node: Node, run: Callable[[], Any]) -> Any:
        result = run()
        if isinstance(result, torch.Tensor):
            shapes[node] = tuple(result.shape)
        return result

    groups = {
        path: {
            layer: group.fused_prefix(lambda op: op.meta.get(fx.OP_NAME) in op_names)
            for layer, group in _find_packable_groups(part.portable).items()
            if layer.meta.get(fx.OP_NAME) in op_names
        }
        for path, part in model.parts.items()
    }
    if model.compiles or not any(groups.values()):
        return {}
    visit_nodes(model, record_shape, portable=True)(model.call(inputs))
    products = 0
    for layer in (layer for of_part in groups.values() for layer in of_part):
        weight = layer.args[1].meta["val"]
        # A layer that was not reached has no products.
        products += math.prod(shapes.get(layer, (0,))) * (weight.numel() // weight.shape[0])
    if products < _LEAST_PRODUCTS:
        return {}
    verdicts: dict[Hashable, tuple[bool, bool]] = {}
    with torch.no_grad():
        return {
            op: ONEDNN
            for path, of_part in groups.items()
            for op in _find_faster_ops(model.parts[path].portable, of_part, shapes, verdicts)
        }


def _find_faster_ops(
    module: GraphModule,
    groups: Mapping[Node, Group],
    shapes: _Shapes,
    verdicts: dict[Hashable, tuple[bool, bool]],
) -> Iterator[str]:
    """Measure each kind of layer once, in packed kernels and without."""
    for layer, group in groups.items():
        shape = shapes.get(layer.args[0], ())
        if not math.prod(shape):
            continue
        weight = tuple(layer.args[1].meta["val"].shape)
        rest = [arg for arg in layer.args[2:] if not isinstance(arg, Node)]
        act = group.activation.ops[0].target if group.activation else None
        kind = (layer.target, shape, weight, str(rest), act)
        if kind not in verdicts:
            verdicts[kind] = _compare_kernels(module, group, shape)
        is_packed, is_fused = verdicts[kind]
        if is_packed:
            yield layer.meta[fx.OP_NAME]
        if is_fused:
            yield from (op.meta[fx.OP_NAME] for op in group.fused_ops)


def _compare_kernels(
    module: GraphModule, group: Group, shape: tuple[int, ...]
) -> tuple[bool, bool]:
    """Return whether a packed kernel is faster, and whether with the activation fused."""
    layer, activation = group.head, group.activation
    x = torch.rand(shape)
    ordered = x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
    constants, keywords = torch.fx.map_arg(
        (layer.args[1:], layer.kwargs), lambda node: fx.get_constant(module, node)
    )
    bias = fx.get_constant(module, fx.get_arguments(layer)["bias"])

    def apply_activation(value: torch.Tensor) -> torch.Tensor:
        if activation is None:
            return value
        op = activation.ops[0]
        return op.target(value, *op.args[1:], **op.kwargs)

    unfused, weight, trailing = _pack_group(module, Group(layer), shape)
    variants: list[Callable[[], torch.Tensor]] = [
        lambda: apply_activation(layer.target(x, *constants, **keywords)),
        lambda: apply_activation(unfused(ordered, weight, bias, *trailing)),
    ]
    if activation is not None:
        fused, _, fused_trailing = _pack_group(module, group, shape)
        variants.append(lambda: fused(ordered, weight, bias, *fused_trailing))
    own, packed, *fused_seconds = time_fastest_runs(variants)
    best = min(packed, *fused_seconds) if fused_seconds else packed
    gains = own > _LEAST_GAIN * best
    return gains, gains and any(seconds < packed for seconds in fused_seconds)
