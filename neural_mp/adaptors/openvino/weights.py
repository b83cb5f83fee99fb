"""Weights that a plan stores in integers: of layers, by channel or in groups, and of tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from neural_mp.adaptors.common.weights.grouped_weight import (
    GroupedWeight,
    GroupParameters,
    Quantizer,
    input_group,
)
from neural_mp.adaptors.openvino.fusion import GraphStructure, has_weight
from neural_mp.adaptors.openvino.graph_edit import give_name, name_of, redirect_inputs, tensor_of
from neural_mp.adaptors.openvino.integer_weights import (
    ALONE,
    STORED,
    WEIGHT,
    grouped_weight,
    is_table,
    layer_weight,
    matrix_of,
    matrix_sizes,
    product_weight,
    put_matrix,
    rows_of_table,
)
from neural_mp.adaptors.openvino.recurrent import resets_product, steps_of, stepwise_inputs
from neural_mp.adaptors.openvino.runtime import ops
from neural_mp.core.enums import KernelInputs
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.space import ResolvedPlan
from neural_mp.util.pytree import Array

#: Suffix of the name of inputs that a weight in groups scales.
SCALED = "/scaled_inputs"


@dataclass(frozen=True)
class WeightWriter:
    """Writes the weights of a plan into a graph.

    Attributes:
        structure: the graph.
        plan: the plan and its propagation.
        grouped: op → weight in groups to store as it is.
        owners: inserted node → the op that it was inserted for, to be extended.
    """

    structure: GraphStructure
    plan: ResolvedPlan
    grouped: Mapping[str, GroupedWeight]
    owners: dict[str, str]

    def _weights(self, *, grouped: bool) -> Iterator[tuple[str, Any, OpConfig, QuantSpec]]:
        """Yield name, node, config and quantization of weights in integers, in groups or not."""
        for name, node in self.structure.nodes.items():
            config = self.plan.plan.get(name)
            if config is None or config.weight is None:
                continue
            if (config.weight.group_size is not None) == grouped:
                yield name, node, config, config.weight

    def input_groups(self) -> list[int]:
        """Return the sizes of the groups of inputs that kernels round to INT8."""
        return [
            input_group(spec, size)
            for grouped in (True, False)
            for _, node, _, spec in self._weights(grouped=grouped)
            if spec.inputs is KernelInputs.INT8
            for size in (stepwise_inputs(node) if resets_product(node) else matrix_sizes(node)[1:])
        ]

    def quantize_layers(self) -> None:
        """Replace the weights of INT8 layers."""
        for name, node, config, spec in self._weights(grouped=False):
            if not has_weight(node) or self.plan.effective[name] is not Precision.INT8:
                continue
            stem = f"{name}{ALONE if config.activation is None else WEIGHT}"
            self.owners[stem] = name
            if config.activation is None:
                put_matrix(node, product_weight(stem, matrix_of(node), spec))
                continue
            redirect_inputs([node.input(1)], layer_weight(stem, node, spec))

    def group(self) -> None:
        """Replace the weights that the plan stores in groups."""
        for name, node, _, spec in self._weights(grouped=True):
            stem = f"{name}{WEIGHT}"
            quantizer = Quantizer(spec, GroupParameters.ZERO_POINTS)
            stored = self.grouped.get(name) or quantizer.nearest(matrix_of(node))
            put_matrix(node, grouped_weight(stem, f"{stem}{STORED}", stored, spec))
            if stored.input_factors is not None:
                self._scale_inputs(name, node, stored.input_factors)
            self.owners[stem] = name

    def replace_ops(self) -> None:
        """Replace tables and GRU whose weights the plan stores alone; results keep their names."""
        for name, node, _, spec in self._weights(grouped=False):
            if is_table(node):
                *nodes, result = rows_of_table(f"{name}{ALONE}", node, spec)
                results = [result]
            elif resets_product(node):
                nodes, results = steps_of(f"{name}{ALONE}", node, spec)
            else:
                continue
            self.owners.update(dict.fromkeys(map(name_of, nodes), name))
            for output, result in zip(node.outputs(), results, strict=True):
                readers = list(output.get_target_inputs())
                result.output(0).set_names(output.get_names())
                redirect_inputs(readers, give_name(tensor_of(output), result))

    def _scale_inputs(self, name: str, node: Any, factors: Array) -> None:
        scaled = ops.multiply(node.input_value(0), ops.constant(factors))
        redirect_inputs([node.input(0)], give_name(f"{name}{SCALED}", scaled))
        self.owners[f"{name}{SCALED}"] = name
