"""ONNX models are reconstructed, never trained, and the errors say so."""

import pytest

from neural_mp import MixedPrecision, PrecisionPlan, training
from neural_mp.errors import ConfigurationError, ConversionError

WORDS = r"onnxrt: its weights are reconstructed without labels only; name .* 'adaround'"


def test_a_model_to_train_with_a_plan_is_refused(net):
    with pytest.raises(ConversionError, match=WORDS):
        training.quantization_aware(net, PrecisionPlan())


def test_a_run_that_should_train_is_refused(net, digits, accuracy):
    tuner = MixedPrecision()
    tuner.model = net
    tuner.precisions = "int8"
    tuner.metric = accuracy
    tuner.eval_dataloader = digits[1].loader()
    tuner.train_func = lambda model: None
    with pytest.raises(ConfigurationError, match=WORDS + ".* or remove train_func"):
        tuner()
