"""Kernels of every op, from ONNX Runtime's kernel registry and ONNX's schemas."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common import capabilities as reasons
from neural_mp.adaptors.common.capabilities import IntegerKernel, OpKernels
from neural_mp.adaptors.common.kernels.int8_accumulation import KernelAccumulation
from neural_mp.adaptors.onnxrt.fusion import (
    find_decoding_concatenations,
    is_table,
    list_kernel_operands,
)
from neural_mp.adaptors.onnxrt.graph import edit
from neural_mp.adaptors.onnxrt.graph.opset import find_typed_inputs, is_function, supports_dtype
from neural_mp.adaptors.onnxrt.graph.sessions import CPU
from neural_mp.adaptors.onnxrt.graph.subgraphs import iterate_node_bodies
from neural_mp.adaptors.onnxrt.kernels import n_bits, ops
from neural_mp.adaptors.onnxrt.kernels.registry import (
    CONTRIB,
    has_kernel,
    has_kernel_of,
    runs_natively,
)
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.core.enums import CalibrationAlgorithm, Granularity, KernelInputs, QuantDType, Scheme
from neural_mp.core.int8_accumulation import REDUCED_WEIGHT, KernelKind, weight_quant_spec
from neural_mp.core.precision import Precision
from neural_mp.core.quant_spec import RANGE_ALGORITHMS, QuantSpec

_UNSIGNED = QuantSpec(QuantDType.UINT8, Scheme.SYMMETRIC, Granularity.PER_CHANNEL)
_SIXTEEN = {Precision.BF16: "bfloat16", Precision.FP16: "float16"}
_RUNS_GRAPHS = "it runs nested graphs, whose ops have precisions of their own"


def find_kernels(model: OnnxModel, accumulation: KernelAccumulation) -> dict[str, OpKernels]:
    """Return op → its kernels on the model's provider, or the reason for a missing kernel."""
    finder = _KernelFinder(model, accumulation)
    result = {name: finder.find_kernels(name, node) for name, node in model.structure.nodes.items()}
    part = OpKernels.none("it is a further output of an op and has the precision of that op")
    return {**result, **dict.fromkeys(model.structure.parts, part)}


class _FloatKernels(NamedTuple):
    """The 16-bit precisions without a kernel, with reasons, and those that are emulated."""

    missing: Mapping[Precision, str]
    emulated: frozenset[Precision]


def _is_outer(value: ir.Value, node: ir.Node) -> bool:
    """Whether an op within a body reads a tensor from outside."""
    return value.graph is not node.graph and value.const_value is None


@lru_cache
def _plain_kernel(
    weight: QuantSpec | None,
    algorithms: tuple[CalibrationAlgorithm, ...],
    alternatives: tuple[QuantSpec, ...],
) -> IntegerKernel:
    return IntegerKernel(weight, algorithms, other_weights=alternatives)


def _table_kernel(provider: str, columns: int) -> IntegerKernel:
    rows = _find_grouped_specs(provider, n_bits.TABLE, columns)
    return replace(reasons.table_in_bytes(), low_bits=rows)


def _product_kernel(provider: str, weight: QuantSpec, inputs: int) -> IntegerKernel:
    """Return the kernel of a product with a weight of so many rows."""
    algorithms: tuple[CalibrationAlgorithm, ...] = RANGE_ALGORITHMS
    if provider == CPU:
        algorithms = (*algorithms, CalibrationAlgorithm.DYNAMIC)
    low_bits = _find_grouped_specs(provider, n_bits.PRODUCT, inputs)
    corrections = reasons.ZERO_POINT_CORRECTIONS
    alternatives: tuple[QuantSpec, ...] = (REDUCED_WEIGHT, _UNSIGNED)
    if not isinstance(low_bits, str):
        floats = n_bits.list_working_specs(n_bits.PRODUCT, inputs, KernelInputs.FLOAT)
        alternatives += (*reasons.iterate_corrected_specs(floats, corrections),)
        alternatives += (*reasons.iterate_corrected_specs(low_bits, corrections, most_bits=8),)
    return IntegerKernel(
        weight,
        algorithms,
        other_weights=alternatives,
        low_bits=low_bits,
        low_bit_corrections=corrections,
    )


def _find_grouped_specs(provider: str, op: str, inputs: int) -> tuple[QuantSpec, ...] | str:
    """Return the quantizations of a weight in groups, or the reason for their absence."""
    if provider != CPU or not has_kernel(CPU, op, CONTRIB):
        return f"{provider} has no kernel {op}"
    return n_bits.list_kernel_specs(op, inputs)


@dataclass(frozen=True)
class _KernelFinder:
    """Finds the kernels of each op; ops that are alike share one object."""

    model: OnnxModel
    accumulation: KernelAccumulation
    _floats: dict[Hashable, _FloatKernels] = field(default_factory=dict)
    _integer: dict[Hashable, IntegerKernel] = field(default_factory=dict)
    _kernels: dict[tuple[str | int, int], OpKernels] = field(default_factory=dict)

    @cached_property
    def _decoding(self) -> set[ir.Node]:
        return find_decoding_concatenations(self.model.program.graph)

    def find_kernels(self, name: str, node: ir.Node) -> OpKernels:
        """Return the kernels of an op."""
        if self.model.obstacle is not None:
            return OpKernels.none(self.model.obstacle)
        floats = self.find_float_kernels(node)
        int8 = self.find_int8_obstacle(name, node) or self.find_integer_kernel(node)
        # Kernels have hundreds of forms, too many to compare: equal ones are one object.
        key = (int8 if isinstance(int8, str) else id(int8)), id(floats)
        if key not in self._kernels:
            self._kernels[key] = OpKernels(int8, floats.missing, floats.emulated)
        return self._kernels[key]

    def share_kernel(
        self, make: Callable[..., IntegerKernel], *arguments: Hashable
    ) -> IntegerKernel:
        """Return a kernel, the same for the same arguments."""
        key = make, arguments
        if key not in self._integer:
            self._integer[key] = make(*arguments)
        return self._integer[key]

    def find_float_kernels(self, node: ir.Node) -> _FloatKernels:
        """Return the 16-bit kernels of an op, by all that they depend on."""
        kinds = tuple(
            None if value is None else (value.dtype, edit.is_tensor(value), _is_outer(value, node))
            for value in node.inputs
        )
        several = len(edit.list_used_outputs(node)) > 1
        is_float = edit.is_float32(node.outputs[0])
        key = node.domain, node.op_type, kinds, several, is_float, frozenset(node.attributes)
        if key not in self._floats:
            obstacles = {precision: self.obstacle_16_bit(node, precision) for precision in _SIXTEEN}
            native = (
                precision
                for precision, dtype in _SIXTEEN.items()
                if runs_natively(self.model.provider, node, self.model.opset, dtype)
            )
            missing = {p: reason for p, reason in obstacles.items() if reason is not None}
            self._floats[key] = _FloatKernels(missing, frozenset(_SIXTEEN) - frozenset(native))
        return self._floats[key]

    def find_integer_kernel(self, node: ir.Node) -> IntegerKernel:
        """Return the integer kernel of an op that has one.

        A plan may request unsigned weights: products of two uint8 values use 16-bit factors, exact
        on every CPU, at two thirds of the speed of signed weights of ±63 with AVX2, and at less
        than half with VNNI.
        """
        algorithms = RANGE_ALGORITHMS
        if is_table(node):
            columns = edit.require_constant_array(node.inputs[0]).shape[1]
            return self.share_kernel(_table_kernel, self.model.provider, columns)
        if ops.has_role(node, ops.Role.RECURRENT):
            weight = weight_quant_spec(self.accumulation[KernelKind.DENSE])
            return _plain_kernel(weight, (CalibrationAlgorithm.DYNAMIC,), (REDUCED_WEIGHT,))
        if not ops.has_role(node, ops.Role.LAYER):
            return _plain_kernel(None, algorithms, ())
        weight = weight_quant_spec(self.accumulation[ops.get_kernel_kind(node, node.inputs[1])])
        if not ops.is_product(node):
            return _plain_kernel(weight, algorithms, (REDUCED_WEIGHT, _UNSIGNED))
        inputs = edit.require_constant_array(node.inputs[1]).shape[ops.get_weight_axes(node)[1]]
        return self.share_kernel(_product_kernel, self.model.provider, weight, inputs)

    def obstacle_16_bit(self, node: ir.Node, precision: Precision) -> str | None:
        """Return the reason why an op cannot run in 16 bits; None if it can."""
        opset = self.model.opset
        if not edit.is_float32(node.outputs[0]):
            return "its output is not known to be float32"
        if len(edit.list_used_outputs(node)) > 1:
            return reasons.SEVERAL_RESULTS
        if node.domain:
            return f"{node.domain}.{node.op_type} is not an op of the ai.onnx domain"
        if not find_typed_inputs(node, opset):
            return "its output and input types differ"
        if list(iterate_node_bodies(node)):
            return _RUNS_GRAPHS
        if node.op_type in ops.SCATTERS and "reduction" in node.attributes:
            return "its reduction has FP32 kernels only"
        if precision is Precision.FP16 and not supports_dtype(node, opset, "float16"):
            return f"ONNX has no FP16 {node.op_type} in opset {opset}"
        if precision is Precision.FP16 and self._loses_cast(node):
            return "ONNX Runtime drops casts of outer tensors that a nested graph reads"
        if precision is Precision.FP16 and self._falls_apart(node):
            return "ONNX Runtime has no FP16 kernel for the op or for the ops that it expands to"
        return None

    def _loses_cast(self, node: ir.Node) -> bool:
        """Whether ONNX Runtime removes the cast of a tensor before a body that reads it.

        The case if the consumer has no FP16 kernel, so that the body casts back.
        """
        outside = (_is_outer(value, node) for value in node.inputs if value is not None)
        return any(outside) and not runs_natively(
            self.model.provider, node, self.model.opset, "float16"
        )

    def _falls_apart(self, node: ir.Node) -> bool:
        """Whether ONNX Runtime expands an FP16 op into a function whose ops lack FP16.

        All functions of known kinds support FP16 (see the tests on ONNX's own models), unless they
        have inputs of another type.
        """
        opset = self.model.opset
        if not is_function(node, opset):
            return False
        typed = find_typed_inputs(node, opset)
        operands = [v for i, v in enumerate(node.inputs) if v is not None and i not in typed]
        is_listed = any(node.op_type in types for types in ops.TYPES.values())
        has_own = has_kernel_of(self.model.provider, node, opset, "float16")
        return any(map(edit.is_float32, operands)) or not (is_listed or has_own)

    def find_int8_obstacle(self, name: str, node: ir.Node) -> str | None:
        """Return the reason why an op has no integer kernel; None if it has one."""
        if name in self.model.rejected_ops:
            return self.model.rejected_ops[name]
        if name in self.model.structure.alone:
            if is_table(node):
                return reasons.find_table_obstacle(edit.require_constant_array(node.inputs[0]))
            return self._find_recurrent_obstacle(node)
        if name not in self.model.structure.fusion_groups:
            return self._explain_missing_kernel(name, node)
        provider, row = self.model.provider, ops.get_op_row(node)
        if not has_kernel(provider, row.kernel, row.domain):
            return f"{provider} has no integer kernel for {node.op_type}"
        if not all(edit.is_float32(v) for v in list_kernel_operands(node) if v is not None):
            return "an input is not known to be float32"
        return self._find_weight_obstacle(node) if ops.has_role(node, ops.Role.LAYER) else None

    def _find_recurrent_obstacle(self, node: ir.Node) -> str | None:
        row = ops.get_op_row(node)
        if self.model.provider != CPU or not has_kernel(CPU, row.kernel, row.domain):
            return f"{self.model.provider} has no integer kernel for {node.op_type}"
        if node.attributes.get_int("layout", 0):
            return "its layout is batch first; the integer kernel requires sequences first"
        for value in (*node.inputs[:4], *node.inputs[5:]):
            if value is not None and not edit.is_float32(value):
                return "an input is not known to be float32"
        for value in node.inputs[1:3]:
            weight = edit.get_constant_array(value)
            if weight is None:
                return reasons.COMPUTED_WEIGHT
            if not reasons.is_usable(weight):
                return reasons.UNUSABLE_WEIGHT
        return None if row.obstacle is None else row.obstacle(node)

    def _find_weight_obstacle(self, node: ir.Node) -> str | None:
        weight = edit.get_constant_array(node.inputs[1])
        if weight is None:
            return reasons.COMPUTED_WEIGHT
        if node.inputs[0] is None or node.inputs[0].const_value is not None:
            return reasons.CONSTANT_INPUT
        if not reasons.is_usable(weight):
            return reasons.UNUSABLE_WEIGHT
        if ops.is_product(node) and weight.ndim != 2:
            return "its weight is not a matrix"
        added = edit.get_node_input(node, 2)
        bias = edit.get_constant_array(added)
        if added is not None and bias is None:
            return "its bias is computed, not constant"
        return _find_product_obstacle(node, weight, bias) if ops.is_product(node) else None

    def _explain_missing_kernel(self, name: str, node: ir.Node) -> str:
        if name in self.model.structure.layer_of:
            return reasons.FUSED
        if name in self.model.structure.agnostic_ops:
            return reasons.AGNOSTIC
        if list(iterate_node_bodies(node)):
            return _RUNS_GRAPHS
        if node in self._decoding:
            return "no layer reads its result, so that each input keeps its own scale"
        is_joining = bool(node.inputs) and ops.has_role(node, ops.Role.JOINING)
        if ops.has_role(node, ops.Role.LAYER) or is_joining:
            return "its output is not known to be float32, or an input is constant"
        return ops.get_op_row(node).float_only or reasons.NO_INTEGER_KERNEL


def _find_product_obstacle(
    node: ir.Node, weight: np.ndarray, bias: np.ndarray | None
) -> str | None:
    if node.attributes.get_int("transA", 0):
        return reasons.TRANSPOSED_INPUT
    if bias is None:
        return None
    columns = weight.shape[ops.get_weight_axes(node)[0]]
    if bias.size not in (1, columns) or (bias.ndim and bias.shape[-1] != bias.size):
        return "its bias differs between rows"
    return None
