"""Losses and optimizers by name compute as those of Keras."""

import keras
import numpy as np
import pytest
from keras import layers

from neural_mp import training
from neural_mp.adaptors.common.simulation import LossChoice
from neural_mp.adaptors.tensorflow.training.trainer import (
    choose_loss_function,
    create_chosen_optimizer,
)
from neural_mp.core.plan import PrecisionPlan
from neural_mp.errors import DataError

LOGITS = np.random.default_rng(0).normal(size=(12, 10)).astype(np.float32)
CLASSES = np.random.default_rng(1).integers(0, 10, 12)


def simulation():
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="head")], name="net")
    plan = PrecisionPlan.from_dict({"net_1/head_1/MatMul": "int8"})
    return training.quantization_aware(net, plan, calibration=[LOGITS[:, :8]])


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_weights_decay_and_scales_do_not(name):
    model = simulation()
    choice = training.OptimizerChoice(name, {"weight_decay": 0.1})
    optimizer = create_chosen_optimizer(model, choice)
    optimizer.learning_rate = 0.5
    scales = {id(scale) for scale in model.scales()}
    for scale in model.scales():  # logarithms relative to calibrated scales, 0 at first
        scale.assign(0 * scale.value + 0.3)
    original = [np.array(v.value) for v in model.trainable_variables]
    optimizer.apply_gradients([(0 * v.value, v) for v in model.trainable_variables])
    assert scales
    for old, variable in zip(original, model.trainable_variables, strict=True):
        factor = 1.0 if id(variable) in scales else 1 - 0.5 * 0.1
        np.testing.assert_allclose(np.array(variable.value), factor * old, rtol=1e-5)


@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("reduction", ["auto", "sum"])
def test_cross_entropy_reads_class_numbers_and_distributions(logits, reduction):
    outputs = LOGITS if logits else np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
    rows = -(LOGITS - np.log(np.exp(LOGITS).sum(1, keepdims=True)))[np.arange(12), CLASSES]
    expected = rows.sum() if reduction == "sum" else rows.mean()
    for name, targets in (
        ("CrossEntropyLoss", CLASSES),
        ("CrossEntropyLoss", CLASSES[:, None]),
        ("CrossEntropyLoss", np.eye(10, dtype=np.float32)[CLASSES]),
        ("SparseCategoricalCrossentropy", CLASSES),
        ("SparseCategoricalCrossentropy", CLASSES[:, None]),
    ):
        loss = choose_loss_function(LossChoice(name, reduction, logits))
        assert float(loss(targets, outputs)) == pytest.approx(expected, rel=1e-4), name


@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("reduction", ["auto", "sum"])
@pytest.mark.parametrize("name", ["BinaryCrossentropy", "MeanSquaredError"])
def test_losses_of_single_outputs_read_columns_and_vectors(name, reduction, logits):
    targets, scores = CLASSES % 2, LOGITS[:, 0]
    outputs = scores if logits else 1 / (1 + np.exp(-scores))
    rows = {
        "BinaryCrossentropy": np.logaddexp(0, scores) - targets * scores,
        "MeanSquaredError": (outputs - targets) ** 2,
    }[name]
    expected = rows.sum() if reduction == "sum" else rows.mean()
    loss = choose_loss_function(LossChoice(name, reduction, logits))
    for shape in ((12,), (12, 1)):
        for theirs in ((12,), (12, 1)):
            actual = loss(targets.reshape(theirs), outputs.reshape(shape))
            assert float(actual) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(DataError, match="one value for each output"):
        loss(np.zeros((12, 10)), outputs.reshape(12, 1))
