"""Training that learns nothing any more is stopped, and the layer named."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_dangers import batches, digits_net

from neural_mp.core.plan import PrecisionPlan
from neural_mp.errors import ConfigurationError, DataError, TrainingError
from neural_mp.training import LossScaleOptimizer, Watch, apply_plan, first_nonfinite

LOSS = "sparse_categorical_crossentropy"
LOW = ("conv1", "conv2", "flat", "energy", "fc1", "offset", "norm", "fc2", "logits")


@pytest.fixture(scope="module")
def data(digits):
    return batches(digits[0])


def broken(optimizer, **options):
    plan = PrecisionPlan.from_dict(dict.fromkeys(LOW, "fp16"))
    model = apply_plan(digits_net(dangerous=True), plan)
    options = {"jit_compile": False, "auto_scale_loss": False} | options
    model.compile(optimizer, LOSS, **options)
    return model


def fit(model, data, watch, **options):
    images = np.concatenate([inputs for inputs, _ in data])
    labels = np.concatenate([targets for _, targets in data])
    options = {"batch_size": 64, "epochs": 3, "verbose": 0} | options
    # Otherwise, the first step makes its variables, and TensorFlow traces the step twice.
    model.optimizer.build(model.trainable_variables)
    return model.fit(images, labels, callbacks=[watch], **options)


@pytest.mark.slow
@pytest.mark.parametrize("around", [LossScaleOptimizer, keras.optimizers.LossScaleOptimizer, None])
def test_it_stops_within_its_patience_and_names_the_layer(data, around):
    inner = keras.optimizers.Adam(1e-3)
    model = broken(inner if around is None else around(inner))
    model.make_train_function()
    plain = model.train_function
    watch = Watch(patience=7)
    with pytest.raises(TrainingError, match=r"^7 steps in a row .*'energy' \(Energy\) turns") as e:
        fit(model, data, watch)
    assert watch.finding.layer == "energy"
    assert "keep=('energy',)" in str(e.value)
    assert model.train_function is plain
    if around is None:
        assert int(inner.iterations) == 7  # every step ruined weights
    else:
        assert int(inner.iterations) == 0
        assert all(np.isfinite(weight).all() for weight in model.get_weights())


@pytest.mark.slow
def test_steps_that_keras_takes_together_are_counted_one_by_one(data):
    model = broken(LossScaleOptimizer(keras.optimizers.SGD()), steps_per_execution=5)
    with pytest.raises(TrainingError, match="^10 steps in a row"):
        fit(model, data, Watch(patience=7))


@pytest.mark.slow
def test_an_epoch_that_ends_is_waited_for_and_a_last_one_is_not(data):
    model = broken(LossScaleOptimizer(keras.optimizers.SGD()))
    with pytest.raises(TrainingError, match=r"^4 steps in a row .*'energy'"):
        fit(model, data[:3], Watch(patience=3))
    model = broken(LossScaleOptimizer(keras.optimizers.SGD()))
    with pytest.raises(TrainingError, match=r"^3 steps in a row .*scale down to 4.1e\+03$"):
        fit(model, data[:3], Watch(patience=3), epochs=1)
    model = broken(LossScaleOptimizer(keras.optimizers.SGD()))
    with pytest.raises(TrainingError, match=r"^3 steps in a row .*'energy'"):
        fit(model, data[:3], Watch(patience=3, sample=data[5]), epochs=1)


@pytest.mark.slow
def test_a_training_that_learns_is_left_alone(data):
    model = digits_net(dangerous=False)
    model.compile("adam", LOSS, jit_compile=False)
    model.make_train_function()
    plain = model.train_function
    watch = Watch(patience=2)
    losses = fit(model, data, watch).history["loss"]
    assert losses[-1] < losses[0]
    assert watch.finding is None
    assert model.train_function is plain


@pytest.mark.slow
def test_one_bad_batch_now_and_then_is_no_reason_to_stop(data):
    spoiled = [(x * np.nan if i % 3 == 0 else x, y) for i, (x, y) in enumerate(data)]
    model = digits_net(dangerous=False)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, LOSS, jit_compile=False)
    fit(model, spoiled, Watch(patience=2), shuffle=False, epochs=1)
    assert optimizer.skipped_steps == len(data[::3])


@pytest.mark.slow
def test_bad_data_are_distinguished_from_bad_layers(data):
    model = digits_net(dangerous=False)
    model.compile(LossScaleOptimizer(keras.optimizers.SGD()), LOSS, jit_compile=False)
    spoiled = [(x * np.nan, y) for x, y in data]
    with pytest.raises(TrainingError, match="The batch contains NaN"):
        fit(model, spoiled, Watch(patience=3))


@pytest.mark.parametrize("patience", [0, -1, 2.5, True, "20"])
def test_patience_is_a_number_of_steps(patience):
    with pytest.raises(ConfigurationError, match="patience must be a whole number from 1"):
        Watch(patience)


def in_fp16(model):
    names = [layer.name for layer in model.layers[1:-1]]
    return apply_plan(model, PrecisionPlan.from_dict(dict.fromkeys(names, "fp16")))


def test_a_loop_of_ones_own_can_ask_for_the_layer(data):
    model = in_fp16(digits_net(dangerous=True))
    original = model.get_weights()
    cause = first_nonfinite(model, data[0], LOSS)
    assert (cause.layer, cause.keep) == ("energy", True)
    assert first_nonfinite(model, data[0][0]).layer == "energy"
    assert first_nonfinite(in_fp16(digits_net(False)), data[0], LOSS) is None
    for value, same in zip(original, model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, same)


def test_inputs_beyond_the_range_are_distinguished_from_layers_that_overflow(data):
    model = in_fp16(digits_net(dangerous=False))
    cause = first_nonfinite(model, (data[0][0] * 100_000, data[0][1]), LOSS)
    assert cause.layer == "conv1"
    assert "reads values of up to 1e+05, which overflow float16" in cause.message


def test_weights_that_are_ruined_already_are_named(data):
    model = digits_net(dangerous=False)
    kernel = model.get_layer("fc1").kernel
    kernel.assign(kernel * np.nan)
    cause = first_nonfinite(model, data[0], LOSS)
    assert cause.message == "the weights of 'fc1' (Dense) contain NaN"


def test_the_layer_that_ruins_gradients_is_named(data):
    class Root(layers.Layer):
        def call(self, x):
            return x + tf.sqrt(tf.reduce_sum(x - x, -1, keepdims=True))

    inputs = keras.Input((8, 8, 1))
    x = Root(name="root")(layers.Dense(10, name="logits")(layers.Flatten()(inputs)))
    model = keras.Model(inputs, layers.Softmax()(x))
    cause = first_nonfinite(model, data[0], LOSS)
    assert cause.layer == "root"
    assert cause.message.startswith("backwards, 'root' (Root) turns float32 gradients")


def test_a_batch_has_at_most_three_parts(data):
    with pytest.raises(DataError, match=r"inputs, targets or|got 4 items"):
        first_nonfinite(digits_net(False), (1, 2, 3, 4), LOSS)


class Interrupt(keras.callbacks.Callback):
    """Ends a training as Ctrl+C does."""

    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


@pytest.mark.slow
def test_a_training_that_was_interrupted_can_go_on(data):
    model = digits_net(dangerous=False)
    model.compile("adam", LOSS, jit_compile=False)
    model.make_train_function()
    plain = model.train_function
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model.fit(*data[0], verbose=0, callbacks=[Watch(), Interrupt()])
    fit(model, data, Watch(), epochs=1)
    assert model.train_function is plain


class OwnStep(keras.Model):
    """A model that computes its loss in a train step of its own."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def call(self, x):
        return self.net(x)

    def train_step(self, batch):
        images, labels = batch
        with tf.GradientTape() as tape:
            chances = self.net(images, training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, chances))
        self.optimizer.apply(
            tape.gradient(loss, self.net.trainable_variables), self.net.trainable_variables
        )
        return {"loss": loss}


@pytest.mark.slow
def test_a_train_step_of_ones_own_is_watched(data):
    model = OwnStep(in_fp16(digits_net(dangerous=True)))
    model.compile("sgd", jit_compile=False)
    with pytest.raises(TrainingError, match=r"^2 steps in a row .*'energy' \(Energy\) turns"):
        fit(model, data, Watch(patience=2))


class OnlyParts(OwnStep):
    """A model that is never called as a whole."""

    def call(self, x):
        raise NotImplementedError("call the net in it")


@pytest.mark.slow
def test_a_model_that_cannot_be_called_is_stopped_all_the_same(data):
    model = OnlyParts(in_fp16(digits_net(dangerous=True)))
    model.compile("sgd", jit_compile=False)
    with pytest.raises(TrainingError, match=r"^2 steps in a row .*layer cannot be found: .*call"):
        fit(model, data, Watch(patience=2))


class TwoLosses(keras.Model):
    """A model that trains two nets with optimizers of its own, and logs two losses."""

    def __init__(self, optimizers, logged=("d", "g"), bad="d"):
        super().__init__()
        self.nets = {name: keras.Sequential([layers.Dense(1)]) for name in ("d", "g")}
        self.optimizers = dict(zip(self.nets, optimizers, strict=True))
        self.logged, self.bad = logged, bad

    def call(self, x):
        return self.nets["d"](x) + self.nets["g"](x)

    def train_step(self, x):
        losses = {}
        for name, net in self.nets.items():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(net(x))
                loss = tf.sqrt(-tf.square(loss) - 1.0) if name == self.bad else loss
                scaled = self.optimizers[name].scale_loss(loss)
            gradients = tape.gradient(scaled, net.trainable_variables)
            self.optimizers[name].apply_gradients(
                zip(gradients, net.trainable_variables, strict=True)
            )
            losses[name] = loss
        return {name: losses[name] for name in self.logged} or {"note": tf.constant("no number")}


def scaled(kind):
    return kind(keras.optimizers.SGD(1e-3))


def plain(_):
    return keras.optimizers.SGD(1e-3)


def watched(model, **options):
    model.compile(run_eagerly=True)
    rows = np.ones((12, 4), np.float32)
    return model.fit(rows, batch_size=1, verbose=0, callbacks=[Watch(patience=3)], **options)


KINDS = [LossScaleOptimizer, keras.optimizers.LossScaleOptimizer]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", ["d", "g"])
def test_every_optimizer_that_scales_the_loss_is_watched(kind, bad):
    model = TwoLosses([scaled(kind), scaled(kind)], bad=bad)
    with pytest.raises(TrainingError, match=r"^3 steps in a row .*'optimizers' were not finite"):
        watched(model)


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["d", "g"])
def test_every_logged_value_is_watched(bad):
    with pytest.raises(TrainingError, match=f"^3 steps in a row .* value '{bad}' is not finite"):
        watched(TwoLosses([plain(0), plain(0)], bad=bad))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_makes_no_steps_stops_no_training(kind):
    model = TwoLosses([scaled(kind), scaled(kind)], bad=None)
    model.spare = scaled(kind)
    model.spare.build(model.nets["d"].trainable_variables)
    watched(model)


@pytest.mark.slow
def test_a_training_without_anything_to_watch_is_warned_about(caplog):
    watched(TwoLosses([plain(0), plain(0)], logged=(), bad=None))
    (record,) = [record for record in caplog.records if "nothing to watch" in record.message]
    assert "train_step must return the loss" in record.message
    caplog.clear()
    watched(TwoLosses([plain(0), plain(0)], bad=None))
    assert "nothing to watch" not in caplog.text
