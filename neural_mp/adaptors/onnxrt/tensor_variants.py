"""The forms of tensors, as nodes and constants of an ONNX graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.quant_params import Array, QuantParams
from neural_mp.adaptors.common.tensor_variants import BF16, FP16, FP32, UINT8, TensorVariants
from neural_mp.adaptors.onnxrt.fusion import GraphStructure
from neural_mp.adaptors.onnxrt.graph_edit import GraphNames, array_of
from neural_mp.adaptors.onnxrt.kernel_registry import CONTRIB
from neural_mp.adaptors.onnxrt.quant_params import StoredWeight
from neural_mp.adaptors.onnxrt.subgraphs import runners, spot_in
from neural_mp.core.observations import Range
from neural_mp.core.quantization_flow import QuantizationFlow

DTYPES = {
    FP32: ir.DataType.FLOAT,
    BF16: ir.DataType.BFLOAT16,
    FP16: ir.DataType.FLOAT16,
    UINT8: ir.DataType.UINT8,
}
#: Stored in 16 bits, and made FP32 again for kernels that know nothing else.
_WIDENED = "widened"
#: Stored in uint8, behind a DequantizeLinear that a kernel takes in.
_DEQUANTIZED = "dequantized"


class Forms(TensorVariants[ir.Value]):
    """Where the tensors are, and what is put in for them.

    Args:
        graph: the graph being written, a copy of the untouched one.
        structure: what it is made of.
        flow: what is stored in INT8 under the plan.
        ranges: quantized tensor → the range that its scale has to hold.

    Attributes:
        place: the node being written: what it needs is put before it; None for the end.
        owner: the op that is being written.
        owners: new node → the op it was written for.
        names: the names in the graph.
    """

    def __init__(
        self,
        graph: ir.Graph,
        structure: GraphStructure,
        flow: QuantizationFlow,
        ranges: Mapping[str, Range],
    ) -> None:
        super().__init__(flow, ranges)
        self.place: ir.Node | None = None
        self.owner = ""
        self.owners: dict[str, str] = {}
        self._graph, self._tensors = graph, structure.names
        self._end = graph
        self.names = GraphNames(graph)
        self._runners = runners(graph)
        self._dynamic: dict[ir.Value, tuple[ir.Value, ...]] = {}
        self._parameters: dict[QuantParams, tuple[ir.Value, ir.Value]] = {}
        self._moved_from: dict[ir.Value, ir.Value] = {}

    def name_of(self, tensor: ir.Value) -> str:
        """The tensor itself, or the one whose numbers it has been moved from."""
        return self._tensors[self._moved_from.get(tensor, tensor)]

    def value_of(self, tensor: ir.Value) -> Array | None:
        """The value of an initializer."""
        return array_of(tensor)

    def constant_in(self, tensor: ir.Value, form: str, values: Array) -> ir.Value:
        """An initializer."""
        return self.names.constant(f"{tensor.name}/{form}", values, DTYPES[form])

    def cast(self, tensor: ir.Value, source: str, form: str) -> ir.Value:
        """A Cast; the one back to FP32 may be there already."""
        if form == FP32:
            return self.widened(tensor, source)
        self.count("casts")
        real = self.real(tensor, source)
        with self._beside(tensor):
            return self._cast(real, f"{tensor.name}/{form}", form)

    def quantized(self, tensor: ir.Value, real: ir.Value) -> ir.Value:
        """A QuantizeLinear that is run as such."""
        self.count("quantize")
        with self._beside(tensor):
            return self.quantize(tensor, real)

    def dequantized(self, tensor: ir.Value, form: str) -> ir.Value:
        """The DequantizeLinear that kernels take in, too."""
        with self._beside(tensor):
            return self.for_kernel(tensor)

    def real(self, tensor: ir.Value, form: str = FP32) -> ir.Value:
        """A tensor in FP32, BF16 or FP16."""
        value = super().real(tensor, form)
        if value is self.found(tensor).get(_DEQUANTIZED):
            # ONNX Runtime dequantizes anew for every op that reads a tensor so.
            self.count("dequantize")
        return value

    def widened(self, tensor: ir.Value, form: str) -> ir.Value:
        """A tensor rounded to 16 bits, and made FP32 again."""
        found = self.found(tensor)
        if (key := f"{form} {_WIDENED}") not in found:
            narrow = self.real(tensor, form)
            if self.value_of(tensor) is None:
                # ONNX Runtime computes the cast of a constant once, when it loads the model.
                self.count("casts")
            with self._beside(tensor):
                found[key] = self._cast(narrow, f"{tensor.name}/{form}/{FP32}", FP32)
        return found[key]

    def for_kernel(self, tensor: ir.Value) -> ir.Value:
        """A tensor in uint8, dequantized in name only: an integer kernel takes that in.

        It does so in its own graph only.
        """
        stored, found = self.stored(tensor), self.found(tensor)
        key = _DEQUANTIZED
        if self._written is not self._graph_of(tensor):
            key = f"{_DEQUANTIZED} in {id(self._written)}"
        if key not in found:
            inputs = [stored, *self.parameters(tensor)]
            name = f"{tensor.name}/{_DEQUANTIZED}"
            found[key] = self.add("DequantizeLinear", inputs, name, DTYPES[FP32])
        return found[key]

    @property
    def _written(self) -> ir.Graph:
        """The graph that is being written in."""
        graph = None if self.place is None else self.place.graph
        return graph if isinstance(graph, ir.Graph) else self._end

    def _graph_of(self, tensor: ir.Value) -> ir.Graph:
        graph = tensor.graph
        return graph if isinstance(graph, ir.Graph) else self._graph

    @contextmanager
    def _beside(self, tensor: ir.Value) -> Iterator[None]:
        """Write in the graph that a tensor is in: of a body, what it reads from outside is there.

        So there is one conversion for all bodies that read the tensor, and of all steps of a loop.
        """
        before, graph = (self.place, self._end), self._graph_of(tensor)
        self.place, self._end = spot_in(graph, self.place, self._runners), graph
        try:
            yield
        finally:
            self.place, self._end = before

    def comes_stored(self, tensor: ir.Value) -> bool:
        """Whether a tensor is there in no other form that FP32 could be had from."""
        found = self.found(tensor)
        return UINT8 in found and found.get(FP32) is found.get(_DEQUANTIZED)

    def by_channel(self, tensor: ir.Value, axis: int, channels: int) -> ir.Value:
        """A stored tensor in FP32, with a scale for every channel, all of them alike."""
        encoding, stem = self.encoding_of(tensor), f"{tensor.name}/by_channel"
        inputs = [
            self.stored(tensor),
            self.names.constant(f"{stem}/scale", np.full(channels, encoding.scale, np.float32)),
            self.names.constant(
                f"{stem}/zero_point", np.full(channels, encoding.zero_point, np.uint8)
            ),
        ]
        self.count("dequantize")
        return self.add("DequantizeLinear", inputs, stem, DTYPES[FP32], {"axis": axis})

    def quantize(self, tensor: ir.Value, real: ir.Value, behind: ir.Node | None = None) -> ir.Value:
        """Store a real value with the scale of a tensor."""
        inputs = [real, *self.parameters(tensor)]
        return self.add(
            "QuantizeLinear", inputs, f"{tensor.name}/{UINT8}", DTYPES[UINT8], behind=behind
        )

    def dynamic(self, tensor: ir.Value) -> tuple[ir.Value, ...]:
        """A tensor in uint8 with the range it has on this run: stored, scale, zero point."""
        if tensor not in self._dynamic:
            names = [f"{tensor.name}/dynamic_{part}" for part in ("stored", "scale", "zero_point")]
            outputs = [ir.val(self.names.new(name)) for name in names]
            node = ir.node("DynamicQuantizeLinear", [self.real(tensor)], outputs=outputs)
            with self._beside(tensor):
                self.insert(node, f"{tensor.name}/quantize")
            self.count("quantize")
            self._dynamic[tensor] = tuple(outputs)
        return self._dynamic[tensor]

    def parameters(self, tensor: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The scale and zero point of a tensor, as constants."""
        encoding = self.encoding_of(tensor)
        if encoding not in self._parameters:
            scale = self.names.constant(f"{tensor.name}/scale", np.float32(encoding.scale))
            zero = self.names.constant(f"{tensor.name}/zero_point", np.uint8(encoding.zero_point))
            self._parameters[encoding] = scale, zero
        return self._parameters[encoding]

    def put_moved(self, result: ir.Value, moved: ir.Value) -> None:
        """Say that an op that moves values has moved stored ones."""
        self.put(result, UINT8, result)
        self._moved_from[result] = self._moved_from.get(moved, moved)

    def weight(self, stem: str, stored: StoredWeight) -> ir.Value:
        """A weight or bias in integers, dequantized in name only."""
        inputs = [
            self.names.constant(f"{stem}/{stored.integers.dtype}", stored.integers),
            self.names.constant(f"{stem}/scale", stored.scales),
            self.names.constant(f"{stem}/zero_point", stored.zero_points),
        ]
        name = f"{stem}/{_DEQUANTIZED}"
        return self.add("DequantizeLinear", inputs, name, DTYPES[FP32], {"axis": stored.axis})

    def replace(self, node: ir.Node, op: str, inputs: list[ir.Value], result: ir.Value) -> None:
        """Put an op of ONNX Runtime's own in the place of a node, its result in that of another."""
        written = ir.val(self._moved_aside(result), DTYPES[FP32])
        name = str(node.name)
        node.name = self.names.new(f"{name}/{FP32}")
        self.names.give_up(name)
        self.insert(ir.node(op, inputs, domain=CONTRIB, outputs=[written]), name)
        self.put(result, FP32, written)

    def _moved_aside(self, value: ir.Value) -> str:
        """The name of a value that is to be replaced; outputs of the graph keep theirs for now."""
        name = str(value.name)
        if value.is_graph_output():
            return self.names.new(f"{name}/{FP32}")
        value.name = self.names.new(f"{name}/before")
        return name

    def put_rounded(self, result: ir.Value, form: str) -> None:
        """Say that a tensor is the result of an op in FP32, rounded to 16 bits."""
        self.count("casts")
        rounded = self._cast(result, f"{result.name}/{form}", form, behind=result.producer())
        self.put(result, form, rounded)

    def insert(self, node: ir.Node, name: str, behind: ir.Node | None = None) -> None:
        """Put a new node in its place, or right behind another."""
        node.name = self.names.new(name)
        if node.name != self.owner:
            self.owners[node.name] = self.owner
        if behind is not None:
            self._graph_of(behind.outputs[0]).insert_after(behind, node)
        elif self.place is None:
            self._end.append(node)
        else:
            self._written.insert_before(self.place, node)

    def add(
        self,
        op: str,
        inputs: list[ir.Value],
        name: str,
        dtype: ir.DataType,
        attributes: Mapping[str, int] | None = None,
        behind: ir.Node | None = None,
    ) -> ir.Value:
        """Put in a new node of one result (see `insert`); returns that."""
        result = ir.val(self.names.new(name), dtype)
        self.insert(ir.node(op, inputs, attributes, outputs=[result]), f"{name}/{op}", behind)
        return result

    def _cast(
        self, value: ir.Value, name: str, form: str, behind: ir.Node | None = None
    ) -> ir.Value:
        dtype = DTYPES[form]
        return self.add("Cast", [value], name, dtype, {"to": int(dtype)}, behind)
