"""Variants of tensors as nodes of a TensorFlow graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.named_graphs.tensor_variants import (
    BF16,
    FP16,
    FP32,
    UINT8,
    TensorVariants,
)
from neural_mp.adaptors.common.quant_params import Array
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    TensorGraph,
    make_node,
    node_of,
    plain,
)
from neural_mp.adaptors.tensorflow.kernels.integer_kernels import U8, dequantize_node, quantize_node
from neural_mp.core.observations import Range
from neural_mp.core.quantization_flow import QuantizationFlow

DTYPES = {FP32: tf.float32, BF16: tf.bfloat16, FP16: tf.float16}


class Forms(TensorVariants[str]):
    """Variants of tensors in the graph being written.

    Attributes:
        source: original graph.
        outputs: nodes whose FP32 variant must keep their name.
        graph: graph being written; starts with all nodes of the original, whose names are
            reserved for nodes that keep theirs.
        helpers: added node → the op it implements a part of.
    """

    dequantized_to: ClassVar[tuple[str, ...]] = (FP32, BF16)

    def __init__(
        self,
        source: TensorGraph,
        outputs: frozenset[str],
        flow: QuantizationFlow,
        ranges: Mapping[str, Range],
    ) -> None:
        super().__init__(flow, ranges)
        self.source, self.outputs, self.graph = source, outputs, source.copy()
        self.helpers: dict[str, str] = {}
        self._scalars: dict[float, str] = {}

    def name_of(self, tensor: str) -> str:
        """Return the tensor's own name."""
        return tensor

    def real(self, tensor: str, variant: str = FP32) -> str:
        """Return a tensor in FP32, BF16 or FP16, given its name with or without `:0`."""
        return super().real(plain(tensor), variant)

    def stored(self, tensor: str) -> str:
        """Return a tensor in uint8, given its name with or without `:0`."""
        return super().stored(plain(tensor))

    def name_for(self, tensor: str, variant: str) -> str:
        """Return the name of the node with a variant of a tensor."""
        if variant == FP32 and tensor in self.outputs:
            return tensor
        return self.graph.unused(f"{tensor.replace(':', '/result_')}/{variant}")

    def scalar(self, value: float, name: str) -> str:
        """Return a scalar constant, shared by all nodes that need the value."""
        value = float(np.float32(value))
        if value not in self._scalars:
            self._scalars[value] = self.graph.put_constant(name, np.float32(value))
        return self._scalars[value]

    def value_of(self, tensor: str) -> Array | None:
        """Return the value of a Const; None for a computed tensor."""
        return self.source.constant(tensor)

    def constant_in(self, tensor: str, variant: str, values: Array) -> str:
        """Add a Const."""
        return self.graph.put_constant(f"{node_of(tensor)}/{variant}", values, DTYPES[variant])

    def cast(self, tensor: str, source: str, variant: str) -> str:
        """Add a Cast."""
        self.count("casts")
        types = {"SrcT": DTYPES[source], "DstT": DTYPES[variant]}
        inputs = [self.real(tensor, source)]
        name = self.name_for(tensor, variant)
        return self.graph.add(make_node("Cast", name, inputs, **types, Truncate=False))

    def quantized(self, tensor: str, real: str) -> str:
        """Add a QuantizeV2."""
        return self.stored_as(real, tensor, self.name_for(tensor, UINT8))

    def dequantized(self, tensor: str, variant: str) -> str:
        """Add a Dequantize."""
        self.count("dequantize")
        inputs = [self.stored(tensor), *self.limits(tensor)]
        return self.graph.add(
            dequantize_node(self.name_for(tensor, variant), inputs, DTYPES[variant])
        )

    def stored_as(self, real: str, tensor: str, name: str) -> str:
        """Quantize an FP32 tensor of the graph being written with the scale of `tensor`."""
        self.count("quantize")
        return self.graph.add(quantize_node(name, [real, *self.limits(tensor)]))

    def limits(self, tensor: str) -> list[str]:
        """Return the range for a quantize or dequantize node."""
        encoding = self.encoding_of(tensor)
        stem = node_of(tensor)
        return [
            self.scalar(encoding.low, f"{stem}/low"),
            self.scalar(encoding.high, f"{stem}/high"),
        ]

    def bits(self, stored: str, name: str) -> str:
        """Cast quantized values to plain uint8, which all ops that move values support."""
        return self.graph.put("Bitcast", f"{name}/bits", [stored], T=U8, type=tf.uint8)

    def clipped(self, name: str, op: str, stored: str, limit: int) -> str:
        """Apply `Minimum` or `Maximum`, which lack quantized kernels, to a quantized tensor."""
        constant = self.graph.put_constant(f"{name}/limit", np.uint8(limit))
        inputs = [self.bits(stored, name), constant]
        changed = self.graph.put(op, f"{name}/{op}", inputs, T=tf.uint8)
        return self.graph.put("Bitcast", name, [changed], T=tf.uint8, type=U8)
