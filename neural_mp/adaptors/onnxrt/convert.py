"""Conversion of a model to the precisions of a plan.

One pass over a copy of the graph rewrites every node for its precision under the plan and requests
its inputs in a dtype variant (FP32, BF16, FP16, uint8). A variant is created on first use: one
conversion per tensor and direction, and none without a consumer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir
from onnx_ir.passes import common

from neural_mp.adaptors.common.named_graphs import BF16, UINT8, VARIANT_OF
from neural_mp.adaptors.common.op_outputs import OutputLocation
from neural_mp.adaptors.onnxrt.fusion import GraphStructure, graph_structure, is_table
from neural_mp.adaptors.onnxrt.graph import edit
from neural_mp.adaptors.onnxrt.graph.opset import find_typed_inputs
from neural_mp.adaptors.onnxrt.graph.subgraphs import in_order, sink_constants
from neural_mp.adaptors.onnxrt.kernels.ops import get_op_row, get_weight_axes
from neural_mp.adaptors.onnxrt.kernels.registry import CONTRIB, runs_natively
from neural_mp.adaptors.onnxrt.kernels.tensor_variants import Variants
from neural_mp.adaptors.onnxrt.kernels.writers import (
    FusionGroup,
    write_low_bit_product,
    write_low_bit_table,
    write_mover,
)
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.core.observations import Range
from neural_mp.core.precision import Precision
from neural_mp.space import ResolvedPlan


def convert_graph(model: OnnxModel, plan: ResolvedPlan, ranges: Mapping[str, Range]) -> OnnxModel:
    """Return the model converted to a plan; see `Adaptor.convert_graph`."""
    program = model.program.clone()
    graph = graph_structure(program, model.rejected_ops)
    variants = Variants(program.graph, graph.names, plan.flow, ranges)
    writer = _Writer(model, program, graph, plan, variants)
    for name, node in graph.nodes.items():
        writer.write_node(name, node)
    writer.finish_graph()
    return replace(
        model,
        program=program,
        given=None,
        kernel_check=None,
        ops=variants.owners,
        results=writer.result_locations(),
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
    weight, row = edit.get_node_input(node, 1), get_op_row(node)
    if not row.rounded_by_runtime or weight is None or weight.const_value is None:
        return 0, 0
    _, inputs = get_weight_axes(node)
    # A transposed convolution has the outputs of one group in its weight, others the inputs.
    groups = node.attributes.get_int("group", 1) if inputs else 1
    axis = 1 - node.attributes.get_int("transA", 0)
    return axis, weight.const_value.shape.numpy()[inputs] * groups


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

    def write_node(self, name: str, node: ir.Node) -> None:
        """Rewrite one node of the unconverted graph."""
        if name in self.done:
            return
        self.variants.place, self.variants.owner = node, name
        precision = self.plan.effective.get(name, Precision.FP32)
        config = self.plan.plan.get(name)
        weight = None if config is None else config.weight
        fusion_group = self.structure.fusion_groups.get(name)
        if weight is not None and weight.group_size is not None:
            write_low_bits = write_low_bit_table if is_table(node) else write_low_bit_product
            write_low_bits(self.variants, node, weight, self.model.grouped.get(name))
        elif precision is Precision.INT8 and name in self.structure.alone:
            get_op_row(node).writer(self.variants, FusionGroup(node), self.plan.plan[name])
        elif precision is Precision.INT8 and fusion_group is not None:
            self._write_int8(name, node, fusion_group)
        elif name in self.structure.agnostic_ops and name in self.plan.flow.int8_outputs:
            write_mover(self.variants, node, get_op_row(node).fill)
        elif precision.is_16_bit:
            self._write_16_bit(node, VARIANT_OF[precision])
        else:
            for value in dict.fromkeys(edit.read_by(node)):
                if value in self.structure.names:
                    edit.redirect_reads(node, value, self._as_fp32_input(node, value))

    def _as_fp32_input(self, node: ir.Node, value: ir.Value) -> ir.Value:
        if str(node.name) in self.model.rejected_ops and edit.is_float32(value):
            return self.variants.shield_float(value)
        if value is node.inputs[0] and next(iter(self.variants.find_variants(value))) == UINT8:
            # The value is computed in uint8; all its other variants come from that one.
            axis, channels = rounded_by_runtime(node)
            if channels == 1 or self._leads_to_rounding(node):
                sizes = enumerate(() if value.shape is None else value.shape.dims)
                wide = ((at, size) for at, size in sizes if isinstance(size, int) and size > 1)
                axis, channels = next(wide, (0, 0))
            if channels:
                return self.variants.dequantize_by_channel(value, axis, channels)
        return self.variants.as_float(value)

    def _leads_to_rounding(self, node: ir.Node) -> bool:
        """Whether ONNX Runtime would round the weight of an op after a quantize-agnostic op."""
        if not get_op_row(node).passed_by_dequantize:
            return False
        return any(
            use.idx == 0
            and self.plan.effective.get(str(use.node.name), Precision.FP32) is Precision.FP32
            and (rounded_by_runtime(use.node)[1] or self._leads_to_rounding(use.node))
            for use in node.outputs[0].uses()
        )

    def _write_int8(self, name: str, node: ir.Node, fusion_group: FusionGroup) -> None:
        effective = self.plan.effective
        fusion_group = fusion_group.fused_prefix(
            lambda op: effective.get(str(op.name)) is Precision.INT8
        )
        fused = [str(op.name) for op in fusion_group.fused_ops]
        self.done.update(fused)
        self.within.update([name, *fused][:-1])
        get_op_row(node).writer(self.variants, fusion_group, self.plan.plan[name])

    def _write_16_bit(self, node: ir.Node, variant: str) -> None:
        provider, opset = self.model.provider, self.model.opset
        native = variant != BF16 or runs_natively(provider, node, opset, "bfloat16")
        fetch = self.variants.as_float if native else self.variants.round_to_16_bits
        typed = find_typed_inputs(node, opset)
        for position, value in enumerate(node.inputs):
            if value is not None and position in typed:
                node.replace_input_with(position, fetch(value, variant))
            elif value is not None and value in self.structure.names:
                node.replace_input_with(position, self.variants.as_float(value))
        (result, *_) = node.outputs
        if native:
            self.variants.set_variant(result, variant, result)
        else:
            self.variants.put_rounded(result, variant)

    def finish_graph(self) -> None:
        """Insert the outputs and remove unused nodes."""
        graph = self.program.graph
        self.variants.place = None
        final: dict[ir.Value, ir.Value] = {}
        for index, value in enumerate(list(graph.outputs)):
            if value not in final:
                final[value] = self._restore_output_name(value, self.variants.as_float(value))
            graph.outputs[index] = final[value]
        common.RemoveUnusedNodesPass()(self.program)
        sink_constants(self.program)
        if any(node.domain == CONTRIB for node in in_order(graph)):
            graph.opset_imports[CONTRIB] = 1
        # Many types have changed. And if ONNX Runtime can infer that both summands before a layer
        # norm have equal shapes, it fuses sum and norm into a slower kernel: a BERT-base in INT8 at
        # 2.2 times the speed of FP32 instead of 2.8.
        edit.forget_types(graph)

    def result_locations(self) -> dict[str, OutputLocation]:
        """Return op of the unconverted graph → location of its result."""
        untouched, graph = self.model.structure, self.program.graph
        present = {id(value) for node in in_order(graph) for value in node.outputs}
        by_op = {}
        for name, value in self.structure.values.items():
            op = untouched.parts.get(name, name)
            if op not in untouched.nodes or name in self.within:
                continue
            final, encoding = self.variants.get_computed_result(value)
            if id(final) in present:
                by_op[name] = OutputLocation(str(final.name), untouched.nodes[op].op_type, encoding)
        return by_op

    def _restore_output_name(self, value: ir.Value, output: ir.Value) -> ir.Value:
        if output is value:
            return value
        if output.is_graph_output() or output.is_graph_input():
            copied = ir.val(None)
            self.variants.insert_node(
                ir.node("Identity", [output], outputs=[copied]), f"{value.name}/copy"
            )
            output = copied
        name = value.name
        value.name = self.variants.names.reserve_name(f"{name}/{UINT8}/before")
        output.name, output.type, output.shape = name, value.type, value.shape
        return output
