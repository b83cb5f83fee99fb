"""Bodies of small OpenVINO models: nodes of the inputs → nodes of the outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
from zoo.harness import Built
from zoo.openvino_models import (
    F32,
    PICTURES,
    ROWS,
    biased,
    built,
    convolved,
    product,
    weight,
    with_outputs,
)

from neural_mp.adaptors.openvino.runtime import ops, ov


def residual(x: Any) -> Any:
    first = ops.relu(biased(convolved(x)))
    second = ops.relu(ops.add(biased(convolved(first, seed=2)), first))
    return convolved(second, 8, size=1, seed=3)


def concatenated(x: Any) -> Any:
    parts = [ops.relu(convolved(x, seed=seed)) for seed in (1, 2)]
    joined = ops.concat(parts, 1)
    kernel = weight(8, 32, 1, 1)
    return ops.convolution(joined, kernel, [1, 1], [0, 0], [0, 0], [1, 1])


def divided(x: Any) -> list[Any]:
    parts = ops.split(ops.relu(biased(convolved(x, 32), 32)), 1, 2)
    return [convolved(parts.output(i), 8, size=1, seed=i + 2) for i in range(2)]


def part_read_twice(x: Any) -> list[Any]:
    parts = ops.split(ops.relu(convolved(x, 32)), 1, 2)
    return [convolved(parts.output(0), 8, size=1), parts.output(0), parts.output(1)]


def attention(x: Any) -> Any:
    q, k, v = (product(x, weight(32, 32, seed=seed)) for seed in (1, 2, 3))
    weights = ops.softmax(ops.multiply(ops.matmul(q, k, False, True), F32(0.2)), -1)
    return product(ops.matmul(weights, v, False, False))


def products(x: Any) -> Any:
    """Attention without a softmax, as OpenVINO would fuse it into one op."""
    q, k, v = (product(x, weight(32, 32, seed=seed)) for seed in (1, 2, 3))
    scores = ops.relu(ops.matmul(q, k, False, True))
    return product(ops.matmul(scores, v, False, False))


def pooled_by_mean(x: Any) -> Any:
    first = ops.relu(biased(convolved(x)))
    mean = ops.reduce_mean(first, np.array([2, 3]), False)
    return product(mean, weight(8, 16))


def embedded(x: Any) -> Any:
    rows = ops.gather(weight(20, 32, seed=4) * 4, x, 0)
    return product(ops.gelu(product(rows), "erf"))


def normed(x: Any) -> Any:
    scaled = ops.multiply(ops.mvn(x, [-1], True, 1e-5, "inside_sqrt"), np.full(32, 1.5, F32))
    return product(ops.gelu(product(ops.add(scaled, weight(1, 1, 32))), "erf"))


def excited(x: Any) -> Any:
    """A block of squeeze and excitation."""
    first = ops.swish(biased(convolved(x)))
    mean = ops.reduce_mean(first, np.array([2, 3]), True)
    gate = ops.sigmoid(biased(convolved(ops.relu(convolved(mean, size=1)), size=1, seed=2)))
    return convolved(ops.multiply(first, gate), 8, size=1, seed=3)


def pooled(x: Any) -> Any:
    first = ops.relu(convolved(x))
    most = ops.max_pool(first, [2, 2], [1, 1], [0, 0], [0, 0], [2, 2])
    mean = ops.avg_pool(most.output(0), [2, 2], [0, 0], [0, 0], [2, 2], True)
    flat = ops.reshape(mean, np.array([0, -1]), True)
    return product(flat, weight(8, 64))


def branched(x: Any) -> Any:
    """An `If` whose branches hold a product each."""
    chooser = ops.if_op(ops.greater(ops.reduce_sum(x, np.array([0, 1])), F32(0)).output(0))
    bodies = []
    for seed in (1, 2):
        inner = ops.parameter([-1, 32], F32, name="inner")
        bodies.append(ov.Model([product(inner, weight(32, 32, seed=seed))], [inner], "branch"))
    chooser.set_then_body(bodies[0])
    chooser.set_else_body(bodies[1])
    hidden = product(x)
    chooser.set_input(hidden.output(0), *(body.get_parameters()[0] for body in bodies))
    chosen = chooser.set_output(*(body.get_results()[0] for body in bodies))
    return product(chosen, weight(8, 32))


def _body() -> tuple[Any, Any]:
    step = ops.parameter([-1, 1, 32], F32, name="step")
    state = ops.parameter([-1, 1, 32], F32, name="state")
    return ov.Model([ops.tanh(ops.add(product(step), state))], [step, state], "body"), step


def iterated(x: Any) -> Any:
    """A recurrence in a TensorIterator."""
    body, step = _body()
    _, state = body.get_parameters()
    iterator = ops.tensor_iterator()
    iterator.set_body(body)
    result = body.get_results()[0]
    iterator.set_sliced_input(step, product(x).output(0), 0, 1, 1, -1, 1)
    iterator.set_merged_input(
        state, ops.constant(np.zeros((2, 1, 32), F32)).output(0), result.output(0)
    )
    stacked = iterator.get_concatenated_slices(result.output(0), 0, 1, 1, -1, 1)
    return product(stacked, weight(8, 32))


def looped(x: Any) -> Any:
    """Three products of a row with itself, in a Loop."""
    row = ops.parameter([-1, 32], F32, name="row")
    goes_on = ops.result(ops.constant(True))
    body = ov.Model([goes_on, ops.result(ops.tanh(product(row)))], [row], "body")
    loop = ops.loop(ops.constant(np.int64(3)), ops.constant(True))
    loop.set_function(body)
    loop.set_special_body_ports([-1, 0])
    result = body.get_results()[1]
    loop.set_merged_input(row, product(x).output(0), result.output(0))
    return product(loop.get_iter_value(result.output(0), -1), weight(8, 32))


def lstm(x: Any) -> Any:
    zeros = ops.constant(np.zeros((2, 1, 16), F32))
    lengths = ops.constant(np.full(2, 6, np.int64))
    gates = [weight(1, 64, 32), weight(1, 64, 16), np.zeros((1, 64), F32)]
    sequence = ops.lstm_sequence(product(x), zeros, zeros, lengths, *gates, 16, "forward")
    last = ops.squeeze(sequence.output(1), np.array([1]))
    return product(last, weight(8, 16))


def lstm_of_any_size(x: Any) -> list[Any]:
    """All results of an LSTM whose state and lengths have the sizes of its input."""
    sizes = ops.shape_of(x, "i64")
    batch = ops.gather(sizes, np.array([0]), np.array(0))
    steps = ops.gather(sizes, np.array([1]), np.array(0))
    zeros = ops.broadcast(F32(0), ops.concat([batch, np.array([1, 16])], 0))
    lengths = ops.broadcast(steps, batch)
    gates = [weight(1, 64, 32), weight(1, 64, 16), weight(1, 64)]
    sequence = ops.lstm_sequence(product(x), zeros, zeros, lengths, *gates, 16, "reverse")
    hidden = ops.squeeze(sequence.output(0), np.array([1]))
    return [product(hidden, weight(8, 16)), sequence.output(1), sequence.output(2)]


def lstms(x: Any) -> Any:
    """Two LSTMs of the same sizes, with inputs and weights of other magnitudes."""
    zeros = ops.constant(np.zeros((2, 1, 32), F32))
    lengths = ops.constant(np.full(2, 6, np.int64))
    hidden = ops.multiply(x, F32(3))
    for seed in (1, 2):
        gates = [weight(1, 128, 32, seed=seed + offset) * F32(seed) for offset in (2, 4)]
        bias = np.zeros((1, 128), F32)
        sequence = ops.lstm_sequence(hidden, zeros, zeros, lengths, *gates, bias, 32, "forward")
        hidden = ops.squeeze(sequence.output(0), np.array([1]))
    return product(hidden, weight(8, 32))


def lstm_two_way(x: Any) -> Any:
    zeros = ops.constant(np.zeros((2, 2, 16), F32))
    lengths = ops.constant(np.full(2, 6, np.int64))
    gates = [weight(2, 64, 32), weight(2, 64, 16), np.zeros((2, 64), F32)]
    sequence = ops.lstm_sequence(product(x), zeros, zeros, lengths, *gates, 16, "bidirectional")
    return product(ops.reduce_mean(sequence.output(1), np.array([1]), False), weight(8, 16))


def gru(x: Any, *, resets_product: bool = True) -> Any:
    """A GRU whose reset gate applies to the product with the state, or to the state."""
    zeros = ops.constant(np.zeros((2, 1, 16), F32))
    lengths = ops.constant(np.full(2, 6, np.int64))
    bias = np.zeros((1, 64 if resets_product else 48), F32)
    gates = [weight(1, 48, 32), weight(1, 48, 16), bias]
    sequence = ops.gru_sequence(
        x, zeros, lengths, *gates, 16, "forward", linear_before_reset=resets_product
    )
    return product(ops.squeeze(sequence.output(1), np.array([1])), weight(8, 16))


def two_inputs(x: Any, y: Any) -> list[Any]:
    first, second = product(x), product(y, weight(32, 32, seed=2))
    summed = ops.add(first, second)
    return [product(ops.relu(summed), weight(8, 32)), second]


def largest(x: Any) -> list[Any]:
    """Logits, and the class of the largest."""
    logits = product(ops.relu(product(x)), weight(8, 32))
    top = ops.topk(logits, ops.constant(np.int64(1)), 1, "max", "none", "i64")
    return [logits, top.output(1)]


def in_type(kind: str, x: Any) -> Any:
    """A net written in 16 bits between casts."""

    def layer(value: Any, seed: int) -> Any:
        kernel = ops.convert(ops.constant(weight(32, 32, seed=seed)), kind)
        return ops.matmul(value, kernel, False, True)

    first = ops.relu(layer(ops.convert(x, kind), 1))
    return ops.convert(layer(first, 2), "f32")


def mixed_types(x: Any) -> Any:
    """A float32 residual sum over a branch in bfloat16."""
    branch = ops.convert(in_type("bf16", x), "f32")
    return product(ops.relu(ops.add(product(x), branch)), weight(8, 32))


def shared(x: Any) -> Any:
    """One constant in two layers."""
    kernel = ops.constant(weight(32, 32))
    return ops.matmul(ops.relu(ops.matmul(x, kernel, False, True)), kernel, False, True)


def bytes_in(x: Any) -> Any:
    scaled = ops.multiply(ops.convert(x, "f32"), F32(1 / 128))
    return convolved(ops.relu(convolved(scaled)), 8, size=1)


def half_throughout() -> Built:
    parameter = ops.parameter([-1, 32], np.float16, name="x0")

    def layer(value: Any, seed: int) -> Any:
        kernel = ops.constant(weight(32, 32, seed=seed).astype(np.float16))
        return ops.matmul(value, kernel, False, True)

    model = ov.Model([layer(ops.relu(layer(parameter, 1)), 2)], [parameter], "zoo")
    return with_outputs(model, [ROWS.astype(np.float16)])


def chosen_names() -> Built:
    original = built(two_inputs, ROWS, ROWS[::-1].copy())
    feeds = [tuple(reversed(batch)) for batch in original.batches]
    first = [outputs[:1] for outputs in original.outputs]
    return Built(original.model, feeds, first, {"inputs": ["x1", "x0"], "outputs": ["y0"]})


def selected(x: Any) -> Any:
    """A choice by condition between two results."""
    first = product(x)
    mask = ops.logical_not(ops.greater(first, F32(0.5)))
    return product(ops.select(mask, first, F32(-1.0)), weight(8, 32))


def summed_by_row(x: Any) -> Any:
    """A product added to one row of products per sample: a sum that broadcasts."""
    mean = ops.reduce_mean(x, np.array([1]), True)
    return product(ops.relu(ops.add(product(x), product(mean))), weight(8, 32))


def by_constant(x: Any) -> Any:
    """A sum of pictures with a constant picture, and a concatenation with one."""
    first = ops.relu(ops.add(convolved(x), PICTURES[:1]))
    joined = ops.concat([first, ops.multiply(first, F32(0.5))], 1)
    kernel = weight(8, 32, 1, 1)
    return ops.convolution(joined, kernel, [1, 1], [0, 0], [0, 0], [1, 1])


def broadcast_sum(x: Any) -> Any:
    """A residual sum with a branch of one pixel."""
    first = ops.relu(convolved(x))
    mean = ops.reduce_mean(first, np.array([2, 3]), True)
    return convolved(ops.relu(ops.add(convolved(first, seed=2), mean)), 8, size=1)


def own_output(x: Any) -> list[Any]:
    """A residual sum, and the branches under it as outputs."""
    first = ops.relu(convolved(x))
    second = convolved(first, seed=2)
    return [convolved(ops.add(second, first), 8, size=1), first, second]


def gram(x: Any) -> Any:
    """A product of a quantized tensor with itself, beside one with a weight."""
    first = ops.relu(product(x))
    return ops.matmul(product(first), ops.matmul(first, first, True, False), False, False)


def read_twice(x: Any) -> list[Any]:
    """The float result of a convolution without a bias, read by two ops."""
    result = convolved(ops.relu(convolved(x)), seed=2)
    return [ops.multiply(result, F32(3)), ops.sigmoid(result)]


def unpooled(x: Any) -> Any:
    """Ops without a channel axis around a product."""
    vector = ops.reduce_mean(x, np.array([0]), False)
    return product(ops.reshape(vector, np.array([1, 32]), False), weight(8, 32))


def rows_from_vector(x: Any) -> Any:
    """A product of one vector, i.e. with a single axis."""
    vector = ops.reduce_mean(product(x), np.array([0]), False)
    return ops.matmul(vector, weight(8, 32), False, True)
