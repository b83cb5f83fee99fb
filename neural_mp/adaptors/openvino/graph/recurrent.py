"""LSTM and GRU layers in the plugin's integer kernels, and GRU step by step.

The kernels have one scale and zero point for the input and the hidden state, and one scale per row
for both weights. So the input is scaled to the range of the hidden state by the output range of its
FakeQuantize, and its weight by the inverse.

The plugin has no integer kernel for a GRU with `linear_before_reset`. Its weights are stored in
INT8 alone: one product covers the inputs of all steps, and the body of a TensorIterator multiplies
the state of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from neural_mp.adaptors.common.quant_params import STEPS, QuantParams, round_to_int8, weight_scales
from neural_mp.adaptors.common.weights.grouped_weight import GROUP_SIZES
from neural_mp.adaptors.openvino.graph.edit import (
    get_constant_array,
    get_op_type,
    give_name,
    is_constant,
    name_of,
    redirect_inputs,
)
from neural_mp.adaptors.openvino.graph.integer_weights import build_product_weight
from neural_mp.adaptors.openvino.ops import Recurrence, Role, get_op_row, has_role
from neural_mp.adaptors.openvino.runtime import ops, ov
from neural_mp.core.observations import Range
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.util.pytree import Array

#: Step of the padding of inputs.
_PADDING = 4
_WAYS = ("forward", "reverse")
#: Size of the state from which the kernels of a step cost less time than INT8 saves.
_LEAST_STATE = 256
_GATES = 3


def list_recurrent_inputs(node: ov.Node) -> Recurrence:
    """Return the inputs of a recurrent op over sequences."""
    recurrence = get_op_row(node).recurrence
    assert recurrence is not None
    return recurrence


def has_integer_kernel(node: ov.Node) -> bool:
    """Whether an op is a sequence with an integer kernel."""
    return has_role(node, Role.SEQUENCE) and find_kernel_obstacle(node) is None


def find_kernel_obstacle(node: ov.Node) -> str | None:
    """Return the reason why a recurrent op has no integer kernel; None if it has one."""
    if not has_role(node, Role.SEQUENCE):
        return "OpenVINO has integer kernels of LSTM and GRU over sequences only"
    if resets_product(node):
        return "the integer kernel of GRU applies the reset gate to the state"
    state = node.input_value(list_recurrent_inputs(node).states[0])
    while state.get_node().get_input_size():
        state = state.get_node().input_value(0)
    if has_role(state.get_node(), Role.INPUT):
        return "its initial state is given: the kernel would clip it to the range of later states"
    return find_sequence_obstacle(node)


def find_sequence_obstacle(node: ov.Node) -> str | None:
    """Return the reason why no other form replaces a sequence; None if one can."""
    form, attributes = list_recurrent_inputs(node), node.get_attributes()
    if attributes["direction"] not in _WAYS:
        return "the integer kernel runs in a single direction"
    activations = tuple(attributes.get("activations") or form.activations)
    if attributes.get("clip") or activations != form.activations:
        return "the integer kernel has neither clipping nor other activations"
    if not all(is_constant(node.input_value(position)) for position in (*form.weights, form.bias)):
        return "the weights are not constant"
    if is_constant(node.input_value(0)):
        return "its input is constant"
    if not _has_whole_sequences(node, form):
        return "the integer kernel runs sequences of one length"
    return None


def _has_whole_sequences(node: ov.Node, form: Recurrence) -> bool:
    """Whether every sequence is as long as the input; lengths may be those of the shape."""
    length = node.input_value(0).get_partial_shape()[1]
    lengths = get_constant_array(node.input_value(form.lengths))
    if length.is_dynamic:
        return lengths is None
    return lengths is None or bool((lengths == length.get_length()).all())


def split_directions(program: ov.Model) -> bool:
    """Replace bidirectional ops by ops for both directions, in place; return whether there are any.

    The plugin does so as well, but gives both names of its own, and takes no integer weights then.
    Concatenations have the names of the results.
    """
    splits: dict[tuple[str, int, int], list[ov.Node | ov.Output]] = {}
    has_split = False
    for node in program.get_ordered_ops():
        form = get_op_row(node).recurrence
        if form is None or node.get_attributes()["direction"] in _WAYS:
            continue
        has_split = True
        directions = _in_both_directions(node, form, splits)
        for index, output in enumerate(node.outputs()):
            readers = list(output.get_target_inputs())
            joined = ops.concat([direction.output(index) for direction in directions], 1)
            joined.output(0).set_names(output.get_names())
            redirect_inputs(
                readers, give_name(name_of(node) + (f"/{index}" if index else ""), joined)
            )
    return has_split


def _in_both_directions(
    node: ov.Node, form: Recurrence, splits: dict[tuple[str, int, int], list[ov.Node | ov.Output]]
) -> list[ov.Node]:
    """Return an op for each direction of a bidirectional one.

    States of one origin share a split, to be kept in `splits`: OpenVINO merges equal ops when it
    infers shapes.
    """
    attributes, build = node.get_attributes(), _BUILDERS[get_op_type(node)]
    positions = range(node.get_input_size())
    sources = [[node.input_value(position)] * len(_WAYS) for position in positions]
    for position in (*form.states, *form.weights, form.bias):
        source, axis = node.input_value(position), int(position in form.states)
        key = name_of(source.get_node()), source.get_index(), axis
        if key not in splits:
            splits[key] = _split_by_direction(source, axis)
        sources[position] = splits[key]
    options = {key: attributes[key] for key in _OPTIONS if key in attributes}
    directions = []
    for direction, *inputs in zip(_WAYS, *sources, strict=True):
        op = build(*inputs, attributes["hidden_size"], direction, **options)
        directions.append(give_name(f"{name_of(node)}/{direction}", op))
    return directions


_BUILDERS: Mapping[str, Callable[..., ov.Node]] = {
    "LSTMSequence": ops.lstm_sequence,
    "GRUSequence": ops.gru_sequence,
    "RNNSequence": ops.rnn_sequence,
}
#: Further attributes, named as the arguments of the builders.
_OPTIONS = ("activations", "activations_alpha", "activations_beta", "clip", "linear_before_reset")


def _split_by_direction(output: ov.Output, axis: int) -> list[ov.Node | ov.Output]:
    node = output.get_node()
    if has_role(node, Role.CONSTANT):
        parts = np.split(np.asarray(get_constant_array(output)), len(_WAYS), axis)
        return [ops.constant(np.ascontiguousarray(p), node.get_element_type()) for p in parts]
    if get_op_type(node) == "Convert" and is_constant(output):
        parts = _split_by_direction(node.input_value(0), axis)
        return [ops.convert(part, output.get_element_type()) for part in parts]
    return list(ops.split(output, np.int64(axis), len(_WAYS)).outputs())


def choose_input_widths(nodes: Iterable[ov.Node]) -> dict[str, int]:
    """Return sequence in INT8 → the size of its input, padded with zeros to a size of its own.

    The plugin reuses a kernel for an op of the same sizes although its scales differ.
    """
    widths: dict[str, int] = {}
    reserved = set()
    for node in nodes:
        width = int(node.input_value(list_recurrent_inputs(node).weights[0]).get_shape()[2])
        attributes = node.get_attributes()
        kind = get_op_type(node), attributes["direction"], attributes["hidden_size"]
        while (*kind, width) in reserved:
            width += _PADDING
        reserved.add((*kind, width))
        widths[name_of(node)] = width
    return widths


def quantize_sequence(
    node: ov.Node, span: Range, state: QuantParams, limit: int, width: int
) -> list[str]:
    """Quantize what a sequence reads, in place; return the names of the inserted nodes.

    Its input has the range `span` and is padded to `width`; weights are integers up to `limit`.
    """
    names = []
    for position, part, inserted in _quantize_inputs(node, span, state, limit, width):
        redirect_inputs([node.input(position)], give_name(f"{name_of(node)}/{part}", inserted))
        names.append(name_of(inserted))
    return names


def _quantize_inputs(
    node: ov.Node, span: Range, state: QuantParams, limit: int, width: int
) -> Iterator[tuple[int, str, ov.Node]]:
    """Yield position, name and node of what a sequence reads in INT8."""
    form, own = list_recurrent_inputs(node), QuantParams.signed(span)
    weights = [
        np.asarray(get_constant_array(node.input_value(index)), np.float32)
        for index in form.weights
    ]
    source, extra = node.input_value(0), width - weights[0].shape[2]
    if extra:
        padded = ops.pad(
            source, np.zeros(3, int), np.array([0, 0, extra]), "constant", np.float32(0)
        )
        source = give_name(f"{name_of(node)}/padded", padded).output(0)
    yield 0, "input", _add_fake_quantize(source, own, state)
    first = node.input_value(form.states[0])
    if not is_constant(first):  # the plugin takes a constant state in float
        yield form.states[0], "state", _add_fake_quantize(first, state, state)
    factor = np.float32(own.scale / state.scale)
    weights[0] = np.pad(weights[0] * factor, [(0, 0), (0, 0), (0, extra)])
    scales = np.maximum(*(weight_scales(weight, (2,), limit) for weight in weights))
    if get_op_type(node) == "LSTMSequence":
        # The plugin swaps the rows of the first two gates for its kernel, but not their scales.
        first_two = scales.reshape(-1, 4, scales.shape[1] // 4, 1)[:, :2]
        first_two[:] = first_two.max(1, keepdims=True)
    parts = zip(form.weights, ("weight", "recurrent"), weights, strict=True)
    for index, part, weight in parts:
        stored = ops.constant(round_to_int8(weight, scales, limit))
        yield index, part, ops.multiply(ops.convert(stored, "f32"), ops.constant(scales))


def _add_fake_quantize(output: ov.Output, given: QuantParams, target: QuantParams) -> ov.Node:
    bounds = (given.low, given.high, target.low, target.high)
    return ops.fake_quantize(output, *map(np.float32, bounds), STEPS + 1)


def resets_product(node: ov.Node) -> bool:
    """Whether an op is a GRU whose reset gate applies to the product with the state."""
    is_sequence = has_role(node, Role.SEQUENCE)
    return is_sequence and bool(node.get_attributes().get("linear_before_reset"))


def find_stepwise_obstacle(node: ov.Node) -> str | None:
    """Return the reason why a GRU cannot run in such steps; None if it can."""
    reason = find_sequence_obstacle(node)
    if reason is not None:
        return reason
    inputs, state = count_stepwise_inputs(node)
    if inputs < min(GROUP_SIZES):
        return f"INT8 weights alone require at least {min(GROUP_SIZES)} inputs, got {inputs}"
    if state < _LEAST_STATE:
        return (
            f"OpenVINO has no integer kernel of GRU with linear_before_reset, and INT8 weights in "
            f"single steps gain no time below {_LEAST_STATE} units, got {state}"
        )
    return None


def count_stepwise_inputs(node: ov.Node) -> tuple[int, int]:
    """Return the numbers of inputs and of states of a GRU, the inputs of its products."""
    position = list_recurrent_inputs(node).weights[0]
    return int(node.input_value(position).get_shape()[2]), int(node.get_attributes()["hidden_size"])


def insert_gru_steps(
    stem: str, node: ov.Node, spec: QuantSpec
) -> tuple[list[ov.Node], list[ov.Node]]:
    """Return inserted nodes, and nodes with the results of a GRU: of all steps, and of the last.

    The GRU runs in one direction; names of inserted nodes start with `stem`.
    """
    form = list_recurrent_inputs(node)
    weight, recurrent, bias = (
        np.asarray(get_constant_array(node.input_value(position)))[0]
        for position in (*form.weights, form.bias)
    )
    size = recurrent.shape[1]
    input_weight = build_product_weight(f"{stem}/input", weight, spec)
    product = ops.matmul(node.input_value(0), input_weight, False, True)
    projection = ops.add(product, _make_row_constant(bias[: _GATES * size]))
    state_bias = np.pad(bias[_GATES * size :], (2 * size, 0))
    body = _build_step(build_product_weight(f"{stem}/recurrent", recurrent, spec), state_bias, size)
    iterator = ops.tensor_iterator()
    iterator.set_body(body)
    state, step = body.get_parameters()
    (following,) = (result.output(0) for result in body.get_results())
    forward = node.get_attributes()["direction"] == "forward"
    ends = (0, 1, 1, -1, 1) if forward else (-1, -1, 1, 0, 1)  # start, stride, size, end, axis
    iterator.set_sliced_input(step, projection.output(0), *ends)
    iterator.set_merged_input(state, node.input_value(form.states[0]), following)
    every = iterator.get_concatenated_slices(following, *ends)
    last = iterator.get_iter_value(following, -1)
    parts = {"product": product, "read": projection, "steps": iterator}
    for part, op in parts.items():
        op.set_friendly_name(f"{stem}/{part}")
    same = ops.constant(np.array([0, 0, size]))
    return [input_weight, *parts.values()], [
        ops.unsqueeze(every, ops.constant(np.array([1]))),
        ops.reshape(last, same, True),
    ]


def _build_step(weight: ov.Node, bias: Array, size: int) -> ov.Model:
    """Return the graph of one step: state and read gates → the next state."""
    state = ops.parameter([-1, 1, size], np.float32, name="state")
    projection = ops.parameter([-1, 1, _GATES * size], np.float32, name="read")
    own = ops.add(ops.matmul(state, weight, False, True), _make_row_constant(bias))
    axis = np.int64(2)
    read_gates, own_gates = (ops.split(term, axis, _GATES).outputs() for term in (projection, own))
    update, reset = (ops.sigmoid(ops.add(read_gates[i], own_gates[i])) for i in range(2))
    candidate = ops.tanh(ops.add(read_gates[2], ops.multiply(reset, own_gates[2])))
    # (1 − update) · candidate + update · state, with one multiplication.
    following = ops.add(candidate, ops.multiply(update, ops.subtract(state, candidate)))
    return ov.Model([ops.result(following)], [state, projection], "step")


def _make_row_constant(values: Array) -> ov.Node:
    return ops.constant(np.asarray(values, np.float32)[None, None])
