"""PyTorch modules through litert-torch."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from litert_nets import run_litert

from neural_mp import MixedPrecision
from neural_mp.adaptors.litert.adaptor import LiteRtAdaptor
from neural_mp.errors import ModelLoadError
from neural_mp.testing import signal_to_noise

torch = pytest.importorskip("torch")
IMAGES = np.random.default_rng(0).random((16, 1, 8, 8)).astype(np.float32)


def make_net():
    """A small net in training mode."""
    nn = torch.nn
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(288, 10)
    return nn.Sequential(*layers)


def test_without_the_package_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "litert_torch", None)
    with pytest.raises(ModelLoadError, match=r"litert-torch.*pip install.*runtime='openvino'"):
        LiteRtAdaptor().load(make_net(), example=IMAGES)


@pytest.mark.slow
def test_a_module_is_tuned_as_a_file(tmp_path):
    pytest.importorskip("litert_torch")
    net = make_net()
    result = MixedPrecision(
        model=net,
        framework="litert",
        precisions="int8",
        objective="modelsize",
        calib_dataloader=[IMAGES],
    )()
    assert net.training
    with torch.no_grad():
        expected = net.eval()(torch.from_numpy(IMAGES)).numpy()
    assert signal_to_noise(expected, result(IMAGES)) > 25
    result.save(tmp_path / "net.tflite")
    content = (tmp_path / "net.tflite").read_bytes()
    np.testing.assert_array_equal(run_litert(content, IMAGES)[0], result(IMAGES))
