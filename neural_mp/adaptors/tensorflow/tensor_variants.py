"""The forms of tensors, as nodes of a TensorFlow graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.quant_params import Array
from neural_mp.adaptors.common.tensor_variants import BF16, FP16, FP32, UINT8, TensorVariants
from neural_mp.adaptors.tensorflow.integer_kernels import U8, dequantize_node, quantize_node
from neural_mp.adaptors.tensorflow.tensor_graph import (
    TensorGraph,
    make_node,
    node_of,
    plain,
)
from neural_mp.core.observations import Range
from neural_mp.core.quantization_flow import QuantizationFlow

DTYPES = {FP32: tf.float32, BF16: tf.bfloat16, FP16: tf.float16}


class Forms(TensorVariants[str]):
    """Where the tensors are, and what is put in for them.

    Attributes:
        source: the untouched graph.
        outputs: nodes whose FP32 form must bear their own name.
        graph: the graph being written; it begins with all nodes of the untouched one, whose names
            must stay free for what keeps its own.
        helpers: node put in → the op that it does a part of.
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
        """The tensor's own name."""
        return tensor

    def real(self, tensor: str, form: str = FP32) -> str:
        """A tensor in FP32, BF16 or FP16, whichever way its name is spelled."""
        return super().real(plain(tensor), form)

    def stored(self, tensor: str) -> str:
        """A tensor in uint8, whichever way its name is spelled."""
        return super().stored(plain(tensor))

    def name_for(self, tensor: str, form: str) -> str:
        """What the node that has a tensor in a form is called."""
        if form == FP32 and tensor in self.outputs:
            return tensor
        return self.graph.unused(f"{tensor.replace(':', '/result_')}/{form}")

    def scalar(self, value: float, name: str) -> str:
        """A constant number, shared by all who need the same."""
        value = float(np.float32(value))
        if value not in self._scalars:
            self._scalars[value] = self.graph.put_constant(name, np.float32(value))
        return self._scalars[value]

    def value_of(self, tensor: str) -> Array | None:
        """The value of a Const."""
        return self.source.constant(tensor)

    def constant_in(self, tensor: str, form: str, values: Array) -> str:
        """Another Const."""
        return self.graph.put_constant(f"{node_of(tensor)}/{form}", values, DTYPES[form])

    def cast(self, tensor: str, source: str, form: str) -> str:
        """A Cast."""
        self.count("casts")
        types = {"SrcT": DTYPES[source], "DstT": DTYPES[form]}
        inputs = [self.real(tensor, source)]
        name = self.name_for(tensor, form)
        return self.graph.add(make_node("Cast", name, inputs, **types, Truncate=False))

    def quantized(self, tensor: str, real: str) -> str:
        """A QuantizeV2."""
        return self.stored_as(real, tensor, self.name_for(tensor, UINT8))

    def dequantized(self, tensor: str, form: str) -> str:
        """A Dequantize."""
        self.count("dequantize")
        inputs = [self.stored(tensor), *self.limits(tensor)]
        return self.graph.add(dequantize_node(self.name_for(tensor, form), inputs, DTYPES[form]))

    def stored_as(self, real: str, tensor: str, name: str) -> str:
        """A tensor of the graph being written, in FP32, stored with the scale of `tensor`."""
        self.count("quantize")
        return self.graph.add(quantize_node(name, [real, *self.limits(tensor)]))

    def limits(self, tensor: str) -> list[str]:
        """The range a quantize or dequantize node is given."""
        encoding = self.encoding_of(tensor)
        stem = node_of(tensor)
        return [
            self.scalar(encoding.low, f"{stem}/low"),
            self.scalar(encoding.high, f"{stem}/high"),
        ]

    def bits(self, stored: str, name: str) -> str:
        """Stored numbers as plain uint8, for which every op that moves values has a kernel."""
        return self.graph.put("Bitcast", f"{name}/bits", [stored], T=U8, type=tf.uint8)

    def clipped(self, name: str, op: str, stored: str, limit: int) -> str:
        """`Minimum` or `Maximum` of stored numbers, which have no such kernels themselves."""
        constant = self.graph.put_constant(f"{name}/limit", np.uint8(limit))
        inputs = [self.bits(stored, name), constant]
        changed = self.graph.put(op, f"{name}/{op}", inputs, T=tf.uint8)
        return self.graph.put("Bitcast", name, [changed], T=tf.uint8, type=U8)
