"""The graph rewrite with its loss scaling: what it refuses, what follows it, what it leaves."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from machine import has_rewrite_pass
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from neural_mp import AutoMixedPrecisionOptions
from neural_mp.adaptors.common.runtime_probe import ONEDNN_LIMIT
from neural_mp.adaptors.tensorflow.training import graph_rewrite_checks
from neural_mp.adaptors.tensorflow.training.graph_rewrite_state import rewrite_is_enabled
from neural_mp.adaptors.tensorflow.training.v1_loss_scale import V1LossScaleOptimizer
from neural_mp.core.loss_scale import LossScale
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, NeuralMPError, UnsupportedPrecisionError
from neural_mp.training import (
    LossScaleOptimizer,
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
    set_policy,
)

v1 = tf.compat.v1
BF16, FP16 = "auto_mixed_precision_onednn_bfloat16", "auto_mixed_precision"
FILTERS = np.random.default_rng(0).normal(size=(3, 3, 1, 4)).astype(np.float32)
IMAGES = np.random.default_rng(1).random((2, 8, 8, 1), np.float32)
RULE = LossScale(initial=4.0, growth_interval=2, minimum=1.0, maximum=16.0)
needs_pass = pytest.mark.skipif(
    not has_rewrite_pass(), reason="TensorFlow's pass for BF16 does nothing on this machine"
)


@pytest.fixture(autouse=True)
def _as_before():
    yield
    keras.config.set_dtype_policy("float32")
    if rewrite_is_enabled():
        disable_mixed_precision_graph_rewrite()


@pytest.fixture
def enabled():
    """The rewrite, enabled for an optimizer of Keras, with no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(0.05))


def small_net(optimizer):
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, "relu")])
    net.add(keras.layers.Dense(10, "softmax"))
    net.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    return net


def trained(optimizer, digits):
    """The weights after an epoch."""
    net = small_net(optimizer)
    images = np.asarray(digits[0].images, np.float32).reshape(-1, 64)[:256]
    net.fit(images, np.asarray(digits[0].labels)[:256], epochs=1, verbose=0)
    return net.get_weights()


def convolved(config=None):
    """What a session makes of a convolution: its result, and the casts to BF16 in its graph."""
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        filters = v1.get_variable("filters", initializer=FILTERS)
        result = tf.nn.relu(
            tf.nn.conv2d(v1.placeholder_with_default(IMAGES, None), filters, 1, "SAME")
        )
        session.run(v1.global_variables_initializer())
        said = v1.RunMetadata()
        asked = v1.RunOptions(output_partition_graphs=True)
        values = session.run(tf.identity(result), options=asked, run_metadata=said)
    nodes = [node for graph in said.partition_graphs for node in graph.node]
    low = tf.bfloat16.as_datatype_enum
    return values, sum(node.op == "Cast" and node.attr["DstT"].type == low for node in nodes)


def config_with(option, value):
    config = v1.ConfigProto(allow_soft_placement=True)
    setattr(config.graph_options.rewrite_options, option, value)
    return config


@pytest.mark.parametrize(
    ("opt", "message"),
    [
        (keras.optimizers.LossScaleOptimizer, "opt is a LossScaleOptimizer, which scales"),
        (LossScaleOptimizer, "opt is a LossScaleOptimizer, which scales"),
    ],
)
def test_a_keras_optimizer_that_scales_the_loss_already_is_refused(opt, message):
    with pytest.raises(ConfigurationError, match=message):
        enable_mixed_precision_graph_rewrite(opt(keras.optimizers.SGD()))
    assert not rewrite_is_enabled()


def test_an_optimizer_of_tensorflow_1_that_scales_the_loss_already_is_refused():
    wrapped = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(v1.train.AdamOptimizer(), 8)
    with pytest.raises(ConfigurationError, match="opt is a MixedPrecisionLossScaleOptimizer"):
        enable_mixed_precision_graph_rewrite(wrapped)
    assert not rewrite_is_enabled()


@needs_pass
@pytest.mark.parametrize("make", [keras.optimizers.SGD, v1.train.AdamOptimizer])
def test_what_it_gives_back_is_not_taken_again_but_another_optimizer_is(make):
    arguments = () if make is v1.train.AdamOptimizer else (0.1,)
    wrapped = enable_mixed_precision_graph_rewrite(make(*arguments))
    assert isinstance(
        wrapped,
        keras.optimizers.LossScaleOptimizer | v1.mixed_precision.MixedPrecisionLossScaleOptimizer,
    )
    with pytest.raises(ConfigurationError, match="scales the loss already"):
        enable_mixed_precision_graph_rewrite(wrapped)
    assert rewrite_is_enabled()  # the one before counts
    enable_mixed_precision_graph_rewrite(make(*arguments))
    disable_mixed_precision_graph_rewrite()
    assert not tf.config.optimizer.get_experimental_options()[BF16]


@pytest.mark.parametrize(
    ("opt", "message"),
    [
        ("sgd", r"got 'sgd'; make one of the word: keras.optimizers.get\('sgd'\)"),
        (keras.optimizers.SGD, r"call the class: SGD\("),
        (None, "opt must be a Keras 3 optimizer or one of tf.compat.v1.train, got None"),
    ],
)
def test_what_is_no_optimizer_is_refused(opt, message):
    with pytest.raises(ConfigurationError, match=message):
        enable_mixed_precision_graph_rewrite(opt)


POLICIES = {
    "mixed_float16": lambda: "mixed_float16",
    "an entry of a map": lambda: keras.dtype_policies.DTypePolicyMap(
        default_policy="float32", policy_map={"net/last": keras.DTypePolicy("mixed_bfloat16")}
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [keras.optimizers.SGD, v1.train.AdamOptimizer])
def test_a_mixed_policy_that_is_set_is_refused_for_both_kinds(policy, make):
    keras.config.set_dtype_policy(POLICIES[policy]())
    with pytest.raises(ConfigurationError, match=r"mixed_.*set_dtype_policy\('float32'\)"):
        enable_mixed_precision_graph_rewrite(make())
    assert not rewrite_is_enabled()


@needs_pass
@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
def test_a_policy_of_one_type_is_not_refused(policy):
    keras.config.set_dtype_policy(policy)
    enable_mixed_precision_graph_rewrite(keras.optimizers.SGD())
    assert rewrite_is_enabled()


@needs_pass
@pytest.mark.parametrize("policy", POLICIES)
def test_a_mixed_policy_set_later_is_refused_at_the_next_step(enabled, digits, policy):
    keras.config.set_dtype_policy(POLICIES[policy]())
    with pytest.raises(ConfigurationError, match="disable_mixed_precision_graph_rewrite"):
        trained(enabled, digits)
    disable_mixed_precision_graph_rewrite()
    trained(enabled, digits)


@needs_pass
def test_a_mixed_policy_set_later_is_refused_in_a_loop_that_has_begun(enabled):
    weight = keras.Variable(np.ones(3, np.float32))
    enabled.apply([tf.ones(3)], [weight])
    keras.config.set_dtype_policy("mixed_bfloat16")
    with pytest.raises(ConfigurationError, match="both put ops into 16 bits"):
        enabled.apply([tf.ones(3)], [weight])


@needs_pass
def test_a_mixed_policy_set_later_is_refused_by_an_optimizer_of_tensorflow_1():
    wrapped = enable_mixed_precision_graph_rewrite(v1.train.GradientDescentOptimizer(0.1))
    weight = tf.Variable([1.0, 2.0])
    wrapped.minimize(lambda: tf.reduce_sum(weight), var_list=[weight])
    keras.config.set_dtype_policy("mixed_bfloat16")
    with pytest.raises(ConfigurationError, match="both put ops into 16 bits"):
        wrapped.minimize(lambda: tf.reduce_sum(weight), var_list=[weight])


@needs_pass
def test_our_own_way_to_set_a_policy_refuses_at_once(enabled, monkeypatch):
    monkeypatch.setenv("FORCE_BF16", "1")
    with pytest.raises(ConfigurationError, match="the graph rewrite is enabled"):
        set_policy("mixed_bfloat16")
    set_policy("float32")
    disable_mixed_precision_graph_rewrite()
    set_policy("mixed_bfloat16")
    assert keras.config.dtype_policy().name == "mixed_bfloat16"


@needs_pass
def test_a_map_of_ours_is_refused_like_any_policy(monkeypatch):
    monkeypatch.setenv("FORCE_BF16", "1")
    set_policy("mixed_bfloat16", keep=("out",))
    with pytest.raises(ConfigurationError, match="the graph rewrite cannot be used with it"):
        enable_mixed_precision_graph_rewrite(keras.optimizers.SGD())
    set_policy("float32")


@needs_pass
@pytest.mark.parametrize("make", [keras.optimizers.SGD, v1.train.GradientDescentOptimizer])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_that_xla_compiles_warns_that_the_rewrite_does_not_see_it(make, compiled):
    wrapped = enable_mixed_precision_graph_rewrite(make(0.1))
    weight = keras.Variable(np.ones(3, np.float32)) if make is keras.optimizers.SGD else None
    plain = tf.Variable([1.0, 2.0])

    @tf.function(jit_compile=compiled)
    def step():
        if weight is not None:
            wrapped.apply([tf.ones(3)], [weight])
        else:
            wrapped.minimize(lambda: tf.reduce_sum(plain), var_list=[plain])

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step()
    told = [str(found.message) for found in told if "XLA compiles it" in str(found.message)]
    assert bool(told) == compiled
    disable_mixed_precision_graph_rewrite()


def test_optimizers_beside_the_rewrite_take_any_policy(digits):
    keras.config.set_dtype_policy("mixed_bfloat16")
    trained(LossScaleOptimizer(keras.optimizers.SGD()), digits)


@needs_pass
def test_sessions_that_exist_are_told_of():
    def enable():
        enable_mixed_precision_graph_rewrite(keras.optimizers.SGD())
        disable_mixed_precision_graph_rewrite()

    with v1.Session(graph=tf.Graph()), pytest.warns(UserWarning, match=r"without.*: 1\."):
        enable()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        enable()  # that one is closed
        with v1.Session(graph=tf.Graph(), config=config_with(BF16, RewriterConfig.ON)):
            enable()


@needs_pass
def test_sessions_made_while_it_was_enabled_are_not_told_of(enabled):
    with v1.Session(graph=tf.Graph()), v1.Session(graph=tf.Graph(), config=v1.ConfigProto()):
        disable_mixed_precision_graph_rewrite()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            enable_mixed_precision_graph_rewrite(keras.optimizers.SGD())


def test_disabled_without_being_enabled_it_warns():
    with pytest.warns(UserWarning, match="has no effect: the graph rewrite is not enabled"):
        disable_mixed_precision_graph_rewrite()


@needs_pass
def test_disabled_once_it_does_not_warn_but_twice_it_does(enabled):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        disable_mixed_precision_graph_rewrite()
    with pytest.warns(UserWarning, match="was disabled before"):
        disable_mixed_precision_graph_rewrite()


SCALES = {
    "dynamic": ("dynamic", LossScale()),
    "number": (128, LossScale.fixed(128.0)),
    "small": (0.01, LossScale.fixed(0.01)),
    "numpy": (np.float32(2), LossScale.fixed(2.0)),
    "LossScale": (RULE, RULE),
    "fixed": (lambda: v1.mixed_precision.FixedLossScale(64), LossScale.fixed(64.0)),
    "of TensorFlow": (
        lambda: v1.mixed_precision.DynamicLossScale(2.0**30, 7, 4.0),
        LossScale(2.0**30, 7, 4.0, maximum=2.0**30),
    ),
}


@needs_pass
@pytest.mark.parametrize("given", SCALES)
@pytest.mark.parametrize("make", [keras.optimizers.SGD, v1.train.AdamOptimizer])
def test_what_loss_scale_may_be(given, make):
    value, rule = SCALES[given]
    value = value() if callable(value) else value
    assert enable_mixed_precision_graph_rewrite(make(), value).rule == rule


class OwnScale(v1.mixed_precision.DynamicLossScale):
    """A loss scale of somebody's own."""


@pytest.mark.parametrize("value", ["dyn", None, 0, -1, True, np.ones(2), np.inf, OwnScale])
@pytest.mark.parametrize("make", [keras.optimizers.SGD, v1.train.AdamOptimizer])
def test_what_loss_scale_may_not_be(value, make):
    value = value() if value is OwnScale else value
    with pytest.raises(ConfigurationError, match="loss.scale"):
        enable_mixed_precision_graph_rewrite(make(), value)
    assert not rewrite_is_enabled()


@needs_pass
@pytest.mark.parametrize("word", ["bf16", "BFLOAT16", "bfloat16", Precision.BF16, None])
def test_the_words_for_bf16(word):
    enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), precision=word)
    assert tf.config.optimizer.get_experimental_options()[BF16]


def test_fp16_without_a_gpu_is_refused_in_all_its_words():
    for word in ("fp16", "FLOAT16", Precision.FP16):
        with pytest.raises(UnsupportedPrecisionError, match="fp16 looks at ops on a GPU only"):
            enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), precision=word)
    said = AutoMixedPrecisionOptions(data_type="FLOAT16")
    with pytest.raises(UnsupportedPrecisionError, match="fp16 looks at ops on a GPU only"):
        enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), amp=said)
    assert not rewrite_is_enabled()


@pytest.mark.parametrize("precision", [None, "FLOAT16"])
def test_where_there_is_a_gpu_it_is_fp16_and_sessions_follow(monkeypatch, precision):
    gpu = SimpleNamespace(name="/physical_device:GPU:0", device_type="GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [gpu])
    enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), precision=precision)
    assert tf.config.optimizer.get_experimental_options()[FP16]
    given = config_with("disable_meta_optimizer", False)
    with v1.Session(graph=tf.Graph(), config=given) as session:
        rewrites = session._config.graph_options.rewrite_options
        assert rewrites.auto_mixed_precision == RewriterConfig.ON
    disable_mixed_precision_graph_rewrite()
    with v1.Session(graph=tf.Graph(), config=given) as session:
        assert session._config == given


@needs_pass
def test_sessions_follow_it_unless_their_config_forbids_it(enabled):
    low, casts = convolved()
    assert casts
    for config in (v1.ConfigProto(), config_with("remapping", RewriterConfig.OFF)):
        before = config.SerializeToString()
        values, found = convolved(config)
        assert found == casts
        assert config.SerializeToString() == before
        np.testing.assert_array_equal(values, low)
    plain, none = convolved(config_with(BF16, RewriterConfig.OFF))
    assert none == 0
    disable_mixed_precision_graph_rewrite()
    for config in (None, v1.ConfigProto()):
        values, none = convolved(config)
        assert none == 0
        np.testing.assert_array_equal(values, plain)
    assert 0 < np.abs(low - plain).max() < 0.05


@needs_pass
def test_a_session_that_somebody_else_has_wrapped_stays_wrapped(enabled, monkeypatch):
    made = []
    within = graph_rewrite_checks.BaseSession.__init__

    def counted(self, *args, **options):
        made.append(self)
        within(self, *args, **options)

    monkeypatch.setattr(graph_rewrite_checks.BaseSession, "__init__", counted)
    disable_mixed_precision_graph_rewrite()
    assert convolved(v1.ConfigProto())[1] == 0
    assert len(made) == 1


@needs_pass
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # TensorFlow's own
def test_a_wrong_config_is_refused_as_before(enabled):
    with pytest.raises(TypeError, match="must be a tf.ConfigProto"):
        v1.Session(graph=tf.Graph(), config="fast")


@needs_pass
def test_an_edit_that_does_not_fit_leaves_what_was_enabled(enabled):
    moved = AutoMixedPrecisionOptions(denylist_add="MatMul")
    with pytest.raises(NeuralMPError, match="remove the type from that list"):
        enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), amp=moved)
    assert rewrite_is_enabled()
    assert convolved(v1.ConfigProto())[1]


@needs_pass
def test_after_disabling_fit_gives_the_weights_of_fp32_bit_by_bit(digits):
    plain = trained(keras.optimizers.SGD(0.05), digits)
    low = trained(enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(0.05)), digits)
    disable_mixed_precision_graph_rewrite()
    again = trained(keras.optimizers.SGD(0.05), digits)
    assert all(np.array_equal(*pair) for pair in zip(plain, again, strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(plain, low, strict=True))


class Training:
    """Three numbers made smaller by an optimizer of TensorFlow 1; every step may be spoiled."""

    def __init__(self, wrapped, how):
        self.optimizer, self.how = wrapped, how
        if how != "graph":
            self.weight, self.factor = tf.Variable([1.0, 2.0, 3.0]), tf.Variable(1.0)
            self._run = tf.function(self._step) if how == "function" else self._step
            return
        self.session = v1.Session(graph=tf.Graph())
        with self.session.graph.as_default():
            self.weight = v1.get_variable("weight", initializer=[1.0, 2.0, 3.0])
            self.factor = v1.placeholder(tf.float32, [])
            rows = tf.gather(self.weight, [0, 2])  # its gradient is sparse
            loss = self.factor * tf.reduce_sum(tf.square(rows))
            self.steps = v1.train.create_global_step()
            self.train = wrapped.minimize(loss, global_step=self.steps)
            self.state = (wrapped.loss_scale, wrapped.skipped_steps, wrapped.skipped_in_a_row)
            self.session.run(v1.global_variables_initializer())

    def _step(self):
        self.optimizer.minimize(
            lambda: self.factor * tf.reduce_sum(tf.square(self.weight)), var_list=[self.weight]
        )

    def after(self, finite):
        """The numbers, the scale, and the counters of skipped steps after one more step."""
        factor, found = 1.0 if finite else np.inf, self.optimizer
        if self.how == "graph":
            self.session.run(self.train, {self.factor: factor})
            return self.session.run((self.weight, *self.state))
        self.factor.assign(factor)
        self._run()
        values = (found.loss_scale, found.skipped_steps, found.skipped_in_a_row)
        return (self.weight.numpy(), *(value.numpy() for value in values))


@needs_pass
@pytest.mark.parametrize("how", ["graph", "function", "eager"])
@pytest.mark.parametrize("rule", [RULE, LossScale.fixed(3.0)], ids=["dynamic", "fixed"])
def test_optimizers_of_tensorflow_1_go_by_the_rule_step_by_step(how, rule):
    wrapped = enable_mixed_precision_graph_rewrite(v1.train.GradientDescentOptimizer(0.01), rule)
    training, state = Training(wrapped, how), rule.start()
    before = np.array([1.0, 2.0, 3.0], np.float32)
    for finite in map(bool, (1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1)):
        state = rule.after(state, finite)
        weight, *told = training.after(finite)
        assert told == [state.scale, state.skipped_steps, state.skipped_in_a_row]
        assert np.array_equal(weight, before) != finite
        assert np.isfinite(weight).all()
        before = weight
    if how == "graph":
        assert training.session.run(training.steps) == state.steps
        training.session.close()


def test_without_loss_scaling_or_with_it_the_steps_are_the_same():
    """The scale is a power of two: it changes no bit of a gradient in float32."""
    weights = tf.Variable([0.1, 0.2, 0.3]), tf.Variable([0.1, 0.2, 0.3])
    plain = v1.train.AdamOptimizer(0.1)
    ours = V1LossScaleOptimizer(v1.train.AdamOptimizer(0.1), LossScale())
    for _ in range(5):
        for optimizer, weight in zip((plain, ours), weights, strict=True):
            optimizer.minimize(
                lambda weight=weight: tf.reduce_sum(tf.square(weight)), var_list=[weight]
            )
    np.testing.assert_array_equal(*(weight.numpy() for weight in weights))


def child(code, **variables):
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "TF_CPP_MIN_LOG_LEVEL": "3", **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


WITHOUT_ONEDNN = """
import keras
from neural_mp.training import enable_mixed_precision_graph_rewrite
enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), precision="BFLOAT16")
"""


def test_where_onednn_is_off_the_error_names_the_variable():
    done = child(WITHOUT_ONEDNN, TF_ENABLE_ONEDNN_OPTS="0")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "UnsupportedPrecisionError" in last
    assert "TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported" in last


FIT = """
from collections import Counter

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow.python.eager import context

from neural_mp.training import (
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
)

digits = load_digits()
images, labels = (digits.images[:256, ..., None] / 16).astype(np.float32), digits.target[:256]


def trained(optimizer):
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(8, 3, activation="relu")])
    net.add(keras.layers.Flatten())
    net.add(keras.layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer, loss, jit_compile=False)
    context.enable_graph_collection()
    net.fit(images, labels, epochs=3, verbose=0)
    graphs = context.context().export_run_metadata().function_graphs
    context.disable_graph_collection()
    casts = Counter()
    for graph in (found.post_optimization_graph for found in graphs):
        nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
        for node in nodes:
            if node.op == "Cast":
                casts[tf.as_dtype(node.attr["DstT"].type).name] += 1
    return net.get_weights(), casts["bfloat16"]


plain, none = trained(keras.optimizers.SGD(0.05))
assert none == 0
low, casts = trained(enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(0.05)))
# Of the images, two weights and two biases on the way there, and of gradients on the way back.
assert 5 <= casts <= 20, casts
assert any((a != b).any() for a, b in zip(plain, low))
disable_mixed_precision_graph_rewrite()
again, none = trained(keras.optimizers.SGD(0.05))
assert none == 0
assert all(np.array_equal(*pair) for pair in zip(plain, again))
"""


@pytest.mark.slow
@pytest.mark.skipif(ONEDNN_LIMIT in os.environ, reason="oneDNN refuses BF16 where it is limited")
def test_casts_to_bf16_are_in_the_optimised_graph_of_fit_and_gone_afterwards():
    done = child(FIT, TF_ENABLE_ONEDNN_OPTS="1")
    assert done.returncode == 0, done.stderr[-2000:]


TWO_DEVICES = """
import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.training.v1_loss_scale import V1LossScaleOptimizer
from neural_mp.training import LossScale

halves = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], halves)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    weight = tf.Variable([1.0, 2.0])
    optimizer = V1LossScaleOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(0.1), LossScale(initial=8.0)
    )


def step(factor):
    optimizer.minimize(lambda: factor * tf.reduce_sum(tf.square(weight)), var_list=[weight])


@tf.function
def run(factors):
    strategy.run(step, args=(factors,))


def factors(first, second):
    return strategy.experimental_distribute_values_from_function(
        lambda replica: tf.constant((first, second)[replica.replica_id_in_sync_group])
    )


for skipped, spoiled in enumerate(((np.inf, 1.0), (1.0, np.inf)), 1):
    run(factors(*spoiled))
    assert weight.numpy().tolist() == [1.0, 2.0]
    assert float(optimizer.loss_scale) == 8 / 2**skipped
    assert int(optimizer.skipped_steps) == skipped
run(factors(1.0, 1.0))
assert (weight.numpy() < [1.0, 2.0]).all() and int(optimizer.skipped_in_a_row) == 0
"""


@pytest.mark.slow
def test_what_is_not_finite_on_one_of_two_devices_changes_no_weight_of_tensorflow_1():
    done = child(TWO_DEVICES)
    assert done.returncode == 0, done.stderr[-2000:]
