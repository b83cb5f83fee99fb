"""Outputs that calibration keeps are those of a run."""

import numpy as np
import onnx.parser
import pytest

from neural_mp import MixedPrecision
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.core.hardware import detect
from neural_mp.core.observations import KeptOutputs
from neural_mp.tuning import unchecked

_DRAW = np.random.default_rng(0)
_BATCHES = [_DRAW.standard_normal((count, 16), dtype=np.float32) for count in (6, 6, 3)]
_WEIGHTS = [_DRAW.standard_normal((16, 16), dtype=np.float32) / 4 for _ in range(2)]
_BODIES = {
    "samples are independent": "a = MatMul(x, w) b = Relu(a) y = MatMul(b, v) z = Neg(b)",
    "samples depend on each other": (
        "a = MatMul(x, w) b = Softmax <axis = 0> (a) y = MatMul(b, v) z = Neg(b)"
    ),
    "an output is an input": "a = MatMul(x, w) b = Relu(a) y = MatMul(b, v) z = Identity(x)",
}


def _source(body):
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> net (float[batch, 16] x) => '
        f"(float[batch, 16] y, float[batch, 16] z) {{ {body} }}"
    )
    model = onnx.parser.parse_model(text)
    for name, weight in zip("wv", _WEIGHTS, strict=True):
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return model


@pytest.mark.parametrize("body", _BODIES.values(), ids=_BODIES)
def test_the_outputs_of_every_batch_are_those_of_a_run(body):
    adaptor, cache = OnnxRuntimeAdaptor(), KeptOutputs()
    model = adaptor.load(_source(body))
    space = adaptor.space(model, detect())
    observations = adaptor.observe(model, _BATCHES, space, cache)
    assert observations == adaptor.observe(model, _BATCHES, space)
    for batch in _BATCHES:
        expected = adaptor.predict(model, batch)
        cached = cache.get_outputs(batch.copy())
        assert len(cached) == len(expected) == 2
        for output, reference in zip(cached, expected, strict=True):
            np.testing.assert_allclose(output, reference, rtol=1e-5, atol=1e-6)
    assert cache.get_outputs(_BATCHES[0] + 1) is None


def test_large_outputs_are_not_kept():
    adaptor, cache = OnnxRuntimeAdaptor(), KeptOutputs(limit=2 * 6 * 16 * 4 + 1)
    model = adaptor.load(_source(_BODIES["samples are independent"]))
    adaptor.observe(model, _BATCHES, adaptor.space(model, detect()), cache)
    assert [cache.get_outputs(batch) is not None for batch in _BATCHES] == [True, False, False]


def test_the_noise_of_a_plan_is_the_same_with_kept_outputs(monkeypatch):
    ratios = []
    for limit in (KeptOutputs().limit, 0):
        monkeypatch.setattr(unchecked, "KeptOutputs", lambda limit=limit: KeptOutputs(limit))
        tuner = MixedPrecision()
        tuner.model = _source(_BODIES["samples are independent"])
        tuner.calib_dataloader, tuner.cache = _BATCHES, False
        tuner.exit_policy = {"performance_only": True}
        ratios.append(tuner().report.output_sqnr_db)
    assert ratios[0] == pytest.approx(ratios[1], abs=1e-3)
    assert ratios[0] > 20
