"""Graphs with QuantizeLinear and DequantizeLinear, which compilers of targets turn into integers.

A tensor is stored once, in the width of the op that computes it. An op of another width reads a
conversion: DequantizeLinear, QuantizeLinear, DequantizeLinear.

Biases are corrected by the mean that a rounded weight adds to each output channel: Nagel et al.,
"Data-Free Quantization Through Weight Equalization and Bias Correction", 2019, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.adaptors.onnxrt.graph.edit import (
    GraphNames,
    is_float32,
    list_used_outputs,
    require_constant_array,
)
from neural_mp.adaptors.onnxrt.targets.quantization import (
    UNBOUNDED,
    Grid,
    find_channel_axis,
    find_constant_bias,
    find_constant_weight,
    is_parameter,
    keeps_scale,
    list_moved_operands,
    make_activation_grid,
    make_fixed_grid,
    make_observed_grid,
    make_weight_grid,
    map_result_bounds,
)
from neural_mp.core.enums import Granularity, QuantDType
from neural_mp.core.observations import Range
from neural_mp.core.precision import OpConfig
from neural_mp.errors import ConversionError, PlanError
from neural_mp.targets import TargetProfile

#: Correction of an op in a plan.
BIAS_CORRECTION = "bias_correction"
#: Largest integer of a bias after rounding: half of int32, for the sums that follow.
_MAX_BIAS = 2**30
#: Least step of a sum of products in 16 bits, over that of the result. QNN computes channels below
#: 2**-24 wrongly, up to the whole range of the result. With this ratio, rounding of the weight
#: changes a product by 1/32 of a step of the result at most.
_LEAST_STEP_RATIO = 2.0**-20
#: Op types whose results are sums of products with the weight.
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


def compute_added_mean(node: ir.Node, error: Array, mean: Array | None) -> Array | None:
    """Return the mean that the error of a weight adds to each output channel; None if unknown.

    Args:
        node: a Conv or a Gemm; other ops have no result.
        error: rounded minus float weight, in the shape of the weight.
        mean: the mean of each channel of the input; None if not observed.
    """
    if mean is None or node.domain or bool(node.attributes.get_int("transA", 0)):
        return None
    if node.op_type == "Gemm":
        rows = error if node.attributes.get_int("transB", 0) else error.T
        return rows @ mean if mean.size == rows.shape[1] else None
    if node.op_type != "Conv":
        return None
    groups = node.attributes.get_int("group", 1)
    by_group = error.reshape(groups, len(error) // groups, error.shape[1], -1).sum(3)
    if mean.size != groups * error.shape[1]:
        return None
    return np.einsum("goi,gi->go", by_group, mean.reshape(groups, -1)).ravel()


def corrects_bias(node: ir.Node, means: Mapping[str, Array]) -> bool:
    """Whether the bias of an op can be corrected."""
    weight = find_constant_weight(node)
    if weight is None or find_constant_bias(node) is None:
        return False
    mean = means.get(str(node.inputs[0].name)) if node.inputs[0] is not None else None
    return (
        compute_added_mean(node, np.zeros(require_constant_array(weight).shape), mean) is not None
    )


def write_qdq(
    program: ir.Model,
    configs: Mapping[str, OpConfig],
    ranges: Mapping[str, Range],
    profile: TargetProfile,
    means: Mapping[str, Array],
) -> tuple[ir.Model, ConversionCounts]:
    """Return a copy of a graph with ops in integers, and the number of its conversions.

    Args:
        program: the float graph, with types.
        configs: op → its config; other ops stay in float, or keep the integers that they move.
        ranges: value → the range that its integers must cover, of `chosen_ranges`.
        profile: the rules of the target.
        means: value → the mean of each channel, for corrections of biases.

    Raises:
        PlanError: a correction in the plan cannot be applied.
        ConversionError: a tensor to be quantized was not observed.
    """
    written = program.clone()
    writer = _Writer(written.graph, configs, ranges, profile, means)
    for node in list(written.graph):
        writer.write_node(node)
    writer.store_outputs()
    outputs = set(written.graph.outputs)
    for name, value in list(written.graph.initializers.items()):
        if not value.uses() and value not in outputs:
            del written.graph.initializers[name]
    return written, ConversionCounts(0, writer.quantized, writer.dequantized)


@dataclass(frozen=True)
class _Stored:
    """A tensor in integers."""

    integers: ir.Value
    grid: Grid


@dataclass
class _Writer:
    graph: ir.Graph
    configs: Mapping[str, OpConfig]
    ranges: Mapping[str, Range]
    profile: TargetProfile
    means: Mapping[str, Array]
    quantized: int = 0
    dequantized: int = 0
    _stored: dict[ir.Value, _Stored] = field(default_factory=dict)
    #: Value and storage type (None: the type of its producer) → the float that ops read.
    _read: dict[tuple[ir.Value, QuantDType | None], tuple[ir.Value, Grid]] = field(
        default_factory=dict
    )
    _shared: dict[str, tuple[ir.Value, ir.Value]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names = GraphNames(self.graph)
        self._bounds = map_result_bounds(self.graph, self.profile)

    def write_node(self, node: ir.Node) -> None:
        """Rewrite one node of the float graph."""
        config = self.configs.get(str(node.name))
        if keeps_scale(node, self.profile) and any(v in self._stored for v in node.inputs if v):
            self._move_integers(node)
        elif config is not None and config.activation is not None:
            self._compute_op(node, config, config.activation.dtype)
        else:
            self._read_floats(node)

    def _move_integers(self, node: ir.Node) -> None:
        """Move integers, all in the widest type among them."""
        moved = [(position, node.inputs[position]) for position in list_moved_operands(node)]
        values = [value for _, value in moved if value in self._stored]
        if not values:
            self._read_floats(node)
            return
        first = max((self._stored[value].grid for value in values), key=lambda g: g.dtype.bits)
        for position, value in moved:
            assert value is not None
            if value.const_value is None:
                operand, _ = self._quantize_operand(value, first.dtype, node)
            else:
                name = f"{node.name}/{value.name}/{first.dtype}"
                stored = self._names.add_constant(
                    name, first.quantize_values(require_constant_array(value))
                )
                operand = self._insert_dequantize(stored, first, name, node)
            node.replace_input_with(position, operand)
        for result in list_used_outputs(node):
            self._store_result(node, result, first)

    def _read_floats(self, node: ir.Node) -> None:
        for position, value in enumerate(node.inputs):
            if value is not None and value in self._stored:
                node.replace_input_with(position, self._get_float_form(value, node))

    def _compute_op(self, node: ir.Node, config: OpConfig, dtype: QuantDType) -> None:
        weight, bias, data = find_constant_weight(node), find_constant_bias(node), node.inputs[0]
        grids: dict[int, Grid] = {}
        fused = self._fused_operand(node)
        for position, value in enumerate(node.inputs):
            if (
                position == fused
                or value is None
                or value is weight
                or value is bias
                or not is_float32(value)
            ):
                continue
            if is_parameter(node, position):
                continue
            if value.const_value is None:
                operand, grids[position] = self._quantize_operand(value, dtype, node)
            else:
                operand, grids[position] = self._quantize_constant_operand(value, dtype, node)
            node.replace_input_with(position, operand)
        results: dict[ir.Value, Grid] = {}
        if self.profile.placement.outputs == "always":
            results = {r: self._choose_output_grid(node, r, dtype) for r in list_used_outputs(node)}
        if weight is not None and config.weight is not None:
            scale = float(grids[0].scale)
            grid = self._replace_weight(node, weight, config, scale, results.values())
            if bias is not None and BIAS_CORRECTION in config.corrections:
                error = grid.dequantize_integers(
                    grid.quantize_values(require_constant_array(weight))
                ) - require_constant_array(weight)
                bias = self._correct_bias(node, bias, data, error)
            if bias is not None:
                self._replace_bias(node, bias, scale * grid.scale.astype(np.float64))
        for result, grid in results.items():
            self._store_result(node, result, grid)

    def _fused_operand(self, node: ir.Node) -> int | None:
        """Return the position of an operand that the compiler fuses the op into; None for others.

        A convolution or product writes such a sum without rounding its own result before.
        """
        if self.profile.placement.inputs == "all" or node.op_type in self.profile.ops:
            return None
        for position, value in enumerate(node.inputs):
            producer = None if value is None else value.producer()
            if value is None or producer is None or len(value.uses()) != 1:
                continue
            config = self.configs.get(str(producer.name))
            if config is not None and config.weight is not None:
                return position
        return None

    # Activations

    def _get_observed_range(self, value: ir.Value) -> Range:
        try:
            return self.ranges[str(value.name)]
        except KeyError:
            raise ConversionError(
                f"tensor {value.name!r} must be quantized, which requires an observed range; "
                f"calibrate first, or give a plan file with observations"
            ) from None

    def _activation_grid(self, value: ir.Value, dtype: QuantDType) -> Grid:
        bounds = self._bounds.get(str(value.name), UNBOUNDED)
        observed = self._get_observed_range(value)
        return make_observed_grid(observed, dtype, self.profile.activation, bounds)

    def _choose_output_grid(self, node: ir.Node, value: ir.Value, dtype: QuantDType) -> Grid:
        fixed = self.profile.fixed.get(node.op_type, {}).get(dtype)
        return (
            self._activation_grid(value, dtype) if fixed is None else make_fixed_grid(*fixed, dtype)
        )

    def _quantize_operand(
        self, value: ir.Value, dtype: QuantDType, node: ir.Node
    ) -> tuple[ir.Value, Grid]:
        """Return the dequantized form of a computed value in a storage type, and its grid."""
        stored = self._stored.get(value)
        if stored is not None and stored.grid.dtype is dtype:
            return self._get_float_form(value, node), stored.grid
        key = (value, dtype)
        if key not in self._read:
            source = value if stored is None else self._get_float_form(value, node)
            grid = self._activation_grid(value, dtype)
            integers = self._insert_quantize(source, grid, f"{value.name}/{dtype}", node)
            self._read[key] = (
                self._insert_dequantize(integers, grid, f"{value.name}/{dtype}", node),
                grid,
            )
        return self._read[key]

    def _get_float_form(self, value: ir.Value, node: ir.Node) -> ir.Value:
        key = (value, None)
        if key not in self._read:
            stored = self._stored[value]
            name = f"{value.name}/{stored.grid.dtype}"
            plain = self._insert_dequantize(stored.integers, stored.grid, name, node)
            self._read[key] = plain, stored.grid
        return self._read[key][0]

    def _store_result(self, node: ir.Node, value: ir.Value, grid: Grid) -> None:
        name = f"{value.name}/{grid.dtype}"
        integers = self._insert_quantize(value, grid, name, node, after=True)
        self._stored[value] = _Stored(integers, grid)

    def store_outputs(self) -> None:
        """Return the stored outputs of the graph from their integers, by their names."""
        for position, value in enumerate(self.graph.outputs):
            stored = self._stored.get(value)
            if stored is None:
                continue
            name, shape, kind = value.name, value.shape, value.type
            value.name = self._names.reserve_name(f"{name}/float")
            scale, zero = self._shared_parameters(stored.grid, f"{name}/{stored.grid.dtype}")
            result = ir.val(name, shape=shape, type=kind)
            self.graph.append(
                ir.node(
                    "DequantizeLinear",
                    [stored.integers, scale, zero],
                    outputs=[result],
                    name=self._names.reserve_name(f"{name}/output"),
                )
            )
            self.dequantized += 1
            self.graph.outputs[position] = result

    # Constants

    def _replace_weight(
        self,
        node: ir.Node,
        weight: ir.Value,
        config: OpConfig,
        data_scale: float,
        results: Iterable[Grid],
    ) -> Grid:
        assert config.weight is not None
        spec, values = config.weight, require_constant_array(weight)
        by_channel = spec.granularity is Granularity.PER_CHANNEL
        axis = find_channel_axis(node) if by_channel else None
        least = self._least_weight_scale(node, axis, data_scale, results)
        is_power = self.profile.weight.needs_power_of_two
        grid = make_weight_grid(values, spec.dtype, axis, is_power, least)
        position = list(node.inputs).index(weight)
        name = f"{node.name}/{weight.name}/{spec.dtype}"
        if self.profile.placement.weights == "qdq":
            integers = self._insert_quantize(weight, grid, name, node)
        else:
            integers = self._names.add_constant(name, grid.quantize_values(values))
        node.replace_input_with(position, self._insert_dequantize(integers, grid, name, node))
        return grid

    def _least_weight_scale(
        self, node: ir.Node, axis: int | None, data_scale: float, results: Iterable[Grid]
    ) -> Array | float:
        """Return the least scales with which 16-bit results and the bias fit their integers.

        Activations of 16 bits and a channel of tiny weights would exceed int32.
        """
        is_wide = node.op_type in _PRODUCTS
        steps = [float(grid.scale) for grid in results if is_wide and grid.dtype.bits == 16]
        least = _LEAST_STEP_RATIO * max(steps, default=0.0) / data_scale
        bias = find_constant_bias(node)
        if bias is None or self.profile.bias != "int32":
            return least
        of_bias = np.abs(require_constant_array(bias).astype(np.float64)) / (data_scale * _MAX_BIAS)
        return np.maximum(of_bias.ravel() if axis is not None else of_bias.max(initial=0.0), least)

    def _correct_bias(
        self, node: ir.Node, bias: ir.Value, data: ir.Value | None, error: Array
    ) -> ir.Value:
        """Replace a bias by a constant without the mean that the error of the weight adds."""
        mean = None if data is None else self.means.get(str(data.name))
        added = compute_added_mean(node, error, mean)
        if added is None:
            raise PlanError(
                f"correction {BIAS_CORRECTION!r} of op {node.name!r} requires channel statistics "
                f"of its input; calibrate again, or remove the correction"
            )
        values = (require_constant_array(bias) - added).astype(np.float32)
        corrected = self._names.add_constant(f"{bias.name}/corrected", values)
        node.replace_input_with(list(node.inputs).index(bias), corrected)
        return corrected

    def _replace_bias(self, node: ir.Node, bias: ir.Value, product: np.ndarray) -> None:
        """Replace a bias by integers, in units of the `product` of the scales."""
        if self.profile.bias == "float":
            return
        values, name = require_constant_array(bias), f"{node.name}/{bias.name}"
        values = values.reshape(values.shape[-1:])  # of one row, which is added to all
        if self.profile.bias == "int32":
            info = np.iinfo(np.int32)
            steps = np.clip(np.rint(values / product), info.min, info.max).astype(np.int32)
            scale = product.astype(np.float32)
            zero, axis = np.zeros(scale.shape, np.int32), 0 if scale.ndim else None
            integers = self._names.add_constant(f"{name}/int32", steps)
            parts = [
                self._names.add_constant(f"{name}/int32/scale", scale),
                self._names.add_constant(f"{name}/int32/zero", zero),
            ]
            plain = self._insert_dequantize_by(integers, parts, axis, f"{name}/int32", node)
        else:
            is_power = self.profile.weight.needs_power_of_two
            grid = make_weight_grid(values, QuantDType.INT8, None, is_power)
            integers = self._names.add_constant(f"{name}/int8", grid.quantize_values(values))
            plain = self._insert_dequantize(integers, grid, f"{name}/int8", node)
        node.replace_input_with(list(node.inputs).index(bias), plain)

    def _quantize_constant_operand(
        self, value: ir.Value, dtype: QuantDType, node: ir.Node
    ) -> tuple[ir.Value, Grid]:
        """Return a constant operand in the storage type of the activations, and its grid."""
        values, rules = require_constant_array(value), self.profile.activation
        low, high = float(values.min(initial=0)), float(values.max(initial=0))
        grid = make_activation_grid(low, high, dtype, rules.scheme, rules.needs_power_of_two)
        name = f"{node.name}/{value.name}/{dtype}"
        integers = self._names.add_constant(name, grid.quantize_values(values))
        return self._insert_dequantize(integers, grid, name, node), grid

    # Nodes

    def _shared_parameters(self, grid: Grid, name: str) -> tuple[ir.Value, ir.Value]:
        """Return the scale and zero point of a tensor, which its Q and DQ share."""
        if name not in self._shared:
            scale = self._names.add_constant(f"{name}/scale", grid.scale)
            self._shared[name] = scale, self._names.add_constant(f"{name}/zero", grid.zero_point)
        return self._shared[name]

    def _insert_quantize(
        self, value: ir.Value, grid: Grid, name: str, node: ir.Node, after: bool = False
    ) -> ir.Value:
        parts = self._shared_parameters(grid, name)
        added = self._create_node("QuantizeLinear", [value, *parts], grid.axis, name)
        if after:
            self.graph.insert_after(node, added)
        else:
            self.graph.insert_before(node, added)
        self.quantized += 1
        return added.outputs[0]

    def _insert_dequantize(
        self, integers: ir.Value, grid: Grid, name: str, node: ir.Node
    ) -> ir.Value:
        return self._insert_dequantize_by(
            integers, self._shared_parameters(grid, name), grid.axis, name, node
        )

    def _insert_dequantize_by(
        self,
        integers: ir.Value,
        parts: tuple[ir.Value, ir.Value] | list[ir.Value],
        axis: int | None,
        name: str,
        node: ir.Node,
    ) -> ir.Value:
        added = self._create_node("DequantizeLinear", [integers, *parts], axis, name)
        self.graph.insert_before(node, added)
        self.dequantized += 1
        return added.outputs[0]

    def _create_node(
        self, op_type: str, inputs: list[ir.Value], axis: int | None, name: str
    ) -> ir.Node:
        attributes = {} if axis is None else {"axis": axis}
        ending = "quantized" if op_type == "QuantizeLinear" else "float"
        result = ir.val(self._names.reserve_name(f"{name}/{ending}"))
        node_name = self._names.reserve_name(f"{name}/{op_type}")
        return ir.node(op_type, inputs, attributes, outputs=[result], name=node_name)
