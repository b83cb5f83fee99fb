"""Writers of the integer kernels of ONNX Runtime, which the table of ops refers to.

Convolutions and joining ops are placed between DequantizeLinear and QuantizeLinear, which ONNX
Runtime fuses into one kernel. Matrix products are written as that kernel
(`com.microsoft.MatMulIntegerToFloat`, in ONNX Runtime's `ContribOperators.md`): fusion would
exclude the bias, and keeps a product of known size with a bias in float.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.kernels import fusion
from neural_mp.adaptors.common.named_graphs import FP32, UINT8
from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.common.weights.grouped_weight import (
    GroupedWeight,
    GroupParameters,
    Quantizer,
)
from neural_mp.adaptors.onnxrt.graph.edit import (
    get_constant_array,
    get_node_input,
    put_input,
    require_constant_array,
)
from neural_mp.adaptors.onnxrt.kernels import n_bits
from neural_mp.adaptors.onnxrt.kernels.registry import CONTRIB, INT8_LSTM, INT8_PRODUCT
from neural_mp.adaptors.onnxrt.kernels.tensor_variants import (
    INT32,
    StoredWeight,
    Variants,
    store_weight,
)
from neural_mp.core.precision import OpConfig
from neural_mp.core.quant_spec import QuantSpec

FusionGroup = fusion.FusionGroup[ir.Node, ir.Value]

#: Positions of the weights of the INT8 LSTM, as of LSTM, each with that of its zero points; the
#: scales precede the zero points.
LSTM_WEIGHTS = ((1, 9), (2, 11))
#: Activation that clamps its input → its least result, unless an input bounds it.
_LEAST_RESULTS = {"Relu": 0.0, "Clip": -np.inf}
_UINT8_MAX = np.iinfo(np.uint8).max


def write_convolution(variants: Variants, fusion_group: FusionGroup, config: OpConfig) -> None:
    """Convert a convolution with its fused ops; its kernel writes INT8 only."""
    as_product = is_pointwise(fusion_group.head)
    if as_product and str(fusion_group.tail.name) not in variants.int8_outputs:
        _write_pointwise(variants, fusion_group.head, config)
    else:
        write_kernel(variants, fusion_group, config)


def is_pointwise(convolution: ir.Node) -> bool:
    """Whether a convolution multiplies each position by one matrix."""
    weight, numbers = get_node_input(convolution, 1), convolution.attributes
    if weight is None or weight.const_value is None:
        return False
    return (
        set(weight.const_value.shape.numpy()[2:]) == {1}
        and numbers.get_int("group", 1) == 1
        and set(numbers.get_ints("strides", [1])) == {1}
        and not any(numbers.get_ints("pads", [0]))
    )


def get_clamp_limits(node: ir.Node) -> tuple[float, float] | None:
    """Return the bounds of an activation's result; None for other ops."""
    if node.op_type not in _LEAST_RESULTS:
        return None
    bounds = [_LEAST_RESULTS[node.op_type], np.inf]
    for index in (1, 2):
        bound = get_node_input(node, index)
        if bound is None:
            continue
        array = get_constant_array(bound)
        if array is None or array.size != 1:
            return None
        bounds[index - 1] = float(array.reshape(()))
    low, high = bounds
    return (low, high) if low <= 0 <= high else None


def write_kernel(variants: Variants, fusion_group: FusionGroup, config: OpConfig) -> None:
    """Convert a convolution or joining op with its fused ops."""
    head = fusion_group.head
    if config.weight is not None:
        _quantize_conv_inputs(variants, head, config)
    else:
        for position, value in enumerate(head.inputs):
            assert value is not None
            head.replace_input_with(position, variants.as_kernel_input(value))
    result, last = head.outputs[0], head
    tail = fusion_group.tail.outputs[0]
    kept_within = (
        get_clamp_limits(fusion_group.tail) if fusion_group.activation is not None else None
    )
    if kept_within is not None and not variants.get_quant_params(tail).clamps_to(*kept_within):
        result, last = tail, fusion_group.tail
    variants.set_variant(tail, UINT8, variants.quantize_value(tail, result, after=last))


def write_pool(variants: Variants, fusion_group: FusionGroup, config: OpConfig) -> None:
    """Convert the mean of all positions of an image: the pooling has an integer kernel."""
    head = fusion_group.head
    (data, *_), (tail,), name = head.inputs, head.outputs, str(head.name)
    assert data is not None
    assert data.shape is not None
    inputs = [variants.as_kernel_input(data)]
    pooled = variants.add_node("GlobalAveragePool", inputs, f"{name}/pooled", ir.DataType.FLOAT)
    stored = variants.quantize_value(tail, pooled)
    if not head.attributes.get_int("keepdims", 1):
        positions = np.arange(2, len(data.shape))
        axes = variants.names.add_constant(f"{name}.positions", positions)
        stored = variants.add_node("Squeeze", [stored, axes], f"{name}/squeezed", ir.DataType.UINT8)
    variants.set_variant(tail, UINT8, stored)


def write_hard_sigmoid(variants: Variants, fusion_group: FusionGroup, config: OpConfig) -> None:
    """Convert a HardSigmoid to the kernel of a sum, which saturates where the op clips."""
    head, tail = fusion_group.head, fusion_group.tail.outputs[0]
    (data,), name = head.inputs, str(head.name)
    assert data is not None
    assert data.shape is not None
    zero = variants.quant_parameters(data)[1]
    slope = (
        np.float32(head.attributes.get_float("alpha", 0.2)) * variants.get_quant_params(data).scale
    )
    offset = head.attributes.get_float("beta", 0.5) / _UINT8_MAX
    # Summands with different numbers of axes slow the kernel down.
    largest = np.full([1] * len(data.shape), _UINT8_MAX, np.uint8)
    inputs = [
        variants.as_uint8(data),
        variants.names.add_constant(f"{name}.slope", np.float32(slope)),
        zero,
        variants.names.add_constant(f"{name}.offset", largest),
        variants.names.add_constant(f"{name}.offset/scale", np.float32(offset)),
        variants.names.add_constant(f"{name}.offset/zero_point", np.uint8(0)),
        *variants.quant_parameters(tail),
    ]
    result = variants.add_node(
        "QLinearAdd", inputs, f"{name}/{UINT8}", ir.DataType.UINT8, domain=CONTRIB
    )
    encoding = variants.get_quant_params(tail)
    if not encoding.clamps_to(0.0, 1.0):
        # A range wider than 0 to 1, e.g. of a model that is quantized already.
        most = min(encoding.zero_point + round(1 / encoding.scale), _UINT8_MAX)
        bounds = [
            variants.names.add_constant(f"{name}.{end}", np.uint8(value))
            for end, value in (("least", encoding.zero_point), ("most", most))
        ]
        result = variants.add_node("Clip", [result, *bounds], f"{name}/clipped", ir.DataType.UINT8)
    variants.set_variant(tail, UINT8, result)


def _quantize_conv_inputs(variants: Variants, head: ir.Node, config: OpConfig) -> None:
    data, weight_value, *rest = head.inputs
    assert data is not None
    weight, bias = (
        require_constant_array(weight_value),
        get_constant_array(rest[0]) if rest else None,
    )
    assert config.weight is not None
    scale = variants.get_quant_params(data).scale
    stored = store_weight(weight, 0, config.weight, bias, scale)
    stem = str(head.name)
    head.replace_input_with(0, variants.as_kernel_input(data))
    head.replace_input_with(1, variants.insert_weight(f"{stem}.weight", stored))
    if bias is not None:
        scales = (stored.scales * np.float32(scale)).astype(np.float32)
        zeros = np.zeros(len(scales), np.int32)
        steps = np.rint(bias.astype(np.float64) / scales.astype(np.float64))
        integers = np.clip(steps, INT32.min, INT32.max).astype(np.int32)
        stored_bias = StoredWeight(integers, scales, zeros, 0)
        head.replace_input_with(2, variants.insert_weight(f"{stem}.bias", stored_bias))


def write_product(variants: Variants, fusion_group: FusionGroup, config: OpConfig) -> None:
    """Convert a product with a constant matrix, including its bias."""
    head = fusion_group.head
    data = head.inputs[0]
    assert data is not None
    assert config.weight is not None
    matrix, bias = matrix_and_bias(head)
    if fusion_group.bias is not None:
        bias = require_constant_array(fusion_group.bias.operand).reshape(-1)
    stored = store_weight(matrix, 1, config.weight)
    result = fusion_group.tail.outputs[0]
    if config.approach == "dynamic":
        *values_of_rows, sizes = variants.quantize_rows(data)
        inputs = _list_product_inputs(variants, head, values_of_rows, stored, None)
        operands = [("Mul", sizes)]
        if bias is not None:
            real = variants.names.add_constant(f"{head.name}.bias", bias.astype(np.float32))
            operands.append(("Add", real))
        variants.replace_node(head, INT8_PRODUCT, inputs, result, operands=operands)
        return
    values, parameters = variants.as_uint8(data), list(variants.quant_parameters(data))
    inputs = _list_product_inputs(variants, head, [values, *parameters], stored, bias)
    variants.replace_node(head, INT8_PRODUCT, inputs, result)


def _write_pointwise(variants: Variants, head: ir.Node, config: OpConfig) -> None:
    """Convert a convolution of single positions whose result is read in float.

    The kernel of a convolution writes INT8 only. The same as a product, with the channels last,
    writes float: without rounding, and without a DequantizeLinear.
    """
    data, weight_value, *rest = head.inputs
    assert data is not None
    assert config.weight is not None
    weight, bias = (
        require_constant_array(weight_value),
        get_constant_array(rest[0]) if rest else None,
    )
    stored = store_weight(weight.reshape(weight.shape[:2]).T, 1, config.weight)
    operands = [variants.move_channels_last(data, weight.ndim), *variants.quant_parameters(data)]
    inputs = _list_product_inputs(variants, head, operands, stored, bias)
    order = [0, weight.ndim - 1, *range(1, weight.ndim - 1)]
    variants.replace_node(head, INT8_PRODUCT, inputs, head.outputs[0], order=order)


def _list_product_inputs(
    variants: Variants,
    head: ir.Node,
    data: list[ir.Value],
    stored: StoredWeight,
    bias: Array | None,
) -> list[ir.Value | None]:
    """Return the inputs of a product, from those of its data: uint8, scale, zero point."""
    (values, scale, zero), stem = data, str(head.name)
    integers, steps, zeros = variants.weight_constants(f"{stem}.weight", stored)
    inputs: list[ir.Value | None] = [values, integers, scale, steps, zero, zeros]
    if bias is not None:
        inputs.append(variants.names.add_constant(f"{stem}.bias", bias.astype(np.float32)))
    return inputs


def matrix_and_bias(head: ir.Node) -> tuple[Array, Array | None]:
    """Return the matrix, shape [inputs, outputs], and bias of a layer, with factors applied."""
    weight, numbers = require_constant_array(head.inputs[1]), head.attributes
    matrix = weight.T if numbers.get_int("transB", 0) else weight
    if "alpha" in numbers:
        matrix = matrix * np.float32(numbers.get_float("alpha"))
    bias = get_constant_array(get_node_input(head, 2))
    if bias is None:
        return matrix, None
    bias = bias.reshape(-1) * np.float32(numbers.get_float("beta", 1.0))
    return matrix, np.broadcast_to(bias, matrix.shape[1:])


def write_mover(variants: Variants, node: ir.Node, fill: int | None) -> None:
    """Convert a quantize-agnostic op: the same op on uint8; `fill` is the position of a zero."""
    moved = node.inputs[0]
    assert moved is not None
    stored = variants.as_uint8(moved)
    if fill is not None:
        put_input(node, fill, variants.quant_parameters(moved)[1])
    node.replace_input_with(0, stored)
    for result in node.outputs:
        variants.put_moved(result, moved)


def write_table(variants: Variants, fusion_group: FusionGroup, config: OpConfig) -> None:
    """Convert an op that reads rows of a constant table: INT8 rows, each with its own scale.

    Memory bounds such an op, so several standard ops are about as fast as the original.
    """
    node = fusion_group.head
    rows = node.inputs[1]
    assert config.weight is not None
    assert rows is not None
    stored = store_weight(require_constant_array(node.inputs[0]), 0, config.weight)
    stem = str(node.name)
    table = variants.add_shared_constant(f"{stem}.table/{stored.integers.dtype}", stored.integers)
    scales = variants.names.add_constant(f"{stem}.table/scale", stored.scales.reshape(-1, 1))
    indices = variants.as_float(rows)
    integers = variants.add_node("Gather", [table, indices], f"{stem}/rows", ir.DataType.INT8)
    numbers = variants.add_node(
        "Cast", [integers], f"{stem}/cast", ir.DataType.FLOAT, {"to": int(ir.DataType.FLOAT)}
    )
    steps = variants.add_node("Gather", [scales, indices], f"{stem}/scales", ir.DataType.FLOAT)
    result = variants.add_node("Mul", [numbers, steps], f"{stem}/real", ir.DataType.FLOAT)
    variants.set_variant(node.outputs[0], FP32, result)


def write_lstm(variants: Variants, fusion_group: FusionGroup, config: OpConfig) -> None:
    """Convert an LSTM to dynamic quantization of its inputs."""
    node = fusion_group.head
    assert config.weight is not None
    for position, value in enumerate(node.inputs):
        if value is not None and position not in dict(LSTM_WEIGHTS):
            node.replace_input_with(position, variants.as_float(value))
    stem = str(node.name)
    for position, zero in LSTM_WEIGHTS:
        prefix = f"{stem}.weight_{position}"
        # The kernel expects the last two axes of [directions, rows, inputs] transposed.
        matrices = np.ascontiguousarray(
            require_constant_array(node.inputs[position]).transpose(0, 2, 1)
        )
        directions, _, columns = matrices.shape
        stored = [store_weight(matrix, 1, config.weight) for matrix in matrices]
        integers = np.stack([weight.integers for weight in stored])
        put_input(
            node, position, variants.add_shared_constant(f"{prefix}/{integers.dtype}", integers)
        )
        for index, name, parts in (
            (zero - 1, "scale", [weight.scales for weight in stored]),
            (zero, "zero_point", [weight.zero_points for weight in stored]),
        ):
            values = np.stack(parts).reshape(directions, columns)
            put_input(node, index, variants.names.add_constant(f"{prefix}/{name}", values))
    node.op_type, node.domain, node.version = INT8_LSTM, CONTRIB, None
    node.attributes.pop("layout", None)


def write_low_bit_product(
    variants: Variants, node: ir.Node, spec: QuantSpec, grouped: GroupedWeight | None
) -> None:
    """Convert a product with its weight in groups; `grouped`, if given, is not rounded again."""
    matrix, bias = matrix_and_bias(node)
    stored = grouped or _quantize_in_groups(np.ascontiguousarray(matrix.T), spec)
    operator = n_bits.build_product(stored, spec)
    data = node.inputs[0]
    assert data is not None
    floats = variants.as_float(data)
    if stored.input_factors is not None:
        factors = variants.names.add_constant(f"{node.name}.input_factors", stored.input_factors)
        name = f"{node.name}/scaled_inputs"
        floats = variants.add_node("Mul", [floats, factors], name, ir.DataType.FLOAT)
    inputs = [floats, *_add_shared_constants(variants, node, operator)]
    if bias is not None:
        # Between are zero points, omitted if symmetric, and the order of the inputs.
        inputs += [None] * (n_bits.BIAS - len(inputs))
        inputs.append(variants.names.add_constant(f"{node.name}.bias", bias.astype(np.float32)))
    variants.replace_node(node, n_bits.PRODUCT, inputs, node.outputs[0], operator.attributes)


def write_low_bit_table(
    variants: Variants, node: ir.Node, spec: QuantSpec, grouped: GroupedWeight | None
) -> None:
    """Convert a table to rows in groups; `grouped`, if given, is not rounded again."""
    operator = n_bits.build_table(
        grouped or _quantize_in_groups(require_constant_array(node.inputs[0]), spec), spec
    )
    codes, *parameters = _add_shared_constants(variants, node, operator)
    rows = node.inputs[1]
    assert rows is not None
    inputs = [codes, variants.as_float(rows), *parameters]
    variants.replace_node(node, n_bits.TABLE, inputs, node.outputs[0], operator.attributes)


def _quantize_in_groups(weight: Array, spec: QuantSpec) -> GroupedWeight:
    return Quantizer(spec, GroupParameters.ZERO_POINTS).round_to_nearest(weight)


def _add_shared_constants(
    variants: Variants, node: ir.Node, operator: n_bits.Operator
) -> list[ir.Value | None]:
    return [
        variants.add_shared_constant(f"{node.name}.weight/{part}", values)
        for part, values in operator.constants.items()
    ]
