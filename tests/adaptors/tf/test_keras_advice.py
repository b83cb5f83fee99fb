"""Advice on a Keras model: the layers that 16 bits break are found, and no others."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_dangers import batches, digits_net
from keras_nets import compile_briefly

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.errors import (
    ConfigurationError,
    DataError,
    NeuralMPError,
    TrainingError,
    UnknownFrameworkError,
    UnknownOperatorError,
)
from neural_mp.testing import TrainingContract
from neural_mp.training import LossScaleOptimizer, advise, apply_plan, set_policy

LOSS = "sparse_categorical_crossentropy"


@pytest.fixture(autouse=True)
def _float32_again():
    yield
    set_policy("float32")


@pytest.fixture(scope="module")
def data(digits):
    return batches(digits[0])


class TestKerasTraining(TrainingContract):
    framework = "tensorflow"
    overflowing = "energy"
    loss = LOSS

    @pytest.fixture
    def model(self):
        return digits_net(dangerous=True)

    @pytest.fixture(scope="class")
    @classmethod
    def batch(cls, digits):
        return batches(digits[0])[0]


def state_of(model):
    values = [np.array(variable) for variable in model.variables]
    return values, {layer.name: layer.dtype_policy.name for layer in model.layers}


def last_loss(model, data, precision, epochs=3):
    """The loss after some epochs on a part of the data."""
    data = data[:10]
    optimizer = keras.optimizers.Adam(1e-3)
    scaled = LossScaleOptimizer(optimizer) if precision == "fp16" else optimizer
    compile_briefly(model, scaled, LOSS)
    images = np.concatenate([inputs for inputs, _ in data])
    labels = np.concatenate([targets for _, targets in data])
    keras.utils.set_random_seed(1)
    return model.fit(images, labels, batch_size=64, epochs=epochs, verbose=0).history["loss"][-1]


@pytest.fixture(scope="module")
def wanted(data):
    """The loss of a training in FP32."""
    return last_loss(digits_net(dangerous=True), data, "fp32")


@pytest.fixture(scope="module")
def found(data):
    """Advice on the net with both dangers in FP16."""
    return advise(digits_net(dangerous=True), data, LOSS, "fp16", steps=20)


@pytest.mark.slow
def test_both_dangers_are_found_in_fp16_and_the_training_is_saved(data, wanted, found):
    assert set(found.keep) == {"energy", "offset", "softmax"}
    reasons = {name: layer.reason for name, layer in found.layers.items()}
    assert "turns float16 inputs of at most 0.4" in reasons["energy"]
    assert reasons["energy"].endswith("into Inf")
    assert "changes the gradients by" in reasons["offset"]
    assert reasons["softmax"] == "computes outputs of the model, which stay in float32"
    everything = PrecisionPlan.from_dict(dict.fromkeys(found.plan, "fp16"))
    broken = apply_plan(digits_net(dangerous=True), everything)
    assert math.isnan(last_loss(broken, data, "fp16", epochs=1))
    advised = last_loss(apply_plan(digits_net(dangerous=True), found), data, "fp16")
    assert 0.8 * wanted < advised < 1.05 * wanted  # chance may make it a little better, too


@pytest.mark.slow
def test_bf16_has_the_range_but_not_the_digits(data, wanted):
    advice = advise(digits_net(dangerous=True), data, LOSS, "bf16", steps=20)
    assert {"offset", "softmax"} <= set(advice.keep)
    assert "energy" not in advice.keep
    assert advice.noise <= 0.01
    advised = last_loss(apply_plan(digits_net(dangerous=True), advice.plan), data, "bf16")
    assert 0.8 * wanted < advised < 1.05 * wanted  # chance may make it a little better, too


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_healthy_net_keeps_its_outputs_only_and_costs_little(data, precision):
    model = digits_net(dangerous=False)
    advice = advise(model, data, LOSS, precision, steps=20)
    assert advice.keep == ("softmax",)
    points = 11
    assert advice.passes == 20 + 2 * points
    assert advice.plan["conv1"].precision is Precision(precision)
    assert advice.plan["softmax"].precision is Precision.FP32


@pytest.mark.slow
def test_the_model_is_left_as_it_was(data):
    model = digits_net(dangerous=True)
    model.compile("adam", LOSS)
    values, policies = state_of(model)
    steps = int(model.optimizer.iterations)
    advise(model, data, precision="fp16", steps=4)
    current, same_policies = state_of(model)
    for previous, value in zip(values, current, strict=True):
        np.testing.assert_array_equal(previous, value)
    assert same_policies == policies
    assert int(model.optimizer.iterations) == steps
    assert not any("call" in vars(layer) for layer in model.layers)


def test_what_dropout_drops_is_no_noise(data):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 1))
    x = layers.Dense(64, "relu", name="fc")(layers.Flatten(name="flat")(inputs))
    x = layers.Dropout(0.5, name="drop")(x)
    model = keras.Model(inputs, layers.Dense(10, "softmax", name="out")(x))
    assert advise(model, data, LOSS, "bf16", steps=5).keep == ("out",)
    assert model.get_layer("drop").rate == 0.5


class Residual(keras.Model):
    """Adds with plain `+`, which TensorFlow refuses for two types of numbers."""

    def __init__(self):
        super().__init__()
        self.flat = layers.Flatten(name="flat")
        self.first = layers.Dense(32, "relu", name="first")
        self.second = layers.Dense(32, "relu", name="second")
        self.out = layers.Dense(10, "softmax", name="out")

    def call(self, x):
        x = self.first(self.flat(x))
        return self.out(x + self.second(x))


@pytest.mark.slow
def test_a_model_whose_own_code_adds_can_be_advised_on(data):
    keras.utils.set_random_seed(0)
    advice = advise(Residual(), data, LOSS, "bf16", steps=3, limit=1e-9)
    assert set(advice.layers) == {"flat", "first", "second", "out"}
    assert "out" in advice.keep
    assert len(advice.keep) > 1


@pytest.mark.slow
def test_a_layer_with_a_dtype_of_its_own_keeps_it(monkeypatch, data):
    monkeypatch.setenv("FORCE_BF16", "1")
    set_policy("mixed_bfloat16", keep=("fc1", "softmax"))
    advice = advise(digits_net(dangerous=False), data, LOSS, "bf16", steps=2)
    assert advice.keep == ("fc1", "softmax")
    assert advice.layers["fc1"].reason == "has its own dtype, float32"


@pytest.mark.slow
def test_data_that_end_are_begun_again(data):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 1))
    x = layers.Dense(10, name="logits")(layers.Flatten(name="flat")(inputs))
    model = keras.Model(inputs, layers.Activation("softmax", name="softmax")(x))
    assert advise(model, data[:1], LOSS, "bf16", steps=3).keep == ("softmax",)
    assert advise(model, iter(data[:2]), LOSS, steps=3).keep == ("softmax",)

    def for_ever():
        while True:
            yield data[0]

    assert advise(model, for_ever(), LOSS, steps=3).keep == ("softmax",)


def test_a_training_step_is_traced_once(data):
    traced = []

    class Traced(layers.Layer):
        def call(self, x):
            traced.append(not tf.executing_eagerly())
            return x

    inputs = keras.Input((8, 8, 1))
    x = Traced(name="traced")(layers.Flatten(name="flat")(inputs))
    model = keras.Model(inputs, layers.Dense(10, "softmax", name="out")(x))
    traced.clear()  # Keras calls layers of a new model without numbers
    advise(model, data, LOSS, "bf16", steps=2)
    assert traced.count(True) == 1


def test_what_breaks_in_float32_is_said_to(data):
    class Root(layers.Layer):
        def call(self, x):
            return keras.ops.sqrt(x - 1000.0)

    inputs = keras.Input((8, 8, 1))
    x = Root(name="root")(layers.Flatten()(inputs))
    model = keras.Model(inputs, layers.Dense(10, "softmax")(x))
    with pytest.raises(TrainingError, match=r"be finite in float32.*'root' \(Root\) turns float32"):
        advise(model, data, LOSS, "bf16")


def vector_loss(targets, outputs):
    return keras.losses.sparse_categorical_crossentropy(targets, outputs)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"model": 3}, UnknownFrameworkError, "must be a Keras model, a torch module, .*got 3"),
        ({"model": keras.Model}, UnknownFrameworkError, "class Model; give an instance"),
        ({"loss": vector_loss}, ConfigurationError, r"array of shape \(64,\); take its mean"),
        ({"loss": None}, ConfigurationError, "is not compiled; pass e.g. loss="),
        (
            {"loss": "sparse_categorical_crossentropie"},
            ConfigurationError,
            "did you mean 'sparse_categorical_crossentropy'",
        ),
        ({"precision": "bf15"}, NeuralMPError, "did you mean 'bf16'"),
        ({"precision": "int8"}, ConfigurationError, "precision must be bf16 or fp16"),
        ({"steps": -1}, ConfigurationError, "steps must be a whole number"),
        ({"limit": 0}, ConfigurationError, "limit must be a finite number above 0"),
        ({"batches": []}, DataError, "batches must yield at least one batch"),
        ({"batches": iter([])}, DataError, "batches must yield at least one batch"),
        ({"batches": 3}, DataError, "batches must be a dataloader"),
        ({"batches": [np.zeros((4, 8, 8, 1), np.float32)]}, DataError, "without targets"),
        (
            {"batches": [(np.zeros((4, 3), np.float32), np.zeros(4))]},
            DataError,
            "does not accept the inputs of the batch",
        ),
        ({"optimizer": "adamm"}, ConfigurationError, "optimizer must be a Keras optimizer"),
    ],
)
def test_bad_input_is_one_error_that_names_it(data, change, error, said):
    arguments = {"model": digits_net(False), "batches": data, "loss": LOSS, "steps": 2} | change
    with pytest.raises(error, match=said):
        advise(**arguments)


@pytest.mark.slow
def test_a_plan_of_a_file_is_put_on_a_compiled_model(data, found, tmp_path):
    found.save_plan(tmp_path / "plan.yaml")
    model = digits_net(dangerous=True)
    compile_briefly(model, keras.optimizers.Adam(1e-3), LOSS)
    model.fit(*data[0], verbose=0)
    assert model.train_function is not None
    assert apply_plan(model, tmp_path / "plan.yaml") is model
    assert model.get_layer("conv1").compute_dtype == "float16"
    assert model.get_layer("energy").compute_dtype == "float32"
    assert isinstance(model.optimizer, LossScaleOptimizer)
    losses = [model.fit(*data[1], verbose=0).history["loss"][0] for _ in range(5)]
    assert losses[-1] < losses[0]
    assert int(model.optimizer.inner_optimizer.iterations) > 1  # it went on from where it was
    model.save(tmp_path / "net.keras")
    again = keras.saving.load_model(tmp_path / "net.keras")
    np.testing.assert_array_equal(
        again.predict(data[0][0], verbose=0), model.predict(data[0][0], verbose=0)
    )


def test_a_plan_names_layers_within_layers(data):
    inputs = keras.Input((4, 8))
    attended = layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(1, name="out")(attended))
    apply_plan(model, PrecisionPlan.from_dict({"attention": "bf16", "attention/query": "fp32"}))
    inner = model._flatten_layers()  # Keras numbers those that have no name of their own
    dtypes = {layer.name.rstrip("_0123456789"): layer.compute_dtype for layer in inner}
    assert (dtypes["query"], dtypes["key"], dtypes["softmax"]) == (
        "float32",
        "bfloat16",
        "bfloat16",
    )
    assert dtypes["out"] == "float32"


@pytest.mark.parametrize(
    ("plan", "error", "said"),
    [
        ({"conv": "bf16"}, UnknownOperatorError, "'conv', .*did you mean 'conv"),
        ({"conv1": "int8"}, ConfigurationError, "got int8 for 'conv1'"),
        ({"conv1": "bf16", "conv2": "fp16"}, ConfigurationError, "got both bf16 and fp16"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan, error, said):
    model = digits_net(False)
    with pytest.raises(error, match=said):
        apply_plan(model, PrecisionPlan.from_dict(plan))
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}


def test_a_plan_is_a_plan_or_a_file():
    with pytest.raises(ConfigurationError, match="plan must be an Advice"):
        apply_plan(digits_net(False), {"conv1": "bf16"})


def test_a_plan_fits_a_model_whose_layers_keras_has_numbered_anew():
    def unnamed_net():
        convolutions = [layers.Conv2D(4, 3), layers.ReLU(), layers.Conv2D(4, 3), layers.ReLU()]
        inner = keras.Sequential(convolutions)
        dense = [layers.Flatten(), layers.Dense(8), layers.ReLU(), layers.Dense(10)]
        return keras.Sequential([keras.Input((8, 8, 1)), inner, *dense])

    rng = np.random.default_rng(0)
    batch = rng.random((4, 8, 8, 1), dtype=np.float32), rng.integers(0, 10, 4)
    first, second = unnamed_net(), unnamed_net()
    advice = advise(first, [batch], LOSS, steps=1, progress=False)
    by_turns = {name: ("bf16", "fp32")[position % 2] for position, name in enumerate(advice.layers)}
    plan = PrecisionPlan.from_dict(by_turns)
    policies = [
        [layer.dtype_policy.name for layer in apply_plan(model, plan)._flatten_layers()]
        for model in (first, second)
    ]
    assert policies[0] == policies[1]
    assert {"mixed_bfloat16", "float32"} == set(policies[0])


def test_names_that_fit_no_position_are_refused():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    with pytest.raises(UnknownOperatorError, match="dense_9871"):
        apply_plan(model, PrecisionPlan.from_dict({"dense_9871": "bf16"}))
