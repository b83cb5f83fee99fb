"""Cases of TensorFlow's own constructs: control flow, other things than numbers, ports."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
from zoo.harness import Built, Case, flat

_RANDOM = np.random.default_rng(0)
_W = _RANDOM.normal(size=(16, 16)).astype("f4") / 4
_V = _RANDOM.normal(size=(16, 4)).astype("f4") / 4
_KERNEL = _RANDOM.normal(size=(3, 3, 4, 8)).astype("f4") / 6
_ROWS = _RANDOM.normal(size=(8, 16)).astype("f4")
_IMAGES = _RANDOM.normal(size=(4, 8, 8, 4)).astype("f4")
_SPEC = tf.TensorSpec((None, 16), tf.float32, name="x")


def _built(function: Any, *batches: Any) -> Built:
    """Return a function with batches and what TensorFlow computes for them."""
    outputs = [
        flat(tf.nest.map_structure(np.asarray, _called(function, batch))) for batch in batches
    ]
    return Built(function, batches, outputs)


def _called(function: Any, batch: Any) -> Any:
    values = batch if isinstance(batch, tuple) else (batch,)
    return function(*map(tf.constant, values))


def _case(
    name: str,
    function: Callable[..., Any],
    *batches: Any,
    specs: Sequence[tf.TensorSpec] = (_SPEC,),
    **options: Any,
) -> Case:
    """Return the case of a `tf.function`."""

    def build() -> Built:
        return _built(tf.function(function, input_signature=list(specs)), *(batches or (_ROWS,)))

    return Case(name, build, **options)


def _hidden(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu(x @ _W)


def _while_loop(x: tf.Tensor) -> tf.Tensor:
    _, h = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ _W)), (0, x))
    return h @ _V


def _tensor_array(x: tf.Tensor) -> tf.Tensor:
    h, steps = _hidden(x), tf.TensorArray(tf.float32, 3)
    _, steps = tf.while_loop(
        lambda i, t: i < 3,
        lambda i, t: (i + 1, t.write(i, h * tf.cast(i, tf.float32))),
        (0, steps),
    )
    return tf.reduce_mean(steps.stack(), 0) @ _V


def _map_fn(x: tf.Tensor) -> tf.Tensor:
    return tf.map_fn(lambda row: row * 2, _hidden(x)) @ _V


def _scan(x: tf.Tensor) -> tf.Tensor:
    return tf.scan(lambda sums, row: sums * 0.5 + row, _hidden(x)) @ _V


def _conditional(x: tf.Tensor) -> tf.Tensor:
    h = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.nn.relu(x @ _W), lambda: tf.tanh(x @ -_W))
    return h @ _V


def _switch_case(x: tf.Tensor) -> tf.Tensor:
    index = tf.cast(tf.reduce_sum(x) > 0, tf.int32) + tf.cast(tf.reduce_sum(x) > 5, tf.int32)
    branches = [lambda: x @ _W, lambda: tf.tanh(x @ _W), lambda: tf.nn.relu(x @ -_W)]
    return tf.switch_case(index, branches) @ _V


def _loop_in_branch(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(tf.shape(x)[0] > 2, lambda: _while_loop(x), lambda: x @ _V)


def _assertions(x: tf.Tensor) -> tf.Tensor:
    checks = [
        tf.debugging.assert_equal(tf.shape(x)[1], 16),
        tf.debugging.assert_greater(tf.reduce_max(x), -100.0),
        tf.debugging.check_numerics(x, "x is not finite"),
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return _hidden(x) @ _V


def _strings(x: tf.Tensor, words: tf.Tensor) -> Any:
    lengths = tf.cast(tf.strings.length(words), tf.float32)
    return {"y": (_hidden(x) * lengths) @ _V, "upper": tf.strings.upper(words)}


def _ragged(x: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    rows = tf.RaggedTensor.from_row_lengths(_hidden(x), lengths)
    return tf.reduce_sum(rows, axis=1) @ _V


def _sparse(x: tf.Tensor) -> tf.Tensor:
    sparse = tf.sparse.from_dense(tf.nn.relu(x))
    return tf.nn.relu(tf.sparse.sparse_dense_matmul(sparse, _W)) @ _V


@tf.function
def _inner(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu(x @ _W)


@tf.function(jit_compile=True)
def _compiled(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu(x @ _W)


@tf.custom_gradient
def _with_gradient(x: tf.Tensor) -> Any:
    return tf.nn.relu(x), lambda upstream: upstream


def _convolved(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu(tf.nn.conv2d(x, _KERNEL, 1, "SAME"))


def _beams(x: tf.Tensor) -> Any:
    values, indices = tf.math.top_k(_hidden(x) @ _V, 2)
    return values, indices


def _suppressed(x: tf.Tensor) -> tf.Tensor:
    boxes = tf.sigmoid(_hidden(x) @ _V)
    return tf.gather(boxes, tf.image.non_max_suppression(boxes, tf.reduce_sum(boxes, 1), 4))


def _transposed(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.conv2d_transpose(_convolved(x), _KERNEL, (4, 16, 16, 4), 2)


def _dilated(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.conv2d(x, _KERNEL, 1, "SAME", dilations=2)


def _in_bfloat16(x: tf.Tensor) -> tf.Tensor:
    h = tf.nn.softmax(tf.cast(_hidden(x), tf.bfloat16) @ tf.cast(_W, tf.bfloat16))
    return tf.cast(h, tf.float32) @ _V


def _with_noise(x: tf.Tensor) -> tf.Tensor:
    return _hidden(x + 0.1 * tf.random.stateless_normal([16], [1, 2])) @ _V


class _Model(tf.Module):
    """A module with two functions and weights in variables."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = tf.Variable(_W), tf.Variable(_V)

    @tf.function(input_signature=[_SPEC])
    def scores(self, x: tf.Tensor) -> Any:
        with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(x)[1], 16)]):
            return {"scores": tf.nn.relu(x @ self.w) @ self.v}

    @tf.function(input_signature=[_SPEC])
    def states(self, x: tf.Tensor) -> Any:
        return {"states": tf.nn.relu(x @ self.w)}


def _several_signatures() -> Built:
    module = _Model()
    with tempfile.TemporaryDirectory() as folder:
        signatures = {"serving_default": module.scores, "states": module.states}
        tf.saved_model.save(module, folder, signatures=signatures)
        loaded = tf.saved_model.load(folder)
    return Built(loaded, [_ROWS], [flat(np.asarray(module.scores(_ROWS)["scores"]))])


def _frozen(*, lowered: bool) -> Built:
    """Return a graph with a loop, as functions or as dataflow (Enter, Exit, NextIteration)."""
    function = tf.function(_tensor_array, input_signature=[_SPEC]).get_concrete_function()
    frozen = convert_variables_to_constants_v2(function, lower_control_flow=lowered)
    expected = np.asarray(function(tf.constant(_ROWS)))
    return Built(frozen.graph.as_graph_def(), [_ROWS], [[expected]])


_TWO = (_SPEC, tf.TensorSpec((None, 1), tf.string, name="words"))
_LENGTHS = (_SPEC, tf.TensorSpec((None,), tf.int64, name="lengths"))
_IMAGE = (tf.TensorSpec((None, 8, 8, 4), tf.float32, name="image"),)
_WORDS = np.array([["a"], ["bcd"], ["éf"], [""]] * 2, object)
_BOTH_SIGNS = (np.abs(_ROWS), -np.abs(_ROWS))

CASES = [
    _case("while_loop", _while_loop),
    _case("while_loop with TensorArray", _tensor_array),
    _case("map_fn", _map_fn),
    _case("scan", _scan),
    _case("cond, both branches", _conditional, *_BOTH_SIGNS),
    _case("switch_case", _switch_case, *_BOTH_SIGNS),
    _case("cond around while_loop", _loop_in_branch, _ROWS, _ROWS[:2]),
    _case("assertions", _assertions),
    _case("strings", _strings, (_ROWS, _WORDS), specs=_TWO),
    _case("ragged tensors", _ragged, (_ROWS, np.array([3, 0, 5])), specs=_LENGTHS),
    _case("sparse tensors", _sparse),
    _case("partitioned call", lambda x: _inner(_inner(x)) @ _V),
    _case("jit_compile", lambda x: _compiled(x) @ _V),
    _case("custom_gradient", lambda x: _with_gradient(x @ _W) @ _V),
    _case(
        "nested outputs",
        lambda x: {"a": [x @ _W, {"b": _hidden(x) @ _V}], "c": (tf.reduce_sum(x, 1),)},
    ),
    _case("output that is an input", lambda x: (x, _hidden(x) @ _V)),
    _case("output twice", lambda x: [(y := _hidden(x) @ _V), y]),
    _case("constant output", lambda x: (tf.constant([1.0, 2.0]), _hidden(x) @ _V)),
    _case("top_k", _beams, discontinuous="rounding changes which are the largest"),
    _case(
        "argmax",
        lambda x: tf.argmax(_hidden(x) @ _V, 1),
        discontinuous="rounding changes which is the largest",
    ),
    _case("half precision inside", lambda x: tf.cast(tf.cast(_hidden(x), tf.float16), tf.float32)),
    _case("bfloat16 inside", _in_bfloat16),
    _case("double precision", lambda x: tf.cast(_hidden(x), tf.float64) @ tf.cast(_V, tf.float64)),
    _case("complex numbers", lambda x: tf.abs(tf.signal.rfft(_hidden(x))) @ _V[:9]),
    _case("random numbers of a seed", _with_noise),
    _case("resize", lambda x: tf.image.resize(_convolved(x), (5, 5)), _IMAGES, specs=_IMAGE),
    _case(
        "non_max_suppression",
        _suppressed,
        discontinuous="rounding changes which boxes overlap",
    ),
    _case("dilated convolution", _dilated, _IMAGES, specs=_IMAGE),
    _case("conv2d_transpose", _transposed, _IMAGES, specs=_IMAGE),
    _case("tensor_scatter", lambda x: tf.tensor_scatter_nd_add(_hidden(x), [[0]], x[:1]) @ _V),
    _case("einsum", lambda x: tf.einsum("bi,ij,jk->bk", x, _W, _V)),
    _case("segment_sum", lambda x: tf.math.segment_sum(_hidden(x), tf.range(8) // 2) @ _V),
    Case("several signatures", _several_signatures),
    Case("frozen graph with a While", lambda: _frozen(lowered=False)),
    Case("frozen graph with a loop of dataflow", lambda: _frozen(lowered=True)),
]
