"""LSTM layers in the plugin's integer kernel.

The kernel has one scale and zero point for the input and the hidden state, and one scale per row
for both weights. So the input is scaled to the range of the hidden state by the output range of its
FakeQuantize, and its weight by the inverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from neural_mp.adaptors.common.calibration import LEVELS
from neural_mp.adaptors.common.quant_params import QuantParams, round_to_int8, weight_scales
from neural_mp.adaptors.openvino.graph_edit import (
    array_of,
    is_constant,
    name_of,
    source_of,
    type_of,
)
from neural_mp.adaptors.openvino.runtime import ops
from neural_mp.core.observations import Range

#: Recurrent ops. LSTMs over sequences have an integer kernel.
RECURRENT = ("LSTMSequence", "GRUSequence", "RNNSequence", "LSTMCell", "GRUCell", "RNNCell")
LSTM = "LSTMSequence"
#: Positions of its inputs.
_INPUT, _STATE, _LENGTHS, _WEIGHT, _RECURRENT_WEIGHT, _BIAS = 0, 1, 3, 4, 5, 6
WEIGHTS = (_WEIGHT, _RECURRENT_WEIGHT)
#: Position → suffix of the name of what is put there.
SUFFIXES = {_INPUT: "/input", _STATE: "/state", _WEIGHT: "/weight", _RECURRENT_WEIGHT: "/recurrent"}
_ACTIVATIONS = ["sigmoid", "tanh", "tanh"]
#: Step of the padding of inputs.
_PADDING = 4
_ZERO_POINT = 128


def has_integer_kernel(node: Any) -> bool:
    """Whether an op is an LSTM with an integer kernel."""
    return type_of(node) == LSTM and obstacle(node) is None


def obstacle(node: Any) -> str | None:
    """Return the reason why a recurrent op has no integer kernel; None if it has one."""
    if type_of(node) != LSTM:
        return "OpenVINO has integer kernels of LSTM sequences only"
    known = node.get_attributes()
    if known["direction"] == "bidirectional":
        return "the integer kernel runs in a single direction"
    if known.get("clip") or known.get("activations", _ACTIVATIONS) != _ACTIVATIONS:
        return "the integer kernel has neither clipping nor other activations"
    if not all(is_constant(source_of(node, place)) for place in (*WEIGHTS, _BIAS)):
        return "the weights are not constant"
    if is_constant(source_of(node, _INPUT)):
        return "its input is constant"
    if _starts_from_input(node):
        return "its initial state is given: the kernel would clip it to the range of later states"
    if not _has_whole_sequences(node):
        return "the integer kernel runs sequences of one length"
    return None


def _starts_from_input(node: Any) -> bool:
    """Whether the initial hidden state is computed from an input of the model."""
    value = source_of(node, _STATE)
    while value.get_node().get_input_size():
        value = value.get_node().input_value(0)
    return type_of(value.get_node()) == "Parameter"


def _has_whole_sequences(node: Any) -> bool:
    """Whether every sequence is as long as the input; lengths may be those of the shape."""
    length = source_of(node, _INPUT).get_partial_shape()[1]
    lengths = array_of(source_of(node, _LENGTHS))
    if length.is_dynamic:
        return lengths is None
    return lengths is None or bool((lengths == length.get_length()).all())


def input_widths(nodes: Iterable[Any]) -> dict[str, int]:
    """Return LSTM in INT8 → the size of its input, padded with zeros to a size of its own.

    The plugin reuses a kernel for an LSTM of the same sizes although its scales differ.
    """
    found: dict[str, int] = {}
    taken = set()
    for node in nodes:
        width = int(source_of(node, _WEIGHT).get_shape()[2])
        known = node.get_attributes()
        while (key := (known["direction"], known["hidden_size"], width)) in taken:
            width += _PADDING
        taken.add(key)
        found[name_of(node)] = width
    return found


def quantized_parts(
    node: Any, span: Range, state: QuantParams, limit: int, width: int
) -> Iterator[tuple[int, Any]]:
    """Yield position and node of what an LSTM reads in INT8.

    Args:
        node: the LSTM.
        span: the range of its input.
        state: the parameters of its hidden state.
        limit: the largest integer of a weight.
        width: the size of the padded input.
    """
    own = QuantParams.signed(span)
    weights = [np.asarray(array_of(source_of(node, place)), np.float32) for place in WEIGHTS]
    given, extra = source_of(node, _INPUT), width - weights[0].shape[2]
    if extra:
        padded = ops.pad(
            given, np.zeros(3, int), np.array([0, 0, extra]), "constant", np.float32(0)
        )
        padded.set_friendly_name(f"{name_of(node)}/padded")
        given = padded.output(0)
    yield _INPUT, _quantized(given, own, state)
    first = source_of(node, _STATE)
    if not is_constant(first):  # the plugin takes a constant state in float
        yield _STATE, _quantized(first, state, state)
    factor = np.float32(own.scale / state.scale)
    weights[0] = np.pad(weights[0] * factor, [(0, 0), (0, 0), (0, extra)])
    scales = np.maximum(*(weight_scales(weight, (2,), limit) for weight in weights))
    for place, weight in zip(WEIGHTS, weights, strict=True):
        stored = ops.constant(round_to_int8(weight, scales, limit))
        yield place, ops.multiply(ops.convert(stored, "f32"), ops.constant(scales))


def _quantized(output: Any, given: QuantParams, found: QuantParams) -> Any:
    bounds = (given.low, given.high, found.low, found.high)
    return ops.fake_quantize(output, *map(np.float32, bounds), LEVELS + 1)
