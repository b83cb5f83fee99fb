"""Write the same computation as the layers that integer kernels exist for; numerically equal."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch.graph import CONVOLUTIONS, LINEAR, PADDING
from neural_mp.adaptors.pytorch.model import add_constant, constant

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
        if name not in self.transposed:
            weight = add_constant(
                self.module, f"{source.name}_transposed", factor.t().contiguous(), before
            )
            self.transposed[name] = str(weight.target)
            return weight
        with self.module.graph.inserting_before(before):
            again: Node = self.module.graph.get_attr(self.transposed[name])
        again.meta["val"] = constant(self.module, again)
        return again


def _is_bias(module: GraphModule, bias: Any, product: Node) -> bool:
    value = constant(module, bias)
    return value is not None and value.shape == product.meta["val"].shape[-1:]


def _pad_with_constants(pad: Node) -> None:
    """Padding with one value has an op of its own; with none at all it needs no op."""
    image, sides = pad.args[:2]
    mode = pad.args[2] if len(pad.args) > 2 else "constant"
    value = pad.args[3] if len(pad.args) > 3 else None
    if mode != "constant" or pad.kwargs:
        return
    if not any(sides) and not any(user.op == "output" for user in pad.users):
        pad.replace_all_uses_with(image)
        pad.graph.erase_node(pad)
        return
    pad.target, pad.args = PADDING, (image, sides, 0.0 if value is None else value)


def _number_padding(conv: Node) -> None:
    """`same` and `valid` in numbers; in front of the layer where the two sides differ."""
    words = dict(zip(("stride", "padding", "dilation", "groups"), conv.args[3:], strict=False))
    words.update(conv.kwargs)
    axes = CONVOLUTIONS[_WORDED[conv.target]]
    dilation = _each(words.get("dilation", 1), axes)
    kernel = conv.args[1].meta["val"].shape[2:]
    total = [0] * axes
    if words.get("padding", "valid") == "same":
        total = [d * (size - 1) for d, size in zip(dilation, kernel, strict=True)]
    source = conv.args[0]
    if any(size % 2 for size in total):
        sides = [side for size in reversed(total) for side in (size // 2, size - size // 2)]
        with conv.graph.inserting_before(conv):
            source = conv.graph.call_function(PADDING, (source, sides, 0.0))
            padded = conv.args[0].meta["val"]
            source.meta = {**conv.meta, "val": aten.constant_pad_nd(padded, sides)}
        total = [0] * axes
    bias = conv.args[2] if len(conv.args) > 2 else None
    conv.target = _WORDED[conv.target]
    conv.args = (
        source,
        conv.args[1],
        bias,
        _each(words.get("stride", 1), axes),
        [size // 2 for size in total],
        dilation,
        words.get("groups", 1),
    )
    conv.kwargs = {}


def _each(value: Any, axes: int) -> list[Any]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * axes if len(values) == 1 else values


def _take_in_padding(conv: Node) -> None:
    """Zeros put around an image on both sides alike are the convolution's own padding."""
    pad = conv.args[0]
    if not isinstance(pad, Node) or pad.target is not PADDING or conv.kwargs:
        return
    image, sides = pad.args[:2]
    axes = CONVOLUTIONS[conv.target]
    if (len(pad.args) > 2 and pad.args[2] != 0) or len(sides) > 2 * axes:
        return
    sides = [*sides, *[0] * (2 * axes - len(sides))]
    low, high = sides[::2], sides[1::2]
    if low != high or not all(isinstance(side, int) and side >= 0 for side in sides):
        return
    given = [*conv.args, *[None] * 7][:7]
    own = _each(given[4] or [0], axes)
    given[0] = image
    given[2:7] = [
        given[2],
        _each(given[3] or [1], axes),
        [mine + added for mine, added in zip(own, reversed(low), strict=True)],
        _each(given[5] or [1], axes),
        given[6] or 1,
    ]
    conv.args = tuple(given)
