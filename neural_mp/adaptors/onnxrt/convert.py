"""Conversion of a model to the precisions of a plan.

One pass over a copy of the graph rewrites every node for its precision under the plan and requests
its inputs in a dtype variant (FP32, BF16, FP16, uint8). A variant is created on first use: one
conversion per tensor and direction, and none without a consumer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from neural_mp.adaptors.common.op_outputs import OutputLocation
from neural_mp.adaptors.common.tensor_variants import BF16, FP32, UINT8, VARIANT_OF
from neural_mp.adaptors.onnxrt import graph_edit as edit
from neural_mp.adaptors.onnxrt.convert_gru import write_gru
from neural_mp.adaptors.onnxrt.convert_int8 import (
    write_kernel,
    write_mover,
    write_pointwise,
    write_pool,
    write_product,
)
from neural_mp.adaptors.onnxrt.convert_n_bits import write_grouped
from neural_mp.adaptors.onnxrt.fusion import (
    FusionGroup,
    GraphStructure,
    is_pointwise,
    is_table,
    structure,
)
from neural_mp.adaptors.onnxrt.kernel_registry import CONTRIB, runs_natively
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.opset import typed_inputs
from neural_mp.adaptors.onnxrt.quant_params import store_weight
from neural_mp.adaptors.onnxrt.subgraphs import in_order, sink_constants
from neural_mp.adaptors.onnxrt.tensor_variants import Variants
from neural_mp.core.observations import Range
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.space import ResolvedPlan

#: ONNX Runtime's LSTM with INT8 products, in its `ContribOperators.md`.
RECURRENT_KERNEL = "DynamicQuantizeLSTM"
#: Input positions of its weights, as in LSTM, and of their zero points; the scales precede the zero
#: points.
RECURRENT_WEIGHTS = ((1, 9), (2, 11))


def write_table(variants: Variants, node: ir.Node, config: OpConfig) -> None:
    """Convert an op that reads rows of a constant table: INT8 rows, each with its own scale.

    Memory bounds such an op, so several standard ops are about as fast as the original.
    """
    assert config.weight is not None
    rows = node.inputs[1]
    assert rows is not None
    stored = store_weight(edit.known_array(node.inputs[0]), 0, config.weight)
    stem = str(node.name)
    table = variants.shared_constant(f"{stem}.table/{stored.integers.dtype}", stored.integers)
    scales = variants.names.constant(f"{stem}.table/scale", stored.scales.reshape(-1, 1))
    indices = variants.real(rows)
    integers = variants.add("Gather", [table, indices], f"{stem}/rows", ir.DataType.INT8)
    numbers = variants.add(
        "Cast", [integers], f"{stem}/cast", ir.DataType.FLOAT, {"to": int(ir.DataType.FLOAT)}
    )
    steps = variants.add("Gather", [scales, indices], f"{stem}/scales", ir.DataType.FLOAT)
    result = variants.add("Mul", [numbers, steps], f"{stem}/real", ir.DataType.FLOAT)
    variants.put(node.outputs[0], FP32, result)


def write_recurrent(variants: Variants, node: ir.Node, config: OpConfig) -> None:
    """Convert a recurrent layer to dynamic quantization of its inputs."""
    assert config.weight is not None
    if node.op_type == "GRU":
        write_gru(variants, node, config.weight)
        return
    for position, value in enumerate(node.inputs):
        if value is not None and position not in dict(RECURRENT_WEIGHTS):
            node.replace_input_with(position, variants.real(value))
    stem = str(node.name)
    for position, zero in RECURRENT_WEIGHTS:
        prefix = f"{stem}.weight_{position}"
        # The kernel expects the last two axes of [directions, rows, inputs] transposed.
        matrices = np.ascontiguousarray(edit.known_array(node.inputs[position]).transpose(0, 2, 1))
        directions, _, columns = matrices.shape
        stored = [store_weight(matrix, 1, config.weight) for matrix in matrices]
        integers = np.stack([weight.integers for weight in stored])
        edit.put_input(
            node, position, variants.shared_constant(f"{prefix}/{integers.dtype}", integers)
        )
        for index, name, parts in (
            (zero - 1, "scale", [weight.scales for weight in stored]),
            (zero, "zero_point", [weight.zero_points for weight in stored]),
        ):
            values = np.stack(parts).reshape(directions, columns)
            edit.put_input(node, index, variants.names.constant(f"{prefix}/{name}", values))
    node.op_type, node.domain, node.version = RECURRENT_KERNEL, CONTRIB, None
    node.attributes.pop("layout", None)


def write(model: OnnxModel, plan: ResolvedPlan, ranges: Mapping[str, Range]) -> OnnxModel:
    """Return the model converted to a plan; see `Adaptor.convert_graph`."""
    program = model.program.clone()
    graph = structure(program, model.rejected)
    variants = Variants(program.graph, graph, plan.flow, ranges)
    writer = _Writer(model, program, graph, plan, variants)
    for name, node in graph.nodes.items():
        writer.write(name, node)
    writer.finish()
    return replace(
        model,
        program=program,
        given=None,
        kernel_check=None,
        ops=variants.owners,
        results=writer.results(),
        counts=variants.counts,
        grouped={},
        _runners={},
    )


def rounded_by_runtime(node: ir.Node) -> tuple[int, int]:
    """Return the channel axis of an op's input and its size; zeros if irrelevant.

    From a float op with a constant weight between a DequantizeLinear of one scale and a
    QuantizeLinear, ONNX Runtime makes an integer kernel and rounds the weight with a single scale
    (`WeightBiasQuantization`, since 1.21). Plans keep such ops in FP32 mostly for accuracy. A
    DequantizeLinear with a scale per channel is not rewritten.
    """
    weight = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] else None
    if node.domain or weight is None:
        return 0, 0
    shape = weight.shape.numpy()
    if node.op_type == "Conv":
        return 1, shape[1] * node.attributes.get_int("group", 1)
    if node.op_type == "ConvTranspose":
        return 1, shape[0]
    if node.op_type == "Gemm":
        transposed = node.attributes.get_int("transB", 0)
        return 1 - node.attributes.get_int("transA", 0), shape[1 if transposed else 0]
    return 0, 0


#: Ops that ONNX Runtime moves a DequantizeLinear of one scale past (`QDQPropagation`).
_PASSED_BY_DEQUANTIZE = frozenset(
    ("MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
)


@dataclass
class _Writer:
    model: OnnxModel
    program: ir.Model
    structure: GraphStructure
    plan: ResolvedPlan
    variants: Variants
    #: Ops already converted within the kernel of another.
    done: set[str] = field(default_factory=set)
    #: Ops without a result: all ops of an integer kernel except the last.
    within: set[str] = field(default_factory=set)

    def write(self, name: str, node: ir.Node) -> None:
        """Rewrite one node of the unconverted graph."""
        if name in self.done:
            return
        self.variants.place, self.variants.owner = node, name
        precision = self.plan.effective.get(name, Precision.FP32)
        weight = self._grouped_weight(name)
        fusion_group = self.structure.fusion_groups.get(name)
        if weight is not None:
            write_grouped(self.variants, node, weight, self.model.grouped.get(name))
        elif precision is Precision.INT8 and name in self.structure.alone:
            config = self.plan.plan[name]
            (write_table if is_table(node) else write_recurrent)(self.variants, node, config)
        elif precision is Precision.INT8 and fusion_group is not None:
            self._write_int8(name, node, fusion_group)
        elif name in self.structure.agnostic_ops and name in self.plan.flow.int8_outputs:
            write_mover(self.variants, node)
        elif precision.is_16_bit:
            self._write_16_bit(node, VARIANT_OF[precision])
        else:
            for value in dict.fromkeys(edit.read_by(node)):
                if value in self.structure.names:
                    edit.redirect(node, value, self._real(node, value))

    def _grouped_weight(self, name: str) -> QuantSpec | None:
        """Return the quantization of a weight that the plan stores in groups."""
        config = self.plan.plan.get(name)
        weight = None if config is None else config.weight
        return weight if weight is not None and weight.group_size is not None else None

    def _real(self, node: ir.Node, value: ir.Value) -> ir.Value:
        """Return the input of an FP32 op for a tensor."""
        if str(node.name) in self.model.rejected and edit.is_float32(value):
            return self.variants.shielded(value)
        if value is node.inputs[0] and self.variants.comes_stored(value):
            axis, channels = rounded_by_runtime(node)
            if channels == 1 or self._leads_to_rounding(node):
                axis, channels = _wide_axis(value)
            if channels:
                return self.variants.by_channel(value, axis, channels)
        return self.variants.real(value)

    def _leads_to_rounding(self, node: ir.Node) -> bool:
        """Whether ONNX Runtime would round the weight of an op after a quantize-agnostic op."""
        if node.domain or node.op_type not in _PASSED_BY_DEQUANTIZE:
            return False
        return any(
            use.idx == 0
            and self.plan.effective.get(str(use.node.name), Precision.FP32) is Precision.FP32
            and (rounded_by_runtime(use.node)[1] or self._leads_to_rounding(use.node))
            for use in node.outputs[0].uses()
        )

    def _write_int8(self, name: str, node: ir.Node, fusion_group: FusionGroup) -> None:
        effective = self.plan.effective
        fusion_group = fusion_group.reduced(
            lambda op: effective.get(str(op.name)) is Precision.INT8
        )
        fused = [str(op.name) for op in fusion_group.members]
        self.done.update(fused)
        self.within.update([name, *fused][:-1])
        config = self.plan.plan[name]
        if node.op_type in ("MatMul", "Gemm"):
            write_product(self.variants, fusion_group, config)
        elif node.op_type == "ReduceMean":
            write_pool(self.variants, node)
        elif is_pointwise(node) and str(fusion_group.tail.name) not in self.plan.flow.int8_outputs:
            write_pointwise(self.variants, node, config)
        else:
            write_kernel(self.variants, fusion_group, config)

    def _write_16_bit(self, node: ir.Node, variant: str) -> None:
        provider, opset = self.model.provider, self.model.opset
        native = variant != BF16 or runs_natively(provider, node, opset, "bfloat16")
        fetch = self.variants.real if native else self.variants.widened
        typed = typed_inputs(node, opset)
        for position, value in enumerate(node.inputs):
            if value is not None and position in typed:
                node.replace_input_with(position, fetch(value, variant))
            elif value is not None and value in self.structure.names:
                node.replace_input_with(position, self.variants.real(value))
        (result, *_) = node.outputs
        if native:
            self.variants.put(result, variant, result)
        else:
            self.variants.put_rounded(result, variant)

    def finish(self) -> None:
        """Insert the outputs and remove unused nodes."""
        graph = self.program.graph
        self.variants.place = None
        final: dict[ir.Value, ir.Value] = {}
        for index, value in enumerate(list(graph.outputs)):
            if value not in final:
                output = self.variants.real(value)
                final[value] = value if output is value else self._renamed(value, output)
            graph.outputs[index] = final[value]
        common.RemoveUnusedNodesPass()(self.program)
        sink_constants(self.program)
        if any(node.domain == CONTRIB for node in in_order(graph)):
            graph.opset_imports[CONTRIB] = 1
        # Many types have changed. And if ONNX Runtime can infer that both summands before a layer
        # norm have equal shapes, it fuses sum and norm into a slower kernel: a BERT-base in INT8 at
        # 2.2 times the speed of FP32 instead of 2.8.
        edit.forget_types(graph)

    def results(self) -> dict[str, OutputLocation]:
        """Return op of the unconverted graph → location of its result."""
        untouched, graph = self.model.structure, self.program.graph
        present = {id(value) for node in in_order(graph) for value in node.outputs}
        by_op = {}
        for name, value in self.structure.values.items():
            op = untouched.parts.get(name, name)
            if op not in untouched.nodes or name in self.within:
                continue
            final, encoding = self.variants.result_of(value)
            if id(final) in present:
                by_op[name] = OutputLocation(str(final.name), untouched.nodes[op].op_type, encoding)
        return by_op

    def _renamed(self, value: ir.Value, output: ir.Value) -> ir.Value:
        """Return a value as a graph output under its original name."""
        if output.is_graph_output() or output.is_graph_input():
            copied = ir.val(None)
            self.variants.insert(
                ir.node("Identity", [output], outputs=[copied]), f"{value.name}/copy"
            )
            output = copied
        name = value.name
        value.name = self.variants.names.new(f"{name}/{UINT8}/before")
        output.name, output.type, output.shape = name, value.type, value.shape
        return output


def _wide_axis(value: ir.Value) -> tuple[int, int]:
    """Return an axis of known size above 1 and its size; zeros if there is none."""
    sizes = [] if value.shape is None else list(value.shape.dims)
    static = [(axis, size) for axis, size in enumerate(sizes) if isinstance(size, int) and size > 1]
    return static[0] if static else (0, 0)
