"""Loss scaling in Keras goes by the rule, in both languages, and keeps weights that stock ruins."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from neural_mp.core.training_numerics import LossScale, LossScaleState
from neural_mp.errors import ConfigurationError
from neural_mp.training import LossScaleOptimizer

RULE = LossScale(growth_interval=3)
RATE = 0.1


class Training:
    """A line fitted by gradient descent, of which every batch may be spoiled."""

    def __init__(self, optimizer, language="keras 3", how="eager"):
        random = np.random.default_rng(0)
        self.weight = keras.Variable(random.normal(size=(4, 1)).astype(np.float32))
        self.inputs = random.normal(size=(16, 4)).astype(np.float32)
        solution = np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)
        self.targets = self.inputs @ solution
        self.optimizer = optimizer
        optimizer.build([self.weight])
        step = {"keras 3": self._in_keras_3, "keras 2": self._in_keras_2}[language]
        compiled = {"eager": None, "graph": False, "xla": True}[how]
        self._step = step if compiled is None else tf.function(step, jit_compile=compiled)

    def _loss(self, factor):
        error = tf.matmul(self.inputs * factor, self.weight.value) - self.targets
        return tf.reduce_mean(tf.square(error))

    def _in_keras_3(self, factor):
        with tf.GradientTape() as tape:
            scaled = self.optimizer.scale_loss(self._loss(factor))
        self.optimizer.apply(tape.gradient(scaled, [self.weight.value]), [self.weight])

    def _in_keras_2(self, factor):
        with tf.GradientTape() as tape:
            scaled = self.optimizer.get_scaled_loss(self._loss(factor))
        grads = self.optimizer.get_unscaled_gradients(tape.gradient(scaled, [self.weight.value]))
        self.optimizer.apply_gradients(zip(grads, [self.weight], strict=True))

    def step(self, finite=True):
        self._step(tf.constant(1.0 if finite else np.inf))

    @property
    def values(self):
        return self.weight.numpy().copy()

    @property
    def state(self):
        optimizer = self.optimizer
        return LossScaleState(
            optimizer.loss_scale,
            int(optimizer.step_counter),
            int(optimizer.iterations),
            optimizer.skipped_steps,
            optimizer.skipped_in_a_row,
        )


def ours(rule=RULE, inner=None):
    return LossScaleOptimizer(inner or keras.optimizers.SGD(RATE), rule)


WAYS = itertools.product(["keras 3", "keras 2"], ["graph", "eager"])


@pytest.fixture(scope="module", params=WAYS, ids=", ".join)
def training(request):
    """One training for all sequences: a graph takes longer to trace than to run."""
    return Training(ours(), *request.param)


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(sequence=st.lists(st.booleans(), min_size=1, max_size=20))
def test_its_state_is_that_of_the_rule_step_by_step(training, sequence):
    state = training.state
    for finite in sequence:
        previous = training.values
        training.step(finite)
        state = RULE.after(state, finite)
        assert training.state == state
        assert np.isfinite(training.values).all()
        if not finite:
            np.testing.assert_array_equal(training.values, previous)


@pytest.mark.slow
def test_compiled_by_xla_it_is_the_same():
    training, state = Training(ours(), how="xla"), RULE.start()
    for finite in (True, False, True, True, True, False):
        training.step(finite)
        state = RULE.after(state, finite)
        assert training.state == state


def test_three_hundred_bad_batches_and_a_good_one():
    inner = keras.optimizers.SGD(RATE)
    sound = Training(ours(LossScale()), how="graph")
    stock = Training(keras.optimizers.LossScaleOptimizer(inner), how="graph")
    for training in (sound, stock):
        for _ in range(300):
            training.step(finite=False)
        assert np.isfinite(training.values).all()
        training.step()
    assert np.isfinite(sound.values).all()
    assert not np.isfinite(stock.values).all()
    assert sound.state == LossScaleState(LossScale().minimum, 1, 1, 300, 0)


@pytest.mark.parametrize("language", ["keras 3", "keras 2"])
def test_weights_are_those_of_plain_float32_where_nothing_overflows(language):
    training = Training(ours(), language, "graph")
    weight = training.values
    for _ in range(10):
        training.step()
        error = training.inputs @ weight - training.targets
        weight = weight - np.float32(RATE) * (training.inputs.T @ (np.float32(2 / 16) * error))
    np.testing.assert_allclose(training.values, weight, rtol=1e-5, atol=1e-6)


def test_a_fixed_scale_skips_and_stays():
    training = Training(ours(512), how="graph")
    for finite in (True, False, False):
        training.step(finite)
    assert training.state == LossScaleState(512, 0, 1, 2, 2)


def test_gradients_are_clipped_after_they_are_divided():
    training = Training(ours(inner=keras.optimizers.SGD(1.0, clipnorm=0.5)))
    original = training.values
    training.step()
    assert np.linalg.norm(training.values - original) == pytest.approx(0.5, rel=1e-4)


def test_gradients_may_be_accumulated():
    inner = keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)
    training, plain = Training(ours(inner=inner), how="graph"), Training(ours(), how="graph")
    original = training.values
    training.step()
    np.testing.assert_array_equal(training.values, original)
    training.step()
    plain.step()
    np.testing.assert_allclose(training.values, plain.values, rtol=1e-5, atol=1e-6)


def small_net():
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, activation="relu")])
    net.add(keras.layers.Dense(10, dtype="float32"))
    return net


def compiled(optimizer):
    net = small_net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer, loss, metrics=["accuracy"])
    return net


@pytest.mark.slow
def test_fit_learns_and_a_file_keeps_all_that_was_counted(digits, tmp_path):
    train, test = digits
    images, labels = train.images.reshape(-1, 64), train.labels
    net = compiled(LossScaleOptimizer(keras.optimizers.Adam(0.01), RULE))
    net.fit(np.full_like(images[:32], np.inf), labels[:32], verbose=0)
    net.fit(images, labels, epochs=4, batch_size=32, verbose=0)
    optimizer = net.optimizer
    assert optimizer.skipped_steps == 1
    assert optimizer.loss_scale == RULE.maximum
    assert net.evaluate(test.images.reshape(-1, 64), test.labels, verbose=0)[1] > 0.9
    net.save(tmp_path / "net.keras")
    again = keras.models.load_model(tmp_path / "net.keras").optimizer
    assert isinstance(again, LossScaleOptimizer)
    assert again.rule == RULE
    assert (again.loss_scale, again.skipped_steps, int(again.iterations)) == (
        optimizer.loss_scale,
        optimizer.skipped_steps,
        int(optimizer.iterations),
    )


def test_a_checkpoint_keeps_all_that_was_counted(tmp_path):
    training = Training(ours())
    for finite in (True, False, True, False, False):
        training.step(finite)
    path = tf.train.Checkpoint(optimizer=training.optimizer).save(tmp_path / "kept")
    restored = Training(ours())
    tf.train.Checkpoint(optimizer=restored.optimizer).restore(path)
    assert restored.state == training.state


def test_gradients_that_were_not_unscaled_are_refused():
    training = Training(ours())
    with tf.GradientTape() as tape:
        scaled = training.optimizer.get_scaled_loss(training._loss(1.0))
    grads = tape.gradient(scaled, [training.weight.value])
    with pytest.raises(ConfigurationError, match="get_unscaled_gradients before apply_gradients"):
        training.optimizer.apply_gradients(zip(grads, [training.weight], strict=True))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LossScaleOptimizer("sgd"), "must be a Keras optimizer"),
        (lambda: LossScaleOptimizer(ours()), "must not scale the loss, got"),
        (
            lambda: LossScaleOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
            "must not scale the loss, got",
        ),
        (lambda: ours("dyn"), "'dynamic', a number or a LossScale"),
    ],
    ids=["no optimizer", "wrapped by ours", "wrapped by Keras", "no loss scale"],
)
def test_bad_options_are_named(make, said):
    with pytest.raises(ConfigurationError, match=said):
        make()


@pytest.mark.slow
def test_rows_of_an_embedding_are_scaled_like_all_others():
    """Its gradients say rows only."""
    rows, results = np.array([[1, 2, 3], [3, 4, 5]]), []
    for optimizer in (keras.optimizers.SGD(RATE), ours()):
        keras.utils.set_random_seed(0)
        net = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(9, 4)])
        net.compile(optimizer, "mse", jit_compile=False)
        net.fit(rows, np.ones((2, 3, 4)), epochs=3, verbose=0)
        results.append(net.get_weights()[0])
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def test_gradients_too_small_for_float16_are_learned_from():
    """Those of 2⁻³⁰ are 0 in float16 without a scale."""
    learned = []
    for optimizer in (keras.optimizers.SGD(1.0), ours(LossScale(), keras.optimizers.SGD(1.0))):
        weight = keras.Variable(np.zeros((), np.float32))
        optimizer.build([weight])
        with tf.GradientTape() as tape:
            low = tf.cast(weight.value, tf.float16) * 1.0
            loss = tf.cast(low, tf.float32) * 2.0**-30
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, [weight.value]), [weight])
        learned.append(float(weight))
    assert learned == [0.0, -(2.0**-30)]
