"""The forms a tensor exists in while a graph is converted: each is made once, when first needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.integer_encoding import Encoding
from neural_mp.adaptors.common.narrowing import narrowed
from neural_mp.adaptors.common.signature import Array
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.adaptors.onnxrt.integer_encoding import StoredWeight
from neural_mp.adaptors.onnxrt.kernel_registry import CONTRIB
from neural_mp.adaptors.onnxrt.naming import constant, names_in, unused
from neural_mp.adaptors.onnxrt.sessions import array_of
from neural_mp.core.precision import Precision

FP32, BF16, FP16, UINT8 = "fp32", "bf16", "fp16", "uint8"
FORM_OF = {Precision.BF16: BF16, Precision.FP16: FP16}
DTYPES = {
    FP32: ir.DataType.FLOAT,
    BF16: ir.DataType.BFLOAT16,
    FP16: ir.DataType.FLOAT16,
    UINT8: ir.DataType.UINT8,
}
#: Stored in 16 bits, and made FP32 again for kernels that know nothing else.
WIDENED = "widened"
#: Stored in uint8, behind a DequantizeLinear that a kernel takes in.
_DEQUANTIZED = "dequantized"


@dataclass
class Forms:
    """Where every tensor of the untouched graph is to be found in the converted one.

    Attributes:
        graph: the graph being written.
        encoding_of: how a tensor is stored in uint8.
        place: the node being written: what it needs is put before it; None for the end.
        owner: the op that is being written.
        owners: new node → the op it was written for.
    """

    graph: ir.Graph
    encoding_of: Callable[[ir.Value], Encoding]
    place: ir.Node | None = None
    owner: str = ""
    owners: dict[str, str] = field(default_factory=dict)
    _found: dict[ir.Value, dict[str, ir.Value]] = field(default_factory=dict)
    _dynamic: dict[ir.Value, tuple[ir.Value, ...]] = field(default_factory=dict)
    _parameters: dict[Encoding, tuple[ir.Value, ir.Value]] = field(default_factory=dict)
    _moved_from: dict[ir.Value, ir.Value] = field(default_factory=dict)
    _names: set[str | None] = field(default_factory=set)
    _counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("casts", "quantize", "dequantize"), 0)
    )

    def __post_init__(self) -> None:
        self._names.update(names_in(self.graph))

    @property
    def counts(self) -> ConversionCounts:
        """How many conversions were put in."""
        return ConversionCounts(**self._counts)

    def put(self, tensor: ir.Value, form: str, value: ir.Value) -> None:
        """Say that a tensor is there in a form, and in no other yet."""
        self._found[tensor] = {form: value}

    def real(self, tensor: ir.Value, form: str = FP32) -> ir.Value:
        """A tensor in FP32, BF16 or FP16."""
        found = self._found.setdefault(tensor, {FP32: tensor})
        if form in found:
            # ONNX Runtime dequantizes anew for every op that reads a tensor so.
            self._counts["dequantize"] += found[form] is found.get(_DEQUANTIZED)
            return found[form]
        array = array_of(tensor)
        if array is not None:
            found[form] = self._constant_in(tensor, array, form)
        elif form != FP32:
            found[form] = self._cast(tensor, self.real(tensor), form)
        elif UINT8 in found:
            found[form] = self._dequantized(tensor, counted=True)
        else:
            found[form] = self.widened(tensor, next(f for f in (BF16, FP16) if f in found))
        return found[form]

    def widened(self, tensor: ir.Value, form: str) -> ir.Value:
        """A tensor rounded to 16 bits, and made FP32 again."""
        found = self._found.setdefault(tensor, {FP32: tensor})
        if f"{form} {WIDENED}" not in found:
            narrow = self.real(tensor, form)
            array = array_of(tensor)
            name = f"{tensor.name}/{form}/{FP32}"
            # ONNX Runtime computes the cast of a constant once, when it loads the model.
            wide = self._add("Cast", [narrow], name, FP32, {"to": int(DTYPES[FP32])})
            self._counts["casts"] += array is None
            found[f"{form} {WIDENED}"] = wide
        return found[f"{form} {WIDENED}"]

    def stored(self, tensor: ir.Value) -> ir.Value:
        """A tensor in uint8."""
        found = self._found.setdefault(tensor, {FP32: tensor})
        if UINT8 not in found:
            found[UINT8] = self.quantize(tensor, self.real(tensor))
            self._counts["quantize"] += 1
        return found[UINT8]

    def quantize(self, tensor: ir.Value, real: ir.Value, behind: ir.Node | None = None) -> ir.Value:
        """Store a real value with the scale of a tensor."""
        inputs = [real, *self.parameters(tensor)]
        return self._add("QuantizeLinear", inputs, f"{tensor.name}/{UINT8}", UINT8, behind=behind)

    def for_kernel(self, tensor: ir.Value) -> ir.Value:
        """A tensor in uint8, dequantized in name only: an integer kernel takes that in."""
        return self._dequantized(tensor, counted=False)

    def dynamic(self, tensor: ir.Value) -> tuple[ir.Value, ...]:
        """A tensor in uint8 with the range it has on this run: stored, scale, zero point."""
        if tensor not in self._dynamic:
            names = [f"{tensor.name}/dynamic_{part}" for part in ("stored", "scale", "zero_point")]
            outputs = [ir.val(self.name(name)) for name in names]
            node = ir.node("DynamicQuantizeLinear", [self.real(tensor)], outputs=outputs)
            self.insert(node, f"{tensor.name}/quantize")
            self._counts["quantize"] += 1
            self._dynamic[tensor] = tuple(outputs)
        return self._dynamic[tensor]

    def parameters(self, tensor: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The scale and zero point of a tensor, as constants."""
        encoding = self.encoding(tensor)
        if encoding not in self._parameters:
            scale = self.constant(f"{tensor.name}/scale", np.float32(encoding.scale))
            zero = self.constant(f"{tensor.name}/zero_point", np.uint8(encoding.zero_point))
            self._parameters[encoding] = scale, zero
        return self._parameters[encoding]

    def encoding(self, tensor: ir.Value) -> Encoding:
        """How a tensor is stored in uint8."""
        return self.encoding_of(self._moved_from.get(tensor, tensor))

    def put_moved(self, result: ir.Value, moved: ir.Value) -> None:
        """Say that an op that moves values has moved stored ones."""
        self.put(result, UINT8, result)
        self._moved_from[result] = self._moved_from.get(moved, moved)

    def constant(self, name: str, value: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """A new constant."""
        return constant(self.graph, self.name(name), np.asarray(value), dtype)

    def name(self, wanted: str) -> str:
        """A name that nothing has yet."""
        name = unused(wanted, self._names)
        self._names.add(name)
        return name

    def weight(self, stem: str, stored: StoredWeight) -> ir.Value:
        """A weight or bias in integers, dequantized in name only."""
        inputs = [
            self.constant(f"{stem}/{stored.integers.dtype}", stored.integers),
            self.constant(f"{stem}/scale", stored.scales),
            self.constant(f"{stem}/zero_point", stored.zero_points),
        ]
        name = f"{stem}/{_DEQUANTIZED}"
        return self._add("DequantizeLinear", inputs, name, FP32, {"axis": stored.axis})

    def replace(self, node: ir.Node, op: str, inputs: list[ir.Value], result: ir.Value) -> None:
        """Put an op of ONNX Runtime's own in the place of a node, its result in that of another."""
        written = ir.val(self._moved_aside(result), DTYPES[FP32])
        name = str(node.name)
        node.name = self.name(f"{name}/{FP32}")
        self._names.discard(name)
        self.insert(ir.node(op, inputs, domain=CONTRIB, outputs=[written]), name)
        self.put(result, FP32, written)

    def _moved_aside(self, value: ir.Value) -> str:
        """The name of a value that is to be replaced; outputs of the graph keep theirs for now."""
        name = str(value.name)
        if value.is_graph_output():
            return self.name(f"{name}/{FP32}")
        value.name = self.name(f"{name}/before")
        return name

    def put_rounded(self, result: ir.Value, form: str) -> None:
        """Say that a tensor is the result of an op in FP32, rounded to 16 bits."""
        self._counts["casts"] += 1
        to = {"to": int(DTYPES[form])}
        name = f"{result.name}/{form}"
        behind = result.producer()
        self.put(result, form, self._add("Cast", [result], name, form, to, behind=behind))

    def insert(self, node: ir.Node, name: str, behind: ir.Node | None = None) -> None:
        """Put a new node in its place, or right behind another."""
        node.name = self.name(name)
        if node.name != self.owner:
            self.owners[node.name] = self.owner
        if behind is not None:
            self.graph.insert_after(behind, node)
        elif self.place is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.place, node)

    def _add(
        self,
        op: str,
        inputs: list[ir.Value],
        name: str,
        form: str,
        attributes: Mapping[str, int] | None = None,
        behind: ir.Node | None = None,
    ) -> ir.Value:
        result = ir.val(self.name(name), DTYPES[form])
        self.insert(ir.node(op, inputs, attributes, outputs=[result]), f"{name}/{op}", behind)
        return result

    def _dequantized(self, tensor: ir.Value, *, counted: bool) -> ir.Value:
        stored = self.stored(tensor)
        found = self._found[tensor]
        self._counts["dequantize"] += counted
        if _DEQUANTIZED not in found:
            inputs = [stored, *self.parameters(tensor)]
            name = f"{tensor.name}/{_DEQUANTIZED}"
            found[_DEQUANTIZED] = self._add("DequantizeLinear", inputs, name, FP32)
        return found[_DEQUANTIZED]

    def _cast(self, tensor: ir.Value, value: ir.Value, form: str) -> ir.Value:
        self._counts["casts"] += 1
        return self._add("Cast", [value], f"{tensor.name}/{form}", form, {"to": int(DTYPES[form])})

    def _constant_in(self, tensor: ir.Value, array: Array, form: str) -> ir.Value:
        stored = narrowed(array, DTYPES[form].numpy())
        return self.constant(f"{tensor.name}/{form}", stored, DTYPES[form])
