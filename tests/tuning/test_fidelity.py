"""Without a metric, the outputs are compared with those of FP32 on calibration samples."""

import math

import numpy as np
import pytest

from neural_mp import MixedPrecision
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.tuning import tuner
from neural_mp.tuning.sqnr import mean_nsr, output_sqnr_db


@pytest.fixture
def converter(net, digits):
    made = MixedPrecision()
    made.model, made.precisions = net, "int8"
    made.calib_dataloader = digits[0].loader(50)
    return made


def test_the_report_holds_the_signal_to_noise_ratio_on_calibration_samples(converter, net, digits):
    import torch

    result = converter()
    assert result.met is None
    images = digits[0].images[: converter.sampling_size]
    with torch.no_grad():
        exact = net(torch.from_numpy(images)).numpy().astype(np.float64)
    noise = [
        np.square(result(images[part]) - exact[part]).mean() / np.square(exact[part]).mean()
        for part in (slice(0, 50), slice(50, 100))
    ]
    assert result.report.output_sqnr_db == pytest.approx(-10 * math.log10(np.mean(noise)), abs=0.05)
    assert result.report.output_sqnr_db > 25
    assert not any("SQNR" in warning for warning in result.report.warnings)


def test_outputs_that_differ_much_come_with_a_warning(converter, monkeypatch):
    monkeypatch.setattr(tuner, "MIN_SQNR_DB", 100.0)
    result = converter()
    (words,) = [w for w in result.report.warnings if "SQNR" in w]
    assert f"{result.report.output_sqnr_db:.1f} dB" in words
    assert "set a metric" in words


def test_a_model_against_itself_has_no_noise(net, digits):
    adaptor = PyTorchAdaptor()
    images = digits[1].images[:10]
    model = LoadedModel(adaptor, adaptor.load(net, example=images))
    assert output_sqnr_db(model, model, [images]) == math.inf
    assert output_sqnr_db(model, model, []) is None


def test_outputs_that_are_no_numbers_are_as_bad_as_can_be():
    reference = [np.ones(3, np.float32)]
    assert mean_nsr(reference, [np.array([1, np.nan, 1], np.float32)]) == 1e9
    assert mean_nsr(reference, [np.full(3, 1.1, np.float32)]) == pytest.approx(0.01, rel=1e-3)
