"""Graphs with results that are no numbers: each op's float results are watched, others left out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.adaptors.tensorflow.model import TensorFlowModel

_WEIGHT = np.random.default_rng(0).normal(size=(16, 4)).astype("f4")
_INPUTS = np.random.default_rng(1).normal(size=(8, 16)).astype("f4")


def _with_assertion(x: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(x)[1], 16)]):
        return tf.nn.relu(x) @ _WEIGHT


def _with_strings(x: tf.Tensor) -> tf.Tensor:
    digits = tf.strings.to_number(tf.strings.as_string(x))
    return digits @ _WEIGHT


def _with_tensor_array(x: tf.Tensor) -> tf.Tensor:
    steps = tf.TensorArray(tf.float32, 3)
    _, steps = tf.while_loop(
        lambda i, t: i < 3,
        lambda i, t: (i + 1, t.write(i, x * tf.cast(i, tf.float32))),
        (0, steps),
    )
    return tf.reduce_sum(steps.stack(), 0) @ _WEIGHT


def _with_map(x: tf.Tensor) -> tf.Tensor:
    return tf.map_fn(lambda row: row * 2, x) @ _WEIGHT


def _loaded(function: Callable[[tf.Tensor], tf.Tensor]) -> TensorFlowModel:
    spec = tf.TensorSpec((None, 16), tf.float32)
    return TensorFlowAdaptor().load(tf.function(function, input_signature=[spec]))


def _product(model: TensorFlowModel) -> str:
    (name,) = (node.name for node in model.op_nodes if node.op == "MatMul")
    return name


_GRAPHS = [_with_assertion, _with_strings, _with_tensor_array, _with_map]


@pytest.mark.parametrize("function", _GRAPHS)
def test_sizes_of_every_float_result_outside_of_loops_are_returned(
    function: Callable[[tf.Tensor], tf.Tensor],
) -> None:
    adaptor, model = TensorFlowAdaptor(), _loaded(function)
    names = [node.name for node in model.op_nodes]
    counts = adaptor.element_counts(model, _INPUTS, names)
    assert counts[_product(model)] == _INPUTS.shape[0] * _WEIGHT.shape[1]
    assert counts == Adaptor.element_counts(adaptor, model, _INPUTS, names)  # as observed


def _nested(x: tf.Tensor) -> tf.Tensor:
    def outer(step: int, value: tf.Tensor) -> tuple[int, tf.Tensor]:
        _, value = tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, tf.tanh(v)), (0, value))
        return step + 1, tf.concat([value, value], 0)  # longer in each iteration

    return tf.while_loop(
        lambda i, _: i < 3, outer, (0, x), (tf.TensorShape([]), tf.TensorShape([None, 16]))
    )[1]


def _branched(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.nn.relu(x) @ _WEIGHT, lambda: x @ -_WEIGHT)


@pytest.mark.parametrize("function", [_nested, _branched])
def test_elements_in_loops_and_branches_are_counted_as_observed(
    function: Callable[[tf.Tensor], tf.Tensor],
) -> None:
    adaptor, model = TensorFlowAdaptor(), _loaded(function)
    names = [node.name for node in model.op_nodes]
    for inputs in (_INPUTS, -_INPUTS):
        counts = adaptor.element_counts(model, inputs, names)
        assert counts == Adaptor.element_counts(adaptor, model, inputs, names)
        assert sum(counts.values()) > inputs.size


@pytest.mark.parametrize("function", _GRAPHS)
def test_values_are_given_of_every_float_result_outside_of_loops(
    function: Callable[[tf.Tensor], tf.Tensor],
) -> None:
    model = _loaded(function)
    names = [node.name for node in model.op_nodes]
    values = TensorFlowAdaptor().op_outputs.op_outputs(model, names)(_INPUTS)
    output = values[_product(model)].real
    np.testing.assert_allclose(output, function(tf.constant(_INPUTS)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", _GRAPHS)
def test_the_first_op_with_nan_is_found_beside_results_that_are_no_numbers(
    function: Callable[[tf.Tensor], tf.Tensor],
) -> None:
    model = _loaded(function)
    assert TensorFlowAdaptor().op_outputs.first_non_finite(model, _INPUTS) is None
    broken = np.where(_INPUTS > 1, np.inf, _INPUTS).astype("f4")
    assert TensorFlowAdaptor().op_outputs.first_non_finite(model, broken) is not None
