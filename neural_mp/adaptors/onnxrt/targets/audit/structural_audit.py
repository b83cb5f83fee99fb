"""Rules of a target that a file can be checked for without the target's compiler.

The rules are those of the profile. The check reads the file alone and shares no code with the
writer, whose mistakes it is to find.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.canonicalize import infer_shapes
from neural_mp.adaptors.onnxrt.graph.edit import get_constant_array
from neural_mp.adaptors.onnxrt.graph.opset import get_onnx_opset
from neural_mp.adaptors.onnxrt.kernels.ops import is_dequantize, is_quantize
from neural_mp.adaptors.onnxrt.targets.qdq_structure import (
    Operand,
    Pair,
    QdqOp,
    format_type_name,
    iterate_float_ops,
)
from neural_mp.core.enums import Granularity, QuantDType, Scheme
from neural_mp.targets import TargetProfile
from neural_mp.util.string_enum import StringEnum

logger = logging.getLogger(__name__)

#: Relative tolerance of products of scales: float32 rounds once or twice.
_TOLERANCE = 1e-5
#: Bits of the sums that a shift may take the least bias shift from; see `Shifts`.
_SUM_BITS = 16


class Rule(StringEnum):
    """Rule of a target; the last four are checked by its compiler, the others in the file."""

    OPSET = "opset"
    DOMAIN = "domain"
    SHAPES = "shapes"
    IO = "io"
    TYPE = "type"
    ZERO_POINT = "zero_point"
    SCALE = "scale"
    PAIR = "pair"
    GRANULARITY = "granularity"
    WEIGHT = "weight"
    BIAS = "bias"
    RING = "ring"
    WIDTH = "width"
    SAME_SCALE = "same_scale"
    FIXED = "fixed"
    SHIFT = "shift"
    REFUSED = "refused"
    COMPILE = "compile"
    FLOAT_KERNEL = "float_kernel"
    NOISE = "noise"


@dataclass(frozen=True)
class Finding:
    """A violation of a target's rule.

    Attributes:
        op: name of the op; empty for the file as a whole.
        op_type: type of the op; empty for the file as a whole.
        rule: the rule.
        message: text that names the op and what was expected.
    """

    op: str
    op_type: str
    rule: Rule
    message: str


def check_structure(
    model: onnx.ModelProto, profile: TargetProfile, integer_ops: Collection[str] | None = None
) -> list[Finding]:
    """Return the violations of a target's rules in a file with Q/DQ ops.

    A file does not say which ops are meant to run in integers. Without `integer_ops`, these are the
    ops with a quantized weight, and those without a weight that have a quantized operand and a
    quantized result.

    Args:
        model: the file; nested graphs are not checked.
        profile: the rules.
        integer_ops: names of the ops that a plan has in integers.
    """
    program = ir.from_proto(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(program)
    infer_shapes(program)
    audit = _Audit(program, profile, integer_ops)
    return list(audit.iterate_findings())


@dataclass(frozen=True)
class _Audit:
    program: ir.Model
    profile: TargetProfile
    integer_ops: Collection[str] | None

    def iterate_findings(self) -> Iterator[Finding]:
        """Yield the findings: of the file, of the pairs of Q/DQ, of the ops."""
        yield from self._check_file()
        ops = list(iterate_float_ops(self.program, self.profile))
        parameters = {
            operand.value.producer() for op in ops for operand in (op.weight, op.bias) if operand
        }
        for node in self.program.graph:
            readers = {node, *(use.node for value in node.outputs for use in value.uses())}
            if (is_quantize(node) or is_dequantize(node)) and not parameters & readers:
                yield from self._check_pair(Pair.from_node(node))
        for op in ops:
            yield from self._check_op(op)

    # The file

    def _check_file(self) -> Iterator[Finding]:
        least, newest = self.profile.opset
        opset = get_onnx_opset(self.program)
        if not least <= opset <= newest:
            yield Finding(
                "", "", Rule.OPSET, f"the opset must be from {least} to {newest}, got {opset}"
            )
        values = (*self.program.graph.inputs, *self.program.graph.outputs)
        for value in values:
            if self.profile.shapes == "static" and not _is_static(value):
                yield Finding(
                    str(value.name),
                    "",
                    Rule.SHAPES,
                    f"the shape of {value.name!r} must be static, got {value.shape}; set the sizes",
                )
            is_float = value.dtype is not None and value.dtype.is_floating_point()
            if self.profile.placement.io == "quantized" and is_float:
                yield Finding(
                    str(value.name),
                    "",
                    Rule.IO,
                    f"{value.name!r} must be integers, got {format_type_name(value.dtype)}",
                )

    # Pairs

    def _check_pair(self, pair: Pair) -> Iterator[Finding]:
        """Check the parameters of an activation."""
        rules, fail = self.profile.activation, _finding_factory(pair.node)
        types = [dtype.value for dtype in rules.types]
        if format_type_name(pair.dtype) not in types:
            yield fail(Rule.TYPE, f"store {' or '.join(types)}", format_type_name(pair.dtype))
        if pair.node.domain:
            yield fail(Rule.DOMAIN, "be in the domain ai.onnx", pair.node.domain)
        if not pair.is_per_tensor or pair.is_blocked:
            yield fail(Rule.GRANULARITY, "have one constant scale", _scales_text(pair))
        elif not (np.isfinite(pair.first_scale) and pair.first_scale > 0):
            yield fail(Rule.SCALE, "have a finite scale above 0", f"{pair.first_scale}")
        elif rules.needs_power_of_two and not _is_power_of_two(pair.scale):
            yield fail(Rule.SCALE, "have a power of two as its scale", f"{pair.first_scale:.8g}")
        middle = _middle_code(pair.dtype)
        is_fixed = any(self._find_fixed_params(use, pair) for use in _pair_producers(pair))
        if rules.scheme is Scheme.SYMMETRIC and not is_fixed and not _is_zero(pair, middle):
            yield fail(Rule.ZERO_POINT, f"have zero point {middle}", pair.as_text)
        yield from self._check_agreement(pair)

    def _check_agreement(self, pair: Pair) -> Iterator[Finding]:
        """Check that a DequantizeLinear reads what its QuantizeLinear stores."""
        value = pair.node.inputs[0]
        source = None if value is None else value.producer()
        if source is None or not is_quantize(source) or not is_dequantize(pair.node):
            return
        stored = Pair.from_node(source)
        if not pair.equals_pair(stored):
            expected = f"have the parameters of {source.name!r}, {stored.as_text}"
            yield _finding_factory(pair.node)(Rule.PAIR, expected, pair.as_text)

    def _find_fixed_params(self, node: ir.Node, pair: Pair) -> tuple[float, int] | None:
        """Return the scale and zero point that a type fixes for the results of an op."""
        fixed = self.profile.fixed.get(node.op_type, {})
        return next((fixed[t] for t in fixed if t.value == format_type_name(pair.dtype)), None)

    # Ops

    def _check_op(self, op: QdqOp) -> Iterator[Finding]:
        fail = _finding_factory(op.node)
        if op.node.domain:
            yield fail(Rule.DOMAIN, "be in the domain ai.onnx", op.node.domain)
            return
        if op.node.op_type in self.profile.refuse:
            yield fail(Rule.REFUSED, "be replaced, as the target takes no such op", "the op")
        if not self._is_integer(op):
            if self.profile.float_type is None and op.results:
                yield fail(Rule.REFUSED, "be in integers, as the target has no float", "floats")
            return
        yield from self._check_ring(op)
        yield from self._check_same_scale(op)
        yield from self._check_width(op)
        yield from self._check_fixed(op)
        if op.weight is not None:
            yield from self._check_weight(op, op.weight)
        if op.bias is not None:
            yield from self._check_bias(op, op.bias)
        if self.profile.shifts is not None and op.weight is not None:
            yield from self._check_shifts(op, op.weight)

    def _is_integer(self, op: QdqOp) -> bool:
        """Whether an op is meant to run in integers."""
        if self.integer_ops is not None and op.node.op_type not in self.profile.same_scale:
            return op.name in self.integer_ops
        if op.weight is not None:
            return op.weight.pair is not None
        kind, profile = op.node.op_type, self.profile
        is_listed = bool(profile.widths_of(kind)) or kind in profile.same_scale
        reads = any(operand.pair is not None for operand in op.activations)
        return is_listed and reads and any(result.pairs for result in op.results)

    def _check_ring(self, op: QdqOp) -> Iterator[Finding]:
        placement, fail = self.profile.placement, _finding_factory(op.node)
        is_fused = placement.inputs == "weighted" and op.node.op_type not in self.profile.ops
        operands = self._unfused_operands(op) if is_fused else op.activations
        for operand in (*operands, *filter(None, [op.weight])):
            if operand.pair is None:
                expected = f"read {operand.value.name!r} from a DequantizeLinear"
                yield fail(Rule.RING, expected, "a float: it would be computed in float")
        for result in op.results if placement.outputs == "always" else ():
            if not result.is_closed:
                expected = f"have its result {result.value.name!r} read by a QuantizeLinear only"
                yield fail(Rule.RING, expected, "other readers: it would be computed in float")

    def _unfused_operands(self, op: QdqOp) -> Iterator[Operand]:
        """Yield the operands besides one that a layer computes, into which the op is fused.

        None unless a plan says that the op is meant in integers.
        """
        has_fused = False
        for operand in op.activations if self.integer_ops is not None else ():
            producer = operand.value.producer()
            is_layer = producer is not None and producer.op_type in self.profile.ops
            if operand.pair is None and is_layer and not has_fused:
                has_fused = True
                continue
            yield operand

    def _check_width(self, op: QdqOp) -> Iterator[Finding]:
        kinds = {pair.dtype for pair in op.surrounding_pairs}
        fail = _finding_factory(op.node)
        if len(kinds) > 1:
            names = sorted(map(format_type_name, kinds))
            yield fail(Rule.WIDTH, "have one type for all inputs and results", " and ".join(names))
        kind = op.node.op_type
        if len(kinds) != 1 or None in kinds or kind in self.profile.same_scale:
            return
        (dtype,) = kinds
        assert dtype is not None
        allowed = self.profile.widths_of(kind)
        stored = op.weight.pair.dtype if op.weight is not None and op.weight.pair else None
        word = f"{'' if stored is None else f'w{stored.bitwidth}'}a{dtype.bitwidth}"
        # An op without a weight has no weight's bits.
        words = [f"a{widths.activation_bits}" if stored is None else widths for widths in allowed]
        if word not in words:
            expected = f"be in {', '.join(allowed)}" if allowed else "be in float"
            yield fail(Rule.WIDTH, expected, word)

    def _check_same_scale(self, op: QdqOp) -> Iterator[Finding]:
        pairs = op.surrounding_pairs
        if op.node.op_type not in self.profile.same_scale or len(pairs) < 2:
            return
        for pair in pairs[1:]:
            if not pair.equals_pair(pairs[0]):
                expected = f"keep type, scale and zero point of its input, {pairs[0].as_text}"
                yield _finding_factory(op.node)(Rule.SAME_SCALE, expected, pair.as_text)

    def _check_fixed(self, op: QdqOp) -> Iterator[Finding]:
        for pair in (pair for result in op.results for pair in result.pairs):
            numbers = self._find_fixed_params(op.node, pair)
            if numbers is None:
                continue
            scale, zero = numbers
            if not np.isclose(pair.first_scale, scale, rtol=_TOLERANCE) or not _is_zero(pair, zero):
                expected = f"store its result with scale {scale} and zero point {zero}"
                yield _finding_factory(op.node)(Rule.FIXED, expected, pair.as_text)

    # Weights and biases

    def _check_weight(self, op: QdqOp, weight: Operand) -> Iterator[Finding]:
        fail, rules, pair = _finding_factory(op.node), self.profile.weight, weight.pair
        if pair is None:
            return
        bits = 0 if pair.dtype is None else pair.dtype.bitwidth
        expected = rules.of_bits(op.node.op_type, bits)
        if format_type_name(pair.dtype) != expected:
            names = {*rules.types, *filter(None, [rules.by_op.get(op.node.op_type)])}
            yield fail(
                Rule.TYPE,
                f"have a weight of {expected or ' or '.join(sorted(names))}",
                format_type_name(pair.dtype),
            )
        if pair.dtype is not None and pair.dtype.is_signed() and not _is_zero(pair, 0):
            yield fail(Rule.ZERO_POINT, "have zero point 0 for its weight", pair.as_text)
        if rules.needs_power_of_two and not _is_power_of_two(pair.scale):
            yield fail(Rule.SCALE, "have powers of two as scales of its weight", _scales_text(pair))
        if weight.is_rounded != (self.profile.placement.weights == "qdq"):
            forms = ("stored integers", "floats that a QuantizeLinear rounds")
            yield fail(
                Rule.WEIGHT,
                f"have {forms[not weight.is_rounded]} as its weight",
                forms[weight.is_rounded],
            )
        yield from self._check_granularity(op, pair)

    def _check_granularity(self, op: QdqOp, pair: Pair) -> Iterator[Finding]:
        fail = _finding_factory(op.node)
        array = None if op.weight is None else get_constant_array(op.weight.constant)
        if pair.is_per_tensor and not pair.is_blocked:
            return
        if self.profile.weight.granularity_of(op.node.op_type) is Granularity.PER_TENSOR:
            yield fail(Rule.GRANULARITY, "have one scale for its weight", _scales_text(pair))
            return
        axis, rank = op.channel_axis, 0 if array is None else array.ndim
        own = pair.node.attributes.get_int("axis", 1)
        shape = () if array is None else array.shape
        is_whole = pair.scale is not None and pair.scale.shape == shape[axis : axis + 1]
        if pair.is_blocked or own % max(rank, 1) != axis or not is_whole:
            expected = f"have one scale for each index of axis {axis} of its weight"
            yield fail(Rule.GRANULARITY, expected, f"{_scales_text(pair)}, axis {own}")

    def _check_bias(self, op: QdqOp, bias: Operand) -> Iterator[Finding]:
        fail, rule, pair = _finding_factory(op.node), self.profile.bias, bias.pair
        stored = "float" if pair is None else format_type_name(pair.dtype)
        if stored != rule:
            yield fail(Rule.BIAS, f"have a bias of {rule}", stored)
        if pair is None or stored != rule:
            return
        if not _is_zero(pair, 0):
            yield fail(Rule.ZERO_POINT, "have zero point 0 for its bias", pair.as_text)
        if rule == "int8":
            if self.profile.weight.needs_power_of_two and not _is_power_of_two(pair.scale):
                yield fail(
                    Rule.SCALE, "have a power of two as the scale of its bias", _scales_text(pair)
                )
            return
        data, weight = op.activations[:1], op.weight
        if not data or data[0].pair is None or weight is None or weight.pair is None:
            return
        if weight.pair.scale is None or not _is_product(
            pair.scale, data[0].pair, weight.pair.scale
        ):
            expected = "have the product of the scales of input and weight as scale of its bias"
            yield fail(Rule.BIAS, expected, _scales_text(pair))

    def _check_shifts(self, op: QdqOp, weight: Operand) -> Iterator[Finding]:
        shifts, fail = self.profile.shifts, _finding_factory(op.node)
        data = next((o.pair for o in op.activations if o.pair is not None), None)
        result = next((pair for r in op.results for pair in r.pairs), None)
        if shifts is None or data is None or result is None or weight.pair is None:
            return
        summed = _scale_position(data) + _scale_position(weight.pair)
        shift, (least, most) = summed - _scale_position(result), shifts.result
        if not least <= shift <= most:
            expected = f"have scales that shift its result by {least} to {most} bits"
            yield fail(Rule.SHIFT, expected, f"{shift:g}")
        if op.bias is not None and op.bias.pair is not None:
            shift_of_bias, least_of_bias = summed - _scale_position(op.bias.pair), shift - _SUM_BITS
            if not min(0, least_of_bias) <= shift_of_bias <= shifts.bias:
                limits = f"{min(0, least_of_bias):g} to {shifts.bias} bits"
                expected = f"have scales that shift its bias by {limits}"
                yield fail(Rule.SHIFT, expected, f"{shift_of_bias:g}")


def _finding_factory(node: ir.Node) -> Callable[[Rule, str, str], Finding]:
    """Return a function from rule, expectation and fact to the finding about an op."""
    name = str(node.name or node.outputs[0].name)

    return lambda rule, expected, actual: Finding(
        name, node.op_type, rule, f"{node.op_type} {name!r} must {expected}, got {actual}"
    )


def _pair_producers(pair: Pair) -> Iterator[ir.Node]:
    """Yield the op whose result a pair stores."""
    value = pair.node.inputs[0]
    producer = None if value is None else value.producer()
    if producer is not None and is_quantize(producer):
        value = producer.inputs[0]
        producer = None if value is None else value.producer()
    if producer is not None:
        yield producer


def _is_static(value: ir.Value) -> bool:
    return value.shape is not None and all(isinstance(size, int) for size in value.shape)


def _middle_code(dtype: ir.DataType | None) -> int:
    unsigned = (
        dtype is not None and format_type_name(dtype) in set(QuantDType) and not dtype.is_signed()
    )
    return 1 << (dtype.bitwidth - 1) if unsigned and dtype is not None else 0


def _is_zero(pair: Pair, zero_point: int) -> bool:
    return pair.zero_point is not None and bool((pair.zero_point == zero_point).all())


def _is_power_of_two(scale: Array | None) -> bool:
    return scale is not None and bool((np.frexp(scale)[0] == 0.5).all())  # the mantissa


def _is_product(scale: Array | None, data: Pair, weight_scale: Array) -> bool:
    if scale is None or scale.size != weight_scale.size:
        return False
    product = weight_scale.astype(np.float64).reshape(-1) * data.first_scale
    return bool(np.allclose(scale.reshape(-1), product, rtol=_TOLERANCE, atol=0))


def _scale_position(pair: Pair) -> float:
    """Return -log2 of the largest scale of a pair."""
    return float("nan") if pair.scale is None else float(-np.log2(pair.scale.max()))


def _scales_text(pair: Pair) -> str:
    """Return the scales of a pair as text."""
    if pair.scale is None:
        return "computed scales"
    if pair.is_blocked:
        return f"{pair.scale.size} scales of blocks"
    return f"scale {pair.first_scale:.8g}" if pair.is_per_tensor else f"{pair.scale.size} scales"
