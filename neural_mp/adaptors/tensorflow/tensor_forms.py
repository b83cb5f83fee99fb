"""The forms a tensor exists in while a graph is converted: each is made once, when first needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.integer_encoding import Encoding
from neural_mp.adaptors.common.narrowing import narrowed
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.adaptors.tensorflow.integer_kernels import (
    U8,
    dequantize_node,
    quantize_node,
)
from neural_mp.adaptors.tensorflow.nodes import (
    TensorGraph,
    make_constant,
    make_node,
    node_of,
    plain,
)
from neural_mp.core.precision import Precision

#: The names of the forms, and what is put behind a tensor's name for them.
FP32, BF16, FP16, UINT8 = "fp32", "bf16", "fp16", "uint8"
DTYPES = {FP32: tf.float32, BF16: tf.bfloat16, FP16: tf.float16}
FORM_OF = {Precision.BF16: BF16, Precision.FP16: FP16}


@dataclass
class Forms:
    """Where every tensor of the untouched graph is to be found in the converted one.

    Attributes:
        source: the untouched graph.
        outputs: nodes whose FP32 form must bear their own name.
        encoding_of: how a tensor is stored in INT8.
        graph: the graph being written.
    """

    source: TensorGraph
    outputs: frozenset[str]
    encoding_of: Callable[[str], Encoding]
    graph: TensorGraph
    _found: dict[str, dict[str, str]] = field(default_factory=dict)
    _scalars: dict[float, str] = field(default_factory=dict)
    _counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("casts", "quantize", "dequantize"), 0)
    )

    @property
    def counts(self) -> ConversionCounts:
        """How many conversions were put in."""
        return ConversionCounts(**self._counts)

    def name_for(self, tensor: str, form: str) -> str:
        """What the node that has a tensor in a form is called."""
        if form == FP32 and tensor in self.outputs:
            return tensor
        return self.graph.unused(f"{tensor.replace(':', '/result_')}/{form}")

    def put(self, tensor: str, form: str, name: str) -> None:
        """Say that a tensor is there in a form, as the result of a node."""
        self._found.setdefault(tensor, {})[form] = name

    def scalar(self, value: float, name: str) -> str:
        """A constant number, shared by all who need the same."""
        value = float(np.float32(value))
        if value not in self._scalars:
            self._scalars[value] = self.constant(name, np.float32(value))
        return self._scalars[value]

    def constant(self, name: str, value: Any, dtype: tf.DType | None = None) -> str:
        """A new constant."""
        return self.graph.add(make_constant(self.graph.unused(name), value, dtype))

    def real(self, tensor: str, form: str = FP32) -> str:
        """A tensor in FP32, BF16 or FP16."""
        tensor = plain(tensor)
        found = self._found.get(tensor)
        if found is not None and form in found:
            return found[form]
        if found is None:
            if form == FP32:
                return tensor  # never converted: it is there under its own name
            value = self.source.constant(tensor)
            if value is not None:
                stored = narrowed(value, DTYPES[form].as_numpy_dtype)
                name = self.constant(f"{node_of(tensor)}/{form}", stored, DTYPES[form])
                self.put(tensor, form, name)
                self.put(tensor, FP32, tensor)
                return name
            found = {FP32: tensor}
            self._found[tensor] = found
        floating = [known for known in (FP32, BF16, FP16) if known in found]
        if floating:
            name = self._cast(tensor, found[floating[0]], floating[0], form)
        elif form == FP16:
            name = self._cast(tensor, self.real(tensor, FP32), FP32, form)
        else:
            name = self._dequantize(tensor, form)
        self.put(tensor, form, name)
        return name

    def stored(self, tensor: str) -> str:
        """A tensor in INT8: stored as uint8."""
        tensor = plain(tensor)
        found = self._found.get(tensor, {})
        if UINT8 not in found:
            name = self.name_for(tensor, UINT8)
            self.put(tensor, UINT8, self.stored_as(self.real(tensor), tensor, name))
        return self._found[tensor][UINT8]

    def is_stored(self, tensor: str) -> bool:
        """Whether a tensor is there in INT8 already."""
        return UINT8 in self._found.get(plain(tensor), {})

    def stored_as(self, real: str, tensor: str, name: str) -> str:
        """A tensor of the graph being written, in FP32, stored with the scale of `tensor`."""
        self._counts["quantize"] += 1
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
        unused = self.graph.unused(f"{name}/bits")
        return self.graph.add(make_node("Bitcast", unused, [stored], T=U8, type=tf.uint8))

    def clipped(self, name: str, op: str, stored: str, limit: int) -> str:
        """`Minimum` or `Maximum` of stored numbers, which have no such kernels themselves."""
        constant = self.constant(f"{name}/limit", np.uint8(limit))
        inputs = [self.bits(stored, name), constant]
        changed = self.graph.add(
            make_node(op, self.graph.unused(f"{name}/{op}"), inputs, T=tf.uint8)
        )
        return self.graph.add(
            make_node("Bitcast", self.graph.unused(name), [changed], T=tf.uint8, type=U8)
        )

    def _cast(self, tensor: str, name: str, before: str, after: str) -> str:
        self._counts["casts"] += 1
        return self.graph.add(
            make_node(
                "Cast",
                self.name_for(tensor, after),
                [name],
                SrcT=DTYPES[before],
                DstT=DTYPES[after],
                Truncate=False,
            )
        )

    def _dequantize(self, tensor: str, form: str) -> str:
        self._counts["dequantize"] += 1
        inputs = [self.stored(tensor), *self.limits(tensor)]
        return self.graph.add(dequantize_node(self.name_for(tensor, form), inputs, DTYPES[form]))
