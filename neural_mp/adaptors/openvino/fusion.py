"""Structure of a graph: fusion groups of the CPU plugin, and ops that join or pass on INT8."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

from neural_mp.adaptors.common.kernels import fusion
from neural_mp.adaptors.common.kernels.fusion import (
    BIAS,
    SUM,
    FusionRules,
    find_fusion_groups,
    map_fused_ops,
)
from neural_mp.adaptors.openvino.graph.edit import (
    find_only_reader,
    get_constant_array,
    get_known_sizes,
    get_op_type,
    get_tensor_name,
    get_weight_output,
    is_constant,
    is_float,
    iterate_op_nodes,
    list_read_outputs,
    name_of,
    rank_of,
)
from neural_mp.adaptors.openvino.graph.recurrent import has_integer_kernel
from neural_mp.adaptors.openvino.ops import Role, get_op_row, has_role
from neural_mp.adaptors.openvino.runtime import ov
from neural_mp.core.int8_accumulation import KernelKind

FusionGroup = fusion.FusionGroup[str, str]
Step = fusion.Step[str, str]

#: The axis of channels, the axes of a sequence with channels, and the fewest of a picture.
_CHANNELS, _SEQUENCE_AXES, _LEAST_AXES = 1, 3, 4
#: Ops between a tensor and the convolution that it comes from.
_MAX_STEPS = 6


@dataclass(frozen=True)
class GraphStructure:
    """The structure of a graph.

    Attributes:
        nodes: op → node, in execution order.
        tensors: tensor → the output that computes it: of an op or an input; further results have
            an index (`split:1`).
        fusion_groups: layer or joining op → its fusion group.
        layer_of: op that may be fused → the op that it is fused into.
        agnostic_ops: the quantize-agnostic ops.
        parts: tensor that is a further result → the op.
    """

    nodes: Mapping[str, ov.Node]
    tensors: Mapping[str, ov.Output]
    fusion_groups: Mapping[str, FusionGroup]
    layer_of: Mapping[str, str]
    agnostic_ops: frozenset[str]
    parts: Mapping[str, str]

    def read_by(self, name: str) -> list[str]:
        """Return the tensors that an op reads, without constants, one per input."""
        tensors = map(get_tensor_name, self.nodes[name].input_values())
        return [tensor for tensor in tensors if tensor in self.tensors]


def graph_structure(model: ov.Model, rejected: Collection[str] = ()) -> GraphStructure:
    """Return the structure of a graph.

    `rejected` are ops that cannot run next to integer kernels.
    """
    nodes = {name_of(node): node for node in iterate_op_nodes(model)}
    tensors = {get_tensor_name(output): output for output in model.inputs}
    parts: dict[str, str] = {}
    for name, node in nodes.items():
        for output in list_read_outputs(node):
            tensors[get_tensor_name(output)] = output
            if output.get_index():
                parts[get_tensor_name(output)] = name
    sound = {name: node for name, node in nodes.items() if name not in rejected}
    groups = find_fusion_groups(
        [n for n, node in sound.items() if _is_group_head(node)], _Kernels(nodes)
    )
    return GraphStructure(
        nodes,
        tensors,
        groups,
        map_fused_ops(groups.values()),
        frozenset(name for name, node in sound.items() if moves_values(node)),
        parts,
    )


def has_weight(node: ov.Node) -> bool:
    """Whether an op is a layer with a constant weight and a computed input."""
    if not has_role(node, Role.LAYER):
        return False
    return is_constant(get_weight_output(node)) and not is_constant(node.input_value(0))


def is_product(node: ov.Node) -> bool:
    """Whether an op multiplies two computed matrices: a product, or attention as one op."""
    if not has_role(node, Role.PRODUCT | Role.ATTENTION):
        return False
    return all(is_float(output) and not is_constant(output) for output in list_factors(node))


def list_factors(node: ov.Node) -> list[ov.Output]:
    """Return the factors of a product; those of attention are the queries and the keys."""
    return list(node.input_values()[:2])


def get_kernel_kind(node: ov.Node) -> KernelKind:
    """Return the kind of integer kernel of a layer."""
    row = get_op_row(node)
    assert row.kernel is not None
    if not row.is_grouped:
        return row.kernel
    shape = get_weight_output(node).get_partial_shape()  # [groups, outputs, inputs, …]
    single = len(shape) == 5 and all(size.is_static and len(size) == 1 for size in shape[1:3])
    return KernelKind.DEPTHWISE if single else row.kernel


def _is_group_head(node: ov.Node) -> bool:
    if has_integer_kernel(node):
        return True
    if len(list_read_outputs(node)) != 1 or not is_float(node.output(0)):
        return False
    return has_weight(node) or is_product(node) or bool(list_joined_inputs(node))


def list_joined_inputs(node: ov.Node) -> tuple[str, ...]:
    """Return the tensors that an op between INT8 ops reads quantized; empty for other ops.

    The factor of a product that has one value per channel, as in squeeze-and-excitation, stays in
    float.
    """
    if not has_role(node, Role.JOINING):
        return ()
    sources = node.input_values()
    # The plugin has INT8 kernels of these ops for tensors with channels only.
    if not any(map(_has_channels, sources)):
        return ()
    if has_role(node, Role.MEAN):
        return (get_tensor_name(sources[0]),) if _averages_all_positions(node) else ()
    if any(map(is_constant, sources)):
        return ()
    if has_role(node, Role.SCALING):
        per_channel = [output for output in sources if has_one_position(output)]
        remaining = [output for output in sources if output not in per_channel]
        return (get_tensor_name(remaining[0]),) if len(per_channel) == len(remaining) == 1 else ()
    if any(map(_is_convolution_result, sources)):
        return ()
    return tuple(map(get_tensor_name, sources))


def _has_channels(output: ov.Output) -> bool:
    """Whether a tensor is a picture, or a sequence that a convolution computes."""
    rank = rank_of(output) or 0
    return rank >= _LEAST_AXES or (rank == _SEQUENCE_AXES and _is_convolved(output, _MAX_STEPS))


def _is_convolved(output: ov.Output, steps: int) -> bool:
    """Whether a convolution, at most some sums and activations before, computes a tensor."""
    node = output.get_node()
    if has_role(node, Role.CONVOLUTION | Role.TRANSPOSED):
        return True
    is_step = has_role(node, Role.SUM | Role.ACTIVATION)
    return is_step and steps > 0 and any(_is_convolved(o, steps - 1) for o in node.input_values())


def _averages_all_positions(node: ov.Node) -> bool:
    axes, rank = get_constant_array(node.input_value(1)), rank_of(node.input_value(0)) or 0
    return axes is not None and {int(a) % rank for a in axes.ravel()} == {
        *range(_CHANNELS + 1, rank)
    }


def has_one_position(output: ov.Output) -> bool:
    """Whether a tensor has one value per channel."""
    positions = (get_known_sizes(output) or ())[_CHANNELS + 1 :]
    return bool(positions) and all(size == 1 for size in positions)


def _is_convolution_result(output: ov.Output) -> bool:
    """Whether a result is that of a convolution, or of its bias, with a single reader."""
    while len(output.get_target_inputs()) == 1:
        node = output.get_node()
        if not has_role(node, Role.SUM):
            return has_role(node, Role.CONVOLUTION) and has_weight(node)
        computed = [operand for operand in node.input_values() if not is_constant(operand)]
        if len(computed) != 1:
            return False
        (output,) = computed
    return False


def find_quantized_sums(
    structure: GraphStructure, layers: Iterable[str], quantized: Container[str]
) -> list[str]:
    """Return the residual sums that end in a quantization and that a BF16 convolution may compute.

    The plugin merges convolution, sum and quantization into one kernel, and has none for a sum of
    float32: the run fails or returns no rows (OpenVINO 2026.4). It may choose either convolution
    of a sum of two. `layers` are the ops in BF16, `quantized` the tensors that are quantized.
    """
    sums, rules = list[str](), _Kernels(structure.nodes)
    for name in layers:
        if not has_role(structure.nodes[name], Role.CONVOLUTION):
            continue
        group = find_fusion_groups([name], rules)[name]
        if group.residual_sum and any(member in quantized for member in group.fused_ops):
            sums += group.residual_sum.ops
    return sums


@dataclass(frozen=True)
class _Kernels(FusionRules[str, str]):
    """The epilogues of the plugin's kernels, by names of ops and tensors."""

    nodes: Mapping[str, ov.Node]

    def match_bias(self, group: FusionGroup) -> Step | None:
        step = self._only_reader_with_role(group.tail, Role.SUM)
        if step is None or not has_weight(self.nodes[group.head]):
            return None
        constants = [i for i in range(2) if is_constant(step.input_value(i))]
        if len(constants) != 1 or not _adds_channel_bias(
            self.nodes[group.head], step, constants[0]
        ):
            return None
        return Step(BIAS, (name_of(step),), get_tensor_name(step.input_value(constants[0])))

    def match_residual_sum(self, group: FusionGroup) -> Step | None:
        step = self._only_reader_with_role(group.tail, Role.SUM)
        if step is None or not has_role(self.nodes[group.head], Role.CONVOLUTION):
            return None
        operands = [o for o in step.input_values() if name_of(o.get_node()) != group.tail]
        if len(operands) != 1 or is_constant(operands[0]) or not is_float(operands[0]):
            return None
        if rank_of(operands[0]) != rank_of(step.output(0)):
            return None
        return Step(SUM, (name_of(step),), get_tensor_name(operands[0]))

    def match_activation(self, group: FusionGroup) -> Step | None:
        step = self._only_reader_with_role(group.tail, Role.ACTIVATION)
        if step is None or has_role(self.nodes[group.head], Role.SEQUENCE | Role.ATTENTION):
            return None
        return Step(get_op_type(step), (name_of(step),))

    def _only_reader_with_role(self, name: str, role: Role) -> ov.Node | None:
        reader = find_only_reader(self.nodes[name].output(0))
        if reader is None or not has_role(reader, role):
            return None
        return self.nodes.get(name_of(reader))


def _adds_channel_bias(layer: ov.Node, step: ov.Node, position: int) -> bool:
    array, axes = get_constant_array(step.input_value(position)), rank_of(layer.output(0))
    if array is None or axes is None or array.ndim > axes:
        return False
    channels = get_op_row(layer).channels % max(axes, 1)
    sizes = (1,) * (axes - array.ndim) + array.shape
    return all(size == 1 for axis, size in enumerate(sizes) if axis != channels)


def moves_values(node: ov.Node) -> bool:
    """Whether an op yields the same on quantized as on float values."""
    if not has_role(node, Role.MOVING) or not is_float(node.output(0)):
        return False
    sources = node.input_values()
    if has_role(node, Role.CONCATENATION):
        return not any(map(is_constant, sources)) and all(map(is_float, sources))
    return not is_constant(sources[0]) and all(map(is_constant, sources[1:]))
