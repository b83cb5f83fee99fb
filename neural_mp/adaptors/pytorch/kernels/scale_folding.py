"""Scales of integer kernels, folded into the scales of their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.versions import INTEGER_CONVOLUTIONS

onednn = torch.ops.onednn

_SUMMING = onednn.qconv2d_pointwise.binary
_KERNELS = INTEGER_CONVOLUTIONS | {
    _SUMMING,
    onednn.qlinear_pointwise.default,
    onednn.qlinear_pointwise.binary,
}
#: Names of the argument for the activation.
_ACTIVATIONS = ("attr", "unary_attr", "post_op_name", "unary_post_op")


def fold_scales(module: GraphModule) -> None:
    """Multiply scales of inputs, and of outputs without activation, by those of the weights.

    oneDNN then has fewer factors to arrange in every call. Results equal the former ones up to
    FP32 rounding, before they are rounded to integers.
    """
    for node in list(module.graph.nodes):
        if node.target in _KERNELS:
            _fold(module, node)


def _fold(module: GraphModule, kernel: Node) -> None:
    arguments = fx.arguments(kernel)
    scales, name = fx.constant(module, arguments["w_scale"]), arguments["w_scale"].name
    assert scales is not None
    factors = scales * arguments["x_scale"]
    changes: dict[str, Any] = {"x_scale": 1.0}
    if _is_linear(arguments) and kernel.target is not onednn.qlinear_pointwise.binary:
        factors = factors / arguments["output_scale"]
        stored = fx.constant(module, arguments["bias"])
        bias = torch.zeros_like(scales) if stored is None else stored
        bias = bias.float() / arguments["output_scale"] + arguments["output_zero_point"]
        changes["bias"] = fx.add_constant(module, f"{name}_bias", bias, kernel)
        changes |= {"output_scale": 1.0, "output_zero_point": 0}
        if kernel.target is _SUMMING:
            changes["accum_scale"] = arguments["accum_scale"] / arguments["output_scale"]
    changes["w_scale"] = fx.add_constant(module, f"{name}_folded", factors, kernel)
    fx.set_arguments(kernel, **changes)


def _is_linear(given: dict[str, Any]) -> bool:
    """Whether a kernel writes integers and applies no activation."""
    applied = {given.get(name) for name in _ACTIVATIONS} - {None, "none"}
    return given["output_dtype"] is torch.uint8 and not applied
