"""Bodies of loops and branches: their products run in INT8, whatever is handed through them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, layers

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.adaptors.tensorflow.graph.ops import CONTROL_FLOW, PLACEHOLDERS
from neural_mp.adaptors.tensorflow.graph.runtime import run_offline_passes
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.profiler import time_ops
from neural_mp.core.precision import Precision
from neural_mp.errors import ConversionError
from neural_mp.testing import signal_to_noise, uniform

Convert = Callable[..., TensorFlowModel]
INT8, BF16 = Precision.INT8, Precision.BF16
ADAPTOR = TensorFlowAdaptor()
#: What the float op of an integer kernel is in this file.
PRODUCTS = ("MatMul", "Conv2D")


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


WEIGHT, OTHER = values(8, 8, seed=1) / 3, values(8, 8, seed=2) / 3


@pytest.fixture
def converted(all_machine: Any) -> Convert:
    """Converts every op that has a kernel of a precision, with the ranges of some batches.

    The source may be a loaded model.
    """

    def convert(source: Any, *batches: Any, precision: Precision = INT8) -> TensorFlowModel:
        loaded = isinstance(source, TensorFlowModel)
        model = source if loaded else ADAPTOR.load(source, example=batches[0])
        space = ADAPTOR.space(model, all_machine)
        observations = ADAPTOR.observe(model, batches, space)
        plan = space.resolve(uniform(space, precision))
        return ADAPTOR.convert(model, plan, observations, space)

    return convert


def of_rows(body: Callable[[Any], Any]) -> Any:
    return tf.function(body, input_signature=[tf.TensorSpec([None, 8], name="x")])


def products(model: TensorFlowModel) -> list[str]:
    return [node.name for node in model.op_nodes if node.op in PRODUCTS]


def in_int8(model: TensorFlowModel, data: Any) -> set[str]:
    """The ops that integer kernels ran for, by the runtime's own statistics."""
    return {n for n, ran in ADAPTOR.trace_kernels(model, data).items() if ran.precision is INT8}


def assert_near(source: Any, model: TensorFlowModel, data: Any, decibels: float = 25) -> None:
    expected = tf.nest.flatten(source(data))
    actual = tf.nest.flatten(ADAPTOR.predict(model, data))
    for reference, output in zip(expected, actual, strict=True):
        assert np.shape(reference) == np.shape(output)
        assert signal_to_noise(np.asarray(reference), np.asarray(output)) > decibels


RECURRENT = {
    "lstm": layers.LSTM(8),
    "lstm-sequences": layers.LSTM(8, return_sequences=True),
    "lstm-backwards": layers.LSTM(8, go_backwards=True),
    "gru": layers.GRU(8),
    "gru-before": layers.GRU(8, reset_after=False),
    "rnn": layers.SimpleRNN(8),
    "bidirectional": layers.Bidirectional(layers.GRU(8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_every_product_of_a_recurrent_layer_runs_in_int8(
    name: str, converted: Convert, tmp_path: Path
) -> None:
    inputs = Input((6, 4))
    net = Model(inputs, RECURRENT[name](inputs))
    data = values(5, 6, 4)
    loaded = ADAPTOR.load(net)
    assert products(loaded)
    assert all("/while/body/" in product for product in products(loaded))
    model = converted(loaded, data)
    assert in_int8(model, data) >= set(products(loaded))
    assert_near(net, model, data)
    ADAPTOR.save(model, tmp_path)
    again = ADAPTOR.predict(ADAPTOR.restore(tmp_path), data)
    np.testing.assert_array_equal(again, ADAPTOR.predict(model, data))
    np.testing.assert_array_equal(ADAPTOR.native(model)(data), again)


@pytest.mark.slow
def test_a_state_goes_from_one_recurrent_layer_to_another(converted: Convert) -> None:
    source, target = Input((6, 4)), Input((5, 3))
    state = layers.GRU(8)(source)
    decoded = layers.GRU(8, return_sequences=True)(target, initial_state=state)
    net = Model([source, target], layers.Dense(4)(decoded))
    data = [values(3, 6, 4), values(3, 5, 3)]
    model = converted(net, data)
    assert len(in_int8(model, data)) >= 5
    assert_near(net, model, data)


@pytest.mark.slow
def test_the_convolutions_of_a_recurrent_layer_run_in_int8(converted: Convert) -> None:
    inputs = Input((3, 8, 8, 4))
    net = Model(inputs, layers.ConvLSTM2D(4, 3)(inputs))
    data = values(2, 3, 8, 8, 4)
    model = converted(net, data)
    assert in_int8(model, data) >= set(products(ADAPTOR.load(net)))
    assert_near(net, model, data)


def _grown(x: Any) -> Any:
    return tf.while_loop(lambda k, v: k < 4, lambda k, v: (k + 1, (2 * v) @ WEIGHT + v), [0, x])[1]


def test_calibration_sees_every_iteration() -> None:
    model, data = ADAPTOR.load(of_rows(_grown)), values(5, 8)
    (product,) = products(model)
    tensor = model.graph.nodes[product].input[0]
    iterations = [statistics for _, statistics in ADAPTOR.observe_tensors(model, [data], [tensor])]
    expected, value = [], data
    for _ in range(4):
        expected.append(2 * value)
        value = expected[-1] @ WEIGHT + value
    assert len(iterations) == 4
    for statistics, value in zip(iterations, expected, strict=True):
        np.testing.assert_allclose(statistics.low, value.min(0), rtol=1e-4)
        np.testing.assert_allclose(statistics.high, value.max(0), rtol=1e-4)
        np.testing.assert_allclose(statistics.power, np.square(value).mean(0), rtol=1e-4)
        np.testing.assert_allclose(statistics.mean, value.mean(0), rtol=1e-3, atol=1e-5)
        assert statistics.count == 5


def test_the_time_of_an_op_in_a_loop_is_that_of_all_iterations() -> None:
    model, data = ADAPTOR.load(of_rows(_grown)), values(5, 8)
    (product,) = products(model)
    outputs = model.signature.output_tensors
    (run,) = model.runner.trace_runs(model.signature.bind_inputs(data), outputs, 1)
    stats = [n for device in run.dev_stats for n in device.node_stats if n.node_name == product]
    assert len(stats) == 4


def _two_loops(x: Any) -> Any:
    def inner(v: Any) -> Any:
        return tf.while_loop(lambda k, u: k < 2, lambda k, u: (k + 1, tf.tanh(u @ OTHER)), [0, v])

    def outer(k: Any, v: Any) -> Any:
        return k + 1, inner(tf.nn.relu(v @ WEIGHT))[1] + v

    return tf.while_loop(lambda k, v: k < 3, outer, [0, x])[1]


def _branch(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.nn.relu(x @ WEIGHT), lambda: x @ OTHER + 1.0)


def _loop_in_branch(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: _grown(x), lambda: x @ OTHER)


def _cases(x: Any) -> Any:
    index = tf.cast(tf.reduce_sum(x) > 0, tf.int32)
    return tf.switch_case(index, [lambda: x @ WEIGHT, lambda: tf.nn.relu(x @ OTHER)])


def _shared_weight(x: Any) -> Any:
    return _grown(x @ WEIGHT) @ WEIGHT


def _lengthened(x: Any) -> Any:
    def body(k: Any, v: Any) -> Any:
        return k + 1, tf.concat([v, tf.tanh(v[-1:] @ WEIGHT)], 0)

    free = [tf.TensorShape([]), tf.TensorShape([None, 8])]
    return tf.while_loop(lambda k, v: k < 3, body, [0, x], shape_invariants=free)[1]


def _mapped(x: Any) -> Any:
    return tf.map_fn(lambda row: tf.squeeze(row[None] @ WEIGHT, 0), x)


GRAPHS = [
    _grown,
    _two_loops,
    _branch,
    _loop_in_branch,
    _cases,
    _shared_weight,
    _lengthened,
    _mapped,
]


@pytest.mark.parametrize("precision", [INT8, BF16])
@pytest.mark.parametrize("body", GRAPHS)
def test_bodies_run_in_other_precisions(
    body: Callable[[Any], Any], precision: Precision, converted: Convert
) -> None:
    source, positive, negative = of_rows(body), values(6, 8) + 1, values(6, 8) - 1
    model = converted(source, positive, negative, precision=precision)
    for data in (positive, negative):
        assert_near(source, model, data, 30 if precision is BF16 else 25)
    if precision is INT8:
        ran = in_int8(model, positive) | in_int8(model, negative)
        assert ran >= set(products(ADAPTOR.load(source)))
    for node in model.graph.nodes.values():
        if node.op in CONTROL_FLOW:
            kind = tf.as_dtype(node.attr["T"].type) if node.attr["T"].type else tf.bool
            assert kind not in (tf.quint8, tf.qint8, tf.bfloat16), node.name


def test_a_branch_within_a_loop_stays_in_fp32_and_says_why(all_machine: Any) -> None:
    """It runs in some iterations only, and calibration would have nothing to record in others."""

    def run(x: Any) -> Any:
        def body(k: Any, v: Any) -> Any:
            return k + 1, tf.cond(k % 2 > 0, lambda: tf.tanh(v @ WEIGHT), lambda: v + 1.0)

        return tf.while_loop(lambda k, v: k < 4, body, [0, x])[1]

    source, data = of_rows(run), values(5, 8)
    model = ADAPTOR.load(source)
    (product,) = products(model)
    capability = ADAPTOR.space(model, all_machine).capabilities[product]
    assert "behind a branch" in capability.reasons[INT8]
    assert_near(source, model, data, 100)


def test_a_weight_that_a_loop_changes_is_no_constant(all_machine: Any) -> None:
    def run(x: Any) -> Any:
        def body(k: Any, v: Any, w: Any) -> Any:
            return k + 1, v @ w, w * 0.5

        return tf.while_loop(lambda k, v, w: k < 3, body, [0, x, tf.constant(WEIGHT)])[1]

    source, data = of_rows(run), values(5, 8)
    model = ADAPTOR.load(source)
    (product,) = products(model)
    reasons = ADAPTOR.space(model, all_machine).capabilities[product].reasons
    assert "computed" in reasons[INT8]
    assert_near(source, model, data, 100)


def test_the_shape_of_what_a_loop_lengthens_is_not_taken_for_granted() -> None:
    model = ADAPTOR.load(of_rows(_lengthened))
    for name, node in model.graph.nodes.items():
        if node.op == "Merge" and node.attr["T"].type == tf.float32.as_datatype_enum:
            shape = model.shapes[name]
            assert shape is None or shape[0] is None


def test_a_loop_without_iterations_leaves_nothing_to_see() -> None:
    def run(x: Any) -> Any:
        return tf.while_loop(lambda k, v: k < 3, lambda k, v: (k + 1, v @ WEIGHT), [5, x])[1]

    model = ADAPTOR.load(of_rows(run))
    names = [node.name for node in model.op_nodes if node.op not in PLACEHOLDERS]
    observed = dict(ADAPTOR.observe_tensors(model, [values(2, 8)], names))
    assert not set(products(model)) & set(observed)
    np.testing.assert_array_equal(ADAPTOR.predict(model, values(2, 8)), values(2, 8))


class _Switched(tf.Module):
    """A net with a branch that a variable decides on, as exporters leave it."""

    def __init__(self, flag: bool | int) -> None:
        super().__init__()
        self.flag = tf.Variable(flag)

    def two(self, x: Any) -> Any:
        return 1.0 + tf.cond(self.flag, lambda: tf.nn.relu(x @ WEIGHT), lambda: _branch(x @ OTHER))

    def several(self, x: Any) -> Any:
        branches = [lambda: x @ WEIGHT, lambda: x @ OTHER, lambda: tf.nn.relu(x)]
        return 1.0 + tf.switch_case(self.flag.read_value(), branches)

    def within_a_loop(self, x: Any) -> Any:
        body = lambda k, v: (k + 1, self.two(v) / 4)  # noqa: E731
        return tf.while_loop(lambda k, v: k < 3, body, [0, x])[1]


@pytest.mark.parametrize(
    ("way", "flag", "inside"),
    [
        (("two", True, 1)),
        ("two", False, 3),
        *(("several", index, count) for index, count in ((0, 1), (1, 1), (2, 0), (9, 0))),
    ],
)
def test_a_branch_that_a_constant_decides_on_is_part_of_the_graph(
    way: str, flag: bool | int, inside: int
) -> None:
    source = of_rows(getattr(_Switched(flag), way))
    model = ADAPTOR.load(source)
    assert len(products(model)) == inside
    if inside < 3:
        assert not any(node.op in (*CONTROL_FLOW, "_SwitchN") for node in model.op_nodes)
    for data in (values(6, 8) + 1, values(6, 8) - 1):
        assert_near(source, model, data, 100)


@pytest.mark.parametrize("flag", [True, False])
def test_a_branch_within_a_loop_that_a_constant_decides_on(flag: bool) -> None:
    source = of_rows(_Switched(flag).within_a_loop)
    model = ADAPTOR.load(source)
    for data in (values(6, 8) + 1, values(6, 8) - 1):
        assert_near(source, model, data, 100)


def test_inputs_and_outputs_keep_names_that_look_like_those_of_bodies() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (None, 8), "a/while/body/_1/a/while/x")
        product = tf.matmul(x, WEIGHT, name="a/while/body/_1/a/while/product")
        y = tf.nn.relu(product, name="a/while/body/_1/a/while/y")
    model = ADAPTOR.load(graph.as_graph_def(), inputs=[x.op.name], outputs=[y.op.name])
    assert products(model) == ["a/while/body/product"]
    assert model.signature.input_tensors == [x.op.name]
    assert model.signature.output_tensors == [y.op.name]
    data = values(3, 8)
    actual = np.asarray(ADAPTOR.predict(model, data))
    np.testing.assert_allclose(actual, np.maximum(data @ WEIGHT, 0), rtol=1e-5, atol=1e-6)


#: Branches and checks without results, which outputs wait for.
CHECKS: dict[str, Callable[[Any], Any]] = {
    "equal": lambda x: tf.debugging.assert_equal(tf.shape(x)[1], 8),
    "greater": lambda x: tf.debugging.assert_greater(tf.reduce_max(x), -100.0),
    "less": lambda x: tf.debugging.assert_less(x, 100.0),
    "finite": lambda x: tf.debugging.check_numerics(x, "x must be finite"),
    "print": lambda x: tf.cond(tf.reduce_max(x) > 50.0, lambda: tf.print("large"), tf.no_op),
}


def checked(*names: str) -> Any:
    def run(x: Any) -> Any:
        with tf.control_dependencies([op for n in names if (op := CHECKS[n](x)) is not None]):
            return tf.nn.relu(x @ WEIGHT) @ OTHER

    return of_rows(run)


@pytest.mark.parametrize(
    "names",
    [names for count in (1, 2, 5) for names in combinations(CHECKS, count)],
    ids="-".join,
)
def test_checks_take_no_product_from_int8(names: tuple[str, ...], converted: Convert) -> None:
    source, data = checked(*names), values(6, 8)
    model = converted(source, data)
    assert_near(source, model, data)
    assert in_int8(model, data) >= set(products(ADAPTOR.load(source)))
    assert time_ops(model, data, 1)


@pytest.mark.parametrize("name", CHECKS)
def test_the_runtime_folds_a_prepared_graph_again(name: str) -> None:
    """Sessions run the passes of preparation once more; a cycle made there ended the process."""
    model = ADAPTOR.load(checked(name))
    ports = model.signature.input_tensors, model.signature.output_tensors
    folded = run_offline_passes(model.graph.to_graph_def(), ["constfold"], *ports)
    assert {node.name for node in folded.node} >= set(products(model))


@pytest.mark.parametrize(("name", "wrong"), [("greater", -200), ("less", 200)])
def test_a_check_that_fails_fails_after_conversion(
    name: str, wrong: float, converted: Convert
) -> None:
    source, data = checked(name), np.full((6, 8), wrong, np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError):
        source(data)
    with pytest.raises(ConversionError, match="fails to run the graph: InvalidArgumentError"):
        ADAPTOR.predict(converted(source, values(6, 8)), data)
