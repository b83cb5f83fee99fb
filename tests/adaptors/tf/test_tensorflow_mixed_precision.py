"""The object a user drives, as the README shows it, on TensorFlow models in three forms."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from neural_mp import MixedPrecision, common
from neural_mp.errors import UnsupportedPrecisionError


def as_pb(net, folder):
    function = tf.function(lambda image: net(image, training=False))
    concrete = function.get_concrete_function(tf.TensorSpec([None, 8, 8, 1], name="image"))
    graph = convert_variables_to_constants_v2(concrete).graph.as_graph_def()
    (folder / "net.pb").write_bytes(graph.SerializeToString())
    return str(folder / "net.pb")


def as_saved_model(net, folder):
    net.export(folder / "net", verbose=False)
    return str(folder / "net")


@pytest.fixture(params=["keras", "saved model", "frozen graph"])
def model(request, net, tmp_path):
    if request.param == "keras":
        return net
    return (as_saved_model if request.param == "saved model" else as_pb)(net, tmp_path)


@pytest.fixture
def reference(net, digits):
    return np.asarray(net(digits[1].images, training=False))


@pytest.mark.parametrize("precisions", ["bf16", "int8,bf16", ["int8", "bf16"], "fp16"])
def test_a_model_alone(monkeypatch, model, reference, digits, precisions):
    monkeypatch.setenv("FORCE_BF16", "1")
    monkeypatch.setenv("FORCE_FP16", "1")

    converter = MixedPrecision()
    converter.precisions = precisions
    converter.model = model
    optimized_model = converter()

    lowest = "fp16" if precisions == "fp16" else "bf16"
    assert {config.precision for config in optimized_model.plan.values()} == {lowest}
    assert optimized_model.met is None
    given = optimized_model(digits[1].images)
    assert (given.argmax(1) == reference.argmax(1)).mean() > 0.97
    assert given.dtype == np.float32
    assert isinstance(optimized_model.model, tf.Module)


def test_a_yaml_file(monkeypatch, tmp_path, model, digits):
    monkeypatch.setenv("FORCE_BF16", "1")
    for name, split in zip(("train", "test"), digits, strict=True):
        np.savez(tmp_path / f"{name}.npz", inputs=split.images, labels=split.labels)
    (tmp_path / "conf.yaml").write_text(
        """
model: {name: digits, framework: tensorflow}
mixed_precision: {precisions: "int8,bf16"}
quantization:
  calibration:
    sampling_size: 200
    dataloader: {batch_size: 50, dataset: {numpy: {path: train.npz}}}
evaluation:
  accuracy:
    metric: {topk: 1}
    dataloader: {batch_size: 100, dataset: {numpy: {path: test.npz}}}
tuning:
  accuracy_criterion: {absolute: 0.02, higher_is_better: true}
  exit_policy: {max_trials: 20}
"""
    )
    converter = MixedPrecision("./conf.yaml")
    converter.model = model
    output_model = converter()

    assert output_model.met
    assert output_model.report.target == pytest.approx(output_model.report.baseline_accuracy - 0.02)
    assert output_model.observations.samples == 200
    assert output_model.report.op_counts["Conv2D"] == {"int8": 6}


def test_a_metric_and_data(monkeypatch, model, reference, digits, accuracy):
    monkeypatch.setenv("FORCE_BF16", "1")
    dataset = digits[1]

    converter = MixedPrecision()
    converter.metric = accuracy
    converter.precisions = "bf16"
    converter.eval_dataloader = common.DataLoader(dataset)
    converter.model = model
    output_model = converter()

    assert output_model.met
    report = output_model.report
    expected = (reference.argmax(1) == dataset.labels).mean()
    assert report.baseline_accuracy == pytest.approx(expected)
    assert report.casts == 2
    assert report.evaluations == accuracy.evaluations == 2
    assert report.op_counts["Conv2D"] == {"bf16": 6}


def test_bf16_alone_without_hardware_is_refused(net, plain_machine):
    converter = MixedPrecision()
    converter.hardware = plain_machine
    converter.precisions = "bf16"
    converter.model = net
    with pytest.raises(UnsupportedPrecisionError, match=r"avx512_bf16.*FORCE_BF16=1"):
        converter()


def test_a_tf_dataset_and_an_evaluation_function(net, digits, plain_machine):
    train, test = digits
    dataset = tf.data.Dataset.from_tensor_slices((train.images, train.labels)).batch(64)
    seen = []

    def evaluate(model) -> float:
        seen.append(type(model))
        return float((np.asarray(model(test.images)).argmax(1) == test.labels).mean())

    converter = MixedPrecision()
    converter.hardware = plain_machine
    converter.calib_dataloader = dataset
    converter.eval_func = evaluate
    converter.model = net
    result = converter()
    assert result.met
    assert issubclass(seen[0], keras.Model)
    assert issubclass(seen[1], tf.Module)
    assert set(result.report.op_counts["Conv2D"]) == {"int8"}


def test_one_bad_channel_does_not_cost_the_rest(hostile_net, deep, digits, plain_machine, accuracy):
    """The INT8-hostile net: all-INT8 misses, and yet most of the layers stay in INT8."""
    images = digits[1].images
    np.testing.assert_allclose(
        np.asarray(hostile_net(images)), np.asarray(deep(images)), rtol=1e-2, atol=2e-2
    )
    converter = MixedPrecision()
    converter.hardware = plain_machine
    converter.precisions = "int8"
    converter.metric = accuracy
    converter.calib_dataloader = digits[0].loader()
    converter.eval_dataloader = digits[1].loader()
    converter.model = hostile_net
    result = converter()
    assert result.met
    assert not result.trials[0].met  # all INT8
    kept = [op for op, config in result.plan.items() if config.precision == "int8"]
    assert len(kept) >= 7
