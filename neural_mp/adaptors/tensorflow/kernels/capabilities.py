"""Available kernels of each op, from the runtime's kernel registry and from kernel probes."""

from __future__ import annotations

import tensorflow as tf

from neural_mp.adaptors.common import capabilities as reasons
from neural_mp.adaptors.common.capabilities import SIXTEEN_BITS, IntegerKernel, OpKernels
from neural_mp.adaptors.common.kernels.int8_accumulation import KernelAccumulation
from neural_mp.adaptors.common.named_graphs import VARIANT_OF
from neural_mp.adaptors.tensorflow.graph.control_flow import in_bodies, in_loops
from neural_mp.adaptors.tensorflow.graph.fusion import FusionGroup, find_average_obstacle
from neural_mp.adaptors.tensorflow.graph.ops import CONTROL_FLOW, LAYERS, SUMMAND, Role, get_op_role
from neural_mp.adaptors.tensorflow.graph.runtime import has_kernel, list_kernel_dtypes
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    Array,
    NodeDef,
    channels_first,
    get_dtype_attribute,
    get_integers_attribute,
    get_node_name,
    get_output_index,
    get_text_attribute,
    has_typed_results,
    list_data_inputs,
    plain_name,
    read_constant_shape,
)
from neural_mp.adaptors.tensorflow.int8_accumulation import find_bf16_obstacle, forms_that_work
from neural_mp.adaptors.tensorflow.kernels.convert_int8 import compute_zero_padding
from neural_mp.adaptors.tensorflow.kernels.integer_kernels import DTYPES
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.core.int8_accumulation import REDUCED_WEIGHT, KernelKind, weight_quant_spec
from neural_mp.core.precision import Precision
from neural_mp.core.quant_spec import RANGE_ALGORITHMS

_NO_FLOAT32 = "does not compute in float32"
_BORDER = "passes values into or out of a loop or branch unchanged"
_UNOBSERVED = "lies in or behind a branch or loop inside a loop, where calibration observes nothing"

#: INT8 products in a row of a tile of AMX, and channels from which convolutions are right.
_AMX_ROW, _LEAST_AMX_CHANNELS = 64, 32


def find_kernels(model: TensorFlowModel, products: KernelAccumulation) -> dict[str, OpKernels]:
    """Return op → its kernels, given the accumulation of the integer kernels."""
    builder = _Kernels(model, products)
    return {node.name: builder.find_kernels(node) for node in model.op_nodes}


class _Kernels:
    """Kernels of the ops of one model."""

    def __init__(self, model: TensorFlowModel, accumulation: KernelAccumulation) -> None:
        self.model, self.structure, self.accumulation = model, model.structure, accumulation
        self.loops, self.bodies = in_loops(model.graph), in_bodies(model.graph)
        self.members = model.structure.layer_of
        operands = (t for node in model.graph.nodes.values() for t in list_data_inputs(node))
        read_or_returned = (*operands, *model.signature.output_tensors)
        self.several = {
            get_node_name(tensor) for tensor in read_or_returned if get_output_index(tensor)
        }

    def find_kernels(self, node: NodeDef) -> OpKernels:
        missing = {p: self.missing_16_bit(node, p) for p in SIXTEEN_BITS}
        return OpKernels(
            self.explain_missing_int8(node) or self.find_integer_kernel(node),
            {precision: reason for precision, reason in missing.items() if reason is not None},
        )

    def find_integer_kernel(self, node: NodeDef) -> IntegerKernel:
        """Return the integer kernel of a layer, or the INT8 variant of a table."""
        if node.name in self.structure.tables:
            return reasons.table_in_bytes()
        kind = LAYERS[node.op].kind
        if (
            kind is KernelKind.DEPTHWISE
            and read_constant_shape(self.model.graph[node.input[1]])[3] > 1
        ):
            kind = KernelKind.CONVOLUTION
        spec = weight_quant_spec(self.accumulation[kind])
        return IntegerKernel(spec, RANGE_ALGORITHMS, other_weights=(REDUCED_WEIGHT,))

    def missing_16_bit(self, node: NodeDef, precision: Precision) -> str | None:
        """Return why an op has no 16-bit kernel; None if there is a kernel."""
        if precision is Precision.BF16 and (failure := find_bf16_obstacle()) is not None:
            return failure
        if get_dtype_attribute(node) is not tf.float32:
            return _NO_FLOAT32
        if not has_typed_results(node):
            return reasons.NO_FLOATS
        if node.op in CONTROL_FLOW:
            return _BORDER
        if node.name in self.several:
            return reasons.SEVERAL_RESULTS
        if precision is Precision.FP16 and "..." in get_text_attribute(node, "equation"):
            return "TensorFlow's FP16 kernel returns wrong results for equations with an ellipsis"
        if DTYPES[VARIANT_OF[precision]] not in list_kernel_dtypes(node.op):
            return f"TensorFlow has no {precision} CPU kernel for {node.op}"
        return None

    def explain_missing_int8(self, node: NodeDef) -> str | None:
        """Return why an op has no integer kernel; None if there is a kernel."""
        if node.name in self.structure.tables:
            return reasons.find_table_obstacle(self.model.graph.constant_value(node.input[0]))
        if node.op not in LAYERS:
            return self._explain_no_layer(node)
        if get_dtype_attribute(node) is not tf.float32:
            return _NO_FLOAT32
        if node.name in self.loops and get_node_name(node.input[0]) not in self.bodies:
            return _UNOBSERVED
        weight = self.model.graph.find_constant(node.input[1])
        if weight is None:
            return reasons.COMPUTED_WEIGHT
        if not reasons.is_usable(weight):
            return reasons.UNUSABLE_WEIGHT
        if self.model.graph.is_constant(node.input[0]):
            return reasons.CONSTANT_INPUT
        if get_output_index(node.input[0]):
            return "reads a result of dataflow control directly, from within a branch"
        geometry = self._find_geometry_obstacle(node, weight)
        if geometry is not None:
            return geometry
        missing = (
            list_needed_forms(node, self.structure.fusion_groups[node.name]) - forms_that_work()
        )
        if missing:
            return f"integer kernel fails on this machine: {', '.join(sorted(missing))}"
        return None

    def _find_geometry_obstacle(self, node: NodeDef, weight: Array) -> str | None:
        layer = LAYERS[node.op]
        if layer.is_dense:
            return reasons.TRANSPOSED_INPUT if node.attr["transpose_a"].b else None
        if channels_first(node):
            return "integer kernel requires channels last, but the op has channels first"
        shape = self.model.shapes[node.input[0]]
        if shape is None or shape[3] is None:
            return "number of input channels is unknown"
        if shape[3] != weight.shape[2]:
            return "integer kernel does not support grouped convolutions"
        if set(get_integers_attribute(node, "dilations")) - {1} and "dilated" not in layer.options:
            return "integer kernel does not support dilated depthwise convolutions"
        if node.op == "Conv2D" and _is_wrong_with_amx(weight.shape):
            return "TensorFlow computes other values on CPUs with AMX for this window and channels"
        signed = plain_name(node.input[0]) not in self.structure.non_negative
        if signed and compute_zero_padding(node, weight, shape) is None:
            return "amount of padding depends on an unknown size"
        return None

    def _explain_no_layer(self, node: NodeDef) -> str:
        if node.name in self.members:
            return reasons.FUSED
        if node.name in self.structure.agnostic_ops:
            return reasons.AGNOSTIC
        if get_op_role(node) is Role.BATCH_PRODUCT:
            if any(map(self.model.graph.is_constant, list_data_inputs(node))):
                return "not a product of the last axes with a matrix"
            return reasons.BOTH_FACTORS_COMPUTED
        if get_op_role(node) is Role.AVERAGE:
            return find_average_obstacle(node) or reasons.NO_INTEGER_KERNEL
        if not has_kernel(node.op):
            return "TensorFlow has no CPU kernel for the op"
        return reasons.NO_INTEGER_KERNEL


def _is_wrong_with_amx(shape: tuple[int, ...]) -> bool:
    """Whether the kernel of an INT8 convolution, [height, width, inputs, outputs], is wrong.

    Measured with TensorFlow 2.21 (oneDNN 3.7) on a CPU with AMX: a row of the window has several
    times 64 products, and each position few channels. Refused on every CPU, as a model saved on
    another one may run on such a CPU.
    """
    height, width, channels, _ = shape
    products = channels * (height if width == 1 else width)
    return channels < _LEAST_AMX_CHANNELS and products > _AMX_ROW and products % _AMX_ROW == 0


def list_needed_forms(node: NodeDef, group: FusionGroup) -> frozenset[str]:
    """Return the integer kernel variants that a layer may use, as in `int8_accumulation`."""
    forms = ["plain"]
    if set(get_integers_attribute(node, "dilations")) - {1}:
        forms.append("dilated")
    if get_text_attribute(node, "padding") == "EXPLICIT":
        forms.append("explicit")
    if group.residual_sum is not None:
        forms.append(SUMMAND)
    if group.activation is not None:
        forms.append(group.activation.kind)
    return frozenset(f"{node.op} {form}" for form in forms)
