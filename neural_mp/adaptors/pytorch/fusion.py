"""What the integer kernel of a layer can take in with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from neural_mp.adaptors.pytorch import quantize_ops as ops
from neural_mp.adaptors.pytorch.graph import (
    ACTIVATIONS,
    INTEGER_LAYERS,
    LINEAR,
    is_addition,
)
from neural_mp.adaptors.pytorch.model import only_user

aten = torch.ops.aten
onednn = torch.ops.onednn

#: Kernels whose result is memory of their own, channels last, as a summing kernel overwrites it.
OVERWRITABLE = (onednn.qconv_pointwise.default, onednn.qconv2d_pointwise.binary)


@dataclass(frozen=True)
class Kernel:
    """A layer and what its kernel does with it.

    Attributes:
        layer: the convolution or dense layer.
        tail: the last op it takes in.
        addition: the residual addition; None without one.
        summand: the other term of the addition.
        activation: the activation's node; None without one.
        output: the quantize op behind it; None where the result is a float.
    """

    layer: Node
    tail: Node
    addition: Node | None = None
    summand: Node | None = None
    activation: Node | None = None
    output: Node | None = None


def is_node(value: Any, target: Any) -> bool:
    """Whether a value is a call of `target`."""
    return isinstance(value, Node) and value.target is target


def match(layer: Node) -> Kernel:
    """All that the kernel of a layer can take in."""
    addition = only_user(layer)
    if addition is not None and is_addition(layer, addition):
        kernel = _with_addition(layer, addition)
        if kernel is not None:
            return kernel
    activation = _activation(layer, layer)
    tail = activation or layer
    return Kernel(layer, tail, activation=activation, output=quantizer(tail))


def quantizer(tail: Node) -> Node | None:
    """The quantize op that alone reads a node's result."""
    user = only_user(tail)
    return user if is_node(user, ops.quantize) else None


def _with_addition(layer: Node, addition: Node) -> Kernel | None:
    """A kernel that adds.

    A convolution adds in place: where both its other term and its result are uint8, or where both
    are float32 and nothing else reads the term. A dense layer takes any float32 term.
    """
    first, second = addition.args
    summand = second if first is layer else first
    if summand.meta["val"].dtype is not torch.float32:
        return None
    activation = _activation(addition, layer)
    if activation is not None and activation.target is not aten.relu.default:
        activation = None
    tail = activation or addition
    output = quantizer(tail)
    kernel = Kernel(layer, tail, addition, summand, activation, output)
    if layer.target is LINEAR:
        fits = is_node(layer.args[0], ops.dequantize)
    elif output is not None:
        fits = is_node(summand, ops.dequantize)
    else:
        fits = _is_own_float(summand)
    return kernel if fits else None


def _is_own_float(summand: Node) -> bool:
    """Whether a float term is fresh memory, channels last, that only the addition reads."""
    readers = [user for user in summand.users if not reads_integers(user, summand)]
    if len(readers) > 1:
        return False
    if is_node(summand, ops.dequantize):
        return summand.args[0].target in OVERWRITABLE and summand.args[3] is torch.float32
    return summand.target in OVERWRITABLE


def reads_integers(layer: Node, source: Node) -> bool:
    """Whether a layer will read the integers that `source` is made of, not its floats."""
    return (
        layer.target in INTEGER_LAYERS
        and layer.args[0] is source
        and is_node(source, ops.dequantize)
        and is_node(layer.args[1], ops.dequantize_weight)
    )


def _activation(node: Node, layer: Node) -> Node | None:
    user = only_user(node)
    if user is None or user.target not in ACTIVATIONS:
        return None
    return user if layer.target in ACTIVATIONS[user.target][1] else None
