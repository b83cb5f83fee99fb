"""The object a user drives, on OpenVINO models; files and sources."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from nets import small_net
from onnx_nets import as_onnx, graph, op
from ov_nets import run

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.adaptors.openvino.runtime import get_core, ov
from neural_mp.errors import ModelLoadError
from neural_mp.testing import ApiContract, ModelFormContract


class OnOpenVino:
    framework = "openvino"
    native = ov.Model
    convolution = "Convolution"

    @pytest.fixture
    def reference(self, net, digits):
        return run(net, digits[1].images)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
class TestApi(OnOpenVino, ApiContract):
    @pytest.fixture
    def model(self, net):
        return net

    @pytest.fixture
    def hostile_net(self, _taken_in):
        return _taken_in["hostile"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
class TestFile(OnOpenVino, ModelFormContract):
    @pytest.fixture
    def model(self, saved):
        return str(saved)


@pytest.fixture
def quantized(net, digits, plain_machine):
    converter = MixedPrecision()
    converter.hardware = plain_machine
    converter.precisions = "int8"
    converter.calib_dataloader = digits[0].loader()
    converter.model = net
    return converter()


@pytest.mark.slow
def test_a_saved_file_runs_in_plain_openvino(quantized, digits, tmp_path):
    quantized.save(tmp_path / "int8.xml")
    images = digits[1].images
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = get_core().compile_model(tmp_path / "int8.xml", "CPU", settings)
    np.testing.assert_array_equal(compiled(images)[0], quantized(images))


def test_a_saved_folder_is_loaded(quantized, digits, tmp_path):
    quantized.save(tmp_path / "saved")
    loaded = neural_mp.load(tmp_path / "saved")
    images = digits[1].images
    np.testing.assert_array_equal(loaded(images), quantized(images))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "module"])
def test_models_of_other_frameworks_are_read(kind, digits, plain_machine, tmp_path):
    net = small_net().eval()
    onnx.save(as_onnx(net), tmp_path / "net.onnx")
    converter = MixedPrecision()
    converter.framework = "openvino"
    converter.hardware = plain_machine
    converter.precisions = "int8"
    converter.calib_dataloader = digits[0].loader()
    converter.model = net if kind == "module" else str(tmp_path / "net.onnx")
    result = converter()
    assert result.plan.counts()["int8"] >= 7
    images = digits[1].images[:16]
    from torch import from_numpy, no_grad

    with no_grad():
        expected = net(from_numpy(images)).numpy()
    assert np.abs(result(images) - expected).max() < 0.1 * np.abs(expected).max()


@pytest.fixture
def saved(net, tmp_path) -> Path:
    ov.save_model(net, tmp_path / "net.xml", compress_to_fp16=False)
    return tmp_path / "net.xml"


@pytest.mark.parametrize(
    ("found", "put", "said"),
    [
        ('<?xml version="1.0"?>', '<!DOCTYPE n [<!ENTITY e SYSTEM "f">]>', "entities"),
        ('type="Convolution" version="opset1"', 'type="Evil" version="extension"', "library"),
        ('offset="0"', 'offset="99999999"', "weights"),
        ('offset="0"', 'offset="-8"', "weights"),
        ('element_type="f32" shape="16, 1, 3, 3"', 'element_type="f32" shape="9999, 9"', "bytes"),
        ("</net>", "", "XML"),
        ("<net name", "<not name", "XML|must hold a 'net'"),
    ],
)
def test_a_tampered_file_is_refused(saved, found, put, said):
    text = saved.read_text()
    assert found in text
    saved.write_text(text.replace(found, put))
    converter = MixedPrecision()
    converter.model = str(saved)
    with pytest.raises(ModelLoadError, match=said):
        converter()


def test_truncated_weights_are_refused(saved):
    weights = saved.with_suffix(".bin")
    weights.write_bytes(weights.read_bytes()[:100])
    converter = MixedPrecision()
    converter.model = str(saved)
    with pytest.raises(ModelLoadError, match="100 bytes"):
        converter()


def test_a_file_that_would_run_code_is_not_opened(tmp_path):
    (tmp_path / "net.pt").write_bytes(b"\x80\x04.")
    converter = MixedPrecision()
    converter.framework = "openvino"
    converter.model = str(tmp_path / "net.pt")
    with pytest.raises(ModelLoadError, match="load the model in its framework"):
        converter()


@pytest.mark.parametrize("name", ["net.pt2", "net.keras", "net.h5"])
def test_a_file_that_its_framework_must_check_is_transferred(name, tmp_path):
    (tmp_path / name).write_bytes(b"PK")
    converter = MixedPrecision()
    converter.framework = "openvino"
    converter.model = str(tmp_path / name)
    with pytest.raises(ModelLoadError, match="set runtime = 'openvino'"):
        converter()


@pytest.mark.slow
def test_nothing_is_sent_and_nothing_written_into_the_home_directory(saved, tmp_path):
    """OpenVINO's telemetry client is never imported, so that no id is written, no event sent."""
    home = tmp_path / "home"
    home.mkdir()
    onnx.save(graph([op("Relu", "x", "y")], {"x": [1, 3]}, ["y"]), tmp_path / "net.onnx")
    # What the probes of this machine found lies elsewhere: to repeat them takes seconds.
    cache_home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    script = (
        "import sys, socket\n"
        "def refuse(*_): raise AssertionError('a connection was opened')\n"
        "socket.socket.connect = refuse\n"
        "from neural_mp import MixedPrecision\n"
        f"converter = MixedPrecision(); converter.model = {str(saved)!r}\n"
        "converter.precisions = 'fp32'\n"
        "converter()\n"
        "import openvino\n"
        "openvino.convert_model(sys.argv[1])\n"
        "assert not hasattr(sys.modules['openvino_telemetry'], 'Telemetry')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "net.onnx")],
        env={**os.environ, "HOME": str(home), "XDG_CACHE_HOME": cache_home},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not [path for path in home.rglob("*") if path.is_file()]
