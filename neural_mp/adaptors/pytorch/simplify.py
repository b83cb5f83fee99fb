"""Write the same computation as the layers that integer kernels exist for; numerically equal."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch.model import (
    add_constant,
    arguments,
    constant,
    read_constant,
    set_arguments,
)
from neural_mp.adaptors.pytorch.quantizable_ops import CONVOLUTIONS, LINEAR, PADDING, per_axis

aten = torch.ops.aten

#: Convolution whose padding is a word → the one whose padding is numbers.
_WORDED = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}
#: A constant may grow by this much when what computes it is run once.
_GROWTH_LIMIT = 2


def simplify(module: GraphModule) -> None:
    """Rewrite a functional graph in place."""
    _fold_constants(module)
    products = _Products(module)
    for node in list(module.graph.nodes):
        if node.target in _WORDED:
            _number_padding(node)
        elif node.target is aten.pad.default:
            _pad_with_constants(node)
        products.rewrite(node)
    for node in list(module.graph.nodes):
        if node.target in CONVOLUTIONS:
            _take_in_padding(node)


def _fold_constants(module: GraphModule) -> None:
    """Run once what reads constants only, such as a weight that is computed from others."""
    for node in list(module.graph.nodes):
        sources = node.all_input_nodes
        if node.op != "call_function" or not sources or not hasattr(node.target, "tags"):
            continue
        values = {source: constant(module, source) for source in sources}
        if torch.Tag.nondeterministic_seeded in node.target.tags or None in values.values():
            continue
        if not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        result: torch.Tensor = node.target(*args, **kwargs)
        size = sum(value.numel() for value in values.values() if value is not None)
        if result.numel() > _GROWTH_LIMIT * size:
            continue
        folded = add_constant(module, f"{node.name}_constant", result.contiguous(), node)
        node.replace_all_uses_with(folded)
        module.graph.erase_node(node)


class _Products:
    """Matrix products with a constant factor become dense layers; tied factors stay tied."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.transposed: dict[str, str] = {}

    def rewrite(self, node: Node) -> None:
        """Rewrite one node, if it is such a product."""
        bias: Any = None
        if node.target is aten.addmm.default:
            bias, left, right = node.args
            if node.kwargs or not _is_bias(self.module, bias, node):
                return
        elif node.target in (aten.mm.default, aten.matmul.default):
            left, right = node.args
        else:
            return
        factor = constant(self.module, right)
        if factor is None or factor.ndim != 2 or constant(self.module, left) is not None:
            return
        weight = self._transposed(right, factor, node)
        node.target = LINEAR
        node.args = (left, weight, bias) if bias is not None else (left, weight)

    def _transposed(self, source: Node, factor: torch.Tensor, before: Node) -> Node:
        name = str(source.target)
        if name in self.transposed:
            return read_constant(self.module, self.transposed[name], before)
        values = factor.t().contiguous()
        weight = add_constant(self.module, f"{source.name}_transposed", values, before)
        self.transposed[name] = str(weight.target)
        return weight


def _is_bias(module: GraphModule, bias: object, product: Node) -> bool:
    value = constant(module, bias)
    return value is not None and value.shape == product.meta["val"].shape[-1:]


def _pad_with_constants(pad: Node) -> None:
    """Padding with one value has an op of its own; with none at all it needs no op."""
    image, sides, mode, value = arguments(pad).values()
    if mode != "constant":
        return
    if not any(sides) and not any(user.op == "output" for user in pad.users):
        pad.replace_all_uses_with(image)
        pad.graph.erase_node(pad)
        return
    pad.target = PADDING
    pad.args, pad.kwargs = (image, sides, 0.0 if value is None else value), {}


def _number_padding(conv: Node) -> None:
    """`same` and `valid` in numbers; in front of the layer where the two sides differ."""
    said, axes = arguments(conv), CONVOLUTIONS[_WORDED[conv.target]]
    source, total = said["input"], [0] * axes
    if said["padding"] == "same":
        kernel = said["weight"].meta["val"].shape[2:]
        dilation = per_axis(said["dilation"], axes)
        total = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
    if any(size % 2 for size in total):
        sides = [side for size in reversed(total) for side in (size // 2, size - size // 2)]
        padded = aten.constant_pad_nd(source.meta["val"], sides)
        with conv.graph.inserting_before(conv):
            source = conv.graph.call_function(PADDING, (source, sides, 0.0))
        source.meta = {**conv.meta, "val": padded}
        total = [0] * axes
    conv.target = _WORDED[conv.target]
    set_arguments(conv, input=source, padding=[size // 2 for size in total])


def _take_in_padding(conv: Node) -> None:
    """Zeros put around an image on both sides alike are the convolution's own padding."""
    said, axes = arguments(conv), CONVOLUTIONS[conv.target]
    if not isinstance(said["input"], Node) or said["input"].target is not PADDING:
        return
    image, sides, value = arguments(said["input"]).values()
    if value != 0 or len(sides) > 2 * axes:
        return
    sides = [*sides, *[0] * (2 * axes - len(sides))]
    low, high = sides[::2], sides[1::2]
    if low != high or not all(isinstance(side, int) and side >= 0 for side in sides):
        return
    own = per_axis(said["padding"], axes)
    padding = [mine + added for mine, added in zip(own, reversed(low), strict=True)]
    set_arguments(conv, input=image, padding=padding)
