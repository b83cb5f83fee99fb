"""What the integer kernel of a layer can take in with it, before a conversion and after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch import quantize_ops as ops
from neural_mp.adaptors.pytorch.layers import (
    ADD,
    CONVOLUTION,
    INTEGER_LAYERS,
    LINEAR,
    has_integer_kernel,
    is_computed,
)
from neural_mp.adaptors.pytorch.model import OP_NAME, op_nodes

aten = torch.ops.aten
onednn = torch.ops.onednn

_RELU = aten.relu.default
#: Activation → (oneDNN's name of it, kernels that take it as a post-op); measured, see
#: tests/adaptors/test_pytorch_kernels.py.
ACTIVATIONS: dict[Any, tuple[str, frozenset[Any]]] = {
    _RELU: ("relu", frozenset({aten.conv1d.default, CONVOLUTION, LINEAR})),
    aten.hardtanh.default: ("hardtanh", frozenset({CONVOLUTION, LINEAR})),
    aten.silu.default: ("swish", frozenset({CONVOLUTION, LINEAR})),
    aten.hardswish.default: ("hardswish", frozenset({CONVOLUTION, LINEAR})),
    aten.gelu.default: ("gelu", frozenset({LINEAR})),
    aten.tanh.default: ("tanh", frozenset({LINEAR})),
}
#: Kernels whose result is memory of their own, channels last, as a summing kernel overwrites it.
OVERWRITABLE = (onednn.qconv_pointwise.default, onednn.qconv2d_pointwise.binary)


def only_user(node: Node) -> Node | None:
    """The one node that reads a node's result; None if several do, or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_node(value: Any, *targets: Any) -> bool:
    """Whether a value is a call of one of `targets`."""
    return isinstance(value, Node) and value.target in targets


@dataclass(frozen=True)
class Kernel:
    """A layer and what its kernel does with it.

    Attributes:
        layer: the convolution or dense layer.
        addition: the residual addition; None without one.
        activation: the activation's node; None without one.
    """

    layer: Node
    addition: Node | None = None
    activation: Node | None = None

    @property
    def tail(self) -> Node:
        """The last op that the kernel takes in."""
        return self.activation or self.addition or self.layer

    @property
    def output(self) -> Node | None:
        """The quantize op behind it; None where the result is a float."""
        return quantizer(self.tail)

    @property
    def summand(self) -> Node:
        """The other term of the addition."""
        assert self.addition is not None
        first, second = self.addition.args
        return second if first is self.layer else first


def find_fusion_groups(module: GraphModule) -> dict[str, str]:
    """Op → the layer whose kernel can also do it: residual addition, then activation.

    Additions are of integers: behind a convolution over images.
    """
    heads: dict[str, str] = {}
    layers = [node for node in op_nodes(module).values() if has_integer_kernel(module, node)]
    # The later of two layers that meet in an addition takes it: the other's result is ready then.
    for layer in reversed(layers):
        addition = _addition(layer) if layer.target is CONVOLUTION else None
        if addition is not None and addition.meta[OP_NAME] in heads:
            addition = None
        for member in (addition, _activation(layer, addition)):
            if member is not None:
                heads[member.meta[OP_NAME]] = layer.meta[OP_NAME]
    return heads


def match(layer: Node) -> Kernel:
    """All that the kernel of a layer with quantized inputs can take in."""
    addition = _addition(layer)
    if addition is not None:
        kernel = Kernel(layer, addition, _activation(layer, addition))
        if _adds(kernel):
            return kernel
    return Kernel(layer, None, _activation(layer, None))


def _addition(layer: Node) -> Node | None:
    """The addition behind a layer, if it is of two different computed tensors of one shape."""
    addition = only_user(layer)
    if layer.target not in (CONVOLUTION, LINEAR) or addition is None:
        return None
    if addition.target is not ADD or addition.kwargs:
        return None
    first, second = addition.args
    if not is_computed(first) or not is_computed(second) or first is second:
        return None
    return addition if _shape(first) == _shape(second) else None


def _shape(node: Node) -> tuple[str, ...]:
    return tuple(map(str, node.meta["val"].shape))


def _activation(layer: Node, addition: Node | None) -> Node | None:
    """The activation behind a layer, or behind its addition, if a kernel can do both."""
    activation = only_user(addition or layer)
    if activation is None or activation.target not in ACTIVATIONS:
        return None
    if addition is not None and activation.target is not _RELU:
        return None
    return activation if layer.target in ACTIVATIONS[activation.target][1] else None


def quantizer(tail: Node) -> Node | None:
    """The quantize op that alone reads a node's result."""
    user = only_user(tail)
    return user if is_node(user, ops.quantize) else None


def _adds(kernel: Kernel) -> bool:
    """Whether a kernel can do its addition.

    A convolution adds in place: where both its other term and its result are uint8, or where both
    are float32 and nothing else reads the term. A dense layer takes any float32 term.
    """
    if kernel.summand.meta["val"].dtype is not torch.float32:
        return False
    if kernel.layer.target is LINEAR:
        return is_node(kernel.layer.args[0], ops.dequantize)
    if kernel.output is not None:
        return is_node(kernel.summand, ops.dequantize)
    return _is_own_float(kernel.summand)


def _is_own_float(summand: Node) -> bool:
    """Whether a float term is fresh memory, channels last, that only the addition reads."""
    readers = [user for user in summand.users if not _reads_integers(user, summand)]
    if len(readers) > 1:
        return False
    if is_node(summand, ops.dequantize):
        return summand.args[0].target in OVERWRITABLE and summand.args[3] is torch.float32
    return summand.target in OVERWRITABLE


def _reads_integers(layer: Node, source: Node) -> bool:
    """Whether a layer will read the integers that `source` is made of, not its floats."""
    return (
        layer.target in INTEGER_LAYERS
        and layer.args[0] is source
        and is_node(source, ops.dequantize)
        and is_node(layer.args[1], ops.dequantize_weight)
    )
