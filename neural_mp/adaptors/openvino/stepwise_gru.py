"""GRU with `linear_before_reset`, step by step, with INT8 weights alone.

The plugin has no integer kernel for such a GRU. One product covers the inputs of all steps, and the
body of a TensorIterator multiplies the state of each step; both weights are stored in INT8.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from neural_mp.adaptors.common.group_specs import GROUP_SIZES
from neural_mp.adaptors.openvino.graph_edit import array_of, source_of
from neural_mp.adaptors.openvino.int8_weights import product_weight
from neural_mp.adaptors.openvino.ops import Role, role_of
from neural_mp.adaptors.openvino.recurrent import recurrence_of, sequence_obstacle
from neural_mp.adaptors.openvino.runtime import ops, ov
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.util.pytree import Array

#: Size of the state from which the kernels of a step cost less time than INT8 saves.
_LEAST_STATE = 256
_GATES = 3


def is_stepwise(node: Any) -> bool:
    """Whether an op is a GRU whose weights can be stored in INT8, step by step."""
    return resets_product(node) and stepwise_obstacle(node) is None


def resets_product(node: Any) -> bool:
    """Whether an op is a GRU whose reset gate applies to the product with the state."""
    is_sequence = role_of(node) is Role.SEQUENCE
    return is_sequence and bool(node.get_attributes().get("linear_before_reset"))


def stepwise_obstacle(node: Any) -> str | None:
    """Return the reason why a GRU cannot run in such steps; None if it can."""
    reason = sequence_obstacle(node)
    if reason is not None:
        return reason
    inputs, state = stepwise_inputs(node)
    if inputs < min(GROUP_SIZES):
        return f"INT8 weights alone require at least {min(GROUP_SIZES)} inputs, got {inputs}"
    if state < _LEAST_STATE:
        return (
            f"OpenVINO has no integer kernel of GRU with linear_before_reset, and INT8 weights in "
            f"single steps gain no time below {_LEAST_STATE} units, got {state}"
        )
    return None


def stepwise_inputs(node: Any) -> tuple[int, int]:
    """Return the numbers of inputs and of states of a GRU, the inputs of its products."""
    position = recurrence_of(node).weights[0]
    return int(source_of(node, position).get_shape()[2]), int(node.get_attributes()["hidden_size"])


def steps_of(stem: str, node: Any, spec: QuantSpec) -> tuple[list[Any], list[Any]]:
    """Return inserted nodes, and nodes with the results of a GRU: of all steps, and of the last.

    Args:
        stem: the start of the names of nodes.
        node: the GRU, in one direction.
        spec: the quantization of its weights.
    """
    form = recurrence_of(node)
    weight, recurrent, bias = (
        np.asarray(array_of(source_of(node, position)))[0]
        for position in (*form.weights, form.bias)
    )
    size = recurrent.shape[1]
    input_weight = product_weight(f"{stem}/input", weight, spec)
    product = ops.matmul(source_of(node, 0), input_weight, False, True)
    projection = ops.add(product, _row(bias[: _GATES * size]))
    state_bias = np.pad(bias[_GATES * size :], (2 * size, 0))
    body = _step(product_weight(f"{stem}/recurrent", recurrent, spec), state_bias, size)
    iterator = ops.tensor_iterator()
    iterator.set_body(body)
    state, step = body.get_parameters()
    (following,) = (result.output(0) for result in body.get_results())
    forward = node.get_attributes()["direction"] == "forward"
    ends = (0, 1, 1, -1, 1) if forward else (-1, -1, 1, 0, 1)  # start, stride, size, end, axis
    iterator.set_sliced_input(step, projection.output(0), *ends)
    iterator.set_merged_input(state, source_of(node, form.states[0]), following)
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


def _step(weight: Any, bias: Array, size: int) -> Any:
    """Return the graph of one step: state and read gates → the next state."""
    state = ops.parameter([-1, 1, size], np.float32, name="state")
    projection = ops.parameter([-1, 1, _GATES * size], np.float32, name="read")
    own = ops.add(ops.matmul(state, weight, False, True), _row(bias))
    axis = np.int64(2)
    read_gates, own_gates = (ops.split(term, axis, _GATES).outputs() for term in (projection, own))
    update, reset = (ops.sigmoid(ops.add(read_gates[i], own_gates[i])) for i in range(2))
    candidate = ops.tanh(ops.add(read_gates[2], ops.multiply(reset, own_gates[2])))
    # (1 − update) · candidate + update · state, with one multiplication.
    following = ops.add(candidate, ops.multiply(update, ops.subtract(state, candidate)))
    return ov.Model([ops.result(following)], [state, projection], "step")


def _row(values: Array) -> Any:
    return ops.constant(np.asarray(values, np.float32)[None, None])
