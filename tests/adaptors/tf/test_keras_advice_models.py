"""Advice on Keras models of many kinds: it is right, the model stays as it was, errors say why."""

import operator
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from neural_mp.core.plan import PrecisionPlan
from neural_mp.errors import (
    ConfigurationError,
    DataError,
    TrainingError,
    UnknownOperatorError,
)
from neural_mp.training import advise, apply_plan, first_nonfinite, set_policy


@pytest.fixture(autouse=True)
def _float32_again(monkeypatch):
    monkeypatch.setenv("FORCE_FP16", "1")
    monkeypatch.setenv("FORCE_BF16", "1")
    keras.utils.set_random_seed(0)
    yield
    set_policy("float32")


def images(digits):
    return digits[0].images.reshape(-1, 64)[:32].astype("float32")


@pytest.fixture
def batch(digits):
    """Rows of pixels, and the digits as numbers."""
    return images(digits), digits[0].labels[:32, None].astype("float32")


def two_layers(**options):
    net = keras.Sequential([keras.Input((64,)), layers.Dense(8, name="first"), layers.Dense(1)])
    # XLA compiles for longer than the few steps take.
    net.compile(**({"optimizer": "adam", "loss": "mse", "jit_compile": False} | options))
    return net


def values_of(model):
    return [np.array(value) for value in (*model.variables, *model.metrics_variables)]


def assert_untouched(model, original):
    for value, same in zip(original, values_of(model), strict=True):
        np.testing.assert_array_equal(value, same)


@pytest.mark.slow
def test_metrics_stay_what_they_were(batch):
    inputs = keras.Input((64,))
    outputs = [layers.Dense(1, name="a")(inputs), layers.Dense(1, name="b")(inputs)]
    model = keras.Model(inputs, outputs)
    model.compile("adam", ["mse", "mae"], jit_compile=False)
    pairs = [(batch[0], [batch[1], batch[1]])]
    advise(model, pairs, steps=1)
    assert not any(np.any(variable) for variable in model.metrics_variables)
    model.fit(*pairs[0], verbose=0)
    original = values_of(model)
    assert len(original) > len(model.variables)
    advise(model, pairs, steps=2)
    first_nonfinite(model, pairs[0])
    assert_untouched(model, original)


@pytest.mark.slow
def test_recurrent_states_and_seeds_stay_what_they_were(batch):
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(32, 8, 8)),
            layers.LSTM(4, stateful=True, dropout=0.3),
            layers.Dense(1, name="out"),
        ]
    )
    model.compile("adam", "mse", jit_compile=False)
    rows = (batch[0].reshape(-1, 8, 8), batch[1])
    model.fit(*rows, batch_size=32, verbose=0)
    original = values_of(model)
    assert advise(model, [rows], steps=2).keep == ("out",)
    assert first_nonfinite(model, rows) is None
    assert_untouched(model, original)


@pytest.mark.slow
def test_words_are_no_layers_in_float32(batch):
    vectorizer = layers.TextVectorization(vocabulary=["one", "two"], output_sequence_length=4)
    model = keras.Sequential(
        [
            keras.Input((), dtype="string"),
            vectorizer,
            layers.Embedding(4, 4, name="embedding"),
            layers.Flatten(name="flat"),
            layers.Dense(1, name="out"),
        ]
    )
    model.compile("adam", "mse", jit_compile=False)
    pairs = [(tf.constant(["one two", "two"]), np.ones((2, 1), np.float32))]
    advice = advise(model, pairs, steps=2)
    assert advice.keep == ("out",)
    assert first_nonfinite(model, pairs[0]) is None
    apply_plan(model, advice)
    assert np.isfinite(model.fit(*pairs[0], verbose=0).history["loss"][0])


class Penalty(layers.Layer):
    """Adds the mean square of its inputs to the loss."""

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("loss", [None, "mse"])
def test_layers_that_add_to_the_loss_stay_in_float32(batch, loss):
    inputs = keras.Input((64,))
    x = Penalty(name="penalty")(layers.Dense(8, name="first")(inputs))
    x = layers.Dense(8, activity_regularizer="l2", name="regularized")(x)
    model = keras.Model(inputs, layers.Dense(1, name="out")(x))
    model.compile("adam", "mse", jit_compile=False)
    advice = advise(model, [batch], loss, steps=1)
    assert advice.keep == ("penalty", "regularized", "out")
    assert advice.layers["penalty"].reason == "adds to the loss, which stays in float32"
    apply_plan(model, advice)
    assert np.isfinite(model.fit(*batch, verbose=0).history["loss"][0])


def test_outputs_that_go_through_ops_are_in_float32(batch):
    inputs = keras.Input((64,))
    x = layers.Dense(10, name="logits")(layers.Dense(8, name="first")(inputs))
    model = keras.Model(inputs, keras.ops.softmax(x))
    advice = advise(model, [batch], "sparse_categorical_crossentropy", steps=1)
    assert advice.keep == ("logits",)
    assert apply_plan(model, advice)(batch[0]).dtype == "float32"


class Plain(keras.Model):
    """A model of its own class, which takes the loss into its own hands."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(8, name="first")
        self.out = layers.Dense(1, name="out")
        self.seen = set()

    def call(self, x):
        self.seen.add(x.dtype.name)
        return self.out(self.first(x))


class OldLoss(Plain):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return keras.ops.mean(keras.ops.square(y - y_pred))


def test_a_loss_of_ones_own_need_not_know_of_training(batch):
    model = OldLoss()
    model.compile("adam")
    assert advise(model, [batch], steps=1).keep == ("out",)


def test_a_mixed_model_is_looked_at_in_float32_and_casts_nothing_under_a_plan(batch):
    set_policy("mixed_float16")
    model = Plain()
    advice = advise(model, [batch], "mse", steps=1, precision="fp16")
    assert model.compute_dtype == "float16"
    model.seen.clear()
    apply_plan(model, advice)(batch[0])
    assert model.seen == {"float32"}
    apply_plan(model, PrecisionPlan.from_dict({"first": "fp32", "out": "fp32"}))
    assert np.isfinite(model(batch[0] * 1e6)).all()


@pytest.mark.parametrize("loss", ["mse", keras.losses.MeanSquaredError(), None])
def test_sample_weights_count_for_every_loss(batch, loss):
    inputs, targets = batch
    weights = np.zeros(len(inputs), np.float32)
    weights[:4] = 1
    spoiled = targets.copy()
    spoiled[4:] = np.inf  # 0 × ∞ is NaN: only weights that are used show
    model = two_layers()
    assert first_nonfinite(model, (inputs, targets, weights), loss) is None
    assert "the loss is nan" in str(first_nonfinite(model, (inputs, spoiled, weights), loss))


class Slower(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule as in many tutorials: it cannot be saved."""

    def __call__(self, step):
        return 0.01 / (1 + keras.ops.cast(step, "float32"))


@pytest.mark.slow
def test_a_schedule_that_cannot_be_saved_is_followed(batch):
    model = two_layers(optimizer=keras.optimizers.Adam(Slower()))
    model.fit(*batch, verbose=0)
    assert advise(model, [batch], steps=2).steps == 2
    assert isinstance(model.optimizer._learning_rate, Slower)


class Unnamed(keras.optimizers.SGD):
    def __init__(self, speed):
        super().__init__(speed)


class NoCall(keras.Model):
    """Like many adversarial nets: only its parts are called."""

    def __init__(self):
        super().__init__()
        self.part = layers.Dense(1)


def own_step():
    model = Plain()
    model.compile("adam")
    return model


def strict():
    return two_layers(loss="categorical_crossentropy")


@pytest.mark.parametrize(
    ("make", "loss", "targets", "error", "said"),
    [
        (own_step, None, 1, ConfigurationError, "compiled loss .*or pass a loss, e.g."),
        (strict, None, 3, ConfigurationError, "the compiled loss of model"),
        (NoCall, "mse", 1, DataError, "does not accept the inputs .*NotImplementedError"),
        (
            lambda: two_layers(optimizer=Unnamed(0.1)),
            None,
            1,
            ConfigurationError,
            "Unnamed cannot be recreated from its config .*optimizer='adam'",
        ),
    ],
)
def test_the_fix_of_a_user_error_is_named(batch, make, loss, targets, error, said):
    with pytest.raises(error, match=said):
        advise(make(), [(batch[0], np.repeat(batch[1], targets, 1))], loss, steps=1)


class Shaken(layers.Layer):
    """Draws numbers that no seed of the model's fixes."""

    def call(self, x):
        return x * tf.random.uniform(tf.shape(x), dtype=x.dtype)


def test_numbers_drawn_at_random_are_not_taken_for_noise_of_16_bits(batch):
    model = keras.Sequential([keras.Input((64,)), Shaken(), layers.Dense(8), layers.Dense(1)])
    with pytest.raises(TrainingError, match="differ by .* draws random numbers"):
        advise(model, [batch], "mse", steps=0)


class Within(Plain):
    """A model with a model in it, whose layers have no path before they are built."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([layers.Dense(64, name="deep")], name="inner")

    def call(self, x):
        return super().call(self.inner(x))


def test_a_plan_for_layers_that_are_not_built_yet_says_to_build_them(batch):
    advice = advise(Within(), [batch], "mse", steps=0)
    model = Within()
    with pytest.raises(UnknownOperatorError, match="'inner/deep'.*call the model on a batch first"):
        apply_plan(model, advice)
    model(batch[0])
    apply_plan(model, advice)
    assert model.inner.layers[0].compute_dtype == "bfloat16"


class Sum(Plain):
    """Adds what a layer in float32 gives, by a plain `+` or by Keras's function."""

    def __init__(self, add):
        super().__init__()
        self.penalty, self.add = Penalty(name="penalty"), add

    def call(self, x):
        x = self.first(x)
        return self.out(self.add(x, self.penalty(x)))


def test_code_that_adds_two_types_is_reported_before_a_plan_breaks_it(batch):
    with pytest.warns(UserWarning, match="combines 16-bit and float32 tensors"):
        advice = advise(Sum(operator.add), [batch], "mse", steps=0)
    assert set(advice.keep) == {"penalty", "out"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        advise(Sum(keras.ops.add), [batch], "mse", steps=0)
