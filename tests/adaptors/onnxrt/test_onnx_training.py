"""ONNX models are reconstructed, never trained, and the errors say so."""

import pytest

from neural_mp import MixedPrecision, PrecisionPlan, training
from neural_mp.errors import ConfigurationError, ConversionError

WORDS = r"onnxrt: its weights are reconstructed without labels only; name .* 'adaround'"


def test_a_model_to_train_with_a_plan_is_refused(net):
    with pytest.raises(ConversionError, match=WORDS):
        training.quantization_aware(net, PrecisionPlan())


def test_a_run_that_should_train_is_refused(net, digits, accuracy):
    made = MixedPrecision()
    made.model = net
    made.precisions = "int8"
    made.metric = accuracy
    made.eval_dataloader = digits[1].loader()
    made.train_func = lambda model: None
    with pytest.raises(ConfigurationError, match=WORDS + ".* or remove train_func"):
        made()
