"""Write a plan's INT8 ops into a graph as quantize/dequantize pairs, the portable form."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.calibration import affine_parameters
from neural_mp.adaptors.pytorch import ops
from neural_mp.adaptors.pytorch.casts import cast_dtype
from neural_mp.adaptors.pytorch.graph import is_head, tensor_name
from neural_mp.adaptors.pytorch.model import OP_NAME, add_constant, constant, op_nodes
from neural_mp.errors import ConversionError
from neural_mp.flow import Flow
from neural_mp.observations import Observations
from neural_mp.plan import PrecisionPlan
from neural_mp.precision import Precision


def insert_quantization(
    module: GraphModule, flow: Flow, plan: PrecisionPlan, observations: Observations
) -> None:
    """Rewrite the graph in place.

    Raises:
        ConversionError: a tensor that must be quantized was never observed.
    """
    algorithms = _algorithms(flow, plan)
    nodes = {
        tensor_name(n): n for n in module.graph.nodes if n.op in ("placeholder", "call_function")
    }
    for tensor in flow.root:
        algorithm = algorithms[flow.root[tensor]]
        scale, zero_point = _parameters(flow.root[tensor], algorithm, observations)
        _quantize(module, nodes[tensor], scale, zero_point, flow)
    for name, node in op_nodes(module).items():
        # A plan may also name what runs along with a layer; only layers have weights.
        named_int8 = name in plan and plan[name].precision is Precision.INT8
        if named_int8 and is_head(module, node):
            _quantize_weight(module, node)


def _algorithms(flow: Flow, plan: PrecisionPlan) -> dict[str, str]:
    """Quantized tensor → the calibration algorithm its first reader asks for."""
    found: dict[str, str] = {}
    for op, sources in flow.int8_reads.items():
        config = plan.get(op)
        if config is not None and config.activation is not None:
            for source in sources:
                found.setdefault(flow.root[source], config.activation.algorithm)
    for root in flow.root.values():
        found.setdefault(root, "minmax")
    return found


def _parameters(tensor: str, algorithm: str, observations: Observations) -> tuple[float, int]:
    try:
        low, high = observations.ranges[tensor][algorithm]
    except KeyError:
        raise ConversionError(
            f"tensor {tensor!r} must be quantized, but its {algorithm} range was never observed; "
            f"calibrate first, or give a plan file that holds its observations"
        ) from None
    return affine_parameters(low, high)


def _quantize(module: GraphModule, node: Node, scale: float, zero_point: int, flow: Flow) -> None:
    name = tensor_name(node)
    graph = module.graph
    readers = [
        user
        for user in node.users
        if name in flow.int8_outputs
        or name in flow.int8_reads.get(user.meta.get(OP_NAME, ""), frozenset())
    ]
    after = node
    if node.op == "placeholder":
        after = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(after):
        quantized = graph.call_function(ops.quantize, (node, scale, zero_point))
    quantized.meta["val"] = node.meta["val"].to(torch.uint8)
    pairs: dict[torch.dtype, Node] = {}

    def dequantized(dtype: torch.dtype) -> Node:
        if dtype not in pairs:
            with graph.inserting_after(quantized):
                pair = graph.call_function(ops.dequantize, (quantized, scale, zero_point, dtype))
            pair.meta["val"] = node.meta["val"].to(dtype)
            pairs[dtype] = pair
        return pairs[dtype]

    for reader in readers:
        dtype = cast_dtype(reader)
        if dtype is not None and OP_NAME not in reader.meta:  # straight to the 16-bit type
            reader.replace_all_uses_with(dequantized(dtype))
            graph.erase_node(reader)
        else:
            reader.replace_input_with(node, dequantized(torch.float32))


def _quantize_weight(module: GraphModule, node: Node) -> None:
    weight = constant(module, node.args[1])
    assert weight is not None
    with torch.no_grad():
        integers, scales = ops.quantize_weight(weight)
    stem = f"{node.name}_weight"
    arguments = (
        add_constant(module, f"{stem}_int8", integers, node),
        add_constant(module, f"{stem}_scales", scales, node),
    )
    with module.graph.inserting_before(node):
        dequantized = module.graph.call_function(ops.dequantize_weight, arguments)
    dequantized.meta["val"] = node.args[1].meta["val"]
    node.update_arg(1, dequantized)
